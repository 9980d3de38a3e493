"""The same images for both sides, in batches, each prepared as its side wants it; and how their inputs differ."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import permutations, takewhile
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as F

from hookscope.drawing import input_size_of
from hookscope.errors import HookscopeError, UsageError
from hookscope.hooks import InputSize, tensors_in
from hookscope.images import AnyImage, InputImage, Listener, as_picture, list_pictures
from hookscope.jobs import memory_batches
from hookscope.models import Batch, LoadedModel, Resize, load_batches

Floats = NDArray[np.float64]

_EXACT = 1e-4  # of the variance: a channel of B follows from one of A but for rounding
_MOST_PERMUTED = 4  # channels
_SAVED = 0.05  # the same where the images were saved with a loss, if another order leaves over four times as much
_SCALED = 0.01  # a factor or an offset that is further from 1 or 0 is one
_BY_256 = 255 / 256
_IMAGENET = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])


class InputChange:
    """Sums over the values of each channel of both inputs; ``other_images`` says whether B has images of its own.

    ``resized`` says how both sides resize, where it is known and explains the difference.
    """

    def __init__(self, other_images: bool = False) -> None:
        self.other_images, self.resized = other_images, ""
        self._count = 0
        self._sums: dict[str, Floats] = {}

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a batch of both inputs ``(N, C, ...)``; inputs of different shapes or without channels add nothing."""
        if a.shape != b.shape or a.ndim < 3:
            return
        x, y = (value.detach().to("cpu", torch.float64).movedim(1, 0).flatten(1) for value in (a, b))
        sums = {"a": x.sum(1), "b": y.sum(1), "aa": (x * x).sum(1), "bb": (y * y).sum(1), "ab": x @ y.T}
        self._count += x.shape[1]
        self._sums = {name: self._sums.get(name, 0.0) + value.numpy() for name, value in sums.items()}

    @property
    def words(self) -> str:
        """How channels of B follow from the channels of A; empty if they do not, or are the same but for rounding."""
        lines = self._lines()
        return (_words(*lines) if lines else "") or self.resized

    @property
    def normalising(self) -> str:
        """The side whose model must normalise, where the inputs differ by a factor and an offset: its mean is not 0."""
        lines = self._lines()
        if lines is None or list(lines[0]) != sorted(lines[0]):
            return ""
        centre = {
            side: abs(self._sums[mean] ** 2 / (self._count * self._sums[square] + 1e-12)).sum()
            for side, mean, square in (("A", "a", "aa"), ("B", "b", "bb"))
        }
        return max(centre, key=lambda side: centre[side])

    def _lines(self) -> tuple[tuple[int, ...], Floats, Floats] | None:
        """``(order, factors, offsets)``: channel ``c`` of B is ``factors[c]`` times channel ``order[c]`` of A plus
        ``offsets[c]``; None if B does not follow from A in this way."""
        if not self._count:
            return None
        mean_a, mean_b, aa, bb, ab = (self._sums[name] / self._count for name in ("a", "b", "aa", "bb", "ab"))
        variance_a, variance_b, covariance = aa - mean_a**2, bb - mean_b**2, ab - np.outer(mean_a, mean_b)
        if not (variance_a > 0).all() or not (variance_b > 0).all():  # constant, or NaN
            return None
        unlike = 1 - covariance.clip(0) ** 2 / np.outer(variance_a, variance_b)
        channels = range(len(mean_a))
        # the first permutation is the order as it is
        orders = list(permutations(channels)) if len(channels) <= _MOST_PERMUTED else [tuple(channels)]
        order = min(orders, key=lambda order: unlike[order, channels].max().clip(_EXACT))
        left = unlike[order, channels].max()
        if left >= _EXACT and (left > _SAVED or order == orders[0] or left > unlike[channels, channels].max() / 4):
            return None
        factors = covariance[order, channels] / variance_a[list(order)]
        return order, factors, mean_b - factors * mean_a[list(order)]


def _words(order: Sequence[int], factors: Floats, offsets: Floats) -> str:
    words = []
    if list(order) != list(range(len(order))):
        rgb = " (RGB in one, BGR in the other)" if list(order) == [2, 1, 0] else ""
        words.append(f"Channels {_numbers(range(len(order)))} of B's input are channels {_numbers(order)} of A's{rgb}")
    for side, other, factor in (("B", "A", _BY_256), ("A", "B", 1 / _BY_256)):
        if not words and (abs(factors / factor - 1) < _SCALED / 100).all() and abs(offsets).max() < _SCALED:
            return f"{side} divides the colours by 256 where {other} divides them by 255"
    scaled = bool((abs(factors - 1) > _SCALED).any() or (abs(offsets) > _SCALED * max(1.0, abs(factors).max())).any())
    if scaled and (not words or abs(factors - 1).max() > 0.1):  # after other channels, std differs by 2 %
        words.append(f"B's input is {_numbers(factors)} times A's plus {_numbers(offsets)}{_known(factors, offsets)}")
    return ", and ".join(words)


