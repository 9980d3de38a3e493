"""The log of a training run: one JSON object a line, each written whole or not at all, readable while it grows."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from hookscope.errors import InputError, WriteError, printable
from hookscope.system import StrPath, check_writable

_FIRST = b'{"row": "run"'
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Run:
    """One watched run, as far as its log goes.

    Attributes:
        header: The first line: when it started, with which command, what is watched.
        rows: A line for each layer call and sampled step, in the order of writing.
        notes: Notes, such as the first value that is not finite.
        end: The last line; None while the run goes on, or if it was killed.
    """

    header: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None


def read_runs(path: StrPath) -> list[Run]:
    """The runs of a log, oldest first; none for an empty log.

    Lines that are cut off, unreadable or of an unknown kind are ignored.

    Raises:
        InputError: the file does not exist, or is no log of a run.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RunLog(folder + "/run.ndjson")
        ...     log.write([{"row": "run", "every": 50}, {"row": "layer", "step": 0, "layer": "conv1"}])
        ...     log.close()
        ...     [(run.header["every"], len(run.rows), run.end) for run in read_runs(folder + "/run.ndjson")]
        [(50, 1, None)]
    """
    name = os.fspath(path)
    runs: list[Run] = []
    try:
        with open(path, "rb") as stream:
            first = stream.readline()
            if first and not _begins_a_log(first):
                do = "give a log of `hookscope watch` or `hookscope.Monitor`"
                raise InputError(f"'{name}' is no log of a run", do=do)
            for line in map(_parsed, chain([first], stream)):
                if isinstance(line, dict):
                    _add_line(line, runs)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"no log '{name}': {getattr(error, 'strerror', None) or error}") from error
    return runs


def _begins_a_log(first: bytes) -> bool:
    """Whether a file that begins so is a log; a kill may have cut off its very first line."""
    return first.startswith(_FIRST) or _FIRST.startswith(first)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _add_line(line: dict[str, Any], runs: list[Run]) -> None:
    kind = line.get("row")
    if kind == "run":
        runs.append(Run(line))
    elif runs and kind == "layer":
        runs[-1].rows.append(line)
    elif runs and kind == "note":
        runs[-1].notes.append(line)
    elif runs and kind == "end":
        runs[-1] = Run(runs[-1].header, runs[-1].rows, runs[-1].notes, line)


class RunLog:
    """A log opened for appending lines, each written whole or not at all.

    An existing file must be such a log, and is continued after its last whole line. Devices and pipes are written to
    as they are. A forked child writes nothing.

    Args:
        path: The file; its folder must exist.

    Raises:
        WriteError: the file cannot be written, is no log, or another process is writing to it.

    Example:
        >>> log = RunLog("/dev/null")
        >>> log.write([{"row": "run", "loss": float("nan")}])
        >>> log.close()
    """

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path)
        check_writable(path)
        self._pid, self._identity = os.getpid(), (-1, -1)
        with_reading = os.O_RDWR if _is_regular(path) else os.O_WRONLY  # a pipe open for both would be its own reader
        try:
            self._descriptor = os.open(path, with_reading | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._error(error.strerror or str(error)) from error
        try:
            status = os.fstat(self._descriptor)
            self._identity = (status.st_dev, status.st_ino)
            self._regular = stat.S_ISREG(status.st_mode)
            if self._regular:
                self._lock()
                self._continue(status.st_size)
        except OSError as error:
            self.close()
            raise self._error(error.strerror or str(error)) from error
        except WriteError:
            self.close()
            raise

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each of ``rows``; NaN and Inf are written as null.

        Raises:
            WriteError: a line could not be written whole; no part of it stays.
        """
        if self._descriptor < 0 or os.getpid() != self._pid:
            return
        for row in rows:
            values = {name: None if _is_nan_or_inf(value) else value for name, value in row.items()}
            self._append(json.dumps(values, allow_nan=False).encode("ascii") + b"\n")

    def close(self) -> None:
        """Close the file; later lines are dropped."""
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
        """The status of the open file.

        Raises:
            OSError: somebody closed it, or its number belongs to another file now.
        """
        with contextlib.suppress(OSError):
            status = os.fstat(self._descriptor)
            if (status.st_dev, status.st_ino) == self._identity:
                return status
        raise OSError(errno.EBADF, "somebody closed it")

    def _lock(self) -> None:
        """Lock out other processes: mixed lines of two runs could not be told apart."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._error("another run is writing to it", "give each run a log of its own") from None
            # a file system without locks: go on without

    def _continue(self, size: int) -> None:
        """Check that the file is a log, and end its last line, or remove the part of a line that a kill left."""
        if not size:
            return
        if not _begins_a_log(os.pread(self._descriptor, len(_FIRST), 0)):
            raise self._error("it holds something else", "name a new file")
        start = self._start_of_last_line(size)
        if start == size:
            return
        if _parsed(os.pread(self._descriptor, size - start, start)) is None:
            os.ftruncate(self._descriptor, start)
        else:
            os.write(self._descriptor, b"\n")

    def _start_of_last_line(self, size: int) -> int:
        """The position after the last newline."""
        at = size
        while at:
            below = max(0, at - _CHUNK)
            newline = os.pread(self._descriptor, at - below, below).rfind(b"\n")
            if newline >= 0:
                return below + newline + 1
            at = below
        return 0

    def _error(self, why: str, do: str = "") -> WriteError:
        return WriteError(f"cannot write the log {printable(self.path)}: {why}", do=do)


def _is_regular(path: StrPath) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:  # it does not exist yet
        return True


def _is_nan_or_inf(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
