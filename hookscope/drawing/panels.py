"""A plot as data: panels of marks for each row, and the limits, ticks and unit that the values give an axis.

Nothing here needs matplotlib or torch; `hookscope.drawing.plot` and `hookscope.report.charts` draw a `RowPlot`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    FIRST_STRIPE = "#f9c4a4"
    LEGEND = "#606060"


MarkKind = Literal["line", "bar", "dot", "tick", "path", "text", "cells", "left", "right"]
AxisKind = Literal["linear", "symlog", "log", "share", "count", "bytes", "seconds"]
Span = tuple[float, float, float]
"""The place of a row, 0 at the top, and the two ends of what is drawn there."""
Text = tuple[float, "float | None", str, str]
"""The place of a row, the value where the text begins (None: at the left edge), the text and its colour."""

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
_AT_EDGE = ("left", "right")
_USUAL_SIZES = {"line": 1.0, "bar": 0.6, "dot": 2.6, "tick": 4.0, "path": 3.0}  # bars in rows, others in points
_TOO_FAR = 0.55  # of the width of a panel: a text that would begin farther to the right ends there, inside a bar
_LINEAR_PART = 0.6 / (1 - 0.1)  # from 0 to the threshold of a symlog axis, in decades, as matplotlib draws linscale=0.6


@dataclass(frozen=True)
class Mark:
    """One thing that a panel draws in each row.

    Attributes:
        kind: ``left`` and ``right`` draw ``marker`` at an edge of the panel; ``path`` draws dots joined down the rows.
        of: From a row to a number, to the two ends of a line or bar (one number: from 0), or to a list of several;
            None draws nothing. A mark at an edge is drawn if the value is true. For ``text`` it gives words, which
            begin at the left edge, or a number and the words to write there; for ``cells`` colours ``(C, 3)``, uint8.
        colour: Of the mark.
        words: What the mark means, for the legend.
        size: Width of a line or size of a marker in points, height of a bar in rows; 0 takes the usual one.
        shift: Distance below the middle of the row, in rows.
        marker: As matplotlib names it, for dots and marks at an edge.
    """

    kind: MarkKind
    of: Callable[[Any], Any]
    colour: str
    words: str = ""
    size: float = 0.0
    shift: float = 0.0
    marker: str = ""

    @property
    def drawn_size(self) -> float:
        """The size, or the usual one."""
        return self.size or _USUAL_SIZES.get(self.kind, 0.0)

    def spans(self, rows: Sequence[Any]) -> list[Span]:
        """What is drawn, from top to bottom; values that are not finite are left out."""
        spans = []
        for at, row in enumerate(rows):
            value = self.of(row)
            for number in value if isinstance(value, list) else [value]:
                if self.kind in _AT_EDGE:
                    spans += [(at + self.shift, 0.0, 0.0)] if number else []
                elif number is not None and self.kind not in ("text", "cells"):
                    from_zero = 0.0 if self.kind in ("line", "bar") else number
                    low, high = number if isinstance(number, tuple) else (from_zero, number)
                    spans += [(at + self.shift, low, high)] if math.isfinite(low) and math.isfinite(high) else []
        return spans

    def texts(self, rows: Sequence[Any], factor: float = 1.0) -> list[Text]:
        """What a ``text`` writes, its places divided by ``factor``."""
        said = [(at, self.of(row)) for at, row in enumerate(rows)] if self.kind == "text" else []
        placed = [(at, value if isinstance(value, tuple) else (None, value)) for at, value in said if value]
        return [(at, None if x is None else x / factor, words, self.colour) for at, (x, words) in placed]


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
        include: Values that the axis always has.
        limits: The ends of a linear axis; an arrowhead marks a line that goes on.
        ticks: Values and labels of the axis of cells, which fill the width between the limits.
        ramp: The colour map of cells, and the labels at its ends and in its middle.
        upright: Whether the labels of the ticks stand upright below the rows.
    """

    title: str
    width: float
    marks: Sequence[Mark]
    axis: AxisKind = "linear"
    typical: float = 0.0
    decades: int = 10
    include: Sequence[float] = ()
    limits: tuple[float, float] | None = None
    ticks: Sequence[tuple[float, str]] = ()
    ramp: tuple[str, Sequence[str]] | None = None
    upright: bool = False


