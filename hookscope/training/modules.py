"""The layers of the models of a training run: their names, which of them are wanted, the parameters they hold."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy

from hookscope.hooks import Layers, Selection, class_names, matches_type, no_such_type, select_types, types_in

# What wraps a model or a part of it, and puts a word of its own into the names.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)")
_OUTERMOST = ("DataParallel", "DistributedDataParallel")
_MODULE = re.compile(r"^module(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which layer calls are wanted: a selection, and the types that its indices and ``all`` count."""

    selection: Selection
    types: tuple[str, ...]

    @classmethod
    def of(cls, layers: Layers, types: Any) -> Chosen:
        """From what a person wrote."""
        return cls(Selection.of(layers), select_types(types))


class Layer:
    """A module of a model that is watched, and the names it has there.

    Attributes:
        names: Dotted paths, without the words that wrappers put into them; the first is what it is called by.
        root: Its model.
        is_loss: Whether it is a loss of torch, which has no figures.
    """

    __slots__ = ("_by_name", "_counted", "_ref", "chosen", "is_loss", "names", "root")

    def __init__(self, module: nn.Module, names: tuple[str, ...], root: Root, chosen: Chosen) -> None:
        self._ref = weakref.ref(module)
        self.names, self.root, self.chosen = names, root, chosen
        self._by_name = chosen.selection.calls_by_name(names)
        self._counted: tuple[type, bool] | None = None
        self.is_loss = is_loss(module)

    @property
    def name(self) -> str:
        """The name it is called by."""
        return self.names[0]

    @property
    def module(self) -> nn.Module | None:
        """The module itself, None once nobody has it any more."""
        return self._ref()

    def is_counted(self, module: nn.Module) -> bool:
        """Whether its calls have an index: a leaf, or one with parameters of its own, of the chosen types."""
        if self._counted is None or self._counted[0] is not type(module):  # a lazy layer changes its class
            names = class_names(module) or ["Module"]
            fits = matches_type(names, self.chosen.types, leaf=self.is_single(module))
            self._counted = (type(module), fits and not self.is_loss)
        return self._counted[1]

    def is_single(self, module: nn.Module) -> bool:
        """Whether it is a layer by itself, and no block of others: a leaf, or one with parameters of its own."""
        has_own = any(parameter is not None for parameter in module._parameters.values())
        return not _is_inner(self.name) and (has_own or is_leaf(module))

    def may_want(self, module: nn.Module) -> bool:
        """Whether any call of it can be wanted."""
        if self.is_loss:
            return False
        return bool(self._by_name) or (self.chosen.selection.counts and self.is_counted(module))

    def wants(self, call: int, index: int | None, total: int) -> bool:
        """Whether this call is wanted, of a pass in which ``total`` calls were counted."""
        return any(self.chosen.selection.wants_of(name, call, index, total) for name in self.names)


class Root:
    """A model that the script calls, and its layers by the identity of their modules.

    Attributes:
        number: In order of first sight.
        layers: By ``id`` of the module.
        silent: Whether some of its layers are compiled, scripted or replicated, so that no hook tells of them.
        compiled_in_place: Whether some are compiled by ``Module.compile``.
    """

    def __init__(self, module: nn.Module, number: int, chosen: Chosen) -> None:
        self._ref, self._chosen = weakref.ref(module), chosen
        self.number = number
        self.layers: dict[int, Layer] = {}
        self.silent = self.compiled_in_place = False
        self.walk()

    @property
    def module(self) -> nn.Module | None:
        """The module itself, None once nobody has it any more."""
        return self._ref()

    def walk(self) -> None:
        """Look again which layers it has."""
        root = self.module
        if root is None:
            return
        outermost = type(root).__name__ in _OUTERMOST
        named: dict[int, tuple[nn.Module, list[str]]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            names = named.setdefault(id(module), (module, []))[1]
            name = plain_name(path, outermost)
            if name not in names:
                names.append(name)
            self.compiled_in_place |= getattr(module, "_compiled_call_impl", None) is not None
            self.silent |= isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules
        replicated = type(root).__name__ == "DataParallel" and len(getattr(root, "device_ids", ())) > 1
        self.silent |= self.compiled_in_place or replicated
        self.layers = {key: self._layer(module, tuple(names)) for key, (module, names) in named.items()}

    def _layer(self, module: nn.Module, names: tuple[str, ...]) -> Layer:
        old = self.layers.get(id(module))
        if old is not None and old.module is module and old.names == names:
            return old
        return Layer(module, names, self, self._chosen)

    @property
    def names(self) -> list[str]:
        """Every name of every layer."""
        return [name for layer in self.layers.values() for name in layer.names]

    def with_parameters(self) -> Iterator[tuple[Layer, nn.Module, dict[str, Tensor]]]:
        """Its layers that have parameters of their own, with these."""
        for layer in self.layers.values():
            module = layer.module
            if module is not None and not _is_inner(layer.name):
                found = own_parameters(module)
                if found:
                    yield layer, module, found

    def check(self) -> None:
        """Raise a LayerError for a name or a type that the model does not have, with the nearest."""
        root = self.module
        if root is None:
            return
        self._chosen.selection.check_names(self.names, type(root).__name__)
        modules = [(layer, layer.module) for layer in self.layers.values()]
        if self._chosen.selection.counts and not any(m is not None and layer.is_counted(m) for layer, m in modules):
            raise no_such_type(self._chosen.types, types_in(root))


def plain_name(path: str, outermost: bool) -> str:
    """A dotted path without the words that wrappers put into it.

    Example:
        >>> plain_name("module.layer1._orig_mod.0", outermost=True)
        'layer1.0'
    """
    return _WRAPPERS.sub("", _MODULE.sub("", path) if outermost else path).rstrip(".")


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that a layer holds itself, by name; those of `torch.nn.utils.parametrizations` are its own.

    Example:
        >>> import torch
        >>> layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
        >>> list(own_parameters(layer))
        ['bias', 'parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    found: dict[str, Tensor] = {name: p for name, p in module._parameters.items() if p is not None and not is_lazy(p)}
    inside = module._modules.get("parametrizations")
    if inside is not None:
        found.update({f"parametrizations.{name}": p for name, p in inside.named_parameters() if not is_lazy(p)})
    return found


def is_leaf(module: nn.Module) -> bool:
    """Whether a layer has no children, but for those of ``torch.nn.utils.parametrizations``."""
    return all(name == "parametrizations" or child is None for name, child in module._modules.items())


def _is_inner(name: str) -> bool:
    """Whether it is a part of a layer that ``torch.nn.utils.parametrizations`` has put there."""
    return "parametrizations" in name.split(".")


def is_loss(module: nn.Module) -> bool:
    """Whether it is a loss of torch, which is neither a model nor a layer of one."""
    return isinstance(module, _Loss)
