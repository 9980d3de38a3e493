"""Blocks of images that other processes do, and the engine that gives them to the ranks of torchrun."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from hookscope.errors import HookscopeError, InstallationError, UsageError, is_out_of_memory
from hookscope.jobs.run import Job, Part, parts_of
from hookscope.models import Batch, LoadedModel, describe_error

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
        raise UsageError(asked, do="name files, or use ‹no engine|--engine local›")


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
    joined = (tuple(item for part in parts for item in getattr(part, name)) for name in lists)
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


class TorchrunEngine:
    """Runs a job in all processes of ``torch.distributed``: rank r does blocks r, r + W and so on, of W processes.

    Rank 0 calls `run`, and every other rank calls `serve`, which gets the job from rank 0. The addresses come from the
    variables that torchrun sets, such as ``MASTER_ADDR``. A block has four batches by default. The number of this
    process on its machine, ``local_rank``, becomes the current GPU, unless it is None.
    """

    def __init__(self, rank: int, size: int, block: int | None = None, local_rank: int | None = None) -> None:
        if local_rank is not None and torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        self.rank, self.size, self.block = rank, size, block

    def run(self, job: Job[Any], net: LoadedModel, paths: Sequence[str], first: int = 0) -> Generator[Part[Any]]:
        refuse_own_files(paths)
        blocks = list(blocks_of(paths, first, self.block or BATCHES * job.batch_size))
        with self._group():
            torch.distributed.broadcast_object_list([job, blocks])
            for row in self._rounds(job, net, blocks):
                yield unpacked(row)

    def serve(self, net: LoadedModel) -> None:
        with self._group():
            sent: list[Any] = [None, None]
            torch.distributed.broadcast_object_list(sent)
            for _ in self._rounds(sent[0], net, sent[1]):
                pass

    def _rounds(self, job: Job[Any], net: LoadedModel, blocks: Sequence[Block]) -> Iterator[bytes]:
        """A block for each rank in each round; rank 0 gets the results, other ranks get none."""
        with contextlib.ExitStack() as stack:
            try:
                measure = stack.enter_context(job.open(net))
            except Exception as error:
                if self.rank == 0:
                    raise
                failed, measure = packed_error(error), None
            for start in range(0, len(blocks), self.size):
                at, row = start + self.rank, b""
                if at < len(blocks):
                    row = failed if measure is None else done_packed(job, net, blocks[at], measure)
                rows: list[Any] | None = [None] * self.size if self.rank == 0 else None
                torch.distributed.gather_object(row, rows)
                yield from (result for result in rows or () if result)

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """The group of all processes, whose errors of communication say that one has ended."""
        try:
            torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.size)
            yield
        except RuntimeError as error:  # torch.distributed has no class for it
            who = "another process" if self.rank == 0 else "rank 0"
            asked = f"{who} of torchrun has ended, or cannot be reached"
            raise HookscopeError(asked, f"this is rank {self.rank} of {self.size}", "see its error") from error
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
