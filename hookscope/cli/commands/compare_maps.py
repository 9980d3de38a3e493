"""Measure which method of cam suits a model best."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hookscope import explain, faithfulness, hooks
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.picture_run import ExplainCommand, Explanation, cam_methods
from hookscope.cli.shared.subject import caption_of, running
from hookscope.columns import Column, Columns, Row
from hookscope.errors import InputError, UsageError, nearest
from hookscope.findings import counted, listed

_NUMBERS = Columns(
    Column("road"),
    Column("insertion"),
    Column("deletion"),
    Column("drop", need=9),
    Column("increase", need=6, hide="unknown"),
    Column("points", need=7, hide="unknown"),
    Column("in_box", need=8, hide="unknown"),
    Column("randomized", need=10, hide="unknown"),
    Column("passes", need=1),
)
MAPS = Columns(
    Column("image"),
    Column("map", lambda measured: measured.name),
    Column("class", lambda measured: measured.prediction.index, need=3),
    Column("label", lambda measured: measured.prediction.label, need=4, hide="unknown"),
    Column("target", lambda measured: measured.prediction.target or None, need=5, hide="unknown"),
    Column("score", lambda measured: measured.prediction.score, need=2),
    Column("probability", lambda measured: measured.prediction.probability, need=2, hide="random"),
    *_NUMBERS,
    Column("weights", where="rows"),
    Column("file"),
)
MEANS = Columns(
    Column("map", lambda scores: scores.name),
    _NUMBERS[0],
    Column("low", lambda scores: scores.interval and scores.interval[0], hide="unknown"),
    Column("high", lambda scores: scores.interval and scores.interval[1], hide="unknown"),
    *_NUMBERS[1:],
    Column("behind_low", lambda scores: scores.behind and scores.behind[0], where="rows"),
    Column("behind_high", lambda scores: scores.behind and scores.behind[1], where="rows"),
    Column("within_noise", where="rows"),
)
VERDICT = Columns("by", "images", "passes", "sentences")


def _parse_methods(text: str) -> tuple[str, ...]:
    known, chosen = dict(cam_methods()), tuple(filter(None, map(str.strip, text.split(","))))
    for name in chosen:
        if name not in known:
            raise UsageError(f"no method '{name}'", nearest(name, list(known)), f"there are {', '.join(known)}")
    return tuple(dict.fromkeys(chosen))


class CompareMaps(ExplainCommand):
    """Draw the class activation maps of all methods side by side, and measure which suit MODEL best.

    \b
    Examples:
      hookscope compare-maps resnet50 photos/
      hookscope compare-maps resnet50 cat.jpg --methods gradcam,layercam --target tabby
      hookscope compare-maps resnet50 cat.jpg --methods gradcam --map mine.npy
      hookscope compare-maps resnet50 photos/ --boxes boxes.json --format json

    The command writes one page for each image, with two baselines beside the methods, and names the maps that suit the
    model best. It needs 10 images to tell maps apart. The numbers say how the score changes when the important pixels
    are removed or shown. road, insertion: higher is better; deletion, drop: lower is better; randomized: near 0 is
    better. docs/howto/faithfulness.md explains them.
    """

    methods: tuple[str, ...] | None = option(
        "Methods to compare, comma separated; `hookscope help cam` lists them.  [default: all]",
        metavar="LIST",
        parse=_parse_methods,
    )
    map: tuple[str, ...] = shared.in_file(
        "Measure this map too: .npy, .npz, .png, or a folder of them. It covers the image or the input of the network."
        " Repeatable.",
        multiple=True,
    )
    boxes: dict[str, Any] | None = shared.in_file(
        'Where the objects are, as JSON: {"cat.jpg": [left, top, right, bottom]}, in pixels of the image. The'
        " result says how much of each map lies inside.",
        parse=lambda path: faithfulness.read_boxes(path),
    )
    layers: hooks.Selection | None = shared.calls_option("Calls to explain", "the last call with a usable map")
    types: tuple[str, ...] = shared.type_option(shared.COUNTED_TYPES, needs="layers")
    batch_size: int | None = option("Images in one forward pass.  [default: as many as fit well]", topic="images")

    def check(self) -> None:
        if self.choice.count > 1:
            raise UsageError("compare-maps explains one class", f"--target names {self.choice.count}", "name one")
        for path in self.map:
            if not os.path.exists(path):
                raise UsageError(f"--map {path} does not exist", do="check the path")
            if not os.path.isdir(path) and os.path.splitext(path)[1].lower() not in faithfulness.MAP_SUFFIXES:
                raise UsageError(f"--map {path} is not a map", do=f"save it as {', '.join(faithfulness.MAP_SUFFIXES)}")
            if len(self.images) > 1 and os.path.splitext(path)[1].lower() in (".npy", ".png"):
                do = "give a folder of maps, named as the images, or a .npz file of --raw"
                raise UsageError(f"--map {path} is the map of one image", f"there are {len(self.images):,} images", do)
        super().check()

    def run(self) -> int:
        with self.arrays:
            done: list[Any] = list(self.files.rows(self.net, self.draw))
            if done and self.place.kind != "stdout":
                result = faithfulness.compare_maps([measured for measured, _ in done])
                self.print(_report(result, [row for _, rows in done for row in rows], caption_of(self.net)))
        return self.files.status

    def explained(self, explanation: Explanation) -> Iterator[tuple[Sequence[faithfulness.Faithfulness], list[Row]]]:
        measured = _measured(explanation, self)
        answer = measured[0].prediction
        explanation.note_unseen(answer)
        self.arrays.expect(len(measured))
        for row in measured:
            self.arrays.keep(f"{explanation.word}/{row.name}/{answer.key}", row.values)
        page = faithfulness.draw_faithfulness(measured, explanation.image, explanation.net, cmap=self.cmap)
        path = explanation.write(page, "compare" + (f"-{self.layers}" if self.layers else ""), answer, True)
        facts = {"image": explanation.source.origin.image, "weights": explanation.net.weights, "file": path}
        yield measured, list(MAPS.rows(measured, **facts))


def _measured(explanation: Explanation, options: CompareMaps) -> Sequence[faithfulness.Faithfulness]:
    net, source = explanation.net, explanation.source
    size = (int(explanation.tensor.shape[-2]), int(explanation.tensor.shape[-1]))
    taken, maps = {*explain.CAM_METHODS, *explain.ATTENTION_METHODS, *faithfulness.BASELINES}, dict[str, Any]()
    for path in options.map:
        by_name = faithfulness.read_maps(path, explanation.word)
        for name, values in by_name.items():
            free = name if name not in {*maps, *taken} else f"{name} of {os.path.basename(path)}"
            maps[free] = faithfulness.over_input(values, source.photograph.size, source.box, size)
    skipped: dict[str, list[str]] = {}
    with running(net, explanation.inputs), pass_progress() as on_progress:
        measured = faithfulness.cam_faithfulness(
            net,
            explanation.inputs,
            options.layers,
            explanation.target(),
            options.methods,
            maps=maps,
            types=options.types or None,
            categories=options.names,
            batch_size=options.batch_size,
            boxes=_boxes(explanation, options.boxes, size),
            on_progress=on_progress,
            on_skip=lambda method, error: skipped.setdefault(str(error), []).append(method),
        )
    for reason, names in skipped.items():
        explanation.note(f"without {listed(names)}: {reason}")
    return measured


def _boxes(explanation: Explanation, boxes: dict[str, Any] | None, size: tuple[int, int]) -> list[tuple[float, ...]]:
    """The boxes of the image in pixels of the network's input."""
    if boxes is None:
        return []
    name = explanation.image.name
    own_boxes = boxes.get(name, boxes.get(os.path.basename(name)))
    if own_boxes is None:
        raise InputError(f"--boxes has no box of {name}", f"it has boxes of {', '.join(list(boxes)[:3])}", "add it")
    shares = [(*explanation.source.in_input(*box[:2]), *explanation.source.in_input(*box[2:])) for box in own_boxes]
    return [tuple(share * side for share, side in zip(box, 2 * size[::-1], strict=True)) for box in shares]


def _report(result: faithfulness.MapComparison, rows: Sequence[Row], caption: Mapping[str, Any]) -> Report:
    """The verdict and the means over images; of one image the table has its rows, the best first."""
    single, order = result.images == 1, [scores.name for scores in result.maps]
    passes = sum(scores.passes for scores in result.maps)
    shown = sorted(rows, key=lambda row: order.index(row["map"])) if single else rows
    verdict = {"by": result.by, "images": result.images, "passes": passes, "sentences": result.verdict}
    total = f"{counted(result.images, 'image')}, {counted(len(result.maps), 'map')}: {passes:,} passes to measure them"
    sections = [
        Section([verdict], VERDICT, "verdict", in_table=False, in_flat=False),
        Section(shown, MAPS, "measured_map", in_table=single),
        Section(MEANS.rows(result.maps), MEANS, "map", in_table=not single, in_flat=False),
    ]
    return Report(
        sections,
        totals=[total],
        flat_note=f"Note: {' '.join(result.verdict)}",
        caption=caption,
        lead=[" ".join(result.verdict)],
    )