def _known(factors: Floats, offsets: Floats) -> str:
    mean, std = _IMAGENET if len(factors) == 3 else _IMAGENET.mean(1, keepdims=True)
    for side, other, forth, back in (("B", "A", factors, offsets), ("A", "B", 1 / factors, -offsets / factors)):
        for scale, end in ((1, ""), (255, ", and has colours 0..255")):
            if _are(forth / scale, std) and _are(back / scale, mean):
                return f": {side} lacks the ImageNet mean and std of {other}{end}"
        if _are(forth / 255, 1.0) and _are(back / 255, 0.0):
            return f": {side} has colours 0..255 where {other} has 0..1"
    return ""


def _are(numbers: Floats, wanted: Floats | float) -> bool:
    return numbers.shape in (np.shape(wanted), (len(numbers),)) and np.allclose(numbers, wanted, rtol=0.02, atol=0.01)


def _numbers(values: Sequence[float] | Floats | range) -> str:
    words = [f"{round(float(value), 6) + 0.0:.4g}" for value in values]  # no minus before a 0
    return words[0] if len(set(words)) == 1 else ", ".join(words)


Picture = str | os.PathLike[str] | InputImage | Image.Image
Pictures = Sequence[Picture] | Tensor


@dataclass(frozen=True, eq=False)
class PairedBatch(Batch):
    """A batch of A, and the positional inputs of B for the same images."""

    b: tuple[Any, ...]

    @property
    def size(self) -> InputSize | None:
        """The size of the images of A, None for other inputs."""
        tensor = next(iter(tensors_in(self.inputs).values()), None)
        if tensor is None or tensor.dim() < 3 + isinstance(self.inputs[0], Tensor):
            return None
        return input_size_of(tensor[0] if isinstance(self.inputs[0], Tensor) else tensor)


AnyBatch = TypeVar("AnyBatch", bound=Batch)


def part_of(batch: AnyBatch, part: slice) -> AnyBatch:
    """Some images of a batch; each positional input is a tensor of all images, or a list with one tensor for each."""
    if len(batch.names[part]) == batch.count:
        return batch
    parts = {
        name: tuple(item[part] for item in value) if name in ("inputs", "b") else value[part]
        for name, value in vars(batch).items()
    }
    return replace(batch, **parts)


def as_pictures(images: Any) -> Pictures:
    if isinstance(images, Tensor):
        if images.dim() < 2 or not len(images):
            raise UsageError(f"a tensor of {tuple(images.shape)} is not a batch", do="give (N, C, H, W)")
        return images
    return list_pictures(images)


def paired_batches(
    a: LoadedModel,
    b: LoadedModel,
    images: Pictures,
    images_b: Pictures | None,
    batch_size: int,
    workers: int,
    listener: Listener,
) -> Generator[PairedBatch, None, None]:
    """Batches of at most ``batch_size`` images that both sides could read, of one size on both sides."""
    if images_b is None and a.preprocess == b.preprocess and a.family == b.family:
        for batch in _batches(a, images, batch_size, workers, listener):
            yield _paired(batch, batch)
        return
    known: set[int] = set()

    def skipped(position: int, name: str, error: HookscopeError) -> None:
        if position not in known:  # else both sides fail on the same file
            listener.skipped(position, name, error)
        known.add(position)

    of_a = _batches(a, images, batch_size, workers, replace(listener, skipped=skipped))
    if images_b is None:
        of_b = _batches(b, images, batch_size, workers, Listener(skipped=skipped, note=lambda name, text: None))
    else:
        of_b = _batches(b, images_b, batch_size, workers, listener)
    with closing(of_a), closing(of_b):
        yield from _common(of_a, of_b)


def _batches(
    net: LoadedModel, images: Pictures, batch_size: int, workers: int, listener: Listener
) -> Generator[Batch, None, None]:
    if not isinstance(images, Tensor) and all(isinstance(image, str | os.PathLike) for image in images):
        paths = [os.fspath(image) for image in images]  # type: ignore[arg-type]
        return load_batches(net, paths, batch_size, workers, listener)
    if isinstance(images, Tensor) and images.is_floating_point():
        images = images.to(dtype=net.preprocess.dtype)
    return memory_batches(net, images, batch_size)


