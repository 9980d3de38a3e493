"""What a model answered beside scores of classes: the class of each pixel, boxes, or numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.display import Cells, Shown
from hookscope.drawing import input_size_of
from hookscope.findings import percent
from hookscope.models import LoadedModel, detections_in
from hookscope.scores import (
    LIKE,
    BoxTarget,
    Score,
    Target,
    class_at,
    likeness,
    output_numbers,
    pixel_classes,
    pixel_maps,
)

_MOST_ROWS = 8


@dataclass(frozen=True, repr=False)
class Answer(Shown):
    """What a model answered to one image, beside scores of classes.

    Attributes:
        kind: ``pixels`` of a segmentation, ``boxes`` of a detector, or ``numbers``.
        rows: The classes with their share of the pixels, boxes with their score (the best first), or the numbers in
            their order.
        total: Number of rows before all but the first eight were left out.
        mask: ``(h, w)`` number of the class with the highest score at each position, -1 for none; None for other kinds.
    """

    kind: str
    rows: tuple[Score, ...]
    total: int
    mask: NDArray[np.int64] | None = None

    def _cells(self) -> Cells:
        return {"kind": self.kind, "answer": self.words()}

    def words(self, most: int = 3) -> str:
        """The first rows in one line."""
        first = self.rows[:most]
        if self.kind == "numbers":
            more = ", …" if self.total > most else ""
            return ", ".join(f"{row.name} {row.score:.4g}" for row in first) + more
        shares = ", ".join(f"{row.label or f'class {row.index}'} {percent(row.score)}" for row in first)
        if self.kind == "pixels":
            return f"{shares or 'no class'} of the pixels"
        return f"{self.total} box{'es' * (self.total > 1)}: {shares}" if shares else "no box"


def answer_of(output: Any, net: LoadedModel, prepared: Tensor) -> Answer | None:
    """The answer in ``output`` for one ``prepared`` image; None for scores of classes and for what is not readable."""
    size, names = input_size_of(prepared), net.categories
    if (images := detections_in(output)) is not None:
        count = len(images[0].scores)
        target = BoxTarget(tuple(range(min(count, _MOST_ROWS))))
        boxes = target.objectives(output, names, net.name, (size.height, size.width)) if count else []
        return Answer("boxes", tuple(box.score for box in boxes), count)
    if (maps := pixel_maps(output, prepared)) is not None:
        shares = pixel_classes(maps, names, Target("top:999999"))
        return Answer("pixels", tuple(shares[:_MOST_ROWS]), len(shares), class_at(maps).cpu().numpy())
    if (like := likeness(output, prepared)) > LIKE:  # an autoencoder returns an image
        return Answer("numbers", (Score(None, None, like, None, target="correlation with the input"),), 1)
    numbers = [] if names else output_numbers(output)
    return Answer("numbers", tuple(numbers), len(numbers)) if numbers else None
