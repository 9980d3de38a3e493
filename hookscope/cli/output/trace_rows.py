"""The rows of ``trace``: calls and events, and small tensors whole."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hookscope import hooks, tracing
from hookscope.cli.output.formats import terminal_columns
from hookscope.cli.output.report import Section
from hookscope.columns import Column, Columns, Row
from hookscope.hooks import CALL

_BASE = CALL.but(call={"where": "rows", "hide": ""}, order={"hide": "unknown"})
CALLS = Columns(
    *_BASE.but(type={"need": 2}),
    Column("input_shape", need=4),
    Column("input_dtype", need=1, hide="same"),
    Column("input_min", need=3),
    Column("input_max", need=3),
    Column("output_shape"),
    Column("output_dtype", need=1, hide="same"),
    Column("output_min"),
    Column("output_max"),
    Column("output_nonfinite", hide="zero"),
    Column("weights", where="rows"),
    Column("input_values", where="rows", as_json=True),
    Column("output_values", where="rows", as_json=True),
)
EVENTS = Columns(
    Column("number"),
    Column("event"),
    *_BASE.but(type={"need": 2}, index={"where": "rows"}, order={"where": "rows"}),
    Column("depth", where="rows"),
    Column("shape", need=6),
    Column("dtype", need=5, hide="same"),
    Column("min"),
    Column("max"),
    Column("nonfinite", hide="zero"),
    Column("weights", where="rows"),
    Column("values", where="rows", as_json=True),
)


def section(record: tracing.PassRecord, weights: str, events: bool, values: bool, totals: Iterable[str]) -> Section:
    """The calls of a pass, or its ``events``, with or without the fields of ``values``."""
    columns = EVENTS if events else CALLS
    columns = columns if values else columns.but(*(name for name in columns.flat if name.endswith("values")))
    if events:
        rows = [columns.row(event, **_numbers(event.tensors, ""), weights=weights) for event in record.events]
    else:
        both = [(call, _numbers(call.input, "input_") | _numbers(call.output, "output_")) for call in record.calls]
        rows = [columns.row(call, **numbers, weights=weights) for call, numbers in both]
    return Section(rows, columns, totals=totals, for_table=_for_table)


def _numbers(facts: tracing.Facts, prefix: str) -> dict[str, Any]:
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
