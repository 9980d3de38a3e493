"""Plots: matplotlib figures independent of settings around them, pages of labelled rows, figures as bytes."""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from hookscope.drawing.curves import CURVE_COLOURS, Chart
from hookscope.drawing.panels import Colour, DrawnPanel, RowPlot
from hookscope.drawing.text import font_families, inches, wrapped_lines
from hookscope.errors import UsageError, printable
from hookscope.findings import Finding, counted

_Finding = TypeVar("_Finding", bound=Finding)

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 110
TITLE, BODY, SMALL = 11.0, 8.5, 7.5  # points

# In inches. Rows are as high as their labels until the page has its largest height; more rows are thinner, and only
# some of them are labelled.
_MARGIN, _GAP, _LINE = 0.2, 0.28, 0.17
_ROW = 0.145
_LONGEST_LABEL = 64
_NARROWEST = 7.0
_MOST_WRAPPED = 3


def plot_suffix(path: str) -> str:
    """The suffix of ``path``, which is the format of the plot; ``.png`` for a device such as ``/dev/null``."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in SUFFIXES:
        return suffix
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        return ".png"
    raise UsageError(f"cannot write {path}", "plots are PNG, SVG or PDF files", f"name it {', '.join(SUFFIXES)}")


@contextmanager
def plain_settings() -> Iterator[None]:
    """Set matplotlib to its defaults, whatever a ``matplotlibrc`` or the caller has set, and restore it afterwards.

    Create and write a figure inside: some settings are read when an artist is created, others when it is drawn.
    """
    own = {"svg.hashsalt": "hookscope", "svg.fonttype": "path", "pdf.fonttype": 42, "axes.unicode_minus": False}
    # not `backend`: reading it would import pyplot
    defaults = {name: value for name, value in dict.items(matplotlib.rcParamsDefault) if not name.startswith("backend")}
    settings: Any = matplotlib.rcParams
    before = {name: dict.__getitem__(settings, name) for name in defaults}
    try:
        dict.update(settings, defaults | own)
        yield
    finally:
        dict.update(settings, before)


def figure_bytes(figure: Figure, suffix: str, provenance: Mapping[str, Any] | None = None) -> bytes:
    """The file of ``figure`` in the format ``suffix``; without a date, so equal figures give equal bytes.

    The provenance is in the text chunk ``hookscope`` of a PNG, in the description of an SVG, in the keywords of a PDF.
    """
    text = json.dumps(dict(provenance or {}), allow_nan=False, separators=(",", ":"))
    metadata: dict[str, dict[str, Any]] = {
        ".png": {"hookscope": text},
        ".svg": {"Date": None, "Creator": "hookscope", "Description": text},
        ".pdf": {"CreationDate": None, "Creator": "hookscope", "Keywords": text},
    }
    buffer = io.BytesIO()
    with plain_settings(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # `write` has warned
        figure.savefig(buffer, format=suffix[1:], dpi=DPI, metadata=metadata[suffix], facecolor="white")
    return buffer.getvalue()


def write(target: Axes | Figure, x: float, y: float, text: str, **more: Any) -> Any:
    """Write text literally: ``$`` starts no formula, control characters are escaped."""
    text = printable(text)
    settings: dict[str, Any] = {"fontsize": BODY, "color": Colour.INK, "va": "center"} | more
    settings["family"] = font_families(text)
    if len(settings["family"]) > 1:  # matplotlib logs a warning for each font that has no bold letters
        settings["fontweight"] = "normal"
    return target.text(x, y, text, parse_math=False, **settings)


def write_at(figure: Figure, x: float, y: float, text: str, **more: Any) -> None:
    """`write` at ``x`` and ``y`` inches from the upper left corner of ``figure``."""
    width, height = figure.get_size_inches()
    write(figure, x / width, 1 - y / height, text, **more)


def add_panel(figure: Figure, x: float, y: float, width: float, height: float, grid: Any = "both") -> Axes:
    """A panel whose upper left corner is ``x`` and ``y`` inches from the corner of ``figure``; all sizes in inches."""
    page_width, page_height = figure.get_size_inches()
    place = (x / page_width, 1 - (y + height) / page_height, width / page_width, height / page_height)
    axes = figure.add_axes(place, axisbelow=True)
    axes.grid(axis=grid, color=Colour.GRID, linewidth=0.6)
    axes.tick_params(labelsize=SMALL, colors=Colour.INK, length=2.5, color=Colour.FAINT)
    axes.spines[:].set_edgecolor(Colour.GRID)
    return axes


def layer_label(name: str, kind: str) -> str:
    """``name``, with its type where the name ends in a bare number: ``features.6  ReLU``."""
    return f"{name}  {kind}" if kind and name.partition("#")[0].rpartition(".")[2].isdigit() else name


def with_types(findings: Sequence[_Finding], types: Mapping[str, str]) -> list[_Finding]:
    """``findings`` with the `layer_label` of their layers, whose types are ``types``."""
    return [replace(finding, layer=layer_label(finding.layer, types.get(finding.layer, ""))) for finding in findings]


def short_label(label: str, most: int) -> str:
    """``label`` printable and with at most ``most`` characters: ``encoder…layer_3.mlp.0`` still tells its layer."""
    label = printable(label)
    first, *rest = label.split(".")
    for at in range(1, len(rest) if len(label) > most else 0):
        for shorter in (f"{first}…{'.'.join(rest[at:])}", f"…{'.'.join(rest[at:])}"):
            if len(shorter) <= most:
                return shorter
    half = most // 2
    return label if len(label) <= most else f"{label[: most - half - 1]}…{label[-half:]}"


def finding_lines(findings: Sequence[Finding] | None, most: int = 8, numbered: bool = False) -> list[tuple[str, str]]:
    """The text and colour of a line for each finding; above ``most`` the last line counts the others.

    Nobody looked for findings that are None.
    """
    if findings is None:
        return []
    if not findings:
        return [("no findings", Colour.INK)]
    lines = [f"{f.finding}  {f.layer}: {f.evidence}" if f.layer else f"{f.finding}: {f.evidence}" for f in findings]
    if numbered:
        lines = [f"{at}  {findings[at - 1].severity} {line}" for at, line in enumerate(lines, 1)]
    more = len(lines) - most
    lines[most:] = [f"... and {counted(more, 'more finding')}, beside the rows"] if more > 0 else []
    colours = [Colour.INK if finding.severity == "note" else Colour.ALARM for finding in findings]
    return list(zip(lines, colours, strict=False))


class ShownFigure(Figure):
    """A figure that a notebook shows without pyplot."""

    def __repr__(self) -> str:
        width, height = (round(side * self.dpi) for side in self.get_size_inches())
        return f"figure of {width}x{height} pixels; .savefig(file) writes it"

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


@plain_settings()
def draw_rows(
    plot: RowPlot,
    title: str = "",
    lines: Sequence[str] = (),
    weights: str = "",
    *,
    beside: tuple[float, float] = (0.0, 0.0),
    above: float = 0.0,
    gap: float = _GAP,
) -> Figure:
    """A page with a title, lines of text and panels side by side with common rows, labelled at the left.

    The axes of the page are the panels, with rows at y = 0, 1, 2... from the top. Rows have a fixed height until all
    have the largest height of the plot. More rows are thinner, and only every second, third... is labelled; marked
    rows always are. The figure is outside pyplot.

    Args:
        plot: The panels; labels that are long are shortened.
        title: The first line.
        lines: Written before the lines of the plot.
        weights: Written beside the title, in red if they are random.
        beside: Width and height in inches that stay free at the right of the panels.
        above: Height in inches that stays free above the panels.
        gap: Distance of the panels in inches.
    """
    title = title or plot.title
    names, marked = [short_label(label, _LONGEST_LABEL) for label in plot.labels], plot.marked
    left = _MARGIN + max((inches(name, SMALL, bold=True) for name in names), default=0.0) + 0.1
    words = max((inches(printable(text), SMALL, bold=True) for text in marked.values()), default=0.0)
    weights = f"weights: {printable(weights)}" if weights else ""
    after_title = _MARGIN + inches(printable(title), TITLE, bold=True) + (_GAP if title else 0.0)
    width = left + sum(panel.width + gap for panel in plot.panels) - gap
    width += (words + 2 * _GAP if words else _MARGIN) + beside[0]
    width = max(width, _NARROWEST, after_title + inches(weights, TITLE, bold=True) + _MARGIN)
    styled = [*((line, Colour.INK) for line in lines), *plot.lines, *((line, Colour.LEGEND) for line in plot.legend)]
    texts = [
        (part, colour)
        for line, colour in styled
        for part in wrapped_lines(printable(line), width - 2 * _MARGIN, BODY, _MOST_WRAPPED, "    ")
    ]
    head = _MARGIN + 0.24 + _LINE * len(texts) + 0.5 + above
    rows_height = min(_ROW * max(len(names), 1), plot.tallest)
    foot = max((_below(panel) for panel in plot.panels), default=0.2) + 0.2
    figure = ShownFigure(figsize=(width, head + max(rows_height + foot, beside[1])), dpi=DPI, facecolor="white")
    write_at(figure, _MARGIN, _MARGIN + 0.08, title, fontsize=TITLE, fontweight="bold")
    if weights:
        colour = Colour.ALARM if weights.startswith("weights: random") else Colour.INK
        write_at(figure, after_title, _MARGIN + 0.08, weights, fontsize=TITLE, fontweight="bold", color=colour)
    for at, (line, colour) in enumerate(texts):
        write_at(figure, _MARGIN, _MARGIN + 0.32 + at * _LINE, line, color=colour)
    x = left
    for panel in plot.panels:
        axes = add_panel(figure, x, head, panel.width, rows_height, grid="x")
        _prepare_rows(axes, len(names), marked, plot.first)
        title_style = {"transform": axes.transAxes, "clip_on": False, "fontweight": "bold"}
        write(axes, 0, 1 + 0.3 / rows_height, panel.title, fontsize=BODY, **title_style)
        _draw_panel(axes, panel, rows_height / max(len(names), 1) * 72)
        x += panel.width + gap
    if not plot.panels:
        return figure
    _label_rows(figure.axes[0], names, marked, rows_height / max(len(names), 1))
    at_right = {"transform": axes.get_yaxis_transform(), "clip_on": False, "fontsize": SMALL, "color": Colour.ALARM}
    for at, text in marked.items():
        write(axes, 1 + _GAP / 2 / panel.width, at, text, **at_right)
    return figure


_THICKEST = 0.55  # of lines and markers, as a share of a row
# of markers at an edge
_EDGE: dict[str, dict[str, Any]] = {
    "x": {"ms": 3.6, "mew": 1.1},
    "s": {"ms": 3.0, "mew": 1.0, "mfc": "white"},
    "<": {"ms": 4.0},
    ">": {"ms": 4.4},
}


def _draw_panel(axes: Axes, panel: DrawnPanel, row_points: float) -> None:
    symlog = {"linthresh": panel.threshold, "linscale": 0.6} if panel.scale == "symlog" else {}
    axes.set_xscale(panel.scale, **symlog)
    axes.set_xlim(*panel.limits)
    if panel.upright:
        axes.tick_params(axis="x", labeltop=False, labelrotation=90)
    axes.set_xticks(panel.ticks, panel.labels)
    axes.set_xticks([], minor=True)
    if panel.limits[0] < 0 and panel.scale != "log" and not panel.cells:
        axes.axvline(0, color=Colour.FAINT, linewidth=0.6, zorder=1)
    if panel.cells:
        place = (*panel.limits, len(panel.cells) - 0.5, -0.5)
        axes.imshow(np.stack(panel.cells), aspect="auto", interpolation="nearest", extent=place, zorder=1.5)
    if panel.ramp is not None:
        _draw_ramp(axes, _below(panel) - 0.2, *panel.ramp)
    for order, (mark, spans) in enumerate(panel.marks, 2):
        if not spans:
            continue
        rows, lows, highs = (list(values) for values in zip(*spans, strict=True))
        colour: dict[str, Any] = {"color": mark.colour, "zorder": order}
        size = min(mark.drawn_size, _THICKEST * row_points)
        match mark.kind:
            case "line":
                axes.hlines(rows, lows, highs, linewidth=size, **colour)
            case "bar":
                half = mark.drawn_size / 2
                corners = [
                    [(low, at - half), (high, at - half), (high, at + half), (low, at + half)]
                    for at, low, high in spans
                ]
                # one collection: 400 rectangles take half a second; an edge closes the seams between full rows
                edge = mark.colour if mark.size == 1 else "none"
                axes.add_collection(PolyCollection(corners, facecolors=mark.colour, edgecolors=edge, zorder=order))
            case "dot" | "tick":
                axes.plot(highs, rows, "|" if mark.kind == "tick" else mark.marker or "o", ms=size, **colour)
            case "path":
                known = dict(zip(rows, highs, strict=True))
                path = [known.get(at, math.nan) for at in range(int(rows[-1]) + 1)]  # a NaN breaks it
                axes.plot(path, range(len(path)), "-o", linewidth=0.8, ms=size, **colour)
            case "left" | "right":
                edge_at = panel.limits[0 if mark.kind == "left" else 1]
                style = _EDGE[mark.marker] | colour | {"clip_on": False}
                axes.plot([edge_at] * len(rows), rows, mark.marker, **style)
    for edge_at, places, marker in zip(panel.limits, panel.beyond, "<>", strict=True):
        style = {"color": panel.arrow[0], "ms": 3.6, "mew": 0, "clip_on": False, "zorder": 99}
        axes.plot([edge_at] * len(places), places, marker, **style) if places else None
    at_left = {"transform": axes.get_yaxis_transform(), "fontsize": SMALL}
    for at, share, is_inside, text, text_colour in panel.placed_texts:
        beside: dict[str, Any] = {"ha": "right", "color": "white"} if is_inside else {"color": text_colour}
        x = share + (-1 if is_inside else 1) * 0.06 / panel.width
        write(axes, x, at, text, zorder=99, **at_left, **beside)


def _below(panel: DrawnPanel) -> float:
    """The height of the labels and the colour bar below a panel, in inches."""
    labels = max((inches(label, SMALL) for label in panel.labels), default=0.0) + 0.1 if panel.upright else 0.2
    return labels + (0.4 if panel.ramp else 0.0)


def _draw_ramp(axes: Axes, below: float, cmap: str, labels: Sequence[str]) -> None:
    """A colour bar ``below`` a panel of cells, in inches."""
    high = axes.bbox.height / DPI  # in inches; places in the axes are shares of it
    bar = axes.inset_axes((0, -below / high, 1, 0.08 / high))
    bar.imshow(np.linspace(0, 1, 128)[None], aspect="auto", cmap=cmap, extent=(0, 1, 0, 1))
    bar.set_axis_off()
    for x, label, where in zip((0, 0.5, 1), labels, ("left", "center", "right"), strict=True):
        write(bar, x, -0.9, label, ha=where, fontsize=SMALL - 0.5, clip_on=False)


def _prepare_rows(axes: Axes, rows: int, marked: Collection[int], first: int | None) -> None:
    axes.set_ylim(max(rows, 1) - 0.5, -0.5)
    axes.set_yticks([])
    for at in range(rows):
        if at in marked or at % 2:
            ground = Colour.FIRST_STRIPE if at == first else Colour.ALARM_STRIPE if at in marked else Colour.STRIPE
            axes.axhspan(at - 0.5, at + 0.5, facecolor=ground, edgecolor="none", zorder=0)
    # numbers above and below the rows: a screen may show only one end of a tall page
    axes.tick_params(axis="x", top=True, labeltop=True, pad=1)


def _label_rows(axes: Axes, names: Sequence[str], marked: Collection[int], row_height: float) -> None:
    step = -(-SMALL * 1.25 / 72 // row_height)
    last = -step
    beside = {"transform": axes.get_yaxis_transform(), "clip_on": False, "ha": "right", "fontsize": SMALL}
    panel_width = axes.bbox.width / DPI
    for at, name in enumerate(names):
        near_marked = any(at + by in marked for by in range(1, int(step)))
        if at in marked or (at - last >= step and not near_marked):
            colour, weight = (Colour.ALARM, "bold") if at in marked else (Colour.INK, "normal")
            write(axes, -0.06 / panel_width, at, name, color=colour, fontweight=weight, **beside)
            last = at


def draw_chart(axes: Axes, chart: Chart, most_ticks: int = 5, notes: bool = False) -> None:
    """Draw a `Chart`, its title above the axes; ``notes`` are written at the right of the title."""
    above = 20.0 if chart.flags or notes else 4.0  # points; flags stand between the chart and its title
    axes.set_title(chart.title, loc="left", fontsize=BODY, fontweight="bold", color=Colour.INK, pad=above)
    axes.set_title("; ".join(chart.notes) if notes else "", loc="right", fontsize=SMALL, color=Colour.FAINT, pad=above)
    axes.set_yscale("log" if chart.is_log else "linear")
    axes.set(xlim=chart.span if chart.span[0] < chart.span[1] else None, ylim=chart.limits)
    ticks = chart.ticks(most_ticks)
    axes.set_yticks([value for value, _ in ticks], [label for _, label in ticks])
    axes.set_yticks([], minor=True)
    if chart.band:
        places, low, high = zip(*chart.band, strict=True)
        axes.fill_between(places, low, high, color="#e2e2e2", linewidth=5 if len(places) == 1 else 0, zorder=2)
    for curve in chart.curves:
        colour = Colour.FAINT if curve.colour is None else CURVE_COLOURS[curve.colour % len(CURVE_COLOURS)]
        ys = [math.nan if y is None else y for y in curve.ys]  # a NaN breaks the line
        axes.plot(curve.xs, ys, color=colour, lw=curve.width, alpha=0.45 if curve.width < 1 else 1.0, zorder=4)
        alone = [run[0] for run in chart.runs(curve) if len(run) == 1]
        axes.plot(*zip(*alone, strict=True), "o", color=colour, ms=4, zorder=4) if alone else None
    foot: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 6, "ms": 4}
    axes.plot(chart.unknown, [0] * len(chart.unknown), "x", color="#d020d0", **foot)
    for number in dict.fromkeys(colour for _, colour in chart.below):
        colour = Colour.FAINT if number is None else CURVE_COLOURS[number % len(CURVE_COLOURS)]
        at_foot = [x for x, other in chart.below if other == number]
        at_foot = at_foot[:: max(1, len(at_foot) // 20)]
        axes.plot(at_foot, [0.02] * len(at_foot), "v", color=colour, **foot)
    left, right = axes.get_xlim()
    for value, colour, _ in chart.lines_of_rules:
        axes.plot([max(left, chart.begin), right], [value] * 2, color=colour, lw=0.8, ls=(0, (3, 3)), zorder=4)
    for value, colour, words in chart.rules:
        if words and chart.limits[0] < value < chart.limits[1]:
            write(axes, right, value, f"{words} ", fontsize=SMALL - 1, ha="right", va="bottom", color=colour)
    for x, words in chart.flags:
        axes.axvline(x, color=Colour.ALARM, lw=0.7, ls=(0, (3, 3)), zorder=1)
        box = {"boxstyle": "round,pad=0.22", "facecolor": "white", "edgecolor": Colour.ALARM, "linewidth": 0.8}
        style = {"ha": "center", "clip_on": False, "fontsize": SMALL - 1, "fontweight": "bold", "color": Colour.ALARM}
        write(axes, x, 1.07, words, transform=axes.get_xaxis_transform(), zorder=9, bbox=box, **style)
    if not chart.values:
        axes.set_yticks([])
        write(axes, 0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=Colour.FAINT)
    _write_names(axes, chart)


def _write_names(axes: Axes, chart: Chart) -> None:
    """Write names at the left, each beside a piece of its line, in the half of the chart where they hide less."""
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6}
    wide, high = axes.bbox.width / DPI, axes.bbox.height / DPI
    places = sorted(chart.place(x, y)[1] for curve in chart.named for run in chart.runs(curve) for x, y in run)
    below = bool(places) and places[len(places) // 2] > 0.6
    for at, curve in enumerate(chart.named):
        y = (0.1 + 0.14 * (len(chart.named) - 1 - at if below else at)) / high
        y, colour = y + 0.05 / high if below else 1 - y, CURVE_COLOURS[(curve.colour or 0) % len(CURVE_COLOURS)]
        place: dict[str, Any] = {"transform": axes.transAxes, "zorder": 8}
        axes.plot([0.06 / wide, 0.2 / wide], [y, y], color=colour, lw=2.0, **place)
        write(axes, 0.24 / wide, y, short_label(curve.name, 26), fontsize=SMALL, color=colour, bbox=box, **place)
