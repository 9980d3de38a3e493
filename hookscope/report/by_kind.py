"""One function for the plot of every result, and one for its page: a result knows its kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from hookscope.comparison import CkaMatrix, Comparison, differences_plot, matrix_plot
from hookscope.drawing import RowPlot, draw_rows
from hookscope.errors import UsageError
from hookscope.exemplars import LayerExemplars
from hookscope.gradients import GradientReport, gradients_plot
from hookscope.inspection import Inspection
from hookscope.interventions import Ablation, draw_ablation
from hookscope.parameters import ParameterStatistics, weights_plot
from hookscope.planning import Plan, plan_plot
from hookscope.report.comparison import draw_comparison_page
from hookscope.report.exemplars import draw_exemplars_page
from hookscope.report.inspection import draw_page
from hookscope.report.results import (
    draw_gradients_page,
    draw_statistics_page,
    draw_training_page,
    draw_weights_page,
)
from hookscope.statistics import LayerStatistics, RunningStatistics, diagnose, statistics_plot
from hookscope.system import StrPath, write_atomically
from hookscope.training import Run, plot_training, read_runs

_ROWS: Mapping[type, Callable[..., RowPlot]] = {
    LayerStatistics: statistics_plot,
    ParameterStatistics: weights_plot,
    GradientReport: gradients_plot,
    Plan: plan_plot,
    Comparison: differences_plot,
    CkaMatrix: matrix_plot,
}


def _figure_of(rows: Callable[..., RowPlot]) -> Callable[..., Figure]:
    def draw(result: Any, title: str = "", weights: str = "", lines: Sequence[str] = (), **options: Any) -> Figure:
        return draw_rows(rows(result, **options), title, lines, weights)

    return draw


_PLOTS: Mapping[type, Callable[..., Figure]] = {
    **{kind: _figure_of(rows) for kind, rows in _ROWS.items()},
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


def plot(result: Any, **options: Any) -> Figure:
    """A matplotlib figure of a result. It does not belong to pyplot: nothing must be closed, and no setting changes.

    Args:
        result: What `parameter_statistics`, `layer_gradients`, `plan`, `compare` or `ablate_each` returns, or the
            ``matrix`` of a comparison; the ``totals`` of a `StatisticsCollector`, or their ``statistics()``; the path
            of a log, or what `read_runs` returns, whose last run is drawn.
        options: ``findings``, ``title``, ``weights`` (the label of the weights), ``lines`` (under the title) and
            ``thresholds``, where a result has them; ``a`` and ``b``, the names of the sides of a matrix;
            ``photograph``, ``net``, ``top`` and ``cmap`` of `ablate_each`.

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
            ``totals`` of a `StatisticsCollector`, or their ``statistics()``; the path of a log, or what `read_runs`
            returns.
        path: The file, which is written completely or not at all.
        options: ``title``, ``findings``, ``weights`` (the label of the weights), ``lines`` (under the verdict),
            ``thresholds`` and ``provenance``, where a result has them; ``max_size`` in bytes of a page with pictures;
            ``net`` and ``crops`` of `find_exemplars`; ``exemplars`` and ``crops`` of `inspect`.

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
    if isinstance(result, RunningStatistics):
        options = {"findings": diagnose(result), **options}
        result = result.statistics()
    elif isinstance(result, (str, os.PathLike)):
        result = read_runs(result)
    elif isinstance(result, Run):
        result = [result]
    first = result[0] if isinstance(result, Sequence) and result else result
    draw = next((draws[kind] for kind in type(first).__mro__ if kind in draws), None)
    if draw is None:
        raise UsageError(
            f"there is no {noun} of {type(first).__name__}",
            f"there is one of {', '.join(kind.__name__ for kind in draws)}",
        )
    return draw(result, **options)
