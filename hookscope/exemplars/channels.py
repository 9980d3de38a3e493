"""What is kept of each channel in a stream of images: its best ones, histograms of its values, means of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from hookscope.hooks import as_float

_SIDE = 12  # with 8, small objects on one background are near-duplicates; with 16, JPEG files of low quality are none
_CLIP = (3, 7, 7)
_TOLERANCE = 0.3
_FLAT = 2e-3  # for images of one colour, in units of the input
_LARGEST = 6e4  # of float16
_PAIRS = 4096  # of images, compared at a time
_BINS = 64
_FINEST = 20  # a bin is at least 2^-20 of the largest absolute value
_ZERO = -1100  # below the exponents of all other values
_MOST_WAITING = 128  # rows of values

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

Prints = NDArray[np.float16]
"""``(N, D)``: a small picture of each image, see `prints_of`."""


def prints_of(images: Any) -> Prints:
    """A block mean value hash of each prepared image: the means of its colours in 12 x 12 blocks, not rounded to bits.

    ``images`` are the first input of the model, a tensor or a list of tensors. A clip has 7 x 7 blocks of 3 moments.
    The hash is by Yang, Gu and Niu (Block Mean Value Based Image Perceptual Hashing, 2006) before its last step: a
    bit of a smooth background is a matter of chance, its mean is not.
    """
    parts = list(images) if isinstance(images, (list, tuple)) else [images]
    listed = parts[0] is not images
    prints = [_print_of(as_float(part)[None] if listed else as_float(part)) for part in parts]
    return np.concatenate(prints)


def _print_of(images: Tensor) -> Prints:
    if images.dim() == 5:
        blocks = F.adaptive_avg_pool3d(images, _CLIP)
    elif images.dim() == 4:
        blocks = F.adaptive_avg_pool2d(images, _SIDE)
    else:
        blocks = images
    flat: Prints = blocks.flatten(1).clamp(-_LARGEST, _LARGEST).to("cpu", torch.float16).numpy()
    return flat


class Duplicates:
    """Which of some images, with hashes ``(U, D)``, are near-duplicates.

    No mean may differ by more than 0.3 standard deviations of the means, the larger one of the two images. Of drawings
    and photographs, copies in JPEG of quality 50 to 95, of half to twice the size, or one level brighter differ by 0.27
    at most, other images by 1.6 at least, and two objects drawn on one background by 0.33 at least.
    """

    def __init__(self, prints: Prints) -> None:
        self._prints = prints.astype(np.float32)
        self._most = _TOLERANCE * self._prints.std(1) + _FLAT
        self._mean = self._prints.mean(1)

    def __call__(self, images: Ints, others: Ints) -> NDArray[np.bool_]:
        """Whether the images ``(E,)`` are near-duplicates of ``others`` ``(E,)``, by their rows; one is of itself."""
        near: NDArray[np.bool_] = images == others
        most = np.maximum(self._most[images], self._most[others])
        perhaps = np.flatnonzero(~near & (np.abs(self._mean[images] - self._mean[others]) <= most))
        pairs, at = np.unique(images[perhaps] * len(self._mean) + others[perhaps], return_inverse=True)
        same = np.zeros(len(pairs), bool)
        for first in range(0, len(pairs), _PAIRS):
            row, other = np.divmod(pairs[first : first + _PAIRS], len(self._mean))
            apart = np.abs(self._prints[row] - self._prints[other]).max(1, initial=0)
            same[first : first + _PAIRS] = apart <= np.maximum(self._most[row], self._most[other])
        near[perhaps] = same[at]
        return near


PrintsOf = Callable[[Ints], Prints]
"""Gives the hashes of the images at these positions."""


_CANDIDATE = np.dtype(
    [("channel", np.int64), ("value", np.float64), ("image", np.int64), ("row", np.int64), ("column", np.int64)]
)
Candidates = NDArray[Any]
"""Values ``(E,)`` of channels on images, by the positions of both; rows and columns are -1 without places."""


def candidates(*fields: Any) -> Candidates:
    """Arrays of channels, values, images, rows and columns as one structured array."""
    rows: Candidates = np.rec.fromarrays(fields, _CANDIDATE)
    return rows


class BestImages:
    """The ``top`` images of each channel with the largest values, or with the smallest if ``least``.

    Of equal values the image that comes first in the list wins. Of near-duplicates the best counts, so copies of one
    image do not push out others. The result does not depend on the order in which candidates come, as long as being
    near-duplicates is transitive. `Duplicates` is not for images that change little by little, as in a film.
    """

    def __init__(self, channels: int, top: int, least: bool = False) -> None:
        self.channels, self.top, self.least = channels, top, least
        self._kept, self._waiting = np.zeros(0, _CANDIDATE), list[Candidates]()
        self._bounds = np.full(channels, np.inf if least else -np.inf), np.full(channels, np.iinfo(np.int64).max)

    def may_enter(self, values: Floats, images: Ints) -> NDArray[np.bool_]:
        """Which finite ``values`` ``(N, C)`` of ``images`` ``(N,)`` may be among the best, as far as is known."""
        bound, image = self._bounds
        better = values < bound if self.least else values > bound
        may: NDArray[np.bool_] = better | ((values == bound) & (images[:, None] < image))
        return may & np.isfinite(values)

    def add(self, found: Candidates) -> None:
        if len(found):
            self._waiting.append(found)

    def merge(self, other: BestImages, prints_of: PrintsOf) -> None:
        """Add what another has found; sorted when as many wait as may be kept, which is seldom in a long run."""
        for rows in (other._kept, *other._waiting):
            self.add(rows)
        if sum(map(len, self._waiting)) >= self.channels * self.top:
            self.best(prints_of)

    def best(self, prints_of: PrintsOf) -> Candidates:
        """The best so far, by channel and then from the best to the worst."""
        if self._waiting:
            self._kept = self._without_worse(np.concatenate([self._kept, *self._waiting]), prints_of)
            self._waiting.clear()
            counts = np.bincount(self._kept["channel"], minlength=self.channels)
            full = counts == self.top
            last = np.cumsum(counts)[full] - 1
            self._bounds[0][full], self._bounds[1][full] = self._kept["value"][last], self._kept["image"][last]
        return self._kept

    def _without_worse(self, rows: Candidates, prints_of: PrintsOf) -> Candidates:
        value = rows["value"] if self.least else -rows["value"]
        rows = rows[np.lexsort((rows["image"], value, rows["channel"]))]
        kept, left = np.zeros(len(rows), bool), np.arange(len(rows))
        images, image = np.unique(rows["image"], return_inverse=True)
        are_near = Duplicates(prints_of(images))
        for _ in range(self.top):  # each time the best of each channel that is left, and not its near-duplicates
            if not left.size:
                break
            channel = rows["channel"][left]
            first = np.concatenate([[True], channel[1:] != channel[:-1]])
            best = left[first]
            kept[best] = True
            left = left[~are_near(image[left], image[best][np.cumsum(first) - 1])]
        return rows[kept]

    @property
    def images(self) -> Ints:
        return np.unique(np.concatenate([part["image"] for part in (self._kept, *self._waiting)]))

    def state_dict(self, prints_of: PrintsOf) -> dict[str, Any]:
        best = self.best(prints_of)
        return {name: np.ascontiguousarray(best[name]) for name in _CANDIDATE.names or ()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], channels: int, top: int, least: bool = False) -> Self:
        restored = cls(channels, top, least)
        rows = candidates(*(np.array(state[name]) for name in _CANDIDATE.names or ()))
        if len(rows) and not 0 <= rows["channel"].min() <= rows["channel"].max() < channels:
            raise ValueError("a channel that the layer does not have")
        restored.add(rows)
        return restored


MOST_LABELS = 5000
"""With more labels there is no selectivity: the mean values of each class would take too much memory."""


class ClassMeans:
    """The mean value of each channel over the images of each class."""

    def __init__(self, channels: int) -> None:
        self.channels, self.too_many = channels, False
        self._sums: dict[str, Floats] = {}  # ``(C + 1,)`` of each class, with the number of its images at the end

    def update(self, values: Floats, labels: Sequence[str]) -> None:
        """Add ``values`` ``(N, C)`` of images with these labels; those with an empty label are left out."""
        for label in filter(None, dict.fromkeys(labels)):
            rows = [at for at, other in enumerate(labels) if other == label]
            self._add(label, np.append(values[rows].sum(0), len(rows)))

    def merge(self, other: ClassMeans) -> None:
        for label, sums in other._sums.items():
            self._add(label, sums)
        self._give_up(other.too_many)

    def _add(self, label: str, sums: Floats) -> None:
        self._sums[label] = self._sums[label] + sums if label in self._sums else sums
        self._give_up(len(self._sums) > MOST_LABELS)

    def _give_up(self, too_many: bool) -> None:
        self.too_many |= too_many
        if self.too_many:
            self._sums.clear()

    def selectivity(self) -> list[tuple[str, float | None]]:
        """The best class of each channel and its selectivity, see `ChannelExemplars`; None where it has no meaning."""
        labels = sorted(self._sums)
        if len(labels) < 2:
            return [("", None)] * self.channels
        means = np.stack([self._sums[label][:-1] / self._sums[label][-1] for label in labels])
        best, at = means.max(0), means.argmax(0)
        with np.errstate(all="ignore"):
            others = (means.sum(0) - best) / (len(labels) - 1)
            index = (best - others) / (best + others)
        valid = (means >= 0).all(0) & np.isfinite(index)
        rows = zip(at, index, valid, strict=True)
        return [(labels[where], float(value)) if known else ("", None) for where, value, known in rows]

    def state_dict(self) -> dict[str, Any]:
        sums = np.array(list(self._sums.values())).reshape(-1, self.channels + 1)
        images = sums[:, -1].astype(int).tolist()
        return {"labels": [*self._sums], "images": images, "sums": sums[:, :-1].copy(), "too_many": self.too_many}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], channels: int) -> Self:
        restored = cls(channels)
        for label, images, sums in zip(state["labels"], state["images"], np.array(state["sums"]), strict=True):
            restored._add(label, np.append(sums.reshape(channels), int(images)))
        restored.too_many = bool(state["too_many"])
        return restored


class ChannelHistograms:
    """Counts of each channel in at most 64 bins whose width is the smallest power of 2 that spans the values.

    Bins begin at multiples of their width, so two of them make one of twice the width: the histogram depends only on
    the values, not on their order or on how parts were merged. At least about half of the bins lie in the range.
    """

    def __init__(self, channels: int) -> None:
        self.low, self.high = np.full(channels, np.inf), np.full(channels, -np.inf)
        self._exponent, self._first = np.full(channels, _ZERO), np.zeros(channels, np.int64)
        self._counts = np.zeros((channels, _BINS), np.int64)
        self._waiting = list[Floats]()

    def update(self, values: Floats) -> None:
        """Count ``values`` ``(N, C)``; NaN and Inf are left out."""
        self._waiting.append(values)
        if sum(map(len, self._waiting)) >= _MOST_WAITING:
            self._count()

    def merge(self, other: ChannelHistograms) -> None:
        if (other.low <= other.high).any():
            self._widen(other.low, other.high)
            channel, bins = other._counts.nonzero()
            first = (bins + other._first[channel]) >> np.minimum(self._exponent - other._exponent, 63)[channel]
            np.add.at(self._counts, (channel, first - self._first[channel]), other._counts[channel, bins])
        for values in other._waiting:
            self.update(values)

    def _count(self) -> None:
        if not self._waiting:
            return
        values = np.concatenate(self._waiting)
        self._waiting.clear()
        finite = np.isfinite(values)
        low, high = np.where(finite, values, np.inf).min(0), np.where(finite, values, -np.inf).max(0)
        self._widen(low, high)
        channel = np.nonzero(finite)[1]
        bins = _bin_of(values[finite], self._exponent[channel]) - self._first[channel]
        np.add.at(self._counts, (channel, bins), 1)

    def _widen(self, low: Floats, high: Floats) -> None:
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        some = self.low <= self.high
        low, high = np.where(some, self.low, 0.0), np.where(some, self.high, 0.0)
        exponent = _exponents(low, high)
        first = _bin_of(low, exponent)
        changed = np.flatnonzero((exponent != self._exponent) | (first != self._first))
        channel, bins = self._counts[changed].nonzero()
        channel = changed[channel]
        counts = self._counts[channel, bins]
        at = (bins + self._first[channel]) >> np.minimum(exponent - self._exponent, 63)[channel]
        self._counts[changed] = 0
        np.add.at(self._counts, (channel, at - first[channel]), counts)
        self._exponent, self._first = exponent, first

    def shown(self) -> list[tuple[Ints, Floats]]:
        """Counts ``(B,)`` and ends ``(B + 1,)`` of their intervals for each channel; a single value has one, 1 wide."""
        self._count()
        return [self._shown(channel) for channel in range(len(self.low))]

    def _shown(self, channel: int) -> tuple[Ints, Floats]:
        low, high = self.low[channel], self.high[channel]
        if low > high:
            return np.zeros(0, np.int64), np.zeros(1)
        if low == high:
            return self._counts[channel].sum(keepdims=True), np.array([low - 0.5, low + 0.5])
        exponent, first = self._exponent[channel], self._first[channel]
        bins = int(_bin_of(high, exponent) - first) + 1
        return self._counts[channel, :bins].copy(), np.ldexp((first + np.arange(bins + 1)).astype(float), exponent)

    def state_dict(self) -> dict[str, Any]:
        self._count()
        return {"low": self.low, "high": self.high, "counts": self._counts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], channels: int) -> Self:
        restored = cls(channels)
        restored._widen(np.array(state["low"]), np.array(state["high"]))
        restored._counts = np.array(state["counts"], np.int64).reshape(channels, _BINS)
        return restored


def _bin_of(values: Any, exponent: Any) -> Ints:
    bins: Ints = np.floor(np.ldexp(values, -exponent)).astype(np.int64)
    return bins


def _exponents(low: Floats, high: Floats) -> Ints:
    """The binary logarithm of the width: the smallest that leaves the range in `_BINS` bins."""
    largest = np.maximum(np.abs(low), np.abs(high))
    finest = np.where(largest > 0, np.frexp(largest)[1] - _FINEST, _ZERO)
    halves = high / 2 - low / 2  # the whole range may overflow
    exponent = np.maximum(finest, np.where(halves > 0, np.frexp(halves / (_BINS // 2))[1] - 1, _ZERO)).astype(np.int64)
    for _ in range(2):
        exponent += _bin_of(high, exponent) - _bin_of(low, exponent) >= _BINS
    return exponent
