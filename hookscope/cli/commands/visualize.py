"""Draw the feature maps of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hookscope import drawing, hooks, images
from hookscope.cli import process
from hookscope.cli.fields import option
from hookscope.cli.output.formats import note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import call_names
from hookscope.cli.shared.picture_run import PictureCommand, check_arrays
from hookscope.columns import Column, Columns, Row
from hookscope.findings import listed

COLUMNS = Columns(
    *hooks.CALL.but(type={"need": 2}),
    Column("shape", need=5),
    Column("min", lambda summary: summary.low, need=7),
    Column("mean", need=4),
    Column("max", lambda summary: summary.high, need=6),
    Column("dead", need=3),
    Column("nonfinite", hide="zero"),
    *("weights", "file"),
)


class Visualize(PictureCommand):
    """Draw the feature maps of MODEL for each IMAGE.

    \b
    Examples:
      hookscope visualize resnet34 cat.jpg --layer 30
      hookscope visualize resnet34 cat.jpg --layer layer4.0.conv2 --scale symmetric
      hookscope visualize resnet34 cat.jpg --layer 0 --channels top:16 --overlay
      hookscope visualize mobilenet_v3_small samples/*.jpg --layer 0:5 -o out/
      hookscope visualize resnet34 photos/ --layer layer4.2 -o out/ --raw layer4.npz
      cat cat.jpg | hookscope visualize vgg16 - --layer features.0 -o - > first.png

    The command writes a sheet, one PNG, for each image and layer call. IMAGE is a file, a folder, a glob, or - for
    standard input. The first cell of a sheet is the image as the model saw it. Single values, such as scores of
    classes, are drawn as bars. Without -o, a single sheet goes to the current folder; several go to a folder
    IMAGE-MODEL/.

    A row for each sheet has the shape, the lowest, mean and highest value, the number of dead (constant) channels, and
    the number of NaN and Inf.

    --raw keeps all channels as the layer returned them; bfloat16 becomes float32.
    """

    printed = COLUMNS

    layers: hooks.Selection | None = shared.calls_option("Calls to draw", "0:, every index", default="0:")
    types: tuple[str, ...] = shared.type_option()
    output: str | None = shared.output_option("sheet")
    channels: drawing.ChannelChoice | None = shared.channels_option(
        "Channels to draw: all, 0-63,100, or top:16, the strongest by mean |value|; also top:16:max, :std or :mean."
        "  [default: all up to 64, else top:64; of single values top:24]"
    )
    scale: drawing.Scale | None = option(
        f"Range of the colours: {drawing.scale_notations('or')}.  [default: channel, with --overlay symmetric]",
        metavar="SCALE",
        parse=drawing.Scale.parse,
        shell_complete=shared.complete_scales,
    )
    overlay: bool = option("Draw each map over the grey image; a large |value| is opaque.")
    alpha: float | None = option(
        f"With --overlay: opacity of the largest |value|, 0 to 1.  [default: {drawing.ALPHA}]",
        metavar="SHARE",
        type=shared.FiniteRange(0, 1),
        needs="overlay",
    )
    cmap: str | None = shared.colour_map_option(
        "Any matplotlib colour map.  [default: viridis, with --scale symmetric RdBu_r]"
    )
    columns: int | None = shared.columns_option("Maps in a row.  [default: a grid with full rows]")
    cell: int | None = shared.cell_option("Smallest side of a drawn map.  [default: 56 or more]")
    plain: bool = option("Draw the grid only: no header, numbers or colour bars.")
    categories: tuple[str, ...] | None = shared.categories_option()
    raw: str | None = shared.out_file(
        "Keep the exact activations too: one as .npy, several as .npz or .safetensors with keys IMAGE/LAYER.",
        writes=check_arrays,
    )

    def draw(self, read: Sequence[images.InputImage]) -> Iterator[Row]:
        scale = self.scale or drawing.Scale.parse("symmetric" if self.overlay else "channel")
        alpha = drawing.ALPHA if self.alpha is None else self.alpha
        overlay = alpha if self.overlay else None
        style = drawing.Style(self.columns, self.cell, self.cmap or scale.cmap, self.plain, overlay)
        net = replace(self.net, categories=shared.categories_of(self.net, self.categories))
        tensors, types = [net.prepare(image) for image in read], self.types or None
        with process.prints_to_standard_error():
            result = drawing.run_and_reduce(
                net, tensors, self.layers or "0:", types, self.channels, scale, keep=self.arrays.path is not None
            )
        self.arrays.expect(sum(len(summary.values) for _, summary in result.summaries))
        frames = drawing.input_frames(net, tensors)
        for call, error in result.without_map:
            note(f"Note: {call.key or call.type} is not drawn: {error.asked}")
        for name in result.did_not_run:
            note(f"Note: {name} did not run")
        if beyond := [call.key for call, summary in result.summaries if _is_beyond(summary, self.channels)]:
            note(f"Note: --channels names channels that do not exist in {listed(beyond, 3)}")
        image = read[0].name
        calls = [call for call, _ in result.summaries]
        names = call_names(calls, self.files.words[image], net.name)
        files = [self.path(name, image, self.is_single and len(names) == 1, calls) for name in names]
        for (call, summary), file in zip(result.summaries, files, strict=True):
            sheet = drawing.draw_call(summary, call, drawing.Origin.of(net, *read), style, frames)
            if sheet.left_out:
                note(f"Note: {call.key}: {sheet.left_out} channels left out of {file}; choose with --channels")
            self.write(sheet.image, file)
            for part, values in summary.values.items():
                key = "/".join(filter(None, (self.files.words[image], call.key, part)))
                self.arrays.keep(key, hooks.as_array(values))
            yield COLUMNS.row(summary, **hooks.CALL.row(call), weights=net.weights, file=file)


def _is_beyond(summary: Any, choice: drawing.ChannelChoice | None) -> bool:
    return choice is not None and any(choice.beyond(part.tiles.channels) for part in summary.parts)
