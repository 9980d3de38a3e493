"""The statistics of a layer call, and the columns of a call and of a channel. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hookscope.columns import Column, Columns, Row
from hookscope.display import Shown
from hookscope.findings import Finding, single
from hookscope.hooks import CALL, Call, key_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hookscope.statistics.moments import ChannelMoments, ValueHistogram

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""Shares of the quantiles that statistics have."""


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
        dead_channels: Channels with one value everywhere, to a millionth of the range of other channels.
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

    def _columns(self) -> Columns:
        return STATISTICS

    @property
    def key(self) -> str:
        """``name`` or ``name#call``, ``(model)`` for what the model returns, and the part if there are several."""
        return key_of(self.call, self.part)

    @property
    def highest_rank(self) -> int:
        """The highest possible effective rank: the channels, or one less than the values of each if these are fewer."""
        return min(self.channels, self.values // max(self.channels, 1) - 1)


def _place(place: ValuePosition | None) -> dict[str, Any] | None:
    return place and place._asdict()


def _quantile(share: float) -> Column:
    return Column(f"p{100 * share:g}", lambda layer: layer.quantiles.get(share), where="wide")


STATISTICS = Columns(
    *CALL.but(type={"need": 1}, call={"where": "all"}),
    Column("part", hide="zero"),
    Column("calls", where="rows"),
    Column("shape", need=2),
    Column("images", lambda layer: layer.items, where="rows"),
    Column("mean", need=8),
    Column("std", need=7),
    Column("min", need=4),
    Column("max", need=4),
    Column("min_at", lambda layer: _place(layer.low_at), where="rows"),
    Column("max_at", lambda layer: _place(layer.high_at), where="rows"),
    Column("rms", where="wide"),
    Column("zeros"),
    *map(_quantile, QUANTILES),
    Column("nan", where="wide"),
    Column("inf", where="wide"),
    Column("channels", where="wide"),
    Column("dead", lambda layer: len(layer.dead_channels)),
    Column("saturated", need=5, hide="unknown"),
    Column("duplicate", lambda layer: sum(len(group) - 1 for group in layer.duplicate_channels), need=3),
    Column("rank", where="wide"),
    Column("findings", need=6, hide="zero"),
    Column("weights", where="rows"),
    Column("dead_channels", where="nested"),
    Column("duplicate_channels", where="nested"),
    Column("nonfinite_at", lambda layer: _place(layer.nonfinite_at), where="nested"),
)
"""What ``stats`` says of a layer call, a `LayerStatistics`."""

CHANNELS = Columns(
    *CALL.but("type"),
    Column("part", hide="zero"),
    Column("channel"),
    Column("mean", need=7),
    Column("std", need=6),
    Column("min", need=4),
    Column("max", need=4),
    Column("zeros"),
    Column("nan", hide="zero"),
    Column("inf", hide="zero"),
    Column("dead"),
    Column("saturated", need=5, hide="unknown"),
    Column("duplicate_of", hide="unknown"),
    Column("weights"),
)
"""What ``stats`` says of a channel; ``dead`` is 1 or 0, as a layer's row counts them."""


def statistics_rows(layers: Sequence[LayerStatistics], findings: Sequence[Finding], weights: str) -> list[Row]:
    names: dict[str, list[str]] = {}
    for finding in single(findings):
        names.setdefault(finding.layer, []).append(finding.finding)
    return [STATISTICS.row(layer, findings=names.get(layer.key, []), weights=weights) for layer in layers]


def channel_rows(layers: Sequence[LayerStatistics], weights: str) -> Iterator[Row]:
    for layer in layers:
        moments, saturated, dead = layer.by_channel, layer.saturated_by_channel, set(layer.dead_channels)
        first = {channel: group[0] for group in layer.duplicate_channels for channel in group[1:]}
        for channel in range(layer.channels):
            finite, nan, inf = (int(counts[channel]) for counts in (moments.count, moments.nan, moments.inf))
            yield CHANNELS.row(
                layer,
                channel=channel,
                mean=moments.mean[channel] if finite else None,
                std=moments.variance[channel] ** 0.5 if finite else None,
                min=moments.low[channel] if finite else None,
                max=moments.high[channel] if finite else None,
                zeros=moments.zeros[channel] / max(1, finite + nan + inf),
                nan=nan,
                inf=inf,
                dead=int(channel in dead),
                saturated=None if saturated is None else saturated[channel],
                duplicate_of=first.get(channel),
                weights=weights,
            )
