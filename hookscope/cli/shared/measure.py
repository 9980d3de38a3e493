"""What ``stats`` and ``check`` share: their options, and one streaming pass over many images."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

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
from hookscope.cli.shared.model import load_net
from hookscope.cli.shared.options import layer_option, net_options, type_option
from hookscope.errors import HookscopeError, InputError, UsageError
from hookscope.findings import counted

if TYPE_CHECKING:
    from hookscope.models import Batch, LoadedModel
    from hookscope.statistics import RunningStatistics, SavedStatistics, Source, StatisticsCollector

_SAVE_EVERY = 10.0  # seconds of work that a killed run may lose
_SAVE_SHARE = 20.0  # times as long as it takes to save, to save again: a covariance of every layer is large

Command = TypeVar("Command", bound=Callable[..., Any])

_layer_option = layer_option(
    "Which calls, as in visualize; indices count Conv2d unless --type says otherwise.  [default: every"
    " convolution and every activation function]"
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
        net_options,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True)
class MeasureOptions:
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
    allow: tuple[str, ...] = ()


def measure(job: MeasureOptions) -> tuple[SavedStatistics, int]:
    """Run every image through the model; what was counted, and how many images were lost.

    With ``save`` the file is written every ten seconds and on every way out, so that nothing counted is lost.
    """
    from hookscope.hooks import Selection

    if job.layers:
        Selection(job.layers)
    net = load_net(job.model, job.weights, job.seed, job.device, job.preprocess, job.input_size)
    return _Run(job, net).go()


@dataclass
class _Run:
    """One run over the images: what it has counted, how far it is, and what it has lost."""

    job: MeasureOptions
    net: LoadedModel
    tally: RunningStatistics = field(init=False)
    survey: StatisticsCollector = field(init=False)
    losses: Losses = field(init=False)
    source: Source = field(init=False)
    done: int = 0
    lost: list[int] = field(default_factory=list)
    next_save: float = 0.0

    def __post_init__(self) -> None:
        from hookscope.hooks import Selection
        from hookscope.statistics import RunningStatistics, StatisticsCollector

        job, model = self.job, self.net.model
        if job.allow:
            Selection(job.allow).check_names([name for name, _ in model.named_modules()], self.net.name)
        self.tally = RunningStatistics()
        self.survey = StatisticsCollector(model, job.layers or None, job.types or None, rank=job.rank)
        self.losses = Losses(job.strict or len(job.paths) == 1)  # the error of a single image is that of the run
        self.source = self._source()
        self.next_save = time.monotonic() + _SAVE_EVERY

    def _source(self) -> Source:
        from hookscope.statistics import Source, fingerprint_of

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

    def go(self) -> tuple[SavedStatistics, int]:
        """Measure what is not measured yet."""
        if self.job.resume:
            self._take_up()
        try:
            self._measure()
        except BaseException:
            self._save()
            if self.job.save is not None and self.tally.images:
                output.note(f"Note: {self.job.save} holds {self._progress}; add --resume to go on")
            raise
        self._save()
        if not self.tally.images:
            raise InputError("no image could be used", f"{len(self.lost)} were tried", "see the errors above")
        if self.lost:
            output.note(f"Note: {len(self.lost)} of {counted(len(self.job.paths), 'image')} skipped")
        return self._state(), len(self.lost)

    def _measure(self) -> None:
        import torch

        from hookscope.models import load_batches

        job, first = self.job, self.done
        left = job.paths[first:]

        def lost(position: int, name: str, error: Any) -> None:
            self._lose(first + position, name, error)
            advance(1)

        with (
            image_progress(len(left)) as advance,
            contextlib.closing(
                load_batches(self.net, left, job.batch_size, job.workers, lost, self.losses.note)
            ) as batches,
        ):
            # the hooks stay on for all passes
            with process.prints_to_standard_error(), torch.no_grad(), self.survey:
                for batch in batches:
                    self._pass(batch, first)
                    advance(batch.count)
                    if time.monotonic() > self.next_save:
                        self._save()
            self.done = len(job.paths)
        self.losses.finish()

    def _pass(self, batch: Batch, first: int) -> None:
        from hookscope.models import model_errors_as_input_errors
        from hookscope.statistics import RunningStatistics

        positions = [first + position for position in batch.positions]
        self.survey.tally = RunningStatistics()
        self.survey.name_images(batch.names)
        try:
            with model_errors_as_input_errors(self.net.name, batch.inputs):
                self.net.model(*batch.inputs)
            with process.signals_held():  # a tally added up in part, or added and not marked as done, counts twice
                self.tally.merge(self.survey.tally)
                self.done = positions[-1] + 1
        except InputError as error:
            if not self.tally.images and self._sees_one_size:
                raise  # so will be all the others
            for position, name in zip(positions, batch.names, strict=True):
                self._lose(position, name, InputError(f"{name}: {error.asked}", error.exists, error.do))
            self.done = positions[-1] + 1

    @property
    def _sees_one_size(self) -> bool:
        return self.net.preprocess.mode != "none" and self.net.family != "detection"

    def _lose(self, position: int, name: str, error: HookscopeError) -> None:
        self.losses.lost(position, name, error)
        self.lost.append(position)

    def _state(self) -> SavedStatistics:
        from hookscope.statistics import Progress, SavedStatistics

        # what was lost ahead of the last batch will be met again
        lost = sum(position < self.done for position in self.lost)
        return SavedStatistics(self.source, self.tally, Progress.after(self.job.paths, self.done, lost))

    def _save(self) -> None:
        """Write what was counted; nothing at all is no reason to write over what an earlier run has counted."""
        from hookscope.statistics import save_statistics

        if self.job.save is None or not self.tally.images:
            return
        began = time.monotonic()
        save_statistics(self.job.save, self._state())
        now = time.monotonic()
        self.next_save = now + max(_SAVE_EVERY, _SAVE_SHARE * (now - began))

    def _take_up(self) -> None:
        """Go on where the run that wrote the file was cut short; without a file begin."""
        from hookscope.statistics import Progress, check_same_source, load_statistics

        job = self.job
        assert job.save is not None
        if not os.path.exists(job.save):
            return
        saved = load_statistics(job.save)
        check_same_source(saved.source, self.source, job.save, "this run")
        progress = saved.progress
        if progress is None:
            raise UsageError(f"'{job.save}' was merged from several runs", do="measure the rest and merge again")
        if Progress.after(job.paths, progress.done, progress.lost) != progress:
            raise InputError(
                f"'{job.save}' was made from other images",
                f"its first {progress.done} are not those of this run",
                "name the same images in the same order",
            )
        self.tally, self.done = saved.tally, progress.done
        self.lost = [-1] * progress.lost  # where is not known, but that they are done
        output.note(f"Note: {job.save} holds {self._progress}")

    @property
    def _progress(self) -> str:
        return f"{self.done} of {counted(len(self.job.paths), 'image')}"
