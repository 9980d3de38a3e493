"""Statistics of one layer call over all images: moments of its channels, the histogram of its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks import merge_moments


class Accumulator:
    """Arrays, numbers and other accumulators, whose sums go to a file and come back."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with arrays of its own; what never changes is shared, which takes a tenth of the time."""
        twin = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray | Accumulator | dict | list):
                setattr(twin, name, deepcopy(value, memo))
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Copies of all fields, which later updates do not change."""
        values = vars(self).items()
        return {
            name: value.state_dict() if isinstance(value, Accumulator) else deepcopy(value) for name, value in values
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        return cls(**deepcopy(dict(state)))


Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_AT_ONCE = 1 << 18  # values that stay in the processor's cache through all sums
_CANCELLED = 1e-5  # a variance below this share of the mean square has lost too many digits

Visit = Callable[[slice, Tensor, Tensor], None]


@dataclass(slots=True)
class MapSums:
    """Sums over the finite values of each map of a batch ``(N, C, P)``, each ``(N, C)`` but ``centre`` ``(C,)``.

    ``squares`` are squared distances from ``centre``. Without a finite value, ``low`` is inf and ``high`` is -inf.
    """

    count: Counts
    total: Floats
    squares: Floats
    centre: Floats
    low: Floats
    high: Floats
    zeros: Counts
    nan: Counts
    inf: Counts


def sums_of_maps(values: Tensor, visit: Visit | None = None) -> MapSums:
    """The sums of each map of ``values`` ``(N, C, P)``, float32 or float64, without an empty axis, on any device.

    Sums are taken in float64, where the square of a float32 is exact. For a channel whose mean is more than 300 times
    its standard deviation, a second pass takes the squares from the mean. ``visit(part, values, finite)`` is called
    for each part of the batch while it is in the processor's cache; ``finite`` has 0 in place of NaN and Inf.
    """
    items, channels, positions = values.shape
    floats = torch.empty(4, items, channels, dtype=torch.float64, device=values.device)
    counts = torch.zeros(4, items, channels, dtype=torch.int64, device=values.device)
    counts[0] = positions
    step = max(1, _AT_ONCE // (channels * positions))
    for start in range(0, items, step):
        part = slice(start, start + step)
        piece = values[part].contiguous()
        finite = _fill(floats[:, part], counts[:, part], piece)
        if visit is not None:
            visit(part, piece, finite)
    low, high, total, squares = floats.cpu().numpy()
    count, zeros, nan, inf = counts.cpu().numpy()
    sums = MapSums(count, total, squares, np.zeros(channels), low, high, zeros, nan, inf)
    _measure_from_the_mean(sums, values, step)
    return sums


def _measure_from_the_mean(sums: MapSums, values: Tensor, step: int) -> None:
    """Repeat the squares of channels whose variance is the small difference of large numbers."""
    count = sums.count.sum(0).clip(min=1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, squares = sums.total.sum(0) / count, sums.squares.sum(0)
        exact = squares - mean * mean * count >= _CANCELLED * squares
    chosen = np.flatnonzero(~exact & (sums.low.min(0) < sums.high.max(0)) & np.isfinite(mean))
    if not chosen.size:
        return
    sums.centre[chosen] = mean[chosen]
    channels = torch.from_numpy(chosen).to(values.device)
    centre = torch.from_numpy(mean[chosen]).to(values.device)[:, None]
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        away = values[part].index_select(1, channels).double() - centre
        sums.squares[part, chosen] = away.masked_fill_(~away.isfinite(), 0.0).square_().sum(2).cpu().numpy()


def _fill(floats: Tensor, counts: Tensor, values: Tensor) -> Tensor:
    """Write low, high, total, squares and count, zeros, nan, inf; return the values with 0 for NaN and Inf."""
    finite = None
    low, high = values.amin(2), values.amax(2)
    if not math.isfinite(float((high - low).sum())):  # finite values need no masks
        finite = torch.isfinite(values)
        counts[2] = torch.isnan(values).sum(2)
        counts[0] = finite.sum(2)
        counts[3] = values.shape[2] - counts[0] - counts[2]
        low = values.masked_fill(~finite, math.inf).amin(2)
        high = values.masked_fill(~finite, -math.inf).amax(2)
    counts[1] = _zeros(values)
    values = values if finite is None else values.masked_fill(~finite, 0.0)
    floats[0], floats[1] = low, high
    doubles = values.double()
    torch.sum(doubles, 2, out=floats[2])
    floats[3] = torch.linalg.vector_norm(doubles, dim=2).square_()
    return values


def _zeros(values: Tensor) -> Tensor:
    """``(N, C)`` number of exact zeros; NumPy counts three times as fast as torch."""
    if float(values.abs().amin()) > 0:  # faster still for convolutions, which rarely have zeros
        return values.new_zeros(values.shape[:2], dtype=torch.int64)
    if values.device.type == "cpu":
        return values.shape[2] - torch.from_numpy(np.count_nonzero(values.numpy(), axis=2))
    return (values == 0).sum(2)


@dataclass
class ChannelMoments(Accumulator):
    """Moments ``(C,)`` of each of C channels, from batches in any split; ``m2`` sums squared distances from the mean.

    Each batch is reduced to float64 sums, which `merge_moments` joins: means and standard deviations agree with those
    of all values at once to nine digits, whatever the split. ``count`` counts finite values, ``inf`` of either
    sign. Without a finite value, ``low`` is inf and ``high`` is -inf.
    """

    count: Counts
    mean: Floats
    m2: Floats
    low: Floats
    high: Floats
    zeros: Counts
    nan: Counts
    inf: Counts

    @classmethod
    def empty(cls, channels: int) -> Self:
        none, zero = np.zeros(channels, np.int64), np.zeros(channels)
        return cls(none, zero, zero, np.full(channels, np.inf), np.full(channels, -np.inf), none, none, none)

    @classmethod
    def of(cls, sums: MapSums) -> Self:
        count, low, high = sums.count.sum(0), sums.low.min(0), sums.high.max(0)
        mean = sums.total.sum(0) / count.clip(min=1)
        with np.errstate(over="ignore", invalid="ignore"):  # squares of float64 beyond 1e154
            off = mean - sums.centre
            m2 = (sums.squares.sum(0) - off * off * count).clip(min=0)
        m2[low >= high] = 0  # constant channels, whatever the rounding
        return cls(count, mean, m2, low, high, sums.zeros.sum(0), sums.nan.sum(0), sums.inf.sum(0))

    @classmethod
    def of_map_means(cls, sums: MapSums) -> Self:
        some = sums.count > 0
        means = sums.total / sums.count.clip(min=1)
        moments = cls.empty(sums.count.shape[1])
        moments.count = some.sum(0)
        moments.mean = means.sum(0) / moments.count.clip(min=1)
        with np.errstate(over="ignore"):
            moments.m2 = ((means - moments.mean) ** 2).sum(0, where=some)
        moments.low = means.min(0, where=some, initial=np.inf)
        moments.high = means.max(0, where=some, initial=-np.inf)
        moments.zeros = ((means == 0) & some).sum(0)
        return moments

    @property
    def variance(self) -> Floats:
        """``(C,)`` population variance, 0 if no value is finite."""
        variance: Floats = self.m2 / self.count.clip(min=1)
        return variance

    def as_one(self) -> ChannelMoments:
        c, count = self, self.count.sum(keepdims=True)
        mean = (c.mean * c.count).sum(keepdims=True) / count.clip(min=1)
        with np.errstate(over="ignore", invalid="ignore"):  # doubles beyond 1e154
            m2 = (c.m2 + c.count * (c.mean - mean) ** 2).sum(keepdims=True)
        low, high = c.low.min(keepdims=True, initial=np.inf), c.high.max(keepdims=True, initial=-np.inf)
        return ChannelMoments(count, mean, m2, low, high, *(n.sum(keepdims=True) for n in (c.zeros, c.nan, c.inf)))

    def merge(self, other: ChannelMoments) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.count, self.mean, self.m2 = merge_moments(
                (self.count, self.mean, self.m2), (other.count, other.mean, other.m2)
            )
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self.zeros, self.nan, self.inf = self.zeros + other.zeros, self.nan + other.nan, self.inf + other.inf


_KEYS = 1 << 16
_BINS = 128  # to an octave: the 7 highest bits of the mantissa
_OCTAVES = _KEYS // _BINS  # 256 for each sign
_MIDDLE = _KEYS // 2


class ValueHistogram(Accumulator):
    """Counts of values by the 16 highest bits of their float32: sign, exponent and 7 bits of the mantissa.

    The ends of a bin differ by at most 1/128 of their value, so the relative error is below 2^-7. Quantiles between two
    values are interpolated like NumPy's. Counts are whole numbers, so histograms merge exactly in any order. This is
    DDSketch (Masson, Rim, Lee 2019, arXiv:1908.10693) with the floating-point format as its logarithm. A value costs a
    nanosecond, against 35 in the KLL sketch of Apache DataSketches and 90 in a t-digest. Zero has its own bin, which
    also holds magnitudes below 1e-40; below 1e-38 bins are 1e-40 wide. NaN and Inf are left out.
    """

    def __init__(self) -> None:
        # only octaves with values are stored: 60 of 512 for a typical layer
        self._rows = np.full(_OCTAVES, -1, np.int64)
        self._counts = np.zeros((0, _BINS), np.int64)

    def update(self, values: Tensor) -> None:
        """Count ``values``, float32 of any shape."""
        keys = values.contiguous().view(torch.int32) >> 16
        counts = torch.bincount(keys.add_(_MIDDLE).flatten(), minlength=_KEYS).cpu().numpy()
        dense = counts.reshape(_OCTAVES, _BINS)
        octaves = np.flatnonzero(dense.any(axis=1))
        self._add(octaves, dense[octaves])

    def _add(self, octaves: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        missing = octaves[self._rows[octaves] < 0]
        if missing.size:
            self._rows[missing] = np.arange(len(self._counts), len(self._counts) + missing.size)
            self._counts = np.concatenate([self._counts, np.zeros((missing.size, _BINS), np.int64)])
        self._counts[self._rows[octaves]] += counts

    def merge(self, other: ValueHistogram) -> None:
        """Add the counts of ``other``."""
        self._add(*other._filled())

    def _filled(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        octaves = (self._rows >= 0).nonzero()[0]
        return octaves, self._counts[self._rows[octaves]]

    def bins(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        """Lower ends, upper ends and counts ``(B,)`` of the non-empty bins, in ascending order."""
        dense = np.zeros((_OCTAVES, _BINS), np.int64)
        octaves, filled = self._filled()
        dense[octaves] = filled
        flat = dense.reshape(-1)
        # order of keys: negative numbers from -0 downwards, then positive numbers from 0 upwards
        zeros = flat[0] + flat[_MIDDLE]
        near, far = _ends()
        negative, positive = flat[1 : len(near)], flat[_MIDDLE + 1 : _MIDDLE + len(near)]
        counts = np.concatenate([negative[::-1], [zeros], positive])
        lower = np.concatenate([-far[1:][::-1], [0.0], near[1:]])
        upper = np.concatenate([-near[1:][::-1], [0.0], far[1:]])
        some = counts > 0
        return lower[some], upper[some], counts[some]

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """The quantiles at ``shares`` (0 to 1) of all finite values; NaN if there are none."""
        lower, upper, counts = self.bins()
        if not counts.size:
            return [float("nan")] * len(shares)
        ends = np.cumsum(counts)

        def ranked(ranks: NDArray[np.float64]) -> NDArray[np.float64]:
            at = np.searchsorted(ends, ranks, side="right")
            within = (ranks - (ends[at] - counts[at]) + 0.5) / counts[at]
            value: NDArray[np.float64] = lower[at] + (upper[at] - lower[at]) * within
            return value

        ranks = np.asarray(shares, np.float64) * (ends[-1] - 1)
        below, above = ranked(np.floor(ranks)), ranked(np.ceil(ranks))
        return [float(value) for value in below + (above - below) * (ranks % 1)]

    def state_dict(self) -> dict[str, Any]:
        """Arrays for `from_state`."""
        octaves, counts = self._filled()
        return {"octaves": octaves, "counts": counts}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state_dict` returned."""
        histogram = cls()
        histogram._add(np.array(state["octaves"], np.int64), np.array(state["counts"], np.int64))
        return histogram


@cache
def _ends() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    keys = np.arange(0x7F81, dtype=np.uint32) << 16  # infinity included
    with np.errstate(all="ignore"):
        edges = keys.view(np.float32).astype(np.float64)
    edges[-1] = float(np.finfo(np.float32).max)
    return edges[:-1], edges[1:]


def in_intervals(
    values: NDArray[np.float64], counts: NDArray[np.int64], low: float, high: float, number: int
) -> NDArray[np.int64]:
    """Each of ``values`` counted ``counts`` times in equal intervals; without a range all are in the middle.

    `numpy.histogram` refuses a range that is hardly wider than the distance between two floats.
    """
    half = high / 2 - low / 2  # the whole range may overflow
    at = (values / 2 - low / 2) / half * number if half > 0 else np.full(len(values), number // 2)
    return np.bincount(at.astype(int).clip(0, number - 1), counts, number).astype(np.int64)
