"""``hookscope weights``: the parameters of a model in numbers, what is wrong with them, and their pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from hookscope import drawing, hooks, models, parameters, system
from hookscope.cli.output import rows as output
from hookscope.cli.output.report import Report, Row, Section
from hookscope.cli.shared.model import ModelOptions
from hookscope.cli.shared.options import (
    colour_map_option,
    complete_channels,
    format_option,
    layer_option,
    model_argument,
    seed_option,
    weights_option,
)
from hookscope.cli.shared.threshold_options import chosen_thresholds, threshold_options
from hookscope.errors import UsageError
from hookscope.findings import Finding, counted
from hookscope.parameters import finding_names  # its file registers the findings whose options help shows

FIELDS = (
    "name", "type", "shape", "mean", "std", "min", "max", "norm", "zeros", "nan", "inf", "filters", "filter_norm_min",
    "filter_norm_mean", "filter_norm_max", "dead", "duplicate", "collapsed", "updated", "findings", "weights",
)  # fmt: skip
_NESTED_FIELDS = ("layer", "buffer", "dead_filters", "duplicate_filters", "collapsed_channels", "first_nonfinite")


@dataclass(frozen=True)
class Options:
    """The options of the command beside those of the thresholds."""

    layers: tuple[str, ...]
    plot: str | None
    kernels: str | None
    channels: str | None
    columns: int | None
    cell: int | None
    cmap: str | None
    format: str


@click.command("weights")
@model_argument()
@layer_option(
    "Layers by name: conv1, layer4 (all in it), 'layer4.*', 're:bn[12]$'; repeatable, comma separated. Indices do not"
    " work: they count calls of a forward pass.  [default: all]"
)
@threshold_options("weights")
@click.option("--plot", metavar="FILE", type=click.Path(), help="Draw all layers on one page: a PNG, SVG or PDF file.")
@click.option("--kernels", metavar="PNG", type=click.Path(), help="Draw the filters of convolutions.")
@click.option(
    "--channels",
    metavar="SPEC",
    shell_complete=complete_channels,
    help="With --kernels: filters to draw, 0-63,100 or top:16.  [default: all filters of the first convolution and of"
    " layers that --layer names, top:16 of others]",
)
@click.option(
    "--columns", metavar="N", type=click.IntRange(1, 10000), help="With --kernels: number of filters in a row."
)
@click.option(
    "--cell", metavar="PIXELS", type=click.IntRange(1, 4096), help="With --kernels: smallest side of a kernel."
)
@colour_map_option("With --kernels: any matplotlib colour map.  [default: RdBu_r]")
@weights_option
@seed_option
@format_option
def command(model: str, weights: str, seed: int, **values: Any) -> None:
    """Report on the weights of MODEL, without an image and without a forward pass.

    The command prints a row for each parameter and each running statistic of a BatchNorm: shape, mean, standard
    deviation, lowest and highest value, L2 norm, share of zeros, and numbers of NaN and Inf. Rows of convolutions have
    the norms of the filters and the numbers of dead and duplicate filters. Rows of BatchNorms have the number of
    collapsed variances (below a hundredth of the layer's eps, which leaves less than a tenth of the channel's spread),
    and whether the statistics were ever updated. Findings follow a table; json and ndjson have them with the numbers of
    the filters and channels. Findings do not change the exit status, which is 0.

    --plot draws the weights, norms of filters, zeros and running variances of every layer, beside the findings.
    --kernels draws the filters of the first convolution in colour, and for other convolutions the four strongest input
    slices of each filter.

    \b
    Examples:
      hookscope weights resnet18
      hookscope weights resnet18 --weights my.safetensors --plot weights.png --kernels kernels.png
      hookscope weights mobilenet_v3_small --layer features.4 --kernels features4.png --channels top:32
      hookscope weights vgg16 --format json | jq -r '.findings[].finding'
    """
    options = Options(**{name: values[name] for name in Options.__dataclass_fields__})
    thresholds = parameters.ParameterThresholds.of(chosen_thresholds("weights", values))
    look = (options.channels, options.columns, options.cell, options.cmap)
    if options.kernels is None and look != (None, None, None, None):
        raise UsageError("--channels, --columns, --cell and --cmap need --kernels", do="add --kernels FILE.png")
    if options.cmap is not None:
        drawing.palette(options.cmap)
    style = drawing.Style(options.columns, options.cell, options.cmap or "RdBu_r")
    choice = drawing.ChannelChoice.parse(options.channels) if options.channels is not None else None
    if options.layers and hooks.Selection(options.layers).counts and options.layers != ("all",):
        raise UsageError("--layer of weights takes names", "indices count calls of a pass", "name layers: conv1")
    _check_outputs(options, [weights, model.partition(":")[0]])
    net = ModelOptions(model, weights, seed).load()
    rows = parameters.parameter_statistics(net.model, thresholds, options.layers or None)
    findings = parameters.parameter_findings(rows, thresholds)
    totals = _totals(rows)
    if options.plot is not None:
        _write_plot(options.plot, net, rows, findings, totals)
    if options.kernels is not None:
        sheet = parameters.draw_kernels(net.model, options.layers or None, choice, style, net.name, net.weights)
        for text in sheet.left_out:
            output.note(f"Note: {options.kernels} leaves out {text}")
        drawing.write_png(sheet.image, options.kernels, sheet.provenance)
    section = Section([_as_row(row, thresholds, net.weights) for row in rows], FIELDS, "parameter", _NESTED_FIELDS)
    about = {"model": net.name, "weights": net.weights}
    output.write_report(Report([section], findings, about, totals), options.format)


def _check_outputs(options: Options, inputs: Sequence[str]) -> None:
    """Refuse, before the model is loaded, files that cannot be written and files that are ``inputs``."""
    plot, kernels = options.plot, options.kernels
    if plot is not None:
        drawing.plot_suffix(plot)
    if kernels is not None and not _is_device(kernels) and os.path.splitext(kernels)[1].lower() != ".png":
        raise UsageError(f"cannot write {kernels}", "kernels are drawn as PNG files", "name it .png")
    if plot is not None and kernels is not None and _is_same(plot, kernels):
        raise UsageError(f"--plot and --kernels are both {plot}", do="name two files")
    for path in (plot, kernels):
        if path is not None and any(os.path.isfile(source) and _is_same(path, source) for source in inputs):
            raise UsageError(f"cannot write {path}: it is the input itself", do="write somewhere else")
        if path is not None:
            system.check_writable(path)


def _is_device(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _is_same(path: str, other: str) -> bool:
    if _is_device(path):
        return False
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def _write_plot(
    path: str,
    net: models.LoadedModel,
    rows: Sequence[parameters.ParameterStatistics],
    findings: Sequence[Finding],
    totals: Sequence[str],
) -> None:
    figure = parameters.weights_figure(rows, findings, f"{net.name}   weights: {net.weights}", totals)
    provenance = {
        **models.package_versions(),
        "model": net.name,
        "weights": net.weights,
        "findings": output.plain_json([finding.as_row() for finding in findings]),
    }
    system.write_atomically(path, drawing.figure_bytes(figure, drawing.plot_suffix(path), provenance))


def _as_row(row: parameters.ParameterStatistics, thresholds: parameters.ParameterThresholds, weights: str) -> Row:
    duplicates = row.duplicate_filters
    counts = {
        "dead": None if row.dead_filters is None else len(row.dead_filters),
        "duplicate": None if duplicates is None else sum(len(group) - 1 for group in duplicates),
        "collapsed": None if row.collapsed is None else len(row.collapsed),
        "collapsed_channels": row.collapsed,
        "findings": finding_names(row, thresholds),
        "weights": weights,
    }
    return {name: counts[name] if name in counts else getattr(row, name) for name in (*FIELDS, *_NESTED_FIELDS)}


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
