"""Statistics of many images in one run, which saves its progress and can be resumed after an interruption."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hookscope.errors import HookscopeError, InputError, UsageError
from hookscope.hooks import Layers, Selection
from hookscope.models import (
    Batch,
    LoadedModel,
    OnLost,
    OnNote,
    load_batches,
    model_errors_as_input_errors,
    raise_lost,
    warn_of_image,
)
from hookscope.statistics.collector import StatisticsCollector
from hookscope.statistics.storage import (
    Progress,
    SavedStatistics,
    Source,
    check_same_source,
    fingerprint_of,
    load_statistics,
    picture_of,
    pictures_in,
    save_statistics,
)
from hookscope.statistics.totals import RunningStatistics
from hookscope.system import StrPath, signals_held

_SAVE_EVERY = 10.0  # seconds of work that a killed run may lose
_SAVE_SHARE = 20.0  # save at most this share of the time: the covariance of every layer is large


def measure_images(
    loaded: LoadedModel,
    paths: Sequence[str],
    layers: Layers | None = None,
    types: Iterable[str] | None = None,
    *,
    rank: bool = False,
    ops: bool = False,
    every: bool = False,
    batch_size: int = 16,
    workers: int = 0,
    save: StrPath | None = None,
    resume: bool = False,
    on_start: Callable[[int], None] = lambda done: None,
    on_progress: Callable[[int], None] = lambda count: None,
    on_lost: OnLost = raise_lost,
    on_note: OnNote = warn_of_image,
    on_interrupt: Callable[[int], None] = lambda done: None,
) -> SavedStatistics:
    """Measure every image with a `StatisticsCollector`; images that cannot be used are counted and left out.

    With ``save`` the file is written about every ten seconds and whenever the run ends, also by an exception or a
    signal. A later run with ``resume`` measures only the images that are missing in the file.

    ``paths`` keep their order between runs; ``layers``, ``types`` and ``ops`` are those of the collector. ``every``
    stands for every call of every module but those that hand on what another returned. ``workers`` processes read the
    images, 0 reads them in this process. ``on_start`` gets the number of images already done, ``on_progress`` the
    number in each batch and 1 for each lost image. ``on_lost`` gets position, name and error of a lost image, and
    raises by default; ``on_note`` gets the name of an image and a note on it, and warns by default. ``on_interrupt``
    gets the number of images in ``save`` when an exception ends the run.

    Raises:
        InputError: No image could be used, or ``save`` holds statistics of another model or of other images.
        UsageError: ``save`` was merged from several runs.
        LayerError: ``layers`` or ``types`` name a layer that the model does not have.
    """
    chosen = "every convolution, Linear layer, activation function and output" if layers is None else _words(layers)
    source = Source(
        loaded.name,
        loaded.weights,
        "" if save is None else fingerprint_of(loaded.model),
        loaded.preprocess.describe(),
        chosen + (f" of {_words(types)}" if types else "") + (", with operations" if ops else ""),
        rank,
        "values" in loaded.preprocess.assumed,
    )
    collector = StatisticsCollector(
        loaded.model, "*" if every else layers, types, rank=rank, ops=ops, handed_on=not every
    )
    run = _Run(loaded, paths, collector, source, save, on_lost, on_progress, on_note)
    if resume:
        run.resume()
    on_start(run.done)
    try:
        run.measure(batch_size, workers)
    except BaseException:
        run.save()
        if save is not None and run.totals.images:
            on_interrupt(run.done)
        raise
    run.save()
    if not run.totals.images:
        raise InputError("no image could be used", f"{len(run.lost)} were tried", "see the errors above")
    return run.state()


def _words(selection: Any) -> str:
    return str(selection) if isinstance(selection, str | int | Selection) else ", ".join(map(str, selection))


@dataclass
class _Run:
    """One run over the images: what is measured, done and lost so far."""

    loaded: LoadedModel
    paths: Sequence[str]
    collector: StatisticsCollector
    source: Source
    file: StrPath | None
    on_lost: OnLost
    on_progress: Callable[[int], None]
    on_note: OnNote
    totals: RunningStatistics = field(default_factory=RunningStatistics)
    pictures: set[int] = field(default_factory=set)
    done: int = 0
    lost: list[int] = field(default_factory=list)
    next_save: float = field(default_factory=lambda: time.monotonic() + _SAVE_EVERY)

    def resume(self) -> None:
        """Load what an interrupted run has saved, if there is a file."""
        if self.file is None or not os.path.exists(self.file):
            return
        name, saved = os.fspath(self.file), load_statistics(self.file)
        check_same_source(saved.source, self.source, str(name), "this run")
        progress = saved.progress
        if progress is None:
            raise UsageError(f"'{name}' was merged from several runs", do="measure the rest and merge again")
        self._check_images(name, saved.totals, progress)
        self.totals, self.done = saved.totals, progress.done
        self.pictures.update(saved.totals.pictures)
        self.lost = [-1] * progress.lost  # their positions are unknown, but below done

    def _check_images(self, name: str, totals: RunningStatistics, progress: Progress) -> None:
        """Refuse to resume a run over other images: by their files, or by their names if the file knows no more."""
        exists = f"its first {progress.done} are not those of this run"
        if len(totals.pictures) == progress.done - progress.lost:
            here = pictures_in(self.paths[: progress.done])
            others = (Counter(totals.pictures) - Counter(picture for picture in here if picture is not None)).total()
            same = len(here) == progress.done and others <= here.count(None)  # a pipe cannot be read again
            exists = f"{others} of the first {progress.done} are not those of this run" if others else exists
        else:
            same = Progress.after(self.paths, progress.done, progress.lost) == progress
            self.on_note(name, "it was saved without the identity of its images: only their names are compared")
        if not same:
            do = "name the same images in the same order"
            raise InputError(f"'{name}' was measured on other images", exists, do)

    def measure(self, batch_size: int, workers: int) -> None:
        """Measure the images that are not done yet."""
        first = self.done

        def lost(position: int, name: str, error: HookscopeError) -> None:
            self._lose(first + position, name, error)
            self.on_progress(1)

        batches = load_batches(self.loaded, self.paths[first:], batch_size, workers, lost, self.on_note)
        # the hooks stay on for all passes
        with contextlib.closing(batches), torch.no_grad(), self.collector:
            for batch in batches:
                self._pass(batch, [first + position for position in batch.positions])
                self.on_progress(batch.count)
                if time.monotonic() > self.next_save:
                    self.save()
        self.done = len(self.paths)

    def _pass(self, batch: Batch, positions: Sequence[int]) -> None:
        self.collector.totals = RunningStatistics()
        self.collector.name_images(batch.names)
        pictures = [picture_of(sha256) for sha256 in batch.sha256]
        for name, picture in zip(batch.names, pictures, strict=True):
            if picture in self.pictures:
                self.on_note(name, "counted twice: an earlier image has the same content")
            self.pictures.add(picture)
        try:
            with model_errors_as_input_errors(self.loaded.name, batch.inputs):
                self.loaded.model(*batch.inputs)
            with signals_held():  # totals merged in part, or merged and not marked as done, would count images twice
                self.totals.merge(self.collector.totals)
                self.totals.pictures.extend(pictures)
                self.done = positions[-1] + 1
        except InputError as error:
            one_size = not self.loaded.preprocess.any_size
            if not self.totals.images and one_size:
                raise  # the model will refuse all other images too
            for position, name in zip(positions, batch.names, strict=True):
                self._lose(position, name, InputError(f"{name}: {error.asked}", error.exists, error.do))
            self.done = positions[-1] + 1

    def _lose(self, position: int, name: str, error: HookscopeError) -> None:
        self.on_lost(position, name, error)
        self.lost.append(position)

    def state(self) -> SavedStatistics:
        # a resumed run meets the images again that were lost ahead of the last batch
        lost = sum(position < self.done for position in self.lost)
        progress = Progress.after(self.paths, self.done, lost)
        return SavedStatistics(self.source, self.totals, progress, self.collector.coverage)

    def save(self) -> None:
        """Write the file; a run that measured nothing does not overwrite that of an earlier run."""
        if self.file is None or not self.totals.images:
            return
        began = time.monotonic()
        save_statistics(self.file, self.state())
        now = time.monotonic()
        self.next_save = now + max(_SAVE_EVERY, _SAVE_SHARE * (now - began))
