"""Say what a model costs: memory, arithmetic, time."""

from __future__ import annotations

from collections.abc import Iterator

import click

from hookscope import models, planning, report
from hookscope.cli import process
from hookscope.cli.command import RowCommand
from hookscope.cli.fields import option
from hookscope.cli.output import formats as output
from hookscope.cli.output.plan_rows import COLUMNS, TOTALS, plan_report, verdict
from hookscope.cli.output.report import Report, Section
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import write_plot


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

    The step runs on tensors without values, in which torch itself keeps and frees what it would in a real step. Two
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
        shell_complete=shared.complete_words(*models.DTYPE_WORDS),
    )
    memory: int | None = option(
        "Memory of the device, such as 24GB (24 billion bytes) or 24GiB: also find the largest batch that fits.",
        type=shared.FileSize(),
    )
    balance: float | None = option(
        "A call with fewer MACs per byte than X is bound by memory.  [default: 10; with --time, as the device is"
        " measured]",
        metavar="X",
        type=shared.FiniteRange(0, min_open=True),
    )
    input_size: tuple[int, ...] | None = shared.size_option()
    device: str = shared.device_option(
        "auto, cpu, cuda, cuda:N or mps. Only --time needs a device that this machine has."
    )
    time: bool = option("Also run it, with random weights and images: measure time and memory.")
    repeats: int = option("With --time: number of timed passes.", default=10, needs="time")
    warm_up: int = option(
        "With --time: number of passes before them, which are not timed.", default=3, least=0, needs="time"
    )
    top: int = option("Number of calls in a table, those that cost most first.", default=20)
    total: bool = option("Print one row: the sums, the memory by kind, and the times of the whole step.")
    plot: str | None = shared.plot_file("Draw memory, arithmetic and time of every call")

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model.partition(":")[0]

    def run(self) -> None:
        source = models.find_source(self.model)  # an unknown name fails before torch is imported
        with process.prints_to_standard_error(), pass_progress() as on_progress:
            found = planning.plan(
                source,
                batch_size=self.batch_size,
                train=self.train,
                optimizer=self.optimizer,
                checkpoint=self.checkpoint,
                dtype=self.dtype,
                memory=self.memory,
                balance=self.balance,
                input_size=self.input_size,
                device=self.device,
                measure=self.time,
                repeats=self.repeats,
                warm_up=self.warm_up,
                on_progress=on_progress,
            )
        for text in found.notes:
            output.note(f"Note: {text}")
        sums = Report([Section([TOTALS.row(found)], TOTALS)])
        with self.printed_after(sums if self.total else plan_report(found, self.top)):
            if self.plot is not None:
                figure = report.plot(found, lines=verdict(found))
                write_plot(self.plot, figure, {**models.package_versions(), "command": process.command_line()})
