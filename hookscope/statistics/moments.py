"""Counts, means, variances and extremes of many channels, computed in pieces and merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks import merge_moments


class Accumulator:
    """A dataclass of arrays, numbers and other accumulators."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of all fields, which later updates do not change."""
        values = vars(self).items()
        return {
            name: value.state_dict() if isinstance(value, Accumulator) else deepcopy(value) for name, value in values
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state_dict` returned."""
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
        """Moments of no values."""
        none, zero = np.zeros(channels, np.int64), np.zeros(channels)
        return cls(none, zero, zero, np.full(channels, np.inf), np.full(channels, -np.inf), none, none, none)

    @classmethod
    def of(cls, sums: MapSums) -> Self:
        """Moments of a batch."""
        count, low, high = sums.count.sum(0), sums.low.min(0), sums.high.max(0)
        mean = sums.total.sum(0) / count.clip(min=1)
        with np.errstate(over="ignore", invalid="ignore"):  # squares of float64 beyond 1e154
            off = mean - sums.centre
            m2 = (sums.squares.sum(0) - off * off * count).clip(min=0)
        m2[low >= high] = 0  # constant channels, whatever the rounding
        return cls(count, mean, m2, low, high, sums.zeros.sum(0), sums.nan.sum(0), sums.inf.sum(0))

    @classmethod
    def of_map_means(cls, sums: MapSums) -> Self:
        """Moments of the means of all maps with a finite value."""
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
        """The moments of the values of all channels together."""
        c, count = self, self.count.sum(keepdims=True)
        mean = (c.mean * c.count).sum(keepdims=True) / count.clip(min=1)
        with np.errstate(over="ignore", invalid="ignore"):  # doubles beyond 1e154
            m2 = (c.m2 + c.count * (c.mean - mean) ** 2).sum(keepdims=True)
        low, high = c.low.min(keepdims=True, initial=np.inf), c.high.max(keepdims=True, initial=-np.inf)
        return ChannelMoments(count, mean, m2, low, high, *(n.sum(keepdims=True) for n in (c.zeros, c.nan, c.inf)))

    def merge(self, other: ChannelMoments) -> None:
        """Add the moments of other values."""
        with np.errstate(over="ignore", invalid="ignore"):
            self.count, self.mean, self.m2 = merge_moments(
                (self.count, self.mean, self.m2), (other.count, other.mean, other.m2)
            )
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self.zeros, self.nan, self.inf = self.zeros + other.zeros, self.nan + other.nan, self.inf + other.inf
