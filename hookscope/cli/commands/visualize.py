"""``hookscope visualize``: the feature maps of a model's layers as sheets, one PNG for each image and call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import click

from hookscope import attention, drawing, explain, hooks, images
from hookscope.cli import process
from hookscope.cli.output import formats as output
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.array_file import ArrayFile, as_array
from hookscope.cli.shared.class_options import categories_of, categories_option
from hookscope.cli.shared.explain import PEAK
from hookscope.cli.shared.image_options import image_inputs
from hookscope.cli.shared.model import ModelOptions, model_options, running
from hookscope.cli.shared.output_paths import call_names, file_word, model_word
from hookscope.cli.shared.picture_run import PictureRun, output_option, parse_output
from hookscope.columns import Column, Columns, Row
from hookscope.errors import UsageError
from hookscope.findings import listed
from hookscope.hooks import CALL

COLUMNS = Columns(
    *CALL.but(type={"need": 2}),
    Column("shape", need=5),
    Column("min", lambda summary: summary.low, need=7),
    Column("mean", need=4),
    Column("max", lambda summary: summary.high, need=6),
    Column("dead", need=3),
    Column("nonfinite", hide="zero"),
    *("weights", "file"),
)
ATTENTION = Columns(
    Column("image"),
    *CALL.but("order", type={"need": 2}),
    Column("head"),
    Column("shape", need=5),
    Column("query"),
    *PEAK,
    *("positions", "elsewhere", "windows", "weights", "file"),
)
_OF_MAPS = {  # options that only sheets of feature maps have
    "types": "--type", "channels": "--channels", "scale": "--scale", "overlay": "--overlay", "alpha": "--alpha",
    "plain": "--plain", "categories": "--categories",
}  # fmt: skip
_Query = str | int | tuple[float, float] | None


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    layers: hooks.Selection
    types: tuple[str, ...]
    output: str | None
    channels: drawing.ChannelChoice | None
    columns: int | None
    cell: int | None
    cmap: str | None
    scale: drawing.Scale | None
    overlay: bool
    attention: bool
    query: _Query
    alpha: float | None
    plain: bool
    categories: tuple[str, ...] | None
    raw: str | None
    format: str


def _parse_query(text: str) -> _Query:
    """``class``, ``mean``, ``X,Y`` in pixels of the image, or the number of a token."""
    with suppress(ValueError):
        return text if text in ("class", "mean") else int(text)
    with suppress(ValueError):
        x, y = (float(part) for part in text.split(","))
        if math.isfinite(x + y):
            return x, y
    raise UsageError(f"--query {text} cannot be read", do="give class, mean, X,Y in pixels, or the number of a token")


@click.command("visualize")
@shared.model_argument()
@shared.layer_option(f"Calls to draw: {shared.SELECTION}  [default: 0:, every index]", "0:")
@shared.type_option
@output_option("sheet")
@shared.channels_option(
    "Channels to draw: all, 0-63,100, or top:16, the strongest by mean |value|; also top:16:max, :std or :mean."
    "  [default: all up to 64, else top:64; of single values top:24]"
)
@click.option(
    "--scale",
    metavar="SCALE",
    callback=shared.parsed(drawing.Scale.parse),
    shell_complete=shared.complete_scales,
    help=f"Range of the colours: {drawing.scale_notations('or')}.  [default: channel, with --overlay symmetric]",
)
@click.option("--overlay", is_flag=True, help="Draw each map over the grey image; a large |value| is opaque.")
@click.option(
    "--alpha",
    metavar="SHARE",
    type=shared.FiniteRange(0, 1),
    help=f"With --overlay: opacity of the largest |value|, 0 to 1.  [default: {drawing.ALPHA}]",
)
@click.option(
    "--attention",
    is_flag=True,
    help="Draw what each head of attention looks at instead. --layer then counts the calls of attention.",
)
@click.option(
    "--query",
    metavar="QUERY",
    callback=shared.parsed(_parse_query),
    help="With --attention, the query: class (the class token), mean (of all positions), X,Y (a position in pixels of"
    " the image), or K (token number K).  [default: class, or mean if there is no class token]",
)
@shared.colour_map_option("Any matplotlib colour map.  [default: viridis, with --scale symmetric RdBu_r]")
@shared.columns_option("Maps in a row.  [default: a grid with full rows]")
@shared.cell_option("Smallest side of a drawn map.  [default: 56 or more]")
@click.option("--plain", is_flag=True, help="Draw the grid only: no header, numbers or colour bars.")
@categories_option
@shared.file_option(
    "--raw",
    "Keep the exact activations too: one as .npy, several as .npz or .safetensors with keys IMAGE/LAYER.",
)
@image_inputs
@model_options
@shared.format_option
def command(model: ModelOptions, paths: list[str], **values: Any) -> None:
    """Draw the feature maps of MODEL for each IMAGE.

    \b
    Examples:
      hookscope visualize resnet34 cat.jpg --layer 30
      hookscope visualize resnet34 cat.jpg --layer layer4.0.conv2 --scale symmetric
      hookscope visualize resnet34 cat.jpg --layer 0 --channels top:16 --overlay
      hookscope visualize mobilenet_v3_small samples/*.jpg --layer 0:5 -o out/
      hookscope visualize resnet34 photos/ --layer layer4.2 -o out/ --raw layer4.npz
      hookscope visualize vit_b_16 cat.jpg --attention --layer 'encoder.layers.*'
      cat cat.jpg | hookscope visualize vgg16 - --layer features.0 -o - > first.png

    The command writes a sheet, one PNG, for each image and layer call. IMAGE is a file, a folder, a glob, or - for
    standard input. The first cell of a sheet is the image as the model saw it. Single values, such as scores of
    classes, are drawn as bars. Without -o, a single sheet goes to the current folder; several go to a folder
    IMAGE-MODEL/.

    A row for each sheet has the shape, the lowest, mean and highest value, the number of dead (constant) channels, and
    the number of NaN and Inf.

    --attention writes one page for each image, with a row of maps for each layer and a map for each head. A map has the
    attention weight of each position for the query. A row for each head has the highest weight and its position in
    pixels of the image. positions is the number of positions that the head looks at (the exponential of the entropy),
    and elsewhere the weight of the class token and of padding. A table has one head of each layer: that with the fewest
    positions.

    --raw keeps all channels as the layer returned them; bfloat16 becomes float32.
    """
    options = Options(**values)
    if options.attention:
        _check_attention()
        _draw_attention(model, paths, options)
        return
    if options.query is not None:
        raise UsageError("--query needs --attention", do="add --attention")
    if options.alpha is not None and not options.overlay:
        raise UsageError("--alpha needs --overlay", do="add --overlay")
    scale = options.scale or drawing.Scale.parse("symmetric" if options.overlay else "channel")
    alpha = drawing.ALPHA if options.alpha is None else options.alpha
    cmap = options.cmap or scale.cmap
    style = drawing.Style(options.columns, options.cell, cmap, options.plain, alpha if options.overlay else None)
    output = parse_output(options.output, paths)
    raw = ArrayFile.parse(options.raw, paths)
    run = PictureRun.load(model, paths, output, options.types, options.layers)
    with raw:
        run.print_rows(lambda read: _draw(run, read, options, scale, style, raw), COLUMNS, options.format)
    run.files.exit()


def _draw(
    run: PictureRun,
    read: Sequence[images.InputImage],
    options: Options,
    scale: drawing.Scale,
    style: drawing.Style,
    raw: ArrayFile,
) -> Iterator[Row]:
    """Write the sheets of one forward pass, and yield a row for each."""
    net = replace(run.net, categories=categories_of(run.net, options.categories))
    tensors, types = [net.prepare(image) for image in read], options.types or None
    with process.prints_to_standard_error():
        result = drawing.run_and_reduce(
            net, tensors, options.layers, types, options.channels, scale, keep=raw.path is not None
        )
    raw.expect(sum(len(summary.values) for _, summary in result.summaries))
    frames = drawing.input_frames(net, tensors)
    for call, error in result.without_map:
        output.note(f"Note: {call.key or call.type} is not drawn: {error.asked}")
    for name in result.did_not_run:
        output.note(f"Note: {name} did not run")
    if beyond := [call.key for call, summary in result.summaries if _is_beyond(summary, options.channels)]:
        output.note(f"Note: --channels names channels that do not exist in {listed(beyond, 3)}")
    image = read[0].name
    names = call_names([call for call, _ in result.summaries], run.files.words[image], net.name)
    files = [run.path(name, image, run.is_single and len(names) == 1) for name in names]
    for (call, summary), file in zip(result.summaries, files, strict=True):
        sheet = drawing.draw_call(summary, call, run.origin(read), style, frames)
        if sheet.left_out:
            output.note(f"Note: {call.key}: {sheet.left_out} channels left out of {file}; choose with --channels")
        run.write(sheet.image, file)
        for part, values in summary.values.items():
            raw.keep("/".join(filter(None, (run.files.words[image], call.key, part))), as_array(values))
        yield COLUMNS.row(summary, **CALL.row(call), weights=net.weights, file=file)


def _check_attention() -> None:
    given = [name for option, name in _OF_MAPS.items() if shared.was_given(option)]
    if given:
        raise UsageError(f"{given[0]} has no effect on --attention", do="leave one of them out")


def _draw_attention(model: ModelOptions, paths: list[str], options: Options) -> None:
    """Write a page of attention for each image, and print a row for each head."""
    raw = ArrayFile.parse(options.raw, paths)
    run = PictureRun.load(model, paths, parse_output(options.output, paths), (), options.layers)
    with raw:
        run.print_rows(
            lambda read: _attention_of(run, read, options, raw),
            ATTENTION,
            options.format,
            shown=_narrowest,
            totals=["of each layer: the head that looks at the fewest positions; --format tsv has all heads"],
        )
    run.files.exit()


def _narrowest(rows: Iterable[Row]) -> Iterator[Row]:
    """Of the heads of each call the one that looks at the fewest positions."""
    for _, heads in groupby(rows, key=lambda row: (row["image"], row["name"], row["call"])):
        yield min(heads, key=lambda row: row["positions"])


def _attention_of(
    run: PictureRun, read: Sequence[images.InputImage], options: Options, raw: ArrayFile
) -> Iterator[Row]:
    net, image = run.net, read[0]
    inputs, layers = net.inputs(*map(net.prepare, read)), options.layers if shared.was_given("layers") else None
    source = explain.OverlaySource.of(image, net)
    with running(net, inputs):
        maps = attention.attention_maps(net.model, inputs, layers, _in_shares(options.query, source))
    word = run.files.words[image.name]
    raw.expect(len(maps))
    chosen = [str(layers)] * (layers is not None) + [str(options.query)] * (options.query is not None)
    name = "-".join([word, model_word(net.name), "attention", *map(file_word, chosen)])
    path = run.path(f"{name}.png", image.name, run.is_single)
    columns, cell, cmap = options.columns, options.cell, options.cmap
    run.write(attention.draw_attention(maps, image, net, columns=columns, cell=cell, cmap=cmap), path)
    for found in maps:
        raw.keep(f"{word}/{found.call.key}", found.values)
        about: dict[str, Any] = {
            "image": image.name,
            "shape": found.values.shape[1:],
            "weights": net.weights,
            "file": path,
        }
        for head, still in enumerate(found.stills):
            x, y = (None if peak is None else round(peak, 1) for peak in source.peak_in(still) or (None, None))
            about |= {"head": head, "max": float(still.max()), "peak_x": x, "peak_y": y}
            about |= {"positions": float(found.positions[head]), "elsewhere": float(found.elsewhere[head])}
            yield ATTENTION.row(found, **about)


def _in_shares(query: _Query, source: explain.OverlaySource) -> _Query:
    """A position in pixels of the image as ``(y, x)``, shares of what the network saw."""
    if not isinstance(query, tuple):
        return query
    x, y = source.in_input(*query)
    if not (0 <= y <= 1 and 0 <= x <= 1):
        left, top, right, bottom = source.box
        asked = f"the model does not see the position {query[0]:g},{query[1]:g}"
        raise UsageError(
            asked, f"it sees {left:g},{top:g} to {right:g},{bottom:g}", "choose one there, or --resize pad"
        )
    return y, x


def _is_beyond(summary: Any, choice: drawing.ChannelChoice | None) -> bool:
    """Whether a range of channels ends outside the layer."""
    return choice is not None and any(choice.beyond(part.tiles.channels) for part in summary.parts)
