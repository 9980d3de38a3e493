"""Lines and bars on a terminal that say what goes on."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

import click

from hookscope.cli.output.formats import Output, terminal_columns
from hookscope.errors import printable

ERASE = "\r\x1b[2K"
SHOW_CURSOR = "\x1b[?25h"


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _shows_bars() -> bool:
    return is_terminal(sys.stderr) and not Output.now.quiet


@contextlib.contextmanager
def download_progress() -> Iterator[Callable[[int, int | None], None] | None]:
    """Yield ``show(done, total)`` for a bar of bytes, which appears with the first of them; None off a terminal."""
    if not _shows_bars():
        yield None
        return
    bar: Any = None
    counts = False

    def show(done: int, total: int | None) -> None:
        nonlocal bar, counts
        Output.now.begin("")
        if not total:  # a bar of unknown length would be full at once
            counts = True
            click.echo(f"\rweights  {done / 1e6:,.1f} MB", nl=False, err=True)
            return
        bar = bar or click.progressbar(length=total, label="weights", file=sys.stderr, show_eta=True)
        bar.update(done - bar.pos)

    try:
        yield show
    finally:
        if bar is not None:
            bar.render_finish()
        if counts:
            click.echo(err=True)


@contextlib.contextmanager
def pass_progress(unit: str = "passes") -> Iterator[Callable[[int, int], None] | None]:
    """Yield ``on_progress(done, total)`` for a bar that appears with the first of several; None off a terminal.

    A bar disappears at its end: an image may need several, and there may be many images.
    """
    if not _shows_bars():
        yield None
        return
    with contextlib.ExitStack() as stack:
        advance: Callable[[int], None] | None = None
        before, expected, start = 0, 0, time.monotonic()

        def on_progress(done: int, total: int) -> None:
            nonlocal advance, before, expected, start
            if total == 1:
                return
            if advance is None or total != expected or done < before:
                stack.close()
                start = start if advance is None else time.monotonic()
                advance = stack.enter_context(image_progress(total, unit, start, keep=False))
                before, expected = 0, total
            advance(done - before)
            before = done

        yield on_progress


_SILENT = 2.0  # seconds


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Show what ``Output.now.begin`` says, once the run has taken two seconds; nothing off a terminal.

    The words stand on one line, which other lines and bars replace.
    """
    if not _shows_bars():
        yield
        return
    line, run = _PhaseLine(sys.stderr), Output.now
    timer = threading.Timer(_SILENT, line.appear)
    timer.daemon = True
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, run, "begin", run.begin)
        stack.callback(line.begin, "")
        stack.callback(timer.join)
        stack.callback(timer.cancel)
        _hide_before_others(stack, line.hide)
        run.begin = line.begin
        timer.start()
        yield


class _PhaseLine:
    """A line of words that is replaced by the next words, by a bar, or by what is printed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._words = stream, ""
        self._appears = self._is_shown = False

    def begin(self, words: str) -> None:
        self.hide()
        self._words = words
        if self._appears and words:
            with contextlib.suppress(OSError, ValueError):  # a bar hides before what is written to sys.stderr
                sys.stderr.write(f"{printable(words)[: terminal_columns(self._stream, 80) - 5]} ...")
                sys.stderr.flush()
            self._is_shown = True

    def appear(self) -> None:
        self._appears = True
        self.begin(self._words)

    def hide(self) -> None:
        if self._is_shown:
            self._is_shown = False
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(ERASE)
                self._stream.flush()


def _hide_before_others(stack: contextlib.ExitStack, hide: Callable[[], None]) -> None:
    """Until ``stack`` ends, hide a line before anything else is written to the terminal."""
    stack.enter_context(contextlib.redirect_stderr(cast(TextIO, _HidesBar(sys.stderr, hide))))
    if is_terminal(sys.stdout):
        stack.enter_context(contextlib.redirect_stdout(cast(TextIO, _HidesBar(sys.stdout, hide))))


@contextlib.contextmanager
def image_progress(
    total: int, unit: str = "images", start: float | None = None, keep: bool = True
) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(count)`` for a bar of ``total`` images with its speed since ``start``; nothing off a terminal.

    Lost images count too. A line that is printed inside the ``with`` block, on standard error or on a standard output
    that is the same terminal, replaces the bar; the next image draws the bar below it. At the end the bar stays, unless
    ``keep`` is false.
    """
    if not _shows_bars():
        yield lambda count: None
        return
    bar = _ImageBar(total, sys.stderr, unit, time.monotonic() if start is None else start)
    with contextlib.ExitStack() as stack:
        stack.callback(bar.finish if keep else bar.hide)
        _hide_before_others(stack, bar.hide)
        yield bar.advance


class _ImageBar:
    """A bar that can be hidden. A terminal that closes meanwhile does not lose a result."""

    def __init__(self, total: int, stream: TextIO, unit: str, start: float) -> None:
        self._stream, self._unit = stream, unit
        self._is_shown = False
        self._start = start
        self._bar: Any = click.progressbar(
            length=total,
            label=unit,
            file=stream,
            show_pos=True,
            show_eta=True,
            item_show_func=self._speed,
            width=_bar_width(stream, total),
        )

    def _speed(self, item: Any) -> str:
        seconds = time.monotonic() - self._start
        return f"{self._bar.pos / seconds:.1f} {self._unit}/s" if seconds > 0 else ""

    def advance(self, count: int) -> None:
        Output.now.begin("")
        self._is_shown = True
        with contextlib.suppress(OSError, ValueError):
            self._bar.update(count)

    def hide(self) -> None:
        if self._is_shown:
            self._is_shown = False
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(ERASE + SHOW_CURSOR)
                self._stream.flush()

    def finish(self) -> None:
        if self._is_shown:
            with contextlib.suppress(OSError, ValueError):
                self._bar.render_finish()


def _bar_width(stream: TextIO, total: int) -> int:
    """The columns that position, time and speed leave: a bar longer than a line cannot be erased."""
    return max(1, min(36, terminal_columns(stream, 80) - 45 - 2 * len(str(total))))


class _HidesBar:
    """A stream that hides the bar before it writes."""

    def __init__(self, stream: TextIO, hide: Callable[[], None]) -> None:
        self._stream, self._hide = stream, hide

    def write(self, text: str) -> int:
        self._hide()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
