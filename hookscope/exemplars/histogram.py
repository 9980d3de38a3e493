"""Histograms of the values of each channel in equal intervals, whose width follows the range of the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_LABELS = 5000
"""With more labels there is no selectivity: the mean values of each class would take too much memory."""


class ClassMeans:
    """The mean value of each channel over the images of each class."""

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.too_many = False
        self._sums: dict[str, Floats] = {}
        self._images: dict[str, int] = {}

    def update(self, values: Floats, labels: Sequence[str]) -> None:
        """Add ``values`` ``(N, C)`` of images with these labels; those with an empty label are left out."""
        for label in filter(None, dict.fromkeys(labels)):
            rows = [at for at, other in enumerate(labels) if other == label]
            self._add(label, values[rows].sum(0), len(rows))

    def merge(self, other: ClassMeans) -> None:
        """Add the images of ``other``."""
        for label, sums in other._sums.items():
            self._add(label, sums, other._images[label])
        if other.too_many:
            self._give_up()

    def _add(self, label: str, sums: Floats, images: int) -> None:
        if self.too_many:
            return
        self._sums[label] = self._sums[label] + sums if label in self._sums else sums
        self._images[label] = self._images.get(label, 0) + images
        if len(self._sums) > MOST_LABELS:
            self._give_up()

    def _give_up(self) -> None:
        self.too_many = True
        self._sums.clear()
        self._images.clear()

    def selectivity(self) -> list[tuple[str, float | None]]:
        """The best class of each channel and its selectivity index, see `ChannelExemplars`.

        None with fewer than two classes, for negative means, and where a value is NaN or Inf.
        """
        labels = sorted(self._sums)
        if len(labels) < 2:
            return [("", None)] * self.channels
        means = np.stack([self._sums[label] / self._images[label] for label in labels])
        best, at = means.max(0), means.argmax(0)
        with np.errstate(all="ignore"):
            others = (means.sum(0) - best) / (len(labels) - 1)
            index = (best - others) / (best + others)
        valid = (means >= 0).all(0) & np.isfinite(index)
        return [
            (labels[where], float(value)) if known else ("", None)
            for where, value, known in zip(at, index, valid, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and arrays for `from_state`."""
        labels = list(self._sums)
        sums = np.stack(list(self._sums.values())) if labels else np.zeros((0, self.channels))
        images = [self._images[label] for label in labels]
        return {"labels": labels, "images": images, "sums": sums, "too_many": self.too_many}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], channels: int) -> Self:
        """Restore what `state_dict` returned."""
        restored = cls(channels)
        for label, images, sums in zip(state["labels"], state["images"], np.array(state["sums"]), strict=True):
            restored._add(label, sums.reshape(channels), int(images))
        restored.too_many = bool(state["too_many"])
        return restored


Ints = NDArray[np.int64]

_BINS = 64
_FINEST = 20  # a bin is at least 2^-20 of the largest absolute value
_ZERO = -1100  # below the exponents of all other values
_MOST_WAITING = 128  # rows of values


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
        """Add the counts of ``other``."""
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
        """Counts ``(B,)`` and the ends ``(B + 1,)`` of their intervals, for each channel; none without values.

        A channel of one value has one interval, which is 1 wide, as in `numpy.histogram`.
        """
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
        """Arrays for `from_state`."""
        self._count()
        return {"low": self.low, "high": self.high, "counts": self._counts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], channels: int) -> Self:
        """Restore what `state_dict` returned."""
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
