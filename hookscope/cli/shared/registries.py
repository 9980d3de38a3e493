"""Choices and rows of help from registries of the library, read when shown: a command is built without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

import hookscope
from hookscope.system import cache

Rows = Iterable[tuple[str, str]]


def kept_rows(name: str, package: str, read: Callable[[], Rows]) -> Callable[[], Rows]:
    """``read``, whose rows are kept in the user's cache: the second process that asks for them needs no torch.

    The rows are read anew when a file of ``package``, which registers them, has changed.
    """

    def rows() -> Rows:
        if "torch" in sys.modules:
            return read()
        folder = os.path.join(os.path.dirname(hookscope.__file__), package)
        stats = {file.name: file.stat() for file in os.scandir(folder) if file.name.endswith(".py")}
        files = {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}
        key = {"registry": name, "version": hookscope.__version__, "files": files}
        if (kept := cache.load("registry", key)) is None:
            kept = list(read())
            cache.store("registry", key, kept)
        return [(row[0], row[1]) for row in kept]

    return rows


class RegistryChoice(click.Choice):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
    """A choice among the keys of a registry, which is not read to complete other words."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self._names, self.case_sensitive = names, True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        """The keys in their order."""
        return tuple(self._names())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """``value``, checked unless a shell completes the command line."""
        return value if ctx is not None and ctx.resilient_parsing else super().convert(value, param, ctx)
