"""The rows of ``gradients``: layers and parameters, and the lines under their tables."""

from __future__ import annotations

from collections.abc import Sequence

from hookscope import gradients, report
from hookscope.cli.output.report import Columns, Section
from hookscope.findings import counted
from hookscope.report import GRADIENT_FIELDS as FIELDS, PARAMETER_GRADIENT_FIELDS as PARAMETER_FIELDS

_ONLY_WITH_VALUES = ("call", "nan", "inf", "frozen", "findings")
_LEAST_NEEDED = [[name] for name in ("mean_abs", "max_abs", "grad_output", "shape", "grad_input_norm", "zeros")]


def sections(
    measured: gradients.GradientReport, thresholds: gradients.GradientThresholds, weights: str, flat_parameters: bool
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
    layers = [report.layer_gradient_row(layer, measured.parameters, thresholds, weights) for layer in measured.layers]
    parameters = [report.parameter_gradient_row(parameter, thresholds, weights) for parameter in measured.parameters]
    return [
        Section(layers, FIELDS, "layer", columns=layer_columns, in_flat=not flat_parameters),
        Section(parameters, PARAMETER_FIELDS, "parameter", columns=parameter_columns),
    ]


def totals(measured: gradients.GradientReport, loss: str, changes: Sequence[str]) -> list[str]:
    """The lines under the tables: the loss, and the total norm of all gradients before and after ``changes``."""
    of = ", ".join(f"{answer.index} {answer.label or ''}".strip() for answer in measured.targets)
    lines = [f"{loss} of class {of}: {measured.value:.4g}" if of else f"{loss}: {measured.value:.4g}"]
    lines += [
        f"total norm of the gradients of {counted(len(measured.parameters), 'parameter')}: {measured.total_norm:.4g}"
    ]
    if measured.total_after is not None:
        lines[-1] += f"; after {', then '.join(changes)}: {measured.total_after:.4g}"
    bad = sum(1 for p in measured.parameters if p.gradient is not None and p.gradient.nan + p.gradient.inf)
    if bad:
        lines.append(f"NaN or Inf in the gradients of {counted(bad, 'parameter')}: norms are of the finite values")
    spread = sum(1 for p in measured.parameters if p.after is not None and p.after.nan + p.after.inf)
    if spread > bad:
        lines.append(f"clipping by norm spreads NaN or Inf to {counted(spread, 'parameter')}, as in training")
    return lines
