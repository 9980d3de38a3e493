"""Show the findings of a log of watch."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import click

from hookscope import models, report, training
from hookscope.cli import process
from hookscope.cli.command import RowCommand
from hookscope.cli.fields import argument
from hookscope.cli.output.formats import Report, Section, plain_json
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import write_html, write_plot
from hookscope.columns import Column, Columns
from hookscope.errors import InputError, near_misses
from hookscope.findings import verdict

COLUMNS = Columns(
    Column("step"),
    Column("last_step", need=2),
    Column("time", need=1),
    Column("lasts", where="rows"),
    Column("finding"),
    Column("severity", need=3),
    Column("layer"),
    Column("layers", where="rows"),
    Column("evidence", where="rows"),
    Column("meaning", where="rows"),
)


class ShowRun(RowCommand):
    """Show what the last run in LOG did: the findings, the most severe first.

    \b
    Examples:
      hookscope show-run hookscope.ndjson
      hookscope show-run run.ndjson --plot run.png --html run.html
      hookscope show-run run.ndjson --format json | jq '.findings[0]'

    LOG is the file that `hookscope watch` writes; it may still grow. The page of --html draws all runs of the same
    script over one another; it does not follow a growing log. The format json adds the run and the last values of each
    layer. The exit status is 0, with or without findings.
    """

    log: str = argument("[LOG]", default="hookscope.ndjson", required=False, type=click.Path())
    plot: str | None = shared.plot_file("Draw the curves")
    html: str | None = shared.html_file("findings, curves and layers")

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield "log", self.log

    def run(self) -> None:
        log = self.log
        if not os.path.exists(log):
            raise InputError(f"no log '{log}': No such file or directory", _near(log))
        runs = training.read_runs(log)
        if not runs:
            raise InputError(f"'{log}' holds no run yet", do="wait for the first sampled step, or start a run")
        run = runs[-1]
        findings = training.findings_over_time(run)
        written = f"; last written to {training.duration_words(max(0.0, time.time() - os.stat(log).st_mtime))} ago"
        lines = [_what_ran(run, runs), f"{training.summary(run)}{written if run.end is None else ''}"]
        if self.plot is not None:
            facts = {"run": _run_row(run), "findings": [finding.as_row() for finding in findings]}
            provenance = {name: plain_json(fact) for name, fact in facts.items()}
            write_plot(self.plot, report.plot(run, findings=findings, title=lines[0]), provenance)
        if self.html is not None:
            facts = {**models.package_versions(), "log": log, "command": process.command_line()}
            title = lines[0].partition(", started")[0]
            write_html(self.html, report.draw_training_page(runs, findings, title=title, lines=lines, provenance=facts))
        every = [finding.as_row() for finding in findings]
        rows = [{name: value for name, value in row.items() if name in COLUMNS.flat} for row in every]
        about = {"run": _run_row(run), "layers": training.last_rows(run)}
        section = Section(rows, COLUMNS, needs_rows=True)
        note = f"Note: {verdict(findings, judged := training.judged(run))}"
        self.print(Report([section], findings, about, lines, flat_note=note, judged=judged))


def _near(log: str) -> str:
    """The logs of the ranks of this run, else logs with similar names."""
    folder, name = os.path.split(log)
    begin, suffix = os.path.splitext(name)
    there = sorted(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
    ranks = [entry for entry in there if entry.startswith(f"{begin}.rank") and entry.endswith(suffix)]
    near = ranks[:3] or near_misses(name, [entry for entry in there if entry.endswith(suffix or ".ndjson")])
    return "there is " + ", ".join(os.path.join(folder, entry) for entry in near) if near else ""


def _what_ran(run: training.Run, runs: Sequence[training.Run]) -> str:
    header = run.header
    command, every, size = header.get("command"), header.get("every"), header.get("world_size") or 1
    script, *words = map(str, command or ["a training loop"])
    parts = [" ".join([os.path.basename(script), *words]), f"started {header.get('started')}"]
    parts += ["every step" if every == 1 else f"every {every} steps"]
    parts += [f"rank {header.get('rank')} of {size}"] if size > 1 else []
    scripts = Counter(other.script or "a training loop" for other in runs)
    counts = ", ".join(f"{count:,} of {script}" for script, count in scripts.items()) if len(scripts) > 1 else ""
    parts += [f"the last of {len(runs):,} runs in the log{f' ({counts})' if counts else ''}"] if len(runs) > 1 else []
    return ", ".join(parts)


def _run_row(run: training.Run) -> dict[str, Any]:
    header = {name: value for name, value in run.header.items() if name not in ("row", "layers", "types")}
    chosen = {"chosen_layers": run.header.get("layers"), "chosen_types": run.header.get("types")}
    return {**header, **chosen, **dataclasses.asdict(training.summary(run)), "notes": run.notes}
