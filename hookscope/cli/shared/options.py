"""Options that several commands share, as named values; how MODEL is loaded is in `hookscope.cli.shared.model`."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from hookscope import drawing, hooks, images, models, tracing
from hookscope.cli.output import formats
from hookscope.cli.shared.registries import RegistryChoice, Rows
from hookscope.cli.shared.written import open_option
from hookscope.columns import Columns
from hookscope.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])
Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
Option = Callable[[Any], Any]


class FiniteRange(click.FloatRange):
    """A range without NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"'{value}' is not a finite number", param, ctx)
        return number


class InputSize(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer click only
    """``HxW`` in pixels, or one number for a square, to ``(H, W)``; ``DxHxW`` to ``(D, H, W)``."""

    name = "[Dx]HxW"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """``"224x320"`` to ``(224, 320)``; a side is between 1 and 16384 pixels."""
        if isinstance(value, tuple):
            return value
        is_size = re.fullmatch(r"\d{1,5}(?:[xX×]\d{1,5}){0,2}", value.strip())
        size = tuple(map(int, re.findall(r"\d+", value))) if is_size else (0,)
        if not 1 <= min(size) <= max(size) <= 16384:
            says = f"'{value}' is not a size; write height x width in pixels, such as 224x320"
            self.fail(f"{says}, or depth x height x width", param, ctx)
        return size * 2 if len(size) == 1 else size


_UNITS = {
    "": 1,
    **{f"{p}b": 1000**n for n, p in enumerate(("", *"kmgt"))},
    **{f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)},
}


