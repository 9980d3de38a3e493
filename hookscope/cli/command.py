"""A command as a dataclass: its fields are the options, its docstring is the help, and ``run`` does the work.

What options need of one another is said at the field and checked here, before a model or torch is loaded.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, dataclass_transform

import click

from hookscope.cli.shared import options as shared
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.image_options import image_inputs
from hookscope.cli.shared.model import ModelAndImages, ModelOptions, model_options
from hookscope.columns import Columns
from hookscope.errors import UsageError


def given_by(*decorators: Callable[[Any], Any], needs: str = "", not_with: Sequence[str] = (), why: str = "") -> Any:
    """A field whose value comes from options or arguments of click.

    Args:
        decorators: What adds them to a command, such as ``click.option(...)``.
        needs: Another field that has to have a value when this one is given.
        not_with: Other fields that must not be given together with this one.
        why: Why they do not fit, for the error.
    """
    about = {"decorators": decorators, "needs": needs, "not_with": not_with, "why": why}
    return dataclasses.field(metadata=about)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(given_by,))
@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The base of every command: it has a format, and runs."""

    fields_told: ClassVar[Columns | None] = None
    """The columns that the help lists as fields."""

    format: str = given_by(shared.format_option)

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def run(self) -> Any:
        """Do what the options say."""
        raise NotImplementedError


class OfModel(Command):
    """A command about a model."""

    model: ModelOptions = given_by(shared.model_argument(), model_options)


class OfImage(OfModel):
    """A command about one forward pass: of one image, or of two for optical flow."""

    paths: tuple[str, ...] = given_by(shared.image_argument())

    def __post_init__(self) -> None:
        ModelAndImages.check_count(self.paths)


class OfImages(OfModel):
    """A command about images, one after another."""

    paths: list[str] = given_by(image_inputs)


def command(name: str, **more: Any) -> Callable[[type[Command]], click.Command]:
    """A decorator that makes the click command ``name`` of a `Command`; ``more`` is for `click.command`."""

    def make(kind: type[Command]) -> click.Command:
        def run(**values: Any) -> Any:
            _check_together(kind)
            return kind(**values).run()

        run.__doc__ = inspect.cleandoc(kind.__doc__ or "")
        decorated: Any = run
        for field in reversed(list(_fields(kind))):
            decorated = shared.apply_options(field.metadata["decorators"], decorated)
        if kind.fields_told is not None:
            decorated = shared.tell_fields(kind.fields_told)(decorated)
        as_command: Any = click.command(name, **{"cls": GroupedCommand, **more})
        made = as_command(decorated)
        made.params.sort(key=lambda parameter: (isinstance(parameter, click.Option), parameter.name != "model"))
        assert isinstance(made, click.Command)
        return made

    return make


def _fields(kind: type[Command]) -> Iterator[dataclasses.Field[Any]]:
    """The fields in the order of the help: those of the command before those that it shares."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for owner in kind.__mro__:
        for name in inspect.get_annotations(owner):
            if name in fields:
                yield fields.pop(name)


def _check_together(kind: type[Command]) -> None:
    """Refuse options that lack another option, and options that do not go together."""
    context = click.get_current_context()
    words = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    fields = {field.name: field.metadata for field in _fields(kind)}
    for name, about in fields.items():
        if not shared.was_given(name):
            continue
        needs, do = about["needs"], about["why"]
        if needs and not context.params.get(needs):
            raise UsageError(f"{words[name]} needs {words[needs]}", do=do or f"add {words[needs]}")
        for other in about["not_with"]:
            if shared.was_given(other):
                raise UsageError(f"{words[name]} has no effect with {words[other]}", do=do or "leave one of them out")
