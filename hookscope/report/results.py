"""The findings, plot and page of every result, which knows its kind; pages of statistics, weights, gradients, runs."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hookscope.comparison import CkaMatrix, Comparison, differences_plot, matrix_plot
from hookscope.display import NOTHING_MEASURED, Rows
from hookscope.drawing import Chart, ChartAxis, Curve, RowPlot, draw_rows
from hookscope.errors import InputError, UsageError, kind_of
from hookscope.exemplars import LayerExemplars
from hookscope.findings import Finding, Findings
from hookscope.gradients import (
    GRADIENTS,
    PARAMETER_GRADIENTS,
    GradientReport,
    GradientThresholds,
    diagnose_gradients,
    gradient_rows,
    gradients_plot,
)
from hookscope.hooks import call_key
from hookscope.inspection import Inspection
from hookscope.interventions import Ablation, draw_ablation
from hookscope.models import as_loaded
from hookscope.parameters import (
    WEIGHTS,
    ParameterStatistics,
    ParameterThresholds,
    parameter_findings,
    weights_plot,
    weights_rows,
)
from hookscope.planning import Plan, plan_plot
from hookscope.report.comparison import draw_comparison_page
from hookscope.report.exemplars import draw_exemplars_page
from hookscope.report.inspection import draw_page
from hookscope.report.page import ResultPage, RowView, draws_page, result_table
from hookscope.statistics import (
    STATISTICS,
    LayerStatistics,
    RunningStatistics,
    StatisticsCollector,
    diagnose as statistics_findings,
    in_intervals,
    statistics_plot,
    statistics_rows,
)
from hookscope.system import StrPath, write_atomically
from hookscope.training import (
    Monitor,
    Run,
    TimedFinding,
    findings_over_time,
    judged,
    last_rows,
    loss_chart,
    plot_training,
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
    tables = [result_table("Layers", "calls", STATISTICS.page, views)]
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
    tables = [result_table("Parameters", "parameters", WEIGHTS.page, views)]
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
        result_table("Layers", "calls", GRADIENTS.page, calls),
        result_table("Parameters", "parameters", PARAMETER_GRADIENTS.page, own),
    ]
    summary = {"weights": weights, "loss": f"{report.loss} {report.value:.4g}", "total norm": report.total_norm}
    return ResultPage("Gradients", summary, findings, tables, plot=gradients_plot(report, findings, thresholds))


@draws_page
def draw_training_page(runs: Sequence[Run] | StrPath, findings: Sequence[TimedFinding] | None = None) -> ResultPage:
    """The findings on the last run, None looks for them, its curves over earlier runs of its script, and its layers.

    ``runs`` is the path of a log, or the result of `read_runs`; of more than 6 runs the last ones are drawn. Without a
    run there is an InputError.
    """
    logged = list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else read_runs(runs)
    if not logged:
        raise InputError("there is no run to draw")
    run = logged[-1]
    drawn = [log for log in logged if log.script == run.script][-_MOST_RUNS:]
    findings = findings_over_time(run) if findings is None else findings
    begun = [f", {log.header['started']}" if log.header.get("started") else "" for log in drawn]
    names = [f"run {n}{' (the last)' if n == len(drawn) else ''}{words}" for n, words in enumerate(begun, 1)]
    series = [series_of(log) for log in drawn]
    layers = [{(layer.model, layer.name, layer.call): layer for layer in run_series.layers} for run_series in series]
    views = []
    for row in last_rows(run):
        key = row.get("model") or 0, row.get("layer") or "", row.get("call") or 0
        own = [(n, of_run[key]) for n, of_run in enumerate(layers) if key in of_run]
        charts = []
        for metric, (words, axis) in _TRAINING.items():
            lines = [[None if math.isnan(y) else y for y in layer.values[metric].tolist()] for _, layer in own]
            curves = [Curve(names[n], of.steps.tolist(), ys, n) for (n, of), ys in zip(own, lines, strict=True)]
            charts.append(Chart(words, curves, axis=axis))
        named = {"name": row.get("layer"), **{name: value for name, value in row.items() if name != "layer"}}
        shown = [chart for chart in charts if chart.values]
        views.append(RowView(named, call_key(str(row.get("layer")), row.get("call") or 0), charts=shown))
    columns = list(dict.fromkeys(name for view in views for name in view.row if name not in ("call", "model", "order")))
    facts = {"runs": len(drawn), "sampled steps": len({row.get("step") for row in run.rows}), "layers": len(views)}
    tables = [result_table("Layers at the last step", "calls", columns, views)]
    plot = run_plot(run, findings)
    losses = [(name, loss) for name, run_series in zip(names, series, strict=True) for loss in run_series.losses]
    charts = [loss_chart(losses, findings) if len(drawn) > 1 else plot.loss, plot.rates, *plot.metrics]
    charts = [replace(chart, edges=None) for chart in charts if chart.values]
    cells = plot.cells if plot.cells.panels else None
    return ResultPage(
        "Training", facts, findings, tables, charts, cells, "a training run", [str(summary(run))], judged(run)
    )


def _of_bins(layer: LayerStatistics) -> dict[str, Any] | None:
    """The histogram of a layer in equal intervals; a bin, which is narrow, counts where its middle is."""
    lower, upper, counts = layer.histogram.bins()
    if layer.min is None or layer.max is None or layer.mean is None or not len(counts):
        return None
    middle = ((lower + upper) / 2).clip(layer.min, layer.max)
    histogram = in_intervals(middle, counts, layer.min, layer.max, _INTERVALS)
    return {"low": layer.min, "mean": layer.mean, "high": layer.max, "histogram": histogram.tolist()}


def _channel_charts(layer: LayerStatistics) -> list[Chart]:
    moments = layer.by_channel
    if layer.channels < 2:
        return []

    def line(name: str, values: NDArray[np.float64], colour: int) -> Curve:
        known = zip(values, moments.count, strict=True)
        ys = [float(f"{value:.6g}") if count else None for value, count in known]
        return Curve(name, range(layer.channels), ys, colour)

    lines = [line("highest", moments.high, 0), line("mean", moments.mean, 1), line("lowest", moments.low, 2)]
    return [Chart("Channels", lines, axis="linear", x="channel")]


def _of_parameter(row: ParameterStatistics) -> dict[str, Any] | None:
    if row.min is None or row.max is None or row.mean is None or not row.histogram:
        return None
    return {"low": row.min, "mean": row.mean, "high": row.max, "histogram": row.histogram}


def _figure_of(rows: Callable[..., RowPlot]) -> Callable[..., Figure]:
    def draw(result: Any, title: str = "", weights: str = "", lines: Sequence[str] = (), **options: Any) -> Figure:
        return draw_rows(rows(result, **options), title, lines, weights)

    return draw


_PLOTS: Mapping[type, Callable[..., Figure]] = {
    LayerStatistics: _figure_of(statistics_plot),
    ParameterStatistics: _figure_of(weights_plot),
    GradientReport: _figure_of(gradients_plot),
    Plan: _figure_of(plan_plot),
    Comparison: _figure_of(differences_plot),
    CkaMatrix: _figure_of(matrix_plot),
    Ablation: draw_ablation,
    Run: lambda runs, **options: plot_training(runs[-1], **options),
}
_PAGES: Mapping[type, Callable[..., str]] = {
    Inspection: draw_page,
    LayerStatistics: draw_statistics_page,
    ParameterStatistics: draw_weights_page,
    GradientReport: draw_gradients_page,
    Comparison: draw_comparison_page,
    LayerExemplars: draw_exemplars_page,
    Run: draw_training_page,
}
_FINDINGS: Mapping[type, Callable[..., list[Any]]] = {
    RunningStatistics: statistics_findings,
    ParameterStatistics: parameter_findings,
    GradientReport: diagnose_gradients,
    Inspection: lambda inspection: inspection.places,
    Run: lambda runs, **options: findings_over_time(runs[-1], **options),
}


def diagnose(result: Any, **options: Any) -> Rows[Any]:
    """The findings on a result, the most severe first. Each has a name, a severity, a layer and its evidence.

    Args:
        result: A `StatisticsCollector` or its ``totals``; what `parameter_statistics` or `layer_gradients` returns; a
            `Monitor`, the path of a log, or what `read_runs` returns, whose last run is taken; of `inspect` the places.
        options: ``thresholds``; ``stops``, ``anomaly`` and ``looked_for_anomaly`` of gradients.

    Raises:
        UsageError: there are no findings on such a result.

    Example:
        >>> import hookscope, torch
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> layer.weight.data[5] = 0
        >>> [(finding.finding, finding.layer) for finding in diagnose(hookscope.parameter_statistics(layer))]
        [('dead-filters', 'weight')]
    """
    is_empty = isinstance(result, list) and not result
    found: Rows[Any] = Findings() if is_empty else _for_kind(_FINDINGS, "finding", result, options)
    return found


def plot(result: Any, **options: Any) -> Figure:
    """A matplotlib figure of a result. It does not belong to pyplot: nothing must be closed, and no setting changes.

    Args:
        result: What `parameter_statistics`, `layer_gradients`, `plan`, `compare` or `ablate_each` returns, or the
            ``matrix`` of a comparison; the ``totals`` of a `StatisticsCollector`, or their ``statistics()``; a
            `Monitor`, the path of a log, or what `read_runs` returns, whose last run is drawn.
        options: ``net``, whose name and weights are the title; ``findings``, ``title``, ``weights`` (the label of the
            weights), ``lines`` (under the title) and ``thresholds``, where a result has them; ``a`` and ``b``, the
            names of the sides of a matrix; ``photograph``, ``top`` and ``cmap`` of `ablate_each`.

    Raises:
        UsageError: there is no plot of such a result.

    Example:
        >>> import hookscope, torch
        >>> rows = hookscope.parameter_statistics(torch.nn.Conv2d(3, 8, 3))
        >>> [axes.texts[0].get_text() for axes in plot(rows, title="one layer").axes]
        ['weights', 'norms of filters']
    """
    figure: Figure = _for_kind(_PLOTS, "plot", result, options)
    return figure


def write_page(result: Any, path: StrPath, **options: Any) -> None:
    """Write the page of a result: one file of HTML that makes no request.

    Args:
        result: What `inspect`, `compare`, `find_exemplars`, `parameter_statistics` or `layer_gradients` returns; the
            ``totals`` of a `StatisticsCollector`, or their ``statistics()``; a `Monitor`, the path of a log, or what
            `read_runs` returns.
        path: The file, which is written completely or not at all.
        options: ``net``, whose name and weights are the title; ``title``, ``findings``, ``weights``, ``lines``,
            ``thresholds`` and ``provenance``, where a result has them; ``max_size`` in bytes of a page with pictures;
            ``crops`` of `find_exemplars`; ``exemplars`` and ``crops`` of `inspect`.

    Raises:
        UsageError: there is no page of such a result.
        WriteError: the file cannot be written, or the smallest page is larger than ``max_size``.

    Example:
        >>> import hookscope, os, tempfile, torch
        >>> rows = hookscope.parameter_statistics(torch.nn.Conv2d(3, 8, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(rows, f"{folder}/weights.html", title="one layer")
        ...     os.listdir(folder)
        ['weights.html']
    """
    write_atomically(path, _for_kind(_PAGES, "page", result, options).encode())


def _for_kind(draws: Mapping[type, Callable[..., Any]], noun: str, result: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(result, StatisticsCollector):
        options = options if noun == "finding" else {"net": result.net, **options}
        result = result.totals
    result = result.run if isinstance(result, Monitor) else result
    if isinstance(result, RunningStatistics) and RunningStatistics not in draws:
        options = {"findings": statistics_findings(result), **options}
        result = result.statistics()
    elif isinstance(result, (str, os.PathLike)):
        result = read_runs(result)
    elif isinstance(result, Run):
        result = [result]
    first = result[0] if isinstance(result, Sequence) and result else result
    if result is first and isinstance(result, Rows) and noun != "finding":
        raise UsageError(f"there is no {noun}: {NOTHING_MEASURED}")
    draw = next((draws[kind] for kind in type(first).__mro__ if kind in draws), None)
    if draw is None:
        raise UsageError(
            f"there is no {noun} of {kind_of(first)}",
            f"there is one of {', '.join(kind.__name__ for kind in draws)}",
            "give what the function that measures returns",
        )
    named = inspect.signature(draw, follow_wrapped=False)
    if "net" in options and "net" not in named.parameters and noun != "finding":
        net = as_loaded(options["net"])
        options = {"title": net.name, "weights": net.weights} | {k: options[k] for k in options if k != "net"}
    try:
        named.bind(result, **options)
    except TypeError as error:
        raise UsageError(f"{noun} of {kind_of(first)}: {error}") from None
    return draw(result, **options)
