"""The rows of ``intervene``: classes, layers and channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hookscope import interventions
from hookscope.cli.output.report import Columns, Section, call_row, row_of

FIELDS = ("index", "name", "type", "call", "order", "shape", "changed", "relative_l2", "cosine", "nonfinite", "weights")
CLASS_FIELDS = (
    "class", "label", "target", "score", "score_after", "change", "probability", "probability_after", "rank",
    "rank_after", "weights",
)  # fmt: skip
CHANNEL_FIELDS = (
    "place", "index", "name", "type", "call", "order", "channel", "worth", "score", "score_after", "probability_after",
    "top_after", "top_label", "weights",
)  # fmt: skip
_LEAST_NEEDED = ({"change"}, {"rank"}, {"target"}, {"probability"}, {"score"}, {"type"}, {"shape"})


def class_section(changes: Sequence[interventions.ClassChange], weights: str, in_flat: bool) -> Section:
    """The classes of both passes; under the table, the score of each target before and after."""
    rows = [row_of(CLASS_FIELDS, change, weights=weights, **{"class": change.index}) for change in changes]
    columns = Columns([name for name in CLASS_FIELDS if name != "weights"], least_needed=_LEAST_NEEDED)
    totals = [_target_line(change) for change in changes if change.target]
    return Section(rows, CLASS_FIELDS, "class", columns=columns, totals=totals, in_flat=in_flat, needs_rows=True)


def _target_line(change: interventions.ClassChange) -> str:
    name = f"{change.index} {change.label or ''}".strip()
    line = f"score of {name}: {change.score:.4g} to {change.score_after:.4g} ({change.change:+.3g})"
    line += f", probability {change.probability:.3g} to {change.probability_after:.3g}"
    return line + ("" if math.isfinite(change.score_after) else ": it is not finite")


def layer_section(layers: Sequence[interventions.MovedLayer], weights: str, in_table: bool) -> Section:
    """The calls, and how far their activations moved."""
    rows = [call_row(FIELDS, layer.call, layer, weights=weights) for layer in layers]
    shown = [name for name in FIELDS if name != "weights"]
    columns = Columns(shown, ("call", "nonfinite"), ("index",), least_needed=_LEAST_NEEDED)
    return Section(rows, FIELDS, "layer", columns=columns, in_table=in_table, needs_rows=True)


def channel_section(channels: Sequence[interventions.ChannelWorth], weights: str) -> Section:
    """The channels and the score that is lost without each, in the given order."""
    rows = [
        call_row(CHANNEL_FIELDS, channel.call, channel, place=place, weights=weights)
        for place, channel in enumerate(channels, 1)
    ]
    shown = [name for name in CHANNEL_FIELDS if name not in ("score", "weights")]
    least_needed = ({"index", "type"}, {"score_after"}, {"top_after"}, {"probability_after"}, {"place"})
    return Section(rows, CHANNEL_FIELDS, columns=Columns(shown, ("call", "top_label"), least_needed=least_needed))
