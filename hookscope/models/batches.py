"""Pictures to batches for a model, read and prepared in worker processes, in their order."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from PIL import Image
from torch.utils.data import DataLoader

from hookscope.errors import HookscopeError, ImageError, check_whole
from hookscope.hooks import one_thread
from hookscope.images import Listener, read_picture, read_pipe
from hookscope.models.loaded import LoadedModel, as_batch
from hookscope.models.preprocess import Preprocess


@dataclass(frozen=True, eq=False)
class Batch:
    """Pictures for one forward pass.

    Attributes:
        names: Their paths, in order.
        positions: Their positions among all paths, from 0.
        inputs: The positional inputs of the pass, on the model's device.
        sha256: Hexadecimal SHA-256 of the bytes of each file.
        labels: The labels that a data set gives; empty for files.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]
    inputs: tuple[Any, ...]
    sha256: tuple[str, ...]
    labels: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def count(self) -> int:
        return len(self.names)


def load_batches(
    net: LoadedModel,
    paths: Sequence[str],
    batch_size: int = 16,
    workers: int = 0,
    listener: Listener = Listener(),
    first: int = 0,
) -> Generator[Batch, None, None]:
    """Read, prepare and batch pictures on demand; order and values do not depend on the number of workers.

    Of each ``batch_size`` pictures, neighbours of one shape make a batch, see `as_batch`; for
    detection the shapes may differ. A video model gets clips; a still is repeated. About one batch is prepared ahead.
    The workers end when the generator is closed or collected.

    Args:
        net: The loaded model.
        paths: Files, pipes, ``-`` for standard input, as `find_pictures` lists them.
        batch_size: The largest number of pictures in a batch.
        workers: Number of processes that read and prepare, each with one thread; 0 is this process.
        listener: Gets in order the pictures that cannot be used, and the notes.
        first: Position of the first path in a list of which only the rest is wanted. Batches and positions are those
            of the whole list.

    Raises:
        HookscopeError: a worker was killed.
    """
    check_whole("batch size", batch_size)
    check_whole("workers", workers, 0)
    net.note_assumption()
    return _batches(net, _prepared(net.preprocess, paths, batch_size, workers, first), batch_size, listener, first)


def _batches(
    net: LoadedModel, results: Generator[_Item, None, None], size: int, listener: Listener, first: int
) -> Generator[Batch, None, None]:
    room = size - first % size
    with contextlib.closing(results):
        while (taken := _take(results, room, listener)) is not None:
            room = size
            ready = deque(_runs(net, taken))
            del taken
            while ready:
                yield ready.popleft()  # keeps no reference while the model works on it


def _take(results: Iterator[_Item], size: int, listener: Listener) -> list[_Item] | None:
    """The usable ones of the next ``size`` pictures; None at the end.

    Others do not take the place of a skipped one: so a batch is the same whoever works on that part of the list.
    """
    usable: list[_Item] = []
    result = None
    for result in itertools.islice(results, size):
        for text in result.notes:
            listener.note(result.name, text)
        if result.error is not None:
            listener.skipped(result.position, result.name, result.error)
        else:
            usable.append(result)
    return None if result is None else usable


