"""A training run on one page: loss and learning rate, curves of layers with findings, every layer at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hookscope.drawing import (
    SMALL,
    TITLE,
    Chart,
    Colour,
    Curve,
    Mark,
    Panel,
    RowPlot,
    add_panel,
    colours,
    draw_chart,
    draw_rows,
    finding_lines,
    fitting,
    layer_label,
    palette,
    plain_settings,
    plain_ticks,
    row_plot,
    short_label,
    tick_label,
    with_types,
    write,
)
from hookscope.errors import printable
from hookscope.findings import chains, verdict
from hookscope.system import StrPath
from hookscope.training.log.file import Run, last_run
from hookscope.training.log.rules import RULES, Limits, batchnorm_distance, dead_share, gradient_to_weight, limits_of
from hookscope.training.log.run_rules import centred
from hookscope.training.log.series import LayerSeries, LossSeries, RunSeries, series_of
from hookscope.training.log.summary import TimedFinding, judged, summary

Array = NDArray[np.float64]

MOST_CELLS = 240  # side by side; more would fall between the pixels of a panel

_FORWARD = ("non_finite", "gradient_non_finite")
_OF_PARAMETERS = ("gradient_non_finite", "weight_non_finite")
_ZERO, _NO_VALUE, _SPOILED = (255, 255, 255), (208, 208, 208), (238, 106, 238)
_LONGEST_LABEL, _TALLEST = 34, 9.0
_MOST_DECADES = 16.0  # on one scale; smaller values have the colour of its end


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """One metric of every layer over the steps."""

    title: str
    metric: str  # its field in the log; findings whose rule is about it are marked in the column
    colours: str  # name of a colour map of matplotlib
    measure: Callable[[LayerSeries], Array] | None = None  # None takes the field itself; NaN where there is no value
    ends: tuple[float, float] | None = None  # of a linear scale; None for a logarithmic one with the ends of the values
    limits: tuple[str | float, ...] = ()  # the names of the thresholds that are drawn, or numbers
    usual: float | None = None
    peaks: bool = False  # whether a cell of several steps shows the highest value, instead of their mean
    spoiled: tuple[str, ...] = ("non_finite",)  # the counts of NaN and Inf that make a cell non-finite
    since: str = ""  # the threshold that is the step from which on its limits apply

    @property
    def logarithmic(self) -> bool:
        return self.ends is None

    def values(self, layer: LayerSeries) -> Array:
        """``(S,)``; frozen parameters have none."""
        values = layer.values[self.metric] if self.measure is None else self.measure(layer)
        return np.where(layer.values["frozen"] == 1, np.nan, values) if self.spoiled == _OF_PARAMETERS else values

    def is_about(self, finding: TimedFinding) -> bool:
        """Whether a finding is marked here; non-finite gradients and weights are marked among the gradients."""
        if finding.finding == "non-finite":
            of_parameters = finding.numbers.get("phase") in ("backward", "weights")
            return self.metric == ("gradient_norm" if of_parameters else "activation_std")
        return finding.finding in RULES and RULES[finding.finding].metric == self.metric


_SHARES = (0.0, 1.0)
COLUMNS = (
    MetricColumn(
        "dead channels (share)", "dead_channels", "OrRd", dead_share, _SHARES, ("dead_in_batch",), peaks=True,
        spoiled=_FORWARD,
    ),
    MetricColumn("zeros (share)", "zero_share", "Blues", ends=_SHARES),
    MetricColumn("std of activations", "activation_std", "viridis", limits=("smallest", "largest")),
    MetricColumn(
        "gradient / weight (norms)", "gradient_norm", "viridis", gradient_to_weight, None, ("vanishing", "exploding"),
        spoiled=_OF_PARAMETERS,
    ),
    MetricColumn(
        "update / weight (norms)", "update_to_weight", "RdYlBu_r", None, None, ("too_small", "too_large"), usual=1e-3,
        spoiled=_OF_PARAMETERS,
    ),
    MetricColumn(
        "BatchNorm drift", "running_mean_shift", "OrRd", lambda layer: batchnorm_distance(layer, limits_of()),
        (0.0, 2.0), (1.0,), peaks=True, spoiled=_FORWARD, since="warm_up",
    ),
)  # fmt: skip
"""From left to right."""


@dataclass(frozen=True)
class LayerStepGrid:
    """A metric as ``cells`` ``(L, X)``: a row for each layer in order of execution, a column for one or more steps."""

    column: MetricColumn
    cells: Array  # NaN where there is no value
    steps: Array  # ``(X,)`` the mean of the sampled steps of a cell; NaN where it has none, and is as the one before
    spoiled: NDArray[np.bool_]  # where NaN or Inf left no value
    edges: tuple[float, float]  # first and last step, half a step beyond each
    low: float  # the ends of the scale
    high: float


def grids_of(run: RunSeries) -> list[LayerStepGrid]:
    """The grids of all columns that the log has values for; of shares, those that are not 0 everywhere."""
    grids = [grid_of(column, run) for column in COLUMNS]
    shown = [np.isfinite(grid.cells) & ((grid.cells != 0) | (grid.column.ends != _SHARES)) for grid in grids]
    return [grid for grid, cells in zip(grids, shown, strict=True) if cells.any()]


def edges_of(losses: Sequence[LossSeries]) -> tuple[float, float, int]:
    """First and last step of the page, half a step beyond each, and the number of cells between them."""
    steps = np.unique(np.concatenate([loss.steps for loss in losses] or [np.zeros(1, np.int64)]))
    nearest = np.diff(steps).min(initial=max(steps[-1] - steps[0], 1))
    return steps[0] - 0.5, steps[-1] + 0.5, min(int((steps[-1] - steps[0]) // nearest) + 1, MOST_CELLS)


def grid_of(column: MetricColumn, run: RunSeries) -> LayerStepGrid:
    """The cells of one metric; every sampled step is in one of them."""
    left, right, count = edges_of(run.losses)
    cells, spoiled = np.full((len(run.layers), count), np.nan), np.zeros((len(run.layers), count), bool)

    def places(steps: NDArray[np.int64]) -> NDArray[np.intp]:
        return ((steps - left) / (right - left) * count).astype(int)

    every = np.unique(np.concatenate([layer.steps for layer in run.layers] or [np.zeros(0, np.int64)]))
    with np.errstate(invalid="ignore"):
        sampled = np.bincount(places(every), every, count) / np.bincount(places(every), minlength=count)
    for row, layer in enumerate(run.layers):
        at = places(layer.steps)
        bad = np.any([layer.values[name] > 0 for name in column.spoiled], axis=0)
        _fill(cells[row], at, np.where(bad, np.nan, column.values(layer)), column)
        spoiled[row, at[bad]] = True
    empty = np.flatnonzero(np.isnan(sampled))
    for at in empty[empty > 0]:  # between sampled steps that are far apart: as the cell before
        cells[:, at], spoiled[:, at] = cells[:, at - 1], spoiled[:, at - 1]
    return LayerStepGrid(column, cells, sampled, spoiled, (left, right), *_scale(column, cells))


def _fill(row: Array, at: NDArray[np.intp], values: Array, column: MetricColumn) -> None:
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


def _scale(column: MetricColumn, cells: Array) -> tuple[float, float]:
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
        low, high = (low + high - 1) / 2, (low + high + 1) / 2
    return 10 ** max(low, high - _MOST_DECADES), 10**high


def cells_plot(
    grids: Sequence[LayerStepGrid], run: RunSeries, findings: Sequence[TimedFinding], width: float
) -> RowPlot:
    """A row for each layer, and a panel of cells ``width`` inches wide for each metric; dots are begins of findings."""
    marked: dict[int, list[str]] = {}
    for number, finding in enumerate(findings, 1):
        for row in rows_of([finding.layer], run):
            marked.setdefault(row, []).append(f"{number} {finding.finding}")
    spoiled = any(grid.spoiled.any() for grid in grids)
    zeros = any((grid.cells == 0).any() for grid in grids if grid.column.logarithmic)
    words: dict[str, object] = {"white exactly 0": zeros, "pink NaN or Inf": spoiled}
    words |= {"grey no value (no weights, frozen, did not run)": grids, "red dot begin of a finding": marked}
    keys = [text for text, is_drawn in words.items() if is_drawn]
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
    levels = np.rint(shares.clip(0, 1) * (colours.LEVELS - 1)).astype(int)
    shown: NDArray[np.uint8] = palette(grid.column.colours)[levels]
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
    rows = {layer.label: row for row, layer in enumerate(run.layers)}
    return [rows[label] for label in labels if label in rows]


# In inches.
_HEAD, _LOSS, _RATE, _CURVES, _GAP = 0.35, 1.7, 0.4, 1.35, 0.47
_TITLE = 0.2  # of a panel, which here has no title
_PANEL, _ALL_PANELS = 1.95, 8.0
_WIDEST_TITLE, _LEFT, _MARGIN = 11.0, 0.7, 0.2
_MOST_LINES = 10
_FEWEST_SMOOTHED = 20  # fewer losses are visible one by one
_MOST_NAMED = 3
_LOSS_DECADES = 8
_BESIDE = 45  # flags on an axis stand side by side; nearer ones are joined


def loss_chart(losses: Sequence[tuple[str, LossSeries]], findings: Sequence[TimedFinding] = ()) -> Chart:
    """Each sampled loss, a smoothed line if there are many, marks for missing ones, and numbers of findings."""
    curves, smooth, unknown, notes = list[Curve](), list[Curve](), list[float](), dict[str, None]()
    for colour, (name, loss) in enumerate(losses):
        known = np.isfinite(loss.losses)
        many = int(known.sum()) >= _FEWEST_SMOOTHED
        curves.append(Curve(name, loss.steps.tolist(), loss.losses.tolist(), colour, 0.7 if many else 1.2))
        if many:
            middle, around = centred(loss.losses)
            smooth.append(Curve(name, loss.steps.tolist(), middle.tolist(), colour, 1.6, is_read=False))
            notes[f"thin: each sampled step; thick: median of it and {around} before and after"] = None
        unknown += loss.steps[~known & (np.cumsum(known) > 0)].tolist()
    notes |= {"×: NaN, Inf or unknown": None} if unknown else {}
    edges = edges_of([loss for _, loss in losses])[:2]
    flags = _flags(findings, *edges)
    chart = Chart("loss", [*curves, *smooth], flags=flags, unknown=unknown, decades=_LOSS_DECADES, edges=edges)
    return replace(chart, notes=[*notes, *(["▾: below the axis"] if chart.below else [])])


def _flags(findings: Sequence[TimedFinding], left: float, right: float) -> list[tuple[float, str]]:
    begun = [(finding.step, number) for number, finding in enumerate(findings, 1) if finding.finding != "few-samples"]
    places = sorted((min(max(float(step), left), right), number) for step, number in begun)  # runs stop between samples
    flags = chains(places, lambda flag, place: place[0] - flag[0][0] < (right - left) / _BESIDE)
    numbers = [[number for _, number in flag] for flag in flags]
    words = [",".join(map(str, all_)) if len(all_) < 4 else f"{all_[0]}-{all_[-1]}" for all_ in numbers]
    return [(flag[0][0], text) for flag, text in zip(flags, words, strict=True)]


def metric_chart(grid: LayerStepGrid, run: RunSeries, findings: Sequence[TimedFinding], thresholds: Limits) -> Chart:
    """A band of all layers and their median, lines of layers with a finding, and thresholds."""
    column, (left, right) = grid.column, grid.edges
    is_sampled = ~np.isnan(grid.steps)
    xs, values = grid.steps[is_sampled].tolist(), grid.cells[:, is_sampled]
    cells = np.where(values > 0, values, np.nan) if column.logarithmic else values
    known = np.ma.masked_invalid(cells)
    low, middle, high = (np.ma.filled(of(known, axis=0), np.nan) for of in (np.ma.min, np.ma.median, np.ma.max))
    rows = rows_of(list(dict.fromkeys(finding.layer for finding in findings if column.is_about(finding))), run)
    rows = [row for row in rows if np.isfinite(values[row]).any()][:_MOST_NAMED]
    labels = [layer_label(run.layers[row].label, run.layers[row].type) for row in rows]
    curves = enumerate(zip(rows, labels, strict=True))
    named = [Curve(label, xs, values[row].tolist(), colour, 1.4) for colour, (row, label) in curves]
    begin = int(thresholds[column.since]) if column.since else 0
    since = f"limit 1 {'' if begin < right else 'only '}from step {begin}{'' if begin < right else ' on'}"
    limits = [thresholds[limit] if isinstance(limit, str) else limit for limit in column.limits]
    rules = [(limit, Colour.ALARM, since if begin > max(left, 0) else "") for limit in limits]
    rules += [(column.usual, Colour.GREEN, "usual")] if column.usual is not None else []
    chart = Chart(
        column.title,
        [Curve("median", xs, middle.tolist(), None, 1.1), *named],
        list(zip(xs, low.tolist(), high.tolist(), strict=True)),
        rules,
        begin or -math.inf,
        axis="log" if column.logarithmic else "share" if column.ends == _SHARES else "linear",
        within=() if column.logarithmic else (0.0, 1.1),
        edges=grid.edges,
    )
    notes: dict[str, object] = {
        "band from the lowest to the highest of all layers, grey line their median": known.count(),
        "coloured lines layers with a finding": named,
        "triangles at the foot exactly 0": chart.below,
        "dashed red threshold": any(colour == Colour.ALARM for _, colour, _ in chart.lines_of_rules),
    }
    return replace(chart, notes=[note for note, is_drawn in notes.items() if is_drawn])


@dataclass(frozen=True)
class RunPlot:
    """What is drawn of a run: charts over its steps, and ``cells`` with a row for each layer."""

    loss: Chart
    rates: Chart
    metrics: Sequence[Chart]
    cells: RowPlot


def run_plot(run: Run, findings: Sequence[TimedFinding] = (), thresholds: Limits | None = None) -> RunPlot:
    """The charts and the cells of a run that `plot_training` and the page of HTML draw."""
    series = series_of(run)
    grids = grids_of(series)
    names = [f"optimizer {loss.optimizer}" if len(series.losses) > 1 else "" for loss in series.losses]
    limits = limits_of(thresholds)
    metrics = [metric_chart(grid, series, findings, limits) for grid in grids]
    width = max(_PANEL, _ALL_PANELS / max(len(grids), 1) - _GAP)
    cells = cells_plot(grids, series, findings, width)
    said = with_types(findings, {layer.label: layer.type for layer in series.layers})
    optimizers = f"{len(names)} optimizers: each layer is at the steps of the one that changes it"
    lines = [(optimizers, Colour.INK)] if len(names) > 1 else []
    lines += (
        [*finding_lines(said, _MOST_LINES, numbered=True), (verdict(said, judged(run)), Colour.INK)] if said else []
    )
    losses = list(zip(names, series.losses, strict=True))
    curves = [Curve("", loss.steps.tolist(), loss.rates.tolist(), colour) for colour, (_, loss) in enumerate(losses)]
    rates = Chart("learning rate", curves, axis="linear", within=(0.0,), edges=edges_of(series.losses)[:2])
    return RunPlot(loss_chart(losses, findings), rates, metrics, replace(cells, lines=lines))


def plot_training(
    run: Run | StrPath,
    findings: Sequence[TimedFinding] | None = None,
    title: str = "",
    *,
    thresholds: Limits | None = None,
) -> Figure:
    """A page with loss and learning rate at the top, and a column for each metric below, over the same steps.

    A column has curves (named lines for layers with a finding, a band for all), and under them a heat map with a row
    for each layer in order of execution. Findings are numbered, the most severe first. A number is in the line of the
    finding at the top, above the loss at the step at which it begins, and beside the row of its layer. A column without
    values is left out, such as dead channels of a run that has none. The figure is outside pyplot: nothing has to be
    closed, and no setting of matplotlib changes.

    ``run`` is the path of a log, of which the last run is drawn, or a run. Findings that are None are not mentioned.
    """
    run = last_run(run)
    plot = run_plot(run, findings or (), thresholds)
    lines = [str(summary(run)), *(["no findings"] if findings is not None and not findings else [])]
    rate = _RATE + _GAP if plot.rates.values else 0.0
    above = _HEAD + _LOSS + rate + _GAP + (_CURVES if plot.metrics else 0.0)
    title = fitting(printable(title) or "a training run", _WIDEST_TITLE, TITLE, bold=True)
    keys = dict.fromkeys(note for chart in plot.metrics for note in chart.notes)
    legend = [*([f"curves: {', '.join(keys)}"] if keys else []), *plot.cells.legend]
    rows = replace(plot.cells, panels=[replace(panel, title="") for panel in plot.cells.panels], legend=legend)
    figure = draw_rows(rows, title, lines, above=above, gap=_GAP)
    _draw_charts(figure, plot, above)
    return figure


@plain_settings()
def _draw_charts(figure: Figure, plot: RunPlot, above: float) -> None:
    width, height = figure.get_size_inches()
    places = [axes.get_position() for axes in figure.axes]
    left = places[0].x0 * width if places else _LEFT
    wide = (places[-1].x1 if places else 1 - _MARGIN / width) * width - left
    head = (1 - places[0].y1) * height if places else height - 0.5
    y = head - 0.5 + _TITLE - above + _HEAD
    across = [(plot.loss, _LOSS, 5)] + ([(plot.rates, _RATE, 2)] if plot.rates.values else [])
    for chart, high, ticks in across:
        axes = add_panel(figure, left, y, wide, high)
        draw_chart(axes, chart, ticks, notes=chart is plot.loss)
        _label_steps(axes, chart, 8, is_lowest=chart is across[-1][0])
        y += high + _GAP
    write(axes, 1, -0.3 / high, "step", transform=axes.transAxes, ha="right", fontsize=SMALL, color=Colour.FAINT)
    for chart, place in zip(plot.metrics, places, strict=True):
        axes = add_panel(figure, place.x0 * width, y, place.width * width, _CURVES)
        draw_chart(axes, chart)
        _label_steps(axes, chart, 3)


def _label_steps(axes: Axes, chart: Chart, most: int, is_lowest: bool = False) -> None:
    ticks = step_ticks(chart.span, most)
    axes.set_xticks([step for step, _ in ticks], [label for _, label in ticks])
    axes.tick_params(pad=2, labelbottom=is_lowest)
