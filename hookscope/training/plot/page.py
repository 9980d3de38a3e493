"""A training run on one page: loss and learning rate, curves of layers with findings, every layer at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookscope.drawing import (
    SMALL,
    TITLE,
    Chart,
    Colour,
    Curve,
    RowPlot,
    add_panel,
    draw_chart,
    draw_rows,
    finding_lines,
    fitting,
    layer_label,
    plain_settings,
    with_types,
    write,
)
from hookscope.errors import printable
from hookscope.findings import verdict
from hookscope.system import StrPath
from hookscope.training.log.file import Run, last_run
from hookscope.training.log.loss import centred
from hookscope.training.log.rules import TrainingThresholds
from hookscope.training.log.series import LossSeries, RunSeries, series_of
from hookscope.training.log.summary import TimedFinding, summary
from hookscope.training.plot.columns import LayerStepGrid, cells_plot, edges_of, grids_of, rows_of, step_ticks

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
    chart = Chart(
        "loss", [*curves, *smooth], flags=flags, unknown=unknown, decades=_LOSS_DECADES, edges=edges, notes=list(notes)
    )
    return replace(chart, notes=[*notes, "▾: below the axis"]) if chart.below else chart


def _flags(findings: Sequence[TimedFinding], left: float, right: float) -> list[tuple[float, str]]:
    """Where findings begin, with their numbers."""
    flags: list[tuple[float, list[int]]] = []
    # a run may stop between samples
    begun = [
        (min(max(float(finding.step), left), right), number)
        for number, finding in enumerate(findings, 1)
        if finding.finding != "few-samples"
    ]
    for step, number in sorted(begun):
        if flags and step - flags[-1][0] < (right - left) / _BESIDE:
            flags[-1][1].append(number)
        else:
            flags.append((step, [number]))
    return [(step, ",".join(map(str, all_)) if len(all_) < 4 else f"{all_[0]}-{all_[-1]}") for step, all_ in flags]


def rate_chart(losses: Sequence[LossSeries]) -> Chart:
    """The learning rates, on an axis from 0."""
    curves = [Curve("", loss.steps.tolist(), loss.rates.tolist(), colour) for colour, loss in enumerate(losses)]
    return Chart("learning rate", curves, axis="linear", within=(0.0,), edges=edges_of(losses)[:2])


def metric_chart(
    grid: LayerStepGrid, run: RunSeries, findings: Sequence[TimedFinding], thresholds: TrainingThresholds
) -> Chart:
    """A band of all layers and their median, lines of layers with a finding, and thresholds."""
    column, (left, right) = grid.column, grid.edges
    x = np.linspace(left, right, grid.cells.shape[1] + 1)
    xs = ((x[1:] + x[:-1]) / 2).tolist()
    cells = np.where(grid.cells > 0, grid.cells, np.nan) if column.logarithmic else grid.cells
    some = np.isfinite(cells).any(axis=0)
    low, middle, high = (np.full(len(xs), np.nan) for _ in range(3))
    if some.any():
        low[some], high[some] = np.nanmin(cells[:, some], axis=0), np.nanmax(cells[:, some], axis=0)
        middle[some] = np.nanmedian(cells[:, some], axis=0)
    rows = rows_of(list(dict.fromkeys(finding.layer for finding in findings if column.is_about(finding))), run)
    rows = [row for row in rows if np.isfinite(grid.cells[row]).any()][:_MOST_NAMED]
    named = [
        Curve(layer_label(run.layers[row].label, run.layers[row].type), xs, grid.cells[row].tolist(), colour, 1.4)
        for colour, row in enumerate(rows)
    ]
    begin = column.judged_from(thresholds)
    since = f"limit 1 {'' if begin < right else 'only '}from step {begin}{'' if begin < right else ' on'}"
    rules = [(limit, Colour.ALARM, since if begin > max(left, 0) else "") for limit in column.limits(thresholds)]
    rules += [(column.usual, Colour.GREEN, "usual")] if column.usual is not None else []
    chart = Chart(
        column.title,
        [Curve("median", xs, middle.tolist(), None, 1.1), *named],
        list(zip(xs, low.tolist(), high.tolist(), strict=True)),
        rules,
        begin or -math.inf,
        axis="log" if column.logarithmic else "share" if column.ends == (0.0, 1.0) else "linear",
        within=() if column.logarithmic else (0.0, 1.1),
        edges=grid.edges,
    )
    notes = {
        "band from the lowest to the highest of all layers, grey line their median": some.any(),
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


def run_plot(run: Run, findings: Sequence[TimedFinding] = (), thresholds: TrainingThresholds | None = None) -> RunPlot:
    """The charts and the cells of a run that `plot_training` and the page of HTML draw."""
    series = series_of(run)
    grids = grids_of(series)
    names = [f"optimizer {loss.optimizer}" if len(series.losses) > 1 else "" for loss in series.losses]
    metrics = [metric_chart(grid, series, findings, thresholds or TrainingThresholds()) for grid in grids]
    width = max(_PANEL, _ALL_PANELS / max(len(grids), 1) - _GAP)
    cells = cells_plot(grids, series, findings, width)
    said = with_types(findings, {layer.label: layer.type for layer in series.layers})
    optimizers = f"{len(names)} optimizers: each layer is at the steps of the one that changes it"
    lines = [(optimizers, Colour.INK)] if len(names) > 1 else []
    lines += finding_lines(said, _MOST_LINES, numbered=True) if said else []
    lines += [(verdict(said), Colour.INK)] if said else []
    losses = list(zip(names, series.losses, strict=True))
    rates = rate_chart(series.losses)
    return RunPlot(loss_chart(losses, findings), rates, metrics, replace(cells, lines=lines))


def plot_training(
    run: Run | StrPath,
    findings: Sequence[TimedFinding] | None = None,
    title: str = "",
    *,
    thresholds: TrainingThresholds | None = None,
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
    """Draw the charts above the rows, over the same steps."""
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
