"""A run of a job over a list of images, which saves what it has and continues after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from hookscope.errors import InputError
from hookscope.hooks import Layers, Selection, tensors_in
from hookscope.jobs.job import Engine, Job, Part
from hookscope.models import LoadedModel, OnLost, OnNote
from hookscope.system import StrPath, signals_held


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
    words = str(layers) if isinstance(layers, str | int | Selection) else ", ".join(map(str, layers))
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


_SAVE_EVERY = 10.0  # seconds of work that a killed run may lose
_SAVE_SHARE = 20.0  # save at most this share of the time: the covariance of every layer is large

Value = TypeVar("Value")


class SaveTimer:
    """When to save: every ten seconds, or less often if a save takes long."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SAVE_EVERY

    @property
    def is_due(self) -> bool:
        return time.monotonic() > self._next

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around each save."""
        began = time.monotonic()
        yield
        now = time.monotonic()
        self._next = now + max(_SAVE_EVERY, _SAVE_SHARE * (now - began))


def hash_of_names(names: Sequence[str]) -> str:
    """SHA-256 of a list of names."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: the number of images measured or lost, SHA-256 of their names, and the number of lost ones."""

    done: int
    names: str
    lost: int = 0

    @classmethod
    def after(cls, paths: Sequence[str], done: int, lost: int = 0) -> Progress:
        """The progress of a run after the first ``done`` of ``paths``."""
        return cls(done, hash_of_names(paths[:done]), lost)


@dataclass
class SavedRun(ABC, Generic[Value]):
    """One run over the images: what is found, done and lost so far."""

    net: LoadedModel
    paths: Sequence[str]
    job: Job[Value]
    file: StrPath | None
    on_lost: OnLost
    on_progress: Callable[[int], None]
    on_note: OnNote
    done: int = 0
    lost: int = 0
    timer: SaveTimer = field(default_factory=SaveTimer)

    @property
    @abstractmethod
    def images(self) -> int:
        """The number of images used."""

    @abstractmethod
    def load(self, file: StrPath) -> Progress:
        """Load what an earlier run has saved, if it was a run of the same."""

    @abstractmethod
    def merge(self, part: Part[Value], value: Value) -> None:
        """Add the value of ``part``."""

    @abstractmethod
    def write(self, file: StrPath) -> None:
        """Write what was found so far."""

    def do(
        self, engine: Engine, resume: bool, on_start: Callable[[int], None], on_interrupt: Callable[[int], None]
    ) -> None:
        """Do the images that are not done yet.

        Raises:
            InputError: No image could be used.
        """
        if resume and self.file is not None and os.path.exists(self.file):
            progress = self.load(self.file)
            self.done, self.lost = progress.done, progress.lost
        on_start(self.done)
        try:
            with contextlib.closing(engine.run(self.job, self.net, self.paths, self.done)) as parts:
                for part in parts:
                    self._add(part)
                    self.on_progress(len(part.names) + len(part.lost))
                    if self.timer.is_due:
                        self.save()
            self.done = len(self.paths)
        except BaseException:
            self.save()
            if self.file is not None and self.images:
                on_interrupt(self.done)
            raise
        if not self.images:
            raise InputError("no image could be used", f"{self.lost} were tried", "see the errors above")

    def _add(self, part: Part[Value]) -> None:
        self.report(part)
        with signals_held():  # what is merged in part, or merged and not marked as done, would count twice
            if part.value is not None:
                self.merge(part, part.value)
            self.lost += len(part.lost)
            self.done = part.done

    def report(self, part: Part[Value]) -> None:
        """Tell the notes and the lost images of ``part``."""
        part.report(self.on_lost, self.on_note)

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return Progress.after(self.paths, self.done, self.lost)

    def save(self) -> None:
        """Write the file; a run that found nothing does not overwrite that of an earlier run."""
        if self.file is not None and self.images:
            with self.timer.saving():
                self.write(self.file)
