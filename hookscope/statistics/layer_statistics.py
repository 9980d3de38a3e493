"""What is known of a layer call over all images: the facts that a `LayerAccumulator` comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookscope.hooks import Call
from hookscope.statistics.moments import ChannelMoments
from hookscope.statistics.quantiles import ValueHistogram

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The shares whose quantiles a row of statistics has."""


class ValuePosition(NamedTuple):
    """Where a value was seen: the image (None where an item is no image), the channel, the position in its map."""

    image: str | None
    channel: int
    position: tuple[int, ...]


@dataclass(frozen=True)
class LayerStatistics:
    """What is known of one layer call over all images.

    Attributes:
        call: Which call.
        part: Which tensor of an output that has several, else empty.
        calls: How often the layer ran in a pass.
        items: How many items (images, mostly) its outputs held.
        shape: ``(C, *positions)`` of one item, None on an axis that varies.
        values: How many values, NaN and Inf included.
        mean, std, min, max, rms: Of the finite values; None where there are none. ``std`` is the population's.
        low_at, high_at, nonfinite_at: Where the lowest, the highest and the first NaN or Inf were seen.
        zeros: Share of values that are exactly 0, from 0 to 1.
        nan, inf: How many.
        quantiles: By share, see `QUANTILES`; relative error below 2^-7.
        channels: C.
        dead_channels: Those that never left their constant, over all images and positions.
        saturated: Share of values within 1 % of a bound, None for an unbounded function.
        duplicate_channels: Groups of channels that are the same up to a factor and an offset.
        rank: Effective rank of the channel covariance, from 0 to C; None where it was not asked for.
        between_images: Standard deviation of the channels' image means (root mean square); None for a single image.
        by_channel: Moments of each channel.
        saturated_by_channel: ``(C,)`` share of each channel, None for an unbounded function.
        histogram: Of all values.
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

    @property
    def key(self) -> str:
        """``name``, ``name#call``, and the part where there are several."""
        return f"{self.call.key} {self.part}" if self.part else self.call.key

    @property
    def highest_rank(self) -> int:
        """The highest possible effective rank: the channels, or one less than the values of each if these are fewer."""
        return min(self.channels, self.values // max(self.channels, 1) - 1)