def _common(of_a: Iterator[Batch], of_b: Iterator[Batch]) -> Iterator[PairedBatch]:
    """The runs of images that are neighbours in a batch of each side; an image that one side lacks is left out."""

    def after(batch: Batch, count: int, others: Iterator[Batch]) -> Batch | None:
        return part_of(batch, slice(count, None)) if count < batch.count else next(others, None)

    a, b = next(of_a, None), next(of_b, None)
    while a is not None and b is not None:
        if a.positions[0] < b.positions[0]:
            a = after(a, 1, of_a)
        elif a.positions[0] > b.positions[0]:
            b = after(b, 1, of_b)
        else:
            pairs = zip(a.positions, b.positions, strict=False)
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            yield _paired(part_of(a, slice(length)), part_of(b, slice(length)))
            a, b = after(a, length, of_a), after(b, length, of_b)


def _paired(a: Batch, b: Batch) -> PairedBatch:
    return PairedBatch(a.names, a.positions, a.inputs, a.sha256, b.inputs)


_UNLIKE = 2e-4  # of the variance of a channel: what rounding to 8 bits leaves unexplained, and another filter exceeds
_SMOOTH = ("bilinear", "bicubic", "lanczos", "box", "hamming")  # with antialias
_PLAIN = ("bilinear", "bicubic", "nearest", "nearest-exact")  # without


def resizes_apart(picture: AnyImage, a: LoadedModel, b: LoadedModel) -> str:
    """How both sides resize ``picture``, where they do it differently; empty if one of them does it in no usual way."""
    source = as_picture(picture)
    image = source.image
    inputs = [net.prepare(source).cpu().double() for net in (a, b)]
    if inputs[0].shape != inputs[1].shape or inputs[0].dim() != 3 or len(inputs[0]) != 3:
        return ""
    size = (int(inputs[0].shape[1]), int(inputs[0].shape[2]))
    own = [net.preprocess.transforms.resize for net in (a, b)]
    unlike: list[dict[str, float]] = [{}, {}]
    for resize, resized in _ways(image, size, own):
        words = _described(resize)
        for found, tensor in zip(unlike, inputs, strict=True):
            found[words] = min(found.get(words, 1.0), _unlike(resized, tensor))
    explained = [{words for words, share in found.items() if share < _UNLIKE} for found in unlike]
    if not all(explained) or explained[0] & explained[1]:
        return ""
    ways = [min(found, key=lambda words: found[words]) for found in unlike]
    return f"The images are resized differently: {ways[0]} in A, {ways[1]} in B"


def _ways(image: Image.Image, size: tuple[int, int], own: list[Resize]) -> Iterator[tuple[Resize, Tensor]]:
    """The usual ways to make an image of ``size``, and what they make."""
    usual = [Resize("stretch", size), *(Resize(mode, size, size) for mode in ("shorter", "pad"))]
    usual.append(Resize("shorter", (round(size[0] * 256 / 224), round(size[1] * 256 / 224)), size))
    ways: dict[str, Resize] = {}
    for way in [*(way for way in own if way.made == size), *usual]:
        ways.setdefault(replace(way, interpolation="bilinear", antialias=True).describe(), way)
    pixels = F.pil_to_tensor(image)
    for way in ways.values():
        for interpolation in _SMOOTH:
            smooth = replace(way, interpolation=interpolation, antialias=True)
            yield smooth, F.pil_to_tensor(smooth(image))
        for interpolation in _PLAIN:
            plain = replace(way, interpolation=interpolation, antialias=False)
            yield plain, plain(pixels)


def _described(resize: Resize) -> str:
    filter_ = resize.interpolation.removesuffix("-exact")
    plain = "" if resize.antialias or filter_ == "nearest" else " without antialias"
    return f"{replace(resize, interpolation='bilinear').describe()} {filter_}{plain}"


def _unlike(resized: Any, tensor: Tensor) -> float:
    """The largest share of the variance of a channel that no channel of ``resized`` explains, of RGB or of BGR."""
    if resized.shape != tensor.shape:
        return 1.0
    both = torch.cat([resized.double().flatten(1), tensor.flatten(1)])
    alike = torch.corrcoef(both)[:3, 3:].nan_to_num(0).clamp(min=0) ** 2
    return 1 - max(float(alike.diagonal().min()), float(alike.fliplr().diagonal().min()))
