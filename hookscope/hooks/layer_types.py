"""The types of a model's layers: class names, single layers, layers with weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from hookscope.hooks.calls import select_types, usual_types
from hookscope.hooks.selection import Selection


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
    """Whether the layer has no children or holds parameters itself, and so is no mere block of other layers.

    What ``torch.nn.utils.parametrizations`` puts into a layer is part of that layer.
    """
    if not _OWN_PARTS.isdisjoint(name.split(".")):
        return False
    return is_leaf(module) or any(parameter is not None for parameter in module._parameters.values())


def holder_of(parameter: str) -> str:
    """The name of the layer that holds the parameter; those of ``torch.nn.utils.parametrizations`` are the layer's."""
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
    """Whether training updated the running statistics: batches were counted, or they differ from 0 and 1.

    Older checkpoints of torchvision have no count.
    """
    batches = getattr(module, "num_batches_tracked", None)
    counted = batches is not None and int(batches) > 0
    return counted or bool((module.running_mean != 0).any()) or bool((module.running_var != 1).any())


def was_trained(module: Any) -> bool:
    """Whether the scales of a normalisation differ from each other, or a bias from 0; at first they do not."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return (weight is not None and bool((weight != weight[:1]).any())) or (bias is not None and bool(bias.any()))
