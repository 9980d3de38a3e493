"""Progress on standard error, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

__all__ = ["download_progress"]


@contextmanager
def download_progress() -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar for the bytes of a download, which appears with the first of them; None where nobody watches."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    shown: list[click.progressbar] = []  # type: ignore[valid-type]

    def show(done: int, total: int | None) -> None:
        if not shown:
            bar = click.progressbar(length=total or 0, label="weights", file=sys.stderr, show_eta=total is not None)
            shown.append(bar)
        shown[0].update(done - shown[0].pos)  # type: ignore[attr-defined]

    try:
        yield show
    finally:
        for bar in shown:
            bar.render_finish()  # type: ignore[attr-defined]
