"""The classes of a pass without and a pass with interventions: scores, probabilities and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hookscope.scores import (
    Target,
    check_categories,
    class_label,
    class_scores,
    one_picture,
    probabilities,
)

_BEST = Target("top:5")


@dataclass(frozen=True, slots=True)
class ClassChange:
    """A class in the passes without and with interventions.

    Attributes:
        index: Index of the class.
        label: Its name, None without names.
        target: Whether `class_changes` was asked about the class.
        score: The logit without interventions; ``score_after`` is the logit with them.
        change: ``score_after - score``.
        probability: Softmax probability without interventions, 0 to 1; ``probability_after`` is the one with them.
        rank: Place by score without interventions, from 1; ``rank_after`` is the place with them.
    """

    index: int
    label: str | None
    target: bool
    score: float
    score_after: float
    change: float
    probability: float
    probability_after: float
    rank: int
    rank_after: int


def class_changes(
    before: Any,
    after: Any,
    target: Target | str | int = "top:1",
    categories: Sequence[str] | None = None,
    model: str = "the model",
) -> list[ClassChange]:
    """Compare the five best classes of both outputs and the target: first the order of ``before``, then of ``after``.

    Example:
        >>> import torch
        >>> changes = class_changes(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
        >>> [(change.index, change.target, change.change, change.rank_after) for change in changes]
        [(0, True, -2.0, 2), (1, False, 0.0, 1)]
    """
    tensors = [one_picture(class_scores(output, model)) for output in (before, after)]
    if categories:
        check_categories(categories, len(tensors[0]), model)
    scores = [tensor.detach().cpu().double().tolist() for tensor in tensors]
    shares = [probabilities(tensor).tolist() for tensor in tensors]
    orders = [Target(f"top:{len(values)}").indices(values, None) for values in scores]
    ranks = [{index: rank for rank, index in enumerate(order, 1)} for order in orders]
    targets = Target.of(target).indices(scores[0], categories)
    shown = dict.fromkeys([*_BEST.indices(scores[0], None), *_BEST.indices(scores[1], None), *targets])
    return [
        ClassChange(
            index=index,
            label=class_label(index, categories),
            target=index in targets,
            score=scores[0][index],
            score_after=scores[1][index],
            change=scores[1][index] - scores[0][index],
            probability=shares[0][index],
            probability_after=shares[1][index],
            rank=ranks[0][index],
            rank_after=ranks[1][index],
        )
        for index in shown
    ]
