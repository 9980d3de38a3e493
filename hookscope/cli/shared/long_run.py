"""Long runs over images: in batches, on any engine, with a bar, and with images that are skipped."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import click

from hookscope import hooks, jobs, models, statistics
from hookscope.cli import process, progress
from hookscope.cli.fields import Options, group, option
from hookscope.cli.output.formats import Output, note
from hookscope.cli.shared.options import FiniteRange, ops_option, type_option
from hookscope.cli.shared.subject import OfImages, check_choice
from hookscope.errors import HookscopeError, LayerError, UsageError
from hookscope.findings import counted, operations_in_words
from hookscope.images import Listener


class BatchOptions(Options):
    """How many images go through the model at a time, and what happens to one that cannot be used."""

    topic = "images"

    batch_size: int = option("Images in one forward pass.", default=16)
    workers: int = option("Extra processes that read and prepare images.", default=0, least=0)
    strict: bool = option("Stop at the first image that cannot be used; do not skip it.")


class EngineOptions(Options):
    """``--engine``, ``--address`` and ``--gpus-per-worker``."""

    topic = "run"

    engine: str = option(
        "Where the images are read and the model runs: in this process, or on a Ray cluster, which needs"
        " hookscope[ray].",
        type=click.Choice(("local", "ray")),
        default="local",
    )
    address: str | None = option(
        "With --engine ray: the cluster, auto or HOST:PORT.  [default: start Ray on this machine]", metavar="ADDRESS"
    )
    gpus_per_worker: float | None = option(
        "With --engine ray: GPUs of each worker, also a fraction such as 0.5.  [default: 0]",
        metavar="N",
        type=FiniteRange(0),
    )

    def __post_init__(self) -> None:
        """Refuse options of a cluster without one, and a cluster inside torchrun."""
        if self.engine == "ray" and torchrun_rank() is not None:
            raise UsageError("--engine ray cannot be used under torchrun", do="use one of the two")
        given = {"--address": self.address, "--gpus-per-worker": self.gpus_per_worker}
        for name, value in given.items():
            if self.engine == "local" and value is not None:
                asked = f"{name} needs a cluster"
                raise UsageError(asked, "--engine local is this process", f"add --engine ray, or leave {name} out")

    def make(self, divides: bool = False) -> jobs.Engine:
        """The engine, which connects to its cluster when it runs; ``divides`` if the command calls `serve` too."""
        if self.engine == "ray":
            return jobs.RayEngine(self.address, self.gpus_per_worker or 0.0)
        if torchrun_rank() is not None:
            if not divides:
                asked = "torchrun divides the work of stats and check only"
                raise UsageError(asked, do="start this command without torchrun; --engine ray divides it too")
            return self._torchrun()
        return jobs.LocalEngine()

    def serve(self, load: Callable[[], models.LoadedModel]) -> None:
        """Work for rank 0 in another process of torchrun, on the model that ``load`` returns."""
        Output.now.quiet = True  # rank 0 says it
        engine = self._torchrun()
        with process.prints_to_standard_error():
            engine.serve(load())

    def _torchrun(self) -> jobs.TorchrunEngine:
        return jobs.TorchrunEngine(
            torchrun_rank() or 0, int(os.environ["WORLD_SIZE"]), local_rank=_number("LOCAL_RANK")
        )


def torchrun_rank() -> int | None:
    """The number of this process among those that torchrun started; None if it was started otherwise, or is alone."""
    size = _number("WORLD_SIZE")
    return _number("RANK") if size is not None and size > 1 and "MASTER_ADDR" in os.environ else None


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


_NOTES_SHOWN = 3
_KINDS_SHOWN = 3


class ImageRun(contextlib.ExitStack):
    """What a run over ``count`` images shows, which it saves in ``file``; its bar appears when the run has started.

    Attributes:
        listener: What the run calls.
        skipped: Number of images that could not be used.
        total: Number of images in words.
    """

    def __init__(self, count: int, file: str | None, strict: bool) -> None:
        super().__init__()
        self._count, self._file = count, file
        self._strict = strict or count == 1  # the error of a single image ends the run
        self.total = counted(count, "image")
        self.skipped = 0
        self._noted = 0
        self._rest: Counter[str] = Counter()
        self._advance: Callable[[int], None] = lambda count: None

    @property
    def listener(self) -> Listener:
        return Listener(self._start, lambda count: self._advance(count), self._skip, self._note, self._interrupt)

    def _skip(self, position: int, name: str, error: HookscopeError) -> None:
        """Report an image; with ``strict`` its error ends the run."""
        if self._strict:
            raise error
        self.skipped += 1
        Output.now.image_error(str(error))

    def _note(self, name: str, text: str) -> None:
        """Print the first three notes; a folder may hold thousands of images with the same note."""
        self._noted += 1
        if self._noted <= _NOTES_SHOWN:
            note(f"Note: {name}: {text}")
        else:
            self._rest[text] += 1

    def __exit__(self, *error: Any) -> None:
        """Sum up in one line the notes that were not shown."""
        if self._rest and error[0] is None:
            total, shown = self._rest.total(), self._rest.most_common(_KINDS_SHOWN)
            kinds = [f"{text} ({count})" for text, count in shown]
            others = total - sum(count for _, count in shown)
            kinds += [f"others ({others})"] if others else []
            note(f"Note: {counted(total, 'more note')}: {', '.join(kinds)}")
        super().__exit__(*error)

    def _start(self, done: int) -> None:
        """Show the bar of the images that an earlier run has not done."""
        if done:
            note(f"Note: {self._file} holds {done:,} of {self.total}")
        self._advance = self.enter_context(progress.image_progress(self._count - done))
        self.enter_context(process.prints_to_standard_error())

    def _interrupt(self, done: int) -> None:
        error = sys.exception()
        if done:
            fails_again = isinstance(error, LayerError)
            do = "change the options and start again with --overwrite" if fails_again else "add --resume to continue"
            note(f"Note: {self._file} holds {done:,} of {self.total}; {do}")
        elif isinstance(error, KeyboardInterrupt | SystemExit):  # an error says itself what happened
            note(f"Note: interrupted before an image was saved in {self._file}")


class OfManyImages(OfImages, BatchOptions):
    """A command that takes many images through the model, in batches and on any engine."""

    engine: EngineOptions = group(EngineOptions)


class Measuring(OfManyImages):
    """A command that measures layers on many images."""

    types: tuple[str, ...] = type_option()
    ops: bool | None = ops_option()

    def start(self) -> Any:
        """Other processes of torchrun work for the first."""
        return self.engine.serve(self.model.load) if torchrun_rank() else super().start()

    def measured(
        self,
        rank: bool,
        save: str | None = None,
        resume: bool = False,
        every: bool = False,
        allow: hooks.Selection | None = None,
        ranges: bool = False,
    ) -> tuple[statistics.SavedStatistics, int]:
        """Run every image through the model; returns the statistics and the number of skipped images."""
        engine, net = self.engine.make(divides=True), self.model.load()
        ops = every if self.ops is None else self.ops
        check_choice(net, self.types, allow)
        if allow is not None:
            allow.check_names([name for name, _ in net.model.named_modules()], net.name, ops=ops)
        with ImageRun(len(self.images), save, self.strict) as run:
            saved = statistics.measure_images(
                net,
                self.images,
                self.layers,
                self.types or None,
                rank=rank,
                ops=ops,
                every=every,
                ranges=ranges,
                save=save,
                resume=resume,
                run=jobs.RunSettings(self.batch_size, self.workers, engine, run.listener),
            )
        if self.layers is None and (words := operations_in_words(saved.coverage.operations)):
            note(f"Note: not measured: {words}; --ops measures them")
        skipped = saved.progress.skipped if saved.progress is not None else 0
        if skipped:
            note(f"Note: {skipped:,} of {run.total} skipped")
        return saved, skipped
