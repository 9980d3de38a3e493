"""A training run on one page: loss and learning rate, curves of layers with findings, every layer at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hookscope.drawing import BODY, DPI, SMALL, TITLE, Colour, fitting, inches, plain_settings, wrapped_lines, write
from hookscope.errors import printable
from hookscope.training.log.file import Run
from hookscope.training.log.rules import TrainingThresholds
from hookscope.training.log.series import RunSeries, series_of
from hookscope.training.log.summary import TimedFinding, summary
from hookscope.training.plot.columns import edges_of, grids_of, rows_of
from hookscope.training.plot.curves import draw_curves, draw_loss, draw_rates
from hookscope.training.plot.heatmap import draw_heat, draw_keys

# In inches.
_MARGIN, _GAP, _LINE = 0.25, 0.47, 0.18
_LOSS, _RATE, _CURVES = 1.7, 0.5, 1.35
_ROW, _LEAST_ROWS, _MOST_ROWS = 0.15, 0.45, 9.0
_KEYS, _FOOT = 0.42, 0.14
_PANEL, _NARROWEST = 1.95, 9.0
_MOST_LINES = 10
_LONGEST_LABEL = 34
_CURVES_WORDS = (
    "curves: band from the lowest to the highest of all layers, grey line their median, coloured lines layers with a"
    " finding (triangles at the foot: exactly 0); dashed red: threshold"
)

_Place = tuple[float, float, float, float]


def run_figure(
    run: Run,
    findings: Sequence[TimedFinding],
    heading: str = "",
    thresholds: TrainingThresholds | None = None,
) -> Figure:
    """A page with loss and learning rate at the top, and a column for each metric below, over the same steps.

    A column has curves (named lines for layers with a finding, a band for all), and under them a heat map with a row
    for each layer in order of execution. Findings are numbered in order of time. A number is in the line of the
    finding at the top, above the loss at the step at which it begins, and in the row of its layer.

    Args:
        run: A run of `read_runs`.
        findings: The findings of `findings_over_time`.
        heading: The first line, such as the name of the log.
        thresholds: The thresholds of ``findings``; they are drawn.

    Example:
        >>> from hookscope.training import Run
        >>> rows = [{"step": step, "layer": "fc", "loss": 1.0, "zero_share": 0.5} for step in (0, 50)]
        >>> figure = run_figure(Run({}, rows), [], "run.ndjson")
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['loss', 'zeros (share)', '', '']
    """
    thresholds = thresholds or TrainingThresholds()
    series = series_of(run)
    finding_lines = _finding_lines(findings)
    lines = [str(summary(run)), *finding_lines]
    if len(series.losses) > 1:
        lines.insert(1, f"{len(series.losses)} optimizers: each layer is at the steps of the one that changes it")
    with plain_settings():
        page = _Page(series, printable(heading) or "a training run", lines, len(finding_lines) if findings else 0)
        draw_loss(page.loss, series, findings)
        if page.rates is not None:
            draw_rates(page.rates, series)
        for grid, curves, heat in zip(page.grids, page.curves, page.heats, strict=True):
            draw_curves(curves, grid, series, findings, thresholds)
            draw_heat(heat, grid, series, findings)
        page.label_rows(findings)
        page.legend()
    return page.figure


def _finding_lines(findings: Sequence[TimedFinding]) -> list[str]:
    if not findings:
        return ["no findings"]
    lines = [
        f"{number}  {finding.finding}  {finding.layer}{': ' if finding.layer else ''}{finding.evidence}"
        for number, finding in enumerate(findings, 1)
    ]
    more = len(lines) - _MOST_LINES
    return lines[:_MOST_LINES] + ([f"... and {more} more"] if more > 0 else [])


class _Page:
    """The panels of the page, from top to bottom."""

    def __init__(self, run: RunSeries, heading: str, lines: Sequence[str], alarms: int) -> None:
        self.run = run
        self.grids = grids_of(run)
        self.names = [_short(printable(layer.label)) for layer in run.layers]
        has_rates = any(np.isfinite(loss.rates).any() for loss in run.losses)
        rows = min(max(_ROW * len(run.layers), _LEAST_ROWS), _MOST_ROWS) if self.grids else 0.0
        self.row = rows / max(len(run.layers), 1)
        self.left = _MARGIN + max([0.55, *(inches(name, SMALL, bold=True) + 0.08 for name in self.names)])
        count = len(self.grids)
        wide = max(count * _PANEL + max(count - 1, 0) * _GAP, _NARROWEST - self.left - _MARGIN)
        self.panel = (wide - max(count - 1, 0) * _GAP) / max(count, 1)
        self.width = self.left + wide + _MARGIN
        self.foot = wrapped_lines(_CURVES_WORDS, self.width - 2 * _MARGIN, SMALL - 0.5, 3)
        rows_of_text = [
            (part, at >= len(lines) - alarms) for at, line in enumerate(lines) for part in self._wrapped(line)
        ]
        head = _MARGIN + 0.3 + _LINE * len(rows_of_text) + 0.42
        below = _CURVES + 0.18 + _KEYS + rows + 0.8 + _FOOT * len(self.foot) if self.grids else 0.35
        self.height = head + _LOSS + (_RATE + 0.12 if has_rates else 0) + 0.7 + below
        self.figure: Figure = Figure(figsize=(self.width, self.height), dpi=DPI, facecolor="white")
        self._head(heading, rows_of_text)
        self.rates: Axes | None = None
        self._place_panels(head, wide, rows, has_rates)
        self._mark_steps()

    def _place_panels(self, y: float, wide: float, rows: float, has_rates: bool) -> None:
        """Add loss and learning rate across the page from ``y`` inches down, and curves and heat maps below."""
        self.loss = self._axes(self.left, y, wide, _LOSS)
        y += _LOSS
        if has_rates:
            self.rates = self._axes(self.left, y + 0.12, wide, _RATE)
            y += 0.12 + _RATE
        y += 0.7
        self.curves, self.heats = [], []
        for at in range(len(self.grids)):
            x = self.left + at * (self.panel + _GAP)
            self.curves.append(self._axes(x, y, self.panel, _CURVES))
            self.heats.append(self._axes(x, y + _CURVES + _KEYS, self.panel, rows))
        self.keys = y + _CURVES + _KEYS - 0.17

    def _mark_steps(self) -> None:
        """Give every panel the same steps, with labels where there is room."""
        left, right, _ = edges_of(self.run)
        across = [self.loss] if self.rates is None else [self.loss, self.rates]
        for axes in [*across, *self.curves, *self.heats]:
            axes.set_xlim(left, right)
        for axes in across:
            _step_ticks(axes, self.run, 8)
        for axes in [*self.curves, *self.heats]:
            _step_ticks(axes, self.run, 3)
        for axes in [*across[:-1], *self.curves]:
            axes.tick_params(labelbottom=False)
        lowest = across[-1]
        write(lowest, 1, -0.2 if self.rates is None else -0.68, "step", **_beside(lowest))

    def _axes(self, x: float, y: float, wide: float, high: float) -> Axes:
        """A panel at ``x`` and ``y`` inches from the upper left corner of the page."""
        place: _Place = (x / self.width, 1 - (y + high) / self.height, wide / self.width, high / self.height)
        axes = self.figure.add_axes(place)
        axes.set_axisbelow(True)
        axes.grid(color=Colour.GRID, linewidth=0.6)
        axes.tick_params(labelsize=SMALL, colors=Colour.INK, length=2.5, color=Colour.FAINT, pad=2)
        for side in axes.spines.values():
            side.set_edgecolor(Colour.GRID)
        return axes

    def _wrapped(self, line: str) -> list[str]:
        return wrapped_lines(printable(line), self.width - 2 * _MARGIN, BODY, 2, "     " if line[:1].isdigit() else "")

    def _head(self, heading: str, lines: Sequence[tuple[str, bool]]) -> None:
        y = _MARGIN + 0.08
        self._write(
            _MARGIN, y, fitting(heading, self.width - 2 * _MARGIN, TITLE, bold=True), fontsize=TITLE, fontweight="bold"
        )
        y += 0.27
        for line, alarm in lines:
            self._write(_MARGIN, y, line, color=Colour.ALARM if alarm else Colour.INK)
            y += _LINE

    def _write(self, x: float, y: float, text: str, **more: Any) -> None:
        write(self.figure, x / self.width, 1 - y / self.height, text, **more)

    def label_rows(self, findings: Sequence[TimedFinding]) -> None:
        """Write as many names of layers as fit, those in findings first."""
        if not self.heats:
            return
        axes, wanted = self.heats[0], rows_of([finding.layer for finding in findings], self.run)
        step = max(1, math.ceil(SMALL * 1.2 / 72 / self.row))
        taken: list[int] = []
        beside = {"transform": axes.get_yaxis_transform(), "clip_on": False, "ha": "right", "fontsize": SMALL}
        for at in [*dict.fromkeys(wanted), *range(len(self.names))]:
            if any(abs(at - other) < step for other in taken):
                continue
            taken.append(at)
            alarm = {"color": Colour.ALARM, "fontweight": "bold"} if at in wanted else {}
            write(axes, -0.06 / self.panel, at, self.names[at], **beside, **alarm)

    def legend(self) -> None:
        """Explain the cells above the heat maps, and the curves at the foot of the page."""
        if not self.heats:
            return
        draw_keys(self.figure, self.left, self.keys, self.grids)
        for at, line in enumerate(reversed(self.foot)):
            self._write(_MARGIN, self.height - _FOOT * (at + 1), line, fontsize=SMALL - 0.5, color=Colour.FAINT)


def _beside(axes: Axes) -> dict[str, Any]:
    return {"transform": axes.transAxes, "clip_on": False, "ha": "right", "fontsize": SMALL, "color": Colour.FAINT}


def _step_ticks(axes: Axes, run: RunSeries, most: int) -> None:
    """Label at most ``most`` whole steps."""
    left = min((int(loss.steps[0]) for loss in run.losses), default=0)
    right = max((int(loss.steps[-1]) for loss in run.losses), default=0)
    values = MaxNLocator(most, integer=True).tick_values(left, right)
    ticks = sorted({round(at) for at in values if left <= at <= right})
    axes.set_xticks(ticks, [_thousands(at) for at in ticks])


def _thousands(step: int) -> str:
    return f"{step / 1e6:g}M" if step >= 10**6 else f"{step / 1000:g}k" if step >= 10**4 else f"{step:,}"


def _short(label: str) -> str:
    half = _LONGEST_LABEL // 2
    return label if len(label) <= _LONGEST_LABEL else f"{label[: half - 1]}…{label[-half:]}"
