"""Statistics of many images in one run, which saves its progress and can be resumed after an interruption."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from hookscope.display import Cells, Shown
from hookscope.errors import InputError, UsageError
from hookscope.findings import counted
from hookscope.hooks import Layers
from hookscope.images import is_remote, list_pictures, warn_of_image
from hookscope.jobs import (
    Part,
    Progress,
    RunIdentity,
    RunSettings,
    SavedRun,
    StateKind,
    layers_in_words,
    picture_of,
    pictures_in,
    read_state,
    write_state,
)
from hookscope.models import Batch, LoadedModel, as_loaded
from hookscope.statistics.collector import StatisticsCollector
from hookscope.statistics.totals import Coverage, RunningStatistics
from hookscope.system import StrPath

_GIVE = "give what ‹SavedStatistics.save|`stats --save`› wrote"
_KIND = StateKind("saved statistics", _GIVE)


AS_IN_TRAINING = "as in training"
"""The preprocessing of a reference that a training wrote."""


@dataclass(frozen=True)
class StatisticsSource(RunIdentity):
    """What was measured; only running statistics of the same source can be merged.

    ``assumed`` says that nobody has said the mean and the standard deviation of ``preprocess``.
    """

    rank: bool = False
    assumed: bool = False


@dataclass(frozen=True, repr=False)
class SavedStatistics(Shown):
    """Running statistics, their source, and the progress of their run; None if merged from several runs.

    ``coverage`` is of the run which made them; it is not saved. With ``ranges`` in ``totals`` they are a reference.
    """

    source: StatisticsSource
    totals: RunningStatistics
    progress: Progress | None = None
    coverage: Coverage = field(default_factory=Coverage, compare=False)

    @classmethod
    def of(cls, net: LoadedModel | nn.Module, totals: RunningStatistics) -> Self:
        """``totals`` that a `StatisticsCollector` with ``ranges`` measured, to be saved as a reference with `save`."""
        return cls(StatisticsSource.of(as_loaded(net), "all", False), totals)

    def save(self, path: StrPath) -> None:
        """Write these to ``path`` as JSON for `load_statistics`, whole or not at all; WriteError if that fails."""
        progress = None if self.progress is None else self.progress.state_dict()
        content = {"source": asdict(self.source), "progress": progress, "tally": self.totals.state_dict()}
        write_state(path, _KIND, content)

    def _cells(self) -> Cells:
        source = {name: getattr(self.source, name) for name in ("model", "weights", "preprocess")}
        return {**source, **self.totals._cells(), "ranges": len(self.totals.ranges)}


def load_statistics(path: StrPath) -> SavedStatistics:
    """Read the statistics that a run has saved.

    Raises:
        InputError: There is no such file, or it is damaged, of another kind or of another format.
    """

    def restored(content: dict[str, Any]) -> SavedStatistics:
        progress = content["progress"]
        source, totals = StatisticsSource(**content["source"]), RunningStatistics.from_state(content["tally"])
        return SavedStatistics(source, totals, None if progress is None else Progress.from_state(progress))

    return read_state(path, _KIND, restored)


def as_reference(given: SavedStatistics | StrPath) -> SavedStatistics:
    """``given``, or what its file holds; an InputError if there is no such file, or it holds no ranges."""
    saved = given if isinstance(given, SavedStatistics) else load_statistics(given)
    if not saved.totals.ranges:
        do = "measure again with ‹StatisticsCollector(net, ranges=True)|`hookscope stats --save`›"
        raise InputError("these statistics hold no ranges, which a reference needs", do=do)
    return saved


def merge_statistics(paths: Sequence[StrPath], on_note: Callable[[str, str], None] = warn_of_image) -> SavedStatistics:
    """Merge the running statistics of several files.

    ``on_note`` gets a file that does not know all its images, which may count twice, and that as text; it warns by
    default.

    Raises:
        InputError: A file cannot be read, the sources differ, or two files hold the same images.
    """
    if not paths:
        raise InputError("no saved statistics to merge", do=_GIVE)
    whole = None
    runs: dict[Progress, StrPath] = {}
    owners: dict[int, StrPath] = {}
    for path in paths:
        saved = load_statistics(path)
        pictures = saved.totals.pictures
        if whole is not None and (difference := whole.source.difference(saved.source)):
            raise InputError(f"'{paths[0]}' and '{path}' do not match", f"the first has {difference}")
        if common := [number for number, picture in enumerate(pictures, 1) if picture in owners]:
            exists = f"{counted(len(common), 'image')} would count twice, the first is number {common[0]} of '{path}'"
            raise _same_images(owners[pictures[common[0] - 1]], path, exists)
        owners |= dict.fromkeys(pictures, path)
        if len(pictures) < saved.totals.images:
            if saved.progress is not None and saved.progress in runs:
                raise _same_images(runs[saved.progress], path, "their names are the same")
            if len(paths) > 1:
                unknown = counted(saved.totals.images - len(pictures), "image")
                on_note(str(path), f"it does not identify {unknown}, which may count twice")
            if saved.progress is not None:
                runs[saved.progress] = path
        if whole is None:
            whole = saved
        else:
            whole.totals.merge(saved.totals)
    assert whole is not None
    return whole if len(paths) == 1 else replace(whole, progress=None)


def _same_images(first: StrPath, second: StrPath, exists: str) -> InputError:
    return InputError(f"'{first}' and '{second}' hold the same images", exists, "leave one of them out")


def measure_images(
    loaded: LoadedModel,
    paths: StrPath | Iterable[StrPath],
    layers: Layers | None = None,
    types: Iterable[str] | None = None,
    *,
    rank: bool = False,
    ops: bool = False,
    every: bool = False,
    ranges: bool = False,
    save: StrPath | None = None,
    resume: bool = False,
    run: RunSettings = RunSettings(),
) -> SavedStatistics:
    """Measure every image with a `StatisticsCollector`; images that cannot be used are counted and left out.

    With ``save`` the file is written about every ten seconds and whenever the run ends, also by an exception or a
    signal. A later run with ``resume`` measures only the images that are missing in the file.

    ``paths``, files and folders, keep their order between runs; ``layers``, ``types`` and ``ops`` are as in the
    collector. ``every`` stands for every call of every module but those that hand on what another returned. With
    ``ranges`` or ``save`` the result is a reference. ``run`` says how the run is done.

    Raises:
        InputError: No image could be used, or ``save`` holds statistics of another model or of other images.
        UsageError: ``save`` was merged from several runs.
        LayerError: ``layers`` or ``types`` name a layer that the model does not have.
    """
    default = "every convolution, Linear layer, activation function and output"
    source = StatisticsSource.of(
        loaded,
        layers_in_words(default if layers is None else layers, types) + (", with operations" if ops else ""),
        save is not None,
        rank=rank,
        assumed=loaded.preprocess.assumes_values,
    )
    settings = {"rank": rank, "ops": ops, "handed_on": not every, "ranges": ranges or save is not None}
    kinds, size = tuple(types) if types else None, run.images_in_pass
    job = StatisticsJob("*" if every else layers, kinds, settings, size, run.workers)
    measured = StatisticsRun(loaded, list_pictures(paths), job, run, save, source)
    measured.do(resume)
    return measured.state()


@dataclass(frozen=True, slots=True)
class MeasuredImages:
    totals: RunningStatistics
    coverage: Coverage


@dataclass(frozen=True, slots=True)
class StatisticsJob:
    """The `Job` that measures images with a `StatisticsCollector`; the first three fields are the collector's."""

    layers: Layers | None
    types: tuple[Any, ...] | None
    settings: Mapping[str, bool]
    batch_size: int
    workers: int

    @contextlib.contextmanager
    def open(self, net: LoadedModel) -> Iterator[Callable[[Batch], MeasuredImages]]:
        """Measure batches; the hooks stay on for all passes."""
        collector = StatisticsCollector(net.model, self.layers, self.types, **self.settings)

        def measure(batch: Batch) -> MeasuredImages:
            collector.totals = RunningStatistics()
            collector.name_images(batch.names)
            net.model(*batch.inputs)
            return MeasuredImages(collector.totals, collector.coverage)

        with torch.no_grad(), collector:
            yield measure

    def merge(self, values: Sequence[MeasuredImages]) -> MeasuredImages:
        merged = MeasuredImages(RunningStatistics(), Coverage())
        for value in values:
            merged.totals.merge(value.totals)
            merged.coverage.merge(value.coverage)
        return merged


