"""One pass over many images: what is counted, what is lost, what a signal or a refusal leaves behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from hookscope.cli import process
from hookscope.cli.shared import measure as measuring
from hookscope.cli.shared.measure import MeasureOptions, measure
from hookscope.errors import HookscopeError, InputError, LayerError
from hookscope.statistics.storage import SavedStatistics, load_statistics, save_statistics
from hookscope.statistics.totals import RunningStatistics

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
    monkeypatch.setattr(process, "import_torch", lambda: None)  # its settings are for a process of its own
    (tmp_path / "nets.py").write_text(NETS)
    for number in range(7):
        Image.effect_noise((24, 20), 60 + 9 * number).convert("RGB").save(tmp_path / f"{number}.png")
    (tmp_path / "bad.png").write_text("no picture")
    Image.new("RGB", (5, 5)).save(tmp_path / "tiny.png")
    return tmp_path


PATHS = [f"{number}.png" for number in range(7)]


def job(*paths: str, **more: object) -> MeasureOptions:
    own = {"preprocess": "none", "batch_size": 2, **more}
    return MeasureOptions("nets.py:net", list(paths) or PATHS, **own)  # type: ignore[arg-type]


def counts(saved: SavedStatistics) -> list[tuple[int, float | None, float | None]]:
    return [(found.items, found.min, found.max) for found in saved.tally.statistics()]


def test_every_image_is_counted() -> None:
    saved, lost = measure(job())
    assert (saved.tally.images, lost) == (7, 0)
    assert saved.source.model == "nets.py:net"
    assert saved.source.fingerprint == ""  # which costs time, and is for what is saved


def test_a_file_that_cannot_be_read_is_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    saved, lost = measure(job("0.png", "bad.png", "1.png", "missing.png"))
    assert (saved.tally.images, lost) == (2, 2)
    *lines, skipped = capsys.readouterr().err.splitlines()
    assert [line.split("'")[1] for line in lines] == ["bad.png", "missing.png"]
    assert skipped == "Note: 2 of 4 images skipped"


def test_strict_stops_at_the_first() -> None:
    with pytest.raises(HookscopeError, match="bad\\.png"):
        measure(job("0.png", "bad.png", "missing.png", strict=True))


def test_the_error_of_a_single_image_is_that_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HookscopeError, match="bad\\.png"):
        measure(job("bad.png"))
    assert capsys.readouterr().err == ""


def test_nothing_readable() -> None:
    with pytest.raises(InputError, match="no image could be used; 2 were tried"):
        measure(job("bad.png", "bad.png", save="s.json"))
    assert not os.path.exists("s.json")


@pytest.mark.parametrize("paths", [["tiny.png", "0.png", "1.png"], ["0.png", "tiny.png", "1.png"]])
def test_a_picture_that_the_model_refuses_is_lost_alone(paths: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    saved, lost = measure(job(*paths, batch_size=16))
    assert (saved.tally.images, lost) == (2, 1)
    (line, _) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: tiny.png: nets.py:net refuses a picture of 1x3x5x5: ")
    assert counts(saved) == counts(measure(job("0.png", "1.png"))[0])


def test_what_refuses_the_first_of_one_size_refuses_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="refuses a picture of 2x3x5x5"):
        measure(job(preprocess="stretch", input_size=(5, 5)))
    assert capsys.readouterr().err == ""


def test_what_is_allowed_must_be_a_layer_of_the_model() -> None:
    with pytest.raises(LayerError, match=r"no layer 'conv' in nets\.py:net"):
        measure(job(allow=("0", "conv")))
    measure(job(allow=("1", "*", "0")))


def lost_in(path: str) -> tuple[int, int, int]:
    saved = load_statistics(path)
    assert saved.progress is not None
    return saved.tally.images, saved.progress.done, saved.progress.lost


def stopping(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the pass after so many be cut short."""
    passes = iter(range(after))
    forward = torch.nn.ReLU.forward

    def stop(self: torch.nn.ReLU, inputs: torch.Tensor) -> torch.Tensor:
        if next(passes, None) is None:
            raise KeyboardInterrupt
        return forward(self, inputs)

    monkeypatch.setattr(torch.nn.ReLU, "forward", stop)


@pytest.mark.parametrize("after", [1, 2])
def test_a_run_cut_short_is_taken_up_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    paths = ["0.png", "bad.png", "1.png", "2.png", "3.png", "bad.png", "4.png", "5.png"]
    whole, lost = measure(job(*paths))
    with monkeypatch.context() as patch:
        stopping(patch, after)
        with pytest.raises(KeyboardInterrupt):
            measure(job(*paths, save="s.json"))
    assert lost_in("s.json") == {1: (2, 3, 1), 2: (4, 5, 1)}[after]
    done = lost_in("s.json")[1]
    assert capsys.readouterr().err.splitlines()[-1] == f"Note: s.json holds {done} of 8 images; add --resume to go on"
    resumed, lost_again = measure(job(*paths, save="s.json", resume=True))
    assert (lost, lost_again) == (2, 2)
    assert counts(resumed) == counts(whole)
    assert capsys.readouterr().err.splitlines()[0] == f"Note: s.json holds {done} of 8 images"


def test_losses_ahead_of_what_was_counted_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes in a batch: both passes come after the loss between them."""
    Image.effect_noise((30, 30), 80).convert("RGB").save("large.png")
    paths = ["0.png", "bad.png", "large.png", "1.png"]
    with monkeypatch.context() as patch:
        stopping(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            measure(job(*paths, save="s.json", batch_size=16))
    assert lost_in("s.json") == (1, 1, 0)
    _, lost = measure(job(*paths, save="s.json", resume=True))
    assert lost == 1
    assert lost_in("s.json") == (3, 4, 1)


def test_a_run_that_counted_nothing_leaves_what_an_earlier_one_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(job(save="s.json"))
    before = Path("s.json").read_bytes()
    with monkeypatch.context() as patch:
        stopping(patch, 0)
        with pytest.raises(KeyboardInterrupt):
            measure(job(save="s.json"))
    assert Path("s.json").read_bytes() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_finished_run_has_nothing_to_add(workers: int) -> None:
    whole, _ = measure(job(save="s.json", workers=workers))
    before = Path("s.json").read_bytes()
    again, lost = measure(job(save="s.json", resume=True, workers=workers))
    assert (counts(again), lost) == (counts(whole), 0)
    assert Path("s.json").read_bytes() == before


def test_a_longer_list_is_gone_on_with() -> None:
    measure(job(*PATHS[:3], save="s.json"))
    saved, _ = measure(job(save="s.json", resume=True))
    assert counts(saved) == counts(measure(job())[0])


def test_the_file_is_written_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(measuring, "_SAVE_EVERY", -1.0)
    monkeypatch.setattr(measuring, "_SAVE_SHARE", 0.0)

    def save(path: str, saved: SavedStatistics) -> None:
        written.append(saved.tally.images)
        save_statistics(path, saved)

    monkeypatch.setattr("hookscope.statistics.storage.save_statistics", save)
    measure(job(save="s.json"))
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
            measure(job(save="s.json"))
    assert lost_in("s.json") == (4, 4, 0)
    saved, _ = measure(job(save="s.json", resume=True))
    assert counts(saved) == counts(measure(job())[0])


def test_signals_held_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    with process.signals_held():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ValueError, match="own"), process.signals_held():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is before
