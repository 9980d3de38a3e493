"""Options that several commands share, as named values.

=================  ============================================================
``model_argument``  MODEL: torchvision name, factory or ``timm:NAME``
``type_option``     ``--type``: class names that indices count
``size_option``     ``--input-size HxW``
``format_option``   ``--format``: how rows go to standard output
=================  ============================================================
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from hookscope.cli.output import FORMATS, default_format

__all__ = ["InputSize", "complete_layers", "complete_types", "format_option", "model_argument", "size_option", "type_option"]


class InputSize(click.ParamType):
    """``HxW`` in pixels, or one number for a square, to ``(H, W)``."""

    name = "HxW"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """``"224x320"`` to ``(224, 320)``; a side is between 1 and 16384 pixels."""
        if isinstance(value, tuple):
            return value[0], value[1]
        found = re.fullmatch(r"(\d{1,5})(?:[xX×](\d{1,5}))?", value.strip())
        size = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= min(size) <= max(size) <= 16384:
            self.fail(f"'{value}' is no size; write height x width in pixels, such as 224x320", param, ctx)
        return size


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of torchvision's models, without importing torch."""
    from hookscope.registry import model_names

    return [CompletionItem(name) for name in model_names() if name.startswith(incomplete)]


def _listed(ctx: click.Context) -> Any:
    """The cached trace of the model typed so far; a completion never waits for torch."""
    from hookscope.listing import cached_listing

    found = cached_listing(ctx.params.get("model") or "resnet34", ctx.params.get("input_size"))
    return found[1] if found else None


def complete_layers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the layers of the model typed, once it has been listed."""
    found = _listed(ctx)
    names = [(layer.name, layer.types[0]) for layer in found.layers if layer.name and layer.types] if found else []
    return [CompletionItem(name, help=kind) for name, kind in names if name.startswith(incomplete)]


def complete_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Class names of the layers of the model typed, once it has been listed."""
    found = _listed(ctx)
    names = sorted({layer.types[0] for layer in found.layers if layer.types}) if found else ["Conv2d"]
    return [CompletionItem(name) for name in ["all", *names] if name.startswith(incomplete)]


def chosen_format(format: str | None) -> str:
    """``format``, or what suits standard output: a table for a person, tab-separated values for a pipe."""
    return format or default_format(sys.stdout)


def model_argument(default: str | None = None) -> Callable[[Any], Any]:
    """The MODEL argument, with a default where a command can do without."""
    extra: dict[str, Any] = {"required": True} if default is None else {"default": default, "required": False}
    return click.argument("model", shell_complete=complete_models, **extra)


type_option = click.option(
    "--type",
    "types",
    metavar="CLASS",
    multiple=True,
    default=("Conv2d",),
    shell_complete=complete_types,
    help="Class of layer that indices count; repeatable; a glob, or `all` for every leaf.  [default: Conv2d]",
)
size_option = click.option(
    "--input-size", metavar="HxW", type=InputSize(), help="Height and width of the model's input.  [default: its own]"
)
format_option = click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="How to print the rows.  [default: table on a terminal, tsv in a pipe]",
)
