"""Regularisers added from outside: parts of activations dropped at random, and parameters pruned or frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune
from torchvision.ops import drop_block2d, drop_block3d

from hookscope.errors import ModelError, UsageError, check_whole
from hookscope.hooks import Call, HookHandles
from hookscope.interventions.base import (
    Change,
    Intervention,
    ParameterIntervention,
    Site,
    check_number,
    check_takes,
    checked,
)


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """A rate that goes from ``start`` to ``end`` in ``steps`` steps and stays there, as in the paper of DropBlock.

    Any function of the step can take its place.

    Example:
        >>> rate = LinearSchedule(0.0, 0.1, steps=1000)
        >>> rate(0), rate(500), rate(5000)
        (0.0, 0.05, 0.1)
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_whole("steps of a schedule", self.steps)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(1.0, max(0, step) / self.steps)

    def __str__(self) -> str:
        return f"LinearSchedule({self.start:g}, {self.end:g}, steps={self.steps})"


@dataclass(frozen=True)
class _Dropping(Intervention):
    """Active while the layer is in train mode, or always with ``when="always"``.

    Args:
        p: The share that is dropped, 0 to 1; or a function of the training step such as `LinearSchedule`.
        when: ``train`` or ``always``.
    """

    p: float | Callable[[int], float] = 0.1
    when: str = field(default="train", kw_only=True, metadata={"choices": ("train", "always")})

    one_pass = {"when": "always"}  # noqa: RUF012
    neutral = ("p", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.p):
            check_takes(self.p, f"the schedule of {type(self).__name__}", "step")
        else:
            _check_rate(self.p)

    @property
    def rate(self) -> float:
        """The share that is dropped; `at` turns a schedule into a number."""
        if callable(self.p):
            raise UsageError(f"{type(self).__name__} has a schedule", do="call `.at(step)` first")
        return float(self.p)

    def is_active(self, module: nn.Module) -> bool:
        return self.when == "always" or module.training

    def at(self, step: int) -> Self:
        return replace(self, p=_check_rate(self.p(step))) if callable(self.p) else self


def _check_rate(p: float) -> float:
    if not isinstance(p, int | float):
        raise UsageError(f"p={p!r} is not a number", do="give a number from 0 to 1")
    if not 0 <= p <= 1:
        raise UsageError(f"p={p} is not a share", do="give a number from 0 to 1")
    return p


@dataclass(frozen=True)
class DropBlock(_Dropping):
    """Drop whole blocks of each map, and scale the rest so that the expected sum stays the same.

    Uses `torchvision.ops.drop_block2d` and `drop_block3d` with the same random numbers (Ghiasi, Lin and Le 2018,
    arXiv:1810.12890). A block wider than the map is cut to the map's odd width, where torchvision refuses an even one.
    In half precision the dropped values are counted in single precision, because torchvision's count overflows.

    Args:
        p: The share of values that is dropped, 0 to 1; or a function of the training step.
        block_size: Side of a block, an odd number.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> drop = DropBlock(p=0.5, block_size=3, when="always")
        >>> dropped = drop(Call("layer3", "Sequential", 0, None), torch.ones(1, 64, 9, 9))
        >>> dropped.shape, bool((dropped == 0).any())
        (torch.Size([1, 64, 9, 9]), True)
    """

    block_size: int = 7

    word = "dropblock"
    summary = "drop square blocks of the map, of odd size"
    _dimensions: ClassVar[tuple[int, ...]] = (4, 5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.block_size, int) or self.block_size < 1 or self.block_size % 2 == 0:
            raise UsageError(f"block_size={self.block_size}", do="give an odd number, such as 7")

    def change(self, site: Site, part: Tensor) -> Tensor:
        if part.dim() not in self._dimensions or site.axis == 0:
            shapes = " or ".join("(N, C, H, W)" if axes == 4 else "(N, C, T, H, W)" for axes in self._dimensions)
            shape = "x".join(map(str, part.shape))
            raise UsageError(f"{type(self).__name__} at '{site.call.key}' needs a tensor {shapes}", f"got {shape}")
        if not part.numel():
            return part
        maps = part.movedim(site.axis, 1)
        size = min(self.block_size, *maps.shape[2:])
        size -= 1 - size % 2
        drop: Callable[..., Tensor] = drop_block2d if part.dim() == 4 else drop_block3d
        if part.dtype in (torch.float16, torch.bfloat16):  # they cannot count the values of a map
            dropped = maps * drop(torch.ones_like(maps, dtype=torch.float32), self.rate, size).to(part.dtype)
        else:
            dropped = drop(maps, self.rate, size)
        return dropped.movedim(1, site.axis)


