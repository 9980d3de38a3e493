"""Layers with a feature map: those that are chosen, those that the score depends on, and the default layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, NoMapError
from hookscope.explain.cam_methods import gradient_free
from hookscope.hooks import Activations, Call, InputSize, Layers, Maps, Selection, feature_maps, tensors_in

_LAST_FEW = 8
_EDGE = 6


@dataclass(frozen=True)
class MapLayer:
    """A call with a map: the tensor in the graph, and the map read from it."""

    call: Call
    module: nn.Module
    part: str
    tensor: Tensor
    maps: Maps

    @property
    def resolution(self) -> tuple[int, ...]:
        """``(h, w)`` of the map."""
        return tuple(self.maps.values.shape[1:])

    def is_of_places(self, shown: InputSize) -> bool:
        """Whether the map has about the proportions of the image, and the layer is not inside an attention block.

        Inside attention, queries, keys and weights have shapes such as (1, heads, tokens, channels), which are no maps.
        """
        if any(word in type(self.module).__name__ for word in ("Linear", "Dropout", "Identity", "Softmax")):
            return False
        high, wide = self.maps.values.shape[1], self.maps.values.shape[2] // self.maps.frames
        share = shown.height / shown.width
        # convolutions without padding shorten both sides by the same amount
        off = min(abs(high - wide * share), abs(wide - high / share))
        return 0.5 <= high / wide / share <= 2 or off < _EDGE

    def read(self, tensor: Tensor, shown: InputSize) -> Tensor:
        """``tensor``, of the layer's shape, as maps ``(C, h, w)``."""
        return feature_maps(tensor, self.module, shown)[0].values


def layers_with_maps(
    model: nn.Module,
    activations: Activations,
    layers: Layers,
    score: Tensor,
    shown: InputSize,
    on_skip: Callable[[Call, NoMapError], None] | None = None,
) -> list[MapLayer]:
    """The captured calls in order of execution, each with the part of its output that the score depends on.

    Raises:
        NoMapError: for an exact name without a map of more than one position, or if no selected call has one.
        LayerError: for an exact name that did not run, or if no layer ran.
    """
    modules = dict(model.named_modules())
    selection = Selection.of(layers)
    found, skipped = [], []
    for call in activations.calls:
        try:
            parts = _parts_with_maps(call, modules[call.name], activations[call.key], shown)
        except NoMapError as error:
            if on_skip is None or selection.is_explicit(call):
                raise
            on_skip(call, error)
            skipped.append(error)
            continue
        reached = gradients_of(score, [part.tensor for part in parts]) if len(parts) > 1 else []
        at = next((at for at, gradient in enumerate(reached) if gradient is not None), 0)
        found.append(parts[at])
    idle = [name for name in activations.did_not_run if name in selection.plain_names]
    if idle or not (found or skipped):
        raise LayerError(f"{', '.join(idle[:3]) or 'no layer'} did not run", do="choose a layer that runs: list-layers")
    if not found:
        raise skipped[-1]
    return found


def default_layer(
    model: nn.Module, activations: Activations, score: Tensor, shown: InputSize, needs_gradient: bool
) -> MapLayer:
    """Last non-pooling call whose map has a non-zero gradient, else the last that is connected to the score."""
    found = candidates(model, activations, shown)
    if found and not score.requires_grad and not needs_gradient:
        return found[0]  # scores of a quantized model have no gradient
    reached = None
    # the last layers of a ViT feed only its class token, so their maps have gradient 0; the first few candidates are
    # tried alone, because the backward pass to all of them is long
    for some in (found[:_LAST_FEW], found[_LAST_FEW:]):
        for layer, gradient in zip(some, gradients_of(score, [layer.tensor for layer in some]), strict=True):
            if gradient is None:
                continue
            if bool((layer.read(gradient, shown) != 0).any()):
                return layer
            reached = reached or layer
    if reached is not None:
        return reached
    raise no_default(model, found)


def no_default(model: nn.Module, found: Sequence[MapLayer]) -> NoMapError:
    """The error for a model whose score depends on none of the maps ``found``."""
    asked = f"no layer of {type(model).__name__} has a map that the score depends on"
    if not found:
        return NoMapError(asked, "no layer has a map", "use saliency, which needs none")
    why = "no gradient reaches a map: it is detached or computed under no_grad"
    return NoMapError(asked, why, f"choose a layer and a method without gradient: {gradient_free()}")


def candidates(model: nn.Module, activations: Activations, shown: InputSize) -> list[MapLayer]:
    """The calls with a map, the last first; maps by shape alone only if there are no others."""
    modules = dict(model.named_modules())
    found = []
    for call in reversed(activations.calls):
        module = modules[call.name]
        if module is model or "Pool" in type(module).__name__:
            continue
        with suppress(NoMapError):
            found += _parts_with_maps(call, module, activations[call.key], shown)
    return [layer for layer in found if layer.is_of_places(shown)] or found


def gradients_of(score: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of ``score``, None for a tensor that it does not depend on; the graph is retained."""
    within = [tensor for tensor in tensors if tensor.requires_grad and score.requires_grad]
    found = iter(torch.autograd.grad(score, within, retain_graph=True, allow_unused=True) if within else ())
    return [next(found) if tensor.requires_grad and score.requires_grad else None for tensor in tensors]


def _parts_with_maps(call: Call, module: nn.Module, output: Any, shown: InputSize) -> list[MapLayer]:
    found: list[MapLayer] = []
    single, several = False, 0
    for part, tensor in tensors_in(output).items():
        try:
            maps = feature_maps(tensor, module, shown)[0]
        except NoMapError:
            continue
        if maps.items != 1 or (maps.axes == "C H W" and len(tensor) == 1):
            several = max(several, maps.items)  # windows or attention heads in the batch, or tokens without a grid
        elif maps.values.shape[1] * maps.values.shape[2] > 1:
            found.append(MapLayer(call, module, part, tensor, maps))
        else:
            single = True
    if found:
        return found
    if several > 1:
        raise NoMapError(f"the output of {call.key} holds {several} parts of the image", do="choose a layer around it")
    if single:
        raise NoMapError(f"the maps of {call.key} have one position", do="choose a layer before the pooling")
    raise NoMapError(
        f"the output of {call.key} is no feature map", do="choose a layer with one: list-layers shows shapes"
    )
