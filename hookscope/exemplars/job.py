"""The job that finds exemplars: the value of each channel on each image, and what is kept of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from hookscope.drawing import input_size_of
from hookscope.errors import InputError, LayerError, UsageError
from hookscope.exemplars.channels import (
    BestImages,
    ChannelHistograms,
    ClassMeans,
    Ints,
    Prints,
    PrintsOf,
    candidates,
    prints_of,
)
from hookscope.hooks import (
    MODEL,
    Call,
    InputSize,
    Layers,
    Observer,
    Selection,
    as_float,
    by_channel,
    evaluating,
    in_order,
    key_of,
    tensors_in,
    token_grid,
)
from hookscope.images import label_of
from hookscope.models import Batch, LoadedModel

MEASURES = ("max", "mean", "abs")
"""How an image excites a channel: by its largest, its mean, or its largest absolute value."""

_PIECE = 1 << 22  # values at a time in which places are sought
_PRUNE = 512  # images that nothing refers to, kept until they are so many and half of all

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SeenImage:
    name: str
    sha256: str
    label: str
    size: tuple[int, int]
    print: Prints
    image: Image.Image | None = None  # what the network sees, of an image without a file


@dataclass(eq=False)
class FoundInLayer:
    """What was found so far in one tensor of one call; ``channels`` are the chosen ones."""

    call: Call
    part: str
    channels: tuple[int, ...]
    top: int
    least: bool
    images: int = 0

    def __post_init__(self) -> None:
        count = len(self.channels)
        self.bests = [BestImages(count, self.top, least) for least in (False, True)[: 1 + self.least]]
        self.histograms, self.means = ChannelHistograms(count), ClassMeans(count)
        self.nonfinite: Ints = np.zeros(count, np.int64)

    def emptied(self) -> FoundInLayer:
        return FoundInLayer(self.call, self.part, self.channels, self.top, self.least)

    def merge(self, other: FoundInLayer, prints_of: PrintsOf) -> None:
        if self.channels != other.channels:
            text = f"{self.key} returned {len(other.channels)} channels after {len(self.channels)}"
            raise InputError(text, do="measure one size at a time")
        self.images += other.images
        for mine, theirs in zip(self.bests, other.bests, strict=True):
            mine.merge(theirs, prints_of)
        self.histograms.merge(other.histograms)
        self.means.merge(other.means)
        self.nonfinite = self.nonfinite + other.nonfinite

    @property
    def key(self) -> str:
        return key_of(self.call, self.part)

    def state_dict(self, prints_of: PrintsOf) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("part", "channels", "top", "least", "images", "nonfinite")}
        parts = {"histograms": self.histograms.state_dict(), "means": self.means.state_dict()}
        return own | {"call": astuple(self.call), "bests": [best.state_dict(prints_of) for best in self.bests]} | parts

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        channels, top = tuple(int(channel) for channel in state["channels"]), int(state["top"])
        restored = cls(Call(*state["call"]), state["part"], channels, top, bool(state["least"]), int(state["images"]))
        bests = zip(state["bests"], restored.bests, strict=True)
        restored.bests = [BestImages.from_state(best, len(channels), top, empty.least) for best, empty in bests]
        restored.histograms = ChannelHistograms.from_state(state["histograms"], len(channels))
        restored.means = ClassMeans.from_state(state["means"], len(channels))
        restored.nonfinite = np.array(state["nonfinite"], np.int64).reshape(len(channels))
        return restored


@dataclass(eq=False)
class FoundExemplars:
    """What was found on some images: by layer, and the images that it refers to, by their position."""

    layers: dict[str, FoundInLayer] = field(default_factory=dict)
    seen: dict[int, SeenImage] = field(default_factory=dict)
    images: int = 0
    _pruned: int = 0

    def merge(self, other: FoundExemplars) -> None:
        self.images += other.images
        self.seen |= other.seen
        before = list(self.layers)
        for key, layer in other.layers.items():
            self.layers.setdefault(key, layer.emptied()).merge(layer, self.prints_of)
        if len(before) < len(self.layers):
            self.layers = {key: self.layers[key] for key in in_order(before, other.layers)}
        self.prune()

    def prints_of(self, images: Ints) -> Prints:
        return np.stack([self.seen[position].print for position in images.tolist()])

    def prune(self) -> None:
        """Forget the images that nothing refers to, where they may be many."""
        if len(self.seen) <= 2 * self._pruned + _PRUNE:
            return
        used = self.used()
        self.seen = {position: image for position, image in self.seen.items() if position in used}
        self._pruned = len(self.seen)

    def used(self) -> set[int]:
        return {int(image) for layer in self.layers.values() for best in layer.bests for image in best.images}


@dataclass(frozen=True, slots=True)
class ExemplarsJob:
    """The `Job` that finds exemplars, see `find_exemplars`; a label is a folder inside one of ``folders``."""

    layers: Layers
    types: tuple[Any, ...] | None
    channels: tuple[int, ...] | None
    top: int
    least: bool
    measure: str
    folders: tuple[str, ...]
    batch_size: int
    workers: int

    @contextlib.contextmanager
    def open(self, net: LoadedModel) -> Iterator[Callable[[Batch], FoundExemplars]]:
        yield _Reader(self, net).measure

    def merge(self, values: Sequence[FoundExemplars]) -> FoundExemplars:
        merged = FoundExemplars()
        for value in values:
            merged.merge(value)
        return merged


class _Reader:
    """Reads the value of each channel in the hook of its layer, before a later layer can overwrite it."""

    def __init__(self, job: ExemplarsJob, net: LoadedModel) -> None:
        self.job, self.net = job, net
        self.exact: Selection | None = None  # of the first pass: later ones stop after the last wanted call
        self.before = FoundExemplars()  # what this process has found: which values cannot be among the best
        self.now = FoundExemplars()
        self.size = InputSize(1, 1)
        self.positions: Ints = np.zeros(0, np.int64)
        self.images: list[SeenImage] = []

    def measure(self, batch: Batch) -> FoundExemplars:
        self._start(batch)
        observer = Observer(self.net.model, self.exact or self.job.layers, self.job.types, self._on_call)
        if self.exact is not None:
            observer.stop_early()
        try:
            with evaluating(self.net.model), torch.no_grad(), observer:
                self.net.model(*batch.inputs)
        except LayerError:
            if self.exact is None:
                raise  # else a layer did not run that ran before
        self.now.layers = {key: layer for key, layer in self.now.layers.items() if observer.wanted(layer.call)}
        if self.exact is None and self.net.family != "detection":  # whose heads run only where they find something
            observer.selection.check_named_ran(observer.progress.did_not_run)
            if self.now.layers:
                self.exact = Selection.of_calls({layer.call for layer in self.now.layers.values()})
        if not self.now.layers:
            raise InputError("no chosen layer returned values", do="choose other layers")
        return self._found()

    def _start(self, batch: Batch) -> None:
        first = batch.inputs[0]  # read before the model can overwrite it
        sizes = [(int(tensor.shape[-2]), int(tensor.shape[-1])) if tensor.dim() > 1 else (1, 1) for tensor in first]
        self.size = input_size_of(first[0]) if first[0].dim() > 2 else InputSize(1, 1)
        self.now, self.positions = FoundExemplars(images=batch.count), np.array(batch.positions)
        labels = batch.labels or [label_of(name, self.job.folders) for name in batch.names]
        shown = [None] * len(labels) if any(batch.sha256) else map(self.net.preprocess.denormalise, first)
        self.images = list(map(SeenImage, batch.names, batch.sha256, labels, sizes, prints_of(first), shown))

    def _found(self) -> FoundExemplars:
        """What the pass has found, which is known from now on."""
        exemplars = self.now
        used, images = exemplars.used(), zip(self.positions.tolist(), self.images, strict=True)
        exemplars.seen = {position: image for position, image in images if position in used}
        self.before.seen |= exemplars.seen
        for key, layer in exemplars.layers.items():
            known = self.before.layers.setdefault(key, layer.emptied())
            for mine, new in zip(known.bests, layer.bests, strict=True):
                mine.merge(new, self.before.prints_of)
        self.before.prune()
        return exemplars

    def _on_call(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = {part: tensor for part, tensor in tensors_in(output).items() if tensor.numel()}
        floating = {part: t for part, t in tensors.items() if t.is_floating_point() or t.is_quantized or t.is_complex()}
        for part, tensor in (floating or tensors).items():
            self._read(call, part, module, as_float(tensor))

    def _read(self, call: Call, part: str, module: nn.Module, tensor: Tensor) -> None:
        values, grid = of_images(*with_places(tensor, module, self.size), len(self.images), key_of(call, part))
        layer = FoundInLayer(call, part, self._channels(call, values.shape[1]), self.job.top, self.job.least)
        if self.job.channels is not None:
            values = values[:, list(layer.channels)]
        measured = MEASURED[self.job.measure](values).double().cpu().numpy()
        finite = np.isfinite(measured)
        layer.images, layer.nonfinite = len(measured), (~finite).sum(0)
        layer.histograms.update(measured)
        layer.means.update(measured, [image.label for image in self.images])
        known = self.before.layers.get(layer.key, layer)
        for best, before in zip(layer.bests, known.bests, strict=True):
            may = before.may_enter(measured, self.positions)
            image, channel = may.nonzero()
            place = _places(values, image, channel, grid, self.job.measure == "abs")
            best.add(candidates(channel, measured[may], self.positions[image], *place))
        self.now.layers[layer.key] = layer

    def _channels(self, call: Call, count: int) -> tuple[int, ...]:
        chosen = self.job.channels
        if chosen is None:
            return tuple(range(count))
        if missing := [channel for channel in chosen if channel >= count]:
            asked = f"{call.key or MODEL} has no channel {missing[0]}"
            raise UsageError(asked, f"it has {count} channels, from 0 to {count - 1}")
        return chosen


def with_places(tensor: Tensor, module: nn.Module, shown: InputSize) -> tuple[Tensor, tuple[int, ...] | None]:
    """Values ``(N, C, P)`` without class tokens, and frames, height and width of the grid of places, if any."""
    if tensor.dim() < 2:
        tensor = tensor.reshape(len(tensor) if tensor.dim() else 1, 1)
    values = by_channel(tensor, module, shown)
    positions = tuple(values.shape[2:])
    if len(positions) in (2, 3):
        return values.flatten(2), (*(1,) * (3 - len(positions)), *positions)
    if len(positions) == 1 and values.is_set_to(tensor):  # (N, C, L): a signal
        return values, None
    folded = token_grid(positions[0], shown) if len(positions) == 1 else None
    if folded is None:
        return values.flatten(2) if positions else values[..., None], None
    extra, *grid = folded
    return values[..., extra:], tuple(grid)


def of_images(
    values: Tensor, grid: tuple[int, ...] | None, images: int, key: str
) -> tuple[Tensor, tuple[int, ...] | None]:
    """What `with_places` gives with a row for each image; all rows of an output that has others are of one image."""
    if len(values) == images:
        return values, grid
    if images > 1:
        asked = f"{key} has {len(values)} rows for {images} images"
        raise InputError(asked, "which rows belong to an image is not known", "use a batch size of 1")
    return values.transpose(0, 1).flatten(1)[None], None


MEASURED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda values: values.amax(2),
    "mean": lambda values: values.mean(2),
    "abs": lambda values: torch.maximum(values.amax(2), -values.amin(2)),
}


def _places(
    values: Tensor, image: Ints, channel: Ints, grid: tuple[int, ...] | None, absolute: bool
) -> tuple[Ints, Ints]:
    """Row and column of the largest value of these channels on these images; frames are side by side."""
    if grid is None:
        return np.full(len(image), -1), np.full(len(image), -1)
    step = max(1, _PIECE // math.prod(grid))
    places = [np.zeros(0, np.int64)]
    for first in range(0, len(image), step):
        maps = values[torch.from_numpy(image[first : first + step]), torch.from_numpy(channel[first : first + step])]
        places.append((maps.abs() if absolute else maps).argmax(1).cpu().numpy())
    frame, row, column = np.unravel_index(np.concatenate(places), grid)
    return row.astype(np.int64), (frame * grid[2] + column).astype(np.int64)
