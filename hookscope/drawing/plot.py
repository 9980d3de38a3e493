"""Plots: matplotlib figures independent of settings around them, pages of labelled rows, figures as bytes."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookscope.drawing.text import fitting, font
from hookscope.errors import UsageError, printable

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 110
TITLE, BODY, SMALL = 11.0, 8.5, 7.5  # points

# In inches. Rows are as high as their labels until the page has its largest height; more rows are thinner, and only
# some of them are labelled.
_MARGIN, _GAP, _LINE = 0.2, 0.28, 0.17
_ROW, _TALLEST = 0.145, 75.0
_LONGEST_LABEL = 52


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


def plot_suffix(path: str) -> str:
    """The suffix of ``path``, which is the format of the plot; ``.png`` for a device such as ``/dev/null``.

    Raises:
        UsageError: for a suffix of another format.

    Example:
        >>> plot_suffix("out/Weights.SVG")
        '.svg'
    """
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
    own: dict[str, Any] = {
        "svg.hashsalt": "hookscope",
        "svg.fonttype": "path",
        "pdf.fonttype": 42,
        "axes.unicode_minus": False,
    }
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

    Args:
        figure: A matplotlib figure, created inside `plain_settings`.
        suffix: One of `SUFFIXES`.
        provenance: Where the figure comes from. A PNG has it in the text chunk ``hookscope``, which `read_provenance`
            reads, an SVG in the description, a PDF in the keywords.

    Example:
        >>> page = page_of_rows(["conv1"], ["weights"], "resnet18")
        >>> figure_bytes(page.figure, ".pdf")[:4]
        b'%PDF'
    """
    text = json.dumps(dict(provenance or {}), allow_nan=False, separators=(",", ":"))
    metadata: dict[str, dict[str, Any]] = {
        ".png": {"hookscope": text},
        ".svg": {"Date": None, "Creator": "hookscope", "Description": text},
        ".pdf": {"CreationDate": None, "Creator": "hookscope", "Keywords": text},
    }
    buffer = io.BytesIO()
    with plain_settings(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the box that is drawn instead says the same
        figure.savefig(buffer, format=suffix[1:], dpi=DPI, metadata=metadata[suffix], facecolor="white")
    return buffer.getvalue()


def write(target: Axes | Figure, x: float, y: float, text: str, **more: Any) -> Any:
    """Write text literally: ``$`` starts no formula, control characters are escaped."""
    settings: dict[str, Any] = {"fontsize": BODY, "color": Colour.INK, "va": "center"} | more
    return target.text(x, y, printable(text), parse_math=False, **settings)


@dataclass(frozen=True)
class RowPage:
    """A page of panels side by side with common rows.

    Attributes:
        figure: The page.
        panels: Axes for each title, with rows at y = 0, 1, 2... from the top; the caller sets x.
        row_height: Height of a row in inches.
    """

    figure: Figure
    panels: tuple[Axes, ...]
    row_height: float


def page_of_rows(
    labels: Sequence[str],
    titles: Sequence[str],
    heading: str,
    lines: Sequence[str] = (),
    widths: Sequence[float] | None = None,
    marked: Mapping[int, str] | None = None,
    alarms: Collection[int] = (),
) -> RowPage:
    """A page with a heading, lines of text, and a panel for each of ``titles``; row labels are at the left.

    Rows have a fixed height up to some 500 rows. More rows are thinner, and only every second, third... is labelled;
    marked rows always are.

    Args:
        labels: Labels of the rows, from top to bottom; long ones are shortened in the middle.
        titles: Titles of the panels.
        heading: The first line.
        lines: Further lines below the heading.
        widths: Widths of the panels in inches.
        marked: Rows with a finding and the words to write at their right; they have a coloured background.
        alarms: Which of ``lines`` have the alarm colour.
    """
    with plain_settings():
        marked = dict(marked or {})
        widths = list(widths or [2.6] * len(titles))
        names = [_short(printable(label)) for label in labels]
        left = _MARGIN + max((_inches(name, SMALL) for name in names), default=0.0) + 0.1
        words = max((_inches(printable(text), SMALL) for text in marked.values()), default=0.0)
        tail = words + 2 * _GAP if words else _MARGIN
        head = _MARGIN + 0.24 + _LINE * len(lines) + 0.5
        rows = min(_ROW * max(len(labels), 1), _TALLEST)
        width = left + sum(widths) + _GAP * (len(widths) - 1) + tail
        width = max(width, 2 * _MARGIN + _inches(printable(heading), TITLE) * 1.12)
        lines = [fitting(printable(line), width - 2 * _MARGIN, BODY) for line in lines]
        height = head + rows + 0.5
        figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
        _head(figure, heading, lines, alarms)
        panels, x = [], left
        for title, wide in zip(titles, widths, strict=True):
            place = (x / width, 0.5 / height, wide / width, rows / height)
            panels.append(_panel(figure, place, title, len(labels), marked))
            x += wide + _GAP
        row_height = rows / max(len(labels), 1)
        _label_rows(figure, panels[0], names, marked, row_height)
        for at, text in marked.items():
            beside = {"transform": panels[-1].get_yaxis_transform(), "clip_on": False}
            write(panels[-1], 1 + _GAP / 2 / widths[-1], at, text, fontsize=SMALL, color=Colour.ALARM, **beside)
        return RowPage(figure, tuple(panels), row_height)


def _head(figure: Figure, heading: str, lines: Sequence[str], alarms: Collection[int]) -> None:
    width, height = figure.get_size_inches()
    y = height - _MARGIN - 0.08
    write(figure, _MARGIN / width, y / height, heading, fontsize=TITLE, fontweight="bold")
    y -= 0.24
    for at, line in enumerate(lines):
        colour = Colour.ALARM if at in alarms else Colour.INK
        write(figure, _MARGIN / width, y / height, line, color=colour)
        y -= _LINE


def _panel(figure: Figure, place: Any, title: str, rows: int, marked: Collection[int]) -> Axes:
    axes = figure.add_axes(place)
    axes.set_ylim(max(rows, 1) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=Colour.GRID, linewidth=0.6)
    axes.tick_params(axis="x", labelsize=SMALL, colors=Colour.INK, length=2.5, color=Colour.FAINT)
    for side in axes.spines.values():
        side.set_edgecolor(Colour.GRID)
    for at in range(rows):
        if at in marked or at % 2:
            ground = Colour.ALARM_STRIPE if at in marked else Colour.STRIPE
            axes.axhspan(at - 0.5, at + 0.5, facecolor=ground, edgecolor="none", zorder=0)
    # numbers above and below the rows: a screen may show only one end of a tall page
    axes.tick_params(axis="x", top=True, labeltop=True, pad=1)
    inches = figure.get_size_inches()[1] * place[3]
    title_at = {"transform": axes.transAxes, "clip_on": False, "fontweight": "bold"}
    write(axes, 0, 1 + 0.3 / inches, title, fontsize=BODY, **title_at)
    return axes


def _label_rows(figure: Figure, axes: Axes, names: Sequence[str], marked: Collection[int], row_height: float) -> None:
    step = -(-SMALL * 1.25 / 72 // row_height)
    last = -step
    beside = {"transform": axes.get_yaxis_transform(), "clip_on": False, "ha": "right", "fontsize": SMALL}
    inches = axes.get_position().width * figure.get_size_inches()[0]
    for at, name in enumerate(names):
        near_marked = any(at + by in marked for by in range(1, int(step)))
        if at in marked or (at - last >= step and not near_marked):
            colour, weight = (Colour.ALARM, "bold") if at in marked else (Colour.INK, "normal")
            write(axes, -0.06 / inches, at, name, color=colour, fontweight=weight, **beside)
            last = at


def _short(label: str) -> str:
    half = _LONGEST_LABEL // 2
    return label if len(label) <= _LONGEST_LABEL else f"{label[:half]}…{label[-half:]}"


def _inches(text: str, points: float) -> float:
    """The width of a line in bold."""
    return float(font(100, True).getlength(text)) * points / 100 / 72
