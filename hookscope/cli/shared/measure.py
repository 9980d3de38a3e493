"""What ``stats`` and ``check`` share: their options, and one streaming pass over many images."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hookscope import hooks, statistics
from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.progress import image_progress
from hookscope.cli.shared.image_options import (
    Losses,
    batch_size_option,
    files0_option,
    limit_option,
    strict_option,
    workers_option,
)
from hookscope.cli.shared.model import ModelOptions, model_options
from hookscope.cli.shared.options import apply_options, layer_option, type_option
from hookscope.findings import counted

Command = TypeVar("Command", bound=Callable[..., Any])

_layer_option = layer_option(
    "Calls to measure, as in visualize; indices count Conv2d unless --type is given.  [default: every convolution and"
    " every activation function]"
)


def measuring_options(command: Command) -> Command:
    """The options that say what is measured on which images."""
    options = [
        _layer_option,
        type_option,
        files0_option,
        batch_size_option,
        workers_option,
        limit_option,
        strict_option,
        model_options,
    ]
    return apply_options(options, command)


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure, the same for every image."""

    model: ModelOptions
    paths: Sequence[str]
    layers: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    batch_size: int = 16
    workers: int = 0
    strict: bool = False
    rank: bool = False
    save: str | None = None
    resume: bool = False
    allow: tuple[str, ...] = ()


def measure(job: MeasureOptions) -> tuple[statistics.SavedStatistics, int]:
    """Run every image through the model; returns the statistics and the number of lost images."""
    if job.layers:
        hooks.Selection(job.layers)
    net = job.model.load()
    if job.allow:
        hooks.Selection(job.allow).check_names([name for name, _ in net.model.named_modules()], net.name)
    losses = Losses(job.strict or len(job.paths) == 1)  # the error of a single image is the error of the run
    total = counted(len(job.paths), "image")
    advance: Any = None
    with contextlib.ExitStack() as stack:

        def start(count: int) -> None:
            nonlocal advance
            if count:
                output.note(f"Note: {job.save} holds {count} of {total}")
            advance = stack.enter_context(image_progress(len(job.paths) - count))
            stack.enter_context(process.prints_to_standard_error())

        saved = statistics.measure_images(
            net,
            job.paths,
            job.layers or None,
            job.types or None,
            rank=job.rank,
            batch_size=job.batch_size,
            workers=job.workers,
            save=job.save,
            resume=job.resume,
            on_start=start,
            on_progress=lambda count: advance(count),
            on_lost=losses.lost,
            on_note=losses.note,
            on_interrupt=lambda count: output.note(f"Note: {job.save} holds {count} of {total}; add --resume to go on"),
        )
        losses.finish()
    lost = saved.progress.lost if saved.progress is not None else 0
    if lost:
        output.note(f"Note: {lost} of {total} skipped")
    return saved, lost
