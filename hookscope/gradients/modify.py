"""Functions that change a gradient, and the ``with`` block that hooks them to a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, UsageError, kind_of, nearest
from hookscope.findings import listed
from hookscope.hooks import (
    AnyModel,
    Call,
    HookHandles,
    Layers,
    Observer,
    Selection,
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
    said = f"{value:g}" if isinstance(value, int | float) else repr(value)
    if not (isinstance(value, int | float) and value > 0):
        raise UsageError(f"{name} {said} is not a number above 0")


def clip_total_norm(gradients: Iterable[Tensor], limit: float) -> list[Tensor]:
    """New tensors with a common norm of at most ``limit``; `torch.nn.utils.clip_grad_norm_` changes its arguments."""
    tensors = list(gradients)
    if not tensors:
        return []
    # sums of squares overflow half precision
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    norms = [torch.linalg.vector_norm(tensor, dtype=wide.get(tensor.dtype)) for tensor in tensors]
    norms = [norm.to(tensors[0].device) for norm in norms]
    factor = (limit / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
    return [tensor * factor.to(tensor) for tensor in tensors]


Change = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class GradientChanges:
    """Changes of all parameter gradients, applied in this order: freeze, scale, sign, clip value, clip norm.

    ``freeze`` names layers (with their children) or parameters whose gradients become 0; gradients that flow through
    these layers stay unchanged. The clips are as in `torch.nn.utils`, ``sign`` is as in `ClampGradientSign`.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        >>> change = GradientChanges(freeze=("0",), clip_value=2.0).of(net)
        >>> {name: g.tolist() for name, g in change({"0.bias": torch.ones(1), "1.bias": torch.full((1,), 9.0)}).items()}
        {'0.bias': [0.0], '1.bias': [2.0]}
    """

    freeze: tuple[str, ...] = ()
    clip_value: float | None = None
    clip_norm: float | None = None
    scale: float | None = None
    sign: str | None = None

    def __post_init__(self) -> None:
        for name, limit in (("clip value", self.clip_value), ("clip norm", self.clip_norm)):
            if limit is not None:
                check_positive(name, limit)
        if self.scale is not None and not math.isfinite(self.scale):
            raise UsageError(f"scale {self.scale:g} is not finite", do="give a finite factor")
        if self.sign is not None:
            ClampGradientSign(self.sign)
        for term in _terms(self.freeze):
            if term.has_call_numbers:
                raise UsageError(f"cannot freeze '{term}'", "freeze takes names, not calls", "name a layer: conv1")

    def __bool__(self) -> bool:
        return self != GradientChanges()

    def describe(self) -> list[str]:
        """The changes in the order in which they are applied: ``['freezing fc', 'clipping the norm to 1']``."""
        steps = [f"freezing {', '.join(self.freeze)}"] if self.freeze else []
        steps += [f"scaling by {self.scale:g}"] if self.scale is not None else []
        steps += [f"clamping to {self.sign}"] if self.sign is not None else []
        steps += [f"clipping values to ±{self.clip_value:g}"] if self.clip_value is not None else []
        return steps + ([f"clipping the norm to {self.clip_norm:g}"] if self.clip_norm is not None else [])

    def of(self, model: nn.Module, model_name: str = "") -> Change:
        """The change as a function from gradients by parameter name to new gradients.

        ``model_name`` is the name of the model on the command line, for the LayerError of an unknown name.
        """
        parameters = [name for name, _ in model.named_parameters()]
        layers = [name for name, _ in model.named_modules(remove_duplicate=False)]
        frozen: set[str] = set()
        for term in _terms(self.freeze):
            frozen.update([str(term)] if str(term) in parameters else _inside(term, layers, parameters, model_name))
        steps: list[Callable[[Tensor], Tensor]] = []
        steps += [ScaleGradient(self.scale)] if self.scale is not None else []
        steps += [ClampGradientSign(self.sign)] if self.sign is not None else []
        steps += [ClipGradientValue(self.clip_value)] if self.clip_value is not None else []

        def change(gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            changed = {name: ZeroGradient()(g) if name in frozen else g for name, g in gradients.items()}
            for step in steps:
                changed = {name: step(gradient) for name, gradient in changed.items()}
            if self.clip_norm is not None:
                changed = dict(zip(changed, clip_total_norm(changed.values(), self.clip_norm), strict=True))
            return changed

        return change


def _terms(freeze: tuple[str, ...]) -> tuple[Selection, ...]:
    if freeze and not "".join(freeze).strip(", "):
        raise UsageError("nothing to freeze", do="name a layer or a parameter")
    return Selection(freeze).terms if freeze else ()


def _inside(selection: Selection, layers: Sequence[str], parameters: Sequence[str], model_name: str) -> list[str]:
    """The parameters of every layer that ``selection`` names, and of their children; a number is a name here."""
    term = str(selection)
    chosen = [term] if term in layers else [name for name in layers if selection.calls_by_name([name])]
    frozen = [p for p in parameters if any(not name or p.startswith(f"{name}.") for name in chosen)]
    if not chosen:
        outline = listed(list(dict.fromkeys(name.partition(".")[0] for name in parameters)), 6)
        some = nearest(term, [*layers, *parameters]) or f"there are {outline or 'no parameters'}"
        how = f"list them with ‹parameter_statistics(model)|`hookscope weights {model_name}`›" if model_name else ""
        raise LayerError(f"no layer or parameter '{term}'", some, how)
    if not frozen:
        raise LayerError(f"cannot freeze '{term}'", "it has no parameters", "name another layer")
    return frozen


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

    def __init__(self, model: AnyModel, changes: Mapping[Any, Any], types: Iterable[Any] | None = None) -> None:
        if not isinstance(changes, Mapping):
            do = "give a dictionary such as {'layer3': ZeroGradient()}"
            raise UsageError(f"changes must be a mapping, not {kind_of(changes)}", do=do)
        for change in changes.values():
            if isinstance(change, type):
                raise UsageError(f"'{change.__name__}' is a class", do=f"give an instance, `{change.__name__}(...)`")
            if not callable(change):
                raise UsageError(f"a change cannot be {kind_of(change)}", do="give a function (gradient) -> gradient")
        self._model, self._changes, self._types = module_of(model), dict(changes), types
        self._stack, self._observers = ExitStack(), list[Observer]()
        self._block: object | None = None  # a new object for each block, None outside a block

    def __enter__(self) -> Self:
        # a parameter that two layers share has both names
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        with ExitStack() as stack:
            handles = stack.enter_context(HookHandles())
            for where, change in self._changes.items():
                parameter = parameters.get(str(where))
                if parameter is None:
                    self._observers.append(self._observer(where, change, parameters))
                    stack.push(self._observers[-1])
                elif parameter.requires_grad:  # a frozen one gets no gradient to change
                    handles.tensor(parameter, _checked(change, str(where)))
            self._stack = stack.pop_all()
        self._block = object()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block = None
        self._stack.__exit__(*error)
        observers, self._observers = self._observers, []
        if error[0] is None and observers:
            observers[0].warn_of_compiled_code()

    def __repr__(self) -> str:
        return f"change_gradients({type(self._model).__name__}, {self._changes})"

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
    def checked(gradient: Tensor) -> Tensor | None:
        changed = change(gradient)
        if changed is None or (isinstance(changed, torch.Tensor) and changed.shape == gradient.shape):
            return changed
        result = "x".join(map(str, changed.shape)) if isinstance(changed, torch.Tensor) else type(changed).__name__
        shape = "x".join(map(str, gradient.shape))
        raise UsageError(f"the change of the gradient at '{name}' returns {result}", f"the gradient is {shape}")

    return checked
