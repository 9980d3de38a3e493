"""Options that several commands share, as functions that make fields; how MODEL is loaded is in `.subject`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from hookscope import drawing, hooks, images, models, parameters, scores, statistics, tracing
from hookscope.cli.fields import Completion, Option, RegistryChoice, Rows, argument, option, parsed
from hookscope.cli.output.formats import Output, note
from hookscope.cli.shared.output_paths import check_plot, is_file_name, suffix_check
from hookscope.cli.shared.written import open_option, show_option
from hookscope.errors import HookscopeError, UsageError, nearest
from hookscope.findings import Threshold, thresholds_for


class FiniteRange(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"'{value}' is not a finite number", param, ctx)
        return number


def input_size(text: str) -> tuple[int, ...]:
    """``HxW`` or ``H,W`` in pixels, or one number for a square, to ``(H, W)``; ``DxHxW`` to ``(D, H, W)``."""
    is_size = re.fullmatch(r"\d{1,5}(?:[xX×,]\d{1,5}){0,2}", text.strip())
    sides = tuple(map(int, re.findall(r"\d+", text))) if is_size else (0,)
    if not 1 <= min(sides) <= max(sides) <= 16384:
        says = f"'{text}' is not a size; write height x width in pixels, such as 224x320"
        raise click.BadParameter(f"{says}, or depth x height x width")
    return sides * 2 if len(sides) == 1 else sides


_UNITS = {
    "": 1,
    **{f"{p}b": 1000**n for n, p in enumerate(("", *"kmgt"))},
    **{f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)},
}


def size(text: str) -> int:
    """``20MB`` or ``512KiB`` to bytes."""
    parts = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    number = int(float(parts[1]) * _UNITS.get(parts[2], 0)) if parts else 0
    if not number:
        raise click.BadParameter(f"'{text}' is not a size; write 20MB, 500kB or 512KiB")
    return number


def seed(text: str) -> int:
    """A seed that torch takes; errors show the range, but help does not."""
    return click.IntRange(0, 2**63 - 1)(text)


class FilePath(click.Path):
    """A file, but not the next option, which click takes for a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if param is not None and isinstance(value, str) and re.fullmatch(r"--?[a-z][a-z-]*", value):
            asked = f"{param.opts[0]} needs a file, but '{value}' is an option"
            raise UsageError(asked, do=f"write {param.opts[0]} {param.metavar}")
        return super().convert(value, param, ctx)


