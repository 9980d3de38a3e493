"""Layers with a feature map: those that are chosen, those that the score depends on, and the default layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from hookscope.errors import NoMapError
from hookscope.explain.cam_methods import CAM_METHODS, gradient_free, gradients_of
from hookscope.hooks import MODEL, Activations, Call, InputSize, Layers, Maps, Selection, feature_maps, tensors_in
from hookscope.scores import class_maps, gives_boxes

_BACKBONES = frozenset(("backbone", "encoder"))
_LAST_FEW = 8
_EDGE = 6
_PROPORTIONS = ((0.475, 0.525), (0.7, 1.4), (1.9, 2.1))
_HEADS = ("head", "heads", "detect")  # ends of names, and of class names in torchvision, transformers, ultralytics


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

        Inside attention, queries, keys and weights have shapes such as (1, heads, tokens, channels), not maps.
        A stride of two in one direction alone makes proportions of 2 or 1/2.
        """
        if any(word in type(self.module).__name__ for word in ("Linear", "Dropout", "Identity", "Softmax")):
            return False
        high, wide = self.maps.values.shape[1], self.maps.values.shape[2] // self.maps.frames
        share = shown.height / shown.width
        # convolutions without padding shorten both sides by the same amount
        off = min(abs(high - wide * share), abs(wide - high / share))
        proportions = high / wide / share
        return off < _EDGE or any(least <= proportions <= most for least, most in _PROPORTIONS)

    def read(self, tensor: Tensor, shown: InputSize) -> Tensor:
        """``tensor``, of the layer's shape, as maps ``(C, h, w)``."""
        return feature_maps(tensor, self.module, shown)[0].values


def layers_with_maps(
    model: nn.Module,
    activations: Activations,
    layers: Layers,
    shown: InputSize,
    on_skip: Callable[[Call, NoMapError], None] | None = None,
) -> list[list[MapLayer]]:
    """The captured calls in order of execution, each with the parts of its output that are maps."""
    selection = Selection.of(layers)
    chosen, skipped = [], []
    for call in activations.calls:
        try:
            parts = _parts_with_maps(call, model.get_submodule(call.name), activations[call.key], shown)
        except NoMapError as error:
            if on_skip is None or selection.is_explicit(call):
                raise
            on_skip(call, error)
            skipped.append(error)
            continue
        chosen.append(parts)
    selection.check_named_ran(activations.did_not_run, bool(chosen or skipped))
    if not chosen:
        raise skipped[-1]
    return chosen


def with_gradient(parts: list[MapLayer], score: Tensor) -> MapLayer:
    """The first of ``parts`` with a non-zero gradient, else the first that the score depends on, else the first."""
    if len(parts) == 1:
        return parts[0]
    reached = list(zip(parts, gradients_of(score, [part.tensor for part in parts]), strict=True))
    connected = [(part, gradient) for part, gradient in reached if gradient is not None]
    return next((part for part, gradient in connected if gradient.any()), (connected or reached)[0][0])


def default_layer(
    model: nn.Module, layers: Sequence[MapLayer], score: Tensor, shown: InputSize, needs_gradient: bool
) -> MapLayer:
    """The first of ``layers`` whose map has a non-zero gradient, else the first that is connected to the score."""
    connected = None
    for layer, is_reached in connected_layers(model, layers, score, shown, needs_gradient):
        if is_reached:
            return layer
        connected = connected or layer
    assert connected is not None
    return connected


def connected_layers(
    model: nn.Module, layers: Sequence[MapLayer], score: Tensor, shown: InputSize, needs_gradient: bool
) -> Iterator[tuple[MapLayer, bool]]:
    """The layers that the score is connected to, and whether the gradient of their map is not 0 everywhere.

    The last layers of a ViT feed only its class token, so their maps have gradient 0. The first few ``layers`` are
    tried alone, because the backward pass to all of them is long. Of a model without gradients, such as a quantized
    one, all layers count as connected unless the method ``needs_gradient``.

    Raises:
        NoMapError: if there is none.
    """
    is_connected = False
    for part in (layers[:_LAST_FEW], layers[_LAST_FEW:]):
        for layer, gradient in zip(part, gradients_of(score, [layer.tensor for layer in part]), strict=True):
            if gradient is not None:
                is_connected = True
                yield layer, bool((layer.read(gradient, shown) != 0).any())
    if not is_connected:
        asked = f"no layer of {type(model).__name__} has a map that the score depends on"
        if not layers:
            raise NoMapError(asked, "no layer has a map", "use saliency, which needs no map")
        if needs_gradient:
            why = "no gradient reaches a map: it is quantized, detached or computed under no_grad"
            raise NoMapError(asked, why, f"choose a method without gradient: {gradient_free(CAM_METHODS)}")
        yield from ((layer, True) for layer in layers)


