"""``hookscope cam``: class activation maps over photographs: where a model looked for a class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import explain as explaining
from hookscope.cli.shared.explain import ExplainOptions, Explanation, answer_fields, explaining_options, peak_fields
from hookscope.cli.shared.options import layer_option, model_argument, type_option, was_given
from hookscope.cli.shared.registries import CommandWithTable, RegistryChoice
from hookscope.errors import UsageError
from hookscope.findings import counted, listed

if TYPE_CHECKING:
    from hookscope.explain import ClassActivationMap
    from hookscope.scores import Target

FIELDS = (
    "image", "layer", "type", "call", "method", "class", "label", "score", "probability", "shape", "max", "peak_x",
    "peak_y", "weights", "file",
)  # fmt: skip
_SHEET_TARGET, _MOST_CLASSES = "top:3", 20


def _methods() -> Iterator[tuple[str, str]]:
    from hookscope.explain import CAM_METHODS

    return ((name, method.summary) for name, method in CAM_METHODS.items())


@click.command("cam", cls=CommandWithTable, table=_methods)
@model_argument()
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path())
@layer_option("Which calls, as in visualize; several are drawn side by side.  [default: the last with a map]")
@type_option
@click.option(
    "--method",
    type=RegistryChoice(lambda: dict(_methods())),
    default="gradcam",
    show_default=True,
    help="How the channels are weighted.",
)
@click.option("--fuse", is_flag=True, help="Join the maps of several layers in one: the mean, each brought to 0..1.")
@click.option(
    "--sheet",
    metavar="FILE",
    type=click.Path(),
    help="Write one page too: the photograph and the maps of the three best classes (or --target) for the last layers"
    " of three resolutions (or --layer).",
)
@click.option(
    "--batch-size",
    metavar="N",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Images in one batch of the methods that run the model once per channel.",
)
@explaining_options("IMAGE/LAYER/CLASS")
def command(model: str, images: tuple[str, ...], **options: Any) -> None:
    """Show where MODEL looked when it gave each IMAGE its class (- reads one from standard input).

    Lays a class activation map over the photograph (at its own size, a small one magnified) and writes it as PNG; what
    the network did not see of the photograph is dark. Prints a row for each map: its layer, class, score and
    probability, its highest value, and where in the photograph that is (in pixels); of a clip the mean over its frames.
    Without --layer it takes the last layer with a map that the score depends on, pooling aside. A map in which nothing
    is above 0 is drawn as such, and a note says so. Of layers chosen by a range, a pattern or `all`, those without a
    map are left out.

    \b
    Methods, and what weights the channels:
      {table}

    \b
    Examples:
      hookscope cam resnet34 cat.jpg
      hookscope cam shapes samples/shapes/star.png
      hookscope cam vgg16 cat.jpg --method layercam --layer features.28 --target 281 -o cam.png
      hookscope cam resnet50 cat.jpg --layer layer2,layer3,layer4 --fuse
      hookscope cam resnet34 cat.jpg --target top:3 --raw maps.npz --sheet sheet.png
    """
    from hookscope.hooks import Selection
    from hookscope.scores import Target

    layers: tuple[str, ...] = options["layers"]
    if layers:
        Selection(layers)
    elif options["fuse"]:
        raise UsageError("--fuse joins the maps of several layers", "none are chosen", "choose them with --layer")
    plan = ExplainOptions.parse(images, options)
    if options["sheet"] is not None:
        _check_sheet(options["sheet"], plan)
    wish = _Wish(
        layers=layers,
        types=options["types"],
        method=options["method"],
        fuse=options["fuse"],
        sheet=options["sheet"],
        sheet_target=plan.target if was_given("target") else Target(_SHEET_TARGET),
        batch_size=options["batch_size"],
    )
    explaining.explain_all(plan, model, options, FIELDS, lambda one: _rows(one, wish))


@dataclass(frozen=True)
class _Wish:
    """What this command alone was asked for, the same for every picture."""

    layers: tuple[str, ...]
    types: tuple[str, ...]
    method: str
    fuse: bool
    sheet: str | None
    sheet_target: Target
    batch_size: int


def _check_sheet(sheet: str, plan: ExplainOptions) -> None:
    """Refuse a place where the sheet cannot go before anything is computed."""
    from hookscope.cli.shared.output_paths import OutputPath

    if len(plan.images) > 1:
        raise UsageError(f"--sheet {sheet} takes one image", f"there are {len(plan.images)}")
    if plan.target.count > _MOST_CLASSES:
        raise UsageError(f"--sheet has room for {_MOST_CLASSES} classes", f"--target is {plan.target}", "ask for fewer")
    where = OutputPath.parse(sheet, plan.images)
    if where.kind != "file":
        raise UsageError(f"--sheet {sheet} is no name of a file", do="give one that ends in .png")
    same = os.path.realpath(sheet) == os.path.realpath(plan.destination.path or os.devnull)
    if same and sheet.lower().endswith(".png"):
        raise UsageError(f"-o and --sheet both write {sheet}", do="give one of them another name")


def _rows(one: Explanation, wish: _Wish) -> Iterator[dict[str, Any]]:
    """Make the maps of one picture, write them, and say a row for each."""
    from hookscope.explain import draw_overlay

    maps = _maps(one, wish, wish.layers or None, one.plan.target)
    groups = _groups(maps, wish.fuse)
    one.plan.raw.expect(sum(map(len, groups)))
    if wish.sheet is not None:
        _write_sheet(one, wish, wish.sheet, maps)
    for group in groups:
        page, about = draw_overlay(one.subject, group, one.plan.cmap, wish.fuse)
        layers = "+".join(found.call.key for found in group).replace(" + ", "+")
        what = wish.method + ("-fused" if wish.fuse else "") + (f"-{layers}" if wish.layers else "")
        file = one.write(page, about, what, group[0].prediction.index, len(groups) == 1)
        for found in group:
            yield _row(one, found, file, wish.fuse)


def _groups(maps: Sequence[ClassActivationMap], fuse: bool) -> list[list[ClassActivationMap]]:
    """The maps class by class, what stands on one page; fused ones are one map.

    Raises:
        UsageError: there is only one to fuse.
    """
    from hookscope.explain import fused

    by_class: dict[int, list[ClassActivationMap]] = {}
    for found in maps:
        by_class.setdefault(found.prediction.index, []).append(found)
    groups = list(by_class.values())
    if not fuse:
        return groups
    if len(groups[0]) == 1:
        asked, exists = "--fuse joins the maps of several layers", f"the selection has one: {maps[0].call.key}"
        raise UsageError(asked, exists, "choose several with --layer")
    return [[fused(group)] for group in groups]


def _row(one: Explanation, found: ClassActivationMap, file: str, fuse: bool) -> dict[str, Any]:
    from hookscope.explain import why_empty

    if reason := why_empty(found):
        one.note(f"the map of {found.call.key} for class {found.prediction.index}: {reason}")
    one.plan.raw.keep(f"{one.word}/{found.call.key}/{found.prediction.index}", found.values)
    still = found.still
    return {
        "image": one.subject.origin.image,
        "layer": found.call.name,
        "type": found.call.type,
        "call": None if fuse else found.call.call,
        "method": found.method,
        **answer_fields(found.prediction),
        "shape": list(found.values.shape),
        "max": float(still.max()),
        **peak_fields(one.subject.peak_in(still)),
        "weights": one.net.weights,
        "file": file,
    }


def _maps(one: Explanation, wish: _Wish, layers: Sequence[str] | None, target: Target) -> list[ClassActivationMap]:
    from hookscope.explain import class_activation_maps
    from hookscope.hooks import class_names, usual_types
    from hookscope.models import model_errors_as_input_errors

    net, inputs = one.net, one.net.inputs(one.tensor)
    types = wish.types or usual_types(map(class_names, net.model.modules()))
    skipped: list[str] = []
    with (
        process.prints_to_standard_error(),
        model_errors_as_input_errors(net.name, inputs),
        pass_progress() as on_progress,
    ):
        maps = class_activation_maps(
            net.model,
            inputs,
            layers,
            target,
            wish.method,
            types=types,
            categories=one.categories,
            batch_size=wish.batch_size,
            on_progress=on_progress,
            on_skip=lambda call, error: skipped.append(call.key),
        )
    if skipped:
        one.note(f"{counted(len(skipped), 'call')} without a map left out: {listed(skipped, 3)}")
    return maps


def _write_sheet(one: Explanation, wish: _Wish, sheet: str, maps: list[ClassActivationMap]) -> None:
    """The page of several classes and layers; what was not chosen is chosen here."""
    from hookscope.drawing import write_png
    from hookscope.explain import draw_sheet, landmark_layers
    from hookscope.models import model_errors_as_input_errors

    layers: Sequence[str] = wish.layers
    if not layers:
        inputs = one.net.inputs(one.tensor)
        with process.prints_to_standard_error(), model_errors_as_input_errors(one.net.name, inputs):
            layers = landmark_layers(one.net.model, inputs, one.plan.target, categories=one.categories)
    if layers != wish.layers or wish.sheet_target != one.plan.target:
        maps = _maps(one, wish, layers, wish.sheet_target)
    page, about = draw_sheet(one.subject, maps, one.plan.cmap)
    write_png(page, sheet, about)
