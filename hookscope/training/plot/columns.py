"""The metrics that the page of a training run shows side by side, as grids of layers and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.drawing import (
    Colour,
    Mark,
    Panel,
    RowPlot,
    colours,
    layer_label,
    palette,
    plain_ticks,
    row_plot,
    short_label,
    tick_label,
)
from hookscope.training.log.rules import RULES, TrainingThresholds, batchnorm_distance, dead_share, gradient_to_weight
from hookscope.training.log.series import LayerSeries, LossSeries, RunSeries
from hookscope.training.log.summary import TimedFinding

Array = NDArray[np.float64]

MOST_CELLS = 240  # side by side; more would fall between the pixels of a panel

_ACTIVATION_AND_GRADIENT = ("non_finite", "gradient_non_finite")
_OF_PARAMETERS = ("gradient_non_finite", "weight_non_finite")
_ZERO, _NO_VALUE, _SPOILED = (255, 255, 255), (208, 208, 208), (238, 106, 238)
_LONGEST_LABEL, _TALLEST = 34, 9.0
_MOST_DECADES = 16.0  # on one scale; smaller values have the colour of its end


@dataclass(frozen=True, slots=True)
class Column:
    """One metric of every layer over the steps.

    Attributes:
        metric: Its field in the log; findings whose rule is about it are marked in the column.
        measure: ``(S,)`` values of a layer, NaN where there is none.
        colours: Name of a colour map of matplotlib.
        ends: Ends of a linear scale; None for a logarithmic scale with the ends of the values.
        limits: The thresholds that are drawn.
        peaks: Whether a cell of several steps shows the highest value, instead of the mean (on a logarithmic scale the
            geometric mean).
        spoiled: The counts of NaN and Inf that make a cell non-finite.
        judged_from: The step from which on its limits apply.
    """

    title: str
    metric: str
    measure: Callable[[LayerSeries], Array]
    colours: str
    ends: tuple[float, float] | None = None
    limits: Callable[[TrainingThresholds], tuple[float, ...]] = lambda _: ()
    usual: float | None = None
    peaks: bool = False
    spoiled: tuple[str, ...] = ("non_finite",)
    judged_from: Callable[[TrainingThresholds], int] = lambda _: 0

    @property
    def logarithmic(self) -> bool:
        return self.ends is None

    def is_about(self, finding: TimedFinding) -> bool:
        """Whether a finding is marked here; non-finite gradients and weights are marked among the gradients."""
        if finding.finding == "non-finite":
            of_parameters = finding.numbers.get("phase") in ("backward", "weights")
            return self.metric == ("gradient_norm" if of_parameters else "activation_std")
        return finding.finding in RULES and RULES[finding.finding].metric == self.metric


def _unless_frozen(values: Array, layer: LayerSeries) -> Array:
    return np.where(layer.values["frozen"] == 1, np.nan, values)


COLUMNS = (
    Column(
        "dead channels (share)",
        "dead_channels",
        dead_share,
        "OrRd",
        (0.0, 1.0),
        lambda limits: (limits.dead,),
        peaks=True,
        spoiled=_ACTIVATION_AND_GRADIENT,
    ),
    Column("zeros (share)", "zero_share", lambda layer: layer.values["zero_share"], "Blues", (0.0, 1.0)),
    Column(
        "std of activations",
        "activation_std",
        lambda layer: layer.values["activation_std"],
        "viridis",
        limits=lambda limits: (limits.smallest, limits.largest),
    ),
    Column(
        "gradient / weight (norms)",
        "gradient_norm",
        lambda layer: _unless_frozen(gradient_to_weight(layer), layer),
        "viridis",
        limits=lambda limits: (limits.vanishing, limits.exploding),
        spoiled=_OF_PARAMETERS,
    ),
    Column(
        "update / weight (norms)",
        "update_to_weight",
        lambda layer: _unless_frozen(layer.values["update_to_weight"], layer),
        "RdYlBu_r",
        limits=lambda limits: (limits.too_small, limits.too_large),
        usual=1e-3,
        spoiled=_OF_PARAMETERS,
    ),
    Column(
        "BatchNorm drift",
        "running_mean_shift",
        lambda layer: batchnorm_distance(layer, TrainingThresholds()),
        "OrRd",
        (0.0, 2.0),
        lambda _: (1.0,),
        peaks=True,
        spoiled=_ACTIVATION_AND_GRADIENT,
        judged_from=lambda limits: limits.warm_up,
    ),
)
"""From left to right."""


@dataclass(frozen=True)
class LayerStepGrid:
    """A metric as cells: a row for each layer in order of execution, a column for one or more steps.

    Attributes:
        cells: ``(L, X)`` NaN where there is no value.
        spoiled: ``(L, X)`` whether NaN or Inf left no value.
        edges: First and last step, half a cell beyond each.
        low: Start of the scale; 0 and lower values have a look of their own on a logarithmic scale.
        high: End of the scale.
    """

    column: Column
    cells: Array
    spoiled: NDArray[np.bool_]
    edges: tuple[float, float]
    low: float
    high: float


def grids_of(run: RunSeries) -> list[LayerStepGrid]:
    """The grids of all columns that the log has values for; of shares, those that are not 0 everywhere."""

    def has_values(column: Column) -> bool:
        measured = (column.measure(layer) for layer in run.layers)
        shares = column.ends == (0.0, 1.0)
        return any((np.isfinite(values) & ((values != 0) | (not shares))).any() for values in measured)

    return [grid_of(column, run) for column in COLUMNS if has_values(column)]


def edges_of(losses: Sequence[LossSeries]) -> tuple[float, float, int]:
    """First and last step of the page, half a cell beyond each, and the number of cells between them."""
    steps = np.unique(np.concatenate([loss.steps for loss in losses] or [np.zeros(1, np.int64)]))
    first, last = float(steps[0]), float(steps[-1])
    cells = min(len(steps), MOST_CELLS)
    half = (last - first) / max(cells - 1, 1) / 2 or 0.5
    return first - half, last + half, cells


def grid_of(column: Column, run: RunSeries) -> LayerStepGrid:
    """The cells of one metric; every sampled step is in one of them."""
    left, right, count = edges_of(run.losses)
    cells, spoiled = np.full((len(run.layers), count), np.nan), np.zeros((len(run.layers), count), bool)
    sampled = np.zeros(count, bool)
    for row, layer in enumerate(run.layers):
        at = np.clip(((layer.steps - left) / (right - left) * count).astype(int), 0, count - 1)
        sampled[at] = True
        bad = np.any([layer.values[name] > 0 for name in column.spoiled], axis=0)
        _fill(cells[row], at, np.where(bad, np.nan, column.measure(layer)), column)
        spoiled[row, at[bad]] = True
    empty = np.flatnonzero(~sampled)
    for at in empty[empty > 0]:  # between sampled steps that are far apart: as the cell before
        cells[:, at], spoiled[:, at] = cells[:, at - 1], spoiled[:, at - 1]
    return LayerStepGrid(column, cells, spoiled, (left, right), *_scale(column, cells))


def _fill(row: Array, at: NDArray[np.intp], values: Array, column: Column) -> None:
    known = np.isfinite(values)
    at, values = at[known], values[known]
    if column.peaks:
        highest = np.full(len(row), -np.inf)
        np.maximum.at(highest, at, values)
        row[np.unique(at)] = highest[np.unique(at)]
        return
    if column.logarithmic:
        row[at] = 0.0  # stays where all values of the cell are 0
        at, values = at[values > 0], np.log(values[values > 0])
    sums, counts = np.bincount(at, values, len(row)), np.bincount(at, minlength=len(row))
    mean = sums[counts > 0] / counts[counts > 0]
    row[counts > 0] = np.exp(mean) if column.logarithmic else mean


def _scale(column: Column, cells: Array) -> tuple[float, float]:
    if column.ends is not None:
        return column.ends
    values = cells[np.isfinite(cells) & (cells > 0)]
    if not len(values):
        return 1e-3, 1.0
    low, high = math.log10(float(values.min())), math.log10(float(values.max()))
    if column.usual is not None:  # in the middle of the colours
        middle = math.log10(column.usual)
        reach = min(max(high - middle, middle - low, 1.0), 4.0)
        return 10 ** (middle - reach), 10 ** (middle + reach)
    if high - low < 1:  # at least one decade, or small differences would look large
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    return 10 ** max(low, high - _MOST_DECADES), 10**high


def cells_plot(
    grids: Sequence[LayerStepGrid], run: RunSeries, findings: Sequence[TimedFinding], width: float
) -> RowPlot:
    """A row for each layer in order of execution, and a panel of cells ``width`` inches wide for each metric.

    A dot marks each layer of a finding at the step where the finding begins, and its words stand beside its row.
    """
    marked: dict[int, list[str]] = {}
    for number, finding in enumerate(findings, 1):
        for row in rows_of([finding.layer], run):
            marked.setdefault(row, []).append(f"{number} {finding.finding}")
    spoiled = any(grid.spoiled.any() for grid in grids)
    zeros = any((grid.cells == 0).any() for grid in grids if grid.column.logarithmic)
    keys = ["white exactly 0"] if zeros else []
    keys += ["pink NaN or Inf"] if spoiled else []
    keys += ["grey no value (no weights, frozen, did not run)"] if grids else []
    keys += ["red dot begin of a finding"] if marked else []
    return row_plot(
        range(len(run.layers)),
        [_cell_panel(grid, run, findings, width) for grid in grids],
        [short_label(layer_label(layer.label, layer.type), _LONGEST_LABEL) for layer in run.layers] if grids else [],
        {row: ", ".join(words) for row, words in sorted(marked.items())} if grids else {},
        legend=[f"each layer, in order of execution: {', '.join(keys)}"] if keys else [],
        tallest=_TALLEST,
    )


def _cell_panel(grid: LayerStepGrid, run: RunSeries, findings: Sequence[TimedFinding], width: float) -> Panel:
    begins: dict[int, list[float]] = {}
    for finding in findings:
        for row in rows_of(finding.layers or [finding.layer], run) if grid.column.is_about(finding) else []:
            begins.setdefault(row, []).append(min(max(finding.step, grid.edges[0]), grid.edges[1]))
    middle = math.sqrt(grid.low * grid.high) if grid.column.logarithmic else (grid.low + grid.high) / 2
    low, half, high = (tick_label(float(f"{value:.2g}")) for value in (grid.low, middle, grid.high))
    values = grid.cells[np.isfinite(grid.cells) & ((grid.cells > 0) | (not grid.column.logarithmic))]
    low = "≤" + low if (values < grid.low * (1 - 1e-9)).any() else low
    high = "≥" + high if (values > grid.high * (1 + 1e-9)).any() else high
    cells = cell_colours(grid)
    marks = [
        Mark("cells", lambda row: cells[row], ""),
        Mark("dot", lambda row: begins.get(row), "white", size=5.0),
        Mark("dot", lambda row: begins.get(row), Colour.ALARM, size=3.0),
    ]
    ramp = grid.column.colours, (low, half, high)
    return Panel(grid.column.title, width, marks, limits=grid.edges, ticks=step_ticks(grid.edges, 3), ramp=ramp)


def cell_colours(grid: LayerStepGrid) -> NDArray[np.uint8]:
    """The colours of the cells, ``(L, X, 3)``; 0 on a logarithmic scale, NaN and no value have colours of their own."""
    cells = np.nan_to_num(grid.cells, posinf=np.inf)
    if grid.column.logarithmic:
        shares = np.log(np.maximum(cells, grid.low) / grid.low) / math.log(grid.high / grid.low)
    else:
        shares = (cells - grid.low) / (grid.high - grid.low)
    shown: NDArray[np.uint8] = palette(grid.column.colours)[
        np.rint(shares.clip(0, 1) * (colours.LEVELS - 1)).astype(int)
    ]
    shown[np.isnan(grid.cells)] = _NO_VALUE
    if grid.column.logarithmic:
        shown[grid.cells == 0] = _ZERO
    shown[grid.spoiled] = _SPOILED
    return shown


def step_ticks(edges: tuple[float, float], most: int) -> list[tuple[float, str]]:
    """About ``most`` whole steps with labels as short as ``10k``."""
    steps = sorted(
        {round(step) for step in plain_ticks(edges, most + 1)[0] if max(edges[0], 0) <= round(step) <= edges[1]}
    )
    return [
        (step, f"{step / 1e6:g}M" if step >= 10**6 else f"{step / 1000:g}k" if step >= 10**4 else f"{step:,}")
        for step in steps
    ]


def rows_of(labels: Sequence[str], run: RunSeries) -> list[int]:
    """The rows of the calls with these labels."""
    rows = {layer.label: row for row, layer in enumerate(run.layers)}
    return [rows[label] for label in labels if label in rows]
