"""Curves over the steps of a training run: the loss, the learning rate, and one figure of all layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hookscope.errors import printable
from hookscope.figures import BODY, SMALL, Colour, write
from hookscope.runs.columns import Grid, rows_of
from hookscope.runs.loss import smoothed
from hookscope.runs.series import RunSeries
from hookscope.runs.thresholds import WatchThresholds
from hookscope.runs.timed import TimedFinding

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["badge", "draw_curves", "draw_loss", "draw_rates"]

_LINES = (Colour.BLUE, Colour.ORANGE, Colour.GREEN, "#cc79a7", "#56b4e9")
_MOST_NAMED = 3
_LEAST = 1e-8  # of the highest loss, on a logarithmic axis
_ORDERS = 20.0  # times the lowest the highest must be for a logarithmic axis


def draw_loss(axes: Axes, run: RunSeries, findings: Sequence[TimedFinding]) -> None:
    """Each sampled loss, and a smoothed line; findings by number where they begin."""
    import numpy as np

    _title(axes, "loss", above=15.0)
    seen = [one for one in run.losses if np.isfinite(one.losses).any()]
    for at, one in enumerate(run.losses):
        known = np.isfinite(one.losses)
        steps, losses = one.steps[known], one.losses[known]
        colour = _LINES[at % len(_LINES)]
        alone = len(steps) < 2
        axes.plot(steps, losses, "o" if alone else "-", color=colour, ms=4, lw=0.7, alpha=1 if alone else 0.45)
        if len(steps) >= 10:
            axes.plot(steps, smoothed(losses), color=colour, lw=1.6)
        lost = one.steps[~known & (one.steps > (steps[0] if len(steps) else np.inf))]
        bottom: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        axes.plot(lost, [0] * len(lost), "x", color="#d020d0", ms=4, **bottom)
    if not seen:
        axes.set_yticks([])
        write(axes, 0.5, 0.5, "the loss was not seen", transform=axes.transAxes, ha="center", color=Colour.FAINT)
    values = np.concatenate([one.losses[np.isfinite(one.losses)] for one in seen] or [np.ones(1)])
    _axis(axes, values)
    if len(run.losses) > 1:
        _names(axes, [(f"optimizer {one.optimizer}", _LINES[at % len(_LINES)]) for at, one in enumerate(run.losses)])
    _flags(axes, findings)


def _flags(axes: Axes, findings: Sequence[TimedFinding]) -> None:
    """Numbers above the loss; those that would lie on one another are written as one."""
    left, right = axes.get_xlim()
    near = (right - left) / 45
    flags: list[tuple[float, list[int]]] = []
    for step, number in sorted((float(found.step), number) for number, found in enumerate(findings, 1)):
        if flags and step - flags[-1][0] < near:
            flags[-1][1].append(number)
        else:
            flags.append((step, [number]))
    for step, numbers in flags:
        axes.axvline(step, color=Colour.ALARM, lw=0.7, ls=(0, (3, 3)), zorder=1)
        text = ",".join(map(str, numbers)) if len(numbers) < 4 else f"{numbers[0]}-{numbers[-1]}"
        badge(axes, step, 1.07, text, transform=axes.get_xaxis_transform())


def badge(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """The number of a finding."""
    box = {"boxstyle": "round,pad=0.22", "facecolor": "white", "edgecolor": Colour.ALARM, "linewidth": 0.8}
    settings = {"ha": "center", "clip_on": False, "zorder": 9, "fontsize": SMALL - 1, "fontweight": "bold"} | more
    write(axes, x, y, text, color=Colour.ALARM, bbox=box, **settings)


def draw_rates(axes: Axes, run: RunSeries) -> None:
    """Learning rates, from 0."""
    import numpy as np

    for at, one in enumerate(run.losses):
        if np.isfinite(one.rates).any():
            alone = np.isfinite(one.rates).sum() < 2
            axes.plot(one.steps, one.rates, "o" if alone else "-", color=_LINES[at % len(_LINES)], lw=1.2, ms=4)
    highest = max((float(np.nanmax(one.rates)) for one in run.losses if np.isfinite(one.rates).any()), default=1.0)
    axes.set_ylim(0, 1.8 * highest or 1)  # the name has room above
    axes.set_yticks([0, highest] if highest else [0], ["0", f"{highest:.3g}"] if highest else ["0"])
    write(axes, 0.005, 0.82, "learning rate", transform=axes.transAxes, fontsize=SMALL, fontweight="bold")


def draw_curves(
    axes: Axes, grid: Grid, run: RunSeries, findings: Sequence[TimedFinding], thresholds: WatchThresholds
) -> None:
    """A band of all layers, the lines of those with a finding by name, and thresholds where they are near."""
    import numpy as np

    _title(axes, grid.column.title)
    x = np.linspace(*grid.edges, grid.cells.shape[1] + 1)
    x = (x[1:] + x[:-1]) / 2
    cells = np.where(grid.cells > 0, grid.cells, np.nan) if grid.column.logarithmic else grid.cells
    some = np.isfinite(cells).any(axis=0)
    if some.any():
        low, middle, high = (np.full(len(x), np.nan) for _ in range(3))
        low[some], high[some] = np.nanmin(cells[:, some], axis=0), np.nanmax(cells[:, some], axis=0)
        middle[some] = np.nanmedian(cells[:, some], axis=0)
        alone = some.sum() == 1
        if alone:
            axes.plot([x[some]] * 2, [low[some], high[some]], color="#c9c9c9", lw=5, solid_capstyle="butt")
        else:
            axes.fill_between(x, low, high, color="#e2e2e2", lw=0, zorder=2)
        axes.plot(x, middle, "o" if alone else "-", color=Colour.FAINT, lw=1.1, ms=4, zorder=3)
    named = _worth_naming(grid, run, findings)
    for (_, row), colour in zip(named, _LINES, strict=False):
        marker = "o" if np.isfinite(cells[row]).sum() == 1 else None
        axes.plot(x, cells[row], color=colour, lw=1.4, marker=marker, ms=4, zorder=5)
    _scale_axis(axes, grid, cells)
    low_end, high_end = axes.get_ylim()
    for limit in grid.column.limits(thresholds):
        if low_end < limit < high_end:
            axes.axhline(limit, color=Colour.ALARM, lw=0.8, ls=(0, (3, 3)), zorder=4)
    if grid.column.usual is not None and low_end < grid.column.usual < high_end:
        axes.axhline(grid.column.usual, color=Colour.GREEN, lw=1.0, ls=(0, (1, 1.5)), zorder=4)
        write(
            axes,
            grid.edges[1],
            grid.column.usual,
            "usual ",
            fontsize=SMALL - 1,
            ha="right",
            va="bottom",
            color=Colour.GREEN,
        )
    _names(axes, [(name, colour) for (name, _), colour in zip(named, _LINES, strict=False)])


def _worth_naming(grid: Grid, run: RunSeries, findings: Sequence[TimedFinding]) -> list[tuple[str, int]]:
    """Layers that findings on this figure name, with their rows."""
    import numpy as np

    labels = [found.layer for found in findings if grid.column.is_about(found)]
    rows = rows_of(list(dict.fromkeys(labels)), run)
    rows = [row for row in rows if np.isfinite(grid.cells[row]).any()]
    return [(run.layers[row].label, row) for row in rows[:_MOST_NAMED]]


def _names(axes: Axes, named: Sequence[tuple[str, str]]) -> None:
    """Names in the colours of their lines, above one another in the upper left."""
    if not named:
        return
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
    high = axes.get_position().height * axes.figure.get_size_inches()[1]  # type: ignore[union-attr]
    for at, (name, colour) in enumerate(named):
        text = printable(name)
        text = text if len(text) <= 26 else f"{text[:12]}…{text[-13:]}"
        y = 1 - (0.1 + 0.14 * at) / high
        write(axes, 0.03, y, text, transform=axes.transAxes, fontsize=SMALL, color=colour, bbox=box, zorder=8)


def _title(axes: Axes, text: str, above: float = 4.0) -> None:
    axes.set_title(text, loc="left", fontsize=BODY, fontweight="bold", color=Colour.INK, pad=above)


def _scale_axis(axes: Axes, grid: Grid, cells: Array) -> None:
    import numpy as np

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


def _axis(axes: Axes, values: Array) -> None:
    """Logarithmic where a loss falls or jumps by orders: a spike does not press the rest flat."""
    import numpy as np

    above = values[values > 0]
    if values.min() >= 0 and len(above) and values.max() > _ORDERS * np.quantile(above, 0.05):
        _powers(axes, max(float(above.min()), float(values.max()) * _LEAST) / 1.5, float(values.max()) * 1.5)
    elif len(values) > 1 and values.max() > values.min():
        beside = 0.06 * float(values.max() - values.min())
        axes.set_ylim(float(values.min()) - beside, float(values.max()) + beside)


def _powers(axes: Axes, low: float, high: float) -> None:
    """A logarithmic axis with about four powers of ten that can be read."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    step = max(1, math.ceil((last - first) / 4))
    marks = [(1, power) for power in range(first, last + 1, step)]
    if last - first < 2:
        marks = [(digit, power) for power in range(first - 1, last + 1) for digit in (1, 2, 5)]
        marks = [(digit, power) for digit, power in marks if low <= digit * 10.0**power <= high]
    axes.set_yticks([digit * 10.0**power for digit, power in marks], [_number(digit, power) for digit, power in marks])
    axes.set_yticks([], minor=True)


def _number(digit: int, power: int) -> str:
    return f"{digit * 10.0**power:g}" if -3 <= power <= 3 else f"{digit}e{power}"
