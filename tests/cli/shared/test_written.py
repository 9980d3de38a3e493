"""Pictures are opened, or drawn in the terminal, on request; golden files hold the lines that say where they are."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from PIL import Image

from hookscope.cli.main import main
from hookscope.cli.shared import terminal, written
from tests.cli.helpers import POSIX, Terminal

NET = """
from collections import OrderedDict

import torch

def net():
    layers = {"first": torch.nn.Conv2d(3, 4, 3), "second": torch.nn.Conv2d(4, 4, 3)}
    layers |= {"flat": torch.nn.Flatten(), "last": torch.nn.Linear(784, 5)}
    return torch.nn.Sequential(OrderedDict(layers))

input_size = (18, 18)
preprocess = "imagenet"
"""
DRAWS = {
    "visualize net.py:net cat.png --layer 0 -o a.png": "a.png",
    "cam net.py:net cat.png -o a.png": "a.png",
    "cam net.py:net cat.png -o a.png --sheet sheet.png": "sheet.png, a.png",
    "saliency net.py:net cat.png -o a.png": "a.png",
    "intervene net.py:net cat.png --at first zero --layer second --grid a.png": "a.png",
    "ablate net.py:net cat.png --layer first --plot b.png": "b.png",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Run a command line in a folder with a net and a picture; the lines on standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "net.py").write_text(NET)
    Image.effect_noise((18, 18), 80).convert("RGB").save(tmp_path / "cat.png")

    def run(words: str, status: int = 0) -> list[str]:
        with pytest.raises(SystemExit) as caught:
            main(words.split())
        assert caught.value.code == status
        return capfd.readouterr().err.splitlines()

    return run


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is opened, on a machine with a display."""
    started: list[list[str]] = []

    class Opener:
        def __init__(self, words: list[str], **streams: Any) -> None:
            started.append(words)

        def wait(self, seconds: float) -> int:
            return 0

    monkeypatch.setenv("DISPLAY", ":9")
    monkeypatch.setattr(subprocess, "Popen", Opener)
    return started


def test_a_name_that_begins_with_a_minus_is_opened_as_a_path(run: Any) -> None:
    assert (
        run("visualize net.py:net cat.png --layer 0 -o -x/")[-1]
        == "wrote -x/cat-net.py-net-000-first.png; open it: xdg-open ./-x/cat-net.py-net-000-first.png"
    )


@pytest.mark.parametrize(
    ("platform", "opener"), [("darwin", "open '"), ("win32", 'explorer "'), ("freebsd14", "xdg-open '")]
)
def test_each_system_has_its_opener(run: Any, monkeypatch: pytest.MonkeyPatch, platform: str, opener: str) -> None:
    with click.Context(click.Command("x")) as context:
        monkeypatch.setattr(sys, "platform", platform)
        Path("a b.png").touch()
        written.wrote("a b.png")
        assert written.tell_what_was_written(context) is None
    assert run("help nothing", 2)[0] == f"wrote a b.png; open it: {opener}a b.png{opener[-1]}"


def test_open_opens_the_picture_or_the_folder(run: Any, opened: list[list[str]]) -> None:
    assert run("visualize net.py:net cat.png --layer 0 -o a.png --open") == ["wrote a.png"]
    assert run("visualize net.py:net cat.png -o -x/ --open") == ["wrote 2 pictures to -x/"]
    assert run("visualize net.py:net cat.png --layer 0 -o b.png --open --quiet") == []
    assert opened == [["xdg-open", "a.png"], ["xdg-open", "./-x"], ["xdg-open", "b.png"]]


@POSIX
@pytest.mark.parametrize(
    ("display", "program", "why"),
    [
        ("", "exit 0", "there is no display"),
        (":9", "", "xdg-open: No such file or directory"),
        (":9", "exit 4", "xdg-open ended with status 4"),
        (":9", "exec sleep 30", ""),
    ],
)
def test_what_cannot_be_opened_stays_and_the_status_is_0(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, display: str, program: str, why: str
) -> None:
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setenv("WAYLAND_DISPLAY", "")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin" if program else str(tmp_path))
    if program:
        (tmp_path / "xdg-open").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "xdg-open").chmod(0o755)
    monkeypatch.setattr(written, "_OPENER_SECONDS", 0.2 if "sleep" in program else 10)
    lines = run("weights net.py:net --kernels k.png --open")
    assert lines[-1] == (f"wrote k.png; cannot open it: {why}" if why else "wrote k.png")
    assert os.path.isfile("k.png")


def test_the_file_of_raw_is_named_too_and_not_opened(run: Any, opened: list[list[str]]) -> None:
    assert run("visualize net.py:net cat.png -o out --raw a.npz --open") == ["wrote 2 pictures to out/ and a.npz"]
    last = run("cam net.py:net cat.png -o b.png --raw b.npy")[-1]
    assert last == "wrote b.png and b.npy; open it: xdg-open b.png"
    assert run("saliency net.py:net cat.png -o - --raw c.safetensors")[-1] == "wrote c.safetensors"
    assert run("cam net.py:net cat.png -o d.png --raw /dev/null")[-1].startswith("wrote d.png; ")
    assert opened == [["xdg-open", "out"]]


