"""Report on the weights of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hookscope import drawing, hooks, models, parameters, report, tracing
from hookscope.cli import process
from hookscope.cli.fields import group
from hookscope.cli.output.formats import Report, Section, note, plain_json
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import write_html, write_picture, write_plot
from hookscope.cli.shared.subject import ModelOptions, OfModel, check_choice
from hookscope.findings import counted
from hookscope.parameters import (
    finding_names as finding_names,  # its file registers the findings whose options help shows
)

_BINS = 48  # of a histogram on a page


class Weights(OfModel):
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

    model: ModelOptions = group(ModelOptions, only=("model", "weights", "seed"))
    layers: hooks.Selection | None = shared.layer_option(
        "Layers to show: conv1, layer4 (all in it), 'layer4.*', 're:bn[12]$', or indices of list-layers: 30, 0:10;"
        " repeatable, comma separated.  [default: all]"
    )
    plot: str | None = shared.plot_file("Draw all layers on one page")
    html: str | None = shared.html_file("findings and parameters")
    kernels: str | None = shared.picture_file(
        "Draw the filters of the first convolution, or of those that --layer names.", metavar="PNG"
    )
    channels: drawing.ChannelChoice | None = shared.channels_option(
        "With --kernels: filters to draw, all, 0-63,100 or top:16.  [default: all up to 64, else top:64; in a matrix"
        " top:16]",
        needs="kernels",
    )
    columns: int | None = shared.columns_option(
        "With --kernels: filters in a row, or input channels in a matrix.  [default: 32 in a matrix]", needs="kernels"
    )
    cell: int | None = shared.cell_option("With --kernels: smallest side of a kernel.", needs="kernels")
    cmap: str | None = shared.colour_map_option(
        "With --kernels: any matplotlib colour map.  [default: RdBu_r]", needs="kernels"
    )
    thresholds: dict[str, Any] = shared.threshold_option("weights")

    def run(self) -> None:
        thresholds, layers = parameters.ParameterThresholds.of(self.thresholds), self.layers
        net = replace(self.model, device="cpu").load(pictures=False)
        check_choice(net, (), layers)
        if layers is not None:
            with process.prints_to_standard_error():
                layers = tracing.named(net.model, layers, net.preprocess.input_shape[1:])
        rows = parameters.parameter_statistics(net.model, thresholds, layers, bins=_BINS if self.html else 0)
        findings = parameters.parameter_findings(rows, thresholds)
        totals = _totals(rows)
        section = Section(parameters.weights_rows(rows, thresholds, net.weights), parameters.WEIGHTS, "parameter")
        about = {"model": net.name, "weights": net.weights}
        name = models.short_name(net.name)
        style = drawing.Style(self.columns, self.cell, self.cmap or "RdBu_r")
        sheet = self.kernels and parameters.kernel_sheet(net.model, layers, self.channels, style, name, net.weights)
        with self.printed_after(Report([section], findings, about, totals, caption=about)):
            said = {"findings": findings, "title": name, "weights": net.weights, "lines": totals}
            if self.plot is not None:
                told = {"findings": plain_json([finding.as_row() for finding in findings])}
                write_plot(self.plot, report.plot(rows, **said), {**models.package_versions(), **about, **told})
            if self.html is not None:
                facts = {**models.package_versions(), **about, "command": process.command_line()}
                write_html(self.html, report.draw_weights_page(rows, thresholds=thresholds, provenance=facts, **said))
            if self.kernels and sheet:
                for text in sheet.left_out:
                    note(f"Note: {self.kernels} leaves out {text}")
                write_picture(self.kernels, sheet.image)


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
