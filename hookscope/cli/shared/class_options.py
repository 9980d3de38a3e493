"""Options for the class that a command asks about, and for the names of the classes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from hookscope import models, scores
from hookscope.cli.fields import option, parsed
from hookscope.cli.output.formats import note
from hookscope.cli.shared.options import complete_words, typed_model
from hookscope.errors import HookscopeError


def complete_classes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names of the classes: from ``--categories``, else from the model typed."""
    try:
        names = ctx.params.get("categories") or models.class_names_of(typed_model(ctx) or "")
    except (HookscopeError, OSError):
        names = ()
    names = [name for name in names if name.lower().startswith(incomplete.lower())]
    if os.environ.get("_HOOKSCOPE_COMPLETE", "").startswith("bash"):  # other shells quote a name by themselves
        names = [re.sub(r"([^\w@%+=:,./-])", r"\\\1", name) for name in names]
    return list(map(CompletionItem, names))


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    best = complete_words("top:1", "top:3", "top:5")(ctx, param, incomplete)
    return best + complete_classes(ctx, param, incomplete)


def target_option(
    help: str,
    best: bool = True,
    parse: Callable[[str], Any] = scores.Target,
    more: str = "",
    default: str | None = "top:1",
    **checks: Any,
) -> Any:
    """``--target``; ``help`` comes before what the option takes; ``best`` if it takes ``top:K``.

    ``more`` is help on what else ``parse`` takes.
    """
    last = "unique part of a name, or top:K (the K best)" if best else "or unique part of a name"
    return option(
        f"{help}: number, name, {last}; repeatable, comma separated.{more}",
        "--target",
        metavar="CLASS",
        multiple=True,
        default=None if default is None else (default,),
        shell_complete=complete_targets if best else complete_classes,
        callback=parsed(lambda words: parse(",".join(words)) if words else None),
        **checks,
    )


class CategoriesFile(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
    """A file of class names to the names, so that a bad file is reported before a model is loaded."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The path of a file to the names in it."""
        return value if isinstance(value, tuple) else scores.read_categories(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem("imagenet")] if incomplete and "imagenet".startswith(incomplete) else []
        return [*names, CompletionItem(incomplete, type="file")]


def categories_option(**checks: Any) -> Any:
    return option(
        "Names of the classes: imagenet, or a file with one name per line or JSON (a list, or an object from number"
        " to name).  [default: the names that come with the weights]",
        "--categories",
        metavar="FILE",
        type=CategoriesFile(),
        topic="model",
        **checks,
    )


def categories_of(net: models.LoadedModel, categories: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The class names of ``--categories``, else of ``net``; CategoriesError for another number of classes.

    If that number is unknown before a forward pass, `predictions` raises the error.
    """
    if categories is None:
        if net.categories is None and models.outputs_of(net.model) == 1000:
            note("Note: class names unknown; --categories imagenet if these are ImageNet's classes")
        return net.categories
    if net.categories:
        scores.check_categories(categories, len(net.categories), net.name)
    return categories
