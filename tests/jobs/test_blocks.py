"""Blocks: what goes to another process, and what comes back."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hookscope import load_model
from hookscope.errors import HookscopeError, InputError, LayerError, UsageError
from hookscope.jobs.blocks import Block, blocks_of, done_packed, packed_error, refuse_own_files, unpacked
from hookscope.models import Batch


class Names:
    """A job that gives the names of each batch."""

    batch_size, workers = 2, 0

    def merge(self, values: Any) -> list[str]:
        return [name for value in values for name in value]


def names_of(batch: Batch) -> list[str]:
    return list(batch.names)


@pytest.mark.parametrize(("first", "size"), [(0, 3), (2, 4), (7, 1), (0, 100)])
def test_blocks_cover_the_list_from_its_first_image_on(first: int, size: int) -> None:
    paths = [str(number) for number in range(10)]
    blocks = list(blocks_of(paths, first, size))
    assert [path for block in blocks for path in block.paths] == paths[first:]
    assert [block.first for block in blocks] == list(range(first, 10, size))


def test_a_block_is_one_part_with_its_lost_images(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.png") for number in range(5)]
    for path in paths:
        Image.new("RGB", (64, 64)).save(path)
    Path(paths[1]).write_bytes(b"no image")
    Path(paths[4]).write_bytes(b"no image")
    part = unpacked(done_packed(Names(), load_model("shapes"), Block(30, tuple(paths)), names_of))  # type: ignore[arg-type]
    assert part.value == [paths[0], paths[2], paths[3]]
    assert (part.positions, part.done) == ((30, 32, 33), 35)
    assert [each.position for each in part.lost] == [31, 34]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (InputError("it is too small", do="crop it"), InputError, "it is too small; crop it"),
        (LayerError("no layer 'a'", kind="layer", name="a"), LayerError, "no layer 'a'"),
        (MemoryError(), HookscopeError, "a worker is out of memory; use a smaller --batch-size, or fewer workers"),
        (ZeroDivisionError("by zero"), HookscopeError, "a worker cannot continue: ZeroDivisionError: by zero"),
    ],
)
def test_an_error_comes_back_as_itself(error: Exception, kind: type[HookscopeError], words: str) -> None:
    with pytest.raises(kind) as caught:
        unpacked(packed_error(error))
    assert str(caught.value) == words


def test_a_machine_without_hookscope_is_one_line() -> None:
    with pytest.raises(HookscopeError, match=r"a worker cannot import hookscope: No module.*; install it on every"):
        unpacked(pickle.dumps("No module named 'hookscope' (on node7)"))


@pytest.mark.parametrize("path", ["-", "/dev/fd/63", "/proc/self/fd/0"])
def test_files_of_this_process_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match="cannot be read by other processes"):
        refuse_own_files(["a.png", path])
    refuse_own_files(["a.png", "s3://bucket/a.png"])
