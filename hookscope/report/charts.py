"""Curves as drawings that a page holds: the lines, their numbers, and the values at the ends of the axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from hookscope.display import words
from hookscope.errors import printable

_WIDTH, _HEIGHT = 600, 160
_MARGIN = 4  # above and below the lines
COLOURS = 6
"""Number of colours of lines; the style sheet has them."""


@dataclass(frozen=True)
class Line:
    """A curve: ``ys`` over rising ``xs``, None where there is no value; ``colour`` counts from 0."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """Lines over one another.

    ``x`` is what the horizontal axis counts, and ``names`` names 0, 1, 2...; a ``log`` axis leaves out values up
    to 0. The vertical axis always has the values ``within``.
    """

    title: str
    lines: Sequence[Line]
    x: str = "step"
    log: bool = False
    names: Sequence[str] = ()
    within: Sequence[float] = ()

    size: ClassVar = (_WIDTH, _HEIGHT)

    @cached_property
    def span(self) -> tuple[float, float]:
        """The ends of the horizontal axis."""
        xs = [x for line in self.lines for x in line.xs]
        return (min(xs), max(xs)) if xs else (0.0, 0.0)

    @property
    def ends(self) -> tuple[str, str]:
        """What is written at the ends of the horizontal axis."""
        first, last = self.span
        return (self.names[0], self.names[-1]) if self.names else (f"{self.x} {words(first)}", words(last))

    @cached_property
    def range(self) -> tuple[float, float] | None:
        """The ends of the vertical axis, None without values to draw."""
        ys = [y for line in self.lines for y in self._drawn(line)]
        return (min([*ys, *self.within]), max([*ys, *self.within])) if ys else None

    @property
    def paths(self) -> list[tuple[int, str]]:
        """Colour and path of each line; a gap begins a new part."""
        return [
            (line.colour % COLOURS, "".join(f"M{'L'.join(run)}" for run in self._runs(line) if len(run) > 1))
            for line in self.lines
        ]

    @property
    def dots(self) -> list[tuple[int, str]]:
        """Colour and path of the values of each line that stand alone between gaps."""
        return [
            (line.colour % COLOURS, "".join(f"M{run[0]}h0" for run in self._runs(line) if len(run) == 1))
            for line in self.lines
        ]

    @property
    def data(self) -> dict[str, object]:
        """The numbers for the script of the page."""
        lines = [
            {"name": printable(line.name), "xs": list(line.xs), "ys": list(map(_number, line.ys))}
            for line in self.lines
        ]
        return {
            "x_name": self.x,
            "span": self.span,
            "range": self.range,
            "log": self.log,
            "lines": lines,
            "names": list(map(printable, self.names)),
        }

    def _can_draw(self, y: float | None) -> bool:
        return y is not None and math.isfinite(y) and (y > 0 or not self.log)

    def _drawn(self, line: Line) -> Iterator[float]:
        return (y for y in line.ys if y is not None and self._can_draw(y))

    def _runs(self, line: Line) -> list[list[str]]:
        """The points of the line between its gaps."""
        (left, right), runs = self.span, [list[str]()]
        for x, y in zip(line.xs, line.ys, strict=True):
            if y is None or not self._can_draw(y):
                runs.append([])
                continue
            at = (x - left) / (right - left) * _WIDTH if right > left else _WIDTH / 2
            runs[-1].append(f"{at:.4g} {self._height(y):.4g}")
        return runs

    def _height(self, y: float) -> float:
        low, high = map(self._scaled, self.range or (0.0, 0.0))
        share = (self._scaled(y) - low) / (high - low) if high > low else 0.5
        return _HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN)

    def _scaled(self, y: float) -> float:
        return math.log10(y) if self.log else y


def _number(y: float | None) -> float | str | None:
    """A number as JSON has it: NaN and Inf as text."""
    return y if y is None or math.isfinite(y) else {math.inf: "Inf", -math.inf: "-Inf"}.get(y, "NaN")


def spread(values: Iterable[float]) -> bool:
    """Whether positive values differ by more than a factor of 30, so that a log axis shows them better."""
    sizes = [value for value in values if value > 0 and math.isfinite(value)]
    return bool(sizes) and max(sizes) > 30 * min(sizes)
