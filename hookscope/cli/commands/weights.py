"""``hookscope weights``: the parameters of a model in numbers, what is wrong with them, and their pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.shared.model import load_net
from hookscope.cli.shared.options import (
    chosen_format,
    complete_channels,
    complete_colour_maps,
    format_option,
    layer_option,
    model_argument,
    seed_option,
    weights_option,
)
from hookscope.cli.shared.threshold_options import chosen_thresholds, threshold_options
from hookscope.errors import UsageError
from hookscope.findings import counted

if TYPE_CHECKING:
    from hookscope.drawing import ChannelChoice, Style
    from hookscope.findings import Finding
    from hookscope.models import LoadedModel
    from hookscope.parameters import ParameterStatistics

FIELDS = (
    "name",
    "type",
    "shape",
    "mean",
    "std",
    "min",
    "max",
    "norm",
    "zeros",
    "nan",
    "inf",
    "filters",
    "filter_norm_min",
    "filter_norm_mean",
    "filter_norm_max",
    "dead",
    "duplicate",
    "collapsed",
    "updated",
    "findings",
    "weights",
)


@click.command("weights")
@model_argument()
@layer_option(
    "Layers by name: conv1, layer4 (all in it), 'layer4.*', 're:bn[12]$'; repeatable, comma separated. Indices"
    " count calls, and there is no forward pass here.  [default: all]"
)
@threshold_options("weights")
@click.option("--plot", metavar="FILE", type=click.Path(), help="Draw all layers on one page: a PNG, SVG or PDF file.")
@click.option("--kernels", metavar="PNG", type=click.Path(), help="Draw the filters of convolutions.")
@click.option(
    "--channels",
    metavar="SPEC",
    shell_complete=complete_channels,
    help="With --kernels, which filters: 0-63,100 or top:16.  [default: all of the first convolution and of those"
    " named by --layer, top:16 of others]",
)
@click.option("--columns", metavar="N", type=click.IntRange(1, 10000), help="With --kernels: filters in a row.")
@click.option(
    "--cell", metavar="PIXELS", type=click.IntRange(1, 4096), help="With --kernels: smallest side of a kernel."
)
@click.option(
    "--cmap",
    metavar="NAME",
    shell_complete=complete_colour_maps,
    help="With --kernels, any of matplotlib's colour maps.  [default: RdBu_r]",
)
@weights_option
@seed_option
@format_option
def command(
    model: str,
    layers: tuple[str, ...],
    dead_norm: float,
    duplicate_cosine: float,
    plot: str | None,
    kernels: str | None,
    channels: str | None,
    columns: int | None,
    cell: int | None,
    cmap: str | None,
    weights: str,
    seed: int,
    format: str | None,
) -> None:
    """Look at the weights of MODEL, without a picture and without a forward pass.

    Prints a row for each parameter and each running statistic of a BatchNorm: shape, mean, standard deviation, lowest
    and highest value, L2 norm, share of zeros, counts of NaN and Inf; for convolutions the norms of the filters and
    how many are dead or duplicates; for BatchNorms how many variances have collapsed (below a hundredth of the
    layer's eps, so that less than a tenth of the channel's spread is left) and whether the statistics were ever
    updated. Findings follow a table, and stand in json and ndjson with the numbers of the filters and channels. They
    are no failure: the status is 0.

    --plot draws every layer's weights, norms of filters, zeros and running variances, findings beside them. --kernels
    draws the first convolution's filters in colour, and of others each filter's four strongest input slices.

    \b
    Examples:
      hookscope weights resnet18
      hookscope weights resnet18 --weights my.safetensors --plot weights.png --kernels kernels.png
      hookscope weights mobilenet_v3_small --layer features.4 --kernels features4.png --channels top:32
      hookscope weights vgg16 --format json | jq -r '.findings[].finding'
    """
    from hookscope.parameters import ParameterThresholds

    thresholds = ParameterThresholds(
        **chosen_thresholds("weights", {"dead_norm": dead_norm, "duplicate_cosine": duplicate_cosine})
    )
    if kernels is None and (channels, columns, cell, cmap) != (None, None, None, None):
        raise UsageError("--channels, --columns, --cell and --cmap are of --kernels", do="add --kernels FILE.png")
    choice, style = _look_of_kernels(channels, columns, cell, cmap)
    _check_names(layers)
    _check_files(plot, kernels, weights, model)
    net = load_net(model, weights, seed)

    from hookscope.parameters import parameter_findings, parameter_statistics

    rows = parameter_statistics(net.model, thresholds, layers or None)
    findings = parameter_findings(rows, thresholds)
    totals = _totals(rows)
    if plot is not None:
        _write_plot(plot, net, rows, findings, totals)
    if kernels is not None:
        _write_kernels(kernels, net, layers, choice, style)
    _report(net, rows, findings, totals, format)


def _look_of_kernels(
    channels: str | None, columns: int | None, cell: int | None, cmap: str | None
) -> tuple[ChannelChoice | None, Style]:
    from hookscope.drawing import ChannelChoice, Style

    if cmap is not None:
        from hookscope.drawing import palette

        palette(cmap)
    style = Style(columns, cell, cmap or "RdBu_r")
    return (ChannelChoice.parse(channels) if channels is not None else None), style


def _check_names(layers: tuple[str, ...]) -> None:
    """Refuse, before the model is loaded, a selection that cannot be read or that counts calls."""
    from hookscope.hooks import Selection

    if layers and Selection(layers).counts and layers != ("all",):
        raise UsageError("--layer of weights takes names", "indices count calls of a pass", "name layers: conv1")


def _check_files(plot: str | None, kernels: str | None, weights: str, model: str) -> None:
    from hookscope.drawing import plot_suffix
    from hookscope.system import check_writable

    if plot is not None:
        plot_suffix(plot)
    if kernels is not None and not _is_device(kernels) and os.path.splitext(kernels)[1].lower() != ".png":
        raise UsageError(f"cannot write {kernels}", "kernels are drawn as PNG files", "name it .png")
    if plot is not None and kernels is not None and _same(plot, kernels):
        raise UsageError(f"--plot and --kernels are both {plot}", do="name two files")
    sources = (weights, model.partition(":")[0])
    for path in (plot, kernels):
        if path is not None and any(os.path.isfile(source) and _same(path, source) for source in sources):
            raise UsageError(f"cannot write {path}: it is the input itself", do="write somewhere else")
        if path is not None:
            check_writable(path)


def _is_device(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _same(one: str, other: str) -> bool:
    if _is_device(one):
        return False
    if os.path.exists(one) and os.path.exists(other):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def _write_plot(
    path: str, net: LoadedModel, rows: Sequence[ParameterStatistics], findings: Sequence[Finding], totals: Sequence[str]
) -> None:
    from hookscope.drawing import figure_bytes, plot_suffix
    from hookscope.models import package_versions
    from hookscope.parameters import weights_figure
    from hookscope.system import write_atomically

    figure = weights_figure(rows, findings, f"{net.name}   weights: {net.weights}", totals)
    told = [found.as_row() for found in findings]
    provenance = {**package_versions(), "model": net.name, "weights": net.weights, "findings": output.plain_json(told)}
    write_atomically(path, figure_bytes(figure, plot_suffix(path), provenance))


def _write_kernels(
    path: str, net: LoadedModel, layers: tuple[str, ...], choice: ChannelChoice | None, style: Style
) -> None:
    from hookscope.drawing import write_png
    from hookscope.parameters import draw_kernels

    sheet = draw_kernels(net.model, layers or None, choice, style, net.name, net.weights)
    for text in sheet.left_out:
        output.note(f"Note: {path} leaves out {text}")
    write_png(sheet.image, path, sheet.provenance)


def _report(
    net: LoadedModel,
    rows: Sequence[ParameterStatistics],
    findings: Sequence[Finding],
    totals: Sequence[str],
    format: str | None,
) -> None:
    from hookscope.cli.output.report import write_report

    about = {"model": net.name, "weights": net.weights}
    as_rows = [_as_row(row, net.weights) for row in rows]
    stream = process.standard_output()
    write_report(as_rows, FIELDS, findings, chosen_format(format), stream, totals, "parameter", about)


def _as_row(row: ParameterStatistics, weights: str) -> dict[str, Any]:
    from hookscope.parameters import finding_names

    same = row.duplicate_filters
    counts = {
        "dead": None if row.dead_filters is None else len(row.dead_filters),
        "duplicate": None if same is None else sum(len(group) - 1 for group in same),
        "collapsed": None if row.collapsed is None else len(row.collapsed),
        "findings": finding_names(row),
        "weights": weights,
    }
    lists = {
        "layer": row.layer,
        "buffer": row.buffer,
        "dead_filters": row.dead_filters,
        "duplicate_filters": same,
        "collapsed_channels": row.collapsed,
        "first_nonfinite": row.first_nonfinite,
    }
    return {name: counts[name] if name in counts else getattr(row, name) for name in FIELDS} | lists


def _totals(rows: Sequence[ParameterStatistics]) -> list[str]:
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
