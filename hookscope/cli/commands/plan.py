"""Say what a model costs: memory, arithmetic, time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from hookscope import models, planning, report
from hookscope.cli import process, progress
from hookscope.cli.command import RowCommand
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import write_plot
from hookscope.columns import Column, Columns
from hookscope.findings import counted, listed, percent
from hookscope.hooks import CALL

_PHASES = {"forward": "forward", "backward": "backward", "update": "optimizer"}  # field, and part of a step
_KINDS = ("parameters", "buffers", "gradients", "optimizer", "input", "saved", "temporary")


def _seconds(name: str, time_of: Callable[[Any], planning.Timing | None], **more: Any) -> list[Column]:

    def end(part: str) -> Callable[[Any], float | None]:
        return lambda fact: getattr(time_of(fact), part, None)

    ends = (Column(f"{name}_{part}", end(part), where="rows") for part in ("low", "high"))
    return [Column(name, end("median"), **more), *ends]


def _measured(name: str) -> Callable[[planning.Plan], Any]:
    return lambda plan: getattr(plan.measured, name, None)


def _sum(name: str) -> Column:
    return Column(name, lambda plan: sum(getattr(call, name) for call in plan.calls))


def _bytes(kind: str) -> Column:
    return Column(f"{kind}_bytes", lambda plan: getattr(plan.memory, kind))


COLUMNS = Columns(
    *CALL.but(
        index={"help": "index, name, type, call and order as in list-layers", "hide": ""},
        type={"need": 5},
        order={"where": "rows"},
    ),
    Column("input_shape", help="with the batch axis", where="rows"),
    Column("output_shape", help="of one image or item", need=6),
    Column("params", None, "parameters of the layer; if shared, at its first call", 3, "zero"),
    Column("macs", help="multiply-accumulates of the whole batch", need=9),
    Column("bytes_moved", help="inputs, outputs and parameters that are read or written", need=7),
    Column("saved", help="bytes kept for the backward pass that no earlier call keeps", hide="zero"),
    Column("bound", help="what limits the speed: memory or arithmetic", need=8),
    Column("receptive_field", help="in pixels, as in list-layers, and so is stride", need=2),
    Column("stride", need=1),
    Column("effective_field", None, "side of the effective receptive field, with --time", 4, "unknown"),
    *_seconds(
        "forward",
        lambda call: call.forward,
        help="seconds, with forward_low, forward_high; the same for backward",
        hide="unknown",
    ),
    *_seconds("backward", lambda call: call.backward, hide="unknown"),
)
TOTALS = Columns(
    *("model", "input_shape", "dtype", "device", "optimizer", "checkpointed"),
    *map(_sum, ("params", "macs", "bytes_moved")),
    *map(_bytes, (*_KINDS, "peak")),
    Column("peak_in", lambda plan: plan.memory.peak_in),
    Column("peak_call", lambda plan: plan.memory.peak_call),
    *("limit", "largest_batch", "real"),
    Column("measured_on", _measured("device")),
    Column("measured_saved", _measured("saved")),
    Column("measured_peak", _measured("peak")),
    *_seconds("forward", lambda plan: getattr(plan.measured, "forward", None)),
    *_seconds("backward", lambda plan: getattr(plan.measured, "backward", None)),
    *_seconds("update", lambda plan: getattr(plan.measured, "optimizer", None)),
    *(Column(name, _measured(name)) for name in ("repeats", "warm_up", "macs_per_second", "bytes_per_second")),
)


class Plan(RowCommand):
    """Say what MODEL costs before it runs: memory, arithmetic and bytes moved.

    \b
    Examples:
      hookscope plan resnet50 --batch-size 64 --train
      hookscope plan resnet50 --train --optimizer adamw --memory 24GB
      hookscope plan resnet50 --train --checkpoint layer1 --memory 8GB
      hookscope plan vit_b_16 --time --format json
      hookscope plan nets.py:mine --input-size 320x320 --plot plan.png
      hookscope plan resnet50 --train --total --format json | jq '.[0].peak_bytes'

    The step runs on tensors without values: torch keeps and frees the same tensors as in a real step. Two
    things are not counted: memory that a kernel needs while it runs, such as the workspace of a convolution, and memory
    of the driver and the allocator of the device. A model that cannot run without values, such as a detector, runs once
    on random images.

    The first lines say what the step needs, whether it fits, and where the memory goes. They also count the calls that
    are bound by memory: those with fewer MACs per byte than --balance. A table then shows the calls that cost most: in
    time if it was measured, else in activations kept, else in MACs. Other formats have every call, in order of
    execution.

    --time runs the step with random weights and random images. Passes with hooks measure the time of each call.
    Passes without hooks measure the time of the whole step. Both take turns. Times are medians in seconds; other
    formats than a table also have the quartiles. On a GPU, times come from events on the device.

    --time also gives the effective receptive field (arXiv:1701.04128) of the middle unit: the side of a square with
    as many pixels as have a gradient above 4.55 % of the largest. It is measured on one random image, for layers with
    weights and an output of several positions, such as convolutions: at most 64 of them, at even distances.
    """

    fields_told = COLUMNS
    fields_title = "Fields of a row, one for each call"

    model: str = shared.model_argument()
    batch_size: int = option("Images in a batch.", metavar="N", type=click.IntRange(1, 2**31 - 1), default=1)
    train: bool = option("Plan a step of training: forward, backward and optimizer.")
    optimizer: str = option(
        "With --train: a class of torch.optim in any case, such as adamw, with its default arguments.",
        metavar="NAME",
        default="sgd",
        needs="train",
    )
    checkpoint: tuple[str, ...] = option(
        "With --train: compute the activations of layer BLOCK again in the backward pass; repeatable.",
        metavar="BLOCK",
        shell_complete=shared.complete_layers,
        needs="train",
    )
    dtype: str | None = option(
        "Data type of parameters and images: float32, float64, float16 or bfloat16; or autocast, autocast:float16."
        "  [default: the model's own]",
        metavar="TYPE",
        shell_complete=shared.complete_words(*models.dtype_words()),
    )
    memory: int | None = option(
        "Memory of the device, such as 24GB (24 billion bytes) or 24GiB: also find the largest batch that fits.",
        type=shared.size,
    )
    balance: float | None = option(
        "A call with fewer MACs per byte than X is bound by memory.  [default: 10; with --time, as measured]",
        metavar="X",
        type=shared.FiniteRange(0, min_open=True),
    )
    input_size: tuple[int, ...] | None = shared.size_option()
    device: str = shared.device_option(
        "auto, cpu, cuda, cuda:N or mps. Only --time needs a device that this machine has."
    )
    time: bool = option("Also run the step, with random weights and images: measure time and memory.")
    repeats: int = option("With --time: number of timed passes.", default=10, needs="time")
    warm_up: int = option(
        "With --time: number of passes before them, which are not timed.", default=3, least=0, needs="time"
    )
    top: int = option("Number of calls in a table, the most costly first.", default=20)
    total: bool = option("Print one row: the sums, the memory by kind, and the times of the whole step.")
    plot: str | None = shared.plot_file("Draw memory, arithmetic and time of every call")

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model.partition(":")[0]

    def run(self) -> None:
        source = models.find_source(self.model)  # an unknown name fails before torch is imported
        with process.prints_to_standard_error(), progress.pass_progress() as on_progress:
            step = self.given("batch_size", "train", "optimizer", "checkpoint", "dtype", "input_size", "device")
            step |= self.given("memory", "balance", "repeats", "warm_up")
            plan = planning.plan(source, measure=self.time, on_progress=on_progress, **step)
        for text in plan.notes:
            note(f"Note: {text}")
        sums = Report([Section([TOTALS.row(plan)], TOTALS)])
        with self.printed_after(sums if self.total else plan_report(plan, self.top)):
            if self.plot is not None:
                figure = report.plot(plan, lines=verdict(plan))
                write_plot(self.plot, figure, {**models.package_versions(), "command": process.command_line()})


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
    return Report([totals, calls], flat_note=note, lead=verdict(found), indent="  ")


def _cost(plan: planning.Plan, call: planning.CallCost) -> float:
    if plan.measured is not None:
        return sum(time.median for time in (call.forward, call.backward) if time is not None)
    return call.saved if plan.memory.saved else call.macs


def verdict(found: planning.Plan) -> list[str]:
    """What fits, where the memory goes, where the time goes, and how far off the plan was."""
    lines = [f"{_asked(found)}: {_answer(found)}", _memory(found), _arithmetic(found)]
    if found.measured is not None:
        lines += [_time(found, found.measured), _off(found, found.measured)]
    return lines


def _asked(plan: planning.Plan) -> str:
    batch, *image = plan.input_shape or ("?",)
    step = f"training with {plan.optimizer}" if plan.optimizer else "inference"
    blocks = f", {counted(len(plan.checkpointed), 'block')} checkpointed" if plan.checkpointed else ""
    return f"{plan.model}, {batch} x {'x'.join(map(str, image))}, {plan.dtype}, {step}{blocks}"


def _answer(plan: planning.Plan) -> str:
    peak = f"{size_in_words(plan.memory.peak)} at the peak"
    if plan.limit is None or plan.largest_batch is None:
        return peak
    there = size_in_words(plan.limit)
    if not plan.largest_batch:
        return f"{peak}; not even one image fits into {there}"
    fits = "fits into" if plan.memory.peak <= plan.limit else "does not fit into"
    return f"{peak}, {fits} {there}; the largest batch that fits is {plan.largest_batch:,}"


def _memory(plan: planning.Plan) -> str:
    at_peak = dict(plan.memory.at_peak) or {kind: getattr(plan.memory, kind) for kind in _KINDS}
    parts = sorted(((size, kind) for kind, size in at_peak.items() if size), reverse=True)
    named = [(size, kind) for size, kind in parts if size >= _SMALLEST * plan.memory.peak]
    if rest := sum(size for size, _ in parts) - sum(size for size, _ in named):
        named.append((rest, "the rest"))
    words = [
        f"{_KINDS_IN_WORDS.get(kind, kind)} {size_in_words(size)} ({percent(size / plan.memory.peak)})"
        for size, kind in named
    ]
    where = f" of {plan.memory.peak_call}" if plan.memory.peak_call else ""
    at = f" (in the {plan.memory.peak_in} pass{where})" if plan.memory.peak_in in ("forward", "backward") else ""
    return f"memory at the peak{at}: {', '.join(words)}"


def _arithmetic(plan: planning.Plan) -> str:
    bound = [call for call in plan.calls if call.bound == "memory"]
    moved = sum(call.bytes_moved for call in plan.calls)
    share = sum(call.bytes_moved for call in bound) / moved if moved else 0
    macs = sum(call.macs for call in plan.calls)
    return (
        f"{macs:,} MACs and {size_in_words(moved)} moved in the forward pass; {len(bound):,} of"
        f" {counted(len(plan.calls), 'call')} are bound by memory, with {percent(share)} of the bytes"
    )


def _time(plan: planning.Plan, measured: planning.Measured) -> str:
    phases = [(part, getattr(measured, part)) for part in ("forward", "backward", "optimizer")]
    whole = sum(time.median for _, time in phases if time is not None)
    times = [f"{phase} {time_in_words(time)}" for phase, time in phases if time is not None]
    slowest = sorted(plan.calls, key=lambda call: _cost(plan, call), reverse=True)[:_SLOWEST]
    calls = listed([f"{call.call.key} ({percent(_cost(plan, call) / whole)})" for call in slowest if whole])
    return f"time on {measured.device}, median of {measured.repeats}: {', '.join(times)}; most in {calls}"


def _off(plan: planning.Plan, measured: planning.Measured) -> str:
    pairs: Sequence[tuple[str, int, int | None]] = (
        ("activations kept", plan.memory.saved, measured.saved),
        ("peak", plan.memory.peak, measured.peak),
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
    unit, name = next((pair for pair in units if size >= pair[0]), units[-1])
    return f"{size / unit:.3g} {name}" if size < 999.5 * unit else f"{size / unit:.0f} {name}"


def time_in_words(time: planning.Timing) -> str:
    """``12.3 ms (11.9 to 13.1)``: the median and the quartiles."""
    unit, name = next((pair for pair in ((1, "s"), (1e-3, "ms")) if time.median >= pair[0]), (1e-6, "us"))
    values = (value / unit for value in (time.median, time.low, time.high))
    median, low, high = (f"{value:.3g}" if value < 999.5 else f"{value:,.0f}" for value in values)
    return f"{median} {name} ({low} to {high})"
