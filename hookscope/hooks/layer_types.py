"""The types of a model's layers: class names, leaves, layers with weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from hookscope.hooks.selection import Selection


def class_names(module: nn.Module) -> list[str]:
    """The class names of a layer along its bases, its own first, without those that every layer has."""
    return [cls.__name__ for cls in type(module).__mro__[:-1] if cls.__name__ != "Module"]


def is_leaf(module: nn.Module) -> bool:
    """Whether the layer has no children."""
    return not module._modules or all(child is None for child in module._modules.values())


def types_in(model: nn.Module) -> Counter[str]:
    """How many layers of each class the model has, containers included."""
    return Counter(type(module).__name__ for module in model.modules())


def layers_with_weights(model: nn.Module) -> Selection:
    """The layers with a matrix or a filter bank, by name; every leaf where there is no such layer."""
    weighted = [name for name, module in model.named_modules() if _has_weight(module)]
    return Selection.of_names(weighted or [name for name, module in model.named_modules() if is_leaf(module)])


def _has_weight(module: nn.Module) -> bool:
    # a layer changed by torch.nn.utils.parametrizations keeps its weight in a child
    if not is_leaf(module) and set(module._modules) != {"parametrizations"}:
        return False
    return any(parameter.dim() >= 2 for parameter in module.parameters())


def was_updated(module: Any) -> bool:
    """Whether training updated the running statistics: batches were counted, or they differ from 0 and 1.

    Older checkpoints of torchvision have no count.
    """
    batches = getattr(module, "num_batches_tracked", None)
    counted = batches is not None and int(batches) > 0
    return counted or bool((module.running_mean != 0).any()) or bool((module.running_var != 1).any())
