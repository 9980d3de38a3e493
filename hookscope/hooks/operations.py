"""Operations: calls of torch that are not modules, named after the module in which they run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hookscope.hooks.calls import select_types, usual_types
from hookscope.hooks.registration import HookHandles, HookOwner, check_hookable
from hookscope.hooks.selection import Selection
from hookscope.hooks.tensors import shares_storage, storage_keys, tensors_in


def class_names(module: nn.Module) -> list[str]:
    """The class names of a layer along its bases, its own first, without those that every layer has."""
    return [cls.__name__ for cls in type(module).__mro__[:-1] if cls.__name__ != "Module"]


def types_of(model: nn.Module, types: Iterable[Any] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The class names that indices count, and those that ``all`` means, where the user has chosen ``types`` or none."""
    if types is None:
        of_each = {type(module): module for module in model.modules()}
        return usual_types(map(class_names, of_each.values())), ("all",)
    names = select_types(types)
    return names, names


_OWN_PARTS = {"parametrizations", "_packed_params"}  # of torch.nn.utils.parametrizations, of a quantized Linear


def is_leaf(module: nn.Module) -> bool:
    """Whether the layer has no children but those that hold its own weights."""
    children = module._modules
    return not children or all(name in _OWN_PARTS or child is None for name, child in children.items())


def is_single(name: str, module: nn.Module) -> bool:
    """Whether the layer has no children or holds parameters itself, and so is not a mere block of other layers.

    What ``torch.nn.utils.parametrizations`` puts into a layer is part of that layer.
    """
    if not _OWN_PARTS.isdisjoint(name.split(".")):
        return False
    return is_leaf(module) or any(parameter is not None for parameter in module._parameters.values())


def holder_of(parameter: str) -> str:
    """The layer that holds the parameter; parameters of ``torch.nn.utils.parametrizations`` are the layer's."""
    return f".{parameter.rpartition('.')[0]}.".partition(".parametrizations.")[0].strip(".")


def types_in(model: nn.Module) -> Counter[str]:
    """How many layers of each class the model has, containers included."""
    return Counter(type(module).__name__ for module in model.modules())


def layers_with_weights(model: nn.Module) -> Selection:
    """The layers with a matrix or a filter bank, by name; every single layer where there is no such layer."""
    single = [(name, module) for name, module in model.named_modules() if is_single(name, module)]
    weighted = [name for name, module in single if _has_weight(module)]
    return Selection.of_names(weighted or [name for name, _ in single])


def _has_weight(module: nn.Module) -> bool:
    if is_leaf(module):
        return any(parameter.dim() >= 2 for parameter in module.parameters())
    # a class token of (1, 1, C) and a scale of (C, 1, 1) are vectors
    shapes = [parameter.shape for parameter in module._parameters.values() if parameter is not None]
    return any(sum(size > 1 for size in shape) >= 2 for shape in shapes)


def was_updated(module: Any) -> bool:
    """Whether training updated the running statistics: they differ from 0 and 1, however many batches were counted."""
    return bool((module.running_mean != 0).any()) or bool((module.running_var != 1).any())


def was_trained(module: Any) -> bool:
    """Whether the scales of a normalisation differ from each other, or a bias from 0; at first they do not."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return (weight is not None and bool((weight != weight[:1]).any())) or (bias is not None and bool(bias.any()))


_TENSOR_PROPERTIES = ("T", "mT", "H", "mH", "real", "imag")
_COPIES = ("to_copy", "copy", "clone", "unsafe_view", "lift_fresh", "detach", "fill", "zeros", "new_zeros", "zero")
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a function of torch, in the place of a module.

    Attributes:
        name: ``block1::relu``: the innermost module that runs, and the function; ``::add`` in the model itself.
        type: Name of the function; in-place functions end with ``_``.
        args: Its positional arguments.
        kwargs: Its keywords.
        hands_on: Whether the result has the values of an argument, as with ``view`` or ``getitem``.
        in_place: Whether the function wrote to an argument.
    """

    name: str
    type: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hands_on: bool
    in_place: bool


