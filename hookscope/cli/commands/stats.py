"""Measure every layer on images and report what is wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hookscope import hooks, jobs, models, report, statistics, system
from hookscope.cli import process
from hookscope.cli.command import RowCommand
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.long_run import Measuring
from hookscope.cli.shared.output_paths import write_html, write_plot
from hookscope.errors import UsageError
from hookscope.findings import Finding, counted, listed, single
from hookscope.statistics import StatisticsThresholds  # its file registers the findings whose thresholds help shows


class StatisticsCommand(RowCommand):
    """A command that reports statistics."""

    plot: str | None = shared.plot_file("Draw distributions, and shares of dead and saturated channels")
    html: str | None = shared.html_file("findings, layers and their channels")
    per_channel: bool = option("Print a row for each channel.")
    save: str | None = shared.out_file("Save the statistics for `merge`, --resume, and --reference of `check`.")
    tensorboard: str | None = shared.in_file(
        "Write scalars and histograms for TensorBoard to DIR.", metavar="DIR", section="Output"
    )
    thresholds: dict[str, Any] = shared.threshold_option("activations")

    def check(self) -> None:
        super().check()
        if self.tensorboard is not None:
            statistics.check_installed()
            system.check_folder(self.tensorboard)
        if self.save is None or getattr(self, "resume", False):  # the run checks a file to resume
            return
        if os.path.isfile(self.save) and os.path.getsize(self.save) and not jobs.is_state_file(self.save):
            asked = f"--save {self.save} would replace a file that holds no statistics"  # an image, or the weights
            raise UsageError(asked, do="name another file")

    def report(self, saved: statistics.SavedStatistics) -> None:
        thresholds, source = StatisticsThresholds.of(self.thresholds), saved.source
        layers = saved.totals.statistics(thresholds.correlation)
        findings = statistics.find_problems(
            layers, saved.totals.drifts(), saved.totals.images, thresholds, source.assumed
        )
        about = {name: getattr(source, name) for name in ("model", "weights", "preprocess")}
        title = f"{models.short_name(source.model)}, {counted(saved.totals.images, 'image')}"
        with self.printed_after(_report(saved, layers, findings, about, self.per_channel)):
            if self.plot is not None:
                lines = [f"preprocessing: {source.preprocess}"]
                figure = report.plot(layers, findings=findings, title=title, weights=source.weights, lines=lines)
                write_plot(self.plot, figure)
            if self.html is not None:
                facts = {**models.package_versions(), **about, "command": process.command_line()}
                lines = _totals(saved, layers)
                page = report.draw_statistics_page(
                    layers, findings, title=title, weights=source.weights, lines=lines, provenance=facts
                )
                write_html(self.html, page)
            if self.tensorboard is not None:
                of = {"model": source.model, "weights": source.weights}
                statistics.write_events(self.tensorboard, layers, step=0, about=of)


class Stats(StatisticsCommand, Measuring):
    """Measure every layer of MODEL on images, and report what is wrong.

    \b
    Examples:
      hookscope stats resnet34 cat.jpg
      hookscope stats vgg16 samples/ --type ReLU --plot vgg16.png
      find photos -name '*.jpg' -print0 | hookscope stats resnet50 --files0-from - --format ndjson
      hookscope stats resnet34 photos/ --limit 1000 --save a.json
      hookscope merge a.json b.json

    The command measures every convolution, Linear layer and activation function, and what the model returns, which is
    called (model). A line under the table says which other layers were not measured. IMAGE is a file, a folder, a glob,
    or - for standard input.

    A row for each layer call has the mean, spread, range and its positions, zeros, quantiles, NaN and Inf, and the
    numbers of dead, saturated and duplicate channels. Findings follow the table, each with its evidence and advice. In
    tsv and csv, the column findings has their names. In ndjson, the field "row" names the kind of a line.

    --save and --resume know each image by the content of its file, not by its name. --resume refuses other images or
    settings than the saved run had. `hookscope merge` merges files of --save.
    """

    resume: bool = option(
        "Continue the interrupted run that wrote the --save file.",
        section="Output",
        needs="save",
        why="name the file of the run to continue: --save FILE --resume",
    )
    rank: bool = option("Also measure the effective rank of layers with up to 2048 channels; slower.")
    layers: hooks.Selection | None = shared.calls_option(
        "Calls to measure", "every convolution, Linear layer and activation function, and (model)"
    )

    def run(self) -> int:
        saved, skipped = self.measured(self.rank, self.save, self.resume)
        self.report(saved)
        return min(skipped, 1)


def _report(
    saved: statistics.SavedStatistics,
    layers: Sequence[statistics.LayerStatistics],
    findings: Sequence[Finding],
    source: Mapping[str, Any],
    per_channel: bool,
) -> Report:
    weights = saved.source.weights
    section = Section(statistics.statistics_rows(layers, findings, weights), statistics.STATISTICS, "layer")
    # findings that no row names, such as findings on a BatchNorm
    keys = set() if per_channel else {layer.key for layer in layers}
    rest = [f"{finding.finding} {finding.layer}".strip() for finding in single(findings) if finding.layer not in keys]
    flat_note = f"Note: not in TSV or CSV: {listed(rest, 4)}; see --format table or json" if rest else ""
    about = {"layers": section.rows} if per_channel else {}
    if per_channel:
        section = Section(statistics.channel_rows(layers, weights), statistics.CHANNELS, "channel")
    caption = {**source, "images": saved.totals.images}
    return Report([section], findings, about, _totals(saved, layers), flat_note, caption)


def _totals(saved: statistics.SavedStatistics, layers: Sequence[statistics.LayerStatistics]) -> list[str]:
    values = sum(layer.values for layer in layers)
    totals = [
        f"{counted(len(layers), 'call')}, {counted(values, 'value')}; zeros and saturated are shares, dead and"
        " duplicate count channels",
    ]
    return totals + ([words] if (words := saved.coverage.words()) else [])
