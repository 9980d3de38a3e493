"""Find the images that excite each channel most."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import click

from hookscope import drawing, exemplars, hooks, jobs, models, report, system
from hookscope.cli import process, progress
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.long_run import ImageRun, OfManyImages
from hookscope.cli.shared.output_paths import file_word, write_html, write_picture
from hookscope.cli.shared.subject import caption_of, check_choice
from hookscope.cli.shared.written import open_option, show_option
from hookscope.errors import UsageError, WriteError
from hookscope.findings import counted

STATE = "exemplars.json"
_MOST = 100  # exemplars of a channel
_MANY_CROPS = 25_000  # 0.5 GB of sheets
_CROP_BYTES = 20_000  # of a photograph on a sheet
_MOST_SYNTHESIZED = 1_000  # images; one takes seconds


class Exemplars(OfManyImages):
    """Find the images, and the places in them, that excite each channel of MODEL most.

    \b
    Examples:
      hookscope exemplars shapes photos/ --layer features.10 -o exemplars/
      hookscope exemplars resnet50 photos/ --layer layer4.2.conv3 --channels 7,12 --html page.html
      find photos -name '*.jpg' -print0 | hookscope exemplars resnet50 --files0-from - --layer layer3 -o out/
      hookscope exemplars shapes photos/ --layer features.10 -o exemplars/ --resume
      hookscope inspect shapes star.png --exemplars exemplars/exemplars.json

    All layers are done in one pass over the images. IMAGE is a file, a folder, a glob, or - for standard input. An
    image, with its near-duplicates, counts once for a channel. Its label is the name of its folder, if the command
    names a folder above it.

    A sheet has a row for each channel: crops of the images with their values, and the histogram of the channel's
    values. A crop is what the unit sees, its receptive field; if that is half of the input or more, the whole input is
    shown with a ring. A layer with more than 32 channels has several pages. A page of --html has at most 50 MB; if
    that is too little, it shows the first channels. Without -o and --html only the rows are printed.

    The file exemplars.json in the folder of -o is written about every ten seconds. After an interruption, --resume
    continues with the first image that is missing. It refuses another model, weights, preprocessing, settings, or list
    of images. It compares the names of all images and the contents of the exemplars. It keeps synthesized images,
    unless a better exemplar was found.
    """

    fields_told = exemplars.EXEMPLARS
    fields_title = "Fields of a row, one for each channel"

    layers: hooks.Selection | None = shared.calls_option("Calls whose channels to explain", "0:, every index")
    types: tuple[str, ...] = shared.type_option(shared.COUNTED_TYPES)
    channels: drawing.ChannelChoice | None = shared.channels_option(
        "Channels of each layer: all, or numbers such as 0-63,100.  [default: all]"
    )
    top: int = option(
        "How many images to keep for each channel.", type=click.IntRange(1, _MOST), metavar="N", default=9
    )
    bottom: bool = option("Also find the images that excite each channel least.")
    rank_by: str = option(
        "The value of a channel on an image: its largest, its mean, or its largest absolute activation.",
        type=click.Choice(exemplars.MEASURES),
        default="max",
    )
    synthesize: int | None = option("Also make N images by gradient ascent that excite each channel most.")
    output: str | None = shared.in_file(
        f"Write a sheet for each layer to FOLDER (made if missing), and {STATE}, which holds the progress and the"
        " result.",
        "-o",
        metavar="FOLDER",
        type=click.Path(),
        section="Output",
        also=[open_option(), show_option()],
    )
    html: str | None = shared.html_file("the exemplars")
    resume: bool = option(
        f"Continue the interrupted run that wrote {STATE} in FOLDER.",
        section="Output",
        needs="output",
        not_with=("overwrite",),
    )
    overwrite: bool = option(f"Replace {STATE} and the sheets in FOLDER.", needs="output")

    @property
    def state(self) -> str | None:
        return None if self.output is None else os.path.join(self.output, STATE)

    @property
    def numbers(self) -> list[int] | None:
        """The chosen channels; None for all."""
        if self.channels is None or not self.channels.numbers:
            return None
        return [at for first, last in self.channels.numbers for at in range(first, last + 1)]

    def check(self) -> None:
        if self.channels is not None and self.channels.top:
            raise UsageError("--channels takes numbers here, not top:N", do="write such as 7,12 or 0-63")
        if self.synthesize is not None:
            if self.numbers is None:
                raise UsageError("--synthesize takes seconds for a channel", do="choose channels: --channels 7,12")
            if (images_made := self.synthesize * len(self.numbers)) > _MOST_SYNTHESIZED:
                asked = f"--synthesize would make {images_made:,} images for a layer"
                raise UsageError(asked, f"{_MOST_SYNTHESIZED:,} are the most", "choose fewer channels")
        if self.state is not None and self.output is not None:
            if self.output == "-" or (os.path.exists(self.output) and not os.path.isdir(self.output)):
                raise UsageError(f"-o {self.output} is not a folder", do="name a folder")
            system.check_folder(self.output)
            if os.path.exists(self.state) and not (self.resume or self.overwrite):
                exists = "it holds the exemplars of an earlier run"
                raise WriteError(f"{self.state} exists", exists, "add --resume or --overwrite, or name another folder")
        super().check()

    def run(self) -> int:
        engine, net = self.engine.make(), self.model.load()
        check_choice(net, self.types)
        layers, skipped = _found(self, net, engine)
        if self.synthesize:
            layers = _synthesized(net, layers, self.synthesize, self.state)
        pairs = [(layer, channel) for layer in layers for channel in layer.channels]
        rows = [exemplars.exemplar_row(layer, channel, net.weights) for layer, channel in pairs]
        caption = caption_of(net) | {"images": max(layer.images for layer in layers)}
        with self.printed_after(Report([Section(rows, exemplars.EXEMPLARS)], caption=caption)):
            if self.output is not None or self.html is not None:
                _draw(self, net, layers)
        return min(skipped, 1)


def _found(options: Exemplars, net: models.LoadedModel, engine: Any) -> tuple[list[exemplars.LayerExemplars], int]:
    """The exemplars, and the number of skipped images."""
    if options.output is not None:
        system.make_folder(options.output)
    with ImageRun(len(options.images), options.state, options.strict) as run:
        layers = exemplars.find_exemplars(
            net,
            options.images,
            "0:" if options.layers is None else options.layers,
            options.types or None,
            channels=options.numbers,
            top=options.top,
            least=options.bottom,
            measure=options.rank_by,
            folders=options.folders,
            save=options.state,
            resume=options.resume,
            run=jobs.RunSettings(options.batch_size, options.workers, engine, run.listener),
        )
    if run.skipped:
        note(f"Note: {run.skipped:,} of {run.total} skipped")
    return list(layers), run.skipped


def _synthesized(
    net: models.LoadedModel, layers: Sequence[exemplars.LayerExemplars], count: int, state: str | None
) -> list[exemplars.LayerExemplars]:
    """The layers with synthesized images, of an earlier run or new ones; a note says which of them have failed."""
    made = list(layers)
    wanted = [
        [unit.channel for unit in layer.channels if len(unit.synthesized) < count and not unit.unreached]
        for layer in layers
    ]
    with progress.image_progress(count * sum(map(len, wanted))) as advance, process.prints_to_standard_error():
        for at, channels in enumerate(wanted):
            if channels:
                made[at] = exemplars.add_synthesized(net, layers[at], channels, count=count, on_progress=advance)
                if state is not None:
                    exemplars.save_synthesized(state, made)
    for layer in made:
        for channel in layer.channels:
            where = f"channel {channel.channel} of {layer.key or hooks.MODEL}"
            if channel.unreached:
                note(f"Note: no gradient reaches {where}: no image was synthesized")
            elif weak := [image for image in channel.synthesized if not image.is_enough]:
                words = counted(len(weak), "synthesized image")
                note(f"Note: {words} of {where}: the value is not above the best exemplar's")
    return made


def _draw(options: Exemplars, net: models.LoadedModel, layers: Sequence[exemplars.LayerExemplars]) -> None:
    crops_drawn = sum(len(channel.most) + len(channel.least) for layer in layers for channel in layer.channels)
    if options.output is not None and crops_drawn > _MANY_CROPS:
        channels = counted(sum(len(layer.channels) for layer in layers), "channel")
        size = crops_drawn * _CROP_BYTES / 1e9
        note(f"Note: sheets of {channels} take up to {size:.1f} GB; --layer and --channels choose fewer")
    with progress.pass_progress("images") as on_progress:
        crops = exemplars.cut_crops(net, layers, on_progress or (lambda done, total: None))
    if gone := exemplars.lost_words(crops):
        note(f"Note: {gone}")
    if options.output is not None:
        names = set()
        for number, layer in enumerate(layers):
            pages = exemplars.draw_exemplars(layer, net, crops)
            for at, page in enumerate(pages, 1):
                of = f"-{at:0{len(str(len(pages)))}d}" if len(pages) > 1 else ""
                name = f"{number:03d}-{file_word(layer.key or layer.call.type, 150)}{of}.png"  # sorts by execution
                names.add(name)
                write_picture(os.path.join(options.output, name), page)
        _remove_others(options.output, names)
    if options.html is not None:
        facts = {**models.package_versions(), **caption_of(net), "command": process.command_line()}
        write_html(options.html, report.draw_exemplars_page(layers, net, crops, provenance=facts))


def _remove_others(folder: str, names: set[str]) -> None:
    """Remove the sheets of an earlier run, which would stand beside an `exemplars.json` that is not theirs."""
    for name in set(os.listdir(folder)) - names:
        path = os.path.join(folder, name)
        if re.fullmatch(r"\d{3,}-.+\.png", name) and exemplars.is_sheet(path):
            os.unlink(path)
