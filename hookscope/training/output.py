"""Where the lines of a watched run go: a log, an event file, a list; and what there is to say beside them."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from hookscope.errors import NonFiniteError
from hookscope.system import StrPath
from hookscope.training.log.file import RunLog
from hookscope.training.tensorboard import TensorBoardWriter


class WatcherOutput:
    """The lines of one run.

    Args:
        log: File to append to, or a log that is open, which the run then closes; without one they are kept.
        events: Folder for an event file of TensorBoard.
        header: The first line.
        on_trouble: Called with what there is to say; None for a warning.

    Attributes:
        rows: The lines of layers, where there is no log.
        sampled: How many steps they are of.
        trouble: What was said first, None where nothing was.

    Raises:
        WriteError: a place cannot be written.
        InstallationError: TensorBoard is not installed.
    """

    def __init__(
        self,
        log: StrPath | RunLog | None = None,
        events: StrPath | None = None,
        header: Mapping[str, Any] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.sampled = 0
        self.trouble: str | None = None
        self._said: set[str] = set()
        self._on_trouble = on_trouble or _warn
        self._pid, self._started = os.getpid(), time.monotonic()
        self._log = RunLog(log) if isinstance(log, (str, os.PathLike)) else log
        self._events: TensorBoardWriter | None = None
        try:
            if events is not None:
                self._events = TensorBoardWriter(events)
            if header is not None:
                self._write(header)
        except BaseException:
            self.close()
            raise

    def line(self, row: str, step: int | None) -> dict[str, Any]:
        """What every line but the first begins with."""
        return {"row": row, "step": step, "time": round(time.monotonic() - self._started, 6)}

    def deliver(self, rows: list[dict[str, Any]]) -> None:
        """Write the lines of one sampled step."""
        if self._log is None:
            self.rows += rows
        else:
            self._log.write(rows)
        if self._events is not None:
            self._events.write(rows)
        self.sampled += 1

    def note(self, note: str, step: int | None, text: str, **more: Any) -> None:
        """Note something in the log; where that fails it is not noted."""
        with contextlib.suppress(Exception):
            self._write(self.line("note", step) | {"note": note, "text": text} | more)

    def say(self, note: str, step: int | None, text: str) -> None:
        """Tell a text once, and note it in the log."""
        if text in self._said:
            return
        self._said.add(text)
        self.trouble = self.trouble or text
        self.note(note, step, text)
        with contextlib.suppress(Exception):  # a warning that is an error is no reason to end a training
            self._on_trouble(text)

    def end(self, step: int | None, error: BaseException | None) -> None:
        """Write the last line and let go of the files; a process that was forked off leaves them alone."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # the run is over, and the log without its last line is whole
            self._write(self.line("end", step) | {"sampled": self.sampled} | _reason(error))
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        with contextlib.suppress(Exception):  # nothing of the run depends on it
            if self._events is not None:
                self._events.close()
        with contextlib.suppress(Exception):
            if self._log is not None:
                self._log.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._log is not None:
            self._log.write([row])


def _reason(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"reason": "done", "status": None}
    if isinstance(error, SystemExit):
        code = error.code
        return {"reason": "exit", "status": code if isinstance(code, int) else int(code is not None)}
    stopped = isinstance(error, (KeyboardInterrupt, NonFiniteError))
    return {"reason": "stopped" if stopped else "exception", "status": None}


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
