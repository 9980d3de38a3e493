"""``hookscope gradients``: one backward pass, what every layer and parameter gets of it, and what is wrong."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.output.gradient_rows import FIELDS, PARAMETER_FIELDS, layer_row, parameter_row, table_fields, totals
from hookscope.cli.output.report import write_report
from hookscope.cli.output.table_width import terminal_columns
from hookscope.cli.shared.class_options import categories_of, categories_option, target_option
from hookscope.cli.shared.images import ImageFiles
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
from hookscope.cli.shared.threshold_options import chosen_thresholds, threshold_options
from hookscope.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.findings import Finding
    from hookscope.gradients import GradientChanges, GradientReport, GradientThresholds
    from hookscope.images import InputImage
    from hookscope.models import LoadedModel
    from hookscope.scores import Loss


@click.command("gradients")
@model_argument()
@click.argument("images", metavar="IMAGE", nargs=-1, required=True, type=click.Path())
@layer_option(
    "Which calls: 30, -1, 0:10, conv1, 'layer4.*', 're:conv[12]$', name#1, all; repeatable, comma separated. Of"
    " parameters, those in these layers are shown.  [default: every layer with a weight of two or more dimensions:"
    " convolutions, linear layers; with --type: all of that type]"
)
@type_option
@click.option(
    "--loss",
    "loss",
    type=click.Choice(["score", "cross-entropy", "mse"]),
    default="score",
    show_default=True,
    help="What is differentiated: the score of the class, the cross-entropy with it as label, or the mean square of all"
    " that the model puts out (the squared error against zeros), which needs no classes.",
)
@target_option(help="Which class")
@categories_option
@click.option("--clip-value", metavar="X", type=float, help="Clip every value of the parameters' gradients to ±X.")
@click.option("--scale", metavar="X", type=float, help="Multiply the gradients by X; -1 turns them round.")
@click.option(
    "--clamp-sign",
    type=click.Choice(["positive", "negative"]),
    help="Let only what has this sign of the gradients go on; the rest is 0.",
)
@click.option("--clip-norm", metavar="X", type=float, help="Clip the norm of all parameters' gradients together to X.")
@click.option(
    "--freeze",
    metavar="SEL",
    multiple=True,
    shell_complete=complete_layers,
    help="Zero the gradients of the parameters in these layers, or of one parameter: layer1, 'bn*', fc.bias;"
    " repeatable, comma separated. These are names: 2 is the layer called 2, not an index.",
)
@click.option("--detect-anomaly", is_flag=True, help="Name the operation behind the first NaN; runs a second pass.")
@click.option("--parameters", is_flag=True, help="In tsv and csv, rows of parameters instead of layers.")
@click.option("--plot", metavar="FILE", type=click.Path(), help="Draw the gradient's way: a PNG, SVG or PDF file.")
@threshold_options("gradients")
@net_options
@format_option
def command(model: str, images: tuple[str, ...], **options: Any) -> None:
    """Follow the gradient of a loss through MODEL on IMAGE: whether it arrives, and how large.

    IMAGE is one file, or - for standard input; optical flow takes two. One forward and one backward pass on the
    untouched model, in eval mode: no dropout, and BatchNorm by its running statistics. A row for each layer call has
    the shapes and norms of the gradient that it gets (grad_output) and gives on (grad_input), and of the former the
    mean absolute value, the share of zeros, and counts of NaN and Inf. A row for each parameter has the same of its
    gradient. index counts as in list-layers, Conv2d unless --type says otherwise; other layers have none.

    There are two ratios: of a layer, the norm of the gradient that it gets by the norm of its activation; of a
    parameter, the norm of its gradient by its own norm. Findings go by the latter, of weights with two or more
    dimensions: it says how far a step moves the weight. Every layer and parameter beyond a threshold has the name of
    the finding in its row; a chain of them is told once, at the layer nearest to the loss, with the worst of it.

    \b
      vanishing-gradient  the ratio of a weight is below --vanishing, or all is 0
      exploding-gradient  NaN, Inf, or the ratio of a weight is above --exploding
      no-gradient         none arrives, and why: frozen, unused, detached, no graph

    Findings are no failure: the status is 0. A table shows layers and parameters, in the columns that fit, and json
    both whole; tsv and csv the layers, or with --parameters the parameters; ndjson says by "row" which.

    --freeze, --scale, --clamp-sign, --clip-value and --clip-norm show what an optimizer would see: norm_after, beside
    the norm before. They are applied in this order. Frozen layers let gradients through.

    \b
    Examples:
      hookscope gradients resnet50 cat.jpg --target tabby --layer 'layer3*'
      hookscope gradients resnet34 cat.jpg --clip-norm 1.0 --plot flow.png
      hookscope gradients vgg16 cat.jpg --loss cross-entropy --target 281 --freeze features --parameters
      hookscope gradients nets.py:mine cat.jpg --detect-anomaly --format json | jq '.findings'
      hookscope gradients raft_small first.png second.png --loss mse
    """
    from hookscope.gradients import GradientChanges, GradientThresholds, select_parameters

    _check(images, options)
    changes = GradientChanges(
        options["freeze"], options["clip_value"], options["clip_norm"], options["scale"], options["clamp_sign"]
    )
    thresholds = GradientThresholds(**chosen_thresholds("gradients", options))
    photographs = ImageFiles(images)
    photographs.read_first()
    names = ("weights", "seed", "device", "preprocess", "input_size")
    net = load_net(model, *(options[name] for name in names))
    if options["loss"] != "mse":
        from hookscope.scores import check_family

        check_family(net.family, net.name)
    loss = _loss(net, options)
    read = photographs.read_together(net)
    pictures = [net.prepare(picture) for picture in read]
    report, findings = _measure(net, pictures, loss, changes, thresholds, options)
    lines = totals(report, loss.name, changes.describe())
    shown = select_parameters(report, net.model, options["layers"] or "all")
    if options["plot"] is not None:
        _draw(options["plot"], net, shown, findings, thresholds, lines, _origin(net, read, options))
    _report(net, shown, findings, thresholds, lines, options)


def _check(images: Sequence[str], options: Mapping[str, Any]) -> None:
    """Whatever can be known to fail is told before a model is loaded."""
    from hookscope.hooks import Selection

    if options["layers"]:
        Selection(options["layers"])
    if options["loss"] == "mse" and was_given("target"):
        raise UsageError("--loss mse has no target: it is held against zeros", do="leave --target out")
    if len(images) > 2:
        raise UsageError("gradients takes one image, or two for optical flow", f"there are {len(images)}")
    if options["plot"] is not None:
        from hookscope.cli.shared.output_paths import refuse_input
        from hookscope.drawing import plot_suffix
        from hookscope.system import check_writable

        plot_suffix(options["plot"])
        check_writable(options["plot"])
        refuse_input(options["plot"], images)


def _loss(net: LoadedModel, options: Mapping[str, Any]) -> Loss:
    from hookscope.scores import Loss

    categories = categories_of(net, options["categories"])
    if options["loss"] != "mse":
        options["target"].check(categories)
    return Loss(options["loss"], options["target"], categories)


def _measure(
    net: LoadedModel,
    pictures: list[Tensor],
    loss: Loss,
    changes: GradientChanges,
    thresholds: GradientThresholds,
    options: Mapping[str, Any],
) -> tuple[GradientReport, list[Finding]]:
    from hookscope.gradients import examine_gradients
    from hookscope.models import model_errors_as_input_errors

    with process.prints_to_standard_error(), model_errors_as_input_errors(net.name, pictures):
        report, findings, anomaly = examine_gradients(
            net.model,
            net.inputs(*pictures),
            loss,
            options["layers"] or None,
            options["types"] or None,
            change=changes.of(net.model, net.name) if changes else None,
            thresholds=thresholds,
            detect_anomaly=options["detect_anomaly"],
        )
    if options["detect_anomaly"] and anomaly is None:
        output.note("Note: no NaN in the forward pass and none in the backward pass")
    return report, findings


def _draw(
    path: str,
    net: LoadedModel,
    report: GradientReport,
    findings: Sequence[Finding],
    thresholds: GradientThresholds,
    lines: Sequence[str],
    origin: Mapping[str, Any],
) -> None:
    from hookscope.drawing import figure_bytes, plot_suffix
    from hookscope.gradients import gradient_figure
    from hookscope.models import package_versions
    from hookscope.system import write_atomically

    heading = f"{net.name}   weights: {net.weights}"
    figure = gradient_figure(report, findings, heading, lines, thresholds)
    told = output.plain_json([found.as_row() for found in findings])
    about = {**package_versions(), **origin, "value": output.plain_json(report.value), "findings": told}
    write_atomically(path, figure_bytes(figure, plot_suffix(path), about))


def _origin(net: LoadedModel, read: Sequence[InputImage], options: Mapping[str, Any]) -> dict[str, Any]:
    """Where a plot comes from: what was measured on what, and what was done to it."""
    asked = ("loss", "layers", "types", "freeze", "scale", "clamp_sign", "clip_value", "clip_norm")
    return {
        "model": net.name,
        "weights": net.weights,
        "images": [os.path.basename(picture.name) or picture.name for picture in read],
        "sha256": [picture.sha256 for picture in read],
        "preprocess": net.preprocess.describe(),
        "target": str(options["target"]),
        **{name: output.plain_json(options[name]) for name in asked},
    }


def _report(
    net: LoadedModel,
    report: GradientReport,
    findings: Sequence[Finding],
    thresholds: GradientThresholds,
    lines: Sequence[str],
    options: Mapping[str, Any],
) -> None:
    layers = [layer_row(layer, report.parameters, thresholds, net.weights) for layer in report.layers]
    parameters = [parameter_row(parameter, thresholds, net.weights) for parameter in report.parameters]
    format, stream = chosen_format(options["format"]), process.standard_output()
    if format == "table":
        write_report_tables(layers, parameters, findings, lines, stream)
    elif format == "json":
        about: dict[str, Any] = {"model": net.name, "weights": net.weights}
        about |= {"loss": {"name": options["loss"], "value": report.value}}
        about |= {"targets": [dataclasses.asdict(answer) for answer in report.targets]}
        about |= {"total_norm": report.total_norm, "total_norm_after": report.total_after, "layers": layers}
        write_report(parameters, PARAMETER_FIELDS, findings, format, stream, (), "parameter", about)
    elif format == "ndjson":
        write_report(layers, FIELDS, (), format, stream)
        write_report(parameters, PARAMETER_FIELDS, findings, format, stream, (), "parameter")
    elif options["parameters"]:
        write_report(parameters, PARAMETER_FIELDS, findings, format, stream)
    else:
        write_report(layers, FIELDS, findings, format, stream)


def write_report_tables(
    layers: Sequence[dict[str, Any]],
    parameters: Sequence[dict[str, Any]],
    findings: Sequence[Finding],
    lines: Sequence[str],
    stream: Any,
) -> None:
    """Both tables, the totals, and the findings in words."""
    columns = terminal_columns(stream)
    fields = table_fields(layers, False, columns)
    output.write_rows([{name: row[name] for name in fields} for row in layers], fields, "table", stream)
    stream.write("\n")
    fields = table_fields(parameters, True, columns)
    write_report(parameters, fields, findings, "table", stream, lines)