def test_open_without_a_picture_has_a_note(run: Any, opened: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = "Note: --open opens nothing, because nothing was written to a file"
    assert run("weights net.py:net --open") == [nothing]
    assert run("visualize net.py:net no.png --open", status=1)[0].startswith("Error: ")
    monkeypatch.setenv("HOOKSCOPE_OPEN", "1")
    assert run("weights net.py:net") == []
    assert run("weights net.py:net --kernels k.png") == ["wrote k.png"]
    assert opened == [["xdg-open", "k.png"]]


def test_pictures_are_said_also_before_an_error_and_nothing_else(run: Any) -> None:
    Path("bad.png").write_bytes(b"no picture")
    lines = run("visualize net.py:net cat.png bad.png --layer 0 -o out/", status=1)
    assert [line.partition(" ")[0] for line in lines] == ["Error:", "wrote"]
    assert run("visualize net.py:net cat.png --layer 0 -o -") == []
    assert run("cam net.py:net cat.png -o /dev/null --weights none") == []
    assert not [line for line in run("stats net.py:net cat.png") if line.startswith("wrote")]


@pytest.fixture
def screen(run: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command line on a terminal of 80x24; all that the terminal gets."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm-256color")

    def screen(words: str, status: int = 0) -> str:
        shown = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", shown)
            patch.setattr(sys, "stderr", shown)
            run(words, status)
        return shown.getvalue()

    return screen


@pytest.mark.parametrize("words", DRAWS)
def test_show_draws_every_picture_below_its_name_and_before_the_last_line(screen: Any, words: str) -> None:
    names = DRAWS[words].split(", ")
    text = screen(f"{words} --show")
    places = []
    for name in names:
        with Image.open(name) as picture:
            assert f"\n{name}: {picture.width}x{picture.height} pixels, drawn at " in text
            places.append(text.index(f"\n{name}: "))
            drawing = terminal.draw(picture, terminal.Screen())
        assert f"%\n{drawing}" in text and 2 < drawing.count("\n") <= 21 and drawing.count("▀") > 50
    assert places == sorted(places) and text.index(" pixels, drawn") > text.index("weights: ")
    assert text.splitlines()[-1].startswith(f"wrote {DRAWS[words]}; open")


def test_show_draws_four_pictures_or_an_overview_below_the_rows(screen: Any) -> None:
    for number in range(3):
        Image.new("RGB", (18, 18)).save(f"{number}.png")
    text = screen("visualize net.py:net 0.png 1.png 2.png -o out --show")
    assert text.count(" pixels, drawn at") == 4
    assert text.splitlines()[-2:] == ["2 more pictures not shown", "wrote 6 pictures to out/; open it: xdg-open out"]
    text = screen("inspect net.py:net cat.png -o a.html --show")
    before, _, drawing = text.partition("\x1b[38;5")
    assert "preprocess" in before and "a.html: " not in text
    assert 8 <= drawing.count("▀\x1b[0m\n") <= 21 and text.splitlines()[-1].startswith("wrote a.html; open it: ")


def test_show_goes_with_open_and_quiet_and_says_what_it_cannot_draw(screen: Any, opened: list[list[str]]) -> None:
    text = screen("cam net.py:net cat.png -o a.png --show --open")
    assert text.count("▀") > 50 and text.endswith("\nwrote a.png\n") and opened == [["xdg-open", "a.png"]]
    text = screen("cam net.py:net cat.png -o a.png --show --quiet")
    assert text.count("▀") > 50 and "a.png: " not in text and "wrote" not in text
    text = screen("ablate net.py:net cat.png --layer first --plot b.svg --show")
    assert "\nNote: b.svg is not shown: it is not a PNG file, or too large\nwrote b.svg; " in text
    text = screen("intervene net.py:net cat.png --at first zero --show")
    assert text.endswith("\nNote: --show shows nothing, because no picture was written to a file\n")


def test_an_overview_is_drawn_instead_of_what_is_no_picture(screen: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("x")) as context:
        context.meta[written._SCREEN] = terminal.Screen()
        Path("a.html").touch()
        written.wrote("a.html", lambda: Image.new("RGB", (40, 20), (1, 2, 3)))
        written.tell_what_was_written(context)
    out, errors = capfd.readouterr()
    assert out.count("▀") == 40 * 10 and "pixels" not in errors


@pytest.mark.parametrize("words", DRAWS)
def test_show_is_refused_in_a_pipe_before_anything_is_computed(run: Any, words: str) -> None:
    why = "Error: --show needs a terminal; standard output is a file or a pipe; leave --show out, or use --open"
    assert run(f"{words} --show".replace("net.py", "no.py"), 2) == [why]
    assert "-o" not in words or run(f"{words} -o - --show", 2) == [why]
    assert not os.path.exists("a.png")


def test_show_is_refused_on_a_dumb_terminal_and_for_standard_output(
    screen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert screen("cam net.py:net cat.png -o - --show", 2).startswith("Error: -o - would write a picture to the term")
    monkeypatch.setenv("TERM", "dumb")
    why = "Error: --show needs a terminal with colours; TERM is dumb; leave --show out, or use --open\n"
    assert screen("cam no.py:net cat.png --show", 2) == why


def test_without_the_extra_its_name_is_said(screen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textual_image", None)
    why = "Error: --show needs textual-image, which is not installed; pip install 'hookscope[terminal]'"
    assert screen("cam no.py:net cat.png --show", 1) == f"{why}\n"


def test_show_in_the_settings_is_for_terminals_only(run: Any, screen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKSCOPE_CAM_SHOW", "1")
    assert run("cam net.py:net cat.png -o a.png --weights none") == ["wrote a.png; open it: xdg-open a.png"]
    assert screen("cam net.py:net cat.png -o a.png").count("▀") > 50
