"""Hooks that change gradients: clip, clamp to a sign, scale, zero; and the `with` block that puts them on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, UsageError, nearest
from hookscope.hooks import Call, HookHandles, Layers, Observer, hook_tensor, keep_and_hand_on, tensors_in

GradientHook = Callable[["Tensor"], "Tensor | None"]


@dataclass(frozen=True, slots=True)
class ClipGradientValue:
    """Every value into ``[-limit, limit]``, as `torch.nn.utils.clip_grad_value_` does (Mikolov, 2012).

    Example:
        >>> import torch
        >>> ClipGradientValue(1.0)(torch.tensor([-3.0, 0.5])).tolist()
        [-1.0, 0.5]
    """

    limit: float

    def __post_init__(self) -> None:
        _positive("limit", self.limit)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The changed gradient, a new tensor."""
        return gradient.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class ClipGradientNorm:
    """A gradient longer than ``limit`` (Euclidean) made that long, direction kept (Pascanu et al., arXiv:1211.5063).

    Example:
        >>> import torch
        >>> [round(value, 4) for value in ClipGradientNorm(1.0)(torch.tensor([3.0, 4.0])).tolist()]
        [0.6, 0.8]
    """

    limit: float

    def __post_init__(self) -> None:
        _positive("limit", self.limit)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The changed gradient, a new tensor."""
        return clip_total_norm([gradient], self.limit)[0]


@dataclass(frozen=True, slots=True)
class ClampGradientSign:
    """Only what is ``positive`` (or ``negative``) goes on; the rest is 0.

    Example:
        >>> import torch
        >>> ClampGradientSign("positive")(torch.tensor([-3.0, 0.5])).tolist()
        [0.0, 0.5]
    """

    sign: str = "positive"

    def __post_init__(self) -> None:
        if self.sign not in ("positive", "negative"):
            raise UsageError(f"no sign '{self.sign}'", "there are positive and negative")

    def __call__(self, gradient: Tensor) -> Tensor:
        """The changed gradient, a new tensor."""
        return gradient.clamp(min=0) if self.sign == "positive" else gradient.clamp(max=0)


@dataclass(frozen=True, slots=True)
class ScaleGradient:
    """Every value times ``factor``; -1 reverses the gradient (Ganin and Lempitsky, arXiv:1409.7495).

    Example:
        >>> import torch
        >>> ScaleGradient(-1.0)(torch.tensor([2.0])).tolist()
        [-2.0]
    """

    factor: float

    def __call__(self, gradient: Tensor) -> Tensor:
        """The changed gradient, a new tensor."""
        return gradient * self.factor


@dataclass(frozen=True, slots=True)
class ZeroGradient:
    """Nothing goes on: a parameter with it stays as it is under plain SGD, a layer lets no gradient through.

    Example:
        >>> import torch
        >>> ZeroGradient()(torch.tensor([float("nan"), 2.0])).tolist()
        [0.0, 0.0]
    """

    def __call__(self, gradient: Tensor) -> Tensor:
        """The changed gradient, a new tensor."""
        return torch.zeros_like(gradient)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise UsageError(f"{name} {value:g} clips everything", do="give a number above 0")


def clip_total_norm(gradients: Iterable[Tensor], limit: float) -> list[Tensor]:
    """``gradients`` made shorter together, so that their common norm is at most ``limit``.

    As `torch.nn.utils.clip_grad_norm_`, but nothing is written to: new tensors come back.

    Example:
        >>> import torch
        >>> [clipped] = clip_total_norm([torch.tensor([0.3, 0.4])], 1.0)
        >>> round(float(clipped.norm()), 6)
        0.5
    """
    held = list(gradients)
    if not held:
        return []
    norms = [torch.linalg.vector_norm(gradient, dtype=_wide(gradient)).to(held[0].device) for gradient in held]
    factor = (limit / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
    return [gradient * factor.to(gradient) for gradient in held]


def _wide(gradient: Tensor) -> torch.dtype | None:
    """The type to sum squares in: those of half precision overflow."""
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None


class change_gradients:  # a `with` word, named as one reads it  # noqa: N801
    """Change gradients on their way back through ``model`` while the ``with`` block runs.

    A layer's name (or any selection of calls) stands for the gradient of what it puts out, which everything before it
    gets; a parameter's name for the gradient that the optimizer sees. Works with in-place layers; hooks are gone
    when the block is left, whatever is raised.

    Args:
        model: Any eager module.
        changes: From a layer selection (``"layer3"``, ``"features.*"``) or a parameter's name (``"conv1.weight"``) to
            a function of the gradient: `ClipGradientValue`, `ClipGradientNorm`, `ClampGradientSign`,
            `ScaleGradient`, `ZeroGradient`, or your own; one that returns None leaves the gradient as it is.
        types: Class names that indices count.

    Raises:
        LayerError: on entry, for a name that is neither a layer nor a parameter.

    Example:
        >>> import collections, torch
        >>> layers = {"fc": torch.nn.Linear(2, 2), "relu": torch.nn.ReLU(inplace=True)}
        >>> net = torch.nn.Sequential(collections.OrderedDict(layers))
        >>> with change_gradients(net, {"fc.bias": ZeroGradient(), "relu": ClipGradientNorm(0.1)}):
        ...     net(torch.ones(1, 2)).sum().backward()
        >>> net.fc.bias.grad.tolist(), float(net.fc.weight.grad.norm()) <= 0.2
        ([0.0, 0.0], True)
    """

    def __init__(
        self, model: nn.Module, changes: Mapping[Layers, GradientHook], types: Iterable[Any] = ("Conv2d",)
    ) -> None:
        self._model, self._changes, self._types = model, dict(changes), types
        self._stack = ExitStack()
        self._block: object | None = None  # another one each time the block is entered, None outside it

    def __enter__(self) -> Self:
        # a parameter that two layers share is found under each of its names
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        with ExitStack() as stack:
            door = stack.enter_context(HookHandles())
            for name, change in self._changes.items():
                if name not in parameters:
                    stack.push(self._observer(name, change, parameters))
                elif parameters[name].requires_grad:  # a frozen one gets no gradient to change
                    door.tensor(parameters[name], _checked(change, name))
            self._stack = stack.pop_all()
        self._block = object()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block = None
        self._stack.__exit__(kind, error, trace)

    def _observer(self, selection: Layers, change: GradientHook, parameters: Iterable[str]) -> Observer:
        """The observer, entered, that lets ``change`` see the gradient of what each selected call puts out."""

        def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not any(tensor.requires_grad for tensor in tensors_in(output).values()):
                return None
            block, checked = self._block, _checked(change, call.key)

            def on_gradient(gradient: Tensor) -> Tensor | None:
                # an index from the end is known only now
                return checked(gradient) if self._block is block and observer.wanted(call) else None

            # the next layer may work in place: what it overwrites is then another tensor than the one with the hook
            kept, handed_on = keep_and_hand_on(module, args, kwargs, output)
            for tensor in {id(tensor): tensor for tensor in tensors_in(kept).values()}.values():
                if tensor.requires_grad:
                    hook_tensor(tensor, on_gradient)
            return handed_on

        observer = Observer(self._model, selection, self._types, on_call)
        try:
            return observer.__enter__()
        except LayerError as error:
            names = [*(name for name, _ in self._model.named_modules()), *parameters]
            if selection in names:  # a number is an index, as everywhere
                raise LayerError(error.asked, error.exists, f"'re:^{selection}$' is the layer of that name") from None
            near = nearest(str(selection), names) or error.exists
            raise LayerError(f"no layer or parameter '{selection}'", near) from None


def _checked(change: GradientHook, name: str) -> Callable[[Tensor], Tensor | None]:
    """``change``, refused when what it makes is no gradient of the same shape; torch would not say at which layer."""

    def checked(gradient: Tensor) -> Tensor | None:
        changed = change(gradient)
        if changed is None or (isinstance(changed, torch.Tensor) and changed.shape == gradient.shape):
            return changed
        made = "x".join(map(str, changed.shape)) if isinstance(changed, torch.Tensor) else type(changed).__name__
        wanted = "x".join(map(str, gradient.shape))
        raise UsageError(f"the change of the gradient at '{name}' returns {made}", f"the gradient is {wanted}")

    return checked