def complete_words(*words: str, read: Callable[[], Iterable[str]] | None = None, or_file: bool = False) -> Completion:
    """A completion that offers ``words`` and what ``read`` returns when it is asked, or else a file."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        offered = [*words, *(read() if read is not None else ())]
        items = [CompletionItem(word) for word in offered if word.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if or_file else [])

    return complete


def typed_model(ctx: click.Context) -> str | None:
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


complete_models = complete_words(read=lambda: models.model_names())
complete_weights = complete_words(read=lambda: models.WEIGHTS_WORDS, or_file=True)
complete_preprocess = complete_words(read=lambda: models.PREPROCESS_WORDS, or_file=True)
complete_colour_maps = complete_words(read=lambda: drawing.colour_map_names())
complete_scales = complete_words(read=lambda: drawing.scale_examples())
complete_channels = complete_words("top:16", "top:16:max", "top:16:std", "top:16:mean")
complete_devices = complete_words("auto", "cpu", "cuda", "mps")


def was_given(option: str) -> bool:
    """Whether ``option`` stands on the command line, even with the value of its default."""
    return click.get_current_context().get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE


def model_argument(name: str = "MODEL", **more: Any) -> Any:
    """The MODEL argument; required unless it has a default."""
    more = {"required": "default" not in more, "shell_complete": complete_models, **more}
    return argument(name, callback=parsed(_not_a_picture), **more)


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


def image_argument(metavar: str = "IMAGE", required: bool = True) -> Any:
    """The IMAGE argument of commands that run one forward pass, which takes two images for optical flow."""
    return argument(metavar, required=required, type=click.Path())


def layer_option(
    help: str, name: str = "--layer", default: str | None = None, metavar: str = "SEL", **more: Any
) -> Any:
    """A selection of layers or calls; without the option, or with an empty one, ``default``, or None."""
    usual = () if default is None else (default,)
    more = {"section": "Layers", "default": usual or None, "show_default": False, **more}

    def select(texts: Sequence[str]) -> hooks.Selection | None:
        for text in texts:
            if text.startswith("--"):
                raise UsageError(f"{name} needs layers, but '{text}' is an option", do=f"write {name} conv1 {text}")
        return hooks.Selection(texts or usual) if texts or usual else None

    more |= {"callback": parsed(select), "shell_complete": complete_layers}
    return option(help, name, metavar=metavar, multiple=True, **more)


def calls_option(what: str, usual: str = "", **more: Any) -> Any:
    """``--layer``: a selection of calls, for ``what``; ``usual`` says which are taken without it."""
    selection = "30, -1, 0:10, conv1, 'layer4.*', 're:conv[12]$', name:0, conv1#1, all; repeatable, comma separated."
    return layer_option(f"{what}: {selection}" + (f"  [default: {usual}]" if usual else ""), **more)


def ops_option() -> Any:
    help = "Also use operations that are not modules: torch.relu, +. Select them as 'block1::relu' or '::add'."
    return option(help, "--ops/--no-ops", default=None, section="Layers")


_USUAL_TYPES = "[default for indices: Conv2d, in video models Conv3d]"
TYPES = (
    "Module class of the layers to use: ReLU, '*Norm*' or all; repeatable. Indices and all count them; names and"
    f" patterns take any type.  {_USUAL_TYPES}"
)
COUNTED_TYPES = f"Module class that indices and all count: ReLU, '*Norm*' or all; repeatable.  {_USUAL_TYPES}"


def type_option(help: str = TYPES, **more: Any) -> Any:
    return option(help, "--type", metavar="TYPE", section="Layers", shell_complete=complete_types, **more)


def in_file(help: str, *names: str, **more: Any) -> Any:
    return option(help, *names, **{"metavar": "FILE", "type": FilePath(), **more})


def reference_option() -> Any:
    return in_file(
        "Compare with FILE, which `stats --save` or `watch --reference` wrote for a healthy model, and name the first"
        " layer that left its range."
    )


def out_file(help: str, *names: str, writes: Callable[[str], object] = str, **more: Any) -> Any:
    """The name of a file to write; ``writes`` refuses a name for its suffix."""
    return in_file(help, *names, writes=writes, **{"section": "Output", **more})


def plot_file(what: str, **more: Any) -> Any:
    return out_file(f"{what}: a PNG, SVG or PDF file.", writes=check_plot, **{"also": [open_option()], **more})


def picture_file(help: str, **more: Any) -> Any:
    return out_file(help, writes=suffix_check(".png"), **more)


def html_file(what: str) -> Any:
    return out_file(f"Make a page of {what}: one self-contained HTML file.", writes=suffix_check(".html", ".htm"))


def output_option(pages: str) -> Any:
    """``-o``: where the pages go."""
    help = f"Where to write: a file for one {pages}, a folder (made if missing), or - for standard output."
    also = [show_option(), open_option()]
    return out_file(help, "-o", metavar="PATH", type=click.Path(), writes=is_file_name, also=also)


def method_option(methods: Callable[[], Rows], default: str, help: str) -> Any:
    """``--method``: a name of a registry, which is read when it is needed, and which the help lists above."""
    return option(help, metavar="METHOD", type=RegistryChoice(lambda: dict(methods())), default=default)


def channels_option(help: str, **more: Any) -> Any:
    return option(
        help,
        parse=lambda text: drawing.ChannelChoice.parse(text),
        metavar="SPEC",
        shell_complete=complete_channels,
        section="Layers",
        **more,
    )


def columns_option(help: str, **more: Any) -> Any:
    return option(help, metavar="N", type=click.IntRange(1, 10000), **more)


def cell_option(help: str, **more: Any) -> Any:
    return option(help, metavar="PIXELS", type=click.IntRange(1, 4096), **more)


def _colour_map(name: str) -> str:
    drawing.palette(name)  # raises for an unknown name
    return name


def colour_map_option(help: str, **more: Any) -> Any:
    """``--cmap``: the name of a colour map that exists."""
    return option(help, metavar="NAME", parse=_colour_map, shell_complete=complete_colour_maps, **more)


def size_option() -> Any:
    return option(
        "Size of the model's input: height and width, such as 224x320; for clips and volumes also the depth."
        "  [default: the model's own]",
        *("--input-size", "--size"),
        metavar="[Dx]HxW",
        type=input_size,
        topic="model",
    )


def device_option(help: str = "auto, cpu, cuda, cuda:N or mps.") -> Any:
    return option(help, metavar="DEVICE", default="auto", shell_complete=complete_devices, topic="model")


utf8_option = Option(
    ["--utf8/--ascii"],
    topic="run",
    default=None,
    expose_value=False,
    callback=lambda ctx, param, value: setattr(Output.now, "utf8", value),
    help="Write all characters in JSON as they are, or escape those beyond ASCII.  [default: --utf8 on a UTF-8"
    " terminal]",
)


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


def complete_categories(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    names = [CompletionItem("imagenet")] if incomplete and "imagenet".startswith(incomplete) else []
    return [*names, CompletionItem(incomplete, type="file")]


def categories_option(**checks: Any) -> Any:
    return option(
        "Names of the classes: imagenet, or a file with one name per line or JSON (a list, or an object from number"
        " to name).  [default: the names that come with the weights]",
        "--categories",
        metavar="FILE",
        type=lambda path: scores.read_categories(path),
        shell_complete=complete_categories,
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


def share(text: str) -> float:
    """``5%`` or ``0.05`` to a share from 0 to 1."""
    written = text.strip()
    if written == "1":
        raise click.BadParameter("'1' may be meant as 1% or as all; write 1% or 100%")
    try:
        # the exponent keeps 0.1% equal to 1 of 1000, which a division by 100 does not
        number = float(f"{written[:-1].strip()}e-2" if written.endswith("%") else written)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise click.BadParameter(f"'{text}' is not a share; write 5% or 0.05")
    return number


def number_from(least: float = 0.0, most: float = math.inf, endless: bool = False) -> Callable[[str], float]:
    """What reads a number from ``least`` on; ``inf`` where ``endless``."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (math.isinf(value) and not endless):
            span = f"at least {least:g}" if math.isinf(most) else f"{least:g} to {most:g}"
            raise click.BadParameter(f"'{text}' is not a number of {span}")
        return value

    return number


