"""The rows of ``trace``: calls and events as columns, as tables that fit a terminal, and small tensors whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hookscope.cli.output.rows import plain_json
from hookscope.cli.output.table_width import fitting
from hookscope.hooks import call_key

if TYPE_CHECKING:
    from hookscope.hooks import Call, Facts, TensorSummary
    from hookscope.tracing import CallRecord, Event, PassRecord

FIELDS = (
    "index", "name", "type", "call", "input_shape", "input_dtype", "input_min", "input_max", "output_shape",
    "output_dtype", "output_min", "output_max", "output_nonfinite", "weights", "input_values", "output_values",
)  # fmt: skip
EVENT_FIELDS = (
    "number", "event", "name", "type", "call", "depth", "shape", "dtype", "min", "max", "nonfinite", "weights",
    "values",
)  # fmt: skip
# in a table the name says which call it is, that of an event is indented, and values follow below
_NOT_IN_A_TABLE = ("call", "depth", "weights", "values", "input_values", "output_values")
_WHERE_THERE_IS_ONE = ("index", "output_nonfinite", "nonfinite")
_WHERE_THEY_DIFFER = ("input_dtype", "output_dtype", "dtype")
# which a table does without where it would be too wide, the first first
_LEAST_NEEDED = (
    {"input_dtype", "output_dtype"}, {"type"}, {"input_min", "input_max"}, {"input_shape"}, {"dtype"}, {"shape"},
)  # fmt: skip

Row = dict[str, Any]


def call_row(seen: CallRecord, weights: str, values: bool) -> Row:
    """A call: what went in and what came out.

    Args:
        seen: The call.
        weights: Which the model has.
        values: Whether the fields of values are wanted.
    """
    given, made = _columns(seen.input, "input_"), _columns(seen.output, "output_")
    del given["input_nonfinite"]
    row = {"index": seen.call.index, "name": seen.call.name, "type": seen.call.type, "call": seen.call.call}
    row |= {**given, **made, "weights": weights}
    return row | {"input_values": _values(seen.input), "output_values": _values(seen.output)} if values else row


def event_row(event: Event, weights: str, values: bool) -> Row:
    """An event: of what shape and range the tensors were that it brought."""
    call = event.call
    row = {"number": event.number, "event": event.event, "name": call.name, "type": call.type, "call": call.call}
    row |= {"depth": event.depth, **_columns(event.tensors, ""), "weights": weights}
    return row | {"values": _values(event.tensors)} if values else row


def _columns(facts: Facts, prefix: str) -> Row:
    row = {f"{prefix}{name}": _each(facts, name) for name in ("shape", "dtype", "min", "max")}
    return row | {f"{prefix}nonfinite": sum(one.nonfinite for one in facts.values()) if facts else None}


def _each(facts: Facts, name: str) -> Any:
    """One fact: of a bare tensor alone, of several ``{part: fact}``, of none None."""
    each = {part: getattr(one, name) for part, one in facts.items()}
    return each[""] if "" in each else each or None


def _values(facts: Facts) -> Any:
    return _each(facts, "values")


def left_out(record: PassRecord, backward: bool) -> int:
    """How many tensors of the rows are too large to be told whole."""
    kinds = [[seen.input, seen.output, seen.gradient if backward else {}] for seen in record.calls]
    return sum(one.values is None for facts in kinds for each in facts for one in each.values())


def as_text(row: Row) -> Row:
    """``row`` with the values as JSON in one text, for formats whose cells hold no lists."""
    told = {name: json.dumps(plain_json(row[name]), allow_nan=False) for name in row if name.endswith("values")}
    return {**row, **told}


def table(rows: Sequence[Row], fields: Sequence[str], columns: int) -> tuple[list[Row], list[str]]:
    """The rows and columns of a table: what is usual in no row, several parts as one, and no more than fits.

    Args:
        rows: All of the table.
        fields: Every column that there is.
        columns: How many characters a line may have.
    """
    shown = [_for_people(row) for row in rows]
    kept = [name for name in fields if name not in _NOT_IN_A_TABLE]
    kept = [name for name in kept if name not in _WHERE_THERE_IS_ONE or any(row[name] for row in shown)]
    if len({row[name] for row in shown for name in row if name in _WHERE_THEY_DIFFER} - {None}) < 2:
        kept = [name for name in kept if name not in _WHERE_THEY_DIFFER]
    kept = fitting(shown, kept, _LEAST_NEEDED, columns)
    return [{name: row[name] for name in kept} for row in shown], kept


def _for_people(row: Row) -> Row:
    told = {name: _together(name.rpartition("_")[2], value) for name, value in row.items()}
    return {**told, "name": "  " * row.get("depth", 0) + (call_key(row["name"], row["call"]) or "(model)")}


def _together(what: str, value: Any) -> Any:
    """What several parts have in common: of shapes the first, of types all, of ranges the widest."""
    if not isinstance(value, Mapping):
        return value
    known = [one for one in value.values() if one is not None]
    if what == "shape":
        part, shape = next(iter(value.items()))
        more = f" +{len(value) - 1} more" if len(value) > 1 else ""
        return f"{part}:{_size(shape)}{more}"
    if what == "dtype":
        return " ".join(dict.fromkeys(known))
    return (min if what == "min" else max)(known, default=None)


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "one value"


def value_lines(record: PassRecord, events: bool, columns: int) -> Iterator[str]:
    """The small tensors whole, each under a line that says whose it is, for a table.

    Args:
        record: What was seen.
        events: Whether the rows are events, else calls.
        columns: How many characters a line may have.
    """
    for whose, facts in _titled(record, events):
        for part, one in facts.items():
            if one.values is not None:
                yield f"{whose}{f' {part}' if part else ''}  {_size(one.shape)}"
                yield from (f"  {line}".rstrip() for line in _array(one, columns - 2))


def _titled(record: PassRecord, events: bool) -> Iterator[tuple[str, Facts]]:
    if events:
        for event in record.events:
            yield f"{event.number} {event.event} {_whose(event.call)}", event.tensors
        return
    for seen in record.calls:
        yield f"{_whose(seen.call)} input", seen.input
        yield f"{_whose(seen.call)} output", seen.output


def _whose(call: Call) -> str:
    return f"{call.key} {call.type}" if call.key else f"(model) {call.type}"


def _array(tensor: TensorSummary, columns: int) -> list[str]:
    import numpy as np

    array = np.array(tensor.values)
    # numbers of single precision and less show their noise when they are written as double ones
    array = array.astype(np.float32) if array.dtype == np.float64 and tensor.dtype != "float64" else array
    return np.array2string(array, max_line_width=columns, threshold=array.size + 1).splitlines()
