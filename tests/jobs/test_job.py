"""Parts of a job cover the list without gap, in its order; the progress of a run, and when it is saved."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookscope import load_model
from hookscope.errors import HookscopeError, InputError, InstallationError, LayerError, UsageError
from hookscope.jobs import LocalEngine, Progress, RunSettings, SavedRun, run
from hookscope.jobs.engines import Block, blocks_of, done_packed, packed_error, refuse_own_files, unpacked
from hookscope.models import Batch, LoadedModel
from tests.helpers import ignore, refused


@pytest.mark.parametrize(("first", "size"), [(0, 3), (2, 4), (7, 1), (0, 100)])
def test_blocks_cover_the_list_from_its_first_image_on(first: int, size: int) -> None:
    paths = [str(number) for number in range(10)]
    blocks = list(blocks_of(paths, first, size))
    assert [path for block in blocks for path in block.paths] == paths[first:]
    assert [block.first for block in blocks] == [first, *range(first - first % size + size, 10, size)]


@pytest.mark.parametrize(
    ("packed", "kind", "words"),
    [
        (packed_error(InputError("it is too small", do="crop it")), InputError, "it is too small; crop it"),
        (packed_error(LayerError("no layer 'a'", kind="layer", name="a")), LayerError, "no layer 'a'"),
        (
            packed_error(MemoryError()),
            HookscopeError,
            "a worker is out of memory; use a smaller batch_size, or fewer workers",
        ),
        (packed_error(ZeroDivisionError("by 0")), HookscopeError, "a worker cannot continue: ZeroDivisionError: by 0"),
        (
            pickle.dumps("No module"),
            InstallationError,
            "a worker cannot import hookscope: No module; install it on every machine",
        ),
    ],
)
def test_an_error_comes_back_as_itself(packed: bytes, kind: type[HookscopeError], words: str) -> None:
    with refused(kind, words):
        unpacked(packed)


@pytest.mark.parametrize("path", ["-", "/dev/fd/63", "/proc/self/fd/0"])
def test_files_of_this_process_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match="cannot be read by other processes"):
        refuse_own_files(["a.png", path])
    refuse_own_files(["a.png", "s3://bucket/a.png"])


class Positions:
    """A job that gives the positions of each batch."""

    workers = 0

    def __init__(self, batch_size: int, refuse: Sequence[int] = ()) -> None:
        self.batch_size, self.refuse = batch_size, refuse

    @contextmanager
    def open(self, net: LoadedModel) -> Iterator[Callable[[Batch], list[int]]]:
        def measure(batch: Batch) -> list[int]:
            if set(self.refuse).intersection(batch.positions):
                raise ValueError("refused")
            with torch.no_grad():
                net.model(*batch.inputs)
            return list(batch.positions)

        yield measure

    def merge(self, values: Sequence[list[int]]) -> list[int]:
        return [position for value in values for position in value]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    names = [str(tmp_path / f"{number}.png") for number in range(9)]
    for number, name in enumerate(names):
        Image.new("RGB", (64 + 32 * (number == 4), 64), (number, 0, 0)).save(name)
    Path(names[2]).write_bytes(b"no image")
    Path(names[8]).write_bytes(b"no image")
    return names


@pytest.mark.parametrize("first", [0, 3, 9])
@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_parts_cover_the_list_in_order(paths: list[str], batch_size: int, first: int) -> None:
    net = load_model("shapes", preprocess="none")
    parts = list(LocalEngine().run(Positions(batch_size), net, paths, first))
    used = [n for n in range(first, 9) if n not in (2, 8)]
    assert [position for part in parts for position in part.positions] == used
    assert [each.position for part in parts for each in part.skipped] == [n for n in (2, 8) if n >= first]
    finished = first
    for part in parts:
        here = sorted([*part.positions, *(each.position for each in part.skipped)])
        assert here == list(range(finished, part.done))
        assert part.value == (list(part.positions) or None)
        finished = part.done
    assert not parts or finished == 9


def test_a_block_is_one_part_with_its_skipped_images(paths: list[str]) -> None:
    net, job = load_model("shapes"), Positions(2)
    with job.open(net) as measure:
        part = unpacked(done_packed(job, net, Block(30, tuple(paths[:3] + paths[5:])), measure))
    used = (30, 31, 33, 34, 35)
    assert (part.value, part.positions, part.done) == ([*used], used, 37)
    assert part.names == tuple(paths[at - 30 if at < 33 else at - 28] for at in used)
    assert [each.position for each in part.skipped] == [32, 36]


def test_a_batch_that_the_model_refuses_is_skipped(paths: list[str]) -> None:
    net = load_model("shapes", preprocess="none")
    parts = list(LocalEngine().run(Positions(2, refuse=[3]), net, paths))
    assert [each.position for part in parts for each in part.skipped] == [2, 3, 8]  # image 4 has another size
    net = load_model("shapes")
    with pytest.raises(InputError, match="refused"):  # all images have one size: it would refuse every other one
        list(LocalEngine().run(Positions(2, refuse=[0]), net, paths))


def test_progress_identifies_images_by_name() -> None:
    paths = ["a.jpg", "b\n.jpg", "caf\udce9.jpg", "d.jpg"]
    assert Progress.after(paths, 3, skipped=1) == Progress.after([*paths[:3], "other.jpg"], 3, skipped=1)
    assert Progress.after(paths, 3) != Progress.after(paths[::-1], 3)
    assert Progress.after(["a", "b"], 2).names != Progress.after(["ab", ""], 2).names
    assert Progress.after(paths, 0) == Progress.after([], 0)


def test_a_save_is_due_after_ten_seconds_or_twenty_times_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(run.time, "monotonic", lambda: now)

    class Slow(SavedRun[int]):
        images, merge = 1, ignore

        def write(self, file: Any) -> None:
            nonlocal now
            now += float(file)

    due = []
    saving = Slow(None, (), None, RunSettings(), None)  # type: ignore[abstract, arg-type]
    for saving.file in ("0.25", "2.0"):
        saving.save()
        for wait in (9.0, 2.0, 28.0, 2.0):
            now += wait
            due.append(saving.is_save_due)
    assert due == [False, True, True, True, False, False, False, True]
