"""Help in groups: the options of a command are shown whole, those that many commands share by name."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import click

from hookscope.cli.fields import SHORT_HELP, Rows

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
_MOST_LINES = 48  # two screens of a terminal with 24 lines
_EXAMPLES = 3  # in a short help


class GroupedCommand(click.Command):
    r"""A command whose help shows its own options in groups, and names the shared ones.

    The help has the names and descriptions of ``table`` at the line ``{table}`` of a ``\b`` block. ``--help`` is short
    if the whole help is longer than two screens.
    """

    def __init__(self, *args: Any, table: Callable[[], Rows] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table

    def whole_help(self, ctx: click.Context) -> str:
        """What `hookscope help` prints."""
        return super().get_help(ctx)

    def get_help(self, ctx: click.Context) -> str:
        whole = self.whole_help(ctx)
        if whole.count("\n") < _MOST_LINES:
            return whole
        ctx.meta[SHORT_HELP] = True
        short = super().get_help(ctx)
        del ctx.meta[SHORT_HELP]
        return f"{short}\n\n`{ctx.parent.info_name if ctx.parent else ''} help {ctx.info_name}` says more."

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help with its table."""
        template, rows = self.help, list(self._table() if self._table else ())
        if ctx.meta.get(SHORT_HELP):
            self.help = _shortened(template or "", [name for name, _ in rows], formatter.width - 2)
            super().format_help_text(ctx, formatter)
            self.help = template
            return
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
        own = own_options(self)
        for title in _SECTIONS:
            options = [option for option in own if getattr(option, "section", title) == title]
            if records := [record for option in options if (record := option.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(records)
        shared = shared_options(self.get_params(ctx))
        with formatter.section("Shared options, explained by `hookscope help TOPIC`"):
            words = {topic: " ".join(filter(None, map(_word, each))) for topic, each in shared.items()}
            formatter.write_dl([*words.items()])


def _shortened(help: str, names: Sequence[str], width: int) -> str:
    """What the command does, some examples, the first paragraph, and the ``names`` of the table under its title."""
    summary, examples, *more = inspect.cleandoc(help).split("\n\n")
    kept = [summary, "\n".join(examples.split("\n")[: _EXAMPLES + 2])]
    kept += [part for part in more if not part.startswith("\b")][:1]
    for title in (part.split()[1].rstrip(",:") for part in more if "{table}" in part):
        kept.append("\b\n" + textwrap.fill(f"{title}: {', '.join(names)}.", width, break_on_hyphens=False))
    return "\n\n".join(kept)


def own_options(command: click.Command) -> list[click.Option]:
    return [option for option in command.params if isinstance(option, click.Option) and not _topic(option)]


def shared_options(params: Iterable[click.Parameter]) -> dict[str, list[click.Option]]:
    """The options that belong to a topic, by topic."""
    options = [option for option in params if isinstance(option, click.Option)]
    found = {topic: [option for option in options if _topic(option) == topic] for topic in TOPICS}
    return {topic: options for topic, options in found.items() if options}


def _word(option: click.Option) -> str | None:
    """How a list of names spells an option; None if another option speaks for it."""
    spelled = getattr(option, "spelled", option.opts[0])
    return max(option.opts, key=len) if spelled in option.opts else spelled


def _topic(option: click.Option) -> str:
    return getattr(option, "topic", "")