@dataclass(frozen=True)
class DropBlock2d(DropBlock):
    """`DropBlock` for maps ``(N, C, H, W)`` only.

    Example:
        >>> DropBlock2d(p=0.1, block_size=7).p
        0.1
    """

    word = "dropblock2d"
    summary = "dropblock for maps (N, C, H, W) only"
    _dimensions: ClassVar[tuple[int, ...]] = (4,)


@dataclass(frozen=True)
class DropBlock3d(DropBlock):
    """`DropBlock` for clips ``(N, C, T, H, W)`` only.

    Example:
        >>> DropBlock3d(p=0.1, block_size=3).block_size
        3
    """

    word = "dropblock3d"
    summary = "dropblock for clips (N, C, T, H, W) only"
    _dimensions: ClassVar[tuple[int, ...]] = (5,)


@dataclass(frozen=True)
class Dropout(_Dropping):
    """Drop single values and scale the rest by ``1 / (1 - p)``, as `torch.nn.functional.dropout` does.

    Srivastava, Hinton, Krizhevsky, Sutskever and Salakhutdinov 2014 (JMLR 15); first described in arXiv:1207.0580.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> dropped = Dropout(0.5, when="always")(Call("fc", "Linear", 0, None), torch.ones(1, 1000))
        >>> sorted(set(dropped.flatten().tolist()))
        [0.0, 2.0]
    """

    word = "dropout"
    summary = "drop single values"

    def change(self, site: Site, part: Tensor) -> Tensor:
        return functional.dropout(part, self.rate, training=True)


@dataclass(frozen=True)
class Dropout2d(_Dropping):
    """Drop whole channels of an image and scale the rest by ``1 / (1 - p)`` (Tompson et al. 2014, arXiv:1411.4280).

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> dropped = Dropout2d(0.5, when="always")(Call("conv", "Conv2d", 0, 0), torch.ones(1, 100, 2, 2))
        >>> all(len(set(channel.flatten().tolist())) == 1 for channel in dropped[0])
        True
    """

    word = "dropout2d"
    summary = "drop whole channels"

    def change(self, site: Site, part: Tensor) -> Tensor:
        batch = part.movedim(site.axis, 1) if site.axis else part[None]
        dropped = torch.feature_dropout(batch, self.rate, True)
        return dropped.movedim(1, site.axis) if site.axis else dropped[0]


@dataclass(frozen=True)
class Prune(ParameterIntervention):
    """Set the smallest weights to 0, by `torch.nn.utils.prune`; they stay 0 in training.

    Magnitude pruning (Han et al. 2015, arXiv:1506.02626); for whole filters Li et al. 2016, arXiv:1608.08710.

    Args:
        amount: The pruned share, 0 to 1.
        dim: None for single values by magnitude; else whole slices along this axis by their norm, 0 for the filters
            of a convolution.
        norm: Order of the norm of slices, above 0; inf for the largest value.

    Raises:
        UsageError: for a share outside 0 to 1, or a norm of 0 or less.

    Example:
        >>> import torch
        >>> from hookscope import intervene
        >>> net = torch.nn.Linear(4, 1, bias=False)
        >>> with torch.no_grad(): _ = net.weight.copy_(torch.tensor([[1.0, -2.0, 3.0, -4.0]]))
        >>> with intervene(net, {"weight": Prune(0.5)}):
        ...     net.weight.tolist()
        [[0.0, -0.0, 3.0, -4.0]]
        >>> net.weight.tolist()
        [[1.0, -2.0, 3.0, -4.0]]
    """

    amount: float = 0.5
    dim: int | None = field(default=None, metadata={"example": "0"})
    norm: float = 2

    word = "prune"
    summary = "set the smallest weights to 0; dim=0: whole filters by norm"

    def __post_init__(self) -> None:
        check_number("amount", self.amount)
        if not 0 <= self.amount <= 1:
            raise UsageError(f"amount={self.amount:g} is not a share", do="give a number from 0 to 1")
        check_number("norm", self.norm)
        if self.norm <= 0:
            raise UsageError(f"norm={self.norm:g}", do="give a number above 0, such as 1 or 2")

    def mask(self, name: str, weight: Tensor) -> Tensor:
        """1 for the weights that stay, 0 for the pruned ones."""
        method: prune.BasePruningMethod = prune.L1Unstructured(float(self.amount))
        if self.dim is not None:
            if weight.dim() < 2 or not -weight.dim() <= self.dim < weight.dim():
                asked, shape = f"no slices along dim={self.dim} of '{name}'", "x".join(map(str, weight.shape))
                raise UsageError(asked, f"it is {shape}", "give an axis of a matrix")
            method = prune.LnStructured(float(self.amount), self.norm, self.dim)
        mask: Tensor = method.compute_mask(weight, torch.ones_like(weight))
        return mask

    def takes(self, parameter: Tensor) -> bool:
        return parameter.dim() > 1

    @contextmanager
    def applied(self, name: str, parameter: nn.Parameter) -> Iterator[None]:
        _check_values(name, parameter)
        mask = self.mask(name, parameter.detach())
        pruned = mask == 0

        def prune_again(*_: object) -> None:  # the momentum of steps before the block would move a weight
            parameter.data.masked_fill_(pruned.to(parameter.device), 0)

        with HookHandles() as handles:
            if parameter.requires_grad:
                handles.tensor(parameter, lambda gradient: gradient * mask)
            handles.every_step_post(prune_again)
            with _swapped(parameter, parameter.detach() * mask):
                yield


