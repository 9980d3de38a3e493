"""``hookscope weights``: the parameters of a model in numbers, what is wrong with them, and their pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import click

from hookscope import drawing, hooks, models, parameters, report, system, tracing
from hookscope.cli import process
from hookscope.cli.output import formats as output
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.model import ModelOptions, check_choice
from hookscope.cli.shared.output_paths import (
    check_html,
    check_plot,
    is_device,
    is_same_file,
    refuse_input,
    write_html,
    write_picture,
    write_plot,
)
from hookscope.cli.shared.threshold_options import threshold_option
from hookscope.errors import UsageError
from hookscope.findings import Finding, counted
from hookscope.parameters import (
    finding_names as finding_names,  # its file registers the findings whose options help shows
)

_BINS = 48  # of a histogram on a page


@click.command("weights", cls=GroupedCommand)
@shared.model_argument()
@shared.layer_option(
    "Layers to show: conv1, layer4 (all in it), 'layer4.*', 're:bn[12]$', or indices of list-layers: 30, 0:10;"
    " repeatable, comma separated.  [default: all]"
)
@shared.plot_option("Draw all layers on one page")
@shared.html_option("findings and parameters")
@shared.file_option(
    "--kernels", "Draw the filters of the first convolution, or of those that --layer names.", metavar="PNG"
)
@shared.channels_option(
    "With --kernels: filters to draw, all, 0-63,100 or top:16.  [default: all up to 64, else top:64; in a matrix"
    " top:16]"
)
@shared.columns_option("With --kernels: filters in a row, or input channels in a matrix.  [default: 32 in a matrix]")
@shared.cell_option("With --kernels: smallest side of a kernel.")
@shared.colour_map_option("With --kernels: any matplotlib colour map.  [default: RdBu_r]")
@threshold_option("weights")
@shared.weights_option
@shared.seed_option
@shared.format_option
def command(
    model: str,
    weights: str,
    seed: int,
    layers: hooks.Selection | None,
    plot: str | None,
    html: str | None,
    kernels: str | None,
    channels: drawing.ChannelChoice | None,
    columns: int | None,
    cell: int | None,
    cmap: str | None,
    format: str,
    **values: Any,
) -> None:
    """Report on the weights of MODEL, without an image and without a forward pass.

    \b
    Examples:
      hookscope weights resnet18
      hookscope weights resnet18 --weights my.safetensors --plot weights.png --kernels kernels.png
      hookscope weights mobilenet_v3_small --layer features.4 --kernels features4.png --channels top:32
      hookscope weights vgg16 --format json | jq -r '.findings[].finding'

    A row for each parameter, and for each running statistic of a BatchNorm, has the shape, mean, standard deviation,
    lowest and highest value, L2 norm, share of zeros, and numbers of NaN and Inf. Rows of convolutions also have the
    norms of the filters and the numbers of dead and duplicate filters.

    Rows of BatchNorms say how many variances are collapsed: below 1/100 of the layer's eps, which leaves less than a
    tenth of the channel's spread. They also say whether the statistics were ever updated.

    Findings follow the table. In json and ndjson they also have the numbers of filters and channels. The exit status is
    0, with or without findings.

    --plot draws the weights, norms of filters, zeros and running variances of every layer, beside the findings.
    --kernels draws the filters of the first convolution, in colour if its input is RGB. A convolution that --layer
    names is drawn as a matrix of kernels: a row is an output channel, a column is an input channel.
    """
    thresholds = parameters.ParameterThresholds.of(values["thresholds"])
    if kernels is None and any(map(shared.was_given, ("channels", "columns", "cell", "cmap"))):
        raise UsageError("--channels, --columns, --cell and --cmap need --kernels", do="add --kernels FILE.png")
    inputs = [weights, model.partition(":")[0]]
    _check_outputs(plot, kernels, inputs)
    check_html(html, inputs, {"--plot": plot, "--kernels": kernels}, "input")
    net = ModelOptions(model, weights, seed).load(pictures=False)
    check_choice(net, (), layers)
    if layers is not None:
        with process.prints_to_standard_error():
            layers = tracing.named(net.model, layers, net.preprocess.input_shape[1:])
    rows = parameters.parameter_statistics(net.model, thresholds, layers, bins=_BINS if html else 0)
    findings = parameters.parameter_findings(rows, thresholds)
    totals = _totals(rows)
    section = Section(parameters.weights_rows(rows, thresholds, net.weights), parameters.WEIGHTS, "parameter")
    about = {"model": net.name, "weights": net.weights}
    style = drawing.Style(columns, cell, cmap or "RdBu_r")
    sheet = kernels and parameters.kernel_sheet(net.model, layers, channels, style, net.name, net.weights)
    with ExitStack() as stack:  # a full disk is no reason to lose the rows
        stack.callback(output.write_report, Report([section], findings, about, totals, caption=about), format)
        if plot is not None:
            figure = parameters.plot_weights(rows, findings, net.name, weights=net.weights, lines=totals)
            write_plot(plot, figure, _provenance(net, findings))
        if html is not None:
            facts = {**models.package_versions(), **about, "command": process.command_line()}
            write_html(
                html,
                report.draw_weights_page(
                    rows, findings, net.name, weights=net.weights, lines=totals, thresholds=thresholds, provenance=facts
                ),
            )
        if kernels and sheet:
            for text in sheet.left_out:
                output.note(f"Note: {kernels} leaves out {text}")
            write_picture(kernels, sheet.image)


def _check_outputs(plot: str | None, kernels: str | None, inputs: Sequence[str]) -> None:
    """Refuse, before the model is loaded, files that cannot be written and files that are ``inputs``."""
    check_plot(plot, inputs, "input")
    if kernels is None:
        return
    if os.path.splitext(kernels)[1].lower() != ".png" and not is_device(kernels):
        raise UsageError(f"cannot write {kernels}", "kernels are drawn as PNG files", "name it .png")
    if plot is not None and is_same_file(plot, kernels):
        raise UsageError(f"--plot and --kernels are both {plot}", do="name two files")
    refuse_input(kernels, inputs, "input")
    system.check_writable(kernels)


def _provenance(net: models.LoadedModel, findings: Sequence[Finding]) -> dict[str, Any]:
    rows = output.plain_json([finding.as_row() for finding in findings])
    return {**models.package_versions(), "model": net.name, "weights": net.weights, "findings": rows}


def _totals(rows: Sequence[parameters.ParameterStatistics]) -> list[str]:
    own = [row for row in rows if not row.buffer]
    values = sum(row.count for row in own)
    zeros = sum(round((row.zeros or 0.0) * row.count) for row in own)
    share = f", {100 * zeros / values:.3g} % of them 0" if values else ""
    bad = sum(row.nan + row.inf for row in rows)
    lines = [
        f"{counted(len(own), 'parameter')} of {counted(len({row.layer for row in own}), 'layer')},"
        f" {counted(values, 'value')}{share}",
        f"NaN or Inf: {counted(bad, 'value')}" if bad else "all values are finite",
    ]
    updated = {row.layer: row.updated for row in rows if row.updated is not None}
    if updated:
        lines.append(f"{counted(len(updated), 'BatchNorm')}: statistics updated in {sum(map(bool, updated.values()))}")
    return lines
