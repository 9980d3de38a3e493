"""Gradients of activations, weights and biases on one page, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookscope.drawing import Colour, Mark, Panel, RowPlot, finding_lines, layer_label, row_plot, with_types
from hookscope.findings import Finding, single
from hookscope.gradients.backward_pass import GradientReport, LayerGradient, ParameterGradient
from hookscope.gradients.findings import GradientThresholds, is_spoiled, layer_finding_names, parameter_finding_names
from hookscope.hooks import GradientSize

_MOST_DECADES = 40  # smaller values are drawn at the edge
_WIDEST = 8.7  # inches, all panels together
_ABOVE, _BELOW = -0.18, 0.22  # of the middle of a row: the gradient before and after a change
_AFTER_LIGHT = "#f3d28a"


@dataclass
class _GradientRow:
    """One row of the page: a layer call, or a layer with parameters that was not selected."""

    label: str
    name: str
    layer: LayerGradient | None = None
    weights: list[ParameterGradient] = field(default_factory=list)
    biases: list[ParameterGradient] = field(default_factory=list)

    def gradients(self, which: str) -> list[_Gradient]:
        if which == "activations":
            return [_Gradient(self.layer.grad_output)] if self.layer is not None else []
        return [
            _Gradient(p.gradient, p.after if p.after != p.gradient else None, p.frozen) for p in getattr(self, which)
        ]


@dataclass
class _Gradient:
    """What a mark is drawn of: ``after`` is a changed gradient."""

    before: GradientSize | None
    after: GradientSize | None = None
    frozen: bool = False


def gradients_plot(
    report: GradientReport, findings: Sequence[Finding] | None = None, thresholds: GradientThresholds | None = None
) -> RowPlot:
    """A row for each layer in order of execution: mean and largest gradient, on a logarithmic scale.

    Panels: gradients of the layer outputs, of the weights and of the biases, changed gradients below the original
    ones. Every row beyond one of the ``thresholds`` or without a gradient is marked, also inside a chain. The
    thresholds are ratios, so they are not drawn among absolute values.
    """
    rows = _rows(report)
    kinds = [which for which in ("activations", "weights", "biases") if any(row.gradients(which) for row in rows)]
    kinds = kinds or ["activations"]
    panels = [gradient_panel(which, rows, _WIDEST / len(kinds)) for which in kinds]
    marked = _marked(rows, report.parameters, findings or (), thresholds)
    types = {row.layer.call.key: row.layer.call.type for row in rows if row.layer is not None}
    said = findings and with_types(findings, types)
    own = [gradient for row in rows for which in kinds for gradient in row.gradients(which)]
    drawn = any(gradient.before is not None and gradient.before.max_abs > 0 for gradient in own)
    words = ["absolute values on a log scale: dot mean, line to the largest"] if drawn else []
    words += ["blue before, orange after the change"] if any(gradient.after for gradient in own) else []
    words += ["coloured rows have a finding"] if marked else []
    blank = any(not row.gradients(which) for row in rows for which in kinds)
    return row_plot(
        rows,
        panels,
        [row.label for row in rows],
        marked,
        finding_lines(said),
        legend=["; ".join(words)] if words else [],
        keys=["blank: no such parameter, the layer did not run, or its first call shows it"] if blank else [],
    )


def gradient_panel(which: str, rows: Sequence[_GradientRow], width: float) -> Panel:
    """The gradients of the ``activations``, ``weights`` or ``biases``: changed ones below the original ones."""
    high = _ABOVE if any(gradient.after for row in rows for gradient in row.gradients(which)) else 0.0

    def each(value: Callable[[_Gradient], Any]) -> Callable[[_GradientRow], Any]:
        return lambda row: [value(gradient) for gradient in row.gradients(which)]

    def at_edge(holds: Callable[[_Gradient], Any]) -> Callable[[_GradientRow], Any]:
        return lambda row: any(map(holds, row.gradients(which)))

    def sizes(side: str, dark: str, light: str, shift: float) -> list[Mark]:
        def ends(gradient: _Gradient) -> tuple[float, float] | None:
            size: GradientSize | None = getattr(gradient, side)
            return (size.mean_abs, size.max_abs) if size and size.max_abs > 0 else None

        return [
            Mark("line", each(ends), light, "", 1.6, shift),
            Mark("tick", each(lambda gradient: (ends(gradient) or (None, None))[1]), dark, "", 4.0, shift),
            Mark("dot", each(lambda gradient: (ends(gradient) or (None, None))[0]), dark, "", 2.8, shift),
        ]

    missing = at_edge(lambda g: g.before is None and not g.frozen)
    zero, zero_after = at_edge(lambda g: _is_zero(g.before)), at_edge(lambda g: _is_zero(g.after))
    marks = [
        *sizes("before", Colour.BLUE, Colour.SKY, high),
        *sizes("after", Colour.ORANGE, _AFTER_LIGHT, _BELOW),
        Mark("left", missing, Colour.INK, "× no gradient arrives", marker="x"),
        Mark("left", at_edge(lambda g: g.frozen), Colour.GREEN, "□ frozen", marker="s"),
        Mark("left", zero, Colour.ALARM, "◂ red: 0 everywhere", 0, high, "<"),
        Mark("left", zero_after, Colour.ORANGE, "◂ orange: 0 after the change", 0, _BELOW, "<"),
        Mark("right", at_edge(lambda g: is_spoiled(g.before)), Colour.ALARM, "▸ red: NaN or Inf", marker=">"),
    ]
    return Panel(f"gradient of the {which}", width, marks, "log", decades=_MOST_DECADES)


def _is_zero(size: GradientSize | None) -> bool:
    return size is not None and size.max_abs == 0 and not is_spoiled(size)


def _rows(report: GradientReport) -> list[_GradientRow]:
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
    rows = [_GradientRow(layer_label(name, types[name]) or "(model)", name) for name in following.pop("")]
    for layer in report.layers:
        label = layer_label(layer.call.key, layer.call.type) or layer.call.type
        rows.append(_GradientRow(label, layer.call.name, layer))
        rows += [_GradientRow(layer_label(name, types[name]), name) for name in following.pop(layer.call.name, [])]
    for row in rows:
        for parameter in by_layer.pop(row.name, []):  # a layer that ran twice shows them in its first row
            kind = row.biases if parameter.name.rpartition(".")[2].endswith("bias") else row.weights
            kind.append(parameter)
    return rows


def _marked(
    rows: Sequence[_GradientRow],
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


def _with_reason(name: str, row: _GradientRow) -> str:
    if name != "no-gradient" or not any(p.frozen for p in (*row.weights, *row.biases)):
        return name
    lost = row.layer is not None and row.layer.grad_output is None
    return f"{name}: frozen and cut off" if lost else f"{name}: frozen"
