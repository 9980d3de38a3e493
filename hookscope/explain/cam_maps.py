"""Class activation maps, one or several together, and the layers that have one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.display import Cells, Picture, Rows, Shown
from hookscope.drawing import map_png
from hookscope.errors import HookscopeError, NoMapError, UsageError, all_of
from hookscope.explain.cam_methods import CAM_METHODS, gradient_free, gradients_of
from hookscope.hooks import (
    MODEL,
    Activations,
    Call,
    InputSize,
    Layers,
    Maps,
    Selection,
    feature_maps,
    shape_of,
    tensors_in,
)
from hookscope.scores import Score, class_maps, gives_boxes

_BACKBONES = frozenset(("backbone", "encoder"))
_LAST_FEW = 8
_EDGE = 6
_PROPORTIONS = ((0.475, 0.525), (0.7, 1.4), (1.9, 2.1))
_HEADS = ("head", "heads", "detect")  # ends of names, and of class names in torchvision, transformers, ultralytics


@dataclass(frozen=True, repr=False)
class ClassActivationMap(Shown):
    """The map of one layer for one class.

    Attributes:
        call: The call of the layer; for fused maps the names and types of all.
        prediction: What is explained: mostly a class, its score and probability.
        method: As `class_activation_maps` takes it.
        values: NumPy array ``(h, w)`` at the layer's resolution, ``(T, h, w)`` for a layer with several frames; without
            normalisation, after the ReLU if the method has one.
        channels: Number of channels in the sum; of a map of attention the number of heads in all its layers.
        seen: ``(H, W)`` of the network's input.
        unreached: Whether the gradient, and so the map, is 0 everywhere; False for methods without gradient.
        fused: Whether it is the mean of the maps of several layers, see `fuse_maps`.
        variants: Number of variants of the image whose maps were averaged; 1 without smoothing.
        frames: Number of frames of the network's input, 1 for a picture.
    """

    call: Call
    prediction: Score
    method: str
    values: NDArray[np.float32]
    channels: int
    seen: tuple[int, int]
    unreached: bool = False
    fused: bool = False
    variants: int = 1
    frames: int = 1

    def _cells(self) -> Cells:
        cells = {"layer": self.call.key, **self.prediction._cells(), "method": self.method, "map": self.values.shape}
        return cells | {"picture": Picture(partial(map_png, self.still), f"{self.method} of {self.call.key}")}

    @property
    def still(self) -> NDArray[np.float32]:
        """The map ``(h, w)`` that is drawn: for a clip the mean over its frames."""
        values: NDArray[np.float32] = self.values.mean(0) if self.values.ndim == 3 else self.values
        return values

    def at_frame(self, frame: int) -> NDArray[np.float32]:
        """The map ``(h, w)`` of one of the input's ``frames``, from 0.

        A layer with fewer frames ``T`` has a stride of ``frames / T`` in time: its frame ``t`` is the map of that many
        frames of the input, from ``t * frames / T``. A layer with one frame has the same map for all.
        """
        values: NDArray[np.float32] = self.values
        return values[frame * len(values) // self.frames] if values.ndim == 3 else values

    @property
    def is_empty(self) -> bool:
        """Whether no value is above 0."""
        return not bool((self.values > 0).any())

    @property
    def peak(self) -> tuple[float, float] | None:
        """``(y, x)`` of the centre of the highest cell, in any frame, as shares 0..1 of the input's height and width.

        None for a map that `is_empty`.
        """
        return peak_of(self.values)


def peak_of(values: NDArray[np.float32]) -> tuple[float, float] | None:
    """``(y, x)`` of the centre of the highest cell, in any frame, as shares of the sides; None if none is above 0."""
    height, width = values.shape[-2:]
    index = int(values.argmax())
    y, x = divmod(index % (height * width), width)
    return ((y + 0.5) / height, (x + 0.5) / width) if values.flat[index] > 0 else None


def maps_by_class(maps: Iterable[ClassActivationMap]) -> list[list[ClassActivationMap]]:
    """The maps of each class, the classes in the order of their first maps."""
    by_class: dict[str, list[ClassActivationMap]] = {}
    for cam in maps:
        by_class.setdefault(cam.prediction.key, []).append(cam)
    return list(by_class.values())


def shared_tops(maps: Iterable[ClassActivationMap]) -> dict[str, float]:
    """The highest value of each layer over all classes: on its own scale, a weak class would look as strong as others.

    Each key names a call; the value is 0 where no class has a value above 0.
    """
    tops: dict[str, float] = {}
    for cam in maps:
        tops[cam.call.key] = max(tops.get(cam.call.key, 0.0), float(cam.still.max()))
    return tops


def fuse_maps(maps: Sequence[ClassActivationMap]) -> Rows[ClassActivationMap]:
    """Fuse the maps of several layers into one for each class: their mean, each layer scaled by its highest value.

    The highest value is that over all classes of ``maps``. All maps are resized to the finest. Negative values count as
    0, and maps that are all zero take part. The frames of a clip are averaged first, because layers differ in their
    number.

    Raises:
        HookscopeError: for maps of several images.

    Example:
        >>> import torch
        >>> from hookscope import class_activation_maps
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
        >>> maps = class_activation_maps(net, torch.ones(1, 3, 8, 8), ["name:0", "name:1"], target="top:2")
        >>> [(cam.call.name, cam.values.shape) for cam in fuse_maps(maps)]
        [('0 + 1', (6, 6)), ('0 + 1', (6, 6))]
    """
    maps = all_of(ClassActivationMap, maps, "class_activation_maps")
    tops = shared_tops(maps)
    return Rows(_fused(of_class, tops) for of_class in maps_by_class(maps))


def _fused(maps: Sequence[ClassActivationMap], tops: Mapping[str, float]) -> ClassActivationMap:
    if len({cam.seen for cam in maps}) != 1:
        raise HookscopeError("maps of several images cannot be fused")
    stills = [torch.from_numpy(cam.still).relu() for cam in maps]
    size = (max(still.shape[0] for still in stills), max(still.shape[1] for still in stills))
    peaks = [tops[cam.call.key] for cam in maps]
    scaled = [still / peak if peak > 0 else still for still, peak in zip(stills, peaks, strict=True)]
    together = torch.stack([over_picture(still, size) for still in scaled]).mean(0).numpy()
    first = maps[0]
    name = " + ".join(cam.call.key for cam in maps)
    types = dict.fromkeys(cam.call.type for cam in maps)
    call = Call(name, " + ".join(types), 0, None)
    channels = sum(cam.channels for cam in maps)
    return replace(first, call=call, values=together, channels=channels, unreached=False, fused=True)


def picture_of(inputs: tuple[Any, ...]) -> Tensor | None:
    """The picture ``(1, C, H, W)``, or the clip, if it is the only input.

    Detectors of torchvision take a list of pictures ``(C, H, W)``.
    """
    only = inputs[0] if len(inputs) == 1 else None
    if isinstance(only, list) and len(only) == 1 and isinstance(only[0], Tensor) and only[0].dim() == 3:
        return only[0][None]
    return only if isinstance(only, Tensor) else None


def picture_in(inputs: tuple[Any, ...]) -> Tensor:
    """The picture or the clip, which must be the only input, of floating-point numbers."""
    picture = picture_of(inputs)
    if picture is None or picture.dim() not in (4, 5) or not picture.is_floating_point():
        got = "x".join(map(str, picture.shape)) + f" {picture.dtype}" if picture is not None else shape_of(inputs)
        asked = f"expected one image (1, C, H, W) or clip (1, C, T, H, W) of floating-point numbers, got {got}"
        raise UsageError(asked, do="x[None] adds a batch axis")
    return picture


def in_place_of(inputs: tuple[Any, ...], pictures: Tensor) -> tuple[Any, ...]:
    """The inputs for ``pictures`` ``(N, C, H, W)``, in the form of ``inputs``."""
    return (list(pictures),) if isinstance(inputs[0], list) else (pictures,)


def resized(values: Tensor, size: Sequence[int]) -> Tensor:
    """Maps ``(N, C, h, w)`` or ``(N, C, t, h, w)`` resized to ``size``, linear between the centres of the cells."""
    mode = "trilinear" if len(size) == 3 else "bilinear"
    maps: Tensor = torch.nn.functional.interpolate(values.float(), tuple(size), mode=mode, align_corners=False)
    return maps


def over_picture(values: Tensor, size: Sequence[int]) -> Tensor:
    """One map ``(h, w)``, or ``(t, h, w)`` of a clip, resized to the picture ``(H, W)`` or the clip ``(T, H, W)``."""
    cells = values[None] if values.dim() < len(size) else values
    return resized(cells[None, None], size)[0, 0]


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
        if self.maps.axes == "N C H W":  # nothing says so of a gradient
            return tensor[0].to(self.maps.values.dtype)
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
    model: nn.Module, shown: InputSize, needs_gradient: bool, layers: Sequence[MapLayer], score: Tensor
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
            if type(model).__name__ == "OnnxModel":
                asked, why = "this method needs gradients", "onnxruntime computes none"
            raise NoMapError(asked, why, f"choose a method without gradient: {gradient_free(CAM_METHODS)}")
        yield from ((layer, True) for layer in layers)


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


def before_head(model: nn.Module, activations: Activations, output: Any, shown: InputSize) -> list[MapLayer]:
    """The layers with maps, the last first; in a detector or a segmentation model those inside backbone or encoder.

    Behind it are the maps of the classes, which are the same whatever pixels are asked about, and tokens of a decoder.
    Without a module of that name, they are those outside of the head, on one position of which a box depends. For a
    segmentation the last layer of the lowest resolution is the last then. A layer of a detector that runs several
    times may be in the head too; its tokens are places only where a map has the same resolution, as tokens of several
    levels can follow each other.
    """
    outputs = ((call, activations[call.key]) for call in reversed(activations.calls))
    layers, is_detector = candidates(model, outputs, shown), gives_boxes(output)
    if not layers or (not is_detector and class_maps(output, bare=True) is None):
        return layers
    if is_detector:
        again = {layer.call.name for layer in layers if layer.call.call}
        grids = {layer.resolution for layer in layers if layer.maps.frames == 1 and layer.maps.axes != "N L C"}
        layers = [layer for layer in layers if layer.call.name not in again and layer.resolution in grids] or layers
    names = {name: (name, *(kind.__name__ for kind in type(module).__mro__)) for name, module in model.named_modules()}
    heads = tuple(f"{name}." for name in names if name and any(word.lower().endswith(_HEADS) for word in names[name]))
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
    do = "choose a layer with feature maps: ‹list_layers|list-layers› shows shapes"
    raise NoMapError(f"the output of {call.key or MODEL} is not a feature map", do=do)
