"""Runs over many images that are interrupted, killed and resumed, of every command that saves its progress."""

import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import hookscope
from tests.cli.helpers import POSIX, Run, files, one_error, rows, start

NETS = """

class Late(Small):
    passes = 0

    def forward(self, x):
        import os, time
        time.sleep(float(os.environ.get("SLOW", 0)))
        self.passes += 1
        if os.path.exists(f"stop{self.passes}"):
            raise KeyboardInterrupt
        return super().forward(x)
"""
NAMES = [f"pics/{number}.png" for number in range(6)]
PICTURES = dict.fromkeys(NAMES, (32, 32))
COMMANDS = {
    "stats": (["--ops", "--save", "run.json"], "run.json"),
    "exemplars": (["--layer", "conv1", "-o", "run"], "run/exemplars.json"),
    "extract": (["--layer", "conv1", "-o", "run.npz"], "run.npz"),
    "extract to a folder": (["--layer", "conv1", "--shard", "3", "-o", "run/"], "run/"),
}
EVERY = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture
def here(here: Path) -> Path:
    torch.save(hookscope.load_model("nets.py:Small").model.state_dict(), here / "w.pth")
    return here


def command_line(command: str, *words: str, model: str = "nets.py:Late", size: str = "2") -> list[str]:
    options = ["--preprocess", "none", "--weights", "w.pth", "--batch-size", size, "--format", "ndjson"]
    return [command.split()[0], model, *options, *(words or ["pics"]), *COMMANDS[command][0]]


def result(command: str, out: str) -> tuple[object, ...]:
    """The rows of a run and, of features, what the file holds."""
    if command == "extract":
        with np.load("run.npz") as arrays:
            return out, arrays["path"].tolist(), arrays["conv1"].tolist()
    if command == "extract to a folder":
        parquet = pytest.importorskip("pyarrow.parquet")
        return out, *(parquet.read_table(f"run/part-0000{number}.parquet").to_pylist() for number in (0, 1))
    return tuple(map(tuple, (row.items() for row in rows(out))))


def whole(run: Run, command: str, *words: str) -> tuple[object, ...]:
    """The result of a run without interruption, which leaves no file."""
    here = set(Path().rglob("*"))
    found = result(command, run(command, *(words or ["pics"]))[1])
    for path in sorted({*Path().rglob("*")} - here, reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return found


@EVERY
def test_an_interrupted_run_goes_on_where_it_stopped(run: Run, here: Path, command: str) -> None:
    expected, file = whole(run, command), COMMANDS[command][1]
    (here / "stop3").touch()
    assert run(command) == (130, "", f"Note: {file} holds 4 of 6 images; add --resume to continue\n")
    (here / "stop3").unlink()
    if command.startswith("extract"):
        message = f"'{file}' is the output of a run that did not end: 4 of 6 images are done; ...--overwrite"
        one_error(run(command), 1, message)
    status, out, errors = run(command, "pics", "--resume")
    assert (status, errors) == (0, f"Note: {file} holds 4 of 6 images\n")
    assert result(command, out) == expected
    complete = f"Note: {file} was complete; nothing was left to do\n" if command.startswith("extract") else ""
    assert run(command, "pics", "--resume") == (0, out, f"Note: {file} holds 6 of 6 images\n{complete}")
    assert not list(here.glob(".run*"))


@EVERY
def test_an_interrupt_before_anything_is_saved_is_told(run: Run, here: Path, command: str) -> None:
    before = files(here)
    (here / "stop1").touch()
    note = f"Note: interrupted before an image was saved in {COMMANDS[command][1]}\n"
    assert run(command) == (130, "", note)
    assert files(here) == sorted([*before, "stop1"])


OTHER = {
    "weights": (["pics", "--weights", "none"], "weights w.pth, not "),
    "preprocessing": (["pics", "--mean", "0.5", "--std", "1"], "it was made with preprocessing "),
    "images": (["pics/1.png", "pics/2.png"], "images|folders pics, not none"),
    "stats": (["pics", "--rank"], "rank False, not True"),
    "exemplars": (["pics", "--top", "3"], "top 9, not 3"),
    "extract": (["pics", "--layer", "fc"], "it was made with layers conv1, not fc,conv1"),
    "pool": (["pics", "--pool", "max"], "it was made with pool none, not max"),
    "data type": (["pics", "--dtype", "float16"], "it was made with dtype none, not float16"),
    "column": (["pics", "--logits"], "it was made with logits False, not True"),
}


@EVERY
def test_a_run_of_something_else_is_not_resumed(run: Run, here: Path, command: str) -> None:
    (here / "stop3").touch()
    assert run(command)[0] == 130
    before = {name: (here / name).read_bytes() for name in files(here)}
    kinds = ["weights", "preprocessing", "images", command.split()[0]]
    for kind in [*kinds, *(["pool", "data type", "column"] if command.startswith("extract") else [])]:
        words, message = OTHER[kind]
        status, out, errors = run(command, *words, "--resume")
        assert (status, out, errors.count("\n")) == (1, "", 1)
        assert any(part in errors for part in message.split("|")), errors
    one_error(run(command, "pics", "--resume", model="nets.py:Small"), 1, "model nets.py:Late, not nets.py:Small")
    assert {name: (here / name).read_bytes() for name in files(here)} == before
    state = torch.load(here / "w.pth", weights_only=True)
    torch.save(state | {"fc.bias": state["fc.bias"] + 1e-3}, here / "w.pth")
    one_error(run(command, "pics", "--resume"), 1, "cannot resume...it was made with other weights of nets.py:Late")


IMPATIENT = """
import hookscope.jobs.run as run
run._SAVE_EVERY = run._SAVE_SHARE = 0
from hookscope.cli.main import main
main()
"""
PROGRESS = {"extract": ".run.npz.parts/_progress.json", "extract to a folder": ".run.parts/_progress.json"}


@POSIX
@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_process_that_was_killed_is_resumed(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, command: str, number: int
) -> None:
    expected = whole(run, command, "pics", "--batch-size", "1")
    monkeypatch.setenv("SLOW", "0.1")
    line = command_line(command, size="1")
    child = start(*line, code=IMPATIENT, stdout=-1, stderr=-1, text=True)
    try:
        until = time.monotonic() + 120
        while not (here / PROGRESS.get(command, COMMANDS[command][1])).exists() and time.monotonic() < until:
            time.sleep(0.01)
        child.send_signal(number)
        out, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (out, child.returncode) == ("", {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number])
    assert ("add --resume to continue" in errors) == (number != signal.SIGKILL)
    monkeypatch.setenv("SLOW", "0")
    status, out, errors = run(command, "pics", "--batch-size", "1", "--resume")
    assert status == 0 and "of 6 images" in errors
    assert result(command, out) == expected
