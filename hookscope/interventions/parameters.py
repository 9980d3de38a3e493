"""Interventions on parameters, undone when the context is left: prune, freeze, or new values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune

from hookscope.errors import ModelError, UsageError
from hookscope.hooks import Call, HookHandles
from hookscope.interventions.base import Change, Intervention, ParameterIntervention, check_number, checked


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


@contextmanager
def parameter_changed(name: str, parameter: nn.Parameter, change: Change | ParameterIntervention) -> Iterator[None]:
    """Run the block with ``parameter`` changed; its own values, in its own memory, come back afterwards.

    What a training loop inside the block adds to the changed values is added to the old ones. Pruned values come back
    as they were. Here the channels of an intervention are positions on the first axis of the parameter.
    """
    if isinstance(change, ParameterIntervention):
        context = change.applied(name, parameter)
    else:
        _check_values(name, parameter)
        context = _swapped(parameter, _of_parameter(name, parameter, change))
    with context:
        yield


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
    try:
        with _another_version(parameter):
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


@contextmanager
def _another_version(parameter: nn.Parameter) -> Iterator[None]:
    """Bump the version counter, so that backward outside the block raises instead of using the swapped values."""
    if parameter.is_inference():
        yield
        return
    with _unsafe_preserve_version_counter(parameter):
        torch.autograd.graph.increment_version(parameter)
        yield


def _set(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.data = values
    torch.clear_autocast_cache()  # it holds copies of parameters in half precision
