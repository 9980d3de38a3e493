"""One class against another as a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookscope.errors import UsageError
from hookscope.scores.logits import Score, class_maps, class_scores
from hookscope.scores.objective import Objective, ScoreTarget, Size, class_objective, class_regions
from hookscope.scores.target import Target


@dataclass(frozen=True, slots=True)
class DifferenceTarget(ScoreTarget):
    """What speaks for a class and not for another: the difference of their logits.

    Of a segmentation, the difference at the pixels where the class is the best; `RegionTarget` says other pixels.

    Args:
        target: A class index, a class name or ``top:K``, of which ``against`` is left out.
        against: The one class whose logit is subtracted.

    Raises:
        UsageError: ``against`` is not one class, or the same class.

    Example:
        >>> import torch, hookscope
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> [cam] = hookscope.class_activation_maps(net, torch.ones(1, 3, 8, 8), target=DifferenceTarget(2, 0))
        >>> cam.prediction.name
        'class 2 against class 0'
    """

    target: Target | str | int
    against: Target | str | int

    def __post_init__(self) -> None:
        against = Target.of(self.against)
        if against.count != 1 or against.has_top:
            raise UsageError(f"'{against}' is not one class to subtract", do="give a class number or name")

    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        return self.in_region(None, output, categories, what)

    def in_region(
        self, region: Tensor | None, output: Any, categories: Sequence[str] | None, what: str
    ) -> list[Objective]:
        """The differences over the pixels of ``region`` ``(H, W)``."""
        found = class_regions(self.target, region, output, categories, what)
        maps = class_maps(output, bare=True)
        classes = (class_scores(output, what) if maps is None else maps).shape[1]
        [other] = Target.of(self.against).indices([0.0] * classes, categories)
        pairs = [
            [class_objective(each, place, output, categories, what) for each in (at, other)]
            for at, place in found.items()
            if at != other
        ]
        if not pairs or (other in found and not Target.of(self.target).has_top):
            raise UsageError(f"'{self.against}' is subtracted from itself", do="give two classes")
        return [_difference(*pair) for pair in pairs]


def _difference(first: Objective, second: Objective) -> Objective:
    words = f"{first.score.name} against {second.score.name}"
    score = Score(None, None, first.score.score - second.score.score, None, target=words)
    return Objective(score, lambda output: first.of(output) - second.of(output))
