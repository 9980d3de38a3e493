"""Options that several commands share, as named values.

=================  ============================================================
``model_argument``  MODEL: torchvision name, ``shapes``, factory, ``timm:NAME``
``type_option``     ``--type``: class names that indices count
``size_option``     ``--input-size HxW``
``format_option``   ``--format``: how rows go to standard output
``weights_option``  ``--weights``: auto, default, none, a name or a file
``seed_option``     ``--seed`` of random weights
``device_option``   ``--device auto|cpu|cuda|mps``
``preprocess_option``  ``--preprocess weights|stretch|none``
``net_options``     the five above that say which model and what it is shown
``layer_option``    ``--layer SEL``, with a help text of the command's own
=================  ============================================================
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from hookscope.cli.output.rows import FORMATS, default_format
from hookscope.drawing import scale_examples

Command = TypeVar("Command", bound=Callable[..., Any])


class InputSize(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
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
    """Names of torchvision's models and of those that ship, without importing torch."""
    from hookscope.models import model_names

    return [CompletionItem(name) for name in model_names() if name.startswith(incomplete)]


def _listed(ctx: click.Context) -> Any:
    """The cached trace of the model typed so far; a completion never waits for torch."""
    from hookscope.tracing import cached_listing

    # before an option that still lacks its value click leaves the arguments where they are
    model = next(iter(ctx.args), None) or ctx.params.get("model") or "resnet34"
    found = cached_listing(model, ctx.params.get("input_size")) or cached_listing(model)
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


def complete_colour_maps(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of matplotlib's colour maps."""
    from hookscope.drawing import colour_map_names

    return [CompletionItem(name) for name in colour_map_names() if name.startswith(incomplete)]


def complete_weights(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The words for weights; anything else is completed as a file."""
    from hookscope.models import WEIGHTS_WORDS

    words = [CompletionItem(word) for word in WEIGHTS_WORDS if word.startswith(incomplete)]
    return words or [CompletionItem(incomplete, type="file")]


def complete_scales(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """A text for each scale."""
    return [CompletionItem(text) for text in scale_examples() if text.startswith(incomplete)]


def complete_channels(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The ways to the strongest channels; numbers are typed by hand."""
    words = ("top:16", "top:16:max", "top:16:std", "top:16:mean")
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def complete_devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The words for devices."""
    return [CompletionItem(word) for word in ("auto", "cpu", "cuda", "mps") if word.startswith(incomplete)]


def chosen_format(format: str | None) -> str:
    """``format``, or what suits standard output: a table for a person, tab-separated values for a pipe."""
    return format or default_format(sys.stdout)


def was_given(option: str) -> bool:
    """Whether the running command was given ``option``, be it as its default says."""
    return click.get_current_context().get_parameter_source(option) is not click.core.ParameterSource.DEFAULT


def model_argument(default: str | None = None) -> Callable[[Any], Any]:
    """The MODEL argument, with a default where a command can do without."""
    extra: dict[str, Any] = {"required": True} if default is None else {"default": default, "required": False}
    return click.argument("model", shell_complete=complete_models, **extra)


type_option = click.option(
    "--type",
    "types",
    metavar="CLASS",
    multiple=True,
    shell_complete=complete_types,
    help="Class of layer that indices count; repeatable; a glob, or `all` for every leaf."
    "  [default: Conv2d; Conv3d in models of clips]",
)
size_option = click.option(
    "--input-size", metavar="HxW", type=InputSize(), help="Height and width of the model's input.  [default: its own]"
)
format_option = click.option(
    "--format",
    type=click.Choice(FORMATS),
    help="How to print the rows.  [default: table on a terminal, tsv in a pipe]",
)
weights_option = click.option(
    "--weights",
    metavar="WEIGHTS",
    default="auto",
    show_default=True,
    shell_complete=complete_weights,
    help="auto (default weights, random ones where they cannot be had), default or a name (these or nothing), none"
    " (random), or a checkpoint file.",
)
seed_option = click.option(
    "--seed", metavar="N", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of random weights."
)
device_option = click.option(
    "--device",
    metavar="DEVICE",
    default="auto",
    show_default=True,
    shell_complete=complete_devices,
    help="auto, cpu, cuda, cuda:N or mps.",
)
preprocess_option = click.option(
    "--preprocess",
    type=click.Choice(["weights", "stretch", "none"]),
    default="weights",
    show_default=True,
    help="weights: their own transforms; stretch: resize to the input size and [0, 1]; none: [0, 1] only.",
)


def layer_option(help: str, default: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """``--layer``: which calls, with what the command says of it."""
    more: dict[str, Any] = {"default": default} if default else {}
    return click.option(
        "--layer", "layers", metavar="SEL", multiple=True, shell_complete=complete_layers, help=help, **more
    )


def net_options(command: Command) -> Command:
    """The options of `load_net`: weights, seed, device, preprocessing, size of the input."""
    for option in (size_option, preprocess_option, device_option, seed_option, weights_option):
        command = option(command)
    return command
