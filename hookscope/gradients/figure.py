"""Gradients of activations, weights and biases on one page, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hookscope.drawing import (
    Colour,
    decades,
    finding_lines,
    layer_label,
    page_of_rows,
    plain_settings,
    set_ticks,
    with_types,
)
from hookscope.findings import Finding, single
from hookscope.gradients.findings import GradientThresholds, layer_finding_names, parameter_finding_names
from hookscope.gradients.report import GradientReport, LayerGradient, ParameterGradient
from hookscope.hooks import GradientSize

_MOST_DECADES = 40  # smaller values are drawn at the edge
_WIDEST = 8.7  # inches, all panels together

_Sizes = list[tuple[int, GradientSize]]
_Mark = tuple[str, str, tuple[tuple[str, Any], ...]]  # its words, its marker, the look of the marker

_ABOVE, _BELOW = -0.18, 0.22  # of the middle of a row: the gradient before and after a change
_ZERO: _Mark = ("◂ red: 0 everywhere", "<", (("color", Colour.ALARM), ("ms", 4.0)))
_LOST: _Mark = ("× no gradient arrives", "x", (("color", Colour.INK), ("ms", 3.6), ("mew", 1.1)))
_FROZEN: _Mark = ("□ frozen", "s", (("color", Colour.GREEN), ("ms", 3.0), ("mfc", "white"), ("mew", 1.0)))
_SPOILED: _Mark = ("▸ red: NaN or Inf", ">", (("color", Colour.ALARM), ("ms", 4.4)))
_ZEROED: _Mark = ("◂ orange: 0 after the change", "<", (("color", Colour.ORANGE), ("ms", 4.0)))


@dataclass
class _Row:
    """One row of the page: a layer call, or a layer with parameters that was not selected."""

    label: str
    name: str
    layer: LayerGradient | None = None
    weights: list[ParameterGradient] = field(default_factory=list)
    biases: list[ParameterGradient] = field(default_factory=list)


@dataclass
class _Panel:
    """The content of one panel, by row."""

    title: str
    before: _Sizes
    after: _Sizes
    lost: list[int]
    frozen: list[int]


def plot_gradients(
    report: GradientReport,
    findings: Sequence[Finding] | None = None,
    title: str = "",
    *,
    weights: str = "",
    lines: Sequence[str] = (),
    thresholds: GradientThresholds | None = None,
) -> Figure:
    """A page with a row for each layer in order of execution: mean and largest gradient, on a logarithmic scale.

    Panels: gradients of the layer outputs, of the weights and of the biases, changed gradients below the original
    ones. Every row beyond a threshold or without a gradient is marked, also inside a chain. The thresholds are ratios,
    so they are not drawn among absolute values. The figure is none of pyplot's: nothing has to be closed, and no
    setting of matplotlib changes.

    Args:
        report: The result of `layer_gradients`.
        findings: The result of `diagnose_gradients`; None draws none.
        title: The first line, such as the name of the model.
        weights: Label of the weights, written beside the title; random weights are red.
        lines: Lines below the title, such as totals.
        thresholds: Thresholds of the marked rows.

    Example:
        >>> import torch
        >>> from hookscope import diagnose_gradients, layer_gradients
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
        >>> report = layer_gradients(net, torch.rand(1, 3, 8, 8))
        >>> figure = plot_gradients(report, diagnose_gradients(report), "a net")
        >>> [axes.texts[0].get_text() for axes in figure.axes]
        ['gradient of the activations', 'gradient of the weights', 'gradient of the biases']
    """
    rows = _rows(report)
    outputs = [(at, row.layer.grad_output) for at, row in enumerate(rows) if row.layer is not None]
    sizes = [(at, size) for at, size in outputs if size is not None]
    lost = [at for at, size in outputs if size is None]
    panels = [_Panel("gradient of the activations", sizes, [], lost, [])] if outputs or not rows else []
    for name, which in (("gradient of the weights", "weights"), ("gradient of the biases", "biases")):
        if any(getattr(row, which) for row in rows):
            panels.append(_of_parameters(name, rows, which))
    marked = _marked(rows, report.parameters, findings or (), thresholds)
    types = {row.layer.call.key: row.layer.call.type for row in rows if row.layer is not None}
    said = findings and with_types(findings, types)
    with plain_settings():
        figure = page_of_rows(
            [row.label for row in rows],
            {panel.title: _WIDEST / len(panels) for panel in panels},
            title,
            [*((line, Colour.INK) for line in lines), *finding_lines(said)],
            marked,
            weights=weights,
            legend=_legend(panels, len(rows), bool(marked)),
        )
        for panel, axes in zip(panels, figure.axes, strict=True):
            _draw(axes, panel)
    return figure


def _rows(report: GradientReport) -> list[_Row]:
    """Calls in order of execution, each followed by the unselected layers that were registered after it."""
    by_layer: dict[str, list[ParameterGradient]] = {}
    for parameter in report.parameters:
        by_layer.setdefault(parameter.layer, []).append(parameter)
    called = {layer.call.name for layer in report.layers}
    following: dict[str, list[str]] = {"": []}
    last = ""
    for name in by_layer:
        last = name if name in called else last
        following.setdefault(last, []).extend([] if name in called else [name])
    types = {parameter.layer: parameter.type for parameter in report.parameters}
    rows = [_Row(layer_label(name, types[name]) or "(model)", name) for name in following.pop("")]
    for layer in report.layers:
        label = layer_label(layer.call.key, layer.call.type) or layer.call.type
        rows.append(_Row(label, layer.call.name, layer))
        rows += [_Row(layer_label(name, types[name]), name) for name in following.pop(layer.call.name, [])]
    for row in rows:
        for parameter in by_layer.pop(row.name, []):  # a layer that ran twice shows them in its first row
            kind = row.biases if parameter.name.rpartition(".")[2].endswith("bias") else row.weights
            kind.append(parameter)
    return rows


def _of_parameters(title: str, rows: Sequence[_Row], which: str) -> _Panel:
    """The gradients before and after a change; ``after`` has only changed gradients."""
    own: list[tuple[int, ParameterGradient]] = [(at, p) for at, row in enumerate(rows) for p in getattr(row, which)]
    return _Panel(
        title,
        [(at, p.gradient) for at, p in own if p.gradient is not None],
        [(at, p.after) for at, p in own if p.after is not None and p.after != p.gradient],
        [at for at, p in own if p.gradient is None and not p.frozen],
        [at for at, p in own if p.frozen],
    )


def _marked(
    rows: Sequence[_Row],
    parameters: Sequence[ParameterGradient],
    findings: Sequence[Finding],
    thresholds: GradientThresholds | None,
) -> dict[int, str]:
    """The names of the findings of each row, with the reason if a finding names the row."""
    marks: dict[int, list[str]] = {}
    for at, row in enumerate(rows):
        names = [] if row.layer is None else list(layer_finding_names(row.layer, parameters, thresholds))
        names += [name for p in (*row.weights, *row.biases) for name in parameter_finding_names(p, thresholds)]
        marks[at] = [_with_reason(name, row) for name in dict.fromkeys(names)]
    places = {row.name: at for at, row in reversed(list(enumerate(rows)))}
    keys = {row.layer.call.key or row.layer.call.type: at for at, row in enumerate(rows) if row.layer is not None}
    for finding in single(findings):
        at = keys.get(finding.layer, places.get(finding.layer.partition("#")[0], -1))
        if at >= 0:
            why = finding.numbers.get("reason")
            mark = f"{finding.finding}: {why}" if why else finding.finding
            if not any(words.startswith(mark) for words in marks[at]):
                marks[at] = [words for words in marks[at] if words != finding.finding] + [mark]
    return {at: ", ".join(dict.fromkeys(words)) for at, words in marks.items() if words}


def _with_reason(name: str, row: _Row) -> str:
    if name != "no-gradient" or not any(p.frozen for p in (*row.weights, *row.biases)):
        return name
    lost = row.layer is not None and row.layer.grad_output is None
    return f"{name}: frozen and cut off" if lost else f"{name}: frozen"


def _draw(axes: Axes, panel: _Panel) -> None:
    before, after = panel.before, panel.after
    left, right = _limits([size for _, size in [*before, *after]])
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    set_ticks(axes, decades(left, right))
    high, low = (_ABOVE, _BELOW) if after else (0.0, _BELOW)
    _spans(axes, before, high, Colour.BLUE, Colour.SKY)
    _spans(axes, after, low, Colour.ORANGE, "#f3d28a")
    for (_, marker, style), at in _marks(panel).items():
        x = right if marker == ">" else left
        axes.plot([x] * len(at), at, marker=marker, clip_on=False, linestyle="none", zorder=6, **dict(style))


def _marks(panel: _Panel) -> dict[_Mark, list[float]]:
    """The rows of each mark that is drawn, shifted where there are gradients before and after a change."""

    def is_zero(size: GradientSize) -> bool:
        return size.max_abs == 0 and not size.nan and not size.inf

    high = _ABOVE if panel.after else 0.0
    rows: dict[_Mark, Sequence[float]] = {
        _LOST: panel.lost,
        _FROZEN: panel.frozen,
        _ZERO: [at + high for at, size in panel.before if is_zero(size)],
        _ZEROED: [at + _BELOW for at, size in panel.after if is_zero(size)],
        _SPOILED: [at for at, size in panel.before if size.nan or size.inf],
    }
    return {mark: sorted(set(at)) for mark, at in rows.items() if at}


def _spans(axes: Axes, sizes: _Sizes, shift: float, dark: str, light: str) -> None:
    """A dot at the mean absolute value and a line to the largest."""
    known = [(at + shift, size) for at, size in sizes if size.max_abs > 0]
    if not known:
        return
    at = [place for place, _ in known]
    least = _least([size for _, size in sizes])
    means = [max(size.mean_abs, least) for _, size in known]
    largest = [max(size.max_abs, least) for _, size in known]
    axes.hlines(at, means, largest, colors=light, linewidth=1.6, zorder=2)
    axes.plot(largest, at, "|", ms=4, color=dark, mew=1.0, zorder=3)
    axes.plot(means, at, "o", ms=2.8, color=dark, zorder=4)


def _limits(sizes: Sequence[GradientSize]) -> tuple[float, float]:
    values = [value for size in sizes for value in (size.mean_abs, size.max_abs) if value > 0]
    if not values:
        return 1e-3, 1.0
    most, least = max(values), _least(sizes)
    beside = max(math.log10(1.8), 0.05 * math.log10(most / least))  # in decades, so that no dot touches the frame
    return least / 10**beside, most * 10**beside


def _least(sizes: Sequence[GradientSize]) -> float:
    values = [value for size in sizes for value in (size.mean_abs, size.max_abs) if value > 0]
    return max(min(values), max(values) * 10.0**-_MOST_DECADES)


def _legend(panels: Sequence[_Panel], rows: int, marked: bool) -> list[str]:
    """What is drawn."""
    sizes = any(size.max_abs > 0 for panel in panels for _, size in panel.before)
    words = ["absolute values on a log scale: dot mean, line to the largest"] if sizes else []
    words += ["blue before, orange after the change"] if any(panel.after for panel in panels) else []
    words += ["coloured rows have a finding"] if marked else []
    marks = list(dict.fromkeys(mark for panel in panels for mark in _marks(panel)))
    keys = [text for text, *_ in marks]
    if any(len({at for at, _ in panel.before} | {*panel.lost, *panel.frozen}) < rows for panel in panels):
        keys.append("blank: no such parameter, the layer did not run, or its first call shows it")
    return [line for line in ("; ".join(words), "   ".join(keys)) if line]
