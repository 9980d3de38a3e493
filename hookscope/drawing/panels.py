"""A plot as data: panels of marks for each row, and the limits, ticks and unit that the values give an axis.

Nothing here needs matplotlib or torch; `hookscope.drawing.plot` draws what `draw_panels` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


class Colour:
    """Colours that remain distinct for people with colour blindness (Okabe and Ito)."""

    INK = "#1a1a1a"
    FAINT = "#8c8c8c"
    GRID = "#e4e4e4"
    STRIPE = "#f6f6f6"
    BLUE = "#0072b2"
    SKY = "#8cc5e8"
    GREEN = "#009e73"
    ORANGE = "#e69f00"
    ALARM = "#c8380a"
    ALARM_STRIPE = "#fdeadf"


MarkKind = Literal["line", "bar", "dot", "tick", "left", "right"]
AxisKind = Literal["linear", "symlog", "log", "share", "count", "bytes", "seconds"]
Span = tuple[float, float, float]
"""The place of a row, 0 at the top, and the two ends of what is drawn there."""

_UNITS: dict[str, Sequence[tuple[float, str]]] = {
    "share": ((0.01, "%"),),
    "count": ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"), (1, "1")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")),
    "seconds": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
}
_FLAT = 30.0  # the widest row would flatten the others on a linear axis
_LEAST_RATIO = 12.0  # of the ends of a log axis
_BESIDE = 1.7  # free space beside the first and the last value of a log axis, as a factor
_KEY_GAP = "   "


@dataclass(frozen=True)
class Mark:
    """One thing that a panel draws in each row.

    Attributes:
        kind: ``left`` and ``right`` draw ``marker`` at an edge of the panel.
        of: From a row to a number, to the two ends of a line or bar (one number: from 0), or to a list of several;
            None draws nothing. A mark at an edge is drawn if the value is true.
        colour: Of the mark.
        words: What the mark means, for the legend.
        size: Width of a line or size of a marker in points, height of a bar in rows; 0 takes the usual one.
        shift: Distance below the middle of the row, in rows.
        marker: As matplotlib names it, for marks at an edge.
    """

    kind: MarkKind
    of: Callable[[Any], Any]
    colour: str
    words: str = ""
    size: float = 0.0
    shift: float = 0.0
    marker: str = ""

    def spans(self, rows: Sequence[Any]) -> list[Span]:
        """What is drawn, from top to bottom; values that are not finite are left out."""
        spans = []
        for at, row in enumerate(rows):
            value = self.of(row)
            for one in value if isinstance(value, list) else [value]:
                if self.kind in ("left", "right"):
                    spans += [(at + self.shift, 0.0, 0.0)] if one else []
                elif one is not None:
                    from_zero = 0.0 if self.kind in ("line", "bar") else one
                    low, high = one if isinstance(one, tuple) else (from_zero, one)
                    spans += [(at + self.shift, low, high)] if math.isfinite(low) and math.isfinite(high) else []
        return spans


@dataclass(frozen=True)
class Panel:
    """One column of a plot with a row for each layer.

    Attributes:
        title: Above the panel; axes with a unit add it.
        width: In inches.
        marks: In the order in which they are drawn.
        axis: ``linear`` includes 0, ``share`` goes from 0 to 100 %, ``count``, ``bytes`` and ``seconds`` choose a
            unit, ``log`` draws values up to 0 at its left edge, ``symlog`` is linear while one scale suits all rows.
        typical: The usual size of the values on a symlog axis.
        decades: Most powers of ten on a log axis, so that one small value does not flatten all others.
    """

    title: str
    width: float
    marks: Sequence[Mark]
    axis: AxisKind = "linear"
    typical: float = 0.0
    decades: int = 10


@dataclass(frozen=True)
class DrawnPanel:
    """A panel with its values, as every backend draws it: spans in units of the axis, inside ``limits``."""

    title: str
    width: float
    marks: Sequence[tuple[Mark, Sequence[Span]]]
    scale: Literal["linear", "symlog", "log"]
    limits: tuple[float, float]
    ticks: Sequence[float]
    labels: Sequence[str]
    threshold: float = 0.0
    clipped: Sequence[float] = ()
    """Rows whose lines begin at or below the left end of a log axis."""


def draw_panels(rows: Sequence[Any], panels: Sequence[Panel]) -> list[DrawnPanel]:
    """The panels that have something to draw; the first one if none has.

    Example:
        >>> size = Panel("size", 2.0, [Mark("bar", float, Colour.BLUE)], "bytes")
        >>> [panel] = draw_panels([1000, 2500], [size, Panel("none", 2.0, [Mark("dot", lambda row: None, "k")])])
        >>> panel.title, panel.marks[0][1], panel.labels
        ('size (kB)', [(0.0, 0.0, 1.0), (1.0, 0.0, 2.5)], ['0', '1', '2'])
    """
    filled = [(panel, [(mark, mark.spans(rows)) for mark in panel.marks]) for panel in panels]
    with_values = [(panel, marks) for panel, marks in filled if any(_shows(*mark) for mark in marks)]
    return [_on_axis(panel, marks) for panel, marks in with_values or filled[:1]]


def _shows(mark: Mark, spans: Sequence[Span]) -> bool:
    return any(mark.kind != "bar" or low or high for _, low, high in spans)


def _on_axis(panel: Panel, marks: list[tuple[Mark, list[Span]]]) -> DrawnPanel:
    ends = [
        end
        for mark, spans in marks
        if mark.kind not in ("left", "right")
        for _, low, high in spans
        for end in (low, high)
    ]
    title = panel.title
    if panel.axis == "log":
        return _on_log_axis(panel, marks, [end for end in ends if end > 0])
    if panel.axis == "symlog" and panel.typical and max(map(abs, ends), default=0) > _FLAT * panel.typical:
        threshold, most = 10.0 ** math.floor(math.log10(panel.typical)), max(map(abs, ends))
        powers = decades(threshold, most, 3)
        ticks = [*(-power for power in reversed(powers)), 0.0, *powers]
        limits = min([*ends, 0.0]) * 1.25, max([*ends, 0.0]) * 1.25
        ticks = [tick for tick in ticks if limits[0] <= tick <= limits[1]]
        labels = [tick_label(tick) for tick in ticks]
        return DrawnPanel(title, panel.width, marks, "symlog", limits, ticks, labels, threshold)
    low, high = min([*ends, 0.0]), max([*ends, 0.0])
    if panel.axis in _UNITS:
        units = _UNITS[panel.axis]
        factor, name = next((unit for unit in units if max(map(abs, ends), default=0) >= unit[0]), units[-1])
        title, low, high = f"{title} ({name})", low / factor, high / factor
        marks = [(mark, [(at, low / factor, high / factor) for at, low, high in spans]) for mark, spans in marks]
    if panel.axis == "share":
        return DrawnPanel(title, panel.width, marks, "linear", (0.0, 100.0), [0.0, 50.0, 100.0], ["0", "50", "100"])
    beside = 0.05 * (high - low) or 0.05
    limits = (low - beside if low < 0 or not high else 0.0), high + beside
    return DrawnPanel(title, panel.width, marks, "linear", limits, *plain_ticks(limits, 7 if panel.width > 3 else 5))


def _on_log_axis(panel: Panel, marks: list[tuple[Mark, list[Span]]], positive: Sequence[float]) -> DrawnPanel:
    most = max(positive, default=1.0)
    least = max(min(positive, default=0.1), most * 10.0**-panel.decades, 1e-300)
    # a share of the axis for the widest, so that no dot touches the frame
    beside = max(_BESIDE, (most / least) ** 0.05)
    left, right = least / beside, most * beside
    if right / left < _LEAST_RATIO:
        middle = math.sqrt(left * right)
        left, right = middle / math.sqrt(_LEAST_RATIO), middle * math.sqrt(_LEAST_RATIO)
    clipped = [at for mark, spans in marks if mark.kind == "line" for at, low, _ in spans if low < left]
    inside = [(mark, [(at, max(low, left), max(high, left)) for at, low, high in spans]) for mark, spans in marks]
    ticks = decades(left, right)
    labels = [tick_label(tick) for tick in ticks]
    return DrawnPanel(panel.title, panel.width, inside, "log", (left, right), ticks, labels, 0.0, clipped)


def panel_legend(panels: Iterable[DrawnPanel], keys: Sequence[str] = ()) -> list[str]:
    """A line for the marks of each panel, panels with the same marks together, and one for marks at edges.

    ``keys`` are further explanations after the marks at edges.
    """
    titles: dict[str, list[str]] = {}
    clipped, at_edges = set[str](), list[str]()
    for panel in panels:
        drawn = [mark for mark, spans in panel.marks if spans and mark.words]
        at_edges += [mark.words for mark in drawn if mark.kind in ("left", "right")]
        words = ", ".join(dict.fromkeys(mark.words for mark in drawn if mark.kind not in ("left", "right")))
        titles.setdefault(words, []).append(panel.title.partition(" (")[0])
        clipped |= {words} if panel.clipped else set()
    more = "; red arrowhead: the line goes on to 0 or below"
    lines = [
        f"{', '.join(names)}: {words}{more if words in clipped else ''}" for words, names in titles.items() if words
    ]
    return [*lines, *filter(None, [_KEY_GAP.join([*dict.fromkeys(at_edges), *keys])])]


def decades(first: float, last: float, most: int = 4) -> list[float]:
    """About ``most`` powers of ten from ``first`` to ``last``; below two decades also 2 and 5 times a power."""
    low, high = math.ceil(math.log10(first) - 1e-9), math.floor(math.log10(last) + 1e-9)
    if last < 100 * first and most > 3:
        values = [digit * 10.0**power for power in range(low - 1, high + 1) for digit in (1, 2, 5)]
        return [value for value in values if first <= value <= last]
    return [10.0**power for power in range(low, high + 1, max(1, -(-(high - low) // most)))]


def tick_label(value: float, ticks: Sequence[float] = ()) -> str:
    """``0.01`` or ``1e-5``, with as many digits as tell the ``ticks`` from each other."""
    digits = next((n for n in range(1, 7) if len({f"{tick:.{n}g}" for tick in ticks}) == len(ticks)), 6)
    plain = value == 0 or 1e-3 <= abs(value) < 1e4
    text = f"{value:.{max(digits, 4)}g}" if plain else f"{value:.{digits - 1}e}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def plain_ticks(limits: tuple[float, float], most: int) -> tuple[list[float], list[str]]:
    """Places and labels of about ``most`` ticks of a linear axis, each number in full.

    matplotlib takes a common factor out of its labels and writes it over other text.
    """
    low, high = limits
    if not 0 < high - low < math.inf:
        return [low], [tick_label(low)]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next((power * digit for digit in (1, 2, 2.5, 5) if power * digit * most >= high - low), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [float(f"{at * step:.12g}") for at in range(first, last + 1)]
    return ticks, [tick_label(value, ticks) for value in ticks]
