"""Help in groups: the options of a command are shown whole, those that many commands share by name."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import click

from hookscope.cli.shared.registries import Rows

TOPICS = {
    "images": ("Images", "Which images are read, and how many at a time."),
    "model": (
        "Model and preprocessing",
        "How MODEL is loaded, and how an image becomes its input. In compare, -a or -b after a name sets one side.",
    ),
    "run": ("Run", "Where the work runs, and how the result is printed and shown."),
}
"""Topic of `hookscope help` -> title, and what it is about."""
_SECTIONS = ("Options", "Layers", "Output")


class GroupedCommand(click.Command):
    r"""A command whose help shows its own options in groups, and names the shared ones.

    The help has the names and descriptions of ``table`` at the line ``{table}`` of a ``\b`` block.
    """

    def __init__(self, *args: Any, table: Callable[[], Rows] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help with its table."""
        template = self.help
        rows = list(self._table() if self._table else ())
        width = max((len(name) for name, _ in rows), default=0)
        room = formatter.width - width - 6  # two blanks before the text of the help, the name and the description
        lines = "\n  ".join(
            f"{first:<{width}}  {line}"
            for name, text in rows
            for first, line in zip_longest([name], textwrap.wrap(text, room), fillvalue="")
        )
        self.help = inspect.cleandoc(template or "").replace("{table}", lines)
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = template

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and a line for each shared group."""
        own = own_options(self)
        for title in _SECTIONS:
            options = [option for option in own if getattr(option, "section", title) == title]
            if records := [record for option in options if (record := option.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(records)
        shared = shared_options(self.get_params(ctx))
        with formatter.section("Shared options, explained by `hookscope help TOPIC`"):
            words = {topic: " ".join(max(option.opts, key=len) for option in each) for topic, each in shared.items()}
            formatter.write_dl([*words.items()])


def own_options(command: click.Command) -> list[click.Option]:
    """The options that belong to no topic."""
    return [option for option in command.params if isinstance(option, click.Option) and not _topic(option)]


def shared_options(params: Iterable[click.Parameter]) -> dict[str, list[click.Option]]:
    """The options that belong to a topic, by topic."""
    options = [option for option in params if isinstance(option, click.Option)]
    found = {topic: [option for option in options if _topic(option) == topic] for topic in TOPICS}
    return {topic: options for topic, options in found.items() if options}


def _topic(option: click.Option) -> str:
    return getattr(option, "topic", "")
