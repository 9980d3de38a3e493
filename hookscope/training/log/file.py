"""The log of a training run: one JSON object a line, each written whole or not at all, readable while it grows."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from hookscope.display import Cells, Rows, Shown
from hookscope.errors import InputError, WriteError, path_of, printable
from hookscope.system import StrPath, check_writable, is_locked_by_another

_FIRST = b'{"row": "run"'
_MOST_BYTES = 1 << 31  # a step of a hundred layers takes 40 thousand
_LONGEST_LINE = 1 << 22
_MOST_CALLS = 20_000  # of layers: more take minutes
_LISTS = {"layer": "rows", "note": "notes", "facts": "facts"}  # the fields of a run, by the kind of their lines
_NO_METRICS = ("row", "loss", "passes", "learning_rate")  # in the line of a layer
_GIVE = "give a log of `hookscope watch` or `hookscope.Monitor`"
_SAMPLE, _FEWER = "sample fewer steps with ‹every|--every›", "watch fewer layers with ‹layers|--layer›"


@dataclass(frozen=True, slots=True, repr=False)
class Run(Shown):
    """One watched run, as `read_runs` reads it from a log; `Monitor` documents the lines.

    Attributes:
        header: The first line: versions, command, settings and models; may be empty.
        rows: The lines of layer calls at sampled steps.
        notes: The lines of notes.
        end: The last line, None if the run has not ended.
        facts: The lines of facts of sampled steps.
    """

    header: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    facts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def script(self) -> str:
        """The file or the module that ran, without its arguments; empty for a training loop."""
        command = [str(word) for word in self.header.get("command") or ()]
        return " ".join(command[: 2 if command[:1] == ["-m"] else 1])

    def _cells(self) -> Cells:
        steps = [row["step"] for row in self.rows if isinstance(row.get("step"), int)]
        span = {"first step": min(steps), "last step": max(steps)} if steps else {}
        layers = len({row.get("layer") for row in self.rows})
        return {"layers": layers, **span, "notes": len(self.notes), "ended": self.end is not None}


def read_runs(path: StrPath) -> Rows[Run]:
    """The runs of a log, oldest first; lines that are cut off, unreadable or of an unknown kind are ignored.

    Raises:
        InputError: the file does not exist, is not the log of a run, or is too large for one.

    Example:
        >>> read_runs("samples/train.py")
        Traceback (most recent call last):
        ...
        hookscope.errors.InputError: 'samples/train.py' is not the log of a run; give a log of `hookscope watch` or ...
    """
    name = path_of(path)
    runs = Rows[Run]()
    read, calls = 0, set[tuple[Any, ...]]()
    try:
        with open(path, "rb") as stream:
            first = stream.readline(_LONGEST_LINE)
            if first and not _begins_a_log(first):
                raise InputError(f"'{name}' is not the log of a run", do=_GIVE)
            for text in chain([first], iter(lambda: stream.readline(_LONGEST_LINE), b"")):
                line = _parsed(text)
                if isinstance(line, dict):
                    kind = line.get("row")
                    if kind == "run":
                        runs.append(Run(line))
                        calls = set()
                    elif runs and kind == "end":
                        runs[-1] = replace(runs[-1], end=line)
                    elif runs and kind in _LISTS:
                        getattr(runs[-1], _LISTS[kind]).append(line)
                    calls.add(tuple(str(line.get(part)) for part in ("model", "layer", "call")))
                read += len(text)
                if read > _MOST_BYTES:
                    raise InputError(f"the log '{name}' is too long", f"the limit is {_MOST_BYTES:,} bytes", _SAMPLE)
                if len(calls) > _MOST_CALLS:
                    exists = f"a run has more than {_MOST_CALLS:,} layer calls"
                    raise InputError(f"the log '{name}' is too large", exists, _FEWER)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"no log '{name}': {getattr(error, 'strerror', None) or error}", do=_GIVE) from error
    return runs


def last_rows(run: Run) -> list[dict[str, Any]]:
    """The metrics of each layer call at the last step in which it ran, in order of execution."""
    last = {(row.get("model"), row.get("layer"), row.get("call")): row for row in run.rows}
    rows = [{name: value for name, value in row.items() if name not in _NO_METRICS} for row in last.values()]

    def place(row: Mapping[str, Any]) -> tuple[int, int]:
        order = row.get("order")
        return row.get("model") or 0, (row.get("index") or 0) if order is None else order  # old logs have no order

    return sorted(rows, key=place)


def last_run(run: Run | StrPath) -> Run:
    """``run`` itself, or the last run of the log at this path."""
    if isinstance(run, Run):
        return run
    if runs := read_runs(run):
        return runs[-1]
    raise InputError(f"'{os.fspath(run)}' holds no run yet", do="wait for the first sampled step, or start a run")


def _begins_a_log(first: bytes) -> bool:
    """Whether a file that begins so is a log; a kill may have cut off its very first line."""
    return first.startswith(_FIRST) or _FIRST.startswith(first)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def finite_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """The line with None for NaN and Inf: JSON has neither."""
    bad = {name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
    return dict(line) | dict.fromkeys(bad)


class RunLog:
    """A log opened for appending lines, each written whole or not at all.

    An existing file must be such a log, and is continued after its last whole line. Devices and pipes are written to
    as they are. A forked child writes nothing.

    Raises:
        WriteError: the file cannot be written, is not a log, or another process is writing to it.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path)
        check_writable(path)
        self._pid, self._identity = os.getpid(), (-1, -1)
        is_special = os.path.exists(path) and not os.path.isfile(path)
        with_reading = os.O_WRONLY if is_special else os.O_RDWR  # a pipe open for both would be its own reader
        try:
            self._descriptor = os.open(path, with_reading | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        try:
            status = os.fstat(self._descriptor)
            self._identity = (status.st_dev, status.st_ino)
            self._regular = stat.S_ISREG(status.st_mode)
            if self._regular:
                if is_locked_by_another(self._descriptor):  # mixed lines of two runs could not be separated
                    raise self._error("another run is writing to it", "give each run a log of its own")
                self._continue(status.st_size)
        except (OSError, WriteError) as error:
            self.close()
            if isinstance(error, WriteError):
                raise
            raise self._error(error.strerror or str(error)) from error

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each of ``rows``, each as `finite_line`."""
        if self._descriptor < 0 or os.getpid() != self._pid:
            return
        for row in rows:
            self._append(json.dumps(finite_line(row), allow_nan=False).encode("ascii") + b"\n")

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # somebody closed it: its number may belong to another file now
                self._status()
                os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: bytes) -> None:
        size = None
        try:
            status = self._status()
            if self._regular and not status.st_nlink:
                raise OSError(errno.ENOENT, "it was removed")
            size = status.st_size if self._regular else None
            written = os.write(self._descriptor, line)
            while not self._regular and written < len(line):  # a pipe takes what it has room for
                written += os.write(self._descriptor, line[written:])
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):  # leave no part of a line
                    if self._status().st_size > size:
                        os.ftruncate(self._descriptor, size)
            raise self._error(error.strerror or str(error)) from error

    def _status(self) -> os.stat_result:
        """The status of the open file; an OSError if it was closed, or its number belongs to another file now."""
        with contextlib.suppress(OSError):
            status = os.fstat(self._descriptor)
            if (status.st_dev, status.st_ino) == self._identity:
                return status
        raise OSError(errno.EBADF, "somebody closed it")

    def _continue(self, size: int) -> None:
        """Check that the file is a log, and end its last line, or remove the part of a line that a kill left."""
        if not size:
            return
        with mmap.mmap(self._descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as content:
            is_log = _begins_a_log(content[: len(_FIRST)])
            start = content.rfind(b"\n") + 1  # of the last line
            is_whole = _parsed(content[start:]) is not None
        if not is_log:
            raise self._error("it holds something else", "name a new file")
        if start < size and is_whole:
            os.write(self._descriptor, b"\n")
        elif start < size:
            os.ftruncate(self._descriptor, start)

    def _error(self, why: str, do: str = "") -> WriteError:
        return WriteError(f"cannot write the log {printable(self.path)}: {why}", do=do)


class LateLog:
    """A log that is opened at ``path()`` with its first line of a layer, facts or note, once ``waits()`` is false."""

    def __init__(self, path: Callable[[], str], waits: Callable[[], bool]) -> None:
        self._path, self._waits = path, waits
        self._log: RunLog | None = None
        self._waiting: list[Mapping[str, Any]] = []

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self._waiting += lines
        if all(line.get("row") in ("run", "end") for line in self._waiting) or self._waits():
            return
        self._log = self._log or RunLog(self._path())
        self._log.write(self._waiting)
        self._waiting = []

    def close(self) -> None:
        if self._log is not None:
            if self._waiting:
                self._log.write(self._waiting)
            self._log.close()