@dataclass(frozen=True)
class DrawnPanel:
    """A panel with its values, as every backend draws it: spans in units of the axis.

    Attributes:
        texts: What is written into rows.
        beyond: Rows with a line that goes on beyond the left and beyond the right edge.
        cells: Colours of the cells of each row, ``(C, 3)``.
    """

    title: str
    width: float
    marks: Sequence[tuple[Mark, Sequence[Span]]]
    scale: Literal["linear", "symlog", "log"]
    limits: tuple[float, float]
    ticks: Sequence[float] = ()
    labels: Sequence[str] = ()
    threshold: float = 0.0
    texts: Sequence[Text] = ()
    beyond: tuple[Sequence[float], Sequence[float]] = ((), ())
    cells: Sequence[Any] = ()
    ramp: tuple[str, Sequence[str]] | None = None
    upright: bool = False

    def place(self, value: float) -> float:
        """Where a value is, as a share of the width."""
        left, right, at = map(self._scaled, (*self.limits, value))
        return (at - left) / (right - left)

    @property
    def placed_texts(self) -> list[tuple[float, float, bool, str, str]]:
        """The row of each text, its place as a share of the width, whether it ends there, its words and its colour."""
        places = [(at, 0.0 if x is None else self.place(x), words, colour) for at, x, words, colour in self.texts]
        return [(at, share, share > _TOO_FAR, words, colour) for at, share, words, colour in places]

    def _scaled(self, value: float) -> float:
        if self.scale == "log":
            return math.log10(max(value, 1e-320))
        if self.scale == "symlog" and abs(value) > self.threshold:
            return math.copysign(_LINEAR_PART + math.log10(abs(value) / self.threshold), value)
        return value * _LINEAR_PART / self.threshold if self.scale == "symlog" else value

    @property
    def arrow(self) -> tuple[str, str]:
        """Colour and words of the arrowheads at lines that go on."""
        if self.scale == "log":
            return Colour.ALARM, "red arrowhead: the line goes on to 0 or below"
        return Colour.LEGEND, "arrowhead at the edge: the line goes on"


@dataclass(frozen=True)
class RowPlot:
    """Panels side by side with common rows, which `draw_rows` draws as a figure, and pages of HTML draw too.

    Attributes:
        labels: Labels of the rows, from top to bottom.
        panels: What `draw_panels` returns.
        marked: Rows with a finding and the words to write at their right; they have a coloured background.
        lines: Text and colour of the lines below the title.
        legend: What the marks mean, below the lines.
        first: The row to look at first.
        title: The first line, unless `draw_rows` gets another one.
        tallest: The largest height of all rows in inches.
    """

    labels: Sequence[str]
    panels: Sequence[DrawnPanel]
    marked: Mapping[int, str]
    lines: Sequence[tuple[str, str]]
    legend: Sequence[str]
    first: int | None = None
    title: str = ""
    tallest: float = 75.0


def row_plot(
    rows: Sequence[Any],
    panels: Sequence[Panel],
    labels: Sequence[str],
    marked: Mapping[int, str] | None = None,
    lines: Sequence[tuple[str, str]] = (),
    *,
    legend: Sequence[str] = (),
    keys: Sequence[str] = (),
    first: int | None = None,
    title: str = "",
    tallest: float = 75.0,
) -> RowPlot:
    """The ``panels`` of ``rows``; empty panels are left out, and the legend names what is drawn.

    ``legend`` is written before the legend of the marks, ``keys`` after the marks at edges.
    """
    drawn = draw_panels(rows, panels)
    return RowPlot(labels, drawn, marked or {}, lines, [*legend, *panel_legend(drawn, keys)], first, title, tallest)


def draw_panels(rows: Sequence[Any], panels: Sequence[Panel]) -> list[DrawnPanel]:
    """The panels that have something to draw; the first one if none has.

    Example:
        >>> size = Panel("size", 2.0, [Mark("bar", float, Colour.BLUE)], "bytes")
        >>> [panel] = draw_panels([1000, 2500], [size, Panel("none", 2.0, [Mark("dot", lambda row: None, "k")])])
        >>> panel.title, panel.marks[0][1], panel.labels
        ('size (kB)', [(0.0, 0.0, 1.0), (1.0, 0.0, 2.5)], ['0', '1', '2'])
    """
    filled = [(panel, [(mark, mark.spans(rows)) for mark in panel.marks]) for panel in panels]

    def shows(panel: Panel, marks: list[tuple[Mark, list[Span]]]) -> bool:
        values = any(mark.kind != "bar" or low or high for mark, spans in marks for _, low, high in spans)
        return values or any(mark.kind == "cells" or mark.texts(rows) for mark in panel.marks)

    return [_on_axis(rows, *part) for part in [part for part in filled if shows(*part)] or filled[:1]]


