"""A metric of every layer at every step of a training run as a heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hookscope.drawing import DPI, SMALL, Colour, inches, tick_label, write, write_at
from hookscope.training.log.series import RunSeries, runs_of_true
from hookscope.training.log.summary import TimedFinding
from hookscope.training.plot.columns import LayerStepGrid, rows_of
from hookscope.training.plot.curves import badge

_NO_VALUE, _SPOILED = "#e9e9e9", "#ee6aee"
_ZERO: dict[str, Any] = {"facecolor": "white", "edgecolor": "#4d4d4d", "hatch": "//////", "linewidth": 0.0}


def draw_heat(axes: Axes, grid: LayerStepGrid, run: RunSeries, findings: Sequence[TimedFinding]) -> None:
    """Draw the cells and their scale, with the numbers of findings where they begin, and lines in all their layers."""
    rows = len(run.layers)
    cells = grid.cells.copy()
    norm: Any = Normalize(grid.low, grid.high)
    colours = matplotlib.colormaps[grid.column.colours].with_extremes(bad=_NO_VALUE)
    if grid.column.logarithmic:
        norm = LogNorm(grid.low, grid.high)
        cells[cells < grid.low] = grid.low  # 0 is hatched
        _mark_zeros(axes, grid)
    place = (*grid.edges, rows - 0.5, -0.5)
    settings: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "extent": place}
    axes.grid(False)
    axes.imshow(np.ma.masked_invalid(cells), cmap=colours, norm=norm, zorder=1, **settings)
    if grid.spoiled.any():
        spoiled = np.ma.masked_equal(grid.spoiled.astype(float), 0.0)
        axes.imshow(spoiled, cmap=ListedColormap([_SPOILED]), zorder=2, **settings)
    axes.set_yticks([])
    for at, (before, layer) in enumerate(zip(run.layers, run.layers[1:], strict=False)):
        if before.model != layer.model:
            axes.axhline(at + 0.5, color=Colour.INK, lw=1.0, zorder=3)
    _mark(axes, grid, run, findings)
    _scale(axes, colours, norm, grid)


def _mark_zeros(axes: Axes, grid: LayerStepGrid) -> None:
    """Hatch cells of exactly 0, which have no colour on a logarithmic scale."""
    left, right = grid.edges
    wide = (right - left) / grid.cells.shape[1]
    zero_runs = []
    for row, zeros in enumerate(grid.cells == 0):
        for begin, end in runs_of_true(zeros):
            zero_runs.append(Rectangle((left + begin * wide, row - 0.5), (end - begin) * wide, 1.0))
    if zero_runs:
        axes.add_collection(PatchCollection(zero_runs, zorder=2, **_ZERO), autolim=False)


def draw_keys(figure: Figure, x: float, y: float, grids: Sequence[LayerStepGrid]) -> None:
    """Explain the rows, and each look of a cell that is on no scale, in a line at ``x`` and ``y`` inches."""
    width, height = figure.get_size_inches()
    zeros = any((grid.cells == 0).any() for grid in grids if grid.column.logarithmic)
    keys: list[tuple[str, dict[str, Any]]] = [("exactly 0", _ZERO)] if zeros else []
    keys += [("NaN or Inf", {"facecolor": _SPOILED})] if any(grid.spoiled.any() for grid in grids) else []
    keys += [("no value: no weights, frozen, did not run", {"facecolor": _NO_VALUE})]
    text = "each layer, in order of execution:"
    lengths = [0.27 + inches(name, SMALL) + 0.22 for name, _ in keys]
    x = max(0.1, min(x, width - inches(text, SMALL) - 0.15 - sum(lengths)))
    write_at(figure, x, y, text, fontsize=SMALL)
    x += inches(text, SMALL) + 0.15
    for (name, look), length in zip(keys, lengths, strict=True):
        place = (x / width, 1 - (y + 0.05) / height)
        figure.add_artist(Rectangle(place, 0.22 / width, 0.1 / height, transform=figure.transFigure, **look))
        write_at(figure, x + 0.27, y, name, fontsize=SMALL)
        x += length


def _mark(axes: Axes, grid: LayerStepGrid, run: RunSeries, findings: Sequence[TimedFinding]) -> None:
    left, right = grid.edges
    taken: list[tuple[float, float]] = []
    row_height = axes.bbox.height / DPI / max(len(run.layers), 1)
    for number, finding in enumerate(findings, 1):
        if not grid.column.is_about(finding):
            continue
        for row in rows_of(finding.layers, run):
            axes.plot([finding.step] * 2, [row - 0.5, row + 0.5], color=Colour.ALARM, lw=1.6, zorder=6, clip_on=False)
        for row in rows_of([finding.layer], run):
            x = min(max(finding.step, left + 0.06 * (right - left)), right - 0.06 * (right - left))
            while any(abs(x - a) < 0.1 * (right - left) and abs(row - b) * row_height < 0.16 for a, b in taken):
                x += 0.11 * (right - left)
            taken.append((x, row))
            badge(axes, x, row, str(number))


def _scale(axes: Axes, colours: Any, norm: Any, grid: LayerStepGrid) -> None:
    """Draw a colour bar under the heat map, with the values at its ends and in its middle."""
    above = axes.bbox.height / DPI  # in inches; places in the axes are shares of it
    bar = axes.inset_axes((0, -0.42 / above, 1, 0.08 / above))
    bar.imshow(np.linspace(0, 1, 128)[None], aspect="auto", cmap=colours, extent=(0, 1, 0, 1))
    bar.set_axis_off()
    middle = math.sqrt(grid.low * grid.high) if grid.column.logarithmic else (grid.low + grid.high) / 2
    values = grid.cells[np.isfinite(grid.cells) & ((grid.cells > 0) | (not grid.column.logarithmic))]
    below, above_it = (
        ("≤" if (values < grid.low * (1 - 1e-9)).any() else ""),
        ("≥" if (values > grid.high * (1 + 1e-9)).any() else ""),
    )
    for x, value, where in (
        (0, below + _rounded(grid.low), "left"),
        (0.5, _rounded(middle), "center"),
        (1, above_it + _rounded(grid.high), "right"),
    ):
        write(bar, x, -0.9, value, ha=where, fontsize=SMALL - 0.5, color=Colour.INK, clip_on=False)


def _rounded(value: float) -> str:
    return tick_label(float(f"{value:.2g}"))