def _runs(net: LoadedModel, results: list[_Item]) -> Iterator[Batch]:
    """One batch for each run of equal shapes."""
    any_shape = net.family == "detection"
    for _, run in itertools.groupby(results, lambda result: any_shape or tuple(result.tensor.shape)):
        members = list(run)
        inputs = as_batch(net.family, [result.tensor.to(net.device) for result in members])
        names, positions = tuple(result.name for result in members), tuple(result.position for result in members)
        yield Batch(names, positions, inputs, tuple(result.sha256 for result in members))


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One picture: to read, with its ``content`` if only the main process can read it; then as a tensor or an error."""

    position: int
    name: str
    content: bytes | None = None
    error: HookscopeError | None = None
    notes: tuple[str, ...] = ()
    tensor: Any = None
    sha256: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        # Plain bytes between processes: torch would use a file descriptor and shared memory for each tensor, which are
        # limited to 1024 and, in containers, to 64 MB.
        fields = {name: getattr(self, name) for name in self.__slots__}
        if (tensor := self.tensor) is not None:
            flat = tensor.contiguous().view(-1).view(torch.uint8)  # numpy has no bfloat16
            fields["tensor"] = bytearray(flat.numpy()), tensor.dtype, tuple(tensor.shape)
        return _unpacked, (fields,)

    def failed(self, error: HookscopeError) -> _Item:
        """With ``error``, but without traceback and cause, which keep the picture and may not be picklable."""
        return _Item(self.position, self.name, error=type(error)(error.asked, error.exists, error.do))


def _unpacked(fields: dict[str, Any]) -> _Item:
    if fields["tensor"] is not None:
        data, dtype, shape = fields["tensor"]
        fields["tensor"] = torch.frombuffer(data, dtype=dtype).view(shape)
    return _Item(**fields)


@dataclass(frozen=True)
class _Reader:
    """The data set of the DataLoader, from a picture to read to one that is read; an error is a result too."""

    preprocess: Preprocess

    def __getitem__(self, item: _Item) -> _Item:
        if item.error is not None:
            return item
        try:
            return self._prepare(item)
        except HookscopeError as error:
            return item.failed(error)
        except MemoryError:
            return item.failed(ImageError(f"'{item.name}' does not fit into memory", do="give a smaller file"))

    def _prepare(self, item: _Item) -> _Item:
        source = item.name if item.content is None else io.BytesIO(item.content)
        picture = read_picture(source, frames=self.preprocess.frames, name=item.name)
        with one_thread():  # four times as fast as with two
            tensor = self.preprocess(picture.frames if len(picture.frames) > 1 else picture.image)
        return _Item(item.position, item.name, notes=picture.notes, tensor=tensor, sha256=picture.sha256)


def _to_read(position: int, path: str) -> _Item:
    """The picture at a path; runs in the main process, because a worker has another standard input."""
    item = _Item(position, path, read_pipe(path))
    if path == "-" and item.content is None:
        try:
            read_picture(path)
        except HookscopeError as error:
            return item.failed(error)
    return item


def _prepared(
    preprocess: Preprocess, paths: Sequence[str], batch_size: int, workers: int, first: int
) -> Generator[_Item, None, None]:
    workers = min(workers, len(paths))
    iterator: Any = None
    try:
        with _torch_handler_removed():
            iterator = _iterator(replace(preprocess, device="cpu"), paths, batch_size, workers, first)
        while (result := _next(iterator)) is not None:
            yield result
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):  # not the DataLoader's own error
            raise
        do = "use fewer workers or a smaller batch size"
        raise HookscopeError("a worker process was killed", "perhaps the memory was full", do) from error
    finally:
        # Explicitly: an exception that a caller keeps would keep the iterator and its workers alive.
        end = getattr(iterator, "_shutdown_workers", None)
        if end is not None:
            end()


@contextlib.contextmanager
def _torch_handler_removed() -> Iterator[None]:
    """Remove torch's signal handler, which raises at any line of the program when a worker dies."""
    number = _child_signal()
    before = None if number is None else signal.getsignal(number)
    try:
        yield
    finally:
        if number is not None:
            if signal.getsignal(number) is not before:  # torch sets it only once
                _torchs_handler.append(signal.getsignal(number))
            signal.signal(number, before)


_torchs_handler: list[Any] = []


def _child_signal() -> int | None:
    """The signal of a dead child; None if the system has none or this thread may not set a handler."""
    main = threading.current_thread() is threading.main_thread()
    return getattr(signal, "SIGCHLD", None) if main else None


def _next(iterator: Iterator[_Item]) -> _Item | None:
    """The next result, None at the end; raises if a worker dies meanwhile."""
    number = _child_signal()
    workers = getattr(iterator, "_workers", [])
    if number is None or not workers or not _torchs_handler:
        return next(iterator, None)
    before = signal.signal(number, _torchs_handler[-1])
    try:
        for worker in workers:  # no signal comes for a worker that died before
            if worker.exitcode:
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) has died")
        return next(iterator, None)
    finally:
        signal.signal(number, before)


def _iterator(
    preprocess: Preprocess, paths: Sequence[str], batch_size: int, workers: int, first: int
) -> Iterator[_Item]:
    more: dict[str, Any] = {}
    if workers:
        importlib.import_module("torchvision.transforms.functional")  # once, not in each worker
        Image.init()
        # One batch ahead. "fork" where it is safe: a user's transforms need not be picklable.
        more = {"prefetch_factor": max(2, -(-batch_size // workers)), "worker_init_fn": _keep_quiet}
        more["multiprocessing_context"] = "fork" if sys.platform == "linux" else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than processors
        loader: DataLoader[Any] = DataLoader(
            cast(Any, _Reader(preprocess)),  # the DataLoader uses __getitem__ only
            batch_size=None,
            sampler=cast(Any, itertools.starmap(_to_read, enumerate(paths, first))),  # in this process, on demand
            num_workers=workers,
            generator=torch.Generator(),  # else it draws its seed from the global random state
            **more,
        )
        return iter(loader)


def _keep_quiet(worker: int) -> None:
    """Silence a worker and leave signals to the main process, which ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)  # the handler of the main process would raise
    warnings.simplefilter("ignore")
    nowhere = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere.fileno(), stream.fileno())  # type: ignore[union-attr]  # for output of C libraries
    sys.stdout = sys.stderr = nowhere
