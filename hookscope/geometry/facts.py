"""The part of the input that a unit of a layer depends on."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

Box = tuple[int, int, int, int]
"""``(left, top, right, bottom)`` in pixels of the network's input, right and bottom not included."""


@dataclass(frozen=True, slots=True)
class ReceptiveField:
    """The part of the input that a unit of a layer depends on.

    The unit at ``(row, column)`` of a map sees the rows from ``start[0] + row * stride[0]`` on, ``size[0]`` of them,
    and columns alike. The rectangle may reach beyond the input, into the padding.

    Attributes:
        source: ``computed`` from the geometry of the layers, ``measured`` by gradients, or ``whole``: the unit sees all
            of the input, or nothing less is known.
        size: Height and width in pixels of the network's input.
        stride: Pixels from one unit to the next, down and to the right.
        start: First row and column that the unit at ``(0, 0)`` sees; negative in the padding.
        reason: Why it is not computed, or what a computed field leaves out: the gate of squeeze-and-excitation or the
            statistics of group norm, which reach all positions alike. Empty where there is nothing to say.
        frame: Columns of a frame, where the frames of a clip lie side by side; 0 for images.
    """

    source: str
    size: tuple[float, float]
    stride: tuple[float, float] = (0.0, 0.0)
    start: tuple[float, float] = (0.0, 0.0)
    reason: str = ""
    frame: int = 0

    def box(self, place: tuple[int, int], input_size: tuple[int, int]) -> Box:
        """What the unit at ``place``, row and column, sees of an input of ``input_size``, height and width."""
        if self.source == "whole":
            return 0, 0, input_size[1], input_size[0]
        at = place[0], place[1] % self.frame if self.frame else place[1]
        ends = []
        for axis, length in enumerate(input_size):
            start = self.start[axis] + at[axis] * self.stride[axis]
            # sums of fractions such as 1/3 miss a whole number by less than this
            first, last = floor(start + 1e-6), ceil(start + self.size[axis] - 1e-6)
            ends.append((min(max(0, first), length - 1), max(min(length, last), 1)))
        (top, bottom), (left, right) = ends
        return left, top, right, bottom
