"""The bars of a download and of images: on a terminal, silence elsewhere."""

from __future__ import annotations

import io
import os
import re
import struct
import sys

import pytest

from hookscope.cli.output import rows as output
from hookscope.cli.progress import _bar_width, download_progress, image_progress, pass_progress


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with download_progress() as show:
            assert show is None


@pytest.mark.parametrize("total", [1000, None, 0])
def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, total: int | None) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with download_progress() as show:
        assert show is not None
        assert terminal.getvalue() == ""
        for done in (100, 500, 1000):
            show(done, total)
    text = terminal.getvalue()
    assert "weights" in text
    assert ("100%" in text) == bool(total)
    assert ("0.0 MB" in text) != bool(total)
    assert text.endswith("\n") or "\x1b[?25h" in text


def test_no_download_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with download_progress():
        pass
    assert terminal.getvalue() == ""


def test_the_bar_ends_its_line_when_a_download_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    watched = download_progress()
    show = watched.__enter__()
    assert show is not None
    show(10, 100)
    assert not watched.__exit__(OSError, OSError("cut"), None)  # the error goes on
    assert "\x1b[?25h" in terminal.getvalue()


# Images


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


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_nobody_watches_images(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with image_progress(10) as advance:
        advance(3)
        assert sys.stderr is stream
    assert stream is None or stream.getvalue() == ""


def test_a_bar_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with image_progress(40) as advance:
        assert terminal.getvalue() == ""
        advance(16)
        assert re.fullmatch(r"images  \[#+-+\]  16/40  [\d.]+ images/s", screen(terminal.getvalue())[0])
        advance(16)
        advance(8)
    assert sys.stderr is terminal
    line, after = screen(terminal.getvalue())
    assert re.fullmatch(r"images  \[#+\]  40/40  [\d.]+ images/s", line)
    assert len(line) < 80
    assert after == ""
    assert terminal.getvalue().endswith("\x1b[?25h\n")


def test_notes_and_rows_are_whole_and_the_bar_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
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
    *said, bar, after = screen(terminal.getvalue())
    assert said == ["before", "Error: lost", "conv1  0.25", "Note: dark"]
    assert "3/3" in bar and after == ""


def test_after_a_last_note_no_bar_and_no_empty_line_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with image_progress(2) as advance:
        advance(2)
        output.note("last")
    assert screen(terminal.getvalue()) == ["last", ""]
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


def test_standard_output_that_is_no_terminal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", pipe)
    with image_progress(2) as advance:
        advance(1)
        assert sys.stdout is pipe


def test_an_error_ends_the_line_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    watched = image_progress(2)
    watched.__enter__()(1)
    assert not watched.__exit__(OSError, OSError("full"), None)  # the error goes on
    output.note("Error: full")
    bar, line, _ = screen(terminal.getvalue())
    assert "1/2" in bar and line == "Error: full"


def test_a_terminal_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    with image_progress(2) as advance:
        advance(1)
        output.note("unheard")
        advance(1)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
@pytest.mark.parametrize("columns", [20, 60, 200])
def test_the_bar_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    master, slave = os.openpty()
    try:
        fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with os.fdopen(os.dup(slave), "w") as stream:
            assert _bar_width(stream, 1000) == {20: 1, 60: 7, 200: 36}[columns]
    finally:
        os.close(master)
        os.close(slave)


# Passes


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_nobody_watches_passes(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with pass_progress() as on_progress:
        assert on_progress is None


def test_no_passes_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pass_progress() as on_progress:
        assert on_progress is not None
    assert terminal.getvalue() == ""
    assert sys.stderr is terminal


def test_a_bar_of_passes_appears_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pass_progress() as on_progress:
        assert on_progress is not None and terminal.getvalue() == ""
        for done in (16, 32, 40):
            on_progress(done, 40)
            assert f"{done}/40" in screen(terminal.getvalue())[-1]
    line, after = screen(terminal.getvalue())
    assert re.fullmatch(r"passes  \[#+\]  40/40  [\d.]+ passes/s", line)
    assert after == ""
    assert sys.stderr is terminal


def test_an_error_between_passes_ends_the_line_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    watched = pass_progress()
    on_progress = watched.__enter__()
    assert on_progress is not None
    on_progress(1, 9)
    assert not watched.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # the interrupt goes on
    output.note("Error: full")
    bar, line, _ = screen(terminal.getvalue())
    assert "1/9" in bar and line == "Error: full"
    assert sys.stderr is terminal
