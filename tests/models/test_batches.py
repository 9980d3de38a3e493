"""Batches of real files: the same for any number of workers, without a trace of them."""

import io
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hookscope.errors import HookscopeError, ImageError, UsageError
from hookscope.images import ImageWarning, Listener, read_picture
from hookscope.models.batches import Batch, load_batches
from hookscope.models.loaded import LoadedModel
from hookscope.models.preprocess import Preprocess
from hookscope.models.transforms import imagenet_transforms, usual_transforms

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Any:
    def state() -> list[Any]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
        return [multiprocessing.active_children(), torch.get_num_threads(), *handlers]

    before = state()
    assert before[0] == []
    yield
    assert state() == before


@dataclass(frozen=True)
class Prepare(Preprocess):
    """A function instead of transforms."""

    function: Any = None

    def __call__(self, image: Any) -> Tensor:
        return self.function(image)


def net(family: str = "classification", function: Any = None, **more: Any) -> LoadedModel:
    preprocess = Preprocess(family, **more) if function is None else Prepare(family, function=function, **more)
    return LoadedModel(nn.Identity(), "net", "none", preprocess, None, family, "cpu")


def small_imagenet(**more: Any) -> LoadedModel:
    return net(transforms=imagenet_transforms(crop=24, resize=32), **more)


def photograph(path: Path, seed: int, size: tuple[int, int] = (40, 30), form: str = "PNG") -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path, form)
    return str(path)


def photographs(folder: Path, count: int, **more: Any) -> list[str]:
    return [photograph(folder / f"{n}.png", n, **more) for n in range(count)]


def mixed(folder: Path) -> list[str]:
    """Good files with awkward names and wrong suffixes, damaged and missing ones, neither first nor last."""
    good = photographs(folder, 3)
    awkward = [photograph(folder / name, 9) for name in ("new\nline.png", os.fsdecode(b"\xff.png"))]
    jpeg = photograph(folder / "jpeg.txt", 7, form="JPEG")
    cut = folder / "cut.png"
    cut.write_bytes(Path(good[0]).read_bytes()[:200])
    garbage = folder / "garbage.jpg"
    garbage.write_bytes(b"garbage")
    return [str(cut), good[0], jpeg, str(garbage), str(folder / "missing.png"), *good[1:], *awkward, str(folder)]


class Log:
    """The errors and notes of loading."""

    def __init__(self) -> None:
        self.skipped: list[tuple[int, str, str]] = []
        self.notes: list[tuple[str, str]] = []

    def load(self, *arguments: Any, **more: Any) -> list[Batch]:
        listener = Listener(
            skipped=lambda position, name, error: self.skipped.append((position, name, str(error))),
            note=lambda *note: self.notes.append(note),
        )
        return list(load_batches(*arguments, listener=listener, **more))


def stacked(batches: list[Batch]) -> Tensor:
    return torch.cat([batch.inputs[0] for batch in batches])


@WORKERS
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_batches_equal_the_pictures_prepared_one_by_one(tmp_path: Path, workers: int, batch_size: int) -> None:
    loaded, paths = small_imagenet(), photographs(tmp_path, 7)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batches = list(load_batches(loaded, paths, batch_size, workers))
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert [batch.count for batch in batches] == [min(batch_size, 7 - n) for n in range(0, 7, batch_size)]
    assert [name for batch in batches for name in batch.names] == paths
    assert [position for batch in batches for position in batch.positions] == list(range(7))
    expected = torch.stack([loaded.preprocess(read_picture(path).image) for path in paths])
    assert torch.equal(stacked(batches), expected)


@pytest.mark.parametrize(
    ("dtype", "channels"), [(torch.bfloat16, 3), (torch.float16, 3), (torch.float64, 3), (torch.float32, 1)]
)
def test_every_type_of_tensor_comes_through_from_a_worker(tmp_path: Path, dtype: torch.dtype, channels: int) -> None:
    loaded, paths = small_imagenet(dtype=dtype, channels=channels), photographs(tmp_path, 2)
    (there,), (here,) = (list(load_batches(loaded, paths, workers=workers)) for workers in (1, 0))
    assert there.inputs[0].dtype == dtype and there.inputs[0].shape == (2, channels, 24, 24)
    assert torch.equal(there.inputs[0], here.inputs[0])


@WORKERS
def test_runs_of_one_shape_become_batches(tmp_path: Path, workers: int) -> None:
    sizes = [(40, 30), (40, 30), (20, 30), (40, 30), (40, 30), (40, 30)]
    paths = [photograph(tmp_path / f"{n}.png", n, size) for n, size in enumerate(sizes)]
    batches = list(load_batches(net(), paths, 4, workers))
    assert [batch.positions for batch in batches] == [(0, 1), (2,), (3,), (4, 5)]
    assert [tuple(batch.inputs[0].shape) for batch in batches] == [
        (2, 3, 30, 40),
        (1, 3, 30, 20),
        (1, 3, 30, 40),
        (2, 3, 30, 40),
    ]
    (detected, rest) = load_batches(net("detection"), paths, 4, workers)
    assert [tuple(picture.shape[1:]) for picture in detected.inputs[0]] == [(30, 40), (30, 40), (30, 20), (30, 40)]
    assert rest.positions == (4, 5)


@WORKERS
def test_video_models_get_clips(tmp_path: Path, workers: int) -> None:
    loaded = net("video", transforms=usual_transforms("video"), frames=4)
    frames = [Image.new("RGB", (40, 30), (n, n, n)) for n in range(0, 250, 25)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    paths = [str(tmp_path / "a.gif"), photograph(tmp_path / "still.png", 1)]
    log = Log()
    (batch,) = log.load(loaded, paths, workers=workers)
    assert batch.inputs[0].shape == (2, 3, 4, 112, 112)
    assert torch.equal(batch.inputs[0][0], loaded.preprocess(read_picture(paths[0], frames=4).frames))
    assert log.notes == [
        (paths[0], "frames 1, 4, 7, 10 of 10"),
        (paths[1], "a still image, repeated 4 times"),
    ]


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"workers": -1}])
def test_sizes_below_their_minimum_are_refused_at_once(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="must be an integer of at least"):
        load_batches(net(), ["a.png"], **wrong)
    assert list(load_batches(net(), [], workers=2)) == []


def test_unusable_pictures_are_reported_in_order_with_and_without_workers(tmp_path: Path) -> None:
    paths = mixed(tmp_path)
    here, there = Log(), Log()
    first, second = (log.load(net(), paths, 4, workers) for log, workers in ((here, 0), (there, 2)))
    assert [batch.positions for batch in first] == [(1, 2), (5, 6, 7), (8,)]
    assert [(position, name) for position, name, _ in here.skipped] == [(n, paths[n]) for n in (0, 3, 4, 9)]
    words = ["cannot be decoded", "is not an image", "no image", "is a folder, not an image"]
    for (_, name, line), word in zip(here.skipped, words, strict=True):
        assert name in line and word in line
    assert (here.skipped, here.notes) == (there.skipped, there.notes)
    assert [(batch.names, batch.positions) for batch in first] == [(batch.names, batch.positions) for batch in second]
    assert torch.equal(stacked(first), stacked(second))


@WORKERS
def test_a_full_memory_loses_the_picture_and_a_bug_in_the_transforms_is_raised(tmp_path: Path, workers: int) -> None:
    def transforms(image: Image.Image) -> Tensor:
        if image.size == (40, 30):
            return torch.zeros(3, 4, 4)
        raise MemoryError if image.size == (5, 5) else KeyError("mean")

    loaded = net(function=transforms)
    paths = [photograph(tmp_path / "a.png", 1), photograph(tmp_path / "b.png", 2, (5, 5))]
    log = Log()
    (batch,) = log.load(loaded, paths, workers=workers)
    assert batch.positions == (0,)
    assert log.skipped == [(1, paths[1], f"'{paths[1]}' does not fit into memory; give a smaller file")]
    with pytest.raises(KeyError, match="mean"):
        log.load(loaded, [*paths, photograph(tmp_path / "c.png", 3, (6, 6))], workers=workers)


@WORKERS
def test_by_default_a_lost_picture_raises_and_a_note_warns(tmp_path: Path, workers: int) -> None:
    clear = tmp_path / "new\nline.png"
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(clear)
    with pytest.warns(ImageWarning, match=r"new\\nline.png: transparency composited on white"):
        assert len(list(load_batches(net(), [str(clear)], workers=workers))) == 1
    with pytest.raises(ImageError, match=r"no image 'missing\.png'"):
        list(load_batches(net(), [*photographs(tmp_path, 3), "missing.png"], workers=workers))


@WORKERS
def test_standard_input(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = photographs(tmp_path, 3)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(paths[1]).read_bytes())))
    (batch,) = load_batches(net(), [paths[0], "-", paths[2]], workers=workers)
    assert batch.names == (paths[0], "-", paths[2])
    assert torch.equal(batch.inputs[0], stacked(list(load_batches(net(), paths))))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@WORKERS
def test_no_standard_input(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, word in ((None, "closed"), (Terminal(), "the terminal")):
        monkeypatch.setattr(sys, "stdin", stream)
        log = Log()
        (batch,) = log.load(net(), ["-", *photographs(tmp_path, 1)], workers=workers)
        assert batch.positions == (1,)
        assert log.skipped[0][2] == f"no image on standard input: it is {word}; give a file, or pipe one in"


@WORKERS
def test_a_named_pipe_and_a_descriptor_of_this_process(tmp_path: Path, workers: int) -> None:
    path, pipe = photograph(tmp_path / "a.png", 1), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(Path(path).read_bytes(),))
    writer.start()
    with open(path, "rb") as stream:
        (batch,) = load_batches(net(), [str(pipe), path, f"/dev/fd/{stream.fileno()}"], workers=workers)
    writer.join()
    from_pipe, from_file, from_descriptor = batch.inputs[0]
    assert torch.equal(from_pipe, from_file) and torch.equal(from_descriptor, from_file)


def test_a_worker_has_one_thread_and_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def loud(image: Image.Image) -> Tensor:
        os.write(1, b"out")
        os.write(2, b"err")
        sys.stdout.write("print")
        sys.stdout.flush()
        return torch.tensor([torch.get_num_threads(), os.getpid()], dtype=torch.float64)

    (batch,) = load_batches(net(function=loud), photographs(tmp_path, 6), workers=2)
    assert batch.inputs[0][:, 0].tolist() == [1] * 6
    assert len(set(batch.inputs[0][:, 1].tolist()) - {os.getpid()}) == 2
    assert capfd.readouterr() == ("", "")


@WORKERS
def test_workers_end_with_an_early_break(tmp_path: Path, workers: int) -> None:
    for batch in load_batches(net(), photographs(tmp_path, 30), 2, workers):
        assert batch.count == 2
        assert len(multiprocessing.active_children()) == workers
        break


def test_workers_end_with_close_while_an_error_is_held(tmp_path: Path) -> None:
    batches = load_batches(net(), photographs(tmp_path, 30), 2, 2)
    try:
        next(batches)
        raise ValueError
    except ValueError as error:
        held = error
        batches.close()
    assert multiprocessing.active_children() == []
    assert held.__traceback__ is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImageError("strict")])
def test_workers_end_when_a_listener_raises(tmp_path: Path, error: BaseException) -> None:
    def stop(position: int, name: str, lost: HookscopeError) -> None:
        raise error

    paths = [*photographs(tmp_path, 4), "missing", *photographs(tmp_path, 20)]
    with pytest.raises(type(error)) as caught:
        list(load_batches(net(), paths, 2, 2, Listener(skipped=stop)))
    assert caught.value is error


def test_more_workers_than_pictures_or_processors_is_no_warning(tmp_path: Path) -> None:
    paths = photographs(tmp_path, (os.cpu_count() or 1) + 2)
    assert sum(batch.count for batch in load_batches(net(), paths, 4, len(paths) + 5)) == len(paths)


def test_a_killed_worker_is_one_line(tmp_path: Path) -> None:
    def die(image: Image.Image) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3)

    with pytest.raises(HookscopeError) as caught:
        list(load_batches(net(function=die), photographs(tmp_path, 3), workers=1))
    assert str(caught.value) == (
        "a worker process was killed; perhaps the memory was full; use fewer workers or a smaller batch size"
    )


@WORKERS
def test_pictures_do_not_pile_up(tmp_path: Path, workers: int) -> None:
    """A batch that the model is done with is freed, and about one is prepared ahead."""
    started = tmp_path / "started"

    def count(image: Image.Image) -> Tensor:
        with open(started, "a") as stream:
            stream.write(".")
        return torch.zeros(3, 4, 4)

    done: list[weakref.ref[Tensor]] = []
    paths = photographs(tmp_path, 20)
    for batch in load_batches(net(function=count), paths, 4, workers):
        done.append(weakref.ref(batch.inputs[0]))
        assert started.stat().st_size <= 4 * len(done) + 2 * 4 * bool(workers)
        del batch
        assert done[-1]() is None


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups here")
def test_an_interrupt_ends_workers_quickly_and_silently(tmp_path: Path) -> None:
    begun, output = tmp_path / "begun", tmp_path / "output"
    paths = photographs(tmp_path, 50)

    def slow(image: Image.Image) -> Tensor:
        time.sleep(0.05)
        return torch.zeros(3, 4, 4)

    def child() -> int:
        os.setsid()
        sys.stdout = sys.stderr = open(output, "w")  # noqa: SIM115  (open until the process ends)
        os.dup2(sys.stderr.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        try:
            for _ in load_batches(net(function=slow), paths, 4, 2):
                begun.touch()
        except KeyboardInterrupt:
            return 130
        return 0

    process = os.fork()
    if process == 0:
        try:
            status = child()
            sys.stderr.flush()
            os._exit(status)
        finally:
            os._exit(1)
    while not begun.exists():
        assert os.waitpid(process, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    start = time.monotonic()
    os.killpg(process, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    assert time.monotonic() - start < 10
    assert output.read_text() == ""
    with pytest.raises(ProcessLookupError):  # no process of the group is left
        os.killpg(process, 0)