def outputs_of(activations: Activations) -> list[tuple[Call, Any]]:
    """Each call with its output, the last first."""
    return [(call, activations[call.key]) for call in reversed(activations.calls)]


def candidates(model: nn.Module, outputs: Iterable[tuple[Call, Any]], shown: InputSize) -> list[MapLayer]:
    """The calls with a map, in the order of ``outputs``; maps by shape alone only if there are no others."""
    modules = dict(model.named_modules())
    layers: list[MapLayer] = []
    if fixed := getattr(getattr(model, "transform", None), "fixed_size", None):  # SSD resizes the image itself
        shown = replace(shown, height=int(fixed[1]), width=int(fixed[0]))
    for call, output in outputs:
        module = modules[call.name]
        kind = type(module).__name__
        if module is model or "Pool" in kind or kind.endswith(("Pad2d", "Pad3d")):
            continue
        with suppress(NoMapError):
            layers += _parts_with_maps(call, module, output, shown)
    return [layer for layer in layers if layer.is_of_places(shown)] or layers


def before_head(model: nn.Module, layers: list[MapLayer], output: Any) -> list[MapLayer]:
    """The ``layers``, the last first; of a detector or a segmentation model the layers of the backbone or the encoder.

    Behind it are the maps of the classes, which are the same whatever pixels are asked about, and tokens of a decoder.
    Without a module of that name, they are those outside of the head, on one position of which a box depends. For a
    segmentation the last layer of the lowest resolution is the last then. A layer of a detector that runs several
    times may be in the head too; its tokens are places only where a map has the same resolution, as tokens of several
    levels can follow each other.
    """
    is_detector = gives_boxes(output)
    if not layers or (not is_detector and class_maps(output, bare=True) is None):
        return layers
    if is_detector:
        again = {layer.call.name for layer in layers if layer.call.call}
        grids = {layer.resolution for layer in layers if layer.maps.frames == 1 and layer.maps.axes != "N L C"}
        layers = [layer for layer in layers if layer.call.name not in again and layer.resolution in grids] or layers
    names = {name: (name, *(kind.__name__ for kind in type(module).__mro__)) for name, module in model.named_modules()}
    heads = tuple(f"{name}." for name in names if name and any(each.lower().endswith(_HEADS) for each in names[name]))
    outside = [layer for layer in layers if not f"{layer.call.name}.".startswith(heads)] or layers
    inside = [layer for layer in outside if not _BACKBONES.isdisjoint(layer.call.name.split("."))]
    lowest = 0 if is_detector else min(range(len(outside)), key=lambda at: math.prod(outside[at].resolution))
    return inside or outside[lowest:]


def _parts_with_maps(call: Call, module: nn.Module, output: Any, shown: InputSize) -> list[MapLayer]:
    """The parts of an output that are maps: the coarsest first, and of one resolution the last."""
    layers: list[MapLayer] = []
    single, several = False, 0
    for part, tensor in tensors_in(output).items():
        try:
            maps = feature_maps(tensor, module, shown)[0]
        except NoMapError:
            continue
        if maps.items != 1 or (maps.axes == "C H W" and len(tensor) == 1):
            several = max(several, maps.items)  # windows or attention heads in the batch, or tokens without a grid
        elif maps.values.shape[1] * maps.values.shape[2] > 1:
            layers.append(MapLayer(call, module, part, tensor, maps))
        else:
            single = True
    if layers:
        layers.reverse()
        return sorted(layers, key=lambda layer: math.prod(layer.resolution))
    if several > 1:
        raise NoMapError(
            f"the output of {call.key} holds {several} parts of the image", do="choose the layer that contains it"
        )
    if single:
        raise NoMapError(f"the maps of {call.key} have one position", do="choose a layer before the pooling")
    do = "choose a layer with feature maps: list-layers shows shapes"
    raise NoMapError(f"the output of {call.key or MODEL} is not a feature map", do=do)
