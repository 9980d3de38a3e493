"""``hookscope exemplars``: the images, and the places in them, that excite each channel most."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from hookscope import drawing, exemplars, hooks, models, report, system
from hookscope.cli import process
from hookscope.cli.output import formats as output
from hookscope.cli.output.report import Report, Section
from hookscope.cli.progress import image_progress, pass_progress
from hookscope.cli.shared import image_options, options as shared
from hookscope.cli.shared.engine_options import EngineOptions
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.image_run import image_run
from hookscope.cli.shared.model import ModelOptions, caption_of, check_choice
from hookscope.cli.shared.output_paths import check_html, file_word, write_html, write_picture
from hookscope.cli.shared.written import open_option, show_option
from hookscope.errors import UsageError, WriteError
from hookscope.findings import counted

STATE = "exemplars.json"
_MOST = 100  # exemplars of a channel
_MANY_CROPS = 25_000  # 0.5 GB of sheets
_CROP_BYTES = 20_000  # of a photograph on a sheet
_MOST_SYNTHESIZED = 1_000  # images; one takes seconds


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    layers: hooks.Selection | None
    types: tuple[str, ...]
    channels: drawing.ChannelChoice | None
    top: int
    least: bool
    measure: str
    synthesize: int | None
    output: str | None
    html: str | None
    resume: bool
    overwrite: bool
    files0_from: str | None
    limit: int | None
    batch_size: int
    workers: int
    strict: bool
    engine: EngineOptions
    format: str

    @property
    def state(self) -> str | None:
        """The file of the progress."""
        return None if self.output is None else os.path.join(self.output, STATE)

    @property
    def numbers(self) -> list[int] | None:
        """The chosen channels; None for all."""
        if self.channels is None or not self.channels.numbers:
            return None
        return [at for first, last in self.channels.numbers for at in range(first, last + 1)]


@click.command("exemplars", cls=GroupedCommand)
@shared.tell_fields(exemplars.EXEMPLARS, "Fields of a row, one for each channel")
@shared.model_argument()
@image_options.images_argument
@shared.layer_option(f"Calls whose channels to explain: {shared.SELECTION}  [default: 0:, every index]")
@shared.counted_type_option
@shared.channels_option("Channels of each layer: all, or numbers such as 0-63,100.  [default: all]")
@click.option(
    "--top",
    metavar="N",
    type=click.IntRange(1, _MOST),
    default=9,
    show_default=True,
    help="How many images to keep for each channel.",
)
@click.option("--bottom", "least", is_flag=True, help="Also find the images that excite each channel least.")
@click.option(
    "--rank-by",
    "measure",
    type=click.Choice(exemplars.MEASURES),
    default="max",
    show_default=True,
    help="The value of a channel on an image: its largest, its mean, or its largest absolute activation.",
)
@shared.count_option("--synthesize", "Also make N images by gradient ascent that excite each channel most.")
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    type=click.Path(),
    help=f"Write a sheet for each layer to FOLDER (made if missing), and {STATE}, which holds the progress and the"
    " result.",
)
@shared.html_option("the same")
@click.option("--resume", is_flag=True, help=f"Continue the interrupted run that wrote {STATE} in FOLDER.")
@click.option("--overwrite", is_flag=True, help=f"Replace {STATE} and the sheets in FOLDER.")
@image_options.run_options
@open_option
@show_option
@shared.format_option
def command(model: ModelOptions, paths: Sequence[str], **values: Any) -> None:
    """Find the images, and the places in them, that excite each channel of MODEL most.

    \b
    Examples:
      hookscope exemplars shapes photos/ --layer features.10 -o exemplars/
      hookscope exemplars resnet50 photos/ --layer layer4.2.conv3 --channels 7,12 --html page.html
      find photos -name '*.jpg' -print0 | hookscope exemplars resnet50 --files0-from - --layer layer3 -o out/
      hookscope exemplars shapes photos/ --layer features.10 -o exemplars/ --resume
      hookscope inspect shapes star.png --exemplars exemplars/exemplars.json

    All layers are done in one pass over the images. IMAGE is a file, a folder, a glob, or - for standard input. An
    image counts once for a channel, and so do near-duplicates of one image. Its label is the name of its folder, inside
    a folder that was named.

    A sheet has a row for each channel: crops of the images with their values, and the histogram of the channel's
    values. A crop is what the unit sees, its receptive field; if that is half of the input or more, the whole input is
    shown with a ring. A layer with more than 32 channels has several pages. A page of --html has at most 50 MB; if
    that is too little, it shows the first channels. Without -o and --html only the rows are printed.

    The file exemplars.json in the folder of -o is written about every ten seconds. After an interruption, --resume
    continues with the first image that is missing. It refuses another model, weights, preprocessing, settings, or list
    of images: their names, and the contents of those that are exemplars. It keeps synthesized images, unless a better
    exemplar was found.
    """
    options = Options(**values)
    images = image_options.image_list(paths, options.files0_from, options.limit)
    _check(options, images)
    engine, net = options.engine.make(), model.load()
    check_choice(net, options.types, options.layers)
    layers, lost = _found(options, net, images, [path for path in paths if os.path.isdir(path)], engine)
    if options.synthesize:
        layers = _synthesized(net, layers, options.synthesize, options.state)
    with contextlib.ExitStack() as stack:  # a full disk is no reason to lose the rows
        stack.callback(_report, layers, net, options.format)
        if options.output is not None or options.html is not None:
            _draw(options, net, layers)
    if lost:
        raise click.exceptions.Exit(1)


def _check(options: Options, images: Sequence[str]) -> None:
    """Refuse, before minutes of work, what cannot be written after it."""
    if options.channels is not None and options.channels.top:
        raise UsageError("--channels takes numbers here, not top:N", do="write such as 7,12 or 0-63")
    if options.synthesize is not None:
        if options.numbers is None:
            raise UsageError("--synthesize takes seconds for a channel", do="choose channels: --channels 7,12")
        if (images_made := options.synthesize * len(options.numbers)) > _MOST_SYNTHESIZED:
            asked = f"--synthesize would make {images_made:,} images for a layer"
            raise UsageError(asked, f"{_MOST_SYNTHESIZED:,} are the most", "choose fewer channels")
    if options.resume and options.overwrite:
        raise UsageError("--resume and --overwrite contradict each other", do="leave one of the two out")
    for option, given in {"--resume": options.resume, "--overwrite": options.overwrite}.items():
        if given and options.output is None:
            raise UsageError(f"{option} needs -o", do="name the folder of the run: -o FOLDER")
    if options.state is not None and options.output is not None:
        if options.output == "-" or (os.path.exists(options.output) and not os.path.isdir(options.output)):
            raise UsageError(f"-o {options.output} is not a folder", do="name a folder")
        system.check_folder(options.output)
        if os.path.exists(options.state) and not (options.resume or options.overwrite):
            exists = "it holds the exemplars of an earlier run"
            raise WriteError(f"{options.state} exists", exists, "add --resume or --overwrite, or name another folder")
    check_html(options.html, images, {"-o": options.state})


def _found(
    options: Options, net: models.LoadedModel, images: Sequence[str], folders: Sequence[str], engine: Any
) -> tuple[list[exemplars.LayerExemplars], int]:
    """The exemplars, and the number of lost images."""
    if options.output is not None:
        system.make_folder(options.output)
    with image_run(len(images), options.state, options.strict) as run:
        layers = exemplars.find_exemplars(
            net,
            images,
            "0:" if options.layers is None else options.layers,
            options.types or None,
            channels=options.numbers,
            top=options.top,
            least=options.least,
            measure=options.measure,
            folders=folders,
            batch_size=options.batch_size,
            workers=options.workers,
            engine=engine,
            save=options.state,
            resume=options.resume,
            on_start=run.started,
            on_progress=run.advance,
            on_lost=run.lost,
            on_note=run.note,
            on_interrupt=run.interrupted,
        )
    if run.count:
        output.note(f"Note: {run.count:,} of {run.total} skipped")
    return list(layers), run.count


def _synthesized(
    net: models.LoadedModel, layers: Sequence[exemplars.LayerExemplars], count: int, state: str | None
) -> list[exemplars.LayerExemplars]:
    """The layers with synthesized images, of an earlier run or new ones; a note says which of them have failed."""
    made = list(layers)
    wanted = [
        [each.channel for each in layer.channels if len(each.synthesized) < count and not each.unreached]
        for layer in layers
    ]
    with image_progress(count * sum(map(len, wanted))) as advance, process.prints_to_standard_error():
        for at, channels in enumerate(wanted):
            if channels:
                made[at] = exemplars.add_synthesized(net, layers[at], channels, count=count, on_progress=advance)
                if state is not None:
                    exemplars.save_synthesized(state, made)
    for layer in made:
        for channel in layer.channels:
            where = f"channel {channel.channel} of {layer.key or hooks.MODEL}"
            if channel.unreached:
                output.note(f"Note: no gradient reaches {where}: no image was synthesized")
            elif weak := [each for each in channel.synthesized if not each.is_enough]:
                words = counted(len(weak), "synthesized image")
                output.note(f"Note: {words} of {where}: the value is not above that of the best exemplar")
    return made


def _draw(options: Options, net: models.LoadedModel, layers: Sequence[exemplars.LayerExemplars]) -> None:
    """Write the sheets and the page."""
    crops_drawn = sum(len(each.most) + len(each.least) for layer in layers for each in layer.channels)
    if options.output is not None and crops_drawn > _MANY_CROPS:
        channels = counted(sum(len(layer.channels) for layer in layers), "channel")
        size = crops_drawn * _CROP_BYTES / 1e9
        output.note(f"Note: sheets of {channels} take up to {size:.1f} GB; --layer and --channels choose fewer")
    with pass_progress("images") as on_progress:
        crops = exemplars.cut_crops(net, layers, on_progress or (lambda done, total: None))
    if gone := exemplars.lost_words(crops):
        output.note(f"Note: {gone}")
    if options.output is not None:
        names = set()
        for number, layer in enumerate(layers):
            pages = exemplars.draw_exemplars(layer, net, crops)
            for at, page in enumerate(pages):
                names.add(name := _sheet_name(layer, number, at, len(pages)))
                write_picture(os.path.join(options.output, name), page)
        _remove_others(options.output, names)
    if options.html is not None:
        facts = {**models.package_versions(), **caption_of(net), "command": process.command_line()}
        write_html(options.html, report.draw_exemplars_page(layers, net, crops, provenance=facts))


def _sheet_name(layer: exemplars.LayerExemplars, number: int, at: int, count: int) -> str:
    """``000-features.10-01.png``: sheets sort in order of execution."""
    page = f"-{at + 1:0{len(str(count))}d}" if count > 1 else ""
    return f"{number:03d}-{file_word(layer.key or layer.call.type)[:150]}{page}.png"


def _remove_others(folder: str, names: set[str]) -> None:
    """Remove the sheets of an earlier run, which would stand beside an `exemplars.json` that is not theirs."""
    for name in set(os.listdir(folder)) - names:
        path = os.path.join(folder, name)
        if re.fullmatch(r"\d{3,}-.+\.png", name) and exemplars.is_sheet(path):
            os.unlink(path)


def _report(layers: Sequence[exemplars.LayerExemplars], net: models.LoadedModel, format: str) -> None:
    pairs = [(layer, channel) for layer in layers for channel in layer.channels]
    rows = [exemplars.exemplar_row(layer, channel, net.weights) for layer, channel in pairs]
    caption = caption_of(net) | {"images": max(layer.images for layer in layers)}
    section = Section(rows, exemplars.EXEMPLARS)
    output.write_report(Report([section], caption=caption), format)
