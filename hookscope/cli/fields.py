"""The fields of a command: each says its option once. Options that belong together are a dataclass of their own.

Choices and rows of help from registries of the library are read when they are shown: a command is built without torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Self, dataclass_transform

import click
from click.shell_completion import CompletionItem

import hookscope
from hookscope import system
from hookscope.errors import nearest

SHORT_HELP = "hookscope.short_help"
"""In the ``meta`` of a context: whether the help is to be short."""
GIVEN = "hookscope.given"
"""In the ``meta`` of a context: the options that the command line has, with their text or texts."""
_FIRST_WORDS = re.compile(r"(?:With \S+: )?.*?(?=[.:](?: |$)|$)")
_DEFAULT = re.compile(r"  \[(?:default: .*?|required)(?=; \d*[<>=]*x|\])")
Rows = Iterable[tuple[str, str]]
Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


class Option(click.Option):
    """An option that knows its place in the help.

    Attributes:
        topic: The topic of `hookscope help` that explains it; empty for an option of the command itself.
        section: The title above it in the help of the command.
        spelled: How the help spells its first name; None: another option speaks for it.
    """

    def __init__(self, names: Sequence[str], topic: str = "", section: str = "Options", **more: Any) -> None:
        super().__init__(names, **more)
        self.topic, self.section = topic, section
        self.spelled: str | None = self.opts[0]

    def handle_parse_result(self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]) -> Any:
        """As click does; the text of each option of the command line stays known."""
        if self.name in opts:
            ctx.meta.setdefault(GIVEN, {})[self] = opts[self.name]
        return super().handle_parse_result(ctx, opts, args)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or self.spelled is None:
            return None
        spelled, text = record[0].replace(self.opts[0], self.spelled, 1), record[1]
        if ctx.meta.get(SHORT_HELP) and (first := _FIRST_WORDS.match(text)):
            default = _DEFAULT.search(text)
            text = f"{first[0]}.{default[0]}]" if default else f"{first[0]}."
        return spelled, text


class Count(click.IntRange):
    """A whole number from a least one on."""

    name = "whole number"


class RegistryChoice(click.Choice):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
    """A choice among the keys of a registry, which is not read to complete other words."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self._names, self.case_sensitive = names, True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self._names())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """``value``, checked unless a shell completes the command line."""
        if ctx is not None and ctx.resilient_parsing:
            return value
        if value not in self.choices and (near := nearest(value, self.choices)):
            self.fail(f"'{value}' is unknown; {near}", param, ctx)
        return super().convert(value, param, ctx)


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
        if (kept := system.cache.load("registry", key)) is None:
            kept = list(read())
            system.cache.store("registry", key, kept)
        return [(row[0], row[1]) for row in kept]

    return rows


def parsed(parse: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that parses the value of an option; a completion, which must not import torch, gets the text."""
    return lambda ctx, param, value: value if value is None or ctx.resilient_parsing else parse(value)


def option(
    help: str,
    *names: str,
    parse: Callable[[Any], Any] | None = None,
    least: int = 1,
    needs: str = "",
    not_with: Sequence[str] = (),
    why: str = "",
    images: tuple[int, ...] = (),
    writes: Callable[[str], object] | None = None,
    also: Sequence[click.Option] = (),
    **more: Any,
) -> Any:
    """A field that an option of the command line sets.

    The annotation says what kind of option it is: ``bool`` a flag, ``int`` a number from ``least`` on, ``tuple`` an
    option that can be repeated. A default that is not None is shown in the help.

    Args:
        help: What the option says of itself.
        names: Its names; the first is the field's name if there are none.
        parse: Turns the text into the value, before a model or torch is loaded.
        least: The smallest number.
        needs: Another field that has to have a value when this one is given.
        not_with: Other fields that must not be given together with this one.
        why: What to do if they do not fit, for the error.
        images: The fewest images that the option takes, and the most if there is a limit.
        writes: What checks the name of a file that the option writes; it returns False for what is not a file.
        also: Options without a value, which come with this one.
        more: For `Option`.
    """

    def make(name: str, kind: str, topic: str) -> list[click.Parameter]:
        about: dict[str, Any] = {"topic": topic, "help": help, **more}
        long = [] if any(word.startswith("--") for word in names) else [f"--{name.replace('_', '-')}"]
        if parse is not None:
            about["callback"] = parsed(parse)
        if kind == "bool" and not any("/" in word for word in names):
            about["is_flag"] = True
        elif kind.startswith("tuple[str") and "type" not in about and parse is None:
            about["multiple"] = True
        elif kind.startswith("int") and "type" not in about and parse is None:
            about = {"metavar": "N", "type": Count(least), **about}
        if about.get("default") is not None:
            about.setdefault("show_default", True)
        return [Option([name, *names, *long], **about), *map(copy, also)]  # each command sets their variables

    checks = {"needs": needs, "not_with": not_with, "why": why, "images": images, "writes": writes}
    return dataclasses.field(default=more.get("default"), metadata={"make": make, **checks})


def argument(metavar: str, **more: Any) -> Any:
    """A field that arguments of the command line set; it is ``nargs=-1`` if the annotation is a tuple."""

    def make(name: str, kind: str, topic: str) -> list[click.Parameter]:
        several: dict[str, Any] = {"nargs": -1} if kind.startswith("tuple") else {}
        return [click.Argument([name], metavar=metavar, **several, **more)]

    return dataclasses.field(default=more.get("default", ()), metadata={"make": make})


def group(kind: type[Options], only: Sequence[str] = ()) -> Any:
    """A field that holds options which are a dataclass of their own; ``only`` some of them, others have defaults."""
    return dataclasses.field(metadata={"group": kind, "only": only})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, argument, group))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options as a dataclass; `option`, `argument` and `group`, or functions that call them, make its fields."""

    topic: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        # nobody compares or prints options, and each generated method takes 0.1 ms of every start
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False, match_args=False)(cls)

    @classmethod
    def click_parameters(cls, only: Sequence[str] = ()) -> Iterator[click.Parameter]:
        """What click reads, in the order of the help: what a class adds comes before what it inherits."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for owner in cls.__mro__:
            topic = vars(owner).get("topic", "")
            for name in inspect.get_annotations(owner):
                if (field := fields.pop(name, None)) is None or (only and name not in only):
                    continue
                if "group" in field.metadata:
                    yield from field.metadata["group"].click_parameters(field.metadata["only"])
                elif "make" in field.metadata:
                    kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
                    yield from field.metadata["make"](name, kind, topic)

    @classmethod
    def taken(cls, values: Mapping[str, Any]) -> Self:
        """The options from the ``values`` that click has read."""
        kinds = {field.name: field.metadata.get("group") for field in dataclasses.fields(cls)}
        given = {name: kind.taken(values) if kind else values.get(name) for name, kind in kinds.items()}
        return cls(**{name: value for name, value in given.items() if kinds[name] or name in values})

    def given(self, *names: str) -> dict[str, Any]:
        """These options by name, for a call that takes them by the same names."""
        return {name: getattr(self, name) for name in names}

    @classmethod
    def metadata(cls) -> dict[str, Mapping[str, Any]]:
        """What `option` was told of each field, fields of groups too."""
        metadata: dict[str, Mapping[str, Any]] = {}
        for field in dataclasses.fields(cls):
            if "group" in field.metadata:
                metadata |= field.metadata["group"].metadata()
            elif "needs" in field.metadata:
                metadata[field.name] = field.metadata
        return metadata
