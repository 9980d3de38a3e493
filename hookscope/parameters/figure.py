"""A plot of the weights of a model: the distribution for each layer, with the findings beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookscope.drawing import (
    Colour,
    decades,
    finding_lines,
    layer_label,
    mark_ends,
    page_of_rows,
    plain_settings,
    plain_ticks,
    set_ticks,
)
from hookscope.findings import Finding, counted, single
from hookscope.parameters.facts import ParameterStatistics

_IN_ROW_OF_LAYER = {"weight", "bias", "running_mean", "running_var"}

_Span = tuple[int, float, float, float]


@dataclass
class _Row:
    """One row of the page: a layer, or a parameter with another name than the usual ones, such as a class token."""

    label: str
    weight: ParameterStatistics | None = None
    variance: ParameterStatistics | None = None
    notes: list[str] = field(default_factory=list)


def plot_weights(
    rows: Sequence[ParameterStatistics],
    findings: Sequence[Finding] | None = None,
    title: str = "",
    *,
    weights: str = "",
    lines: Sequence[str] = (),
) -> Figure:
    """A page with a row for each layer: its weights, norms of filters, zeros and running variances.

    A panel without values is left out. A finding stands beside its row. The figure is none of pyplot's: nothing has to
    be closed, and no setting of matplotlib changes.

    Args:
        rows: The result of `parameter_statistics`.
        findings: The result of `parameter_findings`; None draws none.
        title: The first line, such as the name of the model.
        weights: Label of the weights, written beside the title; random weights are red.
        lines: Lines below the title.

    Example:
        >>> import torch
        >>> from hookscope import parameter_findings, parameter_statistics
        >>> rows = parameter_statistics(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)))
        >>> figure = plot_weights(rows, parameter_findings(rows), "two layers")
        >>> [axes.texts[0].get_text() for axes in figure.axes]
        ['weights', 'norms of filters', 'running variance']
    """
    page_rows = _page_rows(rows, findings or ())
    panels = [("weights", 3.4, _draw_weights)]
    if any(row.weight is not None and row.weight.filter_norm_min is not None for row in page_rows):
        panels.append(("norms of filters", 2.2, _draw_filters))
    if any(row.weight is not None and row.weight.zeros for row in page_rows):
        panels.append(("zeros (%)", 1.0, _draw_zeros))
    if any(row.variance is not None for row in page_rows):
        panels.append(("running variance", 2.2, _draw_variances))
    with plain_settings():
        figure = page_of_rows(
            [row.label for row in page_rows],
            {name: width for name, width, _ in panels},
            title,
            [*((line, Colour.INK) for line in lines), *finding_lines(findings)],
            {at: "; ".join(row.notes) for at, row in enumerate(page_rows) if row.notes},
            weights=weights,
            legend=_legend(page_rows, [name for name, *_ in panels]),
        )
        for (_, _, draw), axes in zip(panels, figure.axes, strict=True):
            draw(axes, page_rows)
    return figure


def _legend(rows: Sequence[_Row], panels: Sequence[str]) -> list[str]:
    """What the marks mean that are drawn."""
    legend = []
    if any(row.weight is not None and row.weight.mean is not None for row in rows):
        legend.append("weights: thin line lowest to highest, thick line mean ± standard deviation, dot mean")
    if shown := [name for name in panels if name in ("norms of filters", "running variance")]:
        goes_on = any(low < _edges(spans)[0] for spans in (_norms(rows), _variances(rows)) for _, low, *_ in spans)
        words = "; red arrowhead: the line goes on to 0 or below" if goes_on else ""
        legend.append(f"{', '.join(shown)}: line least to largest, dot mean{words}")
    return legend


def _page_rows(rows: Sequence[ParameterStatistics], findings: Sequence[Finding]) -> list[_Row]:
    page_rows: dict[str, _Row] = {}
    # if no BatchNorm was ever updated, as with random weights, only the lines below the heading mention it
    some_updated = any(row.updated for row in rows)
    for row in rows:
        leaf = row.name.rpartition(".")[2]
        key = (row.layer or row.type) if leaf in _IN_ROW_OF_LAYER else row.name
        place = page_rows.setdefault(key, _Row(layer_label(key, row.type) if key == row.layer else key))
        if leaf == "running_var":
            place.variance = row
        elif leaf == "weight" or leaf not in _IN_ROW_OF_LAYER:
            place.weight = row
        notes = [_note(finding, leaf) for finding in single(findings) if finding.layer == row.name]
        notes += ["never updated"] if row.updated is False and some_updated else []
        place.notes += [note for note in notes if note not in place.notes]
    return list(page_rows.values())


def _note(finding: Finding, leaf: str) -> str:
    """The finding in a few words, to stand beside the row of its layer."""
    channels = finding.channels or ()
    match finding.finding:
        case "non-finite":
            count = sum(int(finding.numbers[name] or 0) for name in ("nan", "inf"))
            return f"{count:,} NaN or Inf" + ("" if leaf == "weight" else f" in {leaf}")
        case "dead-filters":
            return f"{counted(len(channels), 'dead filter')}: {_few(channels)}"
        case "duplicate-filters":
            return "duplicates: " + _few(["=".join(map(str, group[:3])) for group in finding.groups or ()])
        case "collapsed-variance":
            return f"{len(channels)} collapsed: {_few(channels)}"
    return finding.finding


def _few(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:3])) + (", ..." if len(items) > 3 else "")


def _bands(axes: Axes, spans: Sequence[tuple[int, float, float]], thick: bool, colour: str) -> None:
    if spans:
        at, low, high = zip(*spans, strict=True)
        axes.hlines(at, low, high, colors=colour, linewidth=4.0 if thick else 1.0, zorder=3 if thick else 2)


def _draw_weights(axes: Axes, rows: Sequence[_Row]) -> None:
    """Draw lowest to highest as a thin line, mean ± standard deviation as a thick line, the mean as a dot."""
    known = [(at, row.weight) for at, row in enumerate(rows) if row.weight is not None and row.weight.mean is not None]
    _bands(axes, [(at, w.min or 0.0, w.max or 0.0) for at, w in known], False, Colour.FAINT)
    spreads = [(at, w.mean or 0.0, w.std or 0.0) for at, w in known]
    _bands(axes, [(at, mean - std, mean + std) for at, mean, std in spreads], True, Colour.SKY)
    axes.plot([mean for _, mean, _ in spreads], [at for at, _, _ in spreads], "o", ms=2.6, color=Colour.BLUE, zorder=4)
    ends = [abs(end) for _, w in known for end in (w.min or 0.0, w.max or 0.0)]
    typical = sorted(std for _, _, std in spreads if std > 0)
    if typical and max(ends) > 30 * typical[len(typical) // 2]:  # or the widest row would flatten the others
        threshold = 10.0 ** math.floor(math.log10(typical[len(typical) // 2]))
        axes.set_xscale("symlog", linthresh=threshold, linscale=0.6)
        powers = decades(threshold, max(ends), 3)
        set_ticks(axes, [*(-power for power in reversed(powers)), 0.0, *powers])
    else:
        axes.set_xticks(*plain_ticks(axes.get_xlim(), 7))
    axes.axvline(0, color=Colour.FAINT, linewidth=0.6, zorder=1)


def _draw_filters(axes: Axes, rows: Sequence[_Row]) -> None:
    _draw_spans(axes, _norms(rows))


def _draw_variances(axes: Axes, rows: Sequence[_Row]) -> None:
    _draw_spans(axes, _variances(rows))


def _norms(rows: Sequence[_Row]) -> list[_Span]:
    """Least, mean and largest norm of the filters of each row."""
    weights = [(at, row.weight) for at, row in enumerate(rows) if row.weight and row.weight.filter_norm_min is not None]
    return [(at, w.filter_norm_min or 0.0, w.filter_norm_mean or 0.0, w.filter_norm_max or 0.0) for at, w in weights]


def _variances(rows: Sequence[_Row]) -> list[_Span]:
    known = [(at, row.variance) for at, row in enumerate(rows) if row.variance and row.variance.mean is not None]
    return [(at, variance.min or 0.0, variance.mean or 0.0, variance.max or 0.0) for at, variance in known]


def _edges(spans: Sequence[_Span]) -> tuple[float, float]:
    """The ends of a logarithmic axis."""
    positive = [value for _, *values in spans for value in values if value > 0]
    least, most = (min(positive), max(positive)) if positive else (0.1, 1.0)
    # ten decades at most: one collapsed channel must not flatten all others
    left, right = max(least, most * 1e-10) / 1.6, most * 1.6
    if right / left < 12:
        middle = math.sqrt(left * right)
        left, right = middle / 3.5, middle * 3.5
    return left, right


def _draw_spans(axes: Axes, spans: Sequence[_Span]) -> None:
    """Draw lines and dots on a logarithmic scale; a line from 0 or below starts at the left edge with an arrowhead."""
    left, right = _edges(spans)
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    _bands(axes, [(at, max(low, left), max(high, left)) for at, low, _, high in spans], False, Colour.FAINT)
    axes.plot([mean for *_, mean, _ in spans], [at for at, *_ in spans], "o", ms=2.6, color=Colour.GREEN, zorder=4)
    mark_ends(axes, [at for at, low, *_ in spans if low < left], [], Colour.ALARM)
    set_ticks(axes, decades(left, right))


def _draw_zeros(axes: Axes, rows: Sequence[_Row]) -> None:
    zeros = [(at, 100 * (row.weight.zeros or 0.0)) for at, row in enumerate(rows) if row.weight is not None]
    axes.barh([at for at, _ in zeros], [share for _, share in zeros], height=0.6, color=Colour.ORANGE, zorder=3)
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 50, 100])
