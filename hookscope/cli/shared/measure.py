"""What ``stats`` and ``check`` share: their options, and one streaming pass over many images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hookscope import hooks, statistics
from hookscope.cli.output import formats as output
from hookscope.cli.shared import image_options
from hookscope.cli.shared.engine_options import EngineOptions, torchrun_rank
from hookscope.cli.shared.image_run import image_run
from hookscope.cli.shared.model import ModelOptions, check_choice
from hookscope.cli.shared.options import SELECTION, apply_options, layer_option, ops_option, type_option
from hookscope.findings import operations_in_words


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure on which images."""

    model: ModelOptions
    paths: Sequence[str]
    layers: hooks.Selection | None = None
    types: tuple[str, ...] = ()
    ops: bool | None = None
    files0_from: str | None = None
    batch_size: int = 16
    workers: int = 0
    limit: int | None = None
    strict: bool = False
    engine: EngineOptions = field(default_factory=EngineOptions)

    def images(self) -> list[str]:
        """The images of the run, folders walked."""
        return image_options.image_list(self.paths, self.files0_from, self.limit)


def measuring_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of `MeasureOptions`, which the command gets as ``job``; ``default`` says what is measured."""
    names = [each.name for each in fields(MeasureOptions)]
    options = [
        layer_option(f"Calls to measure: {SELECTION}  [default: {default}]"),
        type_option,
        ops_option,
        image_options.run_options,
    ]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_job(**options: Any) -> Any:
            job = MeasureOptions(**{name: options.pop(name) for name in names})
            if torchrun_rank():
                return job.engine.serve(job.model.load)
            return command(job=job, **options)

        return apply_options(options, with_job)

    return add


def measure(
    job: MeasureOptions,
    images: Sequence[str],
    rank: bool = False,
    save: str | None = None,
    resume: bool = False,
    every: bool = False,
    allow: hooks.Selection | None = None,
) -> tuple[statistics.SavedStatistics, int]:
    """Run every image through the model; returns the statistics and the number of lost images."""
    engine, net = job.engine.make(divides=True), job.model.load()
    check_choice(net, job.types, job.layers, allow)
    if allow is not None:
        allow.check_names([name for name, _ in net.model.named_modules()], net.name, ops=bool(job.ops))
    with image_run(len(images), save, job.strict) as run:
        saved = statistics.measure_images(
            net,
            images,
            job.layers,
            job.types or None,
            rank=rank,
            ops=bool(job.ops),
            every=every,
            batch_size=job.batch_size,
            workers=job.workers,
            engine=engine,
            save=save,
            resume=resume,
            on_start=run.started,
            on_progress=run.advance,
            on_lost=run.lost,
            on_note=run.note,
            on_interrupt=run.interrupted,
        )
    if job.layers is None and (words := operations_in_words(saved.coverage.operations)):
        output.note(f"Note: not measured: {words}; --ops measures them")
    lost = saved.progress.lost if saved.progress is not None else 0
    if lost:
        output.note(f"Note: {lost:,} of {run.total} skipped")
    return saved, lost
