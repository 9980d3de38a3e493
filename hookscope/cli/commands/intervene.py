"""``hookscope intervene``: change activations or weights in one pass, and see what it does to the answer."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from hookscope.cli import process
from hookscope.cli.commands.ablate import ablate
from hookscope.cli.output import rows as output
from hookscope.cli.output.effect_rows import (
    CLASS_FIELDS,
    FIELDS,
    LEAST_NEEDED,
    Row,
    class_rows,
    layer_row,
    target_lines,
)
from hookscope.cli.output.report import json_object
from hookscope.cli.output.table_width import fitting, terminal_columns
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.intervention_options import InterventionOptions, ModelAndImages, at_option, interventions_of
from hookscope.cli.shared.model import load_net
from hookscope.cli.shared.options import (
    chosen_format,
    complete_layers,
    format_option,
    layer_option,
    model_argument,
    net_options,
    type_option,
    was_given,
)
from hookscope.cli.shared.registries import CommandWithTable
from hookscope.errors import UsageError
from hookscope.findings import counted, listed

if TYPE_CHECKING:
    from hookscope.interventions import Effect
    from hookscope.models import LoadedModel


def _interventions() -> Iterator[tuple[str, str]]:
    from hookscope.interventions import help_rows

    return help_rows()


@click.command("intervene", cls=CommandWithTable, table=_interventions)
@model_argument()
@click.argument("images", metavar="IMAGE", nargs=-1, required=True, type=click.Path())
@at_option
@click.option(
    "--ablate-each",
    "ablate",
    metavar="SEL",
    multiple=True,
    shell_complete=complete_layers,
    help="Set each channel of these calls to 0 in turn, and rank the channels by the score that is lost.",
)
@click.option(
    "--top",
    metavar="N",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Number of channels that --ablate-each shows.",
)
@target_option(help="Whose score is shown")
@categories_option
@layer_option(
    "Which calls are compared, and drawn by --grid: 30, 0:10, 'layer4.*', fc, all.  [default: changed layers and every"
    " layer with a weight of two or more dimensions, from the first change on]"
)
@type_option
@click.option("--grid", metavar="FILE", type=click.Path(), help="Draw before, after and difference: a PNG file.")
@click.option("--classes", "classes", is_flag=True, help="Print only classes, not layers, in a table, tsv and csv.")
@click.option(
    "--batch-size",
    metavar="N",
    type=click.IntRange(1),
    help="Channels in one pass of --ablate-each.  [default: as many as fit in 16 MiB, 8 to 256]",
)
@net_options
@format_option
def command(model: str, images: tuple[str, ...], **options: Any) -> None:
    """Change what flows through MODEL on IMAGE, and show the effect.

    IMAGE is a file, or - for standard input; optical flow takes two. Runs the model without and with the interventions
    of --at. Prints the five best classes of both passes with their scores, and how far the activation of each later
    layer moved: relative_l2 is the norm of the difference divided by the norm before, cosine the cosine of the angle
    between both activations. index counts as in list-layers. Nothing is changed on disk.

    An intervention is WORD or WORD:PARAMETER=VALUE,...; SEL is a layer selection or the name of a parameter. WORD with
    its own parameters and their defaults:

    \b
      {table}

    freeze and prune act on parameters: SEL names a parameter, or a layer for all its parameters. The others act on
    activations, or on the values of a parameter that SEL names. They also take channels=0-31,40 (filters of a
    parameter), positions=0-9x5-14 (rows, columns) and on=output or input. dropout and dropblock act although the model
    is in eval mode: when is always, not train. Interventions are applied in the given order. --seed seeds random
    weights and the random numbers of interventions.

    A table shows classes and layers, or with --classes only classes; json has both. tsv and csv hold the layers, or
    with --classes the classes; the field "row" of ndjson says which. --ablate-each prints channels: worth is the score
    before minus the score without the channel.

    \b
    Examples:
      hookscope intervene resnet34 cat.jpg --at layer3 dropblock:p=0.1,block_size=7 --seed 1
      hookscope intervene vgg16 cat.jpg --at features.28 'zero:channels=0-31' --at features.0 noise:std=0.1
      hookscope intervene resnet34 cat.jpg --at layer4.2.conv2 patch:from=rocket.jpg --grid patched.png
      hookscope intervene resnet34 cat.jpg --at 'layer4*.weight' quantize:bits=4,per_channel=true --classes
      hookscope intervene resnet34 cat.jpg --ablate-each layer4.2.conv2 --top 20
    """
    wishes = _judged(images, options)
    photographs = ImageFiles(images)
    photographs.read_first()
    names = ("weights", "seed", "device", "preprocess", "input_size")
    net = load_net(model, *(options[name] for name in names))
    read = photographs.read_together(net)
    pictures = [net.prepare(picture) for picture in read]
    one = ModelAndImages(net, read, pictures, net.inputs(*pictures), _types(net, options))
    with process.prints_to_standard_error():
        changes = interventions_of(net, wishes, one.types)
    if options["ablate"]:
        ablate(one, changes, options)
    else:
        _compare(one, wishes, changes, options)


def _judged(images: Sequence[str], options: Mapping[str, Any]) -> list[InterventionOptions]:
    """Check all options before a model is loaded."""
    from hookscope.hooks import Selection

    wishes = [InterventionOptions.parse(where, text) for where, text in options["wishes"]]
    for name in ("layers", "ablate"):
        if options[name]:
            Selection(options[name])
    several = options["target"].count > 1
    if not wishes and not options["ablate"]:
        asked = "intervene needs --at or --ablate-each"
        raise UsageError(asked, do="such as --at layer3 zero:channels=0-31; --help lists the interventions")
    if options["ablate"] and (options["grid"] or options["layers"] or options["classes"]):
        raise UsageError("--ablate-each prints only channels", do="leave --grid, --layer and --classes out")
    for name, option in (("top", "--top"), ("batch_size", "--batch-size")):
        if not options["ablate"] and was_given(name):
            raise UsageError(f"{option} needs --ablate-each")
    if options["ablate"] and several:
        raise UsageError(f"--ablate-each needs one class, got --target {options['target']}")
    if len(images) > 2:
        raise UsageError(f"expected one image, or two for optical flow, got {len(images)}")
    if options["grid"] is not None:
        _check_grid(options["grid"], images)
    return wishes


def _check_grid(path: str, images: Sequence[str]) -> None:
    from hookscope.cli.shared.output_paths import OutputPath, refuse_input

    where = OutputPath.parse(path, images)
    if where.kind != "file":
        raise UsageError(f"--grid {path} is not a file name", do="give a name that ends in .png")
    refuse_input(path, images)


def _types(net: LoadedModel, options: Mapping[str, Any]) -> Sequence[str]:
    from hookscope.hooks import class_names, usual_types

    types: Sequence[str] = options["types"] or usual_types(map(class_names, net.model.modules()))
    return types


def _asks_for_classes(options: Mapping[str, Any]) -> bool:
    """Whether classes were asked for; a model without classes is then an error."""
    return was_given("target") or options["classes"]


def _compare(
    one: ModelAndImages,
    wishes: Sequence[InterventionOptions],
    changes: list[tuple[str, Any]],
    options: Mapping[str, Any],
) -> None:
    """Run both passes, and report and draw the difference."""
    from hookscope.interventions import intervention_effect
    from hookscope.models import model_errors_as_input_errors

    asked = _asks_for_classes(options)
    keep = _kept(one, wishes, options) if options["grid"] is not None else None
    with process.prints_to_standard_error(), model_errors_as_input_errors(one.net.name, one.inputs):
        effect = intervention_effect(
            one.net.model,
            one.inputs,
            changes,
            options["layers"] or None,
            one.types,
            seed=options["seed"],
            keep=keep,
        )
    classes = _class_rows(one, effect, options, asked)
    _note_idle(wishes, effect)
    if effect.missing:
        output.note(f"Note: {counted(len(effect.missing), 'call')} ran in only one pass: {listed(effect.missing, 3)}")
    if options["grid"] is not None:
        _draw(one, wishes, effect, options)
    _report(one, wishes, effect, classes, options)


def _note_idle(wishes: Sequence[InterventionOptions], effect: Effect) -> None:
    if not effect.changed:
        output.note("Note: nothing was changed")
    idle = [layer.call.key for layer in effect.layers if layer.changed and layer.relative_l2 == 0]
    if idle:
        output.note(f"Note: unchanged output: {listed(idle, 6)}")
    for word in sorted({wish.spec.word for wish in wishes if not wish.spec.kind.changes_forward}):
        output.note(f"Note: {word} has no effect on a forward pass: it acts in training")


def _kept(one: ModelAndImages, wishes: Sequence[InterventionOptions], options: Mapping[str, Any]) -> list[str]:
    """What ``--grid`` draws: the layers chosen, else those that are changed."""
    if options["layers"]:
        return list(options["layers"])
    parameters = dict(one.net.model.named_parameters(remove_duplicate=False))
    return [wish.where.rpartition(".")[0] if wish.where in parameters else wish.where for wish in wishes]


def _class_rows(one: ModelAndImages, effect: Effect, options: Mapping[str, Any], asked: bool) -> list[dict[str, Any]]:
    """The classes of both passes; none, and a note, where the model has no scores and nobody asked for them."""
    from hookscope.scores import check_categories, class_scores, one_picture, without_scores

    if not asked and (why := without_scores(effect.before, one.net.family, one.net.name)):
        output.note(f"Note: {why}: layers alone")
        return []
    categories = categories_of(one.net, options["categories"])
    before, after = (one_picture(class_scores(answer, one.net.name)) for answer in (effect.before, effect.after))
    if categories:
        check_categories(categories, len(before), one.net.name)
    return class_rows(before, after, options["target"], categories, one.net.weights)


def _draw(
    one: ModelAndImages, wishes: Sequence[InterventionOptions], effect: Effect, options: Mapping[str, Any]
) -> None:
    """Write the page of ``--grid``; where nothing was changed there is nothing to draw."""
    from hookscope.drawing import Origin, input_size_of, write_png
    from hookscope.interventions import Cause, draw_effect

    if not effect.changed:
        output.note(f"Note: {options['grid']} is not written")
        return
    net, picture = one.net, one.read[0]
    origin = Origin(net.name, net.weights, picture.name, picture.sha256, net.preprocess.describe())
    cause = Cause([f"{wish.where} {wish.spec.text}" for wish in wishes], options["seed"])
    page, about = draw_effect(effect.layers, origin, cause, net.model, input_size_of(one.pictures[0]))
    write_png(page, options["grid"], about)


def _report(
    one: ModelAndImages,
    wishes: Sequence[InterventionOptions],
    effect: Effect,
    classes: Sequence[dict[str, Any]],
    options: Mapping[str, Any],
) -> None:
    layers = [layer_row(layer, one.net.weights) for layer in effect.layers]
    format, stream = chosen_format(options["format"]), process.standard_output()
    if format == "table":
        _report_tables(effect, classes, [] if options["classes"] else layers, stream)
    elif format == "json":
        done = [{"at": wish.where, "word": wish.spec.text} for wish in wishes]
        about = {"model": one.net.name, "weights": one.net.weights, "seed": options["seed"]}
        about |= {"image": [picture.name for picture in one.read], "interventions": done, "changed": effect.changed}
        stream.write(json_object({**about, "classes": classes, "layers": layers}))
        stream.flush()
    elif format == "ndjson":
        output.write_rows([{"row": "class", **row} for row in classes], ("row", *CLASS_FIELDS), format, stream)
        output.write_rows([{"row": "layer", **row} for row in layers], ("row", *FIELDS), format, stream)
    elif options["classes"]:
        output.write_rows(classes, CLASS_FIELDS, format, stream)
    else:
        output.write_rows(layers, FIELDS, format, stream)


def _report_tables(effect: Effect, classes: Sequence[Row], layers: Sequence[Row], stream: TextIO) -> None:
    """Classes with what became of the target, then layers with what was changed."""
    done = f"changed: {listed(list(effect.changed), 6)}" if effect.changed else "nothing was changed"
    if classes:
        lines = target_lines(classes)
        _write_table(classes, CLASS_FIELDS, {"weights"}, lines if layers else [*lines, done], stream)
    if classes and layers:
        stream.write("\n")
    if layers:
        unusual = {name for name in ("call", "nonfinite") if not any(row[name] for row in layers)}
        unusual |= {"index"} if all(row["index"] is None for row in layers) else set()
        _write_table(layers, FIELDS, {"weights", *unusual}, [done], stream)


def _write_table(
    rows: Sequence[Row], fields: Sequence[str], without: Container[str], lines: Sequence[str], stream: TextIO
) -> None:
    kept = [name for name in fields if name not in without]
    kept = fitting(rows, kept, LEAST_NEEDED, terminal_columns(stream))
    output.write_rows([{name: row[name] for name in kept} for row in rows], kept, "table", stream, lines)
