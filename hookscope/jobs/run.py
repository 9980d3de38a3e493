"""A job on many images: the parts that it gives, and a run that saves what it has and continues when interrupted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import nn

from hookscope.errors import HookscopeError, InputError, UsageError, WriteError, check_whole, kind_of
from hookscope.hooks import Layers, Selection, tensors_in
from hookscope.images import Listener
from hookscope.models import Batch, LoadedModel, load_batches, model_errors_as_input_errors
from hookscope.system import StrPath, signals_held

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


def fingerprint_of(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers with their names."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name}\0".encode())
        for tensor in tensors_in(value).values():  # a quantized layer packs weight and bias
            values = tensor.dequantize() if tensor.is_quantized else tensor
            digest.update(f"{values.dtype} {tuple(values.shape)}\0".encode())
            digest.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def layers_in_words(layers: Layers, types: Iterable[Any] | None = None) -> str:
    """A selection of layers, as saved files hold it."""
    words = str(layers) if isinstance(layers, str | int | Selection) else ", ".join(map(str, Selection(layers).terms))
    return words + (f" of {', '.join(map(str, types))}" if types else "")


def picture_of(sha256: str) -> int:
    """The identity of an image: the first 64 bits of the SHA-256 of its file, which has the same under any name."""
    return int.from_bytes(bytes.fromhex(sha256[:16]), "big", signed=True)


def pictures_in(paths: Iterable[str]) -> list[int | None]:
    """The identity of each image file; None for pipes and files that cannot be read."""
    pictures: list[int | None] = []
    for path in paths:
        pictures.append(None)
        with contextlib.suppress(OSError, ValueError):
            if os.path.isfile(path):
                with open(path, "rb") as stream:
                    pictures[-1] = picture_of(hashlib.file_digest(stream, "sha256").hexdigest())
    return pictures


AGAIN = "give what it was made with, or start again with ‹overwrite=True|--overwrite›"
"""The advice where a run of something else is resumed."""


@dataclass(frozen=True)
class RunSettings:
    """How a run over images is done.

    Attributes:
        batch_size: Images in one forward pass; None for 16, and in `compare` for as many as fit.
        workers: Processes that read and prepare images; 0 reads them in this process.
        engine: What runs the passes on files; None for this process.
        listener: What is called while the run goes on.

    Raises:
        UsageError: ``batch_size`` or ``workers`` is too small.

    Example:
        >>> RunSettings(workers=4, listener=Listener(skipped=lambda position, name, error: print(error))).workers
        4
    """

    batch_size: int | None = None
    workers: int = 0
    engine: Engine | None = None
    listener: Listener = field(default=Listener(), repr=False)

    def __post_init__(self) -> None:
        check_whole("batch size", self.batch_size, optional=True)
        check_whole("workers", self.workers, 0)
        if self.engine is not None and not hasattr(self.engine, "run"):
            raise UsageError(f"expected an engine, got {kind_of(self.engine)}", do="give hookscope.RayEngine()")

    @property
    def images_in_pass(self) -> int:
        """The batch size, or the usual one."""
        return self.batch_size or 16


@dataclass(frozen=True)
class RunIdentity:
    """What a run measures, in words; a saved run is resumed or merged only by a run of the same."""

    model: str
    weights: str
    fingerprint: str  # see `fingerprint_of`; empty if nothing is saved
    preprocess: str
    layers: str

    @classmethod
    def of(cls, net: LoadedModel, layers: str, saved: bool = True, **settings: Any) -> Self:
        about = {"fingerprint": fingerprint_of(net.model) if saved else "", "preprocess": net.preprocess.describe()}
        return cls(model=net.name, weights=net.weights, layers=layers, **(about | settings))

    def difference(self, other: RunIdentity) -> str:
        """The first difference in words, such as ``model a, not b``; empty if there is none."""
        here = asdict(other)
        for name, value in asdict(self).items():
            both = (setting if isinstance(setting, list | tuple) else [setting] for setting in (value, here[name]))
            old, new = (", ".join(map(str, settings)) or "none" for settings in both)
            if old.replace(", ", ",") == new.replace(", ", ","):
                continue  # version 0.1.0 wrote several selections with a space
            if name == "fingerprint":
                return f"other weights of {self.model}"
            return f"{'preprocessing' if name == 'preprocess' else name} {old}, not {new}"
        return ""

    def check_resumed_by(self, other: RunIdentity, name: str, do: str = AGAIN) -> None:
        """Refuse to resume the run in the file ``name`` with a run of something else."""
        if difference := self.difference(other):
            raise InputError(f"cannot resume '{name}'", f"it was made with {difference}", do)


_SAVE_EVERY = 10.0  # seconds of work that a killed run may lose
_SAVE_SHARE = 20.0  # save at most this share of the time: the covariance of every layer is large


def hash_of_names(names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: the number of images that are done, SHA-256 of their names, and how many were skipped."""

    done: int
    names: str
    skipped: int = 0

    @classmethod
    def after(cls, paths: Sequence[str], done: int, skipped: int = 0) -> Progress:
        return cls(done, hash_of_names(paths[:done]), skipped)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "names": self.names, "lost": self.skipped}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        return cls(state["done"], state["names"], state["lost"])


