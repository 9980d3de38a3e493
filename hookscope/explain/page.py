"""What the pages of class activation maps and of saliency maps share: the photograph and its network, and words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from hookscope.drawing import MOST_PIXELS, Heading, Origin, Panel, seen_part
from hookscope.explain.cam_maps import peak_of
from hookscope.images import InputImage
from hookscope.models import LoadedModel
from hookscope.scores import Score

VALUE, ONE_COLOUR = "value of the map", "inferno"
_LARGEST = MOST_PIXELS * 3 // 4  # of all panels together: text and gaps take up to a third more


@dataclass(frozen=True)
class OverlaySource:
    """A photograph, the ``box`` (left, top, right, bottom) of it that the network saw, and the network."""

    photograph: Image.Image
    box: tuple[float, float, float, float]
    origin: Origin

    @classmethod
    def of(cls, picture: Image.Image | InputImage, net: LoadedModel | nn.Module | None = None) -> OverlaySource:
        """The source of ``picture``, of which a `LoadedModel` may have seen a part, and other models all."""
        return cls(*seen_part(picture, net), Origin.of(net, picture))

    def lines(self, method: str) -> list[str]:
        """The model and the method, the image and its preprocessing; what is not known is left out."""
        origin = self.origin
        weights = f"weights: {origin.weights}" if origin.weights else ""
        preprocess = f"preprocessing: {origin.preprocess}" if origin.preprocess else ""
        lines = [(origin.model, weights, f"method: {method}"), (origin.images, preprocess)]
        return [", ".join(filter(None, words)) for words in lines if any(words)]

    @property
    def warning(self) -> str:
        """A warning of random weights, empty for trained ones."""
        return "the weights are random: class and map mean nothing" if self.origin.is_random else ""

    @property
    def panel(self) -> Panel:
        """The photograph without a map."""
        size = f"{self.photograph.width}×{self.photograph.height} pixels"
        return Panel(None, [self.origin.images or "photograph", size])

    def heading(self, words: Sequence[str], method: str, alarm: str = "", **more: Any) -> Heading:
        """A heading with ``words``, then model and image, and in the colour of alarms what ``alarm`` says."""
        return Heading([*words, *self.lines(method)], "; ".join(filter(None, [self.warning, alarm])), **more)

    def fitting_width(self, panels: int) -> int | None:
        """The width of each of so many panels if a page of the photograph's own size would be too large."""
        pixels = panels * self.photograph.width * self.photograph.height
        large = panels > 1 and pixels > _LARGEST
        return int(self.photograph.width * math.sqrt(_LARGEST / pixels)) if large else None

    def peak_in(self, values: NDArray[np.float32]) -> tuple[float, float] | None:
        """``(x, y)`` of the cell of ``values`` ``(h, w)`` with the highest value, in pixels of the photograph.

        None where no value is above 0. The point may lie outside the photograph: the network may have seen a border.
        """
        peak = peak_of(values)
        return peak and self.in_photograph(peak[1], peak[0])

    def in_photograph(self, x: float, y: float) -> tuple[float, float]:
        """A point of the network's input, as shares 0..1 of its sides, in pixels of the photograph."""
        left, top, right, bottom = self.box
        return left + x * (right - left), top + y * (bottom - top)

    def in_input(self, x: float, y: float) -> tuple[float, float]:
        """A point of the photograph in pixels, as shares of the sides of the network's input."""
        left, top, right, bottom = self.box
        return (x - left) / (right - left), (y - top) / (bottom - top)

    def frame_of(self, answer: Score, seen: tuple[int, int]) -> tuple[float, float, float, float] | None:
        """The box of ``answer`` in pixels of the photograph; the network saw ``seen`` ``(H, W)``. None without one."""
        if answer.box is None:
            return None
        (height, width), (left, top, right, bottom) = seen, answer.box
        return *self.in_photograph(left / width, top / height), *self.in_photograph(right / width, bottom / height)

    def provenance(self, method: str, cmap: str, size: tuple[int, int]) -> dict[str, Any]:
        return {
            **self.origin.facts(),
            "seen": [round(side, 3) for side in self.box],
            "method": method,
            "cmap": cmap,
            "size": list(size),
        }


def answer_lines(answer: Score) -> list[str]:
    name = f"{answer.label} ({answer.index})" if answer.label and not answer.target else answer.name
    share = "" if answer.probability is None else f", probability {100 * answer.probability:.3g} %"
    return [name, f"score {answer.score:.4g}{share}"]


def answer_facts(answer: Score) -> dict[str, Any]:
    """The class, its score and probability for a text chunk: None where they are not finite."""
    return {
        "class": answer.index,
        "label": answer.label,
        "score": answer.score if math.isfinite(answer.score) else None,
        "probability": answer.probability if math.isfinite(answer.probability or 0) else None,
        **({"target": answer.target} if answer.target else {}),
        **({"box": list(answer.box)} if answer.box else {}),
    }


def why_unseen(answer: Score) -> str:
    """A line that says that the model does not see the class; empty if it does."""
    if answer.probability is None or not answer.unseen:
        return ""
    shares = f"it has {100 * answer.probability:.2g} %, the best class {100 * answer.best:.3g} %"
    return f"the model does not see this class: {shares}"
