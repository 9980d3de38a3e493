"""``hookscope plan``: what a model costs before it runs, and what it costs when it does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import click

from hookscope import models, planning
from hookscope.cli import process
from hookscope.cli.output import formats as output
from hookscope.cli.output.plan_rows import COLUMNS, TOTALS, plan_report, verdict
from hookscope.cli.output.report import Report, Section
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.output_paths import check_plot, write_plot
from hookscope.errors import UsageError

_OF_TRAINING = {"optimizer": "--optimizer", "checkpoint": "--checkpoint"}
_OF_MEASURING = {"repeats": "--repeats", "warm_up": "--warm-up"}


@click.command("plan", cls=GroupedCommand)
@shared.tell_fields(COLUMNS, "Fields of a row, one for each call")
@shared.model_argument()
@click.option(
    "--batch-size",
    metavar="N",
    type=click.IntRange(1, 2**31 - 1),
    default=1,
    show_default=True,
    help="Images in a batch.",
)
@click.option("--train", is_flag=True, help="Plan a step of training: forward, backward and optimizer.")
@click.option(
    "--optimizer",
    metavar="NAME",
    default="sgd",
    show_default=True,
    help="With --train: a class of torch.optim in any case, such as adamw, with its default arguments.",
)
@click.option(
    "--checkpoint",
    metavar="BLOCK",
    multiple=True,
    shell_complete=shared.complete_layers,
    help="With --train: compute the activations of layer BLOCK again in the backward pass; repeatable.",
)
@click.option(
    "--dtype",
    metavar="TYPE",
    shell_complete=shared.complete_words(*models.DTYPE_WORDS),
    help="Data type of parameters and images: float32, float64, float16 or bfloat16; or autocast, autocast:float16."
    "  [default: the model's own]",
)
@click.option(
    "--memory",
    type=shared.FileSize(),
    help="Memory of the device, such as 24GB (24 billion bytes) or 24GiB: also find the largest batch that fits.",
)
@click.option(
    "--balance",
    metavar="X",
    type=shared.FiniteRange(0, min_open=True),
    help="A call with fewer MACs per byte than X is bound by memory.  [default: 10; with --time, as the device is"
    " measured]",
)
@shared.size_option
@click.option(
    "--device",
    metavar="DEVICE",
    default="auto",
    show_default=True,
    shell_complete=shared.complete_devices,
    help="auto, cpu, cuda, cuda:N or mps. Only --time needs a device that this machine has.",
)
@click.option(
    "--time", "measure", is_flag=True, help="Also run it, with random weights and images: measure time and memory."
)
@shared.count_option("--repeats", "With --time: number of timed passes.", 10)
@shared.count_option("--warm-up", "With --time: number of passes before them, which are not timed.", 3, least=0)
@shared.count_option("--top", "Number of calls in a table, those that cost most first.", 20)
@click.option(
    "--total", is_flag=True, help="Print one row: the sums, the memory by kind, and the times of the whole step."
)
@shared.plot_option("Draw memory, arithmetic and time of every call")
@shared.format_option
def command(model: str, top: int, total: bool, plot: str | None, format: str, **values: Any) -> None:
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
    _check(values, plot, model)
    source = models.find_source(model)  # an unknown name fails before torch is imported
    with process.prints_to_standard_error(), pass_progress() as on_progress:
        found = planning.plan(source, **values, on_progress=on_progress)
    for text in found.notes:
        output.note(f"Note: {text}")
    with ExitStack() as stack:  # a full disk is no reason to lose the rows
        rows = Report([Section([TOTALS.row(found)], TOTALS)]) if total else plan_report(found, top)
        stack.callback(output.write_report, rows, format)
        if plot is not None:
            figure = planning.plot_plan(found, lines=verdict(found))
            write_plot(plot, figure, {**models.package_versions(), "command": process.command_line()})


def _check(values: dict[str, Any], plot: str | None, model: str) -> None:
    """Refuse options that would have no effect, and a plot that cannot be written."""
    for needed, word, options in (("train", "--train", _OF_TRAINING), ("measure", "--time", _OF_MEASURING)):
        if not values[needed] and (idle := [option for name, option in options.items() if shared.was_given(name)]):
            raise UsageError(f"{idle[0]} has no effect without {word}", do=f"add {word}")
    check_plot(plot, [model.partition(":")[0]], "model")
