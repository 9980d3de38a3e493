"""The rows of ``intervene``: classes, layers and channels, and the lines under their tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hookscope import interventions, scores
from hookscope.cli.output.report import Columns

FIELDS = ("index", "name", "type", "call", "shape", "changed", "relative_l2", "cosine", "nonfinite", "weights")
CLASS_FIELDS = (
    "index", "label", "target", "score", "score_after", "change", "probability", "probability_after", "rank",
    "rank_after", "weights",
)  # fmt: skip
CHANNEL_FIELDS = (
    "place", "name", "call", "channel", "worth", "score", "score_after", "probability_after", "top_after", "top_label",
    "weights",
)  # fmt: skip
_LEAST_NEEDED = ({"change"}, {"rank"}, {"target"}, {"probability"}, {"score"}, {"type"}, {"shape"})
LAYER_COLUMNS = Columns(
    [name for name in FIELDS if name != "weights"], ("call", "nonfinite"), ("index",), (), _LEAST_NEEDED
)
CLASS_COLUMNS = Columns([name for name in CLASS_FIELDS if name != "weights"], least_needed=_LEAST_NEEDED)
CHANNEL_COLUMNS = Columns(
    [name for name in CHANNEL_FIELDS if name not in ("score", "weights")],
    only_with_values=("call", "top_label"),
    least_needed=({"score_after"}, {"probability_after"}, {"top_after"}),
)

Row = dict[str, Any]


def layer_row(layer: interventions.MovedLayer, weights: str) -> Row:
    """A call and how far its activation moved."""
    moved = ("shape", "changed", "relative_l2", "cosine", "nonfinite")
    return {**layer.call.as_row(), **{name: getattr(layer, name) for name in moved}, "weights": weights}


def channel_row(place: int, channel: interventions.ChannelWorth, categories: Sequence[str] | None, weights: str) -> Row:
    """A channel and what it is worth."""
    measured = ("channel", "worth", "score", "score_after", "probability_after", "top_after")
    return {
        "place": place,
        "name": channel.call.name,
        "call": channel.call.call,
        **{name: getattr(channel, name) for name in measured},
        "top_label": scores.class_label(channel.top_after, categories),
        "weights": weights,
    }


def class_row(change: interventions.ClassChange, weights: str) -> Row:
    """A class in both passes."""
    return {**dataclasses.asdict(change), "weights": weights}


def target_lines(rows: Sequence[Row]) -> list[str]:
    """The score of each target before and after, in words."""
    lines = []
    for row in rows:
        if row["target"]:
            name = f"{row['index']} {row['label'] or ''}".strip()
            line = f"score of {name}: {row['score']:.4g} to {row['score_after']:.4g} ({row['change']:+.3g})"
            line += f", probability {row['probability']:.3g} to {row['probability_after']:.3g}"
            lines.append(line + ("" if math.isfinite(row["score_after"]) else ": it is not finite"))
    return lines
