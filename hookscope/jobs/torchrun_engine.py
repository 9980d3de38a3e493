"""An engine for the processes that torchrun starts: each does its share of the blocks, and rank 0 gathers them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed

from hookscope.errors import HookscopeError
from hookscope.jobs.job import (
    BATCHES,
    Block,
    Job,
    Part,
    blocks_of,
    done_packed,
    packed_error,
    refuse_own_files,
    unpacked,
)
from hookscope.models import LoadedModel


class TorchrunEngine:
    """Runs a job in all processes of ``torch.distributed``: rank r does blocks r, r + W and so on, of W processes.

    Rank 0 calls `run`, and every other rank calls `serve`, which gets the job from rank 0. The addresses come from the
    variables that torchrun sets, such as ``MASTER_ADDR``.

    Args:
        rank: Number of this process, from 0.
        size: Number of all processes.
        block: Images in a block, by default four batches.
        local_rank: Number of this process on its machine, which becomes the current GPU; None leaves that as it is.

    Example:
        >>> TorchrunEngine(rank=1, size=4).rank
        1
    """

    def __init__(self, rank: int, size: int, block: int | None = None, local_rank: int | None = None) -> None:
        if local_rank is not None and torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        self.rank = rank
        self.size = size
        self.block = block

    def run(self, job: Job[Any], net: LoadedModel, paths: Sequence[str], first: int = 0) -> Generator[Part[Any]]:
        """Do ``job`` on the images of ``paths`` from position ``first`` on; each part comes once, in order.

        Raises:
            HookscopeError: Another process has ended.
        """
        refuse_own_files(paths)
        blocks = list(blocks_of(paths, first, self.block or BATCHES * job.batch_size))
        with self._group():
            torch.distributed.broadcast_object_list([job, blocks])
            for row in self._rounds(job, net, blocks):
                yield unpacked(row)

    def serve(self, net: LoadedModel) -> None:
        """Do the blocks of this rank, until all are done.

        Raises:
            HookscopeError: Rank 0 has ended.
        """
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
                yield from (each for each in rows or () if each)

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
