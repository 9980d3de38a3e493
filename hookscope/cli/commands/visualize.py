"""``hookscope visualize``: the feature maps of a model's layers as sheets, one PNG per image and call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import load_net
from hookscope.cli.shared.options import (
    chosen_format,
    complete_channels,
    complete_colour_maps,
    complete_scales,
    format_option,
    layer_option,
    model_argument,
    net_options,
    type_option,
)
from hookscope.drawing import scale_notations
from hookscope.errors import ImageError, InputError, LayerError, NoMapError, UsageError

if TYPE_CHECKING:
    from hookscope.cli.shared.output_paths import OutputPath
    from hookscope.drawing import ChannelChoice, Origin, PassResult, Scale, Sheet, Style
    from hookscope.images import InputImage
    from hookscope.models import LoadedModel

FIELDS = ("index", "name", "type", "call", "shape", "min", "mean", "max", "dead", "nonfinite", "weights", "file")


@click.command("visualize")
@model_argument()
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path())
@layer_option(
    "Which calls: 30, -1, 0:10, 0:36:5, conv1, 'layer4.*', 're:conv[12]$', name#1, all; repeatable, comma"
    " separated.  [default: all]",
    ("all",),
)
@type_option
@click.option(
    "-o",
    "--output",
    "target",
    metavar="PATH",
    type=click.Path(),
    help="A file for one sheet, a folder (made when missing), or - for standard output.",
)
@click.option(
    "--channels",
    metavar="SPEC",
    shell_complete=complete_channels,
    help="0-63,100 or top:16 (by mean |value|; top:16:max|std|mean).",
)
@click.option("--columns", metavar="N", type=click.IntRange(1, 10000), help="Maps in a row.  [default: about 3:2]")
@click.option(
    "--cell", metavar="PIXELS", type=click.IntRange(1, 4096), help="Smallest side of a map.  [default: 56 or more]"
)
@click.option(
    "--cmap",
    metavar="NAME",
    shell_complete=complete_colour_maps,
    help="Any of matplotlib's colour maps.  [default: viridis; RdBu_r with --scale symmetric]",
)
@click.option(
    "--scale",
    metavar="SCALE",
    default="channel",
    show_default=True,
    shell_complete=complete_scales,
    help=f"{scale_notations('or')}.",
)
@click.option("--overlay", is_flag=True, help="Lay each map over the photograph that the network saw.")
@click.option("--plain", is_flag=True, help="The grid only: no header, numbers or bars.")
@net_options
@format_option
def command(
    model: str,
    images: tuple[str, ...],
    layers: tuple[str, ...],
    types: tuple[str, ...],
    target: str | None,
    channels: str | None,
    columns: int | None,
    cell: int | None,
    cmap: str | None,
    scale: str,
    overlay: bool,
    plain: bool,
    weights: str,
    seed: int,
    device: str,
    preprocess: str,
    input_size: tuple[int, int] | None,
    format: str | None,
) -> None:
    """Draw what the layers of MODEL put out for each IMAGE (- reads one from standard input).

    Writes one PNG for each image and call and prints a row for it: shape, lowest, mean and highest value, the count
    of dead (constant) channels and of NaN and Inf. Without -o, a single sheet goes to the current folder and several
    go to a folder IMAGE-MODEL/. The maps with the widest ranges have bold numbers: look there first.

    \b
    Examples:
      hookscope visualize resnet34 cat.jpg --layer 30
      hookscope visualize resnet34 cat.jpg --layer layer4.0.conv2 --scale symmetric
      hookscope visualize mobilenet_v3_small samples/*.jpg --layer 0:5 -o out/
      cat cat.jpg | hookscope visualize vgg16 - --layer features.0 -o - > first.png
      hookscope visualize resnet34 cat.jpg --layer 0 --channels top:16 --overlay
    """
    from hookscope.cli.shared.output_paths import OutputPath
    from hookscope.drawing import ChannelChoice, Scale, Style, palette
    from hookscope.hooks import Selection

    Selection(layers)
    wanted_scale = Scale.parse(scale)
    cmap = cmap or wanted_scale.cmap
    palette(cmap)
    destination = OutputPath.parse(target, images)
    if destination.kind == "stdout" and process.standard_output().isatty():
        raise UsageError("-o - would write a picture to the terminal", do="send it to a file or a pipe")
    job = _Job(
        layers=layers,
        types=types,
        choice=ChannelChoice.parse(channels) if channels is not None else None,
        scale=wanted_scale,
        style=Style(columns, cell, cmap, plain),
        overlay=overlay,
        destination=destination,
    )
    pictures = ImageFiles(images)
    pictures.read_first()
    net = load_net(model, weights, seed, device, preprocess, input_size)
    rows = _rows(job, net, pictures)
    if destination.kind == "stdout":
        list(rows)
    else:
        try:
            output.write_rows(rows, FIELDS, chosen_format(format), process.standard_output())
        except BrokenPipeError:
            deque(rows, maxlen=0)  # `| head` has seen enough rows; the sheets are still wanted
            raise
    if pictures.failed:
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class _Job:
    """What was asked for, the same for every picture."""

    layers: tuple[str, ...]
    types: tuple[str, ...]
    choice: ChannelChoice | None
    scale: Scale
    style: Style
    overlay: bool
    destination: OutputPath


def _rows(job: _Job, net: LoadedModel, pictures: ImageFiles) -> Iterator[dict[str, Any]]:
    """Look at every picture, write its sheets, and say a row for each."""
    groups = pictures.groups(2 if net.family == "optical_flow" else 1)
    job.destination.check_count(len(groups))
    for paths in groups:
        try:
            read = [pictures.read(path, net.preprocess.frames) for path in paths]
            yield from _rows_of_one_pass(job, net, pictures, read, only=len(groups) == 1)
        except (ImageError, InputError, NoMapError, LayerError) as error:
            # a layer that no picture can reach is one error, not one for each of them
            if isinstance(error, LayerError) and not pictures.done:
                raise
            pictures.lost(error)
        else:
            pictures.done += 1


def _rows_of_one_pass(
    job: _Job, net: LoadedModel, pictures: ImageFiles, read: list[InputImage], only: bool
) -> Iterator[dict[str, Any]]:
    from hookscope.drawing import draw_sheet, input_frames, run_and_reduce
    from hookscope.hooks import class_names, usual_types

    for picture in read:
        for text in picture.notes:
            output.note(f"Note: {picture.name}: {text}")
    tensors = [net.prepare(picture) for picture in read]
    types = job.types or usual_types(map(class_names, net.model.modules()))
    with process.prints_to_standard_error():
        result = run_and_reduce(net, tensors, job.layers, types, job.choice, job.scale)
    overlay = input_frames(net, tensors) if job.overlay else None
    for call, error in result.without_map:
        output.note(f"Note: {call.key or call.type} is not drawn: {error.asked}")
    for name in result.did_not_run:
        output.note(f"Note: {name} did not run")
    paths = _paths(job, net, pictures, read[0].name, result, only)
    origin = _origin(net, read)
    for (call, summary), file in zip(result.summaries, paths, strict=True):
        sheet = draw_sheet(summary, call, origin, job.style, overlay)
        if sheet.left_out:
            output.note(f"Note: {call.key}: {sheet.left_out} channels left out of {file}; choose with --channels")
        _write(job.destination, sheet, file)
        yield {
            "index": call.index,
            "name": call.name,
            "type": call.type,
            "call": call.call,
            "shape": summary.shape,
            "min": summary.low,
            "mean": summary.mean,
            "max": summary.high,
            "dead": summary.dead,
            "nonfinite": summary.nonfinite,
            "weights": net.weights,
            "file": file,
        }


def _paths(job: _Job, net: LoadedModel, pictures: ImageFiles, image: str, result: PassResult, only: bool) -> list[str]:
    from hookscope.cli.shared.output_paths import call_names, refuse_input

    word = pictures.words[image]
    names = call_names([call for call, _ in result.summaries], word, net.name)
    alone = only and len(names) == 1
    paths = [job.destination.path_for(name, word, net.name, alone) for name in names]
    for path in paths:
        refuse_input(path, pictures.paths)
    return paths


def _origin(net: LoadedModel, read: Sequence[InputImage]) -> Origin:
    from hookscope.drawing import Origin

    first, *others = read
    second = (others[0].name, others[0].sha256) if others else None
    return Origin(net.name, net.weights, first.name, first.sha256, net.preprocess.describe(), second)


def _write(destination: OutputPath, sheet: Sheet, file: str) -> None:
    import os

    from hookscope.drawing import encode_png, write_png
    from hookscope.system import make_folder

    if destination.kind == "stdout":
        stream = process.standard_output().buffer
        stream.write(encode_png(sheet.image, sheet.provenance))
        stream.flush()
        return
    if folder := os.path.dirname(file):
        make_folder(folder)
    write_png(sheet.image, file, sheet.provenance)
