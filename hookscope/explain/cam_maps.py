"""Class activation maps, maps of several layers together, and further passes of the image for a map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.display import Cells, Picture, Shown
from hookscope.drawing import map_png
from hookscope.errors import HookscopeError, UsageError
from hookscope.explain.cam_layers import MapLayer
from hookscope.hooks import Call
from hookscope.interventions import channel_scores
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


def picture_of(inputs: tuple[Any, ...]) -> Tensor | None:
    """The picture ``(1, C, H, W)``, or the clip, if it is the only input.

    Detectors of torchvision take a list of pictures ``(C, H, W)``.
    """
    only = inputs[0] if len(inputs) == 1 else None
    if isinstance(only, list) and len(only) == 1 and isinstance(only[0], Tensor) and only[0].dim() == 3:
        return only[0][None]
    return only if isinstance(only, Tensor) else None


def in_place_of(inputs: tuple[Any, ...], pictures: Tensor) -> tuple[Any, ...]:
    """The inputs for ``pictures`` ``(N, C, H, W)``, in the form of ``inputs``."""
    return (list(pictures),) if isinstance(inputs[0], list) else (pictures,)


Progress = Callable[[int, int], None]
_FIRST = {"cpu": 4}  # images in the first pass; on a CPU each larger batch takes its memory anew from the system


def progress_counter(on_progress: Progress | None, total: int) -> Callable[..., None]:
    """A function that adds a number to those done, and calls ``on_progress`` with done and in all.

    ``more`` is what is to be done beyond the total.
    """
    done = 0

    def advance(count: int, more: int = 0) -> None:
        nonlocal done, total
        done, total = done + count, total + more
        if on_progress is not None:
            on_progress(done, total)

    return advance


@dataclass
class Rerun:
    """The scores ``(N, K)`` of all objectives with one channel as a mask, or without it; each computed once per layer.

    ``read`` takes them from a model's output.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    read: Callable[[Any], Tensor]
    batch_size: int | None
    advance: Callable[[int], None]
    _scores: dict[int, Tensor] = field(default_factory=dict)

    def masked(self, layer: MapLayer, channels: Tensor) -> Tensor:
        """The scores ``(C, K)`` of the image under each of ``channels`` ``(C, h, w)`` as a mask."""
        if id(layer) not in self._scores:
            self._scores[id(layer)] = self._masked(channels)
        return self._scores[id(layer)]

    def ablated(self, layer: MapLayer) -> Tensor:
        """The scores ``(C, K)`` with each channel of the map of ``layer`` at 0 in turn; class tokens stay."""
        if id(layer) not in self._scores:
            tensor, maps = layer.tensor.detach(), layer.maps
            tokens = tensor.shape[1] - maps.values[0].numel() if maps.axes == "N L C" else 0
            self._scores[id(layer)] = channel_scores(
                self.model,
                self.inputs,
                layer.call,
                layer.part,
                tensor,
                tensor.dim() - 1 if maps.axes.endswith("C") else 1,
                ((tokens, tensor.shape[1] - 1),) if tokens else None,
                self.batch_size,
                self.advance,
                self.read,
            ).float()
        return self._scores[id(layer)]

    def _masked(self, channels: Tensor) -> Tensor:
        picture = picture_of(self.inputs)
        if picture is None or picture.dim() != 4:
            raise UsageError("masks need one picture (1, C, H, W)", do="use a method without masks")
        picture = picture.detach()
        # the masks of all constant channels are 0: one pass is enough
        varies = channels.amax((1, 2)) > channels.amin((1, 2))
        total, zero = len(channels), torch.zeros_like(channels[~varies][:1])  # resized, another constant may vary
        channels = torch.cat([channels[varies], zero])
        places = torch.where(varies, varies.cumsum(0) - 1, len(channels) - 1)
        scores, begin, size = list[Tensor](), 0, self.batch_size or first_batch(picture.device)
        while begin < len(channels):
            part = channels[begin : begin + size]
            whole = resized(part[:, None], (picture.shape[-2], picture.shape[-1]))
            low, high = whole.amin((2, 3), keepdim=True), whole.amax((2, 3), keepdim=True)
            masks = torch.where(high > low, (whole - low) / (high - low), 0).to(picture.dtype)
            with torch.no_grad():
                scores.append(self.read(self.model(*in_place_of(self.inputs, picture * masks))).float())
            self.advance(len(part))
            begin += size
            if self.batch_size is None and has_room(picture.device):
                size *= 2
        if total > len(channels):
            self.advance(total - len(channels))
        return torch.cat(scores)[places]


def first_batch(device: torch.device) -> int:
    """How many images fit well in a pass before it is known how much memory that takes."""
    return _FIRST.get(device.type, 16)


def has_room(device: torch.device) -> bool:
    """Whether a batch of twice the images fits: a GPU's free memory is twice what torch took so far; never on a CPU.

    On a CPU larger batches are not faster.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.mem_get_info(device)[0] >= 2 * torch.cuda.memory_reserved(device)


def resized(values: Tensor, size: Sequence[int]) -> Tensor:
    """Maps ``(N, C, h, w)`` or ``(N, C, t, h, w)`` resized to ``size``, linear between the centres of the cells."""
    mode = "trilinear" if len(size) == 3 else "bilinear"
    maps: Tensor = torch.nn.functional.interpolate(values.float(), tuple(size), mode=mode, align_corners=False)
    return maps


def over_picture(values: Tensor, size: Sequence[int]) -> Tensor:
    """One map ``(h, w)``, or ``(t, h, w)`` of a clip, resized to the picture ``(H, W)`` or the clip ``(T, H, W)``."""
    cells = values[None] if values.dim() < len(size) else values
    return resized(cells[None, None], size)[0, 0]
