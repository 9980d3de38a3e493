"""Where the lines of a watched run go: a log, an event file of TensorBoard, a list; and its notes."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hookscope.errors import NonFiniteError, WriteError, printable
from hookscope.hooks import call_key
from hookscope.statistics import check_installed
from hookscope.system import StrPath, check_folder, make_folder
from hookscope.training.log.file import RunLog

# Fields of a line that are no metrics of a layer.
# fmt: off
_NO_METRICS = frozenset((
    "row", "step", "time", "loss", "passes", "learning_rate", "optimizer", "layer", "call", "called_as", "index",
    "order", "type", "model",
))
# fmt: on


@dataclass(eq=False)
class RunProgress:
    """The state of a watched run, see `Monitor`."""

    steps: int = 0
    sampled: int = 0
    backwards: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    trouble: str | None = None
    stopped: NonFiniteError | None = None
    on_caught: Callable[[], None] | None = None  # the script has caught ``stopped`` and goes on


class WatcherOutput:
    """Writes the lines and the notes of one run, and updates its rows, sampled steps and first trouble.

    ``log`` is a file to append to, or an open log, which is closed at the end; None keeps the lines in ``run.rows``.
    """

    def __init__(
        self,
        run: RunProgress,
        log: StrPath | RunLog | None,
        events: StrPath | None,
        header: Mapping[str, Any],
        on_trouble: Callable[[str], None] | None,
    ) -> None:
        self._run = run
        self._announced: set[str] = set()
        self._on_trouble = on_trouble or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=3))
        self._pid, self._started = os.getpid(), time.monotonic()
        self._log = RunLog(log) if isinstance(log, (str, os.PathLike)) else log
        self._events: EventFile | None = None
        try:
            self._events = None if events is None else EventFile(events)
            if self._log is not None:
                self._log.write([header])
        except BaseException:
            self._close()
            raise

    def write_step(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write the lines of the layers in one sampled step."""
        rows = [self._line("layer", step, line) for line in lines]
        if self._log is None:
            self._run.rows += rows
        else:
            self._log.write(rows)
        if self._events is not None:
            self._events.write(rows)
        self._run.sampled += 1

    def write_facts(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write the facts of a sampled step, without those that are None."""
        line = self._line("facts", step, {name: value for name, value in facts.items() if value is not None})
        if self._log is None:
            self._run.facts.append(line)
        else:
            self._log.write([line])

    def note(self, note: str, step: int | None, text: str, **fields: Any) -> None:
        """Write a note to the log, if the log can be written."""
        with contextlib.suppress(Exception):
            if self._log is not None:
                self._log.write([self._line("note", step, {"note": note, "text": text} | fields)])

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
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # the log is valid without its last line
            if self._log is not None:
                self._log.write([self._line("end", step, {"sampled": self._run.sampled} | _reason(error))])
        self._close()

    def _line(self, row: str, step: int | None, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"row": row, "step": step, "time": round(time.monotonic() - self._started, 6), **fields}

    def _close(self) -> None:
        for file in (None if self._events is None else self._events.writer, self._log):
            with contextlib.suppress(Exception):
                if file is not None:
                    file.close()


class EventFile:
    """An event file of TensorBoard with a scalar ``LAYER/METRIC`` for each metric of a line, and ``loss``.

    Further models have ``modelN/`` before their names, further optimizers ``optimizerN/``. None has no scalar; True is
    1. The folder is created if it does not exist.
    """

    def __init__(self, folder: StrPath) -> None:
        check_installed()
        check_folder(folder)
        make_folder(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch imports TensorFlow, if that is installed
            from torch.utils.tensorboard import SummaryWriter
        try:
            self.writer = SummaryWriter(str(folder))
        except OSError as error:
            raise WriteError(f"cannot write {folder}: {error.strerror or error}") from error

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the scalars of one sampled step, and flush them to the disk."""
        scalars: dict[tuple[str, int], Any] = {}
        for row in rows:
            optimizer = f"optimizer{row['optimizer']}/" if row["optimizer"] else ""
            for name in ("loss", "learning_rate"):
                if row[name] is not None:
                    scalars.setdefault((optimizer + name, row["step"]), row[name])
            layer = printable(call_key(row["layer"] or "(model)", row["call"]))  # a tag with an empty group is lost
            tag = f"model{row['model']}/{layer}" if row["model"] else layer
            metrics = {name: value for name, value in row.items() if name not in _NO_METRICS and value is not None}
            scalars.update({(f"{tag}/{name}", row["step"]): value for name, value in metrics.items()})
        for (tag, step), value in scalars.items():
            self.writer.add_scalar(tag, float(value), step)
        self.writer.flush()


def _reason(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"reason": "done", "status": None}
    if isinstance(error, SystemExit):
        code = error.code
        return {"reason": "exit", "status": code if isinstance(code, int) else int(code is not None)}
    stopped = isinstance(error, (KeyboardInterrupt, NonFiniteError))
    return {"reason": "stopped" if stopped else "exception", "status": None}
