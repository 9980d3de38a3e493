"""Rows of statistics: what ``stats`` prints of a layer call, and of a channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hookscope import statistics
from hookscope.findings import Finding

FIELDS = (
    "index", "name", "type", "call", "calls", "shape", "images", "mean", "std", "min", "max", "min_at", "max_at", "rms",
    "zeros", "p1", "p5", "p25", "p50", "p75", "p95", "p99", "nan", "inf", "channels", "dead", "saturated", "duplicate",
    "rank", "findings", "weights",
)  # fmt: skip
# too long for a column
NESTED_FIELDS = ("dead_channels", "duplicate_channels", "nonfinite_at")
TABLE_FIELDS = (
    "index", "name", "type", "call", "shape", "mean", "std", "min", "max", "zeros", "dead", "saturated", "duplicate",
    "findings",
)  # fmt: skip
CHANNEL_FIELDS = (
    "index", "name", "call", "channel", "mean", "std", "min", "max", "zeros", "nan", "inf", "dead", "saturated",
    "duplicate_of", "weights",
)  # fmt: skip


def layer_rows(
    layers: Sequence[statistics.LayerStatistics], findings: Sequence[Finding], weights: str
) -> Iterator[dict[str, Any]]:
    """A row for each layer call."""
    named: dict[str, list[str]] = {}
    for finding in findings:
        named.setdefault(finding.layer, []).append(finding.finding)
    for layer in layers:
        yield {
            "index": layer.call.index,
            "name": _name(layer),
            "type": layer.call.type,
            "call": layer.call.call,
            "calls": layer.calls,
            "shape": list(layer.shape),
            "images": layer.items,
            "mean": layer.mean,
            "std": layer.std,
            "min": layer.min,
            "max": layer.max,
            "min_at": _place(layer.low_at),
            "max_at": _place(layer.high_at),
            "rms": layer.rms,
            "zeros": layer.zeros,
            **{f"p{100 * share:g}": layer.quantiles.get(share) for share in statistics.QUANTILES},
            "nan": layer.nan,
            "inf": layer.inf,
            "channels": layer.channels,
            "dead": len(layer.dead_channels),
            "saturated": layer.saturated,
            "duplicate": sum(len(group) - 1 for group in layer.duplicate_channels),
            "rank": layer.rank,
            "findings": named.get(layer.key, []),
            "weights": weights,
            "dead_channels": list(layer.dead_channels),
            "duplicate_channels": [list(group) for group in layer.duplicate_channels],
            "nonfinite_at": _place(layer.nonfinite_at),
        }


def channel_rows(layers: Sequence[statistics.LayerStatistics], weights: str) -> Iterator[dict[str, Any]]:
    """A row for each channel of each layer call; ``dead`` is 1 or 0, as a layer's row counts them."""
    for layer in layers:
        m, dead = layer.by_channel, set(layer.dead_channels)
        first = {at: group[0] for group in layer.duplicate_channels for at in group[1:]}
        for at in range(layer.channels):
            some = int(m.count[at]) > 0
            yield {
                "index": layer.call.index,
                "name": _name(layer),
                "call": layer.call.call,
                "channel": at,
                "mean": float(m.mean[at]) if some else None,
                "std": float(m.variance[at]) ** 0.5 if some else None,
                "min": float(m.low[at]) if some else None,
                "max": float(m.high[at]) if some else None,
                "zeros": float(m.zeros[at] / max(1, m.count[at] + m.nan[at] + m.inf[at])),
                "nan": int(m.nan[at]),
                "inf": int(m.inf[at]),
                "dead": int(at in dead),
                "saturated": None if layer.saturated_by_channel is None else float(layer.saturated_by_channel[at]),
                "duplicate_of": first.get(at),
                "weights": weights,
            }


def _name(layer: statistics.LayerStatistics) -> str:
    return f"{layer.call.name} {layer.part}" if layer.part else layer.call.name


def _place(place: statistics.ValuePosition | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {"image": place.image, "channel": place.channel, "position": list(place.position)}
