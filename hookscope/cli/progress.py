"""Progress on standard error, on a terminal only."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

import click

_ERASE = "\r\x1b[2K"
_SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def download_progress() -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar for the bytes of a download, which appears with the first of them; None where nobody watches."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    bars: list[Any] = []
    counted = 0

    def show(done: int, total: int | None) -> None:
        nonlocal counted
        if not total:  # a bar without an end would be full at once
            counted = done
            click.echo(f"\rweights  {done / 1e6:,.1f} MB", nl=False, err=True)
            return
        if not bars:
            bars.append(click.progressbar(length=total, label="weights", file=sys.stderr, show_eta=True))
        bars[0].update(done - bars[0].pos)

    try:
        yield show
    finally:
        for bar in bars:
            bar.render_finish()
        if counted:
            click.echo(err=True)


@contextmanager
def pass_progress() -> Iterator[Callable[[int, int], None] | None]:
    """Yield ``on_progress(done, total)`` for a bar that appears with the first pass; None off a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    with ExitStack() as stack:
        bars: list[Callable[[int], None]] = []
        before = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal before
            if not bars:
                bars.append(stack.enter_context(image_progress(total, "passes")))
            bars[0](done - before)
            before = done

        yield on_progress


@contextmanager
def image_progress(total: int, what: str = "images") -> Iterator[Callable[[int], None]]:
    """Yield ``advance(count)`` for a bar of ``total`` images with images a second; nothing shows off a terminal.

    Count lost images too, or the bar ends early. What is printed meanwhile, notes on standard error and rows on a
    standard output that is the same terminal, takes the place of the bar, which comes back below it with the next
    image: take ``sys.stdout`` inside the ``with`` block.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda count: None
        return
    bar = _ImageBar(total, sys.stderr, what)
    with ExitStack() as stack:
        stack.callback(bar.finish)
        stack.enter_context(redirect_stderr(cast(TextIO, _Aside(sys.stderr, bar.hide))))
        if sys.stdout is not None and sys.stdout.isatty():
            stack.enter_context(redirect_stdout(cast(TextIO, _Aside(sys.stdout, bar.hide))))
        yield bar.advance


class _ImageBar:
    """A bar that can step aside."""

    def __init__(self, total: int, stream: TextIO, what: str) -> None:
        self._stream = stream
        self._what = what
        self._shown = False
        self._began = time.monotonic()
        self._bar: Any = click.progressbar(
            length=total,
            label=what,
            file=stream,
            show_pos=True,
            show_eta=True,
            item_show_func=self._speed,
            width=_bar_width(stream, total),
        )

    def _speed(self, item: Any) -> str:
        passed = time.monotonic() - self._began
        return f"{self._bar.pos / passed:.1f} {self._what}/s" if passed > 0 else ""

    def advance(self, count: int) -> None:
        self._shown = True
        with suppress(OSError, ValueError):  # a terminal that has gone is no reason to lose a result
            self._bar.update(count)

    def hide(self) -> None:
        if self._shown:
            self._shown = False
            with suppress(OSError, ValueError):
                self._stream.write(_ERASE + _SHOW_CURSOR)
                self._stream.flush()

    def finish(self) -> None:
        if self._shown:  # else other lines have taken its place, each ended
            with suppress(OSError, ValueError):
                self._bar.render_finish()


def _bar_width(stream: TextIO, total: int) -> int:
    """What position, time and speed leave of a line: one that wraps is never taken back."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        columns = 80
    return max(1, min(36, columns - 45 - 2 * len(str(total))))


class _Aside:
    """A stream that lets the bar step aside before a line is written to it, in all else the stream behind it."""

    def __init__(self, stream: TextIO, hide: Callable[[], None]) -> None:
        self._stream = stream
        self._hide = hide

    def write(self, text: str) -> int:
        self._hide()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
