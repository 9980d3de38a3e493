"""Blocks of the list of images: what a worker does at once, and sends back as one part."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hookscope.errors import HookscopeError, InstallationError, UsageError, is_out_of_memory
from hookscope.jobs.job import Job, Part, parts_of
from hookscope.models import Batch, LoadedModel, describe_error

BATCHES = 4
"""Batches in a block: a part travels for each block, and a worker that dies loses one block."""


@dataclass(frozen=True, slots=True)
class Block:
    """Images that follow each other in the list, from position ``first`` on."""

    first: int
    paths: tuple[str, ...]


def blocks_of(paths: Sequence[str], first: int, size: int) -> Iterator[Block]:
    """The images from position ``first`` on, ``size`` in each block."""
    return (Block(at, tuple(paths[at : at + size])) for at in range(first, len(paths), size))


def refuse_own_files(paths: Sequence[str]) -> None:
    """Raise the error of a path that another process cannot read."""
    own = next((path for path in paths if path == "-" or path.startswith(("/dev/", "/proc/"))), None)
    if own is not None:
        name = "standard input" if own == "-" else own
        raise UsageError(f"{name} cannot be read by other processes", do="name files, or use --engine local")


def done_packed(job: Job[Any], net: LoadedModel, block: Block, measure: Callable[[Batch], Any]) -> bytes:
    """The part of ``block`` for `unpacked`; an error is packed too, because other processes lose the type of one."""
    try:
        parts = list(parts_of(job, net, block.paths, block.first, measure))
        return pickle.dumps(_joined(job, parts))
    except Exception as error:
        return packed_error(error)


def _joined(job: Job[Any], parts: Sequence[Part[Any]]) -> Part[Any]:
    """One part for several that follow each other."""
    if len(parts) == 1:
        return parts[0]
    values = [part.value for part in parts if part.value is not None]
    joined = (tuple(each for part in parts for each in getattr(part, name)) for name in _JOINED)
    return Part(job.merge(values) if values else None, parts[-1].done, *joined)


_JOINED = ("positions", "names", "sha256", "lost", "notes")


def packed_error(error: Exception) -> bytes:
    """``error`` without its traceback, for `unpacked`."""
    if not isinstance(error, HookscopeError):
        if is_out_of_memory(error):
            error = HookscopeError("a worker is out of memory", do="use a smaller --batch-size, or fewer workers")
        else:
            error = HookscopeError(f"a worker cannot continue: {describe_error(error)}")
    return pickle.dumps(type(error)(error.asked, error.exists, error.do))


def unpacked(data: bytes) -> Part[Any]:
    """The part in what `done_packed` returned.

    Raises:
        HookscopeError: The worker sent an error instead.
    """
    result = pickle.loads(data)
    if isinstance(result, str):
        raise InstallationError(f"a worker cannot import hookscope: {result}", do="install it on every machine")
    if isinstance(result, HookscopeError):
        raise result
    assert isinstance(result, Part)
    return result
