"""A plan: the verdict in a few lines, a row for each call, and the totals in one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hookscope import planning
from hookscope.cli.output.report import Report, Section
from hookscope.cli.output.table import MOST_WORDS, Page, wrapped
from hookscope.columns import Column, Columns
from hookscope.findings import counted, listed, percent
from hookscope.hooks import CALL

_PHASES = {"forward": "forward", "backward": "backward", "update": "optimizer"}  # field, and part of a step
_KINDS = ("parameters", "buffers", "gradients", "optimizer", "input", "saved", "temporary")


def _seconds(name: str, time_of: Callable[[Any], planning.Timing | None], **more: Any) -> list[Column]:
    """The median and the quartiles of a time."""

    def end(part: str) -> Callable[[Any], float | None]:
        return lambda fact: getattr(time_of(fact), part, None)

    ends = (Column(f"{name}_{part}", end(part), where="rows") for part in ("low", "high"))
    return [Column(name, end("median"), **more), *ends]


def _measured(name: str) -> Callable[[planning.Plan], Any]:
    return lambda found: getattr(found.measured, name, None)


def _sum(name: str) -> Column:
    return Column(name, lambda found: sum(getattr(call, name) for call in found.calls))


def _bytes(kind: str) -> Column:
    return Column(f"{kind}_bytes", lambda found: getattr(found.memory, kind))


COLUMNS = Columns(
    *CALL.but(
        index={"help": "index, name, type, call and order as in list-layers", "hide": ""},
        type={"need": 5},
        call={"where": "rows"},
        order={"where": "rows"},
    ),
    Column("input_shape", help="with the batch axis", where="rows"),
    Column("output_shape", help="likewise", need=6),
    Column("params", None, "parameters of the layer; if shared, at its first call", 3, "zero"),
    Column("macs", help="multiply-accumulates of the whole batch", need=9),
    Column("bytes_moved", help="inputs, outputs and parameters that are read or written", need=7),
    Column("saved", help="bytes kept for the backward pass that no earlier call keeps", hide="zero"),
    Column("bound", help="what limits the speed: memory or arithmetic", need=8),
    Column("receptive_field", help="in pixels, as in list-layers; stride likewise", need=2),
    Column("stride", need=1),
    Column("effective_field", None, "side of the effective receptive field, with --time", 4, "unknown"),
    *_seconds(
        "forward",
        lambda call: call.forward,
        help="seconds, with forward_low, forward_high; backward likewise",
        hide="unknown",
    ),
    *_seconds("backward", lambda call: call.backward, hide="unknown"),
)
TOTALS = Columns(
    *("model", "input_shape", "dtype", "device", "optimizer", "checkpointed"),
    *map(_sum, ("params", "macs", "bytes_moved")),
    *map(_bytes, (*_KINDS, "peak")),
    Column("peak_in", lambda found: found.memory.peak_in),
    Column("peak_call", lambda found: found.memory.peak_call),
    *("limit", "largest_batch", "real"),
    Column("measured_on", _measured("device")),
    Column("measured_saved", _measured("saved")),
    Column("measured_peak", _measured("peak")),
    *_seconds("forward", lambda found: getattr(found.measured, "forward", None)),
    *_seconds("backward", lambda found: getattr(found.measured, "backward", None)),
    *_seconds("update", lambda found: getattr(found.measured, "optimizer", None)),
    *(Column(name, _measured(name)) for name in ("repeats", "warm_up", "macs_per_second", "bytes_per_second")),
)
_KINDS_IN_WORDS = {"saved": "activations kept for backward", "temporary": "other activations", "input": "the batch"}
_SLOWEST = 3
_SMALLEST = 0.01  # share of the peak that is named


def plan_report(found: planning.Plan, most: int) -> Report:
    """The verdict, and the calls in order of execution; a table has the ``most`` costly ones."""
    costly = sorted(found.calls, key=lambda call: _cost(found, call), reverse=True)[:most]
    about = []
    if len(costly) < len(found.calls):
        by = "time" if found.measured else "activations kept" if found.memory.saved else "MACs"
        about = [
            f"{len(costly):,} of {len(found.calls):,} calls, the most {by} first; --top N shows more, --format tsv all"
        ]
    calls = Section(COLUMNS.rows(found.calls), COLUMNS, "call", totals=about, shown=COLUMNS.rows(costly))
    totals = Section([TOTALS.row(found)], TOTALS, "total", in_table=False, in_flat=False)
    note = f"Note: {_answer(found)}; --total prints the sums"
    return Report([totals, calls], flat_note=note, lead=lambda page: _in_words(found, page))


def _cost(found: planning.Plan, call: planning.CallCost) -> float:
    if found.measured is not None:
        return sum(time.median for time in (call.forward, call.backward) if time is not None)
    return call.saved if found.memory.saved else call.macs


def _in_words(found: planning.Plan, page: Page) -> Iterator[str]:
    columns = min(MOST_WORDS, page.columns)
    for line in verdict(found):
        yield from wrapped(line, columns, later="  ")


def verdict(found: planning.Plan) -> list[str]:
    """What fits, where the memory goes, where the time goes, and how far off the plan was."""
    lines = [f"{_asked(found)}: {_answer(found)}", _memory(found), _arithmetic(found)]
    if found.measured is not None:
        lines += [_time(found, found.measured), _off(found, found.measured)]
    return lines


def _asked(found: planning.Plan) -> str:
    batch, *image = found.input_shape or ("?",)
    step = f"training with {found.optimizer}" if found.optimizer else "inference"
    blocks = f", {counted(len(found.checkpointed), 'block')} checkpointed" if found.checkpointed else ""
    return f"{found.model}, {batch} x {'x'.join(map(str, image))}, {found.dtype}, {step}{blocks}"


def _answer(found: planning.Plan) -> str:
    peak = f"{size_in_words(found.memory.peak)} at the peak"
    if found.limit is None or found.largest_batch is None:
        return peak
    there = size_in_words(found.limit)
    if not found.largest_batch:
        return f"{peak}; not even one image fits into {there}"
    fits = "fits into" if found.memory.peak <= found.limit else "does not fit into"
    return f"{peak}, {fits} {there}; the largest batch that fits is {found.largest_batch:,}"


def _memory(found: planning.Plan) -> str:
    at_peak = dict(found.memory.at_peak) or {kind: getattr(found.memory, kind) for kind in _KINDS}
    parts = sorted(((size, kind) for kind, size in at_peak.items() if size), reverse=True)
    named = [(size, kind) for size, kind in parts if size >= _SMALLEST * found.memory.peak]
    if rest := sum(size for size, _ in parts) - sum(size for size, _ in named):
        named.append((rest, "the rest"))
    words = [
        f"{_KINDS_IN_WORDS.get(kind, kind)} {size_in_words(size)} ({percent(size / found.memory.peak)})"
        for size, kind in named
    ]
    where = f" of {found.memory.peak_call}" if found.memory.peak_call else ""
    at = f" (in the {found.memory.peak_in} pass{where})" if found.memory.peak_in in ("forward", "backward") else ""
    return f"memory at the peak{at}: {', '.join(words)}"


def _arithmetic(found: planning.Plan) -> str:
    bound = [call for call in found.calls if call.bound == "memory"]
    moved = sum(call.bytes_moved for call in found.calls)
    share = sum(call.bytes_moved for call in bound) / moved if moved else 0
    macs = sum(call.macs for call in found.calls)
    return (
        f"{macs:,} MACs and {size_in_words(moved)} moved in the forward pass; {len(bound):,} of"
        f" {counted(len(found.calls), 'call')} are bound by memory, with {percent(share)} of the bytes"
    )


def _time(found: planning.Plan, measured: planning.Measured) -> str:
    phases = [(part, getattr(measured, part)) for part in ("forward", "backward", "optimizer")]
    whole = sum(time.median for _, time in phases if time is not None)
    times = [f"{phase} {time_in_words(time)}" for phase, time in phases if time is not None]
    slowest = sorted(found.calls, key=lambda call: _cost(found, call), reverse=True)[:_SLOWEST]
    calls = listed([f"{call.call.key} ({percent(_cost(found, call) / whole)})" for call in slowest if whole])
    return f"time on {measured.device}, median of {measured.repeats}: {', '.join(times)}; most in {calls}"


def _off(found: planning.Plan, measured: planning.Measured) -> str:
    pairs: Sequence[tuple[str, int, int | None]] = (
        ("activations kept", found.memory.saved, measured.saved),
        ("peak", found.memory.peak, measured.peak),
    )
    words = [
        f"{name} {size_in_words(real)}, planned {size_in_words(planned)} ({100 * planned / real - 100:+.1f} %)"
        for name, planned, real in pairs
        if real
    ]
    return f"measured: {', '.join(words)}" if words else "this device does not report how much memory was used"


def size_in_words(size: int) -> str:
    """``1.23 GB``: bytes with three digits."""
    units = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (1000, "kB"), (1, "bytes"))
    unit, name = next((each for each in units if size >= each[0]), units[-1])
    return f"{size / unit:.3g} {name}" if size < 999.5 * unit else f"{size / unit:.0f} {name}"


def time_in_words(time: planning.Timing) -> str:
    """``12.3 ms (11.9 to 13.1)``: the median and the quartiles."""
    unit, name = next((pair for pair in ((1, "s"), (1e-3, "ms")) if time.median >= pair[0]), (1e-6, "us"))
    values = (value / unit for value in (time.median, time.low, time.high))
    median, low, high = (f"{value:.3g}" if value < 999.5 else f"{value:,.0f}" for value in values)
    return f"{median} {name} ({low} to {high})"
