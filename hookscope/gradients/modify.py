"""Functions that change a gradient, and the ``with`` block that hooks them to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, UsageError, nearest
from hookscope.hooks import (
    AnyModel,
    Call,
    HookHandles,
    Layers,
    Observer,
    hook_tensor,
    keep_and_hand_on,
    module_of,
    tensors_in,
)

GradientHook = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True, slots=True)
class ClipGradientValue:
    """Clip every value to ``[-limit, limit]``, as `torch.nn.utils.clip_grad_value_` does (Mikolov, 2012).

    Example:
        >>> import torch
        >>> ClipGradientValue(1.0)(torch.tensor([-3.0, 0.5])).tolist()
        [-1.0, 0.5]
    """

    limit: float

    def __post_init__(self) -> None:
        check_positive("limit", self.limit)

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class ClipGradientNorm:
    """Scale a gradient with a Euclidean norm above ``limit`` down to it (Pascanu et al., arXiv:1211.5063).

    Example:
        >>> import torch
        >>> [round(value, 4) for value in ClipGradientNorm(1.0)(torch.tensor([3.0, 4.0])).tolist()]
        [0.6, 0.8]
    """

    limit: float

    def __post_init__(self) -> None:
        check_positive("limit", self.limit)

    def __call__(self, gradient: Tensor) -> Tensor:
        return clip_total_norm([gradient], self.limit)[0]


@dataclass(frozen=True, slots=True)
class ClampGradientSign:
    """Set values of the other sign than ``sign`` (``positive`` or ``negative``) to 0.

    Example:
        >>> import torch
        >>> ClampGradientSign("positive")(torch.tensor([-3.0, 0.5])).tolist()
        [0.0, 0.5]
    """

    sign: str = "positive"

    def __post_init__(self) -> None:
        if self.sign not in ("positive", "negative"):
            raise UsageError(f"unknown sign '{self.sign}'", "the signs are positive and negative")

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(min=0) if self.sign == "positive" else gradient.clamp(max=0)


@dataclass(frozen=True, slots=True)
class ScaleGradient:
    """Multiply every value by ``factor``; -1 reverses the gradient (Ganin and Lempitsky, arXiv:1409.7495).

    Example:
        >>> import torch
        >>> ScaleGradient(-1.0)(torch.tensor([2.0])).tolist()
        [-2.0]
    """

    factor: float

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor


@dataclass(frozen=True, slots=True)
class ZeroGradient:
    """Set every value to 0: plain SGD leaves the parameter unchanged, and a layer passes no gradient on.

    Example:
        >>> import torch
        >>> ZeroGradient()(torch.tensor([float("nan"), 2.0])).tolist()
        [0.0, 0.0]
    """

    def __call__(self, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


def check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise UsageError(f"{name} {value:g} is not a number above 0")


def clip_total_norm(gradients: Iterable[Tensor], limit: float) -> list[Tensor]:
    """New tensors with a common norm of at most ``limit``; `torch.nn.utils.clip_grad_norm_` changes its arguments."""
    tensors = list(gradients)
    if not tensors:
        return []
    norms = [torch.linalg.vector_norm(tensor, dtype=_wide(tensor)).to(tensors[0].device) for tensor in tensors]
    factor = (limit / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
    return [tensor * factor.to(tensor) for tensor in tensors]


def _wide(gradient: Tensor) -> torch.dtype | None:
    """The type to sum squares in: sums of squares overflow half precision."""
    return torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None


class change_gradients:  # used like a function: `with change_gradients(...)`  # noqa: N801
    """Change gradients on their way back through ``model`` while the ``with`` block runs.

    A layer selection changes the gradient at the layer's output, and so the gradients of everything before it. The
    name of a parameter changes the gradient that the optimizer sees. In-place layers are supported, and the hooks are
    always removed at the end of the block.

    Args:
        model: Any eager module.
        changes: A function for each layer selection (``"layer3"``, ``"features.*"``) or parameter name
            (``"conv1.weight"``): `ClipGradientValue`, `ClipGradientNorm`, `ClampGradientSign`, `ScaleGradient`,
            `ZeroGradient`, or your own function, which may return None to leave the gradient unchanged.
        types: Class names that indices count; None for Conv2d (Conv3d in models of clips).

    Raises:
        LayerError: On entry, if a name is neither a layer nor a parameter.

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
        self, model: AnyModel, changes: Mapping[Layers, GradientHook], types: Iterable[Any] | None = None
    ) -> None:
        model = module_of(model)
        self._model, self._changes, self._types = model, dict(changes), types
        self._stack = ExitStack()
        self._block: object | None = None  # a new object for each block, None outside a block

    def __enter__(self) -> Self:
        # a parameter that two layers share has both names
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        with ExitStack() as stack:
            handles = stack.enter_context(HookHandles())
            for where, change in self._changes.items():
                parameter = parameters.get(str(where))
                if parameter is None:
                    stack.push(self._observer(where, change, parameters))
                elif parameter.requires_grad:  # a frozen one gets no gradient to change
                    handles.tensor(parameter, _checked(change, str(where)))
            self._stack = stack.pop_all()
        self._block = object()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block = None
        self._stack.__exit__(*error)

    def _observer(self, selection: Layers, change: GradientHook, parameters: Iterable[str]) -> Observer:
        """An entered observer that applies ``change`` to the gradient at the output of each selected call."""

        def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not any(tensor.requires_grad for tensor in tensors_in(output).values()):
                return None
            block, checked = self._block, _checked(change, call.key)

            def on_gradient(gradient: Tensor) -> Tensor | None:
                # an index from the end is only known after the forward pass
                return checked(gradient) if self._block is block and observer.wanted(call) else None

            # the next layer may work in place: it must not overwrite the tensor with the hook
            returned, handed_on = keep_and_hand_on(module, args, kwargs, output)
            for tensor in {id(tensor): tensor for tensor in tensors_in(returned).values()}.values():
                if tensor.requires_grad:
                    hook_tensor(tensor, on_gradient)
            return handed_on

        observer = Observer(self._model, selection, self._types, on_call)
        try:
            return observer.__enter__()
        except LayerError as error:
            names = [*(name for name, _ in self._model.named_modules()), *parameters]
            if selection in names:  # a number selects by index
                raise LayerError(error.asked, error.exists, f"'name:{selection}' is the layer of that name") from None
            near = nearest(str(selection), names) or error.exists
            raise LayerError(f"no layer or parameter '{selection}'", near) from None


def _checked(change: GradientHook, name: str) -> Callable[[Tensor], Tensor | None]:
    """``change`` with a check of its result; the error of torch does not name the layer."""

    def checked(gradient: Tensor) -> Tensor | None:
        changed = change(gradient)
        if changed is None or (isinstance(changed, torch.Tensor) and changed.shape == gradient.shape):
            return changed
        result = "x".join(map(str, changed.shape)) if isinstance(changed, torch.Tensor) else type(changed).__name__
        shape = "x".join(map(str, gradient.shape))
        raise UsageError(f"the change of the gradient at '{name}' returns {result}", f"the gradient is {shape}")

    return checked
