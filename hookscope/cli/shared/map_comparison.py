"""``cam --compare`` and ``--map``: maps side by side on one page, each with its faithfulness."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import click

from hookscope import explain, faithfulness, hooks
from hookscope.cli.output.map_rows import MAPS, comparison_report
from hookscope.cli.output.report import Report
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.array_file import ArrayFile
from hookscope.cli.shared.explain import ExplainOptions, Explanation, explain_images
from hookscope.cli.shared.model import ModelOptions, caption_of, running
from hookscope.cli.shared.output_paths import OutputPath
from hookscope.cli.shared.picture_run import PictureRun
from hookscope.columns import Row
from hookscope.errors import InputError, UsageError, nearest
from hookscope.findings import listed

_OTHER_PAGES = {"fuse": "--fuse", "sheet": "--sheet"}


@dataclass(frozen=True)
class MapComparisonOptions:
    """``--compare`` and the options about it."""

    compare: bool
    methods: tuple[str, ...] | None
    maps: tuple[str, ...]
    boxes: dict[str, Any] | None

    def check(self, paths: Sequence[str], classes: int) -> bool:
        """Whether maps are compared; refuse what does not go together, before a model is loaded."""
        option = "--compare" if self.compare else "--map"
        if not (self.compare or self.maps):
            if self.methods is not None or self.boxes is not None:
                raise UsageError(
                    f"--{'methods' if self.boxes is None else 'boxes'} needs --compare", do="add --compare"
                )
            return False
        if other := next((text for name, text in _OTHER_PAGES.items() if shared.was_given(name)), None):
            raise UsageError(f"{option} takes no {other}", do="leave one of them out")
        if self.compare and shared.was_given("method"):
            raise UsageError("--compare takes no --method", do="use --methods gradcam,layercam")
        if classes > 1:
            raise UsageError(f"{option} explains one class", f"--target names {classes}", "name one")
        for path in self.maps:
            if not os.path.exists(path):
                raise UsageError(f"--map {path} does not exist", do="check the path")
            if not os.path.isdir(path) and os.path.splitext(path)[1].lower() not in faithfulness.MAP_SUFFIXES:
                raise UsageError(f"--map {path} is no map", do=f"save it as {', '.join(faithfulness.MAP_SUFFIXES)}")
            if len(paths) > 1 and os.path.splitext(path)[1].lower() in (".npy", ".png"):
                do = "give a folder of maps, named as the images, or a .npz file of --raw"
                raise UsageError(f"--map {path} is the map of one image", f"there are {len(paths):,} images", do)
        return True


def comparison_options(methods: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of `MapComparisonOptions`, which the command gets as ``comparison``."""
    names = [each.name for each in fields(MapComparisonOptions)]

    def parse_methods(text: str) -> tuple[str, ...]:
        known, chosen = dict(methods()), tuple(filter(None, map(str.strip, text.split(","))))
        for name in chosen:
            if name not in known:
                raise UsageError(f"no method '{name}'", nearest(name, list(known)), f"there are {', '.join(known)}")
        return tuple(dict.fromkeys(chosen))

    options: list[Callable[[Any], Any]] = [
        click.option(
            "--compare",
            is_flag=True,
            help="Draw all methods side by side, and measure how well each map tells which pixels matter to the score.",
        ),
        click.option(
            "--methods",
            metavar="LIST",
            callback=shared.parsed(parse_methods),
            help="Methods that --compare draws, comma separated.  [default: all]",
        ),
        click.option(
            "--map",
            "maps",
            metavar="FILE",
            multiple=True,
            type=click.Path(),
            help="Measure this map too: .npy, .npz, .png, or a folder of them. It covers the photograph or the input"
            " of the network. Repeatable.",
        ),
        click.option(
            "--boxes",
            metavar="FILE",
            callback=shared.parsed(lambda path: faithfulness.read_boxes(path)),
            type=click.Path(),
            help='Where the objects are, as JSON: {"cat.jpg": [left, top, right, bottom]}, in pixels of the'
            " photograph. --compare says how much of each map lies inside.",
        ),
    ]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_comparison(**values: Any) -> Any:
            return command(comparison=MapComparisonOptions(**{name: values.pop(name) for name in names}), **values)

        return shared.apply_options(options, with_comparison)

    return add


@dataclass(frozen=True)
class ComparableOptions(ExplainOptions):
    """The options of a command that can compare its maps."""

    method: str
    batch_size: int | None
    comparison: MapComparisonOptions


def compare_images(
    model: ModelOptions,
    paths: Sequence[str],
    options: ComparableOptions,
    places: tuple[OutputPath, ArrayFile],
    types: Sequence[str],
    layers: hooks.Selection | None,
) -> None:
    """Measure the maps of each image, write its page, and print the verdict over all images."""
    rows = list[Row]()

    def draw(explanation: Explanation) -> Iterator[Sequence[faithfulness.Faithfulness]]:
        measured = _measured(explanation, options, types, layers)
        answer = measured[0].prediction
        explanation.note_unseen(answer)
        explanation.raw.expect(len(measured))
        for each in measured:
            explanation.raw.keep(f"{explanation.word}/{each.name}/{answer.key}", each.values)
        page = faithfulness.draw_faithfulness(measured, explanation.image, explanation.net, cmap=options.cmap)
        path = explanation.write(page, "compare" + (f"-{layers}" if layers else ""), answer, True)
        facts = {"image": explanation.source.origin.image, "weights": explanation.net.weights, "file": path}
        rows.extend(MAPS.row(each, **facts) for each in measured)
        yield measured

    def together(measured: list[Sequence[faithfulness.Faithfulness]], run: PictureRun) -> Report:
        if not measured:
            run.files.exit()
        return comparison_report(faithfulness.compare_maps(measured), rows, caption_of(run.net))

    explain_images(model, paths, options, places, MAPS, draw, types, layers, together)


def _measured(
    explanation: Explanation, options: ComparableOptions, types: Sequence[str], layers: hooks.Selection | None
) -> Sequence[faithfulness.Faithfulness]:
    net, chosen, source = explanation.net, options.comparison, explanation.source
    size = (int(explanation.tensor.shape[-2]), int(explanation.tensor.shape[-1]))
    taken, maps = {*explain.CAM_METHODS, *explain.ATTENTION_METHODS, *faithfulness.BASELINES}, dict[str, Any]()
    for path in chosen.maps:
        found = faithfulness.read_maps(path, explanation.word)
        for name, values in found.items():
            free = name if name not in {*maps, *taken} else f"{name} of {os.path.basename(path)}"
            maps[free] = faithfulness.over_input(values, source.photograph.size, source.box, size)
    methods = chosen.methods if chosen.compare else (options.method,)
    skipped: dict[str, list[str]] = {}
    with running(net, explanation.inputs), pass_progress("images") as on_progress:
        measured = faithfulness.cam_faithfulness(
            net.model,
            explanation.inputs,
            layers,
            explanation.target(),
            methods,
            maps=maps,
            types=types or None,
            categories=explanation.categories,
            batch_size=options.batch_size,
            boxes=_boxes(explanation, chosen.boxes, size),
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
    found = boxes.get(name, boxes.get(os.path.basename(name)))
    if found is None:
        raise InputError(f"--boxes has no box of {name}", f"it has those of {', '.join(list(boxes)[:3])}", "add it")
    shares = [(*explanation.source.in_input(*box[:2]), *explanation.source.in_input(*box[2:])) for box in found]
    return [tuple(share * side for share, side in zip(each, 2 * size[::-1], strict=True)) for each in shares]
