"""A plot of the weights of a model: the distribution for each layer, with the findings beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookscope.drawing import Colour, decades, finding_lines, page_of_rows, plain_settings, set_ticks, write
from hookscope.findings import Finding, counted, single
from hookscope.parameters.facts import ParameterStatistics

_IN_ROW_OF_LAYER = {"weight", "bias", "running_mean", "running_var"}
_LEGEND = (
    "weights: thin line lowest to highest, thick mean ± standard deviation, dot mean"
    "   norms, variances: line least to largest, dot mean, < goes on to the left"
)


@dataclass
class _Row:
    """One row of the page: a layer, or a parameter with another name than the usual ones, such as a class token."""

    label: str
    weight: ParameterStatistics | None = None
    variance: ParameterStatistics | None = None
    notes: list[str] = field(default_factory=list)


def weights_figure(
    rows: Sequence[ParameterStatistics], findings: Sequence[Finding], heading: str, lines: Sequence[str] = ()
) -> Figure:
    """A page with a row for each layer in order of registration: weights, filters, zeros, running variances.

    ``heading`` is model and weights; ``lines`` below it are such as totals.
    """
    page_rows = _page_rows(rows, findings)
    panels = [("weights", 3.4, _draw_weights), ("zeros (%)", 1.0, _draw_zeros)]
    if any(row.weight is not None and row.weight.filter_norm_min is not None for row in page_rows):
        panels.insert(1, ("norms of filters", 2.2, _draw_filters))
    if any(row.variance is not None for row in page_rows):
        panels.append(("running variance", 2.2, _draw_variances))
    with plain_settings():
        figure = page_of_rows(
            [row.label for row in page_rows],
            {title: width for title, width, _ in panels},
            heading,
            [*((line, Colour.INK) for line in lines), *finding_lines(findings)],
            {at: "; ".join(row.notes) for at, row in enumerate(page_rows) if row.notes},
        )
        for (_, _, draw), axes in zip(panels, figure.axes, strict=True):
            draw(axes, page_rows)
        width, height = figure.get_size_inches()
        write(figure, 0.2 / width, 0.13 / height, _LEGEND, fontsize=7.0, color=Colour.FAINT)
    return figure


def _page_rows(rows: Sequence[ParameterStatistics], findings: Sequence[Finding]) -> list[_Row]:
    page_rows: dict[str, _Row] = {}
    # if no BatchNorm was ever updated, as with random weights, only the lines below the heading mention it
    some_updated = any(row.updated for row in rows)
    for row in rows:
        leaf = row.name.rpartition(".")[2]
        key = (row.layer or row.type) if leaf in _IN_ROW_OF_LAYER else row.name
        place = page_rows.setdefault(key, _Row(key))
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
    axes.axvline(0, color=Colour.FAINT, linewidth=0.6, zorder=1)


def _draw_filters(axes: Axes, rows: Sequence[_Row]) -> None:
    """Draw least to largest norm as a line, the mean as a dot."""
    weights = [(at, row.weight) for at, row in enumerate(rows) if row.weight and row.weight.filter_norm_min is not None]
    _spans(axes, [(at, w.filter_norm_min, w.filter_norm_mean, w.filter_norm_max) for at, w in weights])


def _draw_variances(axes: Axes, rows: Sequence[_Row]) -> None:
    variances = [(at, row.variance) for at, row in enumerate(rows) if row.variance and row.variance.mean is not None]
    _spans(axes, [(at, variance.min, variance.mean, variance.max) for at, variance in variances])


def _spans(axes: Axes, spans: Sequence[tuple[int, float | None, float | None, float | None]]) -> None:
    """Draw lines and dots on a logarithmic scale; a line from 0 or below starts at the left edge with an arrow head."""
    numbers = [(at, low or 0.0, mean or 0.0, high or 0.0) for at, low, mean, high in spans]
    positive = [value for _, *values in numbers for value in values if value > 0]
    least, most = (min(positive), max(positive)) if positive else (0.1, 1.0)
    # ten decades at most: one collapsed channel must not flatten all others
    left, right = max(least, most * 1e-10) / 1.6, most * 1.6
    if right / left < 12:
        middle = math.sqrt(left * right)
        left, right = middle / 3.5, middle * 3.5
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    _bands(axes, [(at, max(low, left), max(high, left)) for at, low, _, high in numbers], False, Colour.FAINT)
    axes.plot([mean for *_, mean, _ in numbers], [at for at, *_ in numbers], "o", ms=2.6, color=Colour.GREEN, zorder=4)
    ended = [at for at, low, *_ in numbers if low < left]
    axes.plot([left] * len(ended), ended, "<", ms=4, color=Colour.ALARM, clip_on=False, zorder=5)
    set_ticks(axes, decades(left, right))


def _draw_zeros(axes: Axes, rows: Sequence[_Row]) -> None:
    zeros = [(at, 100 * (row.weight.zeros or 0.0)) for at, row in enumerate(rows) if row.weight is not None]
    axes.barh([at for at, _ in zeros], [share for _, share in zeros], height=0.6, color=Colour.ORANGE, zorder=3)
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 50, 100])
