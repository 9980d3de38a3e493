"""What ``stats`` and ``merge`` share: the report of statistics, and the files that they write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import click

from hookscope import jobs, models, report, statistics, system
from hookscope.cli import process
from hookscope.cli.command import Command, given_by
from hookscope.cli.output.formats import write_report
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import check_html, check_plot, is_same_file, write_html, write_plot
from hookscope.cli.shared.threshold_options import threshold_option
from hookscope.errors import UsageError
from hookscope.findings import Finding, counted, listed, single
from hookscope.statistics import StatisticsThresholds  # its file registers the findings whose thresholds help shows


class StatisticsCommand(Command):
    """A command that reports statistics."""

    plot: str | None = given_by(shared.plot_option("Draw distributions, and shares of dead and saturated channels"))
    html: str | None = given_by(shared.html_option("findings, layers and their channels"))
    per_channel: bool = given_by(click.option("--per-channel", is_flag=True, help="Print a row for each channel."))
    save: str | None = given_by(shared.file_option("--save", "Save the statistics, for `merge` and --resume."))
    tensorboard: str | None = given_by(
        shared.file_option("--tensorboard", "Write scalars and histograms for TensorBoard to DIR.", metavar="DIR")
    )
    thresholds: dict[str, Any] = given_by(threshold_option("activations"))

    def check_outputs(self, images: Sequence[str], resume: bool = False) -> None:
        """Refuse, before minutes of work, what cannot be written after it."""
        check_plot(self.plot, images)
        check_html(self.html, images, {"--plot": self.plot, "--save": self.save})
        if self.tensorboard is not None:
            statistics.check_installed()
            system.check_folder(self.tensorboard)
        if self.save is not None:
            system.check_writable(self.save)
            if not resume:  # the run itself checks a file to resume
                _refuse_foreign(self.save)
            if self.plot is not None and is_same_file(self.plot, self.save):
                raise UsageError(f"--plot and --save name the same file '{self.plot}'")

    def report(self, saved: statistics.SavedStatistics) -> None:
        """Print the statistics and their findings, and write the files."""
        thresholds, source = StatisticsThresholds.of(self.thresholds), saved.source
        layers = saved.totals.statistics(thresholds.correlation)
        findings = statistics.find_problems(
            layers, saved.totals.drifts(), saved.totals.images, thresholds, source.assumed
        )
        about = {name: getattr(source, name) for name in ("model", "weights", "preprocess")}
        title = f"{source.model}, {counted(saved.totals.images, 'image')}"
        with ExitStack() as stack:  # a full disk is no reason to lose the rows
            stack.callback(_print, saved, layers, findings, self.per_channel, self.format)
            if self.plot is not None:
                lines = [f"preprocessing: {source.preprocess}"]
                figure = statistics.plot_statistics(layers, findings, title, weights=source.weights, lines=lines)
                write_plot(self.plot, figure)
            if self.html is not None:
                facts = {**models.package_versions(), **about, "command": process.command_line()}
                lines = _totals(saved, layers)
                page = report.draw_statistics_page(
                    layers, findings, title, weights=source.weights, lines=lines, provenance=facts
                )
                write_html(self.html, page)
            if self.tensorboard is not None:
                of = {"model": source.model, "weights": source.weights}
                statistics.write_events(self.tensorboard, layers, step=0, about=of)


def _refuse_foreign(save: str) -> None:
    """Refuse to replace a file that does not hold saved statistics, such as an image or the weights."""
    if not os.path.isfile(save) or not os.path.getsize(save):
        return
    with open(save, "rb") as stream:
        beginning = stream.read(len(jobs.BEGINNING))
    if beginning != jobs.BEGINNING:
        raise UsageError(f"--save {save} would replace a file that holds no statistics", do="name another file")


def _print(
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
