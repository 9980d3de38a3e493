"""The fields of rows, which commands print and pages show. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hookscope.hooks import MODEL

if TYPE_CHECKING:
    from hookscope.training import Run

Row = Mapping[str, Any]

STATISTICS_FIELDS = (
    "index", "name", "type", "call", "order", "part", "calls", "shape", "images", "mean", "std", "min", "max", "min_at",
    "max_at", "rms", "zeros", "p1", "p5", "p25", "p50", "p75", "p95", "p99", "nan", "inf", "channels", "dead",
    "saturated", "duplicate", "rank", "findings", "weights",
)  # fmt: skip
# too long for a column
NESTED_STATISTICS_FIELDS = ("dead_channels", "duplicate_channels", "nonfinite_at")
WEIGHTS_FIELDS = (
    "name", "type", "shape", "mean", "std", "min", "max", "norm", "zeros", "nan", "inf", "filters", "filter_norm_min",
    "filter_norm_mean", "filter_norm_max", "dead", "duplicate", "collapsed", "updated", "findings", "weights",
)  # fmt: skip
NESTED_WEIGHTS_FIELDS = (
    "layer",
    "buffer",
    "dead_filters",
    "duplicate_filters",
    "collapsed_channels",
    "first_nonfinite",
)
GRADIENT_FIELDS = (
    "index", "name", "type", "call", "order", "grad_output", "grad_output_norm", "grad_input", "grad_input_norm",
    "mean_abs", "zeros", "nan", "inf", "ratio", "findings", "weights",
)  # fmt: skip
PARAMETER_GRADIENT_FIELDS = (
    "name", "type", "shape", "norm", "mean_abs", "max_abs", "zeros", "nan", "inf", "ratio", "norm_after", "frozen",
    "findings", "weights",
)  # fmt: skip
_NO_METRICS = ("row", "loss", "passes", "learning_rate")  # in the line of a layer


def row_of(fields: Iterable[str], *sources: Any, **values: Any) -> Row:
    """A row with ``fields`` in their order: each from ``values``, else from the first source that has it, else None."""

    def value(name: str) -> Any:
        return next((getattr(source, name) for source in sources if hasattr(source, name)), None)

    return {name: values[name] if name in values else value(name) for name in fields}


def call_row(fields: Iterable[str], call: Any, *sources: Any, **values: Any) -> Row:
    """A row of a `Call` or a `LayerCall`, whose ``name`` can be given to ``--layer``: the model itself has one too."""
    return row_of(fields, call, *sources, **{"name": call.name or MODEL, **values})


def last_rows(run: Run) -> list[Row]:
    """The metrics of each layer call at the last step in which it ran, in order of execution."""
    last = {(row.get("model"), row.get("layer"), row.get("call")): row for row in run.rows}
    rows = [{name: value for name, value in row.items() if name not in _NO_METRICS} for row in last.values()]
    return sorted(rows, key=_place_in_run)


def _place_in_run(row: Row) -> tuple[int, int]:
    order = row.get("order")
    return row.get("model") or 0, (row.get("index") or 0) if order is None else order  # old logs have no order
