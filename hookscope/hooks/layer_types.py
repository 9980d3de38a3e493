"""What kinds of layers a model has: their classes, which are leaves, which have weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from hookscope.errors import LayerError, near_misses
from hookscope.hooks.selection import Selection


def class_names(module: nn.Module) -> list[str]:
    """The class names a layer goes by, its own first, without those that every layer has."""
    return [cls.__name__ for cls in type(module).__mro__[:-1] if cls.__name__ != "Module"]


def is_leaf(module: nn.Module) -> bool:
    """Whether the layer has no children."""
    return not module._modules or all(child is None for child in module._modules.values())


def types_in(model: nn.Module) -> Counter[str]:
    """How many layers of each class the model has, containers included."""
    return Counter(type(module).__name__ for module in model.modules())


def describe_types(counts: Counter[str], most: int = 12) -> str:
    """``Conv2d (36), ReLU (17)``: what a model has, for an error that says so."""
    shown = [f"{name} ({count})" for name, count in counts.most_common(most)]
    return ", ".join(shown) + (", ..." if len(counts) > most else "")


def layers_with_weights(model: nn.Module) -> Selection:
    """The layers with a matrix or a filter bank, by name; every leaf where there is no such layer."""
    weighted = [name for name, module in model.named_modules() if _has_weight(module)]
    return Selection.of_names(weighted or [name for name, module in model.named_modules() if is_leaf(module)])


def _has_weight(module: nn.Module) -> bool:
    # what torch.nn.utils.parametrizations has changed keeps its weight in a child
    if not is_leaf(module) and set(module._modules) != {"parametrizations"}:
        return False
    return any(parameter.dim() >= 2 for parameter in module.parameters())


def no_such_type(types: Iterable[str], have: Counter[str]) -> LayerError:
    """The error for a model without a layer of the types asked for: it says which there are and how many."""
    asked = "/".join(types)
    near = ", ".join(f"perhaps {name}" for kind in types for name in near_misses(kind, have, 1) if name != kind)
    exists, do = f"the model has {describe_types(have)}", near or "choose by --type"
    return LayerError(f"no layer of type {asked}", exists, do, kind="type", name=asked)
