"""The rows of ``gradients``: layers and parameters, and the lines under their tables."""

from __future__ import annotations

from collections.abc import Sequence

from hookscope import gradients
from hookscope.cli.output.report import Columns, Row, Section, call_row, row_of
from hookscope.findings import counted

FIELDS = (
    "index", "name", "type", "call", "order", "grad_output", "grad_output_norm", "grad_input", "grad_input_norm",
    "mean_abs", "zeros", "nan", "inf", "ratio", "findings", "weights",
)  # fmt: skip
PARAMETER_FIELDS = (
    "name", "type", "shape", "norm", "mean_abs", "max_abs", "zeros", "nan", "inf", "ratio", "norm_after", "frozen",
    "findings", "weights",
)  # fmt: skip
_ONLY_WITH_VALUES = ("call", "nan", "inf", "frozen", "findings")
_LEAST_NEEDED = [[name] for name in ("mean_abs", "max_abs", "grad_output", "shape", "grad_input_norm", "zeros")]


def sections(
    report: gradients.GradientReport, thresholds: gradients.GradientThresholds, weights: str, flat_parameters: bool
) -> list[Section]:
    """The layers and the parameters; ``flat_parameters`` says which of them tsv and csv hold."""
    layer_columns = Columns(
        [name for name in FIELDS if name not in ("type", "grad_input", "weights")],
        _ONLY_WITH_VALUES,
        only_if_known=("index",),
        least_needed=_LEAST_NEEDED,
    )
    parameter_columns = Columns(
        [name for name in PARAMETER_FIELDS if name not in ("type", "mean_abs", "weights")],
        _ONLY_WITH_VALUES,
        only_if_known=("norm_after",),
        least_needed=_LEAST_NEEDED,
    )
    layers = [_layer_row(layer, report.parameters, thresholds, weights) for layer in report.layers]
    parameters = [_parameter_row(parameter, thresholds, weights) for parameter in report.parameters]
    return [
        Section(layers, FIELDS, "layer", columns=layer_columns, in_flat=not flat_parameters),
        Section(parameters, PARAMETER_FIELDS, "parameter", columns=parameter_columns),
    ]


def _layer_row(
    layer: gradients.LayerGradient,
    parameters: Sequence[gradients.ParameterGradient],
    thresholds: gradients.GradientThresholds,
    weights: str,
) -> Row:
    """A layer call; findings of the layer's own parameters are in its row too."""
    return call_row(
        FIELDS,
        layer.call,
        layer.grad_output,
        grad_output=layer.output_shape,
        grad_output_norm=layer.grad_output and layer.grad_output.norm,
        grad_input=layer.input_shape,
        grad_input_norm=layer.grad_input and layer.grad_input.norm,
        ratio=layer.ratio,
        findings=gradients.layer_finding_names(layer, parameters, thresholds),
        weights=weights,
    )


def _parameter_row(
    parameter: gradients.ParameterGradient, thresholds: gradients.GradientThresholds, weights: str
) -> Row:
    after = parameter.after
    # without a finite value the norm is 0, as if no gradient were left
    is_known = after is not None and after.nan + after.inf != after.count
    return row_of(
        PARAMETER_FIELDS,
        parameter,
        parameter.gradient,
        norm_after=after.norm if after is not None and is_known else None,
        findings=gradients.parameter_finding_names(parameter, thresholds),
        weights=weights,
    )


def totals(report: gradients.GradientReport, loss: str, changes: Sequence[str]) -> list[str]:
    """The lines under the tables: the loss, and the total norm of all gradients before and after ``changes``."""
    of = ", ".join(f"{answer.index} {answer.label or ''}".strip() for answer in report.targets)
    lines = [f"{loss} of class {of}: {report.value:.4g}" if of else f"{loss}: {report.value:.4g}"]
    lines += [f"total norm of the gradients of {counted(len(report.parameters), 'parameter')}: {report.total_norm:.4g}"]
    if report.total_after is not None:
        lines[-1] += f"; after {', then '.join(changes)}: {report.total_after:.4g}"
    bad = sum(1 for p in report.parameters if p.gradient is not None and p.gradient.nan + p.gradient.inf)
    if bad:
        lines.append(f"NaN or Inf in the gradients of {counted(bad, 'parameter')}: norms are of the finite values")
    spread = sum(1 for p in report.parameters if p.after is not None and p.after.nan + p.after.inf)
    if spread > bad:
        lines.append(f"clipping by norm spreads NaN or Inf to {counted(spread, 'parameter')}, as in training")
    return lines
