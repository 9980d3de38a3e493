"""``hookscope stats``: statistics of every layer over many images, and what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.output.report import write_report
from hookscope.cli.output.stats_rows import CHANNEL_FIELDS, FIELDS, TABLE_FIELDS, channel_rows, layer_rows
from hookscope.cli.shared.image_options import image_list, images_argument
from hookscope.cli.shared.measure import MeasureOptions, measure, measuring_options
from hookscope.cli.shared.options import chosen_format, format_option, model_argument
from hookscope.cli.shared.threshold_options import chosen_thresholds, threshold_options
from hookscope.errors import UsageError
from hookscope.findings import counted, listed
from hookscope.statistics import StatisticsThresholds

if TYPE_CHECKING:
    from hookscope.findings import Finding
    from hookscope.statistics import LayerStatistics, SavedStatistics

_BEGINNING = b'{"hookscope": '  # of what `hookscope.statistics.storage` writes


@click.command("stats")
@model_argument()
@images_argument
@measuring_options
@click.option(
    "--rank", is_flag=True, help="Measure the effective rank of each layer's channels too, up to 2048; takes longer."
)
@click.option("--per-channel", is_flag=True, help="A row for each channel.")
@click.option("--save", metavar="FILE", type=click.Path(), help="Keep what was counted, to merge or to resume.")
@click.option("--resume", is_flag=True, help="Go on where the run that wrote the --save file was cut short.")
@click.option("--merge", is_flag=True, help="The arguments are --save files of one model: join them.")
@click.option(
    "--plot", metavar="FILE", type=click.Path(), help="Draw distributions, dead and saturated shares: png, svg or pdf."
)
@click.option(
    "--tensorboard", metavar="DIR", type=click.Path(), help="Write scalars and histograms for TensorBoard to DIR."
)
@threshold_options("activations")
@format_option
def command(model: str, images: tuple[str, ...], **options: Any) -> None:
    """Measure every layer of MODEL on images, and say what is wrong.

    IMAGE is a file, a folder, or - for standard input. One forward pass a batch counts every convolution and every
    activation function: mean, spread, range and where it was reached, zeros, quantiles, NaN and Inf, dead, saturated
    and duplicate channels. Findings follow the table, each with its evidence and what people do about it; in tsv and
    csv their names stand in the column of that name. In ndjson every line says by "row" what it is.

    \b
    Examples:
      hookscope stats resnet34 cat.jpg
      hookscope stats vgg16 samples/ --type ReLU --plot vgg16.png
      find photos -name '*.jpg' -print0 | hookscope stats resnet50 --files0-from - --format ndjson
      hookscope stats resnet34 photos/ --limit 1000 --save a.json
      hookscope stats --merge a.json b.json
    """
    from hookscope.statistics import find_problems

    thresholds = StatisticsThresholds.of(chosen_thresholds("activations", options))
    if options["merge"]:
        _check_targets(options, [])
        saved, lost = _merged([model, *images], options["save"]), 0
    else:
        _check_resume_and_rank(options)
        paths = image_list(images, options["files0_from"], options["limit"])
        _check_targets(options, paths)
        saved, lost = measure(_job(model, paths, options))
    layers = saved.totals.statistics(thresholds.correlation)
    findings = find_problems(layers, saved.totals.drifts(), saved.totals.images, thresholds)
    with ExitStack() as stack:  # a full disk is no reason to lose the rows
        stack.callback(_report, saved, layers, findings, chosen_format(options["format"]), options["per_channel"])
        _draw(options["plot"], saved, layers, findings)
        _log(options["tensorboard"], saved, layers)
    if lost:
        raise click.exceptions.Exit(1)


def _job(model: str, paths: Sequence[str], options: Mapping[str, Any]) -> MeasureOptions:
    names = [field.name for field in fields(MeasureOptions) if field.name in options]
    return MeasureOptions(model, paths, **{name: options[name] for name in names})


def _given(names: Iterable[str]) -> list[str]:
    """Which of the options stand on the command line."""
    context = click.get_current_context()
    found = [name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    return [param.opts[0] for param in context.command.params if param.name in found]


def _check_resume_and_rank(options: Mapping[str, Any]) -> None:
    if options["resume"] and options["save"] is None:
        raise UsageError("--resume without --save", do="name the file of the run to go on with: --save FILE --resume")
    if _given(["low_rank"]) and not options["rank"]:
        raise UsageError("--low-rank without --rank", do="add --rank, which measures it")


def _check_targets(options: Mapping[str, Any], paths: Sequence[str]) -> None:
    """Whatever can be known to fail after minutes of work is told before."""
    from hookscope.cli.shared.output_paths import refuse_input
    from hookscope.system import check_folder, check_writable

    plot, tensorboard, save = options["plot"], options["tensorboard"], options["save"]
    if plot is not None:
        from hookscope.drawing import plot_suffix

        plot_suffix(plot)
        check_writable(plot)
        refuse_input(plot, paths)
    if tensorboard is not None:
        from hookscope.statistics import check_installed

        check_installed()
        check_folder(tensorboard)
    if save is not None:
        check_writable(save)
        _refuse_foreign(save, options["resume"])
    if plot is not None and save is not None and os.path.realpath(plot) == os.path.realpath(save):
        raise UsageError(f"--plot and --save name the same file '{plot}'")


def _refuse_foreign(save: str, resume: bool) -> None:
    """Refuse to write over what no run has saved: a photograph, the weights. What is resumed is judged when read."""
    if resume or not os.path.isfile(save) or not os.path.getsize(save):
        return
    with open(save, "rb") as stream:
        beginning = stream.read(len(_BEGINNING))
    if beginning != _BEGINNING:
        raise UsageError(f"--save {save} would write over what is no saved statistics", do="name another file")


_OF_A_RUN = ("layers", "types", "files0_from", "batch_size", "workers", "limit", "strict", "weights", "seed", "device",
    "preprocess", "input_size", "rank", "resume")  # fmt: skip


def _merged(paths: Sequence[str], save: str | None) -> SavedStatistics:
    from hookscope.statistics import merge_statistics, save_statistics

    if wrong := _given(_OF_A_RUN):
        raise UsageError(f"--merge measures nothing, and {wrong[0]} says what to measure", do="leave one out")
    _refuse_twice(paths)
    merged = merge_statistics(paths)
    if save is not None:
        save_statistics(save, merged)
    return merged


def _refuse_twice(paths: Sequence[str]) -> None:
    seen: set[str] = set()
    for path in paths:
        if os.path.realpath(path) in seen:
            raise UsageError(f"'{path}' is named twice", "its images would count twice", "name each file once")
        seen.add(os.path.realpath(path))


def _report(
    saved: SavedStatistics,
    layers: Sequence[LayerStatistics],
    findings: Sequence[Finding],
    format: str,
    per_channel: bool,
) -> None:
    stream = process.standard_output()
    weights, totals = saved.source.weights, _totals(saved, layers)
    rows = list(layer_rows(layers, findings, weights))
    if per_channel:
        channels = channel_rows(layers, weights)
        write_report(channels, CHANNEL_FIELDS, findings, format, stream, totals, "channel", {"layers": rows})
    else:
        shown = TABLE_FIELDS if format == "table" else FIELDS
        write_report(rows, shown, findings, format, stream, totals)
    if format in ("tsv", "csv"):
        _tell_the_rest(findings, () if per_channel else [layer.key for layer in layers])


def _tell_the_rest(findings: Sequence[Finding], keys: Iterable[str]) -> None:
    """Findings that no row of tsv or csv can name, such as those of a BatchNorm, in one line."""
    rest = [f"{found.finding} {found.layer}".strip() for found in findings if found.layer not in set(keys)]
    if rest:
        output.note(f"Note: found and in no row: {listed(rest, 4)}; see --format table or json")


def _totals(saved: SavedStatistics, layers: Sequence[LayerStatistics]) -> list[str]:
    images, values = counted(saved.totals.images, "image"), sum(layer.values for layer in layers)
    return [
        f"{saved.source.model} on {images}, weights {saved.source.weights}",
        f"{counted(len(layers), 'call')}, {counted(values, 'value')}; zeros and saturated are shares, dead and"
        " duplicate count channels",
    ]


def _draw(
    path: str | None,
    saved: SavedStatistics,
    layers: Sequence[LayerStatistics],
    findings: Sequence[Finding],
) -> None:
    if path is None:
        return
    from hookscope.drawing import figure_bytes, plot_suffix
    from hookscope.statistics import draw_statistics
    from hookscope.system import write_atomically

    about = f"{saved.source.model}, {counted(saved.totals.images, 'image')}, weights {saved.source.weights}"
    figure = draw_statistics(layers, findings, about)
    write_atomically(path, figure_bytes(figure, plot_suffix(path)))


def _log(folder: str | None, saved: SavedStatistics, layers: Sequence[LayerStatistics]) -> None:
    if folder is None:
        return
    from hookscope.statistics import write_events

    write_events(folder, layers, step=0, about={"model": saved.source.model, "weights": saved.source.weights})
