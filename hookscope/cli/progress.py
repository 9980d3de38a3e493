"""Progress on standard error, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

__all__ = ["download_progress"]


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
