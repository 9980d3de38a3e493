"""The models that a training run calls, their layers and parameters, and the layer that runs now."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy

from hookscope.hooks import Selection, class_names, is_single, matches_type, no_such_type, types_in, types_of

# Wrappers of a model or of a part of it put words of their own into the names of layers.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)")
_OUTERMOST = ("DataParallel", "DistributedDataParallel")
_MODULE = re.compile(r"^module(?:\.|$)")

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The chosen layer calls: a selection, and the types that indices and ``all`` count, None for the usual ones."""

    selection: Selection
    types: tuple[str, ...] | None


class Layer:
    """A layer of a watched model; ``names`` are dotted paths without the words of wrappers, the first is logged.

    A loss of torch has no metrics. Where calls run compiled code, the layers inside are not seen.
    """

    __slots__ = ("_by_name", "_kind", "choice", "is_compiled", "is_loss", "model", "module", "names")

    def __init__(self, module: nn.Module, names: tuple[str, ...], model: TrackedModel, choice: LayerChoice) -> None:
        self.module = weakref.ref(module)
        self.names, self.model, self.choice = names, model, choice
        self._by_name = choice.selection.calls_by_name(names)
        self._kind: tuple[type, bool, bool, bool] | None = None
        self.is_loss, self.is_compiled = isinstance(module, _Loss), False

    @property
    def name(self) -> str:
        return self.names[0]

    def place_in(self, running: Sequence[Layer]) -> str:
        """Its name inside the innermost of the ``running`` layers that holds it, the outermost given first."""
        for outer in reversed(running if len(self.names) > 1 else ()):
            begins = tuple(f"{name}." if name else "" for name in outer.names)
            inside = [name for name in self.names if name.startswith(begins)]
            if inside:
                return next((name for name in inside if name.rpartition(".")[0] in outer.names), inside[0])
        return self.name

    def is_counted(self, module: nn.Module) -> bool:
        """Whether its calls have an index: a layer of the chosen types."""
        return self._kind_of(module)[1]

    def is_in_all(self, module: nn.Module) -> bool:
        return self._kind_of(module)[2]

    def is_single(self, module: nn.Module) -> bool:
        """Whether it is compiled, has no children or parameters of its own, so it is not only a block of layers."""
        return self.is_compiled or self._kind_of(module)[3]

    def _kind_of(self, module: nn.Module) -> tuple[type, bool, bool, bool]:
        if self._kind is None or self._kind[0] is not type(module) or self.is_compiled:  # lazy layers change class
            names, single = class_names(module) or ["Module"], self.is_compiled or is_single(self.name, module)
            counted, in_all = (matches_type(names, types, single) for types in (self.model.types, self.model.all_types))
            self._kind = (type(module), counted, in_all, single)
        return self._kind

    def may_want(self, module: nn.Module) -> bool:
        if self.is_loss:
            return False
        selection = self.choice.selection
        if self._by_name or (selection.has_all and self.is_in_all(module)):
            return True
        return selection.counts and self.is_counted(module)

    def wants(self, call: int, index: int | None, total: int | None = None) -> bool:
        """Whether this call is chosen, in a pass with ``total`` counted calls, None while the pass runs."""
        in_all = self._kind is not None and self._kind[2]
        return any(self.choice.selection.wants(name, call, index, total, in_all) for name in self.names)


