"""Show where the model looked for a class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hookscope import explain, hooks, scores
from hookscope.cli.fields import option
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import write_picture
from hookscope.cli.shared.picture_run import ANSWER, FRAME, PEAK, ExplainCommand, Explanation, cam_methods
from hookscope.cli.shared.subject import running
from hookscope.columns import Column, Columns, Row
from hookscope.errors import UsageError
from hookscope.findings import counted, listed

COLUMNS = Columns(
    Column("image"),
    Column("index", hide="unknown"),
    Column("layer"),
    Column("type", need=2),
    Column("call", hide="zero"),
    *("order", "method"),
    *ANSWER,
    Column("shape", need=5),
    *PEAK,
    *("weights", "file"),
    Column("low_probability", hide="zero"),
    *FRAME,
)
_SHEET_TARGET, _MOST_CLASSES = scores.Target("top:3"), 20
_CELL = 300  # width of a map on the page of --sheet, in pixels


class Cam(ExplainCommand):
    """Show where MODEL looked when it gave each IMAGE its class.

    \b
    Examples:
      hookscope cam resnet34 cat.jpg
      hookscope cam shapes samples/shapes/star.png
      hookscope cam vgg16 cat.jpg --method layercam --layer features.28 --target 281 -o cam.png
      hookscope cam resnet50 cat.jpg --layer layer2,layer3,layer4 --fuse
      hookscope cam vit_b_16 cat.jpg --method rollout
      hookscope cam resnet50 cat.jpg --target tabby --against 282
      hookscope cam fasterrcnn_resnet50_fpn street.jpg --target box:0 --method layercam
      hookscope cam resnet34 cat.jpg --target top:3 --raw maps.npz --sheet sheet.png

    The command draws a class activation map over each image and writes it as PNG. IMAGE is a file, a folder, a glob, or
    - for standard input. The picture has the size of the image; a small image is enlarged. Parts that the model did not
    see are dark. In a video model each frame of the clip stands beside its map; -o clip.gif or .webp is an animation.

    A row for each map has the layer, the class, its score and probability, and the highest value of the map. peak_x and
    peak_y are the position of that value in pixels of the image; in a video model, of the mean over the frames.

    Without --layer the command takes the last layer with a map that the score depends on, but no pooling layer. If
    --layer is a range, a pattern or `all`, layers without a map are left out. For rollout and attention-gradient
    --layer counts the calls of attention, and the default is the last.

    All maps of an image share one scale. A class with less than 1/50 of the best probability has `low_probability`: a
    note says so, and its map has the scale of the best class. A map with no value above 0 is drawn too, with a note.

    `hookscope compare-maps` draws all methods and measures which suits the model best.

    More in docs/howto: targets, faithfulness, attention.

    \b
    Methods, and how they weight the channels:
      {table}
    """

    printed = COLUMNS
    table = cam_methods

    method: str = shared.method_option(cam_methods, "gradcam", "How to weight the channels.")
    layers: hooks.Selection | None = shared.calls_option(
        "Calls to explain, drawn side by side", "the last call with a usable map"
    )
    types: tuple[str, ...] = shared.type_option(
        shared.COUNTED_TYPES, needs="layers", why="such as --layer all, or -1 for the last layer of that type"
    )
    fuse: bool = option(
        "Join the maps of several layers: the mean, after each is scaled to 0..1.",
        needs="layers",
        why="choose several layers with --layer",
    )
    smooth: bool = option(
        "Average the maps of six variants of the image: it and its mirror image, with values times 0.9, 1 and 1.1."
    )
    sheet: str | None = shared.picture_file(
        "Also write one page of several classes and layers: from --target and --layer, else the three best"
        " classes and the last layers of three resolutions.",
        images=(1, 1),
    )
    batch_size: int | None = option(
        "Images in one forward pass of scorecam and ablationcam.  [default: as many as fit well]", topic="images"
    )

    def check(self) -> None:
        if self.types and self.method in explain.ATTENTION_METHODS:
            raise UsageError(f"--type has no effect on {self.method}", do="--layer counts the calls of attention")
        if self.sheet is not None and self.choice.count > _MOST_CLASSES:
            exists = f"--target is {self.target}"
            raise UsageError(f"--sheet has room for {_MOST_CLASSES} classes", exists, "ask for fewer")
        super().check()

    def explained(self, explanation: Explanation) -> Iterator[Row]:
        computed = maps = _maps(explanation, self, self.layers, explanation.target())
        # a class that the model does not see is drawn on the scale of the best one
        unseen = all(result.prediction.low_probability for result in maps)
        best = _maps(explanation, self, self.layers, explanation.target(scores.Target("top:1"))) if unseen else []
        if self.fuse:
            count = len(explain.maps_by_class(maps))
            if len(maps) == count:
                exists = f"the selection has one: {maps[0].call.key}"
                raise UsageError("--fuse needs several layers", exists, "choose several with --layer")
            joined = explain.fuse_maps([*maps, *best])
            maps, best = joined[:count], joined[count:]
        self.arrays.expect(len(maps))
        if self.sheet is not None:
            _write_sheet(explanation, self, self.sheet, computed)
        groups = explain.maps_by_class(maps)
        for group in groups:
            explanation.note_unseen(group[0].prediction)
            scale_of = [*maps, *best]
            page = explanation.clip(group, scale_of, self.cmap) or explain.draw_cam(
                group, explanation.image, explanation.net, scale_of=scale_of, cmap=self.cmap
            )
            layers = "+".join(result.call.key for result in group).replace(" + ", "+")
            how = self.method + "-smooth" * self.smooth + "-fused" * self.fuse
            what = how + (f"-{layers}" if self.layers else "")
            path = explanation.write(page, what, group[0].prediction, len(groups) == 1)
            for result in group:
                call = result.call
                if reason := explain.why_empty(result) or explain.why_outside(result):
                    explanation.note(f"the map of {call.key} for {result.prediction.name}: {reason}")
                self.arrays.keep(f"{explanation.word}/{call.key}/{result.prediction.key}", result.values)
                place = {"index": call.index, "order": call.order, "type": call.type}
                place |= {"layer": call.name or hooks.MODEL, "call": None if result.fused else call.call}
                yield explanation.row(COLUMNS, result, path, **place)


def _maps(
    explanation: Explanation, options: Cam, layers: hooks.Layers | None, target: Any
) -> list[explain.ClassActivationMap]:
    net, skipped = explanation.net, list[str]()
    with running(net, explanation.inputs), pass_progress() as on_progress:
        maps = explain.class_activation_maps(
            net,
            explanation.inputs,
            layers,
            target,
            options.method,
            types=options.types or None,
            categories=explanation.run.names,
            batch_size=options.batch_size,
            ordered=True,
            smooth=options.smooth,
            on_progress=on_progress,
            on_skip=lambda call, error: skipped.append(call.key),
        )
    if skipped:
        explanation.note(f"left out {counted(len(skipped), 'call')} without a map: {listed(skipped, 3)}")
    return maps


def _write_sheet(explanation: Explanation, options: Cam, sheet: str, maps: list[explain.ClassActivationMap]) -> None:
    """Write the page of several classes and layers; without --layer and --target it chooses both."""
    layers: hooks.Layers | None = options.layers
    if layers is None and options.method not in explain.ATTENTION_METHODS:
        net, inputs = explanation.net, explanation.inputs
        with running(net, inputs):
            layers = explain.landmark_layers(net, inputs, explanation.target(), categories=explanation.run.names)
    if layers is not options.layers or options.target is None:
        maps = _maps(explanation, options, layers, explanation.target(None if options.target else _SHEET_TARGET))
    page = explain.draw_cam(maps, explanation.image, explanation.net, cmap=options.cmap, width=_CELL)
    write_picture(sheet, page)
