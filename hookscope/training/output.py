"""Where the lines of a watched run go: a log or a list, and the sinks; and its notes."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookscope import statistics
from hookscope.errors import NonFiniteError, first_line, printable
from hookscope.hooks import MODEL, call_key
from hookscope.system import StrPath
from hookscope.training.log.file import RunLog, finite_line
from hookscope.training.log.series import METRICS
from hookscope.training.sinks import Sink, SinkChoice


@dataclass(eq=False)
class RunProgress:
    """The state of a watched run, see `Monitor`."""

    steps: int = 0
    sampled: int = 0
    backwards: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)  # one line, once the run has ended
    written_to: list[str] = field(default_factory=list)
    trouble: str | None = None
    reference: statistics.SavedStatistics | None = None
    stopped: NonFiniteError | None = None
    on_caught: Callable[[], None] | None = None  # the script has caught ``stopped`` and goes on


class WatcherOutput:
    """Writes lines and notes to ``log``, which it closes, or else to ``run.rows``; keeps the first trouble."""

    def __init__(
        self,
        run: RunProgress,
        log: StrPath | RunLog | None,
        sinks: Sequence[SinkChoice | Sink],
        header: Mapping[str, Any],
        on_trouble: Callable[[str], None] | None,
    ) -> None:
        self._run = run
        self._announced: set[str] = set()
        self._on_trouble = on_trouble or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=3))
        self._pid, self._started = os.getpid(), time.monotonic()
        self._log = RunLog(log) if isinstance(log, (str, os.PathLike)) else log
        self._sinks: list[Sink] = []
        try:
            for choice in sinks:
                self._sinks.append(choice.open() if isinstance(choice, SinkChoice) else choice)
                self._sinks[-1].begin({name: value for name, value in header.items() if name != "row"})
            run.written_to += [f"{sink.word}: {sink.where}" for sink in self._sinks]
            if self._log is not None:
                self._log.write([header])
        except BaseException:
            self._close(failed=True)
            raise

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._pid

    def write_step(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        rows = [self._line("layer", step, line) for line in lines]
        self._run.sampled += 1
        self._keep(rows, self._run.rows)
        counts = {f"{_tag(row)}/{name}": bins for row in rows for name, bins in row.get("histograms", {}).items()}
        for sink in list(self._sinks) if rows else []:
            try:
                sink.write(step, rows[0]["optimizer"], scalars_of(rows), counts)
            except Exception as error:
                self._sinks.remove(sink)
                with contextlib.suppress(Exception):
                    sink.close(failed=True)
                text = f"{sink.word} gets no more lines, the log goes on: {first_line(error)}"
                self.announce("sink-failed", step, text)

    def write_facts(self, step: int, facts: Mapping[str, Any]) -> None:
        known = {name: value for name, value in facts.items() if value is not None}
        self._keep([self._line("facts", step, known)], self._run.facts)

    def _keep(self, lines: list[dict[str, Any]], without_log: list[dict[str, Any]]) -> None:
        if self._log is None:
            without_log += map(finite_line, lines)
        else:
            self._log.write(lines)

    def note(self, note: str, step: int | None, text: str, **fields: Any) -> None:
        with contextlib.suppress(Exception):
            self._keep([self._line("note", step, {"note": note, "text": text} | fields)], self._run.notes)

    def announce(self, note: str, step: int | None, text: str) -> None:
        """Tell the user, and write a note; the same text only once."""
        if text in self._announced:
            return
        self._announced.add(text)
        self._run.trouble = self._run.trouble or text
        self.note(note, step, text)
        with contextlib.suppress(Exception):  # where warnings are errors, the training must go on
            self._on_trouble(text)

    def end(self, step: int | None, error: BaseException | None) -> None:
        """Write the last line and close the files; a forked process does neither."""
        if self.is_forked:
            return
        with contextlib.suppress(Exception):  # the log is valid without its last line
            end = self._line("end", step, {"steps": self._run.steps, "sampled": self._run.sampled} | _reason(error))
            self._keep([end], self._run.ends)
        self._close(failed=has_failed(error))

    def _line(self, row: str, step: int | None, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"row": row, "step": step, "time": round(time.monotonic() - self._started, 6), **fields}

    def _close(self, failed: bool) -> None:
        for sink in self._sinks:
            with contextlib.suppress(Exception):
                sink.close(failed)
        self._sinks = []
        with contextlib.suppress(Exception):
            if self._log is not None:
                self._log.close()


def scalars_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """A scalar ``LAYER/METRIC`` for each metric of the lines of one step, and ``loss`` and ``learning_rate``.

    Further models have ``modelN/`` before their names, further optimizers ``optimizerN/``. None has no scalar; True is
    1.
    """
    scalars: dict[str, float] = {}
    for row in rows:
        optimizer = f"optimizer{row['optimizer']}/" if row["optimizer"] else ""
        for name in ("loss", "learning_rate"):
            if row[name] is not None:
                scalars.setdefault(optimizer + name, float(row[name]))
        known = [name for name in METRICS if row.get(name) is not None and name not in ("learning_rate", "order")]
        scalars |= {f"{_tag(row)}/{name}": float(row[name]) for name in known}
    return scalars


def _tag(row: Mapping[str, Any]) -> str:
    layer = printable(call_key(row["layer"] or MODEL, row["call"]))  # a tag with an empty group is lost
    return f"model{row['model']}/{layer}" if row["model"] else layer


def has_failed(error: BaseException | None) -> bool:
    """Whether a run ended with an error, and not by itself or by an exit with status 0."""
    return error is not None and _reason(error)["status"] != 0


def _reason(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"reason": "done", "status": None}
    if isinstance(error, SystemExit):
        code = error.code
        return {"reason": "exit", "status": code if isinstance(code, int) else int(code is not None)}
    stopped = isinstance(error, (KeyboardInterrupt, NonFiniteError))
    return {"reason": "stopped" if stopped else "exception", "status": None}