@dataclass
class SavedRun(ABC, Generic[Value]):
    """One run over the images: what is found, done and saved so far."""

    net: LoadedModel
    paths: Sequence[str]
    job: Job[Value]
    settings: RunSettings
    file: StrPath | None
    done: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)
    saved: int = field(default=0, init=False)  # images that are done in the file
    earlier: int = field(default=0, init=False)  # images that an earlier run has done
    next_save: float = field(default_factory=lambda: time.monotonic() + _SAVE_EVERY, init=False)

    @property
    def images(self) -> int:
        """Images that were used."""
        return self.done - self.skipped

    def load(self, file: StrPath) -> Progress:
        """Load what an earlier run has saved, if it was a run of the same; a run without a file has nothing to load."""
        return self.progress

    @abstractmethod
    def merge(self, part: Part[Value], value: Value) -> None: ...

    def write(self, file: StrPath) -> None: ...

    def finish(self) -> None:
        self.save()

    def do(self, resume: bool = False) -> None:
        with contextlib.closing(self.parts(resume)) as parts:
            for _ in parts:
                pass

    def parts(self, resume: bool = False) -> Generator[Part[Value]]:
        """Do the images that are not done yet; gives each part after it was added."""
        listener, engine = self.settings.listener, self.settings.engine or LocalEngine()
        if resume and self.file is not None and os.path.exists(self.file):
            progress = self.load(self.file)
            self.skipped = progress.skipped
            self.done = self.saved = self.earlier = progress.done
        listener.start(self.done)
        try:
            with contextlib.closing(engine.run(self.job, self.net, self.paths, self.done)) as parts:
                for part in parts:
                    self.report(part)
                    with signals_held():  # what is merged in part, or merged and not marked as done, would count twice
                        if part.value is not None:
                            self.merge(part, part.value)
                        self.skipped += len(part.skipped)
                        self.done = part.done
                    listener.progress(len(part.names) + len(part.skipped))
                    if self.is_save_due:
                        self.save()
                    yield part
            self.done = max(self.done, len(self.paths))
            if not self.images:
                raise InputError("no image could be used", f"{self.skipped} were tried", "see the errors above")
            self.finish()
        except BaseException:
            with contextlib.suppress(WriteError):  # the error that ends the run is the one to report
                self.save()
            if self.file is not None:
                listener.interrupt(self.saved)
            raise

    @property
    def is_save_due(self) -> bool:
        """Whether to save: every ten seconds, or less often if a save takes long."""
        return time.monotonic() > self.next_save

    def report(self, part: Part[Value]) -> None:
        """Tell the notes and the skipped images."""
        for name, text in part.notes:
            self.settings.listener.note(name, text)
        for image in part.skipped:
            self.settings.listener.skipped(image.position, image.name, image.error)

    @property
    def progress(self) -> Progress:
        return Progress.after(self.paths, self.done, self.skipped)

    def save(self) -> None:
        """Write the file; a run that found nothing does not overwrite the file of an earlier run."""
        if self.file is not None and self.images:
            began = time.monotonic()
            self.write(self.file)
            now, self.saved = time.monotonic(), self.done
            self.next_save = now + max(_SAVE_EVERY, _SAVE_SHARE * (now - began))