@dataclass
class StatisticsRun(SavedRun[MeasuredImages]):
    """One run over the images: what is measured, done and lost so far."""

    source: StatisticsSource
    totals: RunningStatistics = field(default_factory=RunningStatistics)
    coverage: Coverage = field(default_factory=Coverage)
    pictures: set[int] = field(default_factory=set)

    def load(self, file: StrPath) -> Progress:
        name, saved = str(os.fspath(file)), load_statistics(file)
        saved.source.check_resumed_by(self.source, name, "give what it was made with, or save to another file")
        progress = saved.progress
        if progress is None:
            raise UsageError(f"'{name}' was merged from several runs", do="measure the rest and merge again")
        self._check_images(name, saved.totals, progress)
        self.totals = saved.totals
        self.pictures.update(saved.totals.pictures)
        return progress

    def _check_images(self, name: str, totals: RunningStatistics, progress: Progress) -> None:
        """Refuse to resume a run over other images: by their files, or by their names if the file knows no more."""
        exists = f"its first {progress.done} are not of this run"
        remote = any(map(is_remote, self.paths[: progress.done]))  # to read them all again may take hours
        if len(totals.pictures) == progress.done - progress.skipped and not remote:
            here = pictures_in(self.paths[: progress.done])
            others = (Counter(totals.pictures) - Counter(picture for picture in here if picture is not None)).total()
            same = len(here) == progress.done and others <= here.count(None)  # a pipe cannot be read again
            exists = f"{others} of the first {progress.done} are not of this run" if others else exists
        else:
            same = Progress.after(self.paths, progress.done, progress.skipped) == progress
            why = "its images are remote" if remote else "it was saved without the identity of its images"
            self.settings.listener.note(name, f"{why}: only their names are compared")
        if not same:
            do = "name the same images in the same order"
            raise InputError(f"'{name}' was measured on other images", exists, do)

    def report(self, part: Part[MeasuredImages]) -> None:
        super().report(part)
        for name, picture in zip(part.names, map(picture_of, part.sha256), strict=True):
            if picture in self.pictures:
                self.settings.listener.note(name, "counted twice: an earlier image has the same content")
            self.pictures.add(picture)

    def merge(self, part: Part[MeasuredImages], value: MeasuredImages) -> None:
        self.totals.merge(value.totals)
        self.totals.pictures.extend(map(picture_of, part.sha256))
        self.coverage.merge(value.coverage)

    def state(self) -> SavedStatistics:
        return SavedStatistics(self.source, self.totals, self.progress, self.coverage)

    def write(self, file: StrPath) -> None:
        self.state().save(file)
