"""What ``stats`` and ``check`` share: their options, and one streaming pass over many images."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hookscope.cli import output, process
from hookscope.cli.image_options import (
    Losses,
    batch_size_option,
    files0_option,
    image_list,
    limit_option,
    strict_option,
    workers_option,
)
from hookscope.cli.options import (
    complete_layers,
    device_option,
    preprocess_option,
    seed_option,
    size_option,
    type_option,
    weights_option,
)
from hookscope.cli.progress import download_progress, image_progress
from hookscope.errors import InputError, UsageError
from hookscope.files import check_writable

if TYPE_CHECKING:
    from hookscope.loading import Batch
    from hookscope.models import Net
    from hookscope.saved_statistics import SavedTally, Source
    from hookscope.survey import Survey

__all__ = ["Job", "Share", "images_of", "measure", "measuring_options"]

_SAVE_EVERY = 10.0  # seconds of work that a killed run may lose

Command = TypeVar("Command", bound=Callable[..., Any])

layer_option = click.option(
    "--layer",
    "layers",
    metavar="SEL",
    multiple=True,
    shell_complete=complete_layers,
    help="Which calls, as in visualize; indices count Conv2d unless --type says otherwise.  [default: every"
    " convolution and every activation function]",
)


def measuring_options(command: Command) -> Command:
    """The options that say what is measured on which images."""
    options = [
        layer_option,
        type_option,
        files0_option,
        batch_size_option,
        workers_option,
        limit_option,
        strict_option,
        weights_option,
        seed_option,
        device_option,
        preprocess_option,
        size_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


class Share(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
    """``5%`` or ``0.05`` to a share from 0 to 1."""

    name = "SHARE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """``"5%"`` to 0.05."""
        if isinstance(value, float):
            return value
        text = value.strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            self.fail(f"'{value}' is no share; write 5% or 0.05", param, ctx)
        return share


@dataclass(frozen=True)
class Job:
    """What is to be measured, the same for every image."""

    model: str
    paths: Sequence[str]
    layers: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    batch_size: int = 16
    workers: int = 0
    strict: bool = False
    weights: str = "auto"
    seed: int = 0
    device: str = "auto"
    preprocess: str = "weights"
    input_size: tuple[int, int] | None = None
    rank: bool = False
    save: str | None = None
    resume: bool = False


def images_of(images: Sequence[str], files0_from: str | None, limit: int | None) -> list[str]:
    """The list of images, before anything that costs time."""
    return image_list(images, files0_from, limit)


def measure(job: Job) -> tuple[SavedTally, int]:
    """Run every image through the model; what was counted, and how many images were lost.

    With ``save`` the file is written every ten seconds and on every way out, so that nothing counted is lost.
    """
    from hookscope.layers import Selection
    from hookscope.registry import check_model_name

    if job.layers:
        Selection(job.layers)
    if job.save is not None:
        check_writable(job.save)
    if ":" not in job.model:
        check_model_name(job.model)
    process.import_torch()
    return _Run(job, _load(job)).go()


def _load(job: Job) -> Net:
    from hookscope.models import load_model

    with process.prints_to_standard_error(), download_progress() as progress:
        net = load_model(
            job.model,
            job.weights,
            job.seed,
            job.device,
            preprocess=job.preprocess,
            input_size=job.input_size,
            progress=progress,
        )
    for text in net.notes:
        output.note(f"Note: {text}")
    return net


@dataclass
class _Run:
    """One run over the images: the survey, how far it is, and what it has lost."""

    job: Job
    net: Net
    done: int = 0
    losses: Losses = field(init=False)
    survey: Survey = field(init=False)
    source: Source = field(init=False)
    saved_at: float = field(init=False)

    def __post_init__(self) -> None:
        from hookscope.survey import Survey

        job = self.job
        self.losses = Losses(job.strict)
        self.survey = Survey(self.net.model, job.layers or None, job.types or None, rank=job.rank)
        self.source = self._source()
        self.saved_at = time.monotonic()

    def _source(self) -> Source:
        from hookscope.saved_statistics import Source, fingerprint_of

        job, net = self.job, self.net
        layers = ", ".join(job.layers) or "every convolution and activation function"
        return Source(
            net.name,
            net.weights,
            fingerprint_of(net.model) if job.save is not None else "",
            net.preprocess.describe(),
            layers + (f" of {', '.join(job.types)}" if job.types else ""),
            job.rank,
        )

    def go(self) -> tuple[SavedTally, int]:
        """Measure what is not measured yet."""
        if self.job.resume:
            self._take_up()
        try:
            self._measure()
        except BaseException:
            self._save()
            raise
        self._save()
        if not self.survey.tally.images:
            raise InputError("no image could be used", f"{self.losses.count} were tried", "see the errors above")
        return self._state(), self.losses.count

    def _measure(self) -> None:
        import torch

        from hookscope.loading import load_batches

        job, paths = self.job, self.job.paths
        left = paths[self.done :]
        first = self.done

        def lost(position: int, name: str, error: Any) -> None:
            self.losses.lost(position, name, error)
            advance(1)

        # the hooks stay on for all passes; a pass that is refused is told by the picture that caused it
        with (
            image_progress(len(left)) as advance,
            contextlib.closing(
                load_batches(self.net, left, job.batch_size, job.workers, lost, self.losses.note)
            ) as batches,
        ):
            with process.prints_to_standard_error(), torch.no_grad(), self.survey:
                for batch in batches:
                    self._pass(batch)
                    self.done = first + batch.positions[-1] + 1
                    advance(batch.count)
                    if job.save is not None and time.monotonic() - self.saved_at > _SAVE_EVERY:
                        self._save()
            self.done = len(paths)
        self.losses.finish()

    def _pass(self, batch: Batch) -> None:
        from hookscope.visualize import refusal

        self.survey.name_images(batch.names)
        try:
            with refusal(self.net.name, batch.inputs):
                self.net.model(*batch.inputs)
        except InputError as error:
            if not self.survey.tally.images:  # the first is refused: so will be the others
                raise
            for position, name in zip(batch.positions, batch.names, strict=True):
                self.losses.lost(position, name, InputError(f"{name}: {error.asked}", error.exists, error.do))

    def _state(self) -> SavedTally:
        from hookscope.saved_statistics import Progress, SavedTally

        progress = Progress.after(self.job.paths, self.done, self.losses.count)
        return SavedTally(self.source, self.survey.tally, progress)

    def _save(self) -> None:
        from hookscope.saved_statistics import save_tally

        if self.job.save is not None and (self.survey.tally.images or not self.job.resume):
            save_tally(self.job.save, self._state())
            self.saved_at = time.monotonic()

    def _take_up(self) -> None:
        """Go on where the run that wrote the file was cut short; without a file begin."""
        import os

        from hookscope.saved_statistics import Progress, check_same_source, load_tally

        assert self.job.save is not None
        if not os.path.exists(self.job.save):
            return
        saved = load_tally(self.job.save)
        check_same_source(saved.source, self.source, self.job.save, "this run")
        progress = saved.progress
        if progress is None:
            raise UsageError(f"'{self.job.save}' was merged from several runs", do="measure the rest and merge again")
        if Progress.after(self.job.paths, progress.done, progress.lost) != progress:
            raise InputError(
                f"'{self.job.save}' was made from other images",
                f"its first {progress.done} are not those of this run",
                "name the same images in the same order",
            )
        self.survey.tally, self.done, self.losses.count = saved.tally, progress.done, progress.lost
        output.note(f"Note: {self.job.save} holds {progress.done} of {len(self.job.paths)} images")
