"""A training run on one page: loss and learning rate, curves of layers with findings, every layer at every step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hookscope.drawing import (
    BODY,
    DPI,
    SMALL,
    TITLE,
    Colour,
    add_panel,
    finding_lines,
    fitting,
    inches,
    layer_label,
    plain_settings,
    short_label,
    with_types,
    wrapped_lines,
    write,
    write_at,
)
from hookscope.errors import printable
from hookscope.findings import verdict
from hookscope.system import StrPath
from hookscope.training.log.file import Run, last_run
from hookscope.training.log.rules import TrainingThresholds
from hookscope.training.log.series import RunSeries, series_of
from hookscope.training.log.summary import TimedFinding, summary
from hookscope.training.plot.columns import edges_of, grids_of, rows_of
from hookscope.training.plot.curves import CURVES_KEYS, draw_curves, draw_loss, draw_rates
from hookscope.training.plot.heatmap import draw_heat, draw_keys

# In inches.
_MARGIN, _GAP, _LINE = 0.25, 0.47, 0.18
_LOSS, _RATE, _CURVES = 1.7, 0.5, 1.35
_ROW, _LEAST_ROWS, _MOST_ROWS = 0.15, 0.45, 9.0
_KEYS, _FOOT = 0.42, 0.14
_PANEL, _NARROWEST = 1.95, 9.0
_MOST_LINES = 10
_LONGEST_LABEL = 34


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
    finding at the top, above the loss at the step at which it begins, and in the row of its layer. A column without
    values is left out, such as dead channels of a run that has none. The figure is outside pyplot: nothing has to be
    closed, and no setting of matplotlib changes.

    Args:
        run: The path of a log, of which the last run is drawn; a run that `read_runs` has read from a log, or the lines
            that a `Monitor` without a log has kept.
        findings: The result of `findings_over_time`; None draws none.
        title: The first line, such as the command.
        thresholds: The thresholds that are drawn.

    Example:
        >>> import torch
        >>> from hookscope import Monitor, Run, findings_over_time
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with Monitor(net, optimizer, every=1) as monitor:
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         net(torch.rand(16, 4)).square().mean().backward()
        ...         optimizer.step()
        >>> run = Run({}, monitor.rows, facts=monitor.facts)
        >>> figure = plot_training(run, findings_over_time(run), "five steps")
        >>> figure.axes[0].get_title(loc="left")
        'loss'
    """
    thresholds = thresholds or TrainingThresholds()
    run = last_run(run)
    series = series_of(run)
    lines = [(str(summary(run)), Colour.INK)]
    if len(series.losses) > 1:
        text = f"{len(series.losses)} optimizers: each layer is at the steps of the one that changes it"
        lines.append((text, Colour.INK))
    found = findings or ()
    said = with_types(found, {layer.label: layer.type for layer in series.layers})
    lines += finding_lines(None if findings is None else said, _MOST_LINES, numbered=True)
    lines += [(verdict(said), Colour.INK)] if said else []
    with plain_settings():
        page, keys = _Page(series, printable(title) or "a training run", lines), set[str]()
        draw_loss(page.loss, series, found)
        if page.rates is not None:
            draw_rates(page.rates, series)
        for grid, curves, heat in zip(page.grids, page.curves, page.heats, strict=True):
            keys |= draw_curves(curves, grid, series, found, thresholds)
            draw_heat(heat, grid, series, found)
        if page.grids:
            page.label_rows(found)
            page.explain(keys)
    return page.figure


