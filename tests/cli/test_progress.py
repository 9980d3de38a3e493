"""The bar of a download: bytes on a terminal, silence elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from hookscope.cli.progress import download_progress


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
