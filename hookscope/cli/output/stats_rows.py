"""Rows of statistics: what ``stats`` prints of a layer call, and of a channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hookscope import report, statistics
from hookscope.cli.output.report import Columns, Row, Section, call_row
from hookscope.findings import Finding
from hookscope.report import NESTED_STATISTICS_FIELDS as NESTED_FIELDS, STATISTICS_FIELDS as FIELDS

TABLE_FIELDS = (
    "index", "name", "type", "call", "order", "part", "shape", "mean", "std", "min", "max", "zeros", "dead",
    "saturated", "duplicate", "findings",
)  # fmt: skip
_IF_SHOWN = ("call", "part", "nan", "inf", "findings"), ("saturated", "duplicate_of")  # with values, if known
_LEAST_NEEDED = ({"type"}, {"shape"}, {"duplicate"}, {"min", "max"}, {"saturated"}, {"std"}, {"mean"})
CHANNEL_FIELDS = (
    "index", "name", "call", "order", "part", "channel", "mean", "std", "min", "max", "zeros", "nan", "inf", "dead",
    "saturated", "duplicate_of", "weights",
)  # fmt: skip


def layer_section(layers: Sequence[statistics.LayerStatistics], findings: Sequence[Finding], weights: str) -> Section:
    """A row for each layer call."""
    rows = report.statistics_rows(layers, findings, weights)
    return Section(rows, FIELDS, "layer", NESTED_FIELDS, Columns(TABLE_FIELDS, *_IF_SHOWN, least_needed=_LEAST_NEEDED))


def channel_section(layers: Sequence[statistics.LayerStatistics], weights: str) -> Section:
    """A row for each channel of each layer call; ``dead`` is 1 or 0, as a layer's row counts them."""
    columns = Columns(CHANNEL_FIELDS, *_IF_SHOWN, least_needed=_LEAST_NEEDED)
    return Section(_channel_rows(layers, weights), CHANNEL_FIELDS, "channel", columns=columns)


def _channel_rows(layers: Sequence[statistics.LayerStatistics], weights: str) -> Iterator[Row]:
    for layer in layers:
        moments, saturated, dead = layer.by_channel, layer.saturated_by_channel, set(layer.dead_channels)
        first = {channel: group[0] for group in layer.duplicate_channels for channel in group[1:]}
        for channel in range(layer.channels):
            finite = int(moments.count[channel])
            yield call_row(
                CHANNEL_FIELDS,
                layer.call,
                part=layer.part,
                channel=channel,
                mean=moments.mean[channel] if finite else None,
                std=moments.variance[channel] ** 0.5 if finite else None,
                min=moments.low[channel] if finite else None,
                max=moments.high[channel] if finite else None,
                zeros=moments.zeros[channel] / max(1, finite + moments.nan[channel] + moments.inf[channel]),
                nan=int(moments.nan[channel]),
                inf=int(moments.inf[channel]),
                dead=int(channel in dead),
                saturated=None if saturated is None else saturated[channel],
                duplicate_of=first.get(channel),
                weights=weights,
            )
