"""What a map is laid over and where it comes from: what every page of maps says, and what its file remembers."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import Origin
from hookscope.scores import Prediction


@dataclass(frozen=True)
class OverlaySource:
    """A photograph, which part of it the network saw, and which network that was.

    Attributes:
        photograph: RGB.
        box: ``(left, top, right, bottom)`` in pixels of it that the network saw, see `seen_box`.
        origin: Model, weights, picture and preprocessing.
    """

    photograph: Image.Image
    box: tuple[float, float, float, float]
    origin: Origin

    @property
    def image(self) -> str:
        """The name of the picture without its folder."""
        return os.path.basename(self.origin.image) or self.origin.image

    def lines(self, method: str) -> list[str]:
        """Model, method and weights in a line, picture and preprocessing in another."""
        origin = self.origin
        return [
            f"{origin.model}  {method}  weights: {origin.weights}",
            f"{self.image}  input: {origin.preprocess}",
        ]

    @property
    def warning(self) -> str:
        """That a network without training knows no class, empty for the others."""
        weights = self.origin.weights
        return "the weights are random: class and map mean nothing" if weights.startswith("random") else ""

    def peak_in(self, values: NDArray[np.float32]) -> tuple[float, float] | None:
        """``(x, y)`` in pixels of the photograph of the highest of ``values`` ``(h, w)``, the middle of its cell.

        None where nothing is above 0. The network may have seen a border around the photograph, and then it may lie
        there.
        """
        at = int(values.argmax())
        if not values.flat[at] > 0:
            return None
        high, wide = values.shape
        y, x = divmod(at, wide)
        left, top, right, bottom = self.box
        return left + (x + 0.5) / wide * (right - left), top + (y + 0.5) / high * (bottom - top)

    def provenance(self, method: str, cmap: str, size: tuple[int, int]) -> dict[str, Any]:
        """Where a page of ``size`` comes from, as the beginning of its text chunk."""
        return {
            **self.origin.facts(),
            "seen": [round(side, 3) for side in self.box],
            "method": method,
            "cmap": cmap,
            "size": list(size),
        }


def answer_lines(answer: Prediction) -> list[str]:
    """The class, and its score and probability, for people.

    Example:
        >>> from hookscope.scores import Prediction
        >>> answer_lines(Prediction(281, "tabby", 12.345, 0.87))
        ['tabby (281)', 'score 12.35  probability 87 %']
    """
    name = f"{answer.label} ({answer.index})" if answer.label else f"class {answer.index}"
    return [name, f"score {answer.score:.4g}  probability {100 * answer.probability:.3g} %"]


def answer_facts(answer: Prediction) -> dict[str, Any]:
    """The class, its score and probability as a text chunk holds them: None where they are not finite."""
    return {
        "class": answer.index,
        "label": answer.label,
        "score": answer.score if math.isfinite(answer.score) else None,
        "probability": answer.probability if math.isfinite(answer.probability) else None,
    }
