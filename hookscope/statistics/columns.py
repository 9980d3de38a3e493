"""The columns of statistics: of a layer call, and of a channel. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hookscope.columns import Column, Columns, Row
from hookscope.findings import Finding, single
from hookscope.hooks import CALL

if TYPE_CHECKING:
    from hookscope.statistics.moments import LayerStatistics, ValuePosition

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""Shares of the quantiles that statistics have."""


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
    Column("mean", need=7),
    Column("std", need=6),
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
    Column("findings", hide="zero"),
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
