"""A job on many images: what it does with a batch, the parts that it gives, and the engine that runs it here."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from hookscope.errors import HookscopeError, InputError, InstallationError, UsageError, is_out_of_memory
from hookscope.images import Listener
from hookscope.models import Batch, LoadedModel, describe_error, load_batches, model_errors_as_input_errors

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class SkippedImage:
    """An image that could not be used, by its position in the list of images."""

    position: int
    name: str
    error: HookscopeError


@dataclass(frozen=True, slots=True)
class Part(Generic[Value]):
    """What a job found on some images; the parts of a run cover the list without gap, in its order."""

    value: Value | None  # the result; None if no image of the part could be used
    done: int  # images from the beginning of the list that are used or skipped
    positions: tuple[int, ...] = ()  # of the used images in the list, which have ``names`` and ``sha256``
    names: tuple[str, ...] = ()
    sha256: tuple[str, ...] = ()
    skipped: tuple[SkippedImage, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()  # names of images, each with a note on it


class Job(Protocol[Value]):
    """What to do with each batch of images. It can be pickled, and so can the values that it gives."""

    @property
    def batch_size(self) -> int:
        """Images in one forward pass."""

    @property
    def workers(self) -> int:
        """Processes that read and prepare images, 0 for none but the model's process."""

    def open(self, net: LoadedModel) -> AbstractContextManager[Callable[[Batch], Value]]:
        """A ``with`` block that gives the function of a batch, which runs the model and returns a value."""

    def merge(self, values: Sequence[Value]) -> Value:
        """One value for several that follow each other."""


class Engine(Protocol):
    """What runs a job on images: this process, or others."""

    def run(self, job: Job[Any], net: LoadedModel, paths: Sequence[str], first: int = 0) -> Generator[Part[Any]]:
        """Do ``job`` on the images of ``paths`` from position ``first`` on; each part comes once, in order."""


class LocalEngine:
    def run(self, job: Job[Value], net: LoadedModel, paths: Sequence[str], first: int = 0) -> Generator[Part[Value]]:
        with job.open(net) as measure:
            yield from parts_of(job, net, paths[first:], first, measure)


def parts_of(
    job: Job[Value], net: LoadedModel, paths: Sequence[str], first: int, measure: Callable[[Batch], Value]
) -> Iterator[Part[Value]]:
    """A part for each batch of ``paths``, which begin at position ``first`` of the list; others are skipped."""
    skipped: list[SkippedImage] = []
    notes: list[tuple[str, str]] = []
    listener = Listener(
        skipped=lambda *image: skipped.append(SkippedImage(*image)), note=lambda *note: notes.append(note)
    )
    works = first > 0
    batches = load_batches(net, paths, job.batch_size, job.workers, listener, first)
    with contextlib.closing(batches):
        for batch in batches:
            done, value = batch.positions[-1] + 1, None
            try:
                with model_errors_as_input_errors(net.name, batch.inputs):
                    value = measure(batch)
                works = True
            except InputError as error:
                if not works and not net.preprocess.any_size:
                    raise  # the model will refuse all other images too
                for position, name in zip(batch.positions, batch.names, strict=True):
                    of_image = InputError(f"{name}: {error.asked}", error.exists, error.do)
                    skipped.append(SkippedImage(position, name, of_image))
            used = (batch.positions, batch.names, batch.sha256) if value is not None else ((), (), ())
            while any(image.position == done for image in skipped):
                done += 1
            before = tuple(image for image in skipped if image.position < done)  # others were read ahead
            yield Part(value, done, *used, before, tuple(notes))
            skipped[:] = [image for image in skipped if image.position >= done]
            notes.clear()
    if skipped or notes:
        yield Part(None, first + len(paths), skipped=tuple(skipped), notes=tuple(notes))


BATCHES = 4
"""Batches in a block: a part travels for each block, and a worker that dies loses one block."""


@dataclass(frozen=True, slots=True)
class Block:
    """Images that follow each other in the list, from position ``first`` on."""

    first: int
    paths: tuple[str, ...]


def blocks_of(paths: Sequence[str], first: int, size: int) -> Iterator[Block]:
    """The images from position ``first`` on; blocks end at multiples of ``size``, wherever a run goes on."""
    while first < len(paths):
        end = first - first % size + size
        yield Block(first, tuple(paths[first:end]))
        first = end


def refuse_own_files(paths: Sequence[str]) -> None:
    """Raise the error of a path that another process cannot read."""
    own = next((path for path in paths if path == "-" or path.startswith(("/dev/", "/proc/"))), None)
    if own is not None:
        asked = f"{'standard input' if own == '-' else own} cannot be read by other processes"
        raise UsageError(asked, do="name files, or use ‹LocalEngine()|--engine local›")


def done_packed(job: Job[Any], net: LoadedModel, block: Block, measure: Callable[[Batch], Any]) -> bytes:
    """The part of ``block`` for `unpacked`; an error is packed too, because other processes lose the type of one."""
    try:
        parts = list(parts_of(job, net, block.paths, block.first, measure))
        return pickle.dumps(_joined(job, parts))
    except Exception as error:
        return packed_error(error)


def _joined(job: Job[Any], parts: Sequence[Part[Any]]) -> Part[Any]:
    if len(parts) == 1:
        return parts[0]
    values = [part.value for part in parts if part.value is not None]
    lists = "positions", "names", "sha256", "skipped", "notes"
    joined = (tuple(each for part in parts for each in getattr(part, name)) for name in lists)
    return Part(job.merge(values) if values else None, parts[-1].done, *joined)


def packed_error(error: Exception) -> bytes:
    """``error`` without its traceback, for `unpacked`."""
    if not isinstance(error, HookscopeError):
        if is_out_of_memory(error):
            error = HookscopeError(
                "a worker is out of memory", do="use a smaller ‹batch_size|--batch-size›, or fewer workers"
            )
        else:
            error = HookscopeError(f"a worker cannot continue: {describe_error(error)}")
    return pickle.dumps(type(error)(*error.args))


def unpacked(data: bytes) -> Part[Any]:
    """The part in what `done_packed` returned."""
    result = pickle.loads(data)
    if isinstance(result, str):
        raise InstallationError(f"a worker cannot import hookscope: {result}", do="install it on every machine")
    if isinstance(result, HookscopeError):
        raise result
    assert isinstance(result, Part)
    return result