class TrackedModel:
    """A model that the script calls, with its layers by ``id`` of the module, which is None once it is dropped."""

    def __init__(self, module: nn.Module, number: int, choice: LayerChoice) -> None:
        self.module, self._choice, self.number = weakref.ref(module), choice, number
        self.layers: dict[int, Layer] = {}
        self.types: tuple[str, ...] = ()  # class names that indices count
        self.all_types: tuple[str, ...] = ()  # class names that ``all`` means
        self.is_opaque = False  # whether some layers are compiled, scripted or replicated: their hooks do not fire
        self.update()

    def update(self) -> None:
        """List the layers anew; layers that are known already stay the same objects."""
        root = self.module()
        if root is None:
            return
        self.types, self.all_types = types_of(root, self._choice.types)
        wrapped = type(root).__name__ in _OUTERMOST
        named: dict[int, tuple[nn.Module, list[str]]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            if is_compiled_wrapper(module):  # the module in it is the layer
                self.is_opaque = True
                continue
            names = named.setdefault(id(module), (module, []))[1]
            name = _WRAPPERS.sub("", _MODULE.sub("", path) if wrapped else path).rstrip(".")
            if name not in names:
                names.append(name)
            self.is_opaque |= isinstance(module, torch.jit.ScriptModule)
            self.is_opaque |= getattr(module, "_compiled_call_impl", None) is not None
        replicated = type(root).__name__ == "DataParallel" and len(getattr(root, "device_ids", ())) > 1
        self.is_opaque |= replicated
        self.layers = {key: self._layer(module, tuple(names)) for key, (module, names) in named.items()}

    def _layer(self, module: nn.Module, names: tuple[str, ...]) -> Layer:
        known = self.layers.get(id(module))
        if known is not None and known.module() is module and known.names == names:
            return known
        return Layer(module, names, self, self._choice)

    def with_parameters(self) -> Iterator[tuple[Layer, nn.Module, dict[str, Tensor]]]:
        for layer in self.layers.values():
            module = layer.module()
            if module is None or "parametrizations" in layer.name.split("."):
                continue
            if parameters := own_parameters(module):
                yield layer, module, parameters

    def check(self) -> None:
        """Raise a LayerError for a name or a type that the model does not have, with the nearest."""
        root = self.module()
        if root is None:
            return
        selection, layers = self._choice.selection, self.layers.values()
        selection.check_names([name for layer in layers for name in layer.names], type(root).__name__)
        modules = [(layer, layer.module()) for layer in layers]
        for chosen, fits, types in (
            (selection.counts, Layer.is_counted, self.types),
            (selection.has_all, Layer.is_in_all, self.all_types),
        ):
            if chosen and not any(m is not None and fits(layer, m) for layer, m in modules):
                raise no_such_type(types, types_in(root))


@dataclass(slots=True)
class Pass:
    """A forward pass of a model, or of a part of it, that runs now. Dictionaries are by ``id`` of the module."""

    top: weakref.ref[nn.Module]  # returns the module that was called
    model: TrackedModel
    depth: int = 0  # how many calls of ``top`` run inside its own call
    counted: int = 0  # calls of the chosen types so far
    ordered: int = 0  # calls of all layers so far, without blocks of other layers
    recorded: bool = True  # whether its calls are recorded
    running: list[Layer] = field(default_factory=list)  # the layers that run now, from the outermost
    calls: Counter[int] = field(default_factory=Counter)
    running_statistics: dict[int, Any] = field(default_factory=dict)  # of BatchNorms before they ran
    non_finite_inputs: dict[int, str] = field(default_factory=dict)  # the operation behind one of an in-place layer
    is_fed_non_finite: bool | None = None  # whether the inputs of the pass hold NaN or Inf; None if unknown


class ModelTracker:
    """Follows the forward passes of the models of a process.

    A model is a module that is called while no other runs, but not a loss module of torch. A part of a model that is
    called by itself keeps its name in the model. Models are in order of the first call, and ``on_model`` gets each.
    """

    def __init__(self, model: nn.Module | None, choice: LayerChoice) -> None:
        self._choice, self._only = choice, model is not None
        self.on_model: Callable[[TrackedModel], None] = lambda model: None
        self.models: list[TrackedModel] = []
        self._layers: dict[int, Layer] = {}
        self._strangers: dict[int, weakref.ref[nn.Module]] = {}
        self._thread = threading.local()
        if model is not None:
            self._add(_without_wrapper(model))

    @property
    def current(self) -> Pass | None:
        return getattr(self._thread, "current", None)

    def _add(self, module: nn.Module) -> TrackedModel:
        model = TrackedModel(module, len(self.models), self._choice)
        self.models.append(model)
        self._layers.update(model.layers)
        self.on_model(model)
        return model

    def holding(self, parameters: set[int]) -> tuple[TrackedModel, ...]:
        """The models with any of ``parameters`` (by ``id``), without those that are part of a later model."""

        def holds(model: TrackedModel) -> bool:
            module = model.module()
            layer = None if module is None else self._layer_of(module)
            own = (id(p) for _, _, own in model.with_parameters() for p in own.values())
            return layer is not None and layer.model is model and not parameters.isdisjoint(own)

        return tuple(filter(holds, self.models))

    def mark_compiled(self, module: nn.Module) -> TrackedModel | None:
        """Note that calls of a module run compiled code; its model if that is new."""
        layer = self._layer_of(module)
        if layer is None or layer.is_compiled:
            return None
        layer.is_compiled = layer.model.is_opaque = True
        return layer.model

    def _layer_of(self, module: nn.Module) -> Layer | None:
        layer = self._layers.get(id(module))
        return layer if layer is not None and layer.module() is module else None

    def enter(self, module: nn.Module) -> tuple[Layer | None, bool]:
        """The layer of a module whose call begins, None if it is not followed; and whether a pass begins with it."""
        layer, begins = self._enter(module)
        if layer is not None and (current := self.current) is not None:
            current.running.append(layer)
        return layer, begins

    def _enter(self, module: nn.Module) -> tuple[Layer | None, bool]:
        layer, current = self._layer_of(module), self.current
        if current is not None:
            if layer is not None and layer.model is current.model and module is not current.top():
                return layer, False
            top = current.top()  # does the pass still run, apart from the call that starts now?
            if is_on_stack(top, nn.Module._call_impl.__code__, beyond=int(module is top)):
                current.depth += module is current.top()
                return (layer or self._new_layer(module, current)), False
            self._thread.current = None  # its forward raised, and the script caught the exception
        if layer is None:
            if self._only or isinstance(module, _Loss) or getattr(module, "_is_replica", False):
                return None, False
            layer = self._add(module).layers[id(module)]
        self._thread.current = Pass(weakref.ref(module), layer.model)
        return layer, True

    def leave(self, module: nn.Module) -> tuple[Pass, Layer] | None:
        """The pass and the layer of a module whose call ends; None if it is not followed."""
        current = self.current
        if current is None:
            return None
        if module is current.top():
            if current.depth:
                current.depth -= 1
            else:
                self._thread.current = None
        running = current.running
        for at in range(len(running) - 1, -1, -1):  # above it are only layers that raised
            if running[at].module() is module:
                ended, running[at:] = running[at], []
                return current, ended
        layer = self._layer_of(module)
        return None if layer is None else (current, layer)

    def strangers(self) -> list[nn.Module]:
        """Modules that ran inside a model without being registered in it, as in a list in place of a ``ModuleList``."""
        return [module for known in self._strangers.values() if (module := known()) is not None]

    def find_owner(self, parameters: set[int]) -> None:
        """Add the outermost modules in memory with any of ``parameters`` (by ``id``): compiled models call no hooks."""
        if self._only:
            return
        holders = [
            m
            for m in in_memory(nn.Module)
            if "_modules" in m.__dict__ and any(id(p) in parameters for p in m.parameters())
        ]
        inner = {id(part) for holder in holders for part in holder.modules() if part is not holder}
        for holder in holders:
            if id(holder) not in inner:
                self._add(_without_wrapper(holder))

    def _new_layer(self, module: nn.Module, current: Pass) -> Layer | None:
        """A layer that was put into the model since it was listed; None for a module from outside of it."""
        known = self._strangers.get(id(module))
        if known is not None and known() is module:
            return None
        current.model.update()
        self._layers.update(current.model.layers)
        layer = self._layer_of(module)
        if layer is None:
            self._strangers[id(module)] = weakref.ref(module)
        return layer


def in_memory(kind: type[_Kind]) -> list[_Kind]:
    # by the class itself: `isinstance` would load lazy objects that pretend to be of another class
    return [value for value in gc.get_objects() if issubclass(type(value), kind)]


def is_on_stack(owner: Any, code: Any, beyond: int = 0) -> bool:
    """Whether more than ``beyond`` frames of ``code`` have ``owner`` as ``self``; a call that raised fires no hook."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and count <= beyond:
        count += frame.f_code is code and frame.f_locals.get("self") is owner
        frame = frame.f_back
    return count > beyond


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters a layer holds itself, by name, with parameters of `torch.nn.utils.parametrizations`."""
    own: dict[str, Tensor] = {name: p for name, p in module._parameters.items() if p is not None and not is_lazy(p)}
    inner = module._modules.get("parametrizations")
    if inner is not None:
        own.update({f"parametrizations.{name}": p for name, p in inner.named_parameters() if not is_lazy(p)})
    return own


def is_compiled_wrapper(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules


def _without_wrapper(module: nn.Module) -> nn.Module:
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner
