"""Runs over many images: measured and lost images, resumed runs, and what a signal or a refusal leaves behind."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookscope.errors import HookscopeError, InputError
from hookscope.models import load_model
from hookscope.statistics import (
    RunningStatistics,
    SavedStatistics,
    load_statistics,
    measure_images,
    run,
    save_statistics,
)

NETS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 7, stride=3), nn.ReLU())
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    for number in range(7):
        Image.effect_noise((24, 20), 60 + 9 * number).convert("RGB").save(tmp_path / f"{number}.png")
    (tmp_path / "bad.png").write_text("no picture")
    Image.new("RGB", (5, 5)).save(tmp_path / "tiny.png")
    return tmp_path


PATHS = [f"{number}.png" for number in range(7)]


def measure(*paths: str, preprocess: str = "none", input_size: Any = None, **options: Any) -> SavedStatistics:
    """Measure with batches of 2; lost images are left out unless ``on_lost`` says otherwise."""
    model = load_model("nets.py:net", preprocess=preprocess, input_size=input_size)
    options = {"batch_size": 2, "on_lost": lambda position, name, error: None, **options}
    return measure_images(model, list(paths) or PATHS, **options)


def progress_of(saved: SavedStatistics) -> tuple[int, int, int]:
    """Images measured, images done, images lost."""
    assert saved.progress is not None
    return saved.totals.images, saved.progress.done, saved.progress.lost


def counts(saved: SavedStatistics) -> list[tuple[int, float | None, float | None]]:
    return [(layer.items, layer.min, layer.max) for layer in saved.totals.statistics()]


def test_every_image_is_counted() -> None:
    saved = measure()
    assert progress_of(saved) == (7, 7, 0)
    assert saved.source.model == "nets.py:net"
    assert saved.source.fingerprint == "", "it takes time, and only saved files need it"


def test_a_file_that_cannot_be_read_is_counted_and_named_and_raises_by_default() -> None:
    paths = ["0.png", "bad.png", "1.png", "missing.png"]
    lost: list[tuple[int, str]] = []
    steps: list[int] = []
    saved = measure(
        *paths, on_lost=lambda position, name, error: lost.append((position, name)), on_progress=steps.append
    )
    assert (progress_of(saved), sum(steps)) == ((2, 4, 2), 4)
    assert lost == [(1, "bad.png"), (3, "missing.png")]
    with pytest.raises(HookscopeError, match="bad\\.png"):
        measure_images(load_model("nets.py:net", preprocess="none"), paths)


def test_no_readable_image_is_an_error() -> None:
    with pytest.raises(InputError, match="no image could be used; 2 were tried"):
        measure("bad.png", "bad.png", save="s.json")
    assert not os.path.exists("s.json")


@pytest.mark.parametrize("paths", [["tiny.png", "0.png", "1.png"], ["0.png", "tiny.png", "1.png"]])
def test_an_image_that_the_model_refuses_is_lost_alone(paths: list[str]) -> None:
    errors: list[str] = []
    saved = measure(*paths, batch_size=16, on_lost=lambda position, name, error: errors.append(str(error)))
    assert progress_of(saved) == (2, 3, 1)
    assert errors[0].startswith(
        "tiny.png: nets.py:net: layer '0' (Conv2d) needs a larger input; forward() failed on 1x3x5x5: "
    )
    assert counts(saved) == counts(measure("0.png", "1.png"))


def test_a_model_that_refuses_the_first_image_of_a_fixed_size_is_an_error() -> None:
    with pytest.raises(InputError, match=r"forward\(\) failed on 2x3x5x5"):
        measure(preprocess="stretch", input_size=(5, 5), on_lost=lambda *lost: pytest.fail(f"{lost}"))


def stopping(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Interrupt the pass after so many."""
    passes = iter(range(after))
    forward = torch.nn.ReLU.forward

    def stop(self: torch.nn.ReLU, inputs: torch.Tensor) -> torch.Tensor:
        if next(passes, None) is None:
            raise KeyboardInterrupt
        return forward(self, inputs)

    monkeypatch.setattr(torch.nn.ReLU, "forward", stop)


@pytest.mark.parametrize(("after", "images", "done"), [(1, 1, 2), (2, 3, 4)])
def test_an_interrupted_run_is_resumed(monkeypatch: pytest.MonkeyPatch, after: int, images: int, done: int) -> None:
    paths = ["0.png", "bad.png", "1.png", "2.png", "3.png", "bad.png", "4.png", "5.png"]
    whole = measure(*paths)
    interrupted: list[int] = []
    started: list[int] = []
    with monkeypatch.context() as patch:
        stopping(patch, after)
        with pytest.raises(KeyboardInterrupt):
            measure(*paths, save="s.json", on_interrupt=interrupted.append)
    assert progress_of(load_statistics("s.json")) == (images, done, 1)
    resumed = measure(*paths, save="s.json", resume=True, on_start=started.append)
    assert interrupted == started == [done]
    assert progress_of(whole) == progress_of(resumed) == (6, 8, 2)
    assert counts(resumed) == counts(whole)


def test_lost_images_ahead_of_measured_ones_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes in a batch: both passes come after the loss between them."""
    Image.effect_noise((30, 30), 80).convert("RGB").save("large.png")
    paths = ["0.png", "bad.png", "large.png", "1.png"]
    with monkeypatch.context() as patch:
        stopping(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            measure(*paths, save="s.json", batch_size=16)
    assert progress_of(load_statistics("s.json")) == (1, 2, 1)
    assert progress_of(measure(*paths, save="s.json", resume=True)) == (3, 4, 1)


def test_a_run_that_measured_nothing_leaves_an_earlier_file(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(save="s.json")
    before = Path("s.json").read_bytes()
    with monkeypatch.context() as patch:
        stopping(patch, 0)
        with pytest.raises(KeyboardInterrupt):
            measure(save="s.json")
    assert Path("s.json").read_bytes() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_continues_with_a_longer_list_and_adds_nothing_to_a_finished_one(workers: int) -> None:
    measure(*PATHS[:3], save="s.json", workers=workers)
    whole = measure(save="s.json", resume=True, workers=workers)
    assert counts(whole) == counts(measure())
    before = Path("s.json").read_bytes()
    again = measure(save="s.json", resume=True)
    assert (counts(again), progress_of(again)) == (counts(whole), (7, 7, 0))
    assert Path("s.json").read_bytes() == before


def test_the_file_is_written_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr("hookscope.jobs.run._SAVE_EVERY", -1.0)
    monkeypatch.setattr("hookscope.jobs.run._SAVE_SHARE", 0.0)

    def save(path: str, saved: SavedStatistics) -> None:
        written.append(saved.totals.images)
        save_statistics(path, saved)

    monkeypatch.setattr(run, "save_statistics", save)
    measure(save="s.json")
    assert written == [2, 4, 6, 7, 7]


@pytest.fixture
def mine() -> Iterator[None]:
    """Handlers that raise, as the program has them."""
    old = signal.signal(signal.SIGTERM, lambda number, frame: (_ for _ in ()).throw(SystemExit(143)))
    yield
    signal.signal(signal.SIGTERM, old)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_a_batch_is_added_up_waits(
    monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]
) -> None:
    """Or some layers would have counted the batch that a resumed run counts again."""
    merge, times = RunningStatistics.merge, iter(range(99))

    def interrupted(self: RunningStatistics, other: RunningStatistics) -> None:
        if other.images and self.images == 2 and next(times) == 0:
            signal.raise_signal(number)
        merge(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(RunningStatistics, "merge", interrupted)
        with pytest.raises(error):
            measure(save="s.json")
    assert progress_of(load_statistics("s.json")) == (4, 4, 0)
    saved = measure(save="s.json", resume=True)
    assert counts(saved) == counts(measure())


def test_a_resumed_run_checks_the_content_of_its_images() -> None:
    measure(*PATHS[:3], save="s.json")
    os.replace("3.png", "1.png")
    with pytest.raises(InputError, match="was measured on other images; 1 of the first 3 are not those of this run"):
        measure(*PATHS[:3], "4.png", save="s.json", resume=True)
    with pytest.raises(InputError, match="2 of the first 3 are not"):
        measure("0.png", save="s.json", resume=True)


def test_an_image_is_the_same_under_another_name() -> None:
    measure("0.png", "bad.png", "1.png", save="s.json")
    os.mkdir("moved")
    for name in ("0.png", "1.png", "2.png", "bad.png"):
        os.replace(name, f"moved/{name}")
    notes: list[tuple[str, str]] = []
    paths = [f"moved/{name}" for name in ("0.png", "bad.png", "1.png", "2.png", "0.png")]
    saved = measure(*paths, save="s.json", resume=True, on_note=lambda *note: notes.append(note))
    assert notes == [("moved/0.png", "counted twice: an earlier image has the same content")]
    assert progress_of(saved) == (4, 5, 1) and len(set(saved.totals.pictures)) == 3


@pytest.mark.parametrize("names", [["1.png", "0.png"], ["0.png", "1.png"]])
def test_a_file_without_identities_is_resumed_by_names(names: list[str]) -> None:
    saved = measure("0.png", "1.png", save="s.json")
    saved.totals.pictures = array("q")
    save_statistics("s.json", saved)
    notes: list[str] = []

    def resume() -> SavedStatistics:
        return measure(*names, "2.png", save="s.json", resume=True, on_note=lambda name, text: notes.append(text))

    if names == ["0.png", "1.png"]:
        assert progress_of(resume()) == progress_of(resume()) == (3, 3, 0), "the file knows one image of three"
    else:
        with pytest.raises(InputError, match="measured on other images"):
            resume()
    assert set(notes) == {"it was saved without the identity of its images: only their names are compared"}


def test_a_resumed_run_compares_remote_images_by_name(here: Path) -> None:
    remote = [f"file://{here}/{name}" for name in PATHS]
    measure(*remote[:4], save="s.json")
    notes: list[str] = []
    resumed = measure(*remote, save="s.json", resume=True, on_note=lambda name, text: notes.append(text))
    assert (progress_of(resumed), notes) == ((7, 7, 0), ["its images are remote: only their names are compared"])
    with pytest.raises(InputError, match="measured on other images"):
        measure(*reversed(remote), save="s.json", resume=True, on_note=lambda *note: None)
