"""The bars of a download, of images and of passes: on a terminal, silence elsewhere."""

import io
import os
import re
import struct
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from hookscope.cli import progress
from hookscope.cli.output import formats as output
from hookscope.cli.progress import _bar_width, download_progress, image_progress, pass_progress
from hookscope.columns import Columns
from tests.cli.helpers import Terminal

Progress = Callable[[], AbstractContextManager[Any]]
ADVANCES: dict[str, tuple[Progress, tuple[int, ...]]] = {
    "download": (download_progress, (1, 2)),
    "images": (lambda: image_progress(2), (1,)),
    "passes": (pass_progress, (1, 2)),
}


def standard_error(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal; pytest replaces what a fixture puts there."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def screen(text: str) -> list[str]:
    """What a terminal shows of ``text``, for what the bar uses of its language."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[\??\d*[A-Za-z]|.", text, re.DOTALL):
        if part == "\x1b[2K":
            lines[-1] = ""
        elif part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
            column = 0
        elif not part.startswith("\x1b"):
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_a_stream_that_is_no_terminal_stays_silent(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with download_progress() as show, pass_progress() as on_progress, image_progress(10) as advance:
        assert show is None and on_progress is None
        advance(3)
        assert sys.stderr is stream
    assert stream is None or stream.getvalue() == ""


@pytest.mark.parametrize("kind", ADVANCES)
def test_nothing_done_draws_no_bar(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    terminal = standard_error(monkeypatch)
    with ADVANCES[kind][0]() as advance:
        assert advance is not None
    assert terminal.getvalue() == ""
    assert sys.stderr is terminal


@pytest.mark.parametrize("kind", ADVANCES)
def test_an_error_ends_the_line_of_the_bar_and_goes_on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    terminal = standard_error(monkeypatch)
    progress, arguments = ADVANCES[kind]
    bar = progress()
    bar.__enter__()(*arguments)
    assert not bar.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    output.note("Error: full")
    assert sys.stderr is terminal and "\x1b[?25h" in terminal.getvalue()
    *shown, line, _ = screen(terminal.getvalue())
    assert ["50%" in text if kind == "download" else "1/2" in text for text in shown] == [True] * (kind != "passes")
    assert line == "Error: full"


@pytest.mark.parametrize("total", [1000, None, 0])
def test_a_download_shows_its_share_or_its_size(monkeypatch: pytest.MonkeyPatch, total: int | None) -> None:
    terminal = standard_error(monkeypatch)
    with download_progress() as show:
        assert show is not None
        for done in (100, 500, 1000):
            show(done, total)
    text = terminal.getvalue()
    assert "weights" in text
    assert ("100%" in text, "0.0 MB" in text) == (bool(total), not total)
    assert text.endswith("\n") or "\x1b[?25h" in text


def test_a_bar_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = standard_error(monkeypatch)
    with image_progress(40) as advance:
        advance(16)
        assert re.fullmatch(r"images  \[#+-+\]  16/40  [\d.]+ images/s", screen(terminal.getvalue())[0])
        advance(16)
        advance(8)
    assert sys.stderr is terminal
    line, after = screen(terminal.getvalue())
    assert re.fullmatch(r"images  \[#+\]  40/40  [\d.]+ images/s", line)
    assert len(line) < 80 and after == ""
    assert terminal.getvalue().endswith("\x1b[?25h\n")


def test_a_bar_of_passes_appears_with_the_first_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = standard_error(monkeypatch)
    with pass_progress() as on_progress:
        assert on_progress is not None
        for done in (16, 32, 40):
            on_progress(done, 40)
            assert f"{done}/40" in screen(terminal.getvalue())[-1]
        assert re.fullmatch(r"passes  \[#+\]  40/40  [\d.]+ passes/s", screen(terminal.getvalue())[-1])
    assert screen(terminal.getvalue()) == [""] and sys.stderr is terminal
    terminal = standard_error(monkeypatch)
    with pass_progress() as on_progress:
        assert on_progress is not None
        on_progress(1, 1)
    assert terminal.getvalue() == ""
    now = iter([0.0, *[2.0] * 9])
    monkeypatch.setattr("hookscope.cli.progress.time.monotonic", lambda: next(now))
    with pass_progress("images") as on_progress:
        assert on_progress is not None
        on_progress(1, 3)
        assert screen(terminal.getvalue())[-1].endswith("1/3  0.5 images/s")


def test_notes_come_before_the_bar_and_other_streams_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = standard_error(monkeypatch)
    monkeypatch.setattr(sys, "stdout", terminal)
    with image_progress(3) as advance:
        output.note("before")
        advance(1)
        output.note("Error: lost")
        sys.stdout.write("conv1  0.25\n")
        advance(1)
        output.note("Note: dark")
        advance(1)
    assert sys.stdout is terminal
    *lines, bar, after = screen(terminal.getvalue())
    assert lines == ["before", "Error: lost", "conv1  0.25", "Note: dark"]
    assert "3/3" in bar and after == ""
    terminal = standard_error(monkeypatch)
    with image_progress(2) as advance:
        advance(2)
        output.note("last")
    assert screen(terminal.getvalue()) == ["last", ""]
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
    standard_error(monkeypatch)
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    with image_progress(2) as advance:
        advance(1)
        assert sys.stdout is pipe

    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    with image_progress(2) as advance:
        advance(1)
        output.note("unheard")
        advance(1)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
@pytest.mark.parametrize(("columns", "width"), [(20, 1), (60, 7), (200, 36)])
def test_the_bar_fits_the_terminal(columns: int, width: int) -> None:
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    leader, terminal = os.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with os.fdopen(os.dup(terminal), "w") as stream:
            assert _bar_width(stream, 1000) == width
    finally:
        os.close(leader)
        os.close(terminal)


def test_after_two_seconds_a_line_says_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SILENT", 0.05)
    terminal = standard_error(monkeypatch)
    with progress.working():
        output.Output.now.begin("loading resnet34")
        assert terminal.getvalue() == ""
        wait_for(lambda: screen(terminal.getvalue()) == ["loading resnet34 ..."])
        output.note("Note: something")
        output.Output.now.begin("running resnet34")
        assert screen(terminal.getvalue()) == ["Note: something", "running resnet34 ..."]
        with image_progress(2) as advance:
            advance(1)
            output.Output.now.begin("drawing the page")
            assert screen(terminal.getvalue())[1] == "drawing the page ..."
            advance(1)
        assert screen(terminal.getvalue())[1].startswith("images") and "drawing" not in terminal.getvalue()[-90:]
        output.Output.now.begin("image 2 of 6")
        output.write_report(output.Report([output.Section([], Columns("name"))]), "tsv")  # whose reader may print here
        assert screen(terminal.getvalue())[-1] == ""
        output.Output.now.begin("x" * 300)
        assert len(screen(terminal.getvalue())[-1]) < 80
    assert screen(terminal.getvalue())[-1] == "" and sys.stderr is terminal
    output.Output.now.begin("not shown")
    assert screen(terminal.getvalue())[-1] == ""


@pytest.mark.parametrize("quiet", [True, False])
def test_a_short_or_quiet_run_has_no_line(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    monkeypatch.setattr(progress, "_SILENT", 0.0 if quiet else 60.0)
    monkeypatch.setattr(output.Output.now, "quiet", quiet)
    terminal = standard_error(monkeypatch)
    with progress.working():
        output.Output.now.begin("loading resnet34")
        time.sleep(0.02)
    assert terminal.getvalue() == ""
