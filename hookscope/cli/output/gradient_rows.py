"""The rows of ``gradients``: layers and parameters, as columns and as tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hookscope.cli.output.table_width import fitting
from hookscope.findings import counted

if TYPE_CHECKING:
    from hookscope.gradients import GradientReport, GradientThresholds, LayerGradient, ParameterGradient
    from hookscope.hooks import GradientSize

FIELDS = (
    "index",
    "name",
    "type",
    "call",
    "grad_output",
    "grad_output_norm",
    "grad_input",
    "grad_input_norm",
    "mean_abs",
    "zeros",
    "nan",
    "inf",
    "ratio",
    "findings",
    "weights",
)
PARAMETER_FIELDS = (
    "name",
    "type",
    "shape",
    "norm",
    "mean_abs",
    "max_abs",
    "zeros",
    "nan",
    "inf",
    "ratio",
    "norm_after",
    "frozen",
    "findings",
    "weights",
)
_TABLE = (
    "index", "name", "call", "grad_output", "grad_output_norm", "grad_input_norm", "mean_abs", "zeros", "nan", "inf",
    "ratio", "findings",
)  # fmt: skip
_PARAMETER_TABLE = (
    "name", "shape", "norm", "max_abs", "zeros", "nan", "inf", "ratio", "norm_after", "frozen", "findings",
)  # fmt: skip
# of these a table has those on what there is; a norm_after of 0 is the very thing that was asked for
_UNUSUAL = ("call", "nan", "inf", "frozen", "findings")
_WHERE_KNOWN = ("index", "norm_after")
# which a table does without where it would be too wide, the first first
_LEAST_NEEDED = ("mean_abs", "max_abs", "grad_output", "shape", "grad_input_norm", "zeros")

Row = dict[str, Any]


def layer_row(
    layer: LayerGradient, parameters: Sequence[ParameterGradient], thresholds: GradientThresholds, weights: str
) -> Row:
    """A layer call; shapes are told also where no gradient arrives, for they are those of the activations.

    Args:
        layer: The call.
        parameters: Those of the model: what is wrong with the layer's own is told here too.
        thresholds: From where on something is a finding.
        weights: Which the model has.
    """
    from hookscope.gradients import layer_finding_names

    call, size, given = layer.call, layer.grad_output, layer.grad_input
    return {
        "index": call.index,
        "name": call.name,
        "type": call.type,
        "call": call.call,
        "grad_output": layer.output_shape,
        "grad_output_norm": size and size.norm,
        "grad_input": layer.input_shape,
        "grad_input_norm": given and given.norm,
        "mean_abs": size and size.mean_abs,
        "zeros": size and size.zeros,
        "nan": size and size.nan,
        "inf": size and size.inf,
        "ratio": layer.ratio,
        "findings": layer_finding_names(layer, parameters, thresholds),
        "weights": weights,
    }


def _known(size: GradientSize | None) -> float | None:
    """The norm, None where no value is finite: 0 would say that nothing is left."""
    return None if size is None or size.nan + size.inf == size.count else size.norm


def parameter_row(parameter: ParameterGradient, thresholds: GradientThresholds, weights: str) -> Row:
    """A parameter."""
    from hookscope.gradients import parameter_finding_names

    size = parameter.gradient
    return {
        "name": parameter.name,
        "type": parameter.type,
        "shape": parameter.shape,
        "norm": size and size.norm,
        "mean_abs": size and size.mean_abs,
        "max_abs": size and size.max_abs,
        "zeros": size and size.zeros,
        "nan": size and size.nan,
        "inf": size and size.inf,
        "ratio": parameter.ratio,
        "norm_after": _known(parameter.after),
        "frozen": parameter.frozen,
        "findings": parameter_finding_names(parameter, thresholds),
        "weights": weights,
    }


def table_fields(rows: Sequence[Row], parameters: bool, columns: int = 100) -> list[str]:
    """The columns of a table: few, those on what is unusual only where there is any, and no more than fit.

    Args:
        rows: All of the table.
        parameters: Whether they are of parameters, else of layers.
        columns: How many characters a line may have.
    """
    fields = list(_PARAMETER_TABLE if parameters else _TABLE)
    fields = [name for name in fields if name not in _UNUSUAL or any(row[name] for row in rows)]
    fields = [name for name in fields if name not in _WHERE_KNOWN or any(row[name] is not None for row in rows)]
    return fitting(rows, fields, [[name] for name in _LEAST_NEEDED], columns)


def totals(report: GradientReport, loss: str, done: Sequence[str]) -> list[str]:
    """The lines under the tables: which loss, how long all gradients are together, before and after.

    Args:
        report: What was measured.
        loss: Its name.
        done: What was done to the gradients, in order, in words.
    """
    of = ", ".join(f"{answer.index} {answer.label or ''}".strip() for answer in report.targets)
    lines = [f"{loss} of class {of}: {report.value:.4g}" if of else f"{loss}: {report.value:.4g}"]
    lines += [f"total norm of the gradients of {counted(len(report.parameters), 'parameter')}: {report.total_norm:.4g}"]
    if report.total_after is not None:
        lines[-1] += f"; after {', then '.join(done)}: {report.total_after:.4g}"
    bad = sum(1 for p in report.parameters if p.gradient is not None and p.gradient.nan + p.gradient.inf)
    if bad:
        lines.append(f"NaN or Inf in the gradients of {counted(bad, 'parameter')}: norms are of the finite values")
    spread = sum(1 for p in report.parameters if p.after is not None and p.after.nan + p.after.inf)
    if spread > bad:
        lines.append(f"clipping by norm carries them to {counted(spread, 'parameter')}, as it does in training")
    return lines
