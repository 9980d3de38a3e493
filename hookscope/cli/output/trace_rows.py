"""The rows of ``trace``: calls and events, and small tensors whole."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hookscope import hooks, tracing
from hookscope.cli.output.formats import terminal_columns
from hookscope.cli.output.report import Columns, Row, Section, call_row

FIELDS = (
    "index", "name", "type", "call", "order", "input_shape", "input_dtype", "input_min", "input_max", "output_shape",
    "output_dtype", "output_min", "output_max", "output_nonfinite", "weights", "input_values", "output_values",
)  # fmt: skip
EVENT_FIELDS = (
    "number", "event", "index", "name", "type", "call", "order", "depth", "shape", "dtype", "min", "max", "nonfinite",
    "weights", "values",
)  # fmt: skip
# a table has the call in the name, the depth as an indent of the name, and the values below
_NOT_IN_A_TABLE = ("call", "depth", "weights", "values", "input_values", "output_values")
_LEAST_NEEDED = (
    {"input_dtype", "output_dtype"}, {"type"}, {"input_min", "input_max"}, {"input_shape"}, {"dtype"}, {"shape"},
)  # fmt: skip


def section(record: tracing.PassRecord, weights: str, events: bool, values: bool, totals: Iterable[str]) -> Section:
    """The calls of a pass, or its ``events``, with or without the fields of ``values``."""
    fields = [name for name in (EVENT_FIELDS if events else FIELDS) if values or not name.endswith("values")]
    if events:
        rows = [
            call_row(fields, event.call, event, **_columns(event.tensors, ""), weights=weights)
            for event in record.events
        ]
    else:
        both = [(call, _columns(call.input, "input_") | _columns(call.output, "output_")) for call in record.calls]
        rows = [call_row(fields, call.call, **columns, weights=weights) for call, columns in both]
    return Section(
        rows,
        fields,
        columns=Columns(
            [name for name in fields if name not in _NOT_IN_A_TABLE and not (events and name in ("index", "order"))],
            only_with_values=("output_nonfinite", "nonfinite"),
            only_if_known=("index", "order"),
            only_if_varied=("input_dtype", "output_dtype", "dtype"),
            least_needed=_LEAST_NEEDED,
        ),
        totals=totals,
        for_table=_for_table,
        as_json=[name for name in fields if name.endswith("values")],
    )


def _columns(facts: tracing.Facts, prefix: str) -> dict[str, Any]:
    """The facts of a tensor; for several tensors each column maps parts to facts."""
    row: dict[str, Any] = {f"{prefix}nonfinite": sum(tensor.nonfinite for tensor in facts.values()) if facts else None}
    for name in ("shape", "dtype", "min", "max", "values"):
        parts = {part: getattr(tensor, name) for part, tensor in facts.items()}
        row[prefix + name] = parts[""] if "" in parts else parts or None
    return row


def tensors_left_out(record: tracing.PassRecord, backward: bool) -> int:
    """The number of tensors that are too large to be shown whole."""
    kinds = [[call.input, call.output, call.gradient if backward else {}] for call in record.calls]
    return sum(tensor.values is None for facts in kinds for parts in facts for tensor in parts.values())


def _for_table(row: Row) -> Row:
    cells = {name: _merged_cell(name.rpartition("_")[2], value) for name, value in row.items()}
    return {**cells, "name": "  " * row.get("depth", 0) + hooks.call_key(row["name"], row["call"])}


def _merged_cell(fact: str, value: Any) -> Any:
    """One cell for several tensors: the first shape, all types, the widest range."""
    if not isinstance(value, Mapping):
        return value
    facts = [part for part in value.values() if part is not None]
    if fact == "shape":
        part, shape = next(iter(value.items()))
        more = f" +{len(value) - 1} more" if len(value) > 1 else ""
        return f"{part}:{_size(shape)}{more}"
    if fact == "dtype":
        return " ".join(dict.fromkeys(facts))
    return (min if fact == "min" else max)(facts, default=None)


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "one value"


def value_lines(record: tracing.PassRecord, events: bool) -> Iterator[str]:
    """The small tensors whole, each under a line with its call or event, for a table."""
    columns = terminal_columns(sys.stdout)
    for title, facts in _titles(record, events):
        for part, tensor in facts.items():
            if tensor.values is not None:
                yield f"{title}{f' {part}' if part else ''}  {_size(tensor.shape)}"
                yield from (f"  {line}".rstrip() for line in _array(tensor, columns - 2))


def _titles(record: tracing.PassRecord, events: bool) -> Iterator[tuple[str, tracing.Facts]]:
    if events:
        for event in record.events:
            yield f"{event.number} {event.event} {event.call.key or hooks.MODEL} {event.call.type}", event.tensors
        return
    for call in record.calls:
        name = f"{call.call.key or hooks.MODEL} {call.call.type}"
        yield f"{name} input", call.input
        yield f"{name} output", call.output


def _array(tensor: tracing.TensorSummary, columns: int) -> list[str]:
    import numpy as np

    array = np.array(tensor.values)
    # numbers of lower precision would show noise digits in double precision
    array = array.astype(np.float32) if array.dtype == np.float64 and tensor.dtype != "float64" else array
    return np.array2string(array, max_line_width=columns, threshold=array.size + 1).splitlines()
