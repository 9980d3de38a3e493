"""Rows of results: the fields that the commands print, and pages show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hookscope.findings import Finding, single
from hookscope.gradients import (
    GradientThresholds,
    LayerGradient,
    ParameterGradient,
    layer_finding_names,
    parameter_finding_names,
)
from hookscope.parameters import ParameterStatistics, ParameterThresholds, finding_names
from hookscope.report.row import (
    GRADIENT_FIELDS,
    NESTED_STATISTICS_FIELDS,
    NESTED_WEIGHTS_FIELDS,
    PARAMETER_GRADIENT_FIELDS,
    STATISTICS_FIELDS,
    WEIGHTS_FIELDS,
    Row,
    call_row,
    row_of,
)
from hookscope.statistics import QUANTILES, LayerStatistics, ValuePosition


def statistics_rows(layers: Sequence[LayerStatistics], findings: Sequence[Finding], weights: str) -> list[Row]:
    """A row for each layer call."""
    rows, names = list[Row](), dict[str, list[str]]()
    for finding in single(findings):
        names.setdefault(finding.layer, []).append(finding.finding)
    for layer in layers:
        rows.append(
            call_row(
                (*STATISTICS_FIELDS, *NESTED_STATISTICS_FIELDS),
                layer.call,
                layer,
                images=layer.items,
                min_at=_place(layer.low_at),
                max_at=_place(layer.high_at),
                **{f"p{100 * share:g}": layer.quantiles.get(share) for share in QUANTILES},
                dead=len(layer.dead_channels),
                duplicate=sum(len(group) - 1 for group in layer.duplicate_channels),
                findings=names.get(layer.key, []),
                weights=weights,
                nonfinite_at=_place(layer.nonfinite_at),
            )
        )
    return rows


def _place(place: ValuePosition | None) -> dict[str, Any] | None:
    return place and place._asdict()


def weights_row(row: ParameterStatistics, thresholds: ParameterThresholds, weights: str) -> Row:
    """A parameter, or a buffer of a BatchNorm."""
    duplicates = row.duplicate_filters
    return row_of(
        (*WEIGHTS_FIELDS, *NESTED_WEIGHTS_FIELDS),
        row,
        dead=None if row.dead_filters is None else len(row.dead_filters),
        duplicate=None if duplicates is None else sum(len(group) - 1 for group in duplicates),
        collapsed=None if row.collapsed is None else len(row.collapsed),
        collapsed_channels=row.collapsed,
        findings=finding_names(row, thresholds),
        weights=weights,
    )


def layer_gradient_row(
    layer: LayerGradient,
    parameters: Sequence[ParameterGradient],
    thresholds: GradientThresholds,
    weights: str,
) -> Row:
    """A layer call; findings of the layer's own parameters are in its row too."""
    return call_row(
        GRADIENT_FIELDS,
        layer.call,
        layer.grad_output,
        grad_output=layer.output_shape,
        grad_output_norm=layer.grad_output and layer.grad_output.norm,
        grad_input=layer.input_shape,
        grad_input_norm=layer.grad_input and layer.grad_input.norm,
        ratio=layer.ratio,
        findings=layer_finding_names(layer, parameters, thresholds),
        weights=weights,
    )


def parameter_gradient_row(parameter: ParameterGradient, thresholds: GradientThresholds, weights: str) -> Row:
    after = parameter.after
    # without a finite value the norm is 0, as if no gradient were left
    is_known = after is not None and after.nan + after.inf != after.count
    return row_of(
        PARAMETER_GRADIENT_FIELDS,
        parameter,
        parameter.gradient,
        norm_after=after.norm if after is not None and is_known else None,
        findings=parameter_finding_names(parameter, thresholds),
        weights=weights,
    )
