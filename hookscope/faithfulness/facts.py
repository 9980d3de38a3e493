"""What one map of one image is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.display import Cells, Picture, Shown
from hookscope.drawing import map_png
from hookscope.explain import ClassActivationMap, Saliency
from hookscope.scores import Score

RANDOM, CENTRED = "random", "centred"
BASELINES = {RANDOM: "a random map", CENTRED: "a bright spot in the middle"}
"""The maps that know nothing of the model, and what they are."""

NUMBERS = ("road", "insertion", "deletion", "drop", "increase", "points", "in_box", "randomized", "passes")
"""The fields of `Faithfulness` that are numbers or yes and no."""

Map = NDArray[np.float32]


def as_array(given: Any) -> NDArray[Any]:
    """The values of a map: an array, a tensor, or a result of `class_activation_maps` or `saliency_maps`."""
    values = given.map if isinstance(given, Saliency) else given
    values = given.values if isinstance(given, ClassActivationMap) else values
    return np.asarray(values.detach().cpu().float() if isinstance(values, Tensor) else values)


@dataclass(frozen=True, repr=False)
class Faithfulness(Shown):
    """How faithful one map of one image is to the model: what happens to the score when its pixels are removed.

    The score is the probability of a class, 0 to 1. That of another target is scaled: 1 for the image, 0 for an image
    of its mean colour.

    Attributes:
        name: Name of the map, such as its method; ``random`` and ``centred`` are the baselines.
        prediction: What is explained: mostly a class, its score and probability.
        values: The map ``(h, w)``, or ``(T, h, w)`` of a clip, as it was given.
        deletion: Area under the score while the most important pixels are removed first (RISE, arXiv:1806.07421);
            lower is better.
        insertion: Area under the score while the most important pixels are shown first (RISE); higher is better.
        road: ROAD (arXiv:2202.00449): half the difference of the score without the least and without the most
            important 10, 20, ... 90 % of the pixels, -0.5 to 0.5; higher is better.
        drop: Share of the score lost when the image is multiplied by the map, 0 to 1 (average drop of Grad-CAM++,
            arXiv:1710.11063); lower is better.
        increase: Whether the score rises instead.
        in_box: Share of the map inside the boxes, 0 to 1; None without boxes.
        points: Whether the highest value of the map lies in a box (pointing game, arXiv:1608.00507).
        randomized: Rank correlation, -1 to 1, with the map of the same model with random weights: a map near 1 does
            not depend on what the model has learned (arXiv:1810.03292). None where it was not computed.
        curves: The score at each step by name: ``deletion`` and ``insertion`` ``(steps + 1,)``; ``most`` and ``least``
            ``(9,)``, without the most and the least important pixels.
        passes: Number of images that the model saw for it; 0 if an earlier map is the same.
    """

    name: str
    prediction: Score
    values: Map
    deletion: float
    insertion: float
    road: float
    drop: float
    increase: bool
    in_box: float | None
    points: bool | None
    curves: Mapping[str, NDArray[np.float64]]
    passes: int
    randomized: float | None = None

    def _cells(self) -> Cells:
        cells = {"map": self.name, **self.prediction.cells(), "road": self.road, "insertion": self.insertion}
        cells |= {"deletion": self.deletion, "drop": self.drop, "in_box": self.in_box, "randomized": self.randomized}
        return cells | {"picture": Picture(partial(map_png, self.still), self.name)}

    @property
    def still(self) -> Map:
        """The map ``(h, w)`` that is drawn: of a clip the mean over its frames."""
        still: Map = self.values.mean(0) if self.values.ndim == 3 else self.values
        return still