def _on_axis(rows: Sequence[Any], panel: Panel, marks: list[tuple[Mark, list[Span]]]) -> DrawnPanel:
    lines = [span for mark, spans in marks if mark.kind not in _AT_EDGE for span in spans]
    ends = [*panel.include, *(end for _, low, high in lines for end in (low, high))]
    title, factor, most = panel.title, 1.0, max(map(abs, ends), default=0.0)
    if panel.axis in _UNITS:
        units = _UNITS[panel.axis]
        factor, name = next((unit for unit in units if most >= unit[0]), units[-1])
        title = f"{title} ({name})"
        marks = [(mark, [(at, low / factor, high / factor) for at, low, high in spans]) for mark, spans in marks]
    texts = [text for mark in panel.marks for text in mark.texts(rows, factor)]
    cells = [mark.of(row) for mark in panel.marks if mark.kind == "cells" for row in rows]
    drawn = DrawnPanel(title, panel.width, marks, "linear", (0.0, 1.0), texts=texts, cells=cells, ramp=panel.ramp)
    if cells and panel.limits:
        ticks, labels = [at for at, _ in panel.ticks], [label for _, label in panel.ticks]
        return replace(drawn, limits=panel.limits, ticks=ticks, labels=labels, upright=panel.upright)
    if panel.axis == "log":
        return _on_log_axis(panel, drawn, [end for end in ends if end > 0])
    if all(mark.kind == "text" for mark in panel.marks):
        return drawn
    if panel.axis == "share":
        return replace(drawn, limits=(0.0, 100.0), ticks=[0.0, 50.0, 100.0], labels=["0", "50", "100"])
    low, high = min([*ends, 0.0]) / factor, max([*ends, 0.0]) / factor
    if panel.axis == "symlog" and panel.typical and most > _FLAT * panel.typical:
        threshold = 10.0 ** math.floor(math.log10(panel.typical))
        powers = decades(threshold, most, 3)
        ticks = [*(-power for power in reversed(powers)), 0.0, *powers]
        limits = low * 1.25, high * 1.25
        ticks = [tick for tick in ticks if limits[0] <= tick <= limits[1]]
        labels = [tick_label(tick) for tick in ticks]
        return replace(drawn, scale="symlog", limits=limits, ticks=ticks, labels=labels, threshold=threshold)
    beside = 0.05 * (high - low) or 0.05
    limits = panel.limits or ((low - beside if low < 0 or not high else 0.0), high + beside)
    ticks, labels = plain_ticks(limits, 7 if panel.width > 3 else 5)
    left, right = (end * factor for end in limits)
    beyond = [at for at, low, _ in lines if low < left], [at for at, _, high in lines if high > right]
    return replace(drawn, limits=limits, ticks=ticks, labels=labels, beyond=beyond)


def _on_log_axis(panel: Panel, drawn: DrawnPanel, positive: Sequence[float]) -> DrawnPanel:
    most = max(positive, default=1.0)
    least = max(min(positive, default=0.1), most * 10.0**-panel.decades, 1e-300)
    # a share of the axis for the widest, so that no dot touches the frame
    beside = max(_BESIDE, (most / least) ** 0.05)
    left, right = least / beside, most * beside
    if right / left < _LEAST_RATIO:
        middle = math.sqrt(left * right)
        left, right = middle / math.sqrt(_LEAST_RATIO), middle * math.sqrt(_LEAST_RATIO)
    below = [at for mark, spans in drawn.marks if mark.kind == "line" for at, low, _ in spans if low < left]
    inside = [(mark, [(at, max(low, left), max(high, left)) for at, low, high in spans]) for mark, spans in drawn.marks]
    ticks = decades(left, right, max(4, round(1.4 * panel.width)))
    drawn = replace(drawn, marks=inside, scale="log", limits=(left, right), beyond=(below, ()))
    return replace(drawn, ticks=ticks, labels=[tick_label(tick) for tick in ticks])


def panel_legend(panels: Iterable[DrawnPanel], keys: Sequence[str] = ()) -> list[str]:
    """A line for the marks of each panel, panels with the same marks together, and one for marks at edges.

    ``keys`` are further explanations after the marks at edges.
    """
    titles: dict[str, list[str]] = {}
    more, at_edges = dict[str, str](), list[str]()
    for panel in panels:
        drawn = [mark for mark, spans in panel.marks if spans and mark.words]
        at_edges += [mark.words for mark in drawn if mark.kind in _AT_EDGE]
        words = ", ".join(dict.fromkeys(mark.words for mark in drawn if mark.kind not in _AT_EDGE))
        titles.setdefault(words, []).append(panel.title.partition(" (")[0])
        more |= {words: f"; {panel.arrow[1]}"} if any(panel.beyond) else {}
    lines = [f"{', '.join(names)}: {words}{more.get(words, '')}" for words, names in titles.items() if words]
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
