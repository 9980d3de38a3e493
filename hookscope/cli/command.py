"""A command as a dataclass: its fields are the options, its docstring is the help, and ``run`` does the work.

What options need of one another and of files is said at the field and checked here, before a model or torch is loaded.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import click

from hookscope.cli import process
from hookscope.cli.fields import Options, RegistryChoice, Rows, option
from hookscope.cli.output import formats
from hookscope.cli.output.report import Report
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.output_paths import is_same_file, refuse_input
from hookscope.columns import Columns
from hookscope.errors import UsageError
from hookscope.findings import counted
from hookscope.system import check_writable


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
        ordered = sorted(params.values(), key=lambda each: (isinstance(each, click.Option), each.name != "model"))
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
    return next(each.opts[0] for each in click.get_current_context().command.params if each.name == name)


def _is_set(value: Any) -> bool:
    """Whether an option has a value: a number may be 0."""
    return bool(value) if isinstance(value, bool | tuple) else value is not None


def _check_together(kind: type[Command]) -> None:
    """Refuse options that lack another option, and options that do not go together."""
    values = click.get_current_context().params
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