class FileSize(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """``20MB`` or ``512KiB`` to bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        parts = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)", value.strip().lower(), re.ASCII)
        size = int(float(parts[1]) * _UNITS.get(parts[2], 0)) if parts else 0
        if not size:
            self.fail(f"'{value}' is not a size; write 20MB, 500kB or 512KiB", param, ctx)
        return size


class Seed(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A seed that torch takes; errors show the range, but help does not."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return click.IntRange(0, 2**63 - 1).convert(value, param, ctx)


def apply_options(options: Iterable[Callable[[Any], Any]], command: Command) -> Command:
    """``command`` with ``options``, which its help shows in this order."""
    for option in reversed(list(options)):
        command = option(command)
    return command


def tell_fields(columns: Columns, title: str = "Fields") -> Callable[[Command], Command]:
    """A decorator that adds what ``columns`` say of themselves to the help of a command."""

    def add(command: Command) -> Command:
        lines = "\n  ".join([f"{title}:", *columns.help_lines()])
        command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n\b\n{lines}"
        return command

    return add


def complete_words(*words: str) -> Completion:
    """A completion that offers these words."""
    return lambda ctx, param, incomplete: [CompletionItem(word) for word in words if word.startswith(incomplete)]


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of torchvision's models and of the bundled ones."""
    return complete_words(*models.model_names())(ctx, param, incomplete)


def typed_model(ctx: click.Context) -> str | None:
    """The MODEL that has been typed so far."""
    # before an option that still lacks its value click leaves the arguments where they are
    return next(iter(ctx.args), None) or ctx.params.get("model") or ctx.params.get("model_a")


def _cached_layers(ctx: click.Context) -> Any:
    """The cached layers of the model typed so far; a completion never waits for torch."""
    model = typed_model(ctx) or "resnet34"
    cached = tracing.cached_listing(model, ctx.params.get("input_size")) or tracing.cached_listing(model)
    return [layer for layer in cached[1].layers if layer.types] if cached else None


def complete_layers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the layers of the model typed, once it has been listed."""
    texts = [(hooks.layer_text(layer.name), layer) for layer in _cached_layers(ctx) or () if layer.name]
    return [CompletionItem(text, help=layer.types[0]) for text, layer in texts if text.startswith(incomplete)]


def complete_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Class names of the layers of the model typed, once it has been listed."""
    layers = _cached_layers(ctx)
    names = ["Conv2d"] if layers is None else sorted({layer.types[0] for layer in layers})
    return complete_words("all", *names)(ctx, param, incomplete)


def complete_colour_maps(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return complete_words(*drawing.colour_map_names())(ctx, param, incomplete)


def complete_weights(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The words for weights; anything else is completed as a file."""
    words = complete_words(*models.WEIGHTS_WORDS)(ctx, param, incomplete)
    return words or [CompletionItem(incomplete, type="file")]


def complete_preprocess(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The words for preprocessing; anything else is completed as a file."""
    words = complete_words(*models.PREPROCESS_WORDS)(ctx, param, incomplete)
    return words or [CompletionItem(incomplete, type="file")]


complete_scales = complete_words(*drawing.scale_examples())
complete_channels = complete_words("top:16", "top:16:max", "top:16:std", "top:16:mean")
complete_devices = complete_words("auto", "cpu", "cuda", "mps")


def was_given(option: str) -> bool:
    """Whether ``option`` stands on the command line, even with the value of its default."""
    return click.get_current_context().get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE


def parsed(parse: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that parses the value of an option; a completion, which must not import torch, gets the text."""
    return lambda ctx, param, value: value if value is None or ctx.resilient_parsing else parse(value)


def model_argument(name: str = "MODEL", default: str | None = None) -> Option:
    """The MODEL argument; required unless it has a default."""
    extra: dict[str, Any] = {"required": True} if default is None else {"default": default, "required": False}
    return click.argument(
        name.lower(), metavar=name, shell_complete=complete_models, callback=parsed(_not_a_picture), **extra
    )


def _not_a_picture(model: str) -> str:
    suffix = os.path.splitext(model)[1]
    if ":" in model or suffix in ("", ".py") or not images.is_picture_suffix(suffix):
        return model
    context = click.get_current_context()
    names = [parameter.name for parameter in context.command.params if isinstance(parameter, click.Argument)]
    words = [name.upper() for name in names if name.startswith("model")]
    first = "the first argument is the model" if len(words) == 1 else "the first two arguments are the models"
    line = " ".join([context.command_path, *words, *([model] if "paths" in names else [])])
    raise UsageError(f"'{model}' is an image, but {first}", do=f"write `{line}`")


def image_argument() -> Option:
    """The IMAGE argument of commands that run one forward pass, which takes two images for optical flow."""
    return click.argument("paths", metavar="IMAGE", nargs=-1, required=True, type=click.Path())


SELECTION = "30, -1, 0:10, conv1, 'layer4.*', 're:conv[12]$', name:0, conv1#1, all; repeatable, comma separated."


def selection_option(
    name: str, destination: str, help: str, default: str | None = None, metavar: str = "SEL"
) -> Option:
    """A selection of layers or calls; without the option, or with an empty one, that of ``default``, or None."""
    usual = () if default is None else (default,)
    return click.option(
        name,
        destination,
        metavar=metavar,
        multiple=True,
        default=usual or None,
        callback=parsed(lambda texts: _selection(name, texts or usual) if texts or usual else None),
        shell_complete=complete_layers,
        help=help,
    )


def _selection(option: str, texts: Sequence[str]) -> hooks.Selection:
    for text in texts:
        if text.startswith("--"):
            raise UsageError(f"{option} needs layers, but '{text}' is an option", do=f"write {option} conv1 {text}")
    return hooks.Selection(texts)


def layer_option(help: str, default: str | None = None) -> Option:
    return selection_option("--layer", "layers", help, default)


ops_option = click.option(
    "--ops/--no-ops",
    "ops",
    default=None,
    help="Also use operations that are not modules, such as torch.relu and +: 'block1::relu', '::add'.",
)


def type_option_with(help: str) -> Option:
    return click.option("--type", "types", metavar="CLASS", multiple=True, shell_complete=complete_types, help=help)


def count_option(name: str, help: str, default: int | None = None, least: int = 1) -> Option:
    shown, number = default is not None, click.IntRange(least)
    return click.option(name, metavar="N", type=number, default=default, show_default=shown, help=help)


def file_option(name: str, help: str, metavar: str = "FILE", long: str = "") -> Option:
    callback = parsed(lambda path: _no_option(name, path, metavar))
    return click.option(*filter(None, (name, long)), metavar=metavar, type=click.Path(), callback=callback, help=help)


def _no_option(name: str, path: str, metavar: str) -> str:
    """``path``, unless it is the next option, which click takes for a file."""
    if re.fullmatch(r"--?[a-z][a-z-]*", path):
        raise UsageError(f"{name} needs a file, but '{path}' is an option", do=f"write {name} {metavar}")
    return path


def plot_option(what: str) -> Option:
    plot = file_option("--plot", f"{what}: a PNG, SVG or PDF file.")
    return lambda command: plot(open_option(command))


def html_option(what: str) -> Option:
    return file_option("--html", f"Make a page of {what}: one self-contained HTML file.")


def method_option(methods: Callable[[], Rows], default: str, help: str) -> Option:
    """``--method``: a name of a registry, which is read when it is needed, and which the help lists above."""
    names = RegistryChoice(lambda: dict(methods()))
    return click.option("--method", metavar="METHOD", type=names, default=default, show_default=True, help=help)


def channels_option(help: str) -> Option:
    parse = parsed(lambda text: drawing.ChannelChoice.parse(text))
    return click.option("--channels", metavar="SPEC", callback=parse, shell_complete=complete_channels, help=help)


def columns_option(help: str) -> Option:
    return click.option("--columns", metavar="N", type=click.IntRange(1, 10000), help=help)


def cell_option(help: str) -> Option:
    return click.option("--cell", metavar="PIXELS", type=click.IntRange(1, 4096), help=help)


def _colour_map(name: str) -> str:
    drawing.palette(name)  # raises for an unknown name
    return name


def colour_map_option(help: str, default: str | None = None) -> Option:
    """``--cmap``: the name of a colour map that exists."""
    return click.option(
        "--cmap",
        metavar="NAME",
        default=default,
        show_default=default is not None,
        callback=parsed(_colour_map),
        shell_complete=complete_colour_maps,
        help=help,
    )


_USUAL_TYPES = "[default for indices: Conv2d, in video models Conv3d]"
TYPES = (
    "Class of the layers to use: ReLU, '*Norm*' or all; repeatable. Indices and --layer all count these layers."
    f"  {_USUAL_TYPES}"
)
type_option = type_option_with(TYPES)
counted_type_option = type_option_with(
    f"Class of the layers that indices and all count: ReLU, '*Norm*' or all; repeatable.  {_USUAL_TYPES}"
)
size_option = click.option(
    "--input-size",
    "--size",
    metavar="[Dx]HxW",
    type=InputSize(),
    help="Size of the model's input: height and width, such as 224x320; for clips and volumes also the depth."
    "  [default: the model's own]",
)


def format_option(command: Command) -> Command:
    """``--format``, which the command gets, and ``--utf8``, which `hookscope.cli.output.formats` gets."""
    utf8 = click.option(
        "--utf8/--ascii",
        default=None,
        expose_value=False,
        callback=lambda ctx, param, value: setattr(formats, "is_utf8", value),
        help="Write all characters in JSON as they are, or escape those beyond ASCII.  [default: --utf8 on a UTF-8"
        " terminal]",
    )
    return click.option(
        "--format",
        type=RegistryChoice(lambda: formats.FORMATS),
        callback=lambda ctx, param, value: value or formats.default_format(sys.stdout),
        help="How to print the rows.  [default: table on a terminal, tsv in a pipe]",
    )(utf8(command))


weights_option = click.option(
    "--weights",
    metavar="WEIGHTS",
    default="auto",
    show_default=True,
    shell_complete=complete_weights,
    help="auto (trained weights if available, else random), default or a name such as IMAGENET1K_V2 (trained, or an"
    " error), none (random), or a checkpoint: a file or folder.",
)
seed_option = click.option(
    "--seed", metavar="N", type=Seed(), default=0, show_default=True, help="Seed of random weights."
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
    metavar="HOW",
    default="weights",
    show_default=True,
    callback=parsed(lambda text: models.parse_preprocess(text)),
    shell_complete=complete_preprocess,
    help="How images become inputs: weights (as the weights or the model say), imagenet, half (mean and std 0.5),"
    " stretch, none (no resizing), or file.py:function (PIL image to tensor). More in docs/: weights and models.",
)
resize_option = click.option(
    "--resize",
    metavar="HOW",
    callback=parsed(lambda text: models.parse_resize(text)),
    shell_complete=complete_words(*models.RESIZE_WORDS),
    help="How images get the input size. shorter: resize the shorter side, then crop the centre; shorter:256: resize"
    " it to 256, then crop; stretch: resize both sides; pad: resize the longer side and add a black border.",
)
mean_option = click.option(
    "--mean",
    metavar="NUMBERS",
    callback=parsed(lambda text: models.parse_numbers(text, "mean")),
    help="Mean to subtract from the colours: one number, or one for each channel, such as 0.485,0.456,0.406.",
)
std_option = click.option(
    "--std",
    metavar="NUMBERS",
    callback=parsed(lambda text: models.parse_numbers(text, "std")),
    help="With --mean: standard deviation that divides the colours, one number or one for each channel.",
)
range_option = click.option(
    "--range",
    metavar="LOW..HIGH",
    callback=parsed(lambda text: models.parse_range(text)),
    help="Range of the colours before --mean and --std: 0..1, -1..1 or 0..255. Without --mean: no mean and std.",
)
preprocess_options = [preprocess_option, resize_option, mean_option, std_option, range_option]