class OpenModules(HookOwner):
    """The modules that run now; ``mode`` is on while the outermost of them runs."""

    def __init__(self, model: nn.Module, mode: Any) -> None:
        check_hookable(model)
        self._model, self._mode = model, mode
        # the functions that a layer of torch itself calls are that layer's work
        self._places = {id(module): name for name, module in model.named_modules()}
        self._closed = {id(module) for module in model.modules() if is_closed(module)}
        self._open: list[int] = []
        self._on = False

    def watch(self, handles: HookHandles) -> None:
        """Follow the calls of all modules until ``handles`` are closed, once."""
        for module in self._model.modules():
            handles.forward_pre(module, self._before)
            handles.forward(module, self._after, always=True)
        handles.callback(self._close)

    @property
    def place(self) -> str | None:
        """The innermost module that runs; None inside a layer of torch itself, and outside of the model."""
        return self._places[self._open[-1]] if self._open and self._open[-1] not in self._closed else None

    @property
    def block(self) -> str | None:
        """The innermost module that runs and is not a layer of torch itself; None outside of the model."""
        return next((self._places[module] for module in reversed(self._open) if module not in self._closed), None)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if id(module) in self._places:
            self._open.append(id(module))
            self._switch(True)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if id(module) in self._open:
            while self._open.pop() != id(module):
                pass
        if not self._open:
            self._switch(False)

    def _switch(self, on: bool) -> None:
        if on and not self._on:
            self._mode.__enter__()
        elif not on and self._on:
            self._mode.__exit__(None, None, None)
            self._open.clear()
        self._on = on

    def _close(self) -> None:
        self._switch(False)
        del self._mode  # which refers to this object: such a cycle would keep the model in memory


def is_closed(module: nn.Module) -> bool:
    """Whether the layer has no children, and a forward of torch's own."""
    return is_leaf(module) and type(module).forward.__module__.startswith("torch.")


class Operations(TorchFunctionMode):
    """Calls ``around(place, name, function, args, kwargs)`` in the place of each function that the model calls.

    The result of ``around`` takes the place of the function's. Functions that ``around`` itself calls are not seen.
    With ``closed`` those that torch's own layers call are seen too, in the place of the module around the layer.
    """

    def __init__(self, model: nn.Module, around: Callable[..., Any], closed: bool = False) -> None:
        super().__init__()
        self.modules = OpenModules(model, self)
        self.used: set[int] = set()
        self._around = around
        self._closed = closed
        self._paused = False

    def paused(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of ``function(*args)``, whose own calculations are not operations of the model."""
        before, self._paused = self._paused, True
        try:
            return function(*args)
        finally:
            self._paused = before

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        place = None if self._paused else self.modules.block if self._closed else self.modules.place
        if place is None:
            return function(*args, **kwargs)
        self.used.update(id(value) for value in (*args, *kwargs.values()) if isinstance(value, nn.Parameter))
        if getattr(function, "__name__", "") == "multi_head_attention_forward":  # a layer in a function
            with self:
                return without_check(function)(*args, **kwargs)
        if function is Tensor.__iter__:
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        name = type_of_operation(function)
        return self._around(place, name, function, args, kwargs) if name else function(*args, **kwargs)


class OperationCounter(TorchDispatchMode):
    """Counts what a model calculates outside of torch's own layers, by torch's internal names.

    It is cheap, and changes no path that torch takes, but it does not know which function the model called. Views and
    copies do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = OpenModules(model, self)
        self.counts: Counter[str] = Counter()
        self.used: set[int] = set()

    def paused(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of ``function(*args)``, whose own calculations are not operations of the model."""
        with torch._C._DisableTorchDispatch():
            return function(*args)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if self.modules.place is not None:
            self.used.update(id(value) for value in args if isinstance(value, nn.Parameter))
            name = function.overloadpacket.__name__.strip("_")
            computes = not function.is_view and name not in _COPIES
            if computes and any(x.is_floating_point() or x.is_complex() for x in tensors_in(output).values()):
                self.counts[name] += 1
        return output


def operation_of(
    name: str, kind: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Operation, Any]:
    """Call ``function``; returns what it was and its result, which of ``setitem`` is the tensor it wrote to."""
    given = [tensor for value in (args, kwargs) for tensor in tensors_in(value).values()]
    versions = [None if tensor.is_inference() else tensor._version for tensor in given]
    output = function(*args, **kwargs)
    both = zip(given, versions, strict=True)
    wrote = any(version is not None and tensor._version != version for tensor, version in both)
    in_place = kind.endswith("_") or kind == "setitem" or wrote
    result = args[0] if kind == "setitem" else output
    memory = storage_keys(given)
    hands_on = not in_place and all(shares_storage(tensor, memory) for tensor in tensors_in(result).values())
    return Operation(name, kind, args, kwargs, hands_on, in_place), output


def type_of_operation(function: Any) -> str:
    """``add`` for ``Tensor.__radd__``, ``T`` for the property, empty for what gives no tensor."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(function.__self__, "__name__", "")
        return name if name in _TENSOR_PROPERTIES else ""
    if special := re.fullmatch(r"__(\w+?)__", name):
        name = re.sub(r"^r(?=add|sub|mul|div|pow|matmul|mod|and|or|xor)", "", special[1])
    return name


def without_check(function: Any) -> Any:
    """``function`` without the check by which torch hands a call to a mode: the functions that it calls are seen."""
    own = dict(function.__globals__) | dict.fromkeys(_CHECKS, lambda *args: False)
    twin = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
