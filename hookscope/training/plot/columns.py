"""The figures that a page of a training run shows side by side: what each is, how it is scaled, what marks it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hookscope.training.log.rules import TrainingThresholds, batchnorm_distance, dead_share, gradient_to_weight
from hookscope.training.log.series import LayerSeries, RunSeries
from hookscope.training.log.summary import TimedFinding

Array = NDArray[np.float64]


MOST_CELLS = 240  # side by side: more than the pixels of a panel would fall between them

_SPOILING = ("non_finite", "gradient_non_finite")  # of what is not judged beside either
_OF_PARAMETERS = ("gradient_non_finite", "weight_non_finite")
_MOST_DECADES = 16.0  # of one scale; what is smaller has the colour of its end


@dataclass(frozen=True)
class Column:
    """One figure of every layer over the steps.

    Attributes:
        title: What it is.
        measure: ``(S,)`` of a layer, NaN where there is nothing.
        colours: Name of matplotlib's colour map.
        logarithmic: Whether it spans orders of magnitude.
        findings: Which findings are about it.
        limits: Lines to draw: those of thresholds.
        usual: Where it usually is, None where that says nothing.
        peaks: Whether of steps that share a cell the highest is shown; else their mean, on a logarithmic scale the
            geometric one.
        ends: Ends of the scale; None for those of the figures.
        spoiled: Which figures count NaN and Inf in what it is about.
        judged_from: The step from which on its limits count.
    """

    title: str
    measure: Callable[[LayerSeries], Array]
    colours: str
    logarithmic: bool
    findings: tuple[str, ...]
    limits: Callable[[TrainingThresholds], tuple[float, ...]]
    usual: float | None = None
    peaks: bool = False
    ends: tuple[float, float] | None = None
    spoiled: tuple[str, ...] = ("non_finite",)
    judged_from: Callable[[TrainingThresholds], int] = lambda _: 0

    def is_about(self, found: TimedFinding) -> bool:
        """Whether a finding is marked in it; what is not finite where it begins, among activations or gradients."""
        if found.finding == "non-finite" and found.numbers.get("phase") in ("backward", "weights"):
            return self.spoiled == _OF_PARAMETERS and "no-gradient" in self.findings
        return found.finding in self.findings and not (found.finding == "non-finite" and self.spoiled == _OF_PARAMETERS)


def _of_unfrozen(figures: Array, layer: LayerSeries) -> Array:
    return np.where(layer.values["frozen"] == 1, np.nan, figures)


COLUMNS = (
    Column(
        "dead channels (share)",
        dead_share,
        "OrRd",
        False,
        ("dead-layer", "dead-channels"),
        lambda limits: (limits.dead,),
        peaks=True,
        ends=(0.0, 1.0),
        spoiled=_SPOILING,
    ),
    Column(
        "zeros (share)", lambda layer: layer.values["zero_share"], "Blues", False, (), lambda _: (), ends=(0.0, 1.0)
    ),
    Column(
        "activation std",
        lambda layer: layer.values["activation_std"],
        "viridis",
        True,
        ("constant-output", "exploding-activations", "vanishing-activations", "saturated", "non-finite"),
        lambda limits: (limits.smallest, limits.largest),
    ),
    Column(
        "gradient / weight",
        lambda layer: _of_unfrozen(gradient_to_weight(layer), layer),
        "viridis",
        True,
        ("exploding-gradient", "vanishing-gradient", "no-gradient", "frozen", "non-finite"),
        lambda limits: (limits.vanishing, limits.exploding),
        spoiled=_OF_PARAMETERS,
    ),
    Column(
        "update / weight",
        lambda layer: _of_unfrozen(layer.values["update_to_weight"], layer),
        "RdYlBu_r",
        True,
        ("no-update", "update-too-large", "update-too-small"),
        lambda limits: (limits.too_small, limits.too_large),
        usual=1e-3,
        spoiled=_OF_PARAMETERS,
    ),
    Column(
        "BatchNorm drift",
        lambda layer: batchnorm_distance(layer, TrainingThresholds()),
        "OrRd",
        False,
        ("batchnorm-drift",),
        lambda _: (1.0,),
        peaks=True,
        ends=(0.0, 2.0),
        spoiled=_SPOILING,
        judged_from=lambda limits: limits.warm_up,
    ),
)
"""From left to right."""


@dataclass(frozen=True)
class Grid:
    """A figure of all layers as cells: a row for each layer, in order of execution, a column for some steps.

    Attributes:
        column: Which figure.
        cells: ``(L, X)`` NaN where there is none.
        spoiled: ``(L, X)`` whether it could not be computed for NaN or Inf.
        edges: First and last step, half a cell beyond each.
        low: Where the scale begins; 0 and what is below it on a logarithmic one is drawn as such.
        high: Where it ends.
    """

    column: Column
    cells: Array
    spoiled: NDArray[np.bool_]
    edges: tuple[float, float]
    low: float
    high: float


def columns_of(run: RunSeries) -> list[Column]:
    """Those of `COLUMNS` of which the log has something."""
    return [one for one in COLUMNS if any(np.isfinite(one.measure(layer)).any() for layer in run.layers)]


def edges_of(run: RunSeries) -> tuple[float, float, int]:
    """First and last step of the page, half a cell beyond each, and how many cells lie between."""
    steps = np.unique(np.concatenate([one.steps for one in run.losses] or [np.zeros(1, np.int64)]))
    first, last = float(steps[0]), float(steps[-1])
    cells = min(len(steps), MOST_CELLS)
    half = (last - first) / max(cells - 1, 1) / 2 or 0.5
    return first - half, last + half, cells


def grid_of(column: Column, run: RunSeries) -> Grid:
    """The cells of one figure, in which no step is left out.

    Args:
        column: Which figure.
        run: The run.
    """
    left, right, count = edges_of(run)
    cells, spoiled = np.full((len(run.layers), count), np.nan), np.zeros((len(run.layers), count), bool)
    seen = np.zeros(count, bool)
    for row, layer in enumerate(run.layers):
        at = np.clip(((layer.steps - left) / (right - left) * count).astype(int), 0, count - 1)
        seen[at] = True
        bad = np.any([layer.values[name] > 0 for name in column.spoiled], axis=0)
        _fill(cells[row], at, np.where(bad, np.nan, column.measure(layer)), column)
        spoiled[row, at[bad]] = True
    for empty in np.flatnonzero(~seen)[np.flatnonzero(~seen) > 0]:  # between sampled steps far apart: as before
        cells[:, empty], spoiled[:, empty] = cells[:, empty - 1], spoiled[:, empty - 1]
    return Grid(column, cells, spoiled, (left, right), *_scale(column, cells))


def _fill(row: Array, at: NDArray[np.intp], figures: Array, column: Column) -> None:
    """Cells of which none holds several steps are these as they are."""
    known = np.isfinite(figures)
    at, figures = at[known], figures[known]
    if column.peaks:
        highest = np.full(len(row), -np.inf)
        np.maximum.at(highest, at, figures)
        row[np.unique(at)] = highest[np.unique(at)]
        return
    if column.logarithmic:
        row[at] = 0.0  # stays where all of them are
        at, figures = at[figures > 0], np.log(figures[figures > 0])
    sums, counts = np.bincount(at, figures, len(row)), np.bincount(at, minlength=len(row))
    mean = sums[counts > 0] / counts[counts > 0]
    row[counts > 0] = np.exp(mean) if column.logarithmic else mean


def _scale(column: Column, cells: Array) -> tuple[float, float]:
    if column.ends is not None:
        return column.ends
    found = cells[np.isfinite(cells) & (cells > 0)]
    if not len(found):
        return 1e-3, 1.0
    low, high = math.log10(float(found.min())), math.log10(float(found.max()))
    if column.usual is not None:  # in the middle of the colours
        middle = math.log10(column.usual)
        reach = min(max(high - middle, middle - low, 1.0), 4.0)
        return 10 ** (middle - reach), 10 ** (middle + reach)
    if high - low < 1:  # a scale of a tenth of a decade would make much of nothing
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    return 10 ** max(low, high - _MOST_DECADES), 10**high


def rows_of(labels: Sequence[str], run: RunSeries) -> list[int]:
    """At which rows the calls with these labels are."""
    at = {layer.label: row for row, layer in enumerate(run.layers)}
    return [at[label] for label in labels if label in at]
