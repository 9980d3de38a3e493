"""Which layers have a map to be asked for, which of them the score depends on, and which is looked at first."""

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
    """A call with a map: the tensor that holds it, in the graph, and how it is read."""

    call: Call
    module: nn.Module
    part: str
    tensor: Tensor
    maps: Maps

    def is_of_places(self, seen: InputSize) -> bool:
        """Whether the map has about the proportions of the picture, and the layer is none of the inside of attention.

        There queries, keys and weights have such shapes as (1, heads, tokens, channels), which is no map of places.
        """
        if any(word in type(self.module).__name__ for word in ("Linear", "Dropout", "Identity", "Softmax")):
            return False
        high, wide = self.maps.values.shape[1], self.maps.values.shape[2] // self.maps.frames
        share = seen.height / seen.width
        # convolutions without padding take as much from the short side as from the long one
        off = min(abs(high - wide * share), abs(wide - high / share))
        return 0.5 <= high / wide / share <= 2 or off < _EDGE

    def read(self, tensor: Tensor, seen: InputSize) -> Tensor:
        """``tensor``, of the shape of the layer's own, as ``(C, H, W)``."""
        return feature_maps(tensor, self.module, seen)[0].values


def layers_with_maps(
    model: nn.Module,
    activations: Activations,
    layers: Layers,
    score: Tensor,
    seen: InputSize,
    on_skip: Callable[[Call, NoMapError], None] | None = None,
) -> list[MapLayer]:
    """The kept calls in order of execution, each with the part of its output that the score depends on.

    Args:
        model: Which model.
        activations: What its pass left, in the graph.
        layers: The selection they were kept by.
        score: What shall depend on them.
        seen: What the network was shown.
        on_skip: Called with a call without a map that ``layers`` does not name outright.

    Raises:
        NoMapError: one of them has no map of more than one position, or none of those that a pattern selects.
        LayerError: one that ``layers`` names did not run, or none did.
    """
    modules = dict(model.named_modules())
    selection = Selection.of(layers)
    found, skipped = [], []
    for call in activations.calls:
        try:
            parts = _parts_with_maps(call, modules[call.name], activations[call.key], seen)
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
    model: nn.Module, activations: Activations, score: Tensor, seen: InputSize, needs_gradient: bool
) -> MapLayer:
    """The last call with a map that the score depends on, pooling aside; of a score that no value changes, the last."""
    found = candidates(model, activations, seen)
    if found and not score.requires_grad and not needs_gradient:
        return found[0]  # a quantized model, whose scores have no gradient
    reached = None
    # a ViT's last layers have tokens that its class token alone is read from: no place of the map counts there; the
    # first few are asked by themselves, for the way back to all of them is long
    for some in (found[:_LAST_FEW], found[_LAST_FEW:]):
        for layer, gradient in zip(some, gradients_of(score, [layer.tensor for layer in some]), strict=True):
            if gradient is None:
                continue
            if bool((layer.read(gradient, seen) != 0).any()):
                return layer
            reached = reached or layer
    if reached is not None:
        return reached
    raise no_default(model, found)


def no_default(model: nn.Module, found: Sequence[MapLayer]) -> NoMapError:
    """The error for a model none of whose maps the score depends on; ``found`` are those it has."""
    asked = f"no layer of {type(model).__name__} has a map that the score depends on"
    if not found:
        return NoMapError(asked, "no layer puts out a map", "saliency needs none")
    why = "as far as gradients tell: they are detached, or made under no_grad"
    return NoMapError(asked, why, f"choose a layer and a method without gradient: {gradient_free()}")


def candidates(model: nn.Module, activations: Activations, seen: InputSize) -> list[MapLayer]:
    """The calls with a map, the last first; those that are maps only by their shape if there are no others."""
    modules = dict(model.named_modules())
    found = []
    for call in reversed(activations.calls):
        module = modules[call.name]
        if module is model or "Pool" in type(module).__name__:
            continue
        with suppress(NoMapError):
            found += _parts_with_maps(call, module, activations[call.key], seen)
    return [layer for layer in found if layer.is_of_places(seen)] or found


def gradients_of(score: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of ``score``, None for a tensor that it does not depend on; the graph is kept."""
    within = [tensor for tensor in tensors if tensor.requires_grad and score.requires_grad]
    found = iter(torch.autograd.grad(score, within, retain_graph=True, allow_unused=True) if within else ())
    return [next(found) if tensor.requires_grad and score.requires_grad else None for tensor in tensors]


def _parts_with_maps(call: Call, module: nn.Module, output: Any, seen: InputSize) -> list[MapLayer]:
    """The parts of ``output`` with a map of more than one position.

    Raises:
        NoMapError: there is none.
    """
    found: list[MapLayer] = []
    single, several = False, 0
    for part, tensor in tensors_in(output).items():
        try:
            maps = feature_maps(tensor, module, seen)[0]
        except NoMapError:
            continue
        if maps.items != 1 or (maps.axes == "C H W" and len(tensor) == 1):
            several = max(several, maps.items)  # windows, or attention heads in the batch; or tokens without a grid
        elif maps.values.shape[1] * maps.values.shape[2] > 1:
            found.append(MapLayer(call, module, part, tensor, maps))
        else:
            single = True
    if found:
        return found
    if several > 1:
        raise NoMapError(f"{call.key} puts out {several} parts of the picture at once", do="choose a layer around it")
    if single:
        raise NoMapError(f"{call.key} puts out maps of one position", do="choose a layer before the pooling")
    raise NoMapError(f"{call.key} puts out no feature map", do="choose a layer with one: list-layers shows shapes")