def rank(text: str) -> tuple[float | None, float | None]:
    """A number of directions, or ``5%`` of the maximum, to ``(number, share)``, one of them None."""
    if text.strip().endswith("%"):
        return None, share(text)
    try:
        return number_from()(text), None
    except click.BadParameter:
        says = f"'{text}' is not a rank; write a number of directions, or 5% of the channels"
        raise click.BadParameter(says) from None


def threshold_option(question: str) -> Any:
    """``--threshold NAME=VALUE`` for all findings on ``question``; the command gets the value of each by its name."""

    def parse(texts: Sequence[str]) -> dict[str, Any]:
        known = {threshold.option: threshold for threshold in _with_options(question)}
        values = {threshold.name: threshold.default for threshold in known.values()}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in known:
                raise UsageError(f"no threshold '{name}'", nearest(name, [*known]), "see `hookscope help findings`")
            try:
                values[known[name].name] = _reader(known[name])(value)
            except click.BadParameter as error:
                example = f"--threshold {name}={known[name].default:g}"
                raise UsageError(f"--threshold {name}: {error.message}", do=f"write {example}") from None
        return values

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete_words(*(f"{t.option}=" for t in _with_options(question)))(ctx, param, incomplete)

    return option(
        "Change the limit of a finding; repeatable. `hookscope help findings` lists the names.",
        "--threshold",
        metavar="NAME=VALUE",
        multiple=True,
        parse=parse,
        shell_complete=complete,
    )


def threshold_rows() -> list[tuple[str, str]]:
    """The name of each threshold, and what it is with its default, for `hookscope help findings`."""
    rows = []
    for question in ("activations", "weights", "gradients"):
        for threshold in _with_options(question):
            default = f"{100 * threshold.default:g}%" if threshold.share else f"{threshold.default:g}"
            rows.append((threshold.option, f"{threshold.help}  [default: {default}; {question}]"))
    return rows


def _with_options(question: str) -> list[Threshold]:
    _ = statistics.find_problems, parameters.parameter_findings  # their files add kinds of findings
    return [threshold for threshold in thresholds_for(question) if threshold.option]


def _reader(threshold: Threshold) -> Callable[[str], Any]:
    if threshold.share:
        return share
    if isinstance(threshold.default, int):
        return click.IntRange(int(threshold.least))
    return number_from(threshold.least, threshold.most, threshold.endless)
