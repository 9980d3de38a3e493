"""``hookscope visualize``: the feature maps of a model's layers as sheets, one PNG for each image and call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from hookscope import drawing, hooks, images
from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.shared.model import ModelOptions, counted_types, model_options
from hookscope.cli.shared.options import (
    SELECTION,
    colour_map_option,
    complete_channels,
    complete_scales,
    format_option,
    images_argument,
    layer_option,
    model_argument,
    type_option,
)
from hookscope.cli.shared.output_paths import call_names
from hookscope.cli.shared.picture_run import PictureRun, Row, output_option, parse_output

FIELDS = ("index", "name", "type", "call", "shape", "min", "mean", "max", "dead", "nonfinite", "weights", "file")


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    layers: tuple[str, ...]
    types: tuple[str, ...]
    output: str | None
    channels: str | None
    columns: int | None
    cell: int | None
    cmap: str | None
    scale: str
    overlay: bool
    plain: bool
    format: str


@click.command("visualize")
@model_argument()
@images_argument()
@layer_option(f"Calls to draw: 0:36:5, {SELECTION}  [default: all]", ("all",))
@type_option
@output_option("sheet")
@click.option(
    "--channels",
    metavar="SPEC",
    shell_complete=complete_channels,
    help="Channels to draw: 0-63,100, or top:16 (by mean |value|; or top:16:max, :std, :mean).",
)
@click.option(
    "--columns", metavar="N", type=click.IntRange(1, 10000), help="Maps in a row.  [default: about 3:2 in all]"
)
@click.option(
    "--cell", metavar="PIXELS", type=click.IntRange(1, 4096), help="Smallest side of a map.  [default: 56 or more]"
)
@colour_map_option("Any matplotlib colour map.  [default: viridis; RdBu_r with --scale symmetric]")
@click.option(
    "--scale",
    metavar="SCALE",
    default="channel",
    show_default=True,
    shell_complete=complete_scales,
    help=f"Range of the colours: {drawing.scale_notations('or')}.",
)
@click.option("--overlay", is_flag=True, help="Draw each map over the image that the model saw.")
@click.option("--plain", is_flag=True, help="Draw the grid only: no header, numbers or colour bars.")
@model_options
@format_option
def command(model: ModelOptions, paths: tuple[str, ...], **values: Any) -> None:
    """Draw the feature maps of MODEL for each IMAGE.

    IMAGE is a file, or - for standard input. The command writes one PNG for each image and layer call. It prints a row
    for each PNG: shape, lowest, mean and highest value, the number of dead (constant) channels, and the number of NaN
    and Inf. Without -o, a single sheet goes to the current folder and several sheets go to a folder IMAGE-MODEL/. The
    maps with the widest ranges have bold numbers: look at these first.

    \b
    Examples:
      hookscope visualize resnet34 cat.jpg --layer 30
      hookscope visualize resnet34 cat.jpg --layer layer4.0.conv2 --scale symmetric
      hookscope visualize mobilenet_v3_small samples/*.jpg --layer 0:5 -o out/
      cat cat.jpg | hookscope visualize vgg16 - --layer features.0 -o - > first.png
      hookscope visualize resnet34 cat.jpg --layer 0 --channels top:16 --overlay
    """
    options = Options(**values)
    hooks.Selection(options.layers)
    scale = drawing.Scale.parse(options.scale)
    cmap = options.cmap or scale.cmap
    drawing.palette(cmap)
    style = drawing.Style(options.columns, options.cell, cmap, options.plain)
    choice = drawing.ChannelChoice.parse(options.channels) if options.channels is not None else None
    run = PictureRun.load(model, paths, parse_output(options.output, paths))
    run.print_rows(lambda read: _draw(run, read, options, choice, scale, style), FIELDS, options.format)
    run.exit()


def _draw(
    run: PictureRun,
    read: Sequence[images.InputImage],
    options: Options,
    choice: drawing.ChannelChoice | None,
    scale: drawing.Scale,
    style: drawing.Style,
) -> Iterator[Row]:
    """Write the sheets of one forward pass, and yield a row for each."""
    net = run.net
    tensors = [net.prepare(image) for image in read]
    with process.prints_to_standard_error():
        result = drawing.run_and_reduce(net, tensors, options.layers, counted_types(net, options.types), choice, scale)
    overlay = drawing.input_frames(net, tensors) if options.overlay else None
    for call, error in result.without_map:
        output.note(f"Note: {call.key or call.type} is not drawn: {error.asked}")
    for name in result.did_not_run:
        output.note(f"Note: {name} did not run")
    image = read[0].name
    names = call_names([call for call, _ in result.summaries], run.files.words[image], net.name)
    files = [run.path(name, image, run.is_single and len(names) == 1) for name in names]
    for (call, summary), file in zip(result.summaries, files, strict=True):
        sheet = drawing.draw_sheet(summary, call, run.origin(read), style, overlay)
        if sheet.left_out:
            output.note(f"Note: {call.key}: {sheet.left_out} channels left out of {file}; choose with --channels")
        run.write(sheet.image, sheet.provenance, file)
        yield {
            **call.as_row(),
            "shape": summary.shape,
            "min": summary.low,
            "mean": summary.mean,
            "max": summary.high,
            "dead": summary.dead,
            "nonfinite": summary.nonfinite,
            "weights": net.weights,
            "file": file,
        }
