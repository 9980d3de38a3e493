"""Show what each layer call takes and returns."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hookscope import hooks, scores, tracing
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section, note, terminal_columns
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.subject import OfImage
from hookscope.columns import Column, Columns, Row
from hookscope.findings import counted, listed, operations_in_words

_BASE = hooks.CALL.but(call={"where": "rows", "hide": ""}, order={"hide": "unknown"})
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


class Trace(OfImage):
    """Show what each layer call of MODEL takes and returns on IMAGE.

    \b
    Examples:
      hookscope trace resnet18 cat.jpg
      hookscope trace vgg16 cat.jpg --layer 'features.*' --format ndjson
      hookscope trace resnet18 cat.jpg --ops --layer 'layer1.0*'
      hookscope trace resnet18 cat.jpg --events --type BasicBlock --type ReLU --target tabby
      hookscope trace nets.py:ones tiny.png --preprocess none --values --events
      hookscope trace raft_small first.png second.png --layer 'feature_encoder*'

    IMAGE is one file, or - for standard input; optical flow takes two. The command runs one forward pass in eval mode.
    It prints a row for each call of the chosen layers, in order of execution, with the shape, type and range of its
    input and output. These are the values before a later layer overwrites them in place.

    Ranges are over the finite values; output_nonfinite counts NaN and Inf. A quantized tensor has the range of the
    numbers that it represents. A field about several tensors has one value for each.

    \b
    With --events a backward pass follows. A row for each event, from 0:
      pre-hook  the call is about to run: its inputs
      forward   the call has returned: its outputs
      backward  the gradient of the output is computed: that gradient

    depth is the number of chosen calls around a call; a table indents the name instead. The backward pass starts at the
    score of the class --target, or in models without classes at the mean square of all outputs. Calls without a
    gradient have no backward event; a note says how many.

    With --values, a table is followed by the small tensors as arrays. json and ndjson have the fields input_values and
    output_values, or values with --events: nested numbers, and null for larger tensors. In tsv and csv these fields
    hold JSON.

    A table leaves out columns that are empty, are constant or do not fit the terminal. Other formats have all columns.
    """

    layers: hooks.Selection | None = shared.calls_option("Calls to show", "all; with --events '*', every module")
    types: tuple[str, ...] = shared.type_option()
    ops: bool | None = shared.ops_option()
    events: bool = option("Print a row for each event: each hook as it runs.")
    target: scores.Target = shared.target_option(
        "With --events, the class whose score is differentiated", needs="events"
    )
    categories: tuple[str, ...] | None = shared.categories_option(needs="events")
    values: bool = option("Show small tensors whole.")
    max_values: int = option("With --values, show tensors of at most N values.", default=64, needs="values")

    def run(self) -> None:
        net, categories = self.net, shared.categories_of(self.net, self.categories)
        loss = None  # the model's output decides
        if shared.was_given("target"):
            scores.check_family(net.family, net.name)
            self.target.check(categories)
            loss = scores.Loss("score", self.target, categories)
        usual = "*" if self.events and not self.types else "all"
        with self.running():
            record = tracing.trace_events(
                net,
                self.arguments,
                self.layers or usual,
                self.types or None,
                backward=self.events,
                loss=loss,
                values=self.max_values if self.values else 0,
                ops=bool(self.ops),
            )
        totals = _totals(record, categories, self)
        _note_the_rest(record, self)
        columns = EVENTS if self.events else CALLS
        columns = columns if self.values else columns.but(*(name for name in columns.flat if name.endswith("values")))
        if self.events:
            rows = [columns.row(event, **_numbers(event.tensors, ""), weights=net.weights) for event in record.events]
        else:
            both = [(call, _numbers(call.input, "input_") | _numbers(call.output, "output_")) for call in record.calls]
            rows = [columns.row(call, **numbers, weights=net.weights) for call, numbers in both]
        self.print(Report([Section(rows, columns, totals=totals, for_table=_for_table)], caption=self.caption))


def _totals(record: tracing.PassRecord, categories: Sequence[str] | None, options: Trace) -> Iterator[str]:
    """The lines under a table: the small tensors, then the passes."""
    if options.values:
        yield from value_lines(record, options.events)
        yield ""
    calls = counted(len(record.calls), "call")
    yield calls + (f", {counted(len(record.events), 'event')}" if options.events else "")
    if record.value is not None:
        labels = [scores.class_label(target.index, categories) or "" for target in record.targets]
        names = [f"{target.index} {label}".strip() for target, label in zip(record.targets, labels, strict=True)]
        what = f"score of class {', '.join(names)}" if names else "mean square of the output"
        yield f"backward from {what}: {record.value:.4g}"


def _note_the_rest(record: tracing.PassRecord, options: Trace) -> None:
    """Report layers, gradients and tensors that have no row."""
    if options.layers is None and (words := operations_in_words(record.operations)):
        note(f"Note: not shown: {words}; --ops shows them")
    if idle := record.did_not_run:
        note(f"Note: {counted(len(idle), 'chosen layer')} did not run: {listed(idle, 3)}")
    if options.events and record.without_backward:
        note(f"Note: no backward pass: {record.without_backward}")
    elif options.events and record.unreached:
        keys = [call.key or hooks.MODEL for call in record.unreached]
        have = "has" if len(keys) == 1 else "have"
        note(f"Note: {counted(len(keys), 'call')} {have} no gradient and no backward event: {listed(keys, 3)}")
    kinds = [[call.input, call.output, call.gradient if options.events else {}] for call in record.calls]
    larger = sum(tensor.values is None for facts in kinds for parts in facts for tensor in parts.values())
    if options.values and larger:
        what = f"left out {counted(larger, 'tensor')} with more than {options.max_values} values"
        note(f"Note: {what}; --max-values shows larger tensors")


def _numbers(facts: tracing.Facts, prefix: str) -> dict[str, Any]:
    """The facts of a tensor; for several tensors each column maps parts to facts."""
    row: dict[str, Any] = {f"{prefix}nonfinite": sum(tensor.nonfinite for tensor in facts.values()) if facts else None}
    for name in ("shape", "dtype", "min", "max", "values"):
        parts = {part: getattr(tensor, name) for part, tensor in facts.items()}
        row[prefix + name] = parts[""] if "" in parts else parts or None
    return row


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
