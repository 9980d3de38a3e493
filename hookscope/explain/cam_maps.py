"""A class activation map of one layer, and the maps of several layers together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hookscope.display import Cells, Picture, Shown
from hookscope.drawing import map_png
from hookscope.errors import HookscopeError
from hookscope.explain.cam_perturbation import over_picture
from hookscope.hooks import Call
from hookscope.scores import Score


@dataclass(frozen=True, repr=False)
class ClassActivationMap(Shown):
    """The map of one layer for one class.

    Attributes:
        call: The call of the layer; for fused maps the names and types of all.
        prediction: What is explained: mostly a class, its score and probability.
        method: One of `CAM_METHODS` or `ATTENTION_METHODS`.
        values: ``(h, w)`` at the layer's resolution, ``(T, h, w)`` for a layer with several frames; without
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
        cells = {"layer": self.call.key, **self.prediction.cells(), "method": self.method, "map": self.values.shape}
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


def fuse_maps(maps: Sequence[ClassActivationMap]) -> list[ClassActivationMap]:
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
    tops = shared_tops(maps)
    return [_fused(of_class, tops) for of_class in maps_by_class(maps)]


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
