"""Make one page that says where to look. Start here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from hookscope import exemplars, hooks, inspection, report, scores, system
from hookscope.cli import process
from hookscope.cli.fields import option
from hookscope.cli.output import formats as output
from hookscope.cli.output.place_rows import PLACES, in_words, place_section
from hookscope.cli.output.report import Report
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import caption_of
from hookscope.cli.shared.output_paths import OutputPath, page_name, refuse_input
from hookscope.cli.shared.picture_run import PictureCommand, write_bytes
from hookscope.cli.shared.written import wrote
from hookscope.errors import UsageError

_MOST_IMAGES = 8  # side by side on a page, unless --limit says otherwise


class Inspect(PictureCommand):
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

    fields_told = PLACES
    suffixes = (".html",)

    output: str | None = shared.output_option("page")
    max_size: int = option(
        "Largest size of the page, such as 20MB or 512KiB. A larger page keeps the best channels of each layer.",
        type=shared.FileSize(),
        default="50MB",
    )
    exemplars: str | None = shared.in_file(
        "Show the exemplars that hookscope exemplars -o saved in FILE, in the views of their layers."
    )
    layers: hooks.Selection | None = shared.layer_option(
        f"Calls whose maps are on the page: {shared.SELECTION}  [default: 0:, every index]"
    )
    types: tuple[str, ...] = shared.type_option()
    target: scores.Target = target_option("Class whose score the page explains")
    categories: tuple[str, ...] | None = categories_option()

    def check(self) -> None:
        if self.target.count > 1:
            raise UsageError(f"a page explains one class, got --target {self.target}", do="give one class")
        super().check()

    def run(self) -> int:
        net, files, place = self.net, self.files, self.place
        files.groups(net)
        images = files.usable(net.preprocess.frames)
        best = [] if self.exemplars is None else exemplars.read_exemplars_of(self.exemplars, net)
        with process.prints_to_standard_error(), pass_progress("images") as on_progress:
            found = inspection.inspect(
                net,
                images,
                self.layers,
                types=self.types or None,
                also=[layer.call.name for layer in best],
                target=self.target,
                categories=categories_of(net, self.categories),
                on_progress=on_progress,
                on_note=lambda name, text: output.note(f"Note: {name}: {text}"),
            )
        found = replace(found, provenance={**found.provenance, "command": process.command_line()})
        words = [files.words[image.name] for image in images]
        file = place.path_for(page_name(words, net.name), "", net.name, alone=True)
        crops = exemplars.cut_crops(net, best)
        if gone := exemplars.lost_words(crops):
            output.note(f"Note: {gone}")
        page = report.draw_page(found, best, crops, max_size=self.max_size)
        _write(found, page, file, place, files.paths)
        if place.kind != "stdout":
            caption = caption_of(net)
            self.print(Report([place_section(found, file)], in_words=lambda page: in_words(found, caption, page)))
        return files.status

    @cached_property
    def files(self) -> ImageFiles:
        """The images of the page: without ``--limit`` not more than stand side by side."""
        if self.limit is not None or len(self.images) <= _MOST_IMAGES:
            return ImageFiles(self.images)
        output.note(f"Note: the page has the first {_MOST_IMAGES} of {len(self.images):,} images; use --limit for more")
        return ImageFiles(self.images[:_MOST_IMAGES])


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
