"""Curves over the steps of a training run: the loss, the learning rate, and a metric of all layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from hookscope.drawing import BODY, DPI, SMALL, Colour, layer_label, plain_ticks, short_label, write
from hookscope.training.log.loss import centred
from hookscope.training.log.rules import TrainingThresholds
from hookscope.training.log.series import RunSeries
from hookscope.training.log.summary import TimedFinding
from hookscope.training.plot.columns import LayerStepGrid, rows_of

Array = NDArray[np.float64]

_LINES = (Colour.BLUE, Colour.ORANGE, Colour.GREEN, "#cc79a7", "#56b4e9")
_LOST = "#d020d0"
_FEWEST_SMOOTHED = 20  # fewer losses are visible one by one
_MOST_NAMED = 3
_BAND, _LINE = "band from the lowest to the highest of all layers", "grey line their median"
_NAMED, _ZEROS = "coloured lines layers with a finding", "triangles at the foot exactly 0"
_LIMIT = "dashed red threshold"
CURVES_KEYS = (_BAND, _LINE, _NAMED, _ZEROS, _LIMIT)
"""Everything that curves can show."""
_ABOVE = 20.0  # points between the loss and its title: the numbers of findings stand there
_LEAST = 1e-8  # of the highest loss, on a logarithmic axis
_ORDERS = 20.0  # highest over lowest loss, from which the axis is logarithmic


def draw_loss(axes: Axes, run: RunSeries, findings: Sequence[TimedFinding]) -> None:
    """Draw each sampled loss, a smoothed line if there are many, marks for missing ones, and numbers of findings."""
    _title(axes, "loss", above=_ABOVE)
    keys: dict[str, None] = {}  # in order, each once
    known_losses = [loss for loss in run.losses if np.isfinite(loss.losses).any()]
    for at, loss in enumerate(run.losses):
        known = np.isfinite(loss.losses)
        colour = _LINES[at % len(_LINES)]
        many = known.sum() >= _FEWEST_SMOOTHED
        width: dict[str, Any] = {"lw": 0.7, "alpha": 0.45} if many else {"lw": 1.2}
        axes.plot(loss.steps, loss.losses, color=colour, **width)  # a NaN breaks it
        alone = known & ~np.append(known[1:], False) & ~np.insert(known[:-1], 0, False)
        axes.plot(loss.steps[alone], loss.losses[alone], "o", color=colour, ms=4)
        if many:
            middle, around = centred(loss.losses)
            axes.plot(loss.steps, middle, color=colour, lw=1.6)
            keys[f"thin: each sampled step; thick: median of it and {around} before and after"] = None
        lost = loss.steps[~known & (np.cumsum(known) > 0)]
        bottom: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        axes.plot(lost, [0] * len(lost), "x", color=_LOST, ms=4, **bottom)
        keys |= {"×: NaN, Inf or unknown": None} if len(lost) else {}
    if not known_losses:
        axes.set_yticks([])
        write(axes, 0.5, 0.5, "the loss is unknown", transform=axes.transAxes, ha="center", color=Colour.FAINT)
    values = np.concatenate([loss.losses[np.isfinite(loss.losses)] for loss in known_losses] or [np.ones(1)])
    _axis(axes, values)
    for at, loss in enumerate(run.losses):
        below = loss.losses < axes.get_ylim()[0]
        _floor(axes, loss.steps[below], _LINES[at % len(_LINES)])
        keys |= {"▾: below the axis": None} if below.any() else {}
    axes.set_title("; ".join(keys), loc="right", fontsize=SMALL, color=Colour.FAINT, pad=_ABOVE)
    if len(run.losses) > 1:
        _names(axes, [(f"optimizer {loss.optimizer}", _LINES[at % len(_LINES)]) for at, loss in enumerate(run.losses)])
    _flags(axes, findings)


def _flags(axes: Axes, findings: Sequence[TimedFinding]) -> None:
    """Draw numbers of findings above the loss; numbers that would overlap are joined."""
    left, right = axes.get_xlim()
    near = (right - left) / 45
    flags: list[tuple[float, list[int]]] = []
    begun = [
        (float(finding.step), number) for number, finding in enumerate(findings, 1) if finding.finding != "few-samples"
    ]
    begun = [(min(max(step, left), right), number) for step, number in begun]  # a run may stop between samples
    for step, number in sorted(begun):
        if flags and step - flags[-1][0] < near:
            flags[-1][1].append(number)
        else:
            flags.append((step, [number]))
    for step, numbers in flags:
        axes.axvline(step, color=Colour.ALARM, lw=0.7, ls=(0, (3, 3)), zorder=1)
        text = ",".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]}-{numbers[-1]}"
        badge(axes, step, 1.07, text, transform=axes.get_xaxis_transform())


def badge(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """Draw the number of a finding."""
    box = {"boxstyle": "round,pad=0.22", "facecolor": "white", "edgecolor": Colour.ALARM, "linewidth": 0.8}
    settings = {"ha": "center", "clip_on": False, "zorder": 9, "fontsize": SMALL - 1, "fontweight": "bold"} | more
    write(axes, x, y, text, color=Colour.ALARM, bbox=box, **settings)


def draw_rates(axes: Axes, run: RunSeries) -> None:
    """Draw the learning rates, on an axis from 0."""
    for at, loss in enumerate(run.losses):
        if np.isfinite(loss.rates).any():
            alone = np.isfinite(loss.rates).sum() < 2
            axes.plot(loss.steps, loss.rates, "o" if alone else "-", color=_LINES[at % len(_LINES)], lw=1.2, ms=4)
    highest = max((float(np.nanmax(loss.rates)) for loss in run.losses if np.isfinite(loss.rates).any()), default=1.0)
    axes.set_ylim(0, 1.8 * highest or 1)  # the name has room above
    axes.set_yticks([0, highest] if highest else [0], ["0", f"{highest:.3g}"] if highest else ["0"])
    write(axes, 0.005, 0.82, "learning rate", transform=axes.transAxes, fontsize=SMALL, fontweight="bold")


def draw_curves(
    axes: Axes, grid: LayerStepGrid, run: RunSeries, findings: Sequence[TimedFinding], thresholds: TrainingThresholds
) -> set[str]:
    """Draw a band of all layers, named lines of layers with a finding, and thresholds; returns which are drawn."""
    _title(axes, grid.column.title)
    x = np.linspace(*grid.edges, grid.cells.shape[1] + 1)
    x = (x[1:] + x[:-1]) / 2
    cells = np.where(grid.cells > 0, grid.cells, np.nan) if grid.column.logarithmic else grid.cells
    _band(axes, x, cells)
    layers = zip(_worth_naming(grid, run, findings), _LINES, strict=False)
    named = [(name, row, colour) for (name, row), colour in layers]
    for _, row, colour in named:
        marker = "o" if np.isfinite(cells[row]).sum() == 1 else None
        axes.plot(x, cells[row], color=colour, lw=1.4, marker=marker, ms=4, zorder=5)
    _scale_axis(axes, grid, cells)
    if grid.column.logarithmic:
        for _, row, colour in named:  # 0 is below every power of ten
            _floor(axes, x[grid.cells[row] == 0], colour)
    limited = _limits(axes, grid, thresholds)
    _usual(axes, grid)
    half = _emptier_half(axes, [cells[row] for _, row, _ in named])
    _names(axes, [(name, colour) for name, _, colour in named], half)
    zeros = grid.column.logarithmic and any((grid.cells[row] == 0).any() for _, row, _ in named)
    known = np.isfinite(cells).any()
    drawn = {_BAND: known, _LINE: known, _NAMED: named, _ZEROS: zeros, _LIMIT: limited}
    return {key for key, is_drawn in drawn.items() if is_drawn}


def _band(axes: Axes, x: Array, cells: Array) -> None:
    """Fill from the lowest to the highest layer, and draw the median."""
    some = np.isfinite(cells).any(axis=0)
    if not some.any():
        return
    low, middle, high = (np.full(len(x), np.nan) for _ in range(3))
    low[some], high[some] = np.nanmin(cells[:, some], axis=0), np.nanmax(cells[:, some], axis=0)
    middle[some] = np.nanmedian(cells[:, some], axis=0)
    alone = some.sum() == 1
    if alone:
        axes.plot([x[some]] * 2, [low[some], high[some]], color="#c9c9c9", lw=5, solid_capstyle="butt")
    else:
        axes.fill_between(x, low, high, color="#e2e2e2", lw=0, zorder=2)
    axes.plot(x, middle, "o" if alone else "-", color=Colour.FAINT, lw=1.1, ms=4, zorder=3)


def _usual(axes: Axes, grid: LayerStepGrid) -> None:
    """Draw a dotted line at the usual value, where the axis reaches it."""
    usual, (low, high) = grid.column.usual, axes.get_ylim()
    if usual is None or not low < usual < high:
        return
    axes.axhline(usual, color=Colour.GREEN, lw=1.0, ls=(0, (1, 1.5)), zorder=4)
    about = {"fontsize": SMALL - 1, "ha": "right", "va": "bottom", "color": Colour.GREEN}
    write(axes, grid.edges[1], usual, "usual ", **about)


def _floor(axes: Axes, x: NDArray[Any], colour: str) -> None:
    """Draw triangles on the lower edge, at most about 20."""
    bottom: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 6}
    x = x[:: max(1, len(x) // 20)]
    axes.plot(x, [0.02] * len(x), "v", color=colour, ms=4, **bottom)


def _limits(axes: Axes, grid: LayerStepGrid, thresholds: TrainingThresholds) -> bool:
    """Draw dashed lines at the limits that the axis reaches, from the step on from which they apply; whether any."""
    low, high = axes.get_ylim()
    begin = grid.column.judged_from(thresholds)
    left, right = max(grid.edges[0], begin or grid.edges[0]), grid.edges[1]
    reached = [limit for limit in grid.column.limits(thresholds) if low < limit < high and left < right]
    for limit in reached:
        axes.plot([left, right], [limit] * 2, color=Colour.ALARM, lw=0.8, ls=(0, (3, 3)), zorder=4)
    if begin > max(grid.edges[0], 0):
        text = f"limit 1 from step {begin}" if left < right else f"limit 1 only from step {begin} on"
        write(axes, 0.97, 0.93, text, transform=axes.transAxes, fontsize=SMALL - 1, ha="right", color=Colour.ALARM)
    return bool(reached)


def _emptier_half(axes: Axes, lines: Sequence[Array]) -> str:
    """The half of the panel with fewer of the named lines, where names hide less."""
    known = np.concatenate([line[np.isfinite(line)] for line in lines] or [np.zeros(0)])
    if not len(known):
        return "top"
    places = axes.transAxes.inverted().transform(axes.transData.transform([(0, value) for value in known]))[:, 1]
    return "bottom" if float(np.median(places)) > 0.6 else "top"


def _worth_naming(grid: LayerStepGrid, run: RunSeries, findings: Sequence[TimedFinding]) -> list[tuple[str, int]]:
    """The layers that findings on this metric name, with their rows."""
    labels = [finding.layer for finding in findings if grid.column.is_about(finding)]
    rows = rows_of(list(dict.fromkeys(labels)), run)
    rows = [row for row in rows if np.isfinite(grid.cells[row]).any()]
    return [(layer_label(run.layers[row].label, run.layers[row].type), row) for row in rows[:_MOST_NAMED]]


def _names(axes: Axes, named: Sequence[tuple[str, str]], half: str = "top") -> None:
    """Write names at the left, each beside a piece of its line."""
    if not named:
        return
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6}
    wide, high = axes.bbox.width / DPI, axes.bbox.height / DPI
    for at, (name, colour) in enumerate(named):
        row = at if half == "top" else len(named) - 1 - at
        y = (0.1 + 0.14 * row) / high
        y = 1 - y if half == "top" else y + 0.05 / high
        place: dict[str, Any] = {"transform": axes.transAxes, "zorder": 8}
        axes.plot([0.06 / wide, 0.2 / wide], [y, y], color=colour, lw=2.0, **place)
        write(axes, 0.24 / wide, y, short_label(name, 26), fontsize=SMALL, color=colour, bbox=box, **place)


def _title(axes: Axes, text: str, above: float = 4.0) -> None:
    axes.set_title(text, loc="left", fontsize=BODY, fontweight="bold", color=Colour.INK, pad=above)


def _scale_axis(axes: Axes, grid: LayerStepGrid, cells: Array) -> None:
    if grid.column.logarithmic:
        known = cells[np.isfinite(cells)]
        low, high = (float(known.min()), float(known.max())) if len(known) else (grid.low, grid.high)
        reach = max(0.1 * math.log10(high / low), 0.15)
        _powers(axes, max(low, high * 1e-30) / 10**reach, high * 10**reach)
    elif grid.column.ends == (0.0, 1.0):
        axes.set_ylim(-0.03, 1.03)
        axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    else:
        highest = float(np.nanmax(cells, initial=0.0))
        axes.set_ylim(0, max(1.1 * highest, 1.2))
        _whole_labels(axes)


def _axis(axes: Axes, values: Array) -> None:
    """Use a logarithmic axis where the loss falls or jumps by orders: a spike must not flatten the rest."""
    above = values[values > 0]
    if values.min() >= 0 and len(above) and values.max() > _ORDERS * np.quantile(above, 0.05):
        _powers(axes, max(float(above.min()), float(values.max()) * _LEAST) / 1.5, float(values.max()) * 1.5)
    elif len(values) > 1 and values.max() > values.min():
        beside = 0.06 * float(values.max() - values.min())
        axes.set_ylim(float(values.min()) - beside, float(values.max()) + beside)
        _whole_labels(axes)


def _whole_labels(axes: Axes) -> None:
    axes.set_yticks(*plain_ticks(axes.get_ylim(), 5))
    axes.set_yticks([], minor=True)


def _powers(axes: Axes, low: float, high: float) -> None:
    """Use a logarithmic axis with about four labelled powers of ten."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    step = max(1, math.ceil((last - first) / 4))
    marks = [(1, power) for power in range(first, last + 1, step)]
    if last - first < 2:
        marks = [(digit, power) for power in range(first - 1, last + 1) for digit in (1, 2, 5)]
        marks = [(digit, power) for digit, power in marks if low <= digit * 10.0**power <= high]
    if len(marks) < 2:
        return _whole_labels(axes)
    axes.set_yticks([digit * 10.0**power for digit, power in marks], [_number(digit, power) for digit, power in marks])
    axes.set_yticks([], minor=True)


def _number(digit: int, power: int) -> str:
    return f"{digit * 10.0**power:g}" if -3 <= power <= 3 else f"{digit}e{power}"
