"""Which class is asked about, and what the classes are called: options that several commands share, as named values.

=====================  =============================================================
``target_option``      ``--target``: a class index, a class name or ``top:K``
``categories_option``  ``--categories FILE``: the names of the classes
=====================  =============================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from hookscope.models import LoadedModel
    from hookscope.scores import Target

_WORDS = ("top:1", "top:3", "top:5")


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``top:K``, and the names of the classes: of ``--categories``, of what ships, of torchvision's weights."""
    from hookscope.errors import HookscopeError

    try:
        names = _known_names(ctx)
    except (HookscopeError, OSError):
        names = ()
    lower = incomplete.lower()
    found = [CompletionItem(_one_word(name)) for name in names if name.lower().startswith(lower)]
    return [CompletionItem(word) for word in _WORDS if word.startswith(incomplete)] + found


def _one_word(name: str) -> str:
    """``name`` so that the shell that asks takes it for one word: bash alone puts it down as it is."""
    asks = os.environ.get("_HOOKSCOPE_COMPLETE", "")
    return re.sub(r"([^\w@%+=:,./-])", r"\\\1", name) if asks.startswith("bash") else name


def _known_names(ctx: click.Context) -> tuple[str, ...]:
    from hookscope.models import class_names_of

    given: tuple[str, ...] | None = ctx.params.get("categories")
    if given:
        return given
    # before an option that still lacks its value click leaves the arguments where they are
    model = next(iter(ctx.args), None) or ctx.params.get("model")
    return class_names_of(model or "")


def _parsed(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> Target | None:
    from hookscope.scores import Target

    return Target(",".join(value)) if value else None


def target_option(default: str | None = "top:1", help: str = "Which class to ask about") -> Callable[[Any], Any]:
    """``--target``, with a help text of the command's own before what it takes."""
    return click.option(
        "--target",
        metavar="CLASS",
        multiple=True,
        default=[default] if default is not None else None,
        show_default=default is not None,
        shell_complete=complete_targets,
        callback=_parsed,
        help=f"{help}: a class index, a class name (a part that fits one name will do) or top:K; repeatable, comma"
        " separated.",
    )


class CategoriesFile(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
    """A file of class names to the names, so that a bad file is told before a model is loaded."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names in the file ``value``, see `read_categories`."""
        from hookscope.scores import read_categories

        return value if isinstance(value, tuple) else read_categories(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Files."""
        return [CompletionItem(incomplete, type="file")]


categories_option = click.option(
    "--categories",
    metavar="FILE",
    type=CategoriesFile(),
    help="Names of the classes: one a line, or JSON (a list, or an object from index to name).  [default: those that"
    " come with the weights]",
)


def categories_of(net: LoadedModel, categories: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The names of the classes of ``net``: those of ``--categories`` where a file was given, else its own.

    Raises:
        CategoriesError: another number of names than the model is known to have classes; where that is not known
            before a pass, `predictions` finds it.
    """
    if categories is None:
        return net.categories
    from hookscope.scores import check_categories

    if net.categories:
        check_categories(categories, len(net.categories), net.name)
    return categories
