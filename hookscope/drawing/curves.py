"""Curves as data: lines over steps or channels, a band, limits, and the axis that their values give.

Nothing here needs matplotlib or torch; `draw_chart` and the pages of HTML draw a `Chart`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hookscope.drawing.panels import decades, plain_ticks, tick_label

CURVE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#7a6a00")
"""Colours of curves, by number; the style sheet of the pages has them too."""

ChartAxis = Literal["auto", "linear", "log", "share"]

_ORDERS = 20.0  # highest over a low value, from which an axis is logarithmic: a spike must not flatten the rest


@dataclass(frozen=True)
class Curve:
    """A line: ``ys`` over rising ``xs``, NaN or None where there is no value.

    Attributes:
        colour: A number in `CURVE_COLOURS`; None for grey.
        width: In points; below 1 the line is pale too.
        is_read: Whether a page reads the values at the pointer.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    colour: int | None = 0
    width: float = 1.2
    is_read: bool = True


@dataclass(frozen=True)
class Chart:
    """Curves over one another, on one axis.

    Attributes:
        band: Place, lowest and highest value.
        rules: Value, colour and words of dashed lines, which begin at ``begin``; drawn where the axis reaches them.
        flags: Places of the horizontal axis and the words above them.
        unknown: Places of values that are missing, marked at the foot.
        axis: ``auto`` is logarithmic where values fall or jump by orders, ``share`` goes from 0 to 1.
        within: Values that the axis always has.
        decades: Most powers of ten on a logarithmic axis; lower values are marked at the foot.
        edges: Ends of the horizontal axis; None takes the first and the last place.
        x: What the horizontal axis counts.
        notes: What is drawn.
    """

    title: str
    curves: Sequence[Curve] = ()
    band: Sequence[tuple[float, float, float]] = ()
    rules: Sequence[tuple[float, str, str]] = ()
    begin: float = -math.inf
    flags: Sequence[tuple[float, str]] = ()
    unknown: Sequence[float] = ()
    axis: ChartAxis = "auto"
    within: Sequence[float] = ()
    decades: int = 30
    edges: tuple[float, float] | None = None
    x: str = "step"
    notes: Sequence[str] = ()

    @cached_property
    def values(self) -> list[float]:
        """All values that can be drawn."""
        values = [*(y for curve in self.curves for y in curve.ys), *(y for _, *ends in self.band for y in ends)]
        return [float(y) for y in values if y is not None and math.isfinite(y)]

    @cached_property
    def is_log(self) -> bool:
        """Whether the axis is logarithmic."""
        positive = sorted(value for value in self.values if value > 0)
        if self.axis != "auto" or not positive or min([*self.values, *self.within]) < 0:
            return self.axis == "log" and bool(positive)
        return positive[-1] > _ORDERS * positive[len(positive) // 20]

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The ends of the vertical axis."""
        if self.axis == "share":
            return -0.03, 1.03
        values = [*self.values, *self.within] or [0.0, 1.0]
        if self.is_log:
            high = max(values)
            low = max(min(value for value in values if value > 0), high * 10.0**-self.decades, 1e-300)
            beside = 10 ** max(0.1 * math.log10(high / low), 0.15)
            return low / beside, high * beside
        low, high = min(values), max(values)
        beside = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
        return low - beside, high + beside

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """Values of the vertical axis with a label, about ``most``."""
        low, high = self.limits
        powers = decades(low, high, max(most - 1, 1)) if self.is_log else []
        if len(powers) > 1:
            return [(value, tick_label(value)) for value in powers]
        ticks, labels = ([0.0, 0.5, 1.0], ["0", "0.5", "1"]) if self.axis == "share" else plain_ticks((low, high), most)
        return list(zip(ticks, labels, strict=True))

    @property
    def span(self) -> tuple[float, float]:
        """The ends of the horizontal axis."""
        xs = [x for curve in self.curves for x in curve.xs]
        return self.edges or (min(xs, default=0.0), max(xs, default=0.0))

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a value is, as shares of the width and of the height from below."""
        (left, right), (low, high) = self.span, self.limits
        if self.is_log:
            low, high, y = math.log10(low), math.log10(high), math.log10(max(y, 1e-320))
        return (x - left) / (right - left) if right > left else 0.5, (y - low) / (high - low)

    def runs(self, curve: Curve) -> list[list[tuple[float, float]]]:
        """The points of a curve between its gaps; values below the axis are gaps."""
        runs: list[list[tuple[float, float]]] = [[]]
        for x, y in zip(curve.xs, curve.ys, strict=True):
            if y is None or not math.isfinite(y) or (self.is_log and y <= 0):
                runs.append([])
            else:
                runs[-1].append((float(x), float(y)))
        return [run for run in runs if run]

    @cached_property
    def below(self) -> list[tuple[float, int | None]]:
        """Place and colour of the values below the axis, which are marked at the foot."""
        drawn = ((x, y, curve.colour) for curve in self.curves for x, y in zip(curve.xs, curve.ys, strict=True))
        return [(x, colour) for x, y, colour in drawn if y is not None and y < self.limits[0] and y > -math.inf]

    @property
    def lines_of_rules(self) -> list[tuple[float, str, str]]:
        """The rules that the axes reach."""
        low, high = self.limits
        return [rule for rule in self.rules if self.values and low < rule[0] < high and self.begin < self.span[1]]

    @property
    def named(self) -> list[Curve]:
        """The curves whose names stand in the chart."""
        return [curve for curve in self.curves if curve.name and curve.colour is not None and curve.is_read]
