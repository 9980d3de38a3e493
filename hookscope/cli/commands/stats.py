"""``hookscope stats``: statistics of every layer over many images, and what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import click

from hookscope import jobs, models, report, statistics, system
from hookscope.cli import process
from hookscope.cli.output.formats import note, write_report
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.engine_options import EngineOptions
from hookscope.cli.shared.image_options import images_argument
from hookscope.cli.shared.measure import MeasureOptions, measure, measuring_options
from hookscope.cli.shared.model import ModelOptions
from hookscope.cli.shared.output_paths import check_html, check_plot, is_same_file, write_html, write_plot
from hookscope.cli.shared.threshold_options import chosen_thresholds, threshold_options
from hookscope.errors import UsageError
from hookscope.findings import Finding, counted, listed, single
from hookscope.statistics import StatisticsThresholds  # its file registers the findings whose options help shows


@click.command("stats")
@shared.model_argument()
@images_argument
@shared.plot_option("Draw distributions, and shares of dead and saturated channels")
@shared.html_option("findings, layers and their channels")
@click.option("--per-channel", is_flag=True, help="Print a row for each channel.")
@shared.file_option("--save", "Save the statistics, for --merge and --resume.")
@click.option("--resume", is_flag=True, help="Continue the interrupted run that wrote the --save file.")
@click.option("--merge", is_flag=True, help="Merge --save files of one model: all arguments are such files.")
@click.option(
    "--rank", is_flag=True, help="Also measure the effective rank of layers with up to 2048 channels; slower."
)
@shared.file_option("--tensorboard", "Write scalars and histograms for TensorBoard to DIR.", metavar="DIR")
@measuring_options("every convolution, Linear layer and activation function, and (model)")
@threshold_options("activations")
@shared.format_option
def command(
    job: MeasureOptions,
    rank: bool,
    per_channel: bool,
    save: str | None,
    resume: bool,
    merge: bool,
    plot: str | None,
    html: str | None,
    tensorboard: str | None,
    format: str,
    **values: Any,
) -> None:
    """Measure every layer of MODEL on images, and report what is wrong.

    \b
    Examples:
      hookscope stats resnet34 cat.jpg
      hookscope stats vgg16 samples/ --type ReLU --plot vgg16.png
      find photos -name '*.jpg' -print0 | hookscope stats resnet50 --files0-from - --format ndjson
      hookscope stats resnet34 photos/ --limit 1000 --save a.json
      hookscope stats --merge a.json b.json

    The command measures every convolution, Linear layer and activation function, and what the model returns, which is
    called (model). A line under the table says which other layers were not measured. IMAGE is a file, a folder, a glob,
    or - for standard input.

    A row for each layer call has the mean, spread, range and its positions, zeros, quantiles, NaN and Inf, and the
    numbers of dead, saturated and duplicate channels. Findings follow the table, each with its evidence and advice. In
    tsv and csv, the column findings has their names. In ndjson, the field "row" names the kind of a line.

    --save, --resume and --merge know each image by the content of its file, not by its name. --merge refuses files that
    hold the same image. --resume refuses other images than those of the saved run.
    """
    thresholds = StatisticsThresholds.of(chosen_thresholds("activations", values))
    if resume and save is None and not merge:
        raise UsageError("--resume needs --save", do="name the file of the run to continue: --save FILE --resume")
    if shared.was_given("low_rank") and not (rank or merge):
        raise UsageError("--low-rank needs --rank", do="add --rank, which measures the effective rank")
    images = [] if merge else job.images()
    _check_outputs(plot, save, tensorboard, resume, images)
    check_html(html, images, {"--plot": plot, "--save": save})
    if merge:
        saved, lost = _merged([job.model.model, *job.paths], save), 0
    else:
        saved, lost = measure(job, images, rank, save, resume)
    layers = saved.totals.statistics(thresholds.correlation)
    findings = statistics.find_problems(
        layers, saved.totals.drifts(), saved.totals.images, thresholds, saved.source.assumed
    )
    with ExitStack() as stack:  # a full disk is no reason to lose the rows
        stack.callback(_report, saved, layers, findings, per_channel, format)
        if plot is not None:
            title = f"{saved.source.model}, {counted(saved.totals.images, 'image')}"
            lines = [f"preprocessing: {saved.source.preprocess}"]
            figure = statistics.plot_statistics(layers, findings, title, weights=saved.source.weights, lines=lines)
            write_plot(plot, figure)
        if html is not None:
            source = {name: getattr(saved.source, name) for name in ("model", "weights", "preprocess")}
            facts = {**models.package_versions(), **source, "command": process.command_line()}
            title = f"{saved.source.model}, {counted(saved.totals.images, 'image')}"
            weights = saved.source.weights
            page = report.draw_statistics_page(
                layers, findings, title, weights=weights, lines=_totals(saved, layers), provenance=facts
            )
            write_html(html, page)
        if tensorboard is not None:
            about = {"model": saved.source.model, "weights": saved.source.weights}
            statistics.write_events(tensorboard, layers, step=0, about=about)
    if lost:
        raise click.exceptions.Exit(1)


def _check_outputs(
    plot: str | None, save: str | None, tensorboard: str | None, resume: bool, images: Sequence[str]
) -> None:
    """Refuse, before minutes of work, what cannot be written after it."""
    check_plot(plot, images)
    if tensorboard is not None:
        statistics.check_installed()
        system.check_folder(tensorboard)
    if save is not None:
        system.check_writable(save)
        if not resume:  # the run itself checks a file to resume
            _refuse_foreign(save)
        if plot is not None and is_same_file(plot, save):
            raise UsageError(f"--plot and --save name the same file '{plot}'")


def _refuse_foreign(save: str) -> None:
    """Refuse to replace a file that does not hold saved statistics, such as an image or the weights."""
    if not os.path.isfile(save) or not os.path.getsize(save):
        return
    with open(save, "rb") as stream:
        beginning = stream.read(len(jobs.BEGINNING))
    if beginning != jobs.BEGINNING:
        raise UsageError(f"--save {save} would replace a file that holds no statistics", do="name another file")


def _merged(paths: Sequence[str], save: str | None) -> statistics.SavedStatistics:
    measuring = {field.name for kind in (MeasureOptions, EngineOptions, ModelOptions) for field in fields(kind)} | {
        "rank",
        "resume",
    }
    for option in click.get_current_context().command.params:
        if isinstance(option, click.Option) and option.name in measuring and shared.was_given(option.name):
            asked = f"{option.opts[0]} cannot be used with --merge"
            raise UsageError(asked, "--merge measures nothing", "leave one of the two out")
    names: set[str] = set()
    for path in paths:
        if os.path.realpath(path) in names:
            raise UsageError(f"'{path}' is named twice", "its images would count twice", "name each file once")
        names.add(os.path.realpath(path))
    merged = statistics.merge_statistics(paths, lambda name, text: note(f"Note: {name}: {text}"))
    if save is not None:
        statistics.save_statistics(save, merged)
    return merged


def _report(
    saved: statistics.SavedStatistics,
    layers: Sequence[statistics.LayerStatistics],
    findings: Sequence[Finding],
    per_channel: bool,
    format: str,
) -> None:
    weights = saved.source.weights
    section = Section(statistics.statistics_rows(layers, findings, weights), statistics.STATISTICS, "layer")
    # findings that no row names, such as those of a BatchNorm
    keys = set() if per_channel else {layer.key for layer in layers}
    rest = [f"{finding.finding} {finding.layer}".strip() for finding in single(findings) if finding.layer not in keys]
    flat_note = f"Note: not in TSV or CSV: {listed(rest, 4)}; see --format table or json" if rest else ""
    about = {"layers": section.rows} if per_channel else {}
    if per_channel:
        section = Section(statistics.channel_rows(layers, weights), statistics.CHANNELS, "channel")
    source = {name: getattr(saved.source, name) for name in ("model", "weights", "preprocess")}
    caption = source | {"images": saved.totals.images}
    write_report(Report([section], findings, about, _totals(saved, layers), flat_note, caption), format)


def _totals(saved: statistics.SavedStatistics, layers: Sequence[statistics.LayerStatistics]) -> list[str]:
    values = sum(layer.values for layer in layers)
    totals = [
        f"{counted(len(layers), 'call')}, {counted(values, 'value')}; zeros and saturated are shares, dead and"
        " duplicate count channels",
    ]
    return totals + ([words] if (words := saved.coverage.words()) else [])
