"""Choices and help tables from registries of the library, read when shown: a command is built without torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import click

Rows = Iterable[tuple[str, str]]


class RegistryChoice(click.Choice[str]):
    """A choice among the keys of a registry."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self._names, self.case_sensitive = names, True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        """The keys in their order."""
        return tuple(self._names())


class CommandWithTable(click.Command):
    r"""A command whose help has the names and descriptions of ``table`` at the line ``{table}`` of a ``\b`` block."""

    def __init__(self, *args: Any, table: Callable[[], Rows], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help with its table."""
        template = self.help
        rows = list(self._table())
        width = max((len(name) for name, _ in rows), default=0)
        lines = "\n  ".join(f"{name:<{width}}  {text}" for name, text in rows)
        self.help = inspect.cleandoc(template or "").replace("{table}", lines)
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = template
