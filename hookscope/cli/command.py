"""A command as a dataclass: its fields are the options, its docstring is the help, and ``run`` does the work.

The help is in groups: the options of a command are shown whole, those that many commands share by name.

What options need of one another and of files is said at the field and checked here, before a model or torch is loaded.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import click

from hookscope.cli import process, progress
from hookscope.cli.fields import SHORT_HELP, Options, RegistryChoice, Rows, option
from hookscope.cli.output import formats
from hookscope.cli.output.formats import Report
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import is_same_file, refuse_input
from hookscope.columns import Columns
from hookscope.errors import UsageError
from hookscope.findings import counted
from hookscope.system import check_writable

TOPICS = {
    "images": ("Images", "Which images are read, and how many at a time."),
    "model": (
        "Model and preprocessing",
        "How MODEL is loaded, and how an image becomes its input. In compare, -a or -b at its end sets one side.",
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
        template, rows = self.help or "", list(self._table() if self._table else ())
        width = max((len(name) for name, _ in rows), default=0)
        room = formatter.width - width - 6  # two blanks before the text of the help, the name and the description
        lines = "\n  ".join(
            f"{first:<{width}}  {line}"
            for name, text in rows
            for first, line in zip_longest([name], textwrap.wrap(text, room), fillvalue="")
        )
        self.help = inspect.cleandoc(template).replace("{table}", lines)
        if ctx.meta.get(SHORT_HELP):
            self.help = _shortened(template, [name for name, _ in rows], formatter.width - 2)
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
        by_topic = shared_options(self.get_params(ctx))
        with formatter.section("Shared options, explained by `hookscope help TOPIC`"):
            for topic, group in by_topic.items():
                names, begin = " ".join(filter(None, map(_in_list, group))), f"  {topic:<{max(map(len, by_topic))}}  "
                look: dict[str, Any] = {"subsequent_indent": " " * len(begin), "break_on_hyphens": False}
                formatter.write(textwrap.fill(names, formatter.width, initial_indent=begin, **look) + "\n")


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
    by_topic = {topic: [option for option in options if _topic(option) == topic] for topic in TOPICS}
    return {topic: options for topic, options in by_topic.items() if options}


def _in_list(option: click.Option) -> str | None:
    """How a list of names spells an option; None if another option speaks for it."""
    spelled = getattr(option, "spelled", option.opts[0])
    return max(option.opts, key=len) if spelled in option.opts else spelled


def _topic(option: click.Option) -> str:
    return getattr(option, "topic", "")


class Command(Options):
    """The base of every command."""

    fields_told: ClassVar[Columns | None] = None
    """The columns that the help lists as fields."""
    fields_title: ClassVar[str] = "Fields"
    table: ClassVar[Callable[[], Rows] | None] = None
    """The names and descriptions that the help has at its line ``{table}``."""
    made_of: ClassVar[type[GroupedCommand]] = GroupedCommand

    def inputs(self) -> Iterator[tuple[str, str]]:
        """What kind of input, and the file of each; no output may replace it."""
        return iter(())

    def start(self) -> Any:
        """Check what the options say, and run."""
        self.check()
        return self.run()

    def check(self) -> None:
        """Refuse files that cannot be written, are an input or another output, and a wrong number of images."""
        inputs = [*self.inputs()]  # fails here if there are no images
        written: dict[str, str] = {}
        for name, about in self.metadata().items():
            path = getattr(self, name, None)
            if path is None or not (about["writes"] or about["images"]):
                continue
            word = _word(name)
            if about["images"]:
                self._check_count(word, *about["images"])
            if about["writes"] is None or about["writes"](path) is False:
                continue
            check_writable(path)
            for kind, source in inputs:
                refuse_input(path, [source], kind)
            for other, earlier in written.items():
                if is_same_file(path, earlier):
                    raise UsageError(f"{other} and {word} name the same file '{path}'", do="name two files")
            written[word] = path

    def _check_count(self, word: str, fewest: int, most: int | None = None) -> None:
        count = sum(kind == "image" for kind, _ in self.inputs())
        if count < fewest or (most is not None and count > most):
            asked = f"{word} takes {f'{fewest} images or more' if most is None else counted(most, 'image')}"
            raise UsageError(asked, f"there {'is' if count == 1 else 'are'} {count}")

    def run(self) -> Any:
        """Do what the options say; returns the exit status, or what runs when all is put back."""
        raise NotImplementedError

    @classmethod
    def made(cls, name: str) -> click.Command:

        def call(**values: Any) -> Any:
            _check_together(cls)
            return cls.taken(values).start()

        help = inspect.cleandoc(cls.__doc__ or "")
        if cls.fields_told is not None:
            lines = "\n  ".join([f"{cls.fields_title}:", *cls.fields_told.help_lines()])
            help += f"\n\n\b\n{lines}"
        params = {parameter.name: parameter for parameter in cls.click_parameters()}
        ordered = sorted(params.values(), key=lambda param: (isinstance(param, click.Option), param.name != "model"))
        return cls.made_of(name, callback=call, params=ordered, help=help, table=cls.table)


class RowCommand(Command):
    """A command that prints rows."""

    topic = "run"
    format: str = option(
        "How to print the rows.  [default: table on a terminal, tsv in a pipe]",
        type=RegistryChoice(lambda: formats.FORMATS),
        callback=lambda ctx, param, value: value or formats.default_format(sys.stdout),
        also=[shared.utf8_option],
    )

    def start(self) -> Any:
        """Check what the options say, and run, with a line that says what goes on."""
        with progress.working():
            formats.Output.now.begin(click.get_current_context().info_name or "")
            return super().start()

    def print(self, report: Report) -> None:
        """Write a report in the format of ``--format``; a reader that leaves ends neither the run nor its status."""
        with process.reader_may_leave():
            formats.write_report(report, self.format)

    @contextlib.contextmanager
    def printed_after(self, report: Report) -> Iterator[None]:
        """Print a report after the block that writes files: a full disk does not lose the rows."""
        try:
            yield
        finally:
            self.print(report)


def _word(name: str) -> str:
    """How the command line spells a field."""
    return next(param.opts[0] for param in click.get_current_context().command.params if param.name == name)


def _is_set(value: Any) -> bool:
    """Whether an option has a value: a number may be 0."""
    return bool(value) if isinstance(value, bool | tuple) else value is not None


def _check_together(kind: type[Command]) -> None:
    """Refuse options that lack another option or do not go together; say where ``--type`` chooses nothing."""
    values = click.get_current_context().params
    layers = values.get("layers")
    if shared.was_given("types") and layers is not None and not (layers.counts or layers.has_all):
        formats.note("Note: --type chooses no layers here: names and patterns in --layer take any type")
    for name, about in kind.metadata().items():
        if not shared.was_given(name):
            continue
        needs, do = about["needs"].split(), about["why"]
        if needs and not any(_is_set(values[other]) for other in needs):
            words = " or ".join(map(_word, needs))
            raise UsageError(f"{_word(name)} needs {words}", do=do or f"add {words}")
        for other in about["not_with"]:
            if shared.was_given(other):
                raise UsageError(f"{_word(name)} has no effect with {_word(other)}", do=do or "leave one of them out")
