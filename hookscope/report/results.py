"""Pages of statistics, weights, gradients and training runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hookscope.drawing import Chart, ChartAxis, Curve
from hookscope.errors import InputError
from hookscope.findings import Finding
from hookscope.gradients import (
    GRADIENTS,
    PARAMETER_GRADIENTS,
    GradientReport,
    GradientThresholds,
    gradient_rows,
    gradients_plot,
)
from hookscope.hooks import call_key
from hookscope.parameters import (
    WEIGHTS,
    ParameterStatistics,
    ParameterThresholds,
    parameter_findings,
    weights_plot,
    weights_rows,
)
from hookscope.report.tables import Distribution, ResultPage, ResultTable, RowView, draws_page
from hookscope.statistics import STATISTICS, LayerStatistics, in_intervals, statistics_plot, statistics_rows
from hookscope.system import StrPath
from hookscope.training import (
    LayerSeries,
    Run,
    TimedFinding,
    findings_over_time,
    last_rows,
    loss_chart,
    read_runs,
    run_plot,
    series_of,
    summary,
)

_INTERVALS = 48  # of a histogram
_MOST_RUNS = 6
_TRAINING: dict[str, tuple[str, ChartAxis]] = {
    "gradient_norm": ("gradient norm", "auto"),
    "update_to_weight": ("update to weight", "auto"),
    "activation_std": ("standard deviation of activations", "auto"),
    "zero_share": ("share of zeros", "share"),
    "weight_norm": ("weight norm", "auto"),
    "dead_channels": ("dead channels", "linear"),
    "non_finite": ("NaN and Inf in activations", "linear"),
}
"""Metrics of each layer over the steps: their words and their axes."""


@draws_page
def draw_statistics_page(
    layers: Sequence[LayerStatistics], findings: Sequence[Finding] = (), *, weights: str = ""
) -> ResultPage:
    """The findings on activations, a table of all calls, and the channels of each."""
    rows = statistics_rows(layers, findings, weights)
    views = [
        RowView(row, layer.key, _of_bins(layer), charts=_channel_charts(layer))
        for row, layer in zip(rows, layers, strict=True)
    ]
    summary = {"weights": weights, "calls": len(layers), "images": max((layer.items for layer in layers), default=0)}
    tables = [ResultTable("Layers", "calls", STATISTICS.page, views)]
    return ResultPage("Statistics of activations", summary, findings, tables, plot=statistics_plot(layers, findings))


@draws_page
def draw_weights_page(
    rows: Sequence[ParameterStatistics],
    findings: Sequence[Finding] | None = None,
    *,
    weights: str = "",
    thresholds: ParameterThresholds | None = None,
) -> ResultPage:
    """The findings on weights, None looks for them, and a table of all parameters; with bins rows have histograms."""
    thresholds = thresholds or ParameterThresholds()
    findings = parameter_findings(rows, thresholds) if findings is None else findings
    told = zip(weights_rows(rows, thresholds, weights), rows, strict=True)
    views = [RowView(cells, row.name, _of_parameter(row)) for cells, row in told]
    own = [row for row in rows if not row.buffer]
    summary = {"weights": weights, "parameters": len(own), "values": sum(row.count for row in own)}
    tables = [ResultTable("Parameters", "parameters", WEIGHTS.page, views)]
    return ResultPage("Weights", summary, findings, tables, plot=weights_plot(rows, findings))


@draws_page
def draw_gradients_page(
    report: GradientReport,
    findings: Sequence[Finding] = (),
    *,
    weights: str = "",
    thresholds: GradientThresholds | None = None,
) -> ResultPage:
    """The findings on gradients, their sizes in order of execution, and tables of them."""
    layers, parameters = gradient_rows(report, thresholds, weights)
    keys = [layer.call.key or row["name"] for layer, row in zip(report.layers, layers, strict=True)]
    calls = [RowView(row, key) for row, key in zip(layers, keys, strict=True)]
    own = [RowView(row, row["name"]) for row in parameters]
    tables = [
        ResultTable("Layers", "calls", GRADIENTS.page, calls),
        ResultTable("Parameters", "parameters", PARAMETER_GRADIENTS.page, own),
    ]
    summary = {"weights": weights, "loss": f"{report.loss} {report.value:.4g}", "total norm": report.total_norm}
    return ResultPage("Gradients", summary, findings, tables, plot=gradients_plot(report, findings, thresholds))


@draws_page
def draw_training_page(runs: Sequence[Run] | StrPath, findings: Sequence[TimedFinding] | None = None) -> ResultPage:
    """The findings on the last run, None looks for them, its curves over the runs before, and its layers.

    ``runs`` is the path of a log, or the result of `read_runs`; of more than 6 runs the last ones are drawn. Without a
    run there is an InputError.
    """
    drawn = (list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else read_runs(runs))[-_MOST_RUNS:]
    if not drawn:
        raise InputError("there is no run to draw")
    run = drawn[-1]
    findings = findings_over_time(run) if findings is None else findings
    names = [_run_name(number, each, len(drawn)) for number, each in enumerate(drawn)]
    series = [series_of(each) for each in drawn]
    layers = [{(layer.model, layer.name, layer.call): layer for layer in each.layers} for each in series]
    views = []
    for row in last_rows(run):
        key = row.get("model") or 0, row.get("layer") or "", row.get("call") or 0
        own = [(n, of_run[key]) for n, of_run in enumerate(layers) if key in of_run]
        charts = [
            Chart(words, [_curve(names[n], layer, metric, n) for n, layer in own], axis=axis)
            for metric, (words, axis) in _TRAINING.items()
        ]
        named = {"name": row.get("layer"), **{name: value for name, value in row.items() if name != "layer"}}
        shown = [chart for chart in charts if chart.values]
        views.append(RowView(named, call_key(str(row.get("layer")), row.get("call") or 0), charts=shown))
    columns = list(dict.fromkeys(name for view in views for name in view.row if name not in ("call", "model", "order")))
    facts = {"runs": len(drawn), "steps": len({row.get("step") for row in run.rows}), "layers": len(views)}
    tables = [ResultTable("Layers at the last step", "calls", columns, views)]
    plot = run_plot(run, findings)
    losses = [(name, loss) for name, each in zip(names, series, strict=True) for loss in each.losses]
    charts = [loss_chart(losses, findings) if len(drawn) > 1 else plot.loss, plot.rates, *plot.metrics]
    charts = [replace(chart, edges=None) for chart in charts if chart.values]
    cells = plot.cells if plot.cells.panels else None
    return ResultPage("Training", facts, findings, tables, charts, cells, "a training run", [str(summary(run))])


def _of_bins(layer: LayerStatistics) -> Distribution | None:
    """The histogram of a layer in equal intervals; a bin, which is narrow, counts where its middle is."""
    lower, upper, counts = layer.histogram.bins()
    if layer.min is None or layer.max is None or layer.mean is None or not len(counts):
        return None
    middle = ((lower + upper) / 2).clip(layer.min, layer.max)
    histogram = in_intervals(middle, counts, layer.min, layer.max, _INTERVALS if layer.max > layer.min else 1)
    return Distribution(layer.min, layer.mean, layer.max, histogram.tolist())


def _channel_charts(layer: LayerStatistics) -> list[Chart]:
    """Mean and range of each channel."""
    moments = layer.by_channel
    if layer.channels < 2:
        return []

    def line(name: str, values: NDArray[np.float64], colour: int) -> Curve:
        known = zip(values, moments.count, strict=True)
        ys = [float(f"{value:.6g}") if count else None for value, count in known]
        return Curve(name, range(layer.channels), ys, colour)

    lines = [line("highest", moments.high, 0), line("mean", moments.mean, 1), line("lowest", moments.low, 2)]
    return [Chart("Channels", lines, axis="linear", x="channel")]


def _of_parameter(row: ParameterStatistics) -> Distribution | None:
    if row.min is None or row.max is None or row.mean is None or not row.histogram:
        return None
    return Distribution(row.min, row.mean, row.max, row.histogram)


def _run_name(number: int, run: Run, count: int) -> str:
    return (
        f"run {number + 1}"
        + (" (the last)" if number == count - 1 else "")
        + (f", {run.header['started']}" if run.header.get("started") else "")
    )


def _curve(name: str, layer: LayerSeries, metric: str, colour: int) -> Curve:
    values = [None if math.isnan(value) else value for value in layer.values[metric].tolist()]
    return Curve(name, layer.steps.tolist(), values, colour)
