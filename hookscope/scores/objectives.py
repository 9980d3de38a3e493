"""What a map explains: numbers that are computed from a model's output, for any batch of images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from hookscope.errors import ModelError, UsageError
from hookscope.scores.logits import Score, class_scores, described, gives_boxes, one_picture, predictions
from hookscope.scores.target import Target

Size = tuple[int, int]

ASK_FOR_A_BOX = "name a box: --target box:0, in Python BoxTarget(0)"


@dataclass(frozen=True, slots=True)
class Objective:
    """A number to explain.

    Attributes:
        score: Its name and its value for the image.
        of: From the model's output for ``N`` images to the values ``(N,)``, in its graph. The same number of further
            images, such as copies with parts hidden: of a detected box, how well these still show it.
    """

    score: Score
    of: Callable[[Any], Tensor]


class ScoreTarget(ABC):
    """A target that is more than a class: it says what numbers are explained."""

    @abstractmethod
    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        """The numbers to explain; ``output`` is that of the model called ``what`` for one image of ``size``."""


@dataclass(frozen=True, slots=True)
class FunctionTarget(ScoreTarget):
    """Any function from the model's output for ``N`` images to ``N`` numbers, or for one image to one number."""

    function: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        value = self.values(output)
        if len(value) != 1:
            do = "return a tensor with one floating-point number for each image"
            raise UsageError(f"{self.name} returns {len(value):,} numbers for one image", do=do)
        return [Objective(Score(None, None, float(value.detach()[0]), None, target=self.name), self.values)]

    def values(self, output: Any) -> Tensor:
        value = self.function(output)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() > 1:
            found = f"{type(value).__name__}"
            if isinstance(value, Tensor):
                found = f"a tensor of {value.dtype} with shape {tuple(value.shape)}"
            do = "return a tensor with one floating-point number for each image"
            raise ModelError(f"{self.name} returns {found}", do=do)
        return value.reshape(-1)


@dataclass(frozen=True, slots=True)
class DifferenceTarget(ScoreTarget):
    """The logit of each class of ``target`` minus that of the one class ``against``."""

    target: Target | str | int
    against: Target | str | int

    def objectives(
        self, output: Any, categories: Sequence[str] | None, what: str, size: Size | None = None
    ) -> list[Objective]:
        [other] = objectives(self.against, output, categories, what)
        return [_difference(goal, other) for goal in objectives(self.target, output, categories, what)]


def _difference(goal: Objective, other: Objective) -> Objective:
    score = Score(
        None, None, goal.score.score - other.score.score, None, target=f"{goal.score.name} against {other.score.name}"
    )
    return Objective(score, lambda output: goal.of(output) - other.of(output))


def objectives(
    target: Any, output: Any, categories: Sequence[str] | None, what: str = "the model", size: Size | None = None
) -> list[Objective]:
    """The numbers that ``target`` names: a `Target` or what `Target.of` takes, a `ScoreTarget`, or a function.

    ``output`` is that for one image, ``size`` the height and width of the image, where it is known.
    """
    if isinstance(target, ScoreTarget):
        return target.objectives(output, categories, what, size)
    if callable(target):
        return FunctionTarget(target).objectives(output, categories, what, size)
    if gives_boxes(output):
        raise ModelError(f"{what} gives {described(output)}, no score for each class", do=ASK_FOR_A_BOX)
    scores = one_picture(class_scores(output, what))
    return [
        Objective(prediction, partial(_of_class, index=prediction.index, what=what))
        for prediction in predictions(scores, categories, Target.of(target))
    ]


def _of_class(output: Any, index: int, what: str) -> Tensor:
    return class_scores(output, what)[:, index]
