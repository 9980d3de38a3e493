"""The rows of ``intervene``: classes, layers and channels, and the lines under their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookscope.scores import Target, class_label

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.interventions import ChannelWorth, MovedLayer

FIELDS = ("index", "name", "type", "call", "shape", "changed", "relative_l2", "cosine", "nonfinite", "weights")
CLASS_FIELDS = (
    "index", "label", "target", "score", "score_after", "change", "probability", "probability_after", "rank",
    "rank_after", "weights",
)  # fmt: skip
CHANNEL_FIELDS = (
    "place", "name", "call", "channel", "worth", "score", "score_after", "probability_after", "top_after", "top_label",
    "weights",
)  # fmt: skip
# which a table does without where it would be too wide, the first first
LEAST_NEEDED = ({"change"}, {"rank"}, {"target"}, {"probability"}, {"score"}, {"type"}, {"shape"})
_TOP = Target("top:5")

Row = dict[str, Any]


def layer_row(layer: MovedLayer, weights: str) -> Row:
    """A call and how far its activation moved."""
    call = layer.call
    return {
        "index": call.index,
        "name": call.name,
        "type": call.type,
        "call": call.call,
        "shape": layer.shape,
        "changed": layer.changed,
        "relative_l2": layer.relative_l2,
        "cosine": layer.cosine,
        "nonfinite": layer.nonfinite,
        "weights": weights,
    }


def channel_row(place: int, found: ChannelWorth, categories: Sequence[str] | None, weights: str) -> Row:
    """A channel and what it is worth."""
    return {
        "place": place,
        "name": found.call.name,
        "call": found.call.call,
        "channel": found.channel,
        "worth": found.worth,
        "score": found.score,
        "score_after": found.score_after,
        "probability_after": found.probability_after,
        "top_after": found.top_after,
        "top_label": class_label(found.top_after, categories),
        "weights": weights,
    }


@dataclass(frozen=True)
class _Answer:
    """The scores of one pass with what is made of them."""

    scores: list[float]
    shares: list[float]
    ranks: dict[int, int]

    @classmethod
    def of(cls, scores: Tensor) -> _Answer:
        from hookscope.scores import probabilities

        values = scores.detach().cpu().double().tolist()
        order = Target(f"top:{len(values)}").indices(values, None)
        return cls(values, probabilities(scores).tolist(), {index: at + 1 for at, index in enumerate(order)})


def class_rows(
    before: Tensor, after: Tensor, target: Target, categories: Sequence[str] | None, weights: str
) -> list[Row]:
    """The target and the five best classes of both passes, those of the first in order before those of the second.

    Args:
        before: Scores ``(K,)`` without the interventions.
        after: Scores with them.
        target: The classes asked about.
        categories: Names of the classes.
        weights: What the weights are.
    """
    one, other = _Answer.of(before), _Answer.of(after)
    targets = target.indices(one.scores, categories)
    shown = dict.fromkeys([*_TOP.indices(one.scores, None), *_TOP.indices(other.scores, None), *targets])
    return [
        {
            "index": index,
            "label": class_label(index, categories),
            "target": index in targets,
            "score": one.scores[index],
            "score_after": other.scores[index],
            "change": other.scores[index] - one.scores[index],
            "probability": one.shares[index],
            "probability_after": other.shares[index],
            "rank": one.ranks[index],
            "rank_after": other.ranks[index],
            "weights": weights,
        }
        for index in shown
    ]


def target_lines(rows: Sequence[Row]) -> list[str]:
    """What became of each target, in words."""
    lines = []
    for row in rows:
        if row["target"]:
            name = f"{row['index']} {row['label'] or ''}".strip()
            line = f"score of {name}: {row['score']:.4g} to {row['score_after']:.4g} ({row['change']:+.3g})"
            line += f", probability {row['probability']:.3g} to {row['probability_after']:.3g}"
            lines.append(line + ("" if math.isfinite(row["score_after"]) else ": it is no number any more"))
    return lines
