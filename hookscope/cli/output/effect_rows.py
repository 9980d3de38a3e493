"""The rows of ``intervene``: classes, layers and channels, and the lines under their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookscope import interventions, scores
from hookscope.cli.output.report import Columns

if TYPE_CHECKING:
    from torch import Tensor

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


@dataclass(frozen=True)
class _Answer:
    """The classes of one pass."""

    scores: list[float]
    probabilities: list[float]
    ranks: dict[int, int]

    @classmethod
    def of(cls, logits: Tensor) -> _Answer:
        values = logits.detach().cpu().double().tolist()
        order = scores.Target(f"top:{len(values)}").indices(values, None)
        ranks = {index: rank for rank, index in enumerate(order, 1)}
        return cls(values, scores.probabilities(logits).tolist(), ranks)


def class_rows(
    before: Tensor, after: Tensor, target: scores.Target, categories: Sequence[str] | None, weights: str
) -> list[Row]:
    """The target and the five best classes of both passes, those of the first pass first.

    Args:
        before: Scores ``(K,)`` without the interventions.
        after: Scores with them.
        target: The classes asked about.
        categories: Names of the classes.
        weights: The weights of the model.
    """
    first, second, top = _Answer.of(before), _Answer.of(after), scores.Target("top:5")
    targets = target.indices(first.scores, categories)
    shown = dict.fromkeys([*top.indices(first.scores, None), *top.indices(second.scores, None), *targets])
    return [
        {
            "index": index,
            "label": scores.class_label(index, categories),
            "target": index in targets,
            "score": first.scores[index],
            "score_after": second.scores[index],
            "change": second.scores[index] - first.scores[index],
            "probability": first.probabilities[index],
            "probability_after": second.probabilities[index],
            "rank": first.ranks[index],
            "rank_after": second.ranks[index],
            "weights": weights,
        }
        for index in shown
    ]


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
