"""``hookscope inspect``: one page of a model and some images that says where to look."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from hookscope import exemplars, hooks, inspection, report, scores, system
from hookscope.cli import process
from hookscope.cli.output import formats as output
from hookscope.cli.output.place_rows import PLACES, in_words, place_section
from hookscope.cli.output.report import Report
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.image_options import image_inputs
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import ModelOptions, caption_of, check_choice, model_options
from hookscope.cli.shared.output_paths import OutputPath, page_name, refuse_input
from hookscope.cli.shared.picture_run import output_option, parse_output, write_bytes
from hookscope.cli.shared.written import wrote
from hookscope.errors import UsageError

_MOST_IMAGES = 8  # side by side on a page, unless --limit says otherwise


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    layers: hooks.Selection | None
    types: tuple[str, ...]
    target: scores.Target
    categories: tuple[str, ...] | None
    output: str | None
    max_size: int
    exemplars: str | None
    format: str


@click.command("inspect", cls=GroupedCommand)
@shared.tell_fields(PLACES)
@shared.model_argument()
@output_option("page")
@click.option(
    "--max-size",
    type=shared.FileSize(),
    default="50MB",
    show_default=True,
    help="Largest size of the page, such as 20MB or 512KiB. A larger page keeps the best channels of each layer.",
)
@shared.file_option(
    "--exemplars",
    "Show the exemplars that hookscope exemplars -o saved in FILE, in the views of their layers.",
)
@shared.layer_option(f"Calls whose maps are on the page: {shared.SELECTION}  [default: 0:, every index]")
@shared.type_option
@target_option(help="Class whose score the page explains")
@categories_option
@image_inputs
@model_options
@shared.format_option
def command(model: ModelOptions, paths: list[str], **values: Any) -> None:
    """Make one page of what MODEL answers on each IMAGE, and where to look first.

    \b
    Examples:
      hookscope inspect resnet34 cat.jpg
      hookscope inspect efficientnet-lite0 cat.jpg coffee.jpg --open
      hookscope inspect nets.py:mine photos/ --weights mine.pth --layer 'backbone.*' -o mine.html --max-size 20MB
      hookscope inspect resnet50 cat.jpg --exemplars found/exemplars.json
      hookscope inspect shapes samples/shapes/star.png --format json | jq '.[0].reason'

    This is the command to begin with. The page is one self-contained HTML file. It shows what the model answered, and
    at most twelve places to look at with the reason for each. It has every call of the network with its numbers, and
    the feature maps of each layer. Several images share one page: the first 8, or as many as --limit says. IMAGE is a
    file, a folder, a glob, or - for standard input.

    A terminal shows the answer and the first places in about ten lines. Other formats have a row for each place, the
    most important first.

    The exit status is 0 whatever the page says, and 1 if an image cannot be read. `check` ends with 3 when a layer
    breaks a limit.
    """
    options = Options(**values)
    if options.target.count > 1:
        raise UsageError(f"a page explains one class, got --target {options.target}", do="give one class")
    place = parse_output(options.output, paths, ".html")
    files = ImageFiles(_chosen(paths))
    files.read_first()
    net = model.load()
    check_choice(net, options.types, options.layers)
    files.groups(net)
    images = files.usable(net.preprocess.frames)
    best = [] if options.exemplars is None else exemplars.read_exemplars_of(options.exemplars, net)
    with process.prints_to_standard_error(), pass_progress("images") as on_progress:
        found = inspection.inspect(
            net,
            images,
            options.layers,
            types=options.types or None,
            also=[layer.call.name for layer in best],
            target=options.target,
            categories=categories_of(net, options.categories),
            on_progress=on_progress,
            on_note=lambda name, text: output.note(f"Note: {name}: {text}"),
        )
    found = replace(found, provenance={**found.provenance, "command": process.command_line()})
    file = place.path_for(page_name([files.words[image.name] for image in images], net.name), "", net.name, alone=True)
    crops = exemplars.cut_crops(net, best)
    if gone := exemplars.lost_words(crops):
        output.note(f"Note: {gone}")
    page = report.draw_page(found, best, crops, max_size=options.max_size)
    _write(found, page, file, place, files.paths)
    if place.kind != "stdout":
        caption = caption_of(net)
        rows = Report([place_section(found, file)], in_words=lambda page: in_words(found, caption, page))
        output.write_report(rows, options.format)
    files.exit()


def _chosen(paths: list[str]) -> list[str]:
    """The images of the page: without ``--limit`` not more than stand side by side."""
    if click.get_current_context().params["limit"] is not None or len(paths) <= _MOST_IMAGES:
        return paths
    output.note(f"Note: the page has the first {_MOST_IMAGES} of {len(paths):,} images; use --limit for more")
    return paths[:_MOST_IMAGES]


def _write(found: inspection.Inspection, page: str, file: str, place: OutputPath, inputs: Sequence[str]) -> None:
    data = page.encode(errors="backslashreplace")
    if place.kind == "stdout":
        write_bytes(data)
        return
    refuse_input(file, inputs)
    if folder := os.path.dirname(file):
        system.make_folder(folder)
    system.write_atomically(file, data)
    wrote(file, lambda: report.draw_overview(found))
