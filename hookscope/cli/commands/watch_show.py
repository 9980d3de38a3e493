"""``hookscope watch --show``: the log of a run, in words, rows and curves."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.output.report import write_report
from hookscope.cli.shared.options import chosen_format
from hookscope.errors import InputError, UsageError, near_misses, printable
from hookscope.training import duration_words

if TYPE_CHECKING:
    from hookscope.training import Run, TimedFinding

FIELDS = ("step", "last_step", "time", "lasts", "finding", "layer", "layers", "evidence", "meaning")
_TABLE = ("step", "last_step", "time", "finding", "layer")  # how many more layers, and which, is told in words
# of a layer's line what is of the step
_OF_THE_STEP = ("row", "loss", "learning_rate")


def show(log: str, plot: str | None, format: str | None) -> None:
    """Tell what the last run in ``log`` shows, on standard output; draw its curves to ``plot``.

    Args:
        log: The file.
        plot: The file of a picture, None for none.
        format: One of `FORMATS`; None for what suits standard output.
    """
    from hookscope.training import findings_over_time, read_runs

    if plot is not None:
        _check_plot(plot, log)
    runs = _found(log, read_runs)
    run = runs[-1]
    findings = findings_over_time(run)
    lines = totals(run, len(runs), _age(log))
    if plot is not None:
        _draw(plot, run, findings, lines)
    _report(run, findings, lines, chosen_format(format), process.standard_output())


def _check_plot(plot: str, log: str) -> None:
    from hookscope.drawing import plot_suffix
    from hookscope.system import check_writable

    plot_suffix(plot)
    check_writable(plot)
    if os.path.exists(plot) and os.path.exists(log) and os.path.samefile(plot, log):
        raise UsageError(f"cannot write {plot}: it is the log itself", do="write somewhere else")


def _found(log: str, read_runs: Any) -> list[Run]:
    """The runs of a log; of processes that had one each, the name without a rank is no file."""
    if not os.path.exists(log):
        raise InputError(f"no log '{log}': No such file or directory", _near(log))
    runs: list[Run] = read_runs(log)
    if not runs:
        raise InputError(f"'{log}' holds no run yet", do="wait for the first sampled step, or run one")
    return runs


def _near(log: str) -> str:
    folder, name = os.path.split(log)
    begin, suffix = os.path.splitext(name)
    there = sorted(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else []
    ranks = [entry for entry in there if entry.startswith(f"{begin}.rank") and entry.endswith(suffix)]
    near = ranks[:3] or near_misses(name, [entry for entry in there if entry.endswith(suffix or ".ndjson")])
    return "there is " + ", ".join(os.path.join(folder, entry) for entry in near) if near else ""


def _age(log: str) -> float:
    return max(0.0, time.time() - os.stat(log).st_mtime)


def totals(run: Run, runs: int, age: float) -> list[str]:
    """The lines on the run as a whole: what ran, how far it went, how it ended, what became of the loss.

    Args:
        run: The one that is shown.
        runs: How many the log has.
        age: Seconds since it was last written to.
    """
    from hookscope.training import summary

    written = f"; last written to {duration_words(age)} ago" if run.end is None else ""
    return [_what(run, runs), f"{summary(run)}{written}"]


def _what(run: Run, runs: int) -> str:
    header = run.header
    command, size = header.get("command"), header.get("world_size") or 1
    words = " ".join(map(str, command)) if command else "a training loop"
    every = header.get("every")
    parts = [f"{words}, started {header.get('started')}, every {'step' if every == 1 else f'{every} steps'}"]
    parts += [f"rank {header.get('rank')} of {size}"] if size > 1 else []
    parts += [f"the last of {runs:,} runs in the log"] if runs > 1 else []
    return ", ".join(parts)


def _last_of_each_layer(run: Run) -> list[dict[str, Any]]:
    """The figures of each layer call in the last step in which it ran, in order of execution."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in run.rows:
        found[row.get("model"), row.get("layer"), row.get("call")] = row
    rows = [{name: value for name, value in row.items() if name not in _OF_THE_STEP} for row in found.values()]
    return sorted(rows, key=lambda row: (row.get("model") or 0, row.get("index") or 0))


def _run_row(run: Run) -> dict[str, Any]:
    """The run as a whole: what its first line says, how far it came, what was noted."""
    from hookscope.training import summary

    header = {name: value for name, value in run.header.items() if name not in ("row", "layers", "types")}
    chosen = {"chosen_layers": run.header.get("layers"), "chosen_types": run.header.get("types")}
    return {**header, **chosen, **summary(run).as_row(), "notes": run.notes}


def _draw(path: str, run: Run, findings: Sequence[TimedFinding], lines: Sequence[str]) -> None:
    from hookscope.drawing import figure_bytes, plot_suffix
    from hookscope.system import write_atomically
    from hookscope.training import run_figure

    figure = run_figure(run, findings, lines[0])
    told = [found.as_row() for found in findings]
    provenance = output.plain_json({"run": _run_row(run), "findings": told})
    assert isinstance(provenance, dict)
    write_atomically(path, figure_bytes(figure, plot_suffix(path), provenance))


def _report(run: Run, findings: Sequence[TimedFinding], lines: Sequence[str], format: str, stream: TextIO) -> None:
    rows = [{name: value for name, value in found.as_row().items() if name in FIELDS} for found in findings]
    if format == "json":
        write_report(_last_of_each_layer(run), (), findings, format, stream, about={"run": _run_row(run)})
    elif format == "table":
        _write_table(rows, findings, lines, stream)
    else:
        output.write_rows(rows, FIELDS, format, stream)


def _write_table(
    rows: Sequence[Mapping[str, Any]], findings: Sequence[TimedFinding], lines: Sequence[str], stream: TextIO
) -> None:
    """A line for each finding, then the run as a whole, then the findings in words."""
    if rows:
        write_report(rows, _TABLE, findings, "table", stream, lines)
    else:
        stream.write("".join(f"{printable(line)}\n" for line in [*lines, "", "no findings"]))
        stream.flush()