class _Page:
    """The panels of the page, from top to bottom."""

    def __init__(self, run: RunSeries, title: str, lines: Sequence[tuple[str, str]]) -> None:
        self.run = run
        self.grids = grids_of(run)
        self.names = [short_label(layer_label(layer.label, layer.type), _LONGEST_LABEL) for layer in run.layers]
        has_rates = any(np.isfinite(loss.rates).any() for loss in run.losses)
        rows = min(max(_ROW * len(run.layers), _LEAST_ROWS), _MOST_ROWS) if self.grids else 0.0
        self.row_height = rows / max(len(run.layers), 1)
        self.left = _MARGIN + max([0.55, *(inches(name, SMALL, bold=True) + 0.08 for name in self.names)])
        count = len(self.grids)
        gaps = max(count - 1, 0) * _GAP
        wide = max(count * _PANEL + gaps, _NARROWEST - self.left - _MARGIN)
        self.panel = (wide - gaps) / max(count, 1)
        text_width = self.left + wide - _MARGIN
        self.text_width = text_width
        self.foot = len(self.foot_lines(CURVES_KEYS))
        wrapped = [
            (part, colour)
            for line, colour in lines
            for part in wrapped_lines(printable(line), text_width, BODY, 2, "     " if line[:1].isdigit() else "")
        ]
        y = _MARGIN + 0.3 + _LINE * len(wrapped) + 0.42
        below = _CURVES + 0.18 + _KEYS + rows + 0.8 + _FOOT * self.foot if self.grids else 0.35
        self.height = y + _LOSS + (_RATE + 0.12 if has_rates else 0) + 0.7 + below
        self.figure = Figure(figsize=(self.left + wide + _MARGIN, self.height), dpi=DPI, facecolor="white")
        title = fitting(title, text_width, TITLE, bold=True)
        write_at(self.figure, _MARGIN, _MARGIN + 0.08, title, fontsize=TITLE, fontweight="bold")
        for at, (line, colour) in enumerate(wrapped):
            write_at(self.figure, _MARGIN, _MARGIN + 0.35 + at * _LINE, line, color=colour)
        self.loss = add_panel(self.figure, self.left, y, wide, _LOSS)
        y += _LOSS
        self.rates: Axes | None = None
        if has_rates:
            self.rates = add_panel(self.figure, self.left, y + 0.12, wide, _RATE)
            y += 0.12 + _RATE
        y += 0.7
        self.curves, self.heats = [], []
        for at in range(count):
            x = self.left + at * (self.panel + _GAP)
            self.curves.append(add_panel(self.figure, x, y, self.panel, _CURVES))
            self.heats.append(add_panel(self.figure, x, y + _CURVES + _KEYS, self.panel, rows))
        self.keys = y + _CURVES + _KEYS - 0.17
        self._mark_steps()

    def _mark_steps(self) -> None:
        """Give every panel the same steps, with labels where there is room."""
        left, right, _ = edges_of(self.run)
        across = [self.loss] if self.rates is None else [self.loss, self.rates]
        for axes in self.figure.axes:
            axes.set_xlim(left, right)
            axes.tick_params(pad=2)
            _step_ticks(axes, self.run, 8 if axes in across else 3)
        for axes in [*across[:-1], *self.curves]:
            axes.tick_params(labelbottom=False)
        lowest = across[-1]
        beside = {"transform": lowest.transAxes, "clip_on": False, "ha": "right", "fontsize": SMALL}
        write(lowest, 1, -0.2 if self.rates is None else -0.68, "step", color=Colour.FAINT, **beside)

    def label_rows(self, findings: Sequence[TimedFinding]) -> None:
        """Write as many names of layers as fit, those in findings first."""
        axes, in_findings = self.heats[0], rows_of([finding.layer for finding in findings], self.run)
        step = max(1, math.ceil(SMALL * 1.2 / 72 / self.row_height))
        labelled: list[int] = []
        beside = {"transform": axes.get_yaxis_transform(), "clip_on": False, "ha": "right", "fontsize": SMALL}
        for at in [*dict.fromkeys(in_findings), *range(len(self.names))]:
            if any(abs(at - other) < step for other in labelled):
                continue
            labelled.append(at)
            alarm = {"color": Colour.ALARM, "fontweight": "bold"} if at in in_findings else {}
            write(axes, -0.06 / self.panel, at, self.names[at], **beside, **alarm)

    def foot_lines(self, keys: Collection[str]) -> list[str]:
        """The legend of the curves, in lines."""
        text = "curves: " + ", ".join(key for key in CURVES_KEYS if key in keys)
        return wrapped_lines(text, self.text_width, SMALL - 0.5, 3)

    def explain(self, keys: Collection[str]) -> None:
        """Explain the cells above the heat maps, and the ``keys`` of the curves at the foot of the page."""
        draw_keys(self.figure, self.left, self.keys, self.grids)
        for at, line in enumerate(reversed(self.foot_lines(keys) if keys else [])):
            y = self.height - _FOOT * (at + 1)
            write_at(self.figure, _MARGIN, y, line, fontsize=SMALL - 0.5, color=Colour.FAINT)


def _step_ticks(axes: Axes, run: RunSeries, most: int) -> None:
    """Label at most ``most`` whole steps."""
    left = min((int(loss.steps[0]) for loss in run.losses), default=0)
    right = max((int(loss.steps[-1]) for loss in run.losses), default=0)
    values = MaxNLocator(most, integer=True).tick_values(left, right)
    ticks = sorted({round(at) for at in values if left <= at <= right})
    axes.set_xticks(ticks, [_thousands(at) for at in ticks])


def _thousands(step: int) -> str:
    return f"{step / 1e6:g}M" if step >= 10**6 else f"{step / 1000:g}k" if step >= 10**4 else f"{step:,}"
