"""Statistics of a layer call over all images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookscope.display import Cells, Shown
from hookscope.hooks import Call, key_of
from hookscope.statistics.moments import ChannelMoments
from hookscope.statistics.quantiles import ValueHistogram

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The shares whose quantiles are computed."""


class ValuePosition(NamedTuple):
    """Position of a value: the image (None if an item is not an image), the channel, the position in its map."""

    image: str | None
    channel: int
    position: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class LayerStatistics(Shown):
    """Statistics of one layer call over all images.

    Attributes:
        call: The call.
        part: Name of the tensor if the output has several, else empty.
        calls: How often the layer ran in a pass.
        items: Number of items (usually images).
        shape: ``(C, *positions)`` of one item, None on an axis that varies.
        values: Number of values, NaN and Inf included.
        mean, std, min, max, rms: Of the finite values, None if there are none; ``std`` is the population's.
        low_at, high_at, nonfinite_at: Positions of the lowest, the highest, and the first NaN or Inf value.
        zeros: Share of values that are exactly 0, from 0 to 1.
        nan, inf: Counts of NaN and Inf.
        quantiles: By share, see `QUANTILES`; relative error below 2^-7.
        channels: Number of channels C.
        dead_channels: Channels with one constant value over all images and positions.
        saturated: Share of values within 1 % of a bound, None for an unbounded function.
        duplicate_channels: Groups of channels that are equal up to a factor and an offset.
        rank: Effective rank of the channel covariance, 0 to C; None if it was not measured.
        between_images: Root mean square over channels of the standard deviation of the image means; None for one image.
        by_channel: Moments of each channel.
        saturated_by_channel: ``(C,)`` share of each channel, None for an unbounded function.
        histogram: Histogram of all values.
    """

    call: Call
    part: str
    calls: int
    items: int
    shape: tuple[int | None, ...]
    values: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    rms: float | None
    low_at: ValuePosition | None
    high_at: ValuePosition | None
    nonfinite_at: ValuePosition | None
    zeros: float
    nan: int
    inf: int
    quantiles: Mapping[float, float]
    channels: int
    dead_channels: tuple[int, ...]
    saturated: float | None
    duplicate_channels: tuple[tuple[int, ...], ...]
    rank: float | None
    between_images: float | None
    by_channel: ChannelMoments
    saturated_by_channel: NDArray[np.float64] | None
    histogram: ValueHistogram

    def _cells(self) -> Cells:
        cells = {"index": self.call.index, "name": self.key, "type": self.call.type}
        cells |= {name: getattr(self, name) for name in ("shape", "mean", "std", "min", "max", "zeros")}
        return cells | {"dead": len(self.dead_channels), "nonfinite": self.nan + self.inf}

    @property
    def key(self) -> str:
        """``name`` or ``name#call``, ``(model)`` for what the model returns, and the part if there are several."""
        return key_of(self.call, self.part)

    @property
    def highest_rank(self) -> int:
        """The highest possible effective rank: the channels, or one less than the values of each if these are fewer."""
        return min(self.channels, self.values // max(self.channels, 1) - 1)
