"""The charts of a training run: its loss, its learning rates, and a metric of all layers over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hookscope.drawing import Chart, Colour, Curve, layer_label
from hookscope.training.log.loss import centred
from hookscope.training.log.rules import TrainingThresholds
from hookscope.training.log.series import LossSeries, RunSeries
from hookscope.training.log.summary import TimedFinding
from hookscope.training.plot.columns import LayerStepGrid, edges_of, rows_of

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