@dataclass(frozen=True)
class Freeze(ParameterIntervention):
    """Stop training of the parameter, or of every parameter of a layer: it needs no gradient.

    Example:
        >>> import torch
        >>> from hookscope import intervene
        >>> net = torch.nn.Linear(2, 2)
        >>> with intervene(net, {"bias": Freeze()}):
        ...     net.bias.requires_grad
        False
    """

    word = "freeze"
    summary = "no gradient in training; has no effect on a single pass"
    changes_forward = False

    @contextmanager
    def applied(self, name: str, parameter: nn.Parameter) -> Iterator[None]:
        required = parameter.requires_grad
        parameter.requires_grad_(False)
        try:
            yield
        finally:
            parameter.requires_grad_(required)


def parameter_changed(
    name: str, parameter: nn.Parameter, change: Change | ParameterIntervention
) -> AbstractContextManager[None]:
    """Run the block with ``parameter`` changed; its own values, in its own memory, come back afterwards.

    What a training loop inside the block adds to the changed values is added to the old ones. Pruned values come back
    as they were. Here the channels of an intervention are positions on the first axis of the parameter.
    """
    if isinstance(change, ParameterIntervention):
        return change.applied(name, parameter)
    _check_values(name, parameter)
    return _swapped(parameter, _of_parameter(name, parameter, change))


def _check_values(name: str, parameter: Tensor) -> None:
    if is_lazy(parameter) or parameter.is_meta:
        raise ModelError(f"'{name}' has no values yet", do="run the model once, or build it on a real device")
    if not parameter.is_floating_point():
        raise UsageError(f"'{name}' is {str(parameter.dtype).removeprefix('torch.')}", do="choose a floating-point one")


def _of_parameter(name: str, parameter: Tensor, change: Change) -> Tensor:
    whole = parameter.detach()
    call = Call(name, "Parameter", 0, None)
    with torch.no_grad():
        if not isinstance(change, Intervention):
            changed = checked(change(call, whole.clone()), whole, name)
        elif change.on != "output":
            raise UsageError(f"parameter '{name}' has no {change.on}", do="leave `on` out, or name a layer")
        else:
            changed = change(call, whole if whole.dim() else whole[None], axis=0).reshape(whole.shape)
    return changed.clone()


@contextmanager
def _swapped(parameter: nn.Parameter, changed: Tensor) -> Iterator[None]:
    own, begun = parameter.data, changed.clone()
    counts = not parameter.is_inference()
    try:
        with _unsafe_preserve_version_counter(parameter) if counts else nullcontext():
            if counts:  # so that backward outside the block raises instead of using the swapped values
                torch.autograd.graph.increment_version(parameter)
            _set(parameter, changed)
            yield
    finally:
        trained = parameter.data
        # the model may have been moved inside the block
        own, begun = own.to(trained), begun.to(trained)
        _set(parameter, own)
        unchanged = (trained == begun) | (trained.isnan() & begun.isnan())
        if not bool(unchanged.all()):
            with torch.no_grad():
                added = torch.where(begun == own, trained, own + (trained - begun))
                parameter.copy_(torch.where(unchanged, own, added))


def _set(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.data = values
    torch.clear_autocast_cache()  # it holds copies of parameters in half precision
