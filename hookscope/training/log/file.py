"""The log of a watched training run: one JSON object a line, appended whole or not at all, read back while it grows."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from hookscope.errors import InputError, WriteError, printable
from hookscope.system import StrPath, check_writable

_FIRST = b'{"row": "run"'
_CHUNK = 1 << 16
_GIVE = "give a log of `hookscope watch` or `hookscope.Monitor`"


@dataclass(frozen=True, slots=True)
class Run:
    """One watched run, as far as its log goes.

    Attributes:
        header: Its first line: when it started, with what, what is watched.
        rows: A line for each layer call and sampled step, in the order they were written.
        notes: What was noted, such as the first value that is not finite.
        end: Its last line; None where it goes on still, or was killed.
    """

    header: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None


def read_runs(path: StrPath) -> list[Run]:
    """The runs of a log, oldest first; of a log that nothing was written to yet, none.

    A last line that is cut off, lines that cannot be read and lines of a kind that is not known are passed over.

    Raises:
        InputError: there is no such file, or it is no log of a run.

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
                raise InputError(f"'{name}' is no log of a run", do=_GIVE)
            for line in _objects(chain([first], stream)):
                _sort(line, runs)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"no log '{name}': {getattr(error, 'strerror', None) or error}") from error
    return runs


def _begins_a_log(first: bytes) -> bool:
    """Whether a file that begins so is a log; its very first line may have been cut off by a kill."""
    return first.startswith(_FIRST) or _FIRST.startswith(first)


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        value = _parsed(line)
        if isinstance(value, dict):
            yield value


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _sort(line: dict[str, Any], runs: list[Run]) -> None:
    kind = line.get("row")
    if kind == "run":
        runs.append(Run(line))
    elif not runs:
        return
    elif kind == "layer":
        runs[-1].rows.append(line)
    elif kind == "note":
        runs[-1].notes.append(line)
    elif kind == "end":
        runs[-1] = Run(runs[-1].header, runs[-1].rows, runs[-1].notes, line)


class RunLog:
    """A log that is open for appending lines: each is in the file whole or not at all.

    A new file is made; one that is there must be such a log, and goes on after its last whole line. A device or a
    pipe is written to as it is. Of a process that forked, the child writes nothing.

    Args:
        path: Where; its folder must exist.

    Raises:
        WriteError: it cannot be written, holds something else, or another process is writing to it.

    Example:
        >>> log = RunLog("/dev/null")
        >>> log.write([{"row": "run", "loss": float("nan")}])
        >>> log.close()
    """

    def __init__(self, path: StrPath) -> None:
        self.path = os.fspath(path)
        check_writable(path)
        self._pid, self._place = os.getpid(), (-1, -1)
        with_reading = os.O_RDWR if _is_regular(path) else os.O_WRONLY  # a pipe opened for both would be its own reader
        try:
            self._descriptor = os.open(path, with_reading | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from error
        try:
            found = os.fstat(self._descriptor)
            self._place = (found.st_dev, found.st_ino)
            self._regular = stat.S_ISREG(found.st_mode)
            if self._regular:
                self._lock()
                self._continue()
        except OSError as error:
            self.close()
            raise self._refused(error.strerror or str(error)) from error
        except WriteError:
            self.close()
            raise

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each of ``rows``; a number that is not finite is written as null.

        Raises:
            WriteError: a line could not be written whole; those before it stay, nothing of it does.
        """
        if self._descriptor < 0 or os.getpid() != self._pid:
            return
        for row in rows:
            self._append(_line(row))

    def close(self) -> None:
        """Let the file go; what is written afterwards goes nowhere."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # somebody has closed it; what has its number now is not ours
                self._found()
                os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: bytes) -> None:
        size = None
        try:
            found = self._found()
            if self._regular and not found.st_nlink:
                raise OSError(errno.ENOENT, "it was removed")
            size = found.st_size if self._regular else None
            written = os.write(self._descriptor, line)
            while not self._regular and written < len(line):  # a pipe takes what it has room for
                written += os.write(self._descriptor, line[written:])
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if size is not None:
                self._take_back(size)
            raise self._refused(error.strerror or str(error)) from error

    def _found(self) -> os.stat_result:
        """What is behind the descriptor, as long as it is the log: its number may have been closed and given out again.

        Raises:
            OSError: it is closed, or something else.
        """
        with contextlib.suppress(OSError):
            found = os.fstat(self._descriptor)
            if (found.st_dev, found.st_ino) == self._place:
                return found
        raise OSError(errno.EBADF, "somebody closed it")

    def _take_back(self, size: int) -> None:
        """Let nothing stay of a line that was not written whole."""
        with contextlib.suppress(OSError):
            if self._found().st_size > size:
                os.ftruncate(self._descriptor, size)

    def _lock(self) -> None:
        """Keep other processes out: the lines of two runs at once would not tell which is whose."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._refused("another run is writing to it", "give each run a log of its own") from None
            # a file system without locks: go on without

    def _continue(self) -> None:
        """Make sure that it is a log, and that what comes begins a line."""
        size = os.fstat(self._descriptor).st_size
        if not size:
            return
        if not _begins_a_log(os.pread(self._descriptor, len(_FIRST), 0)):
            raise self._refused("it holds something else", "name a new file")
        start = self._start_of_last_line(size)
        if start == size:
            return
        if _parsed(os.pread(self._descriptor, size - start, start)) is None:
            os.ftruncate(self._descriptor, start)  # a kill cut it off
        else:
            os.write(self._descriptor, b"\n")

    def _start_of_last_line(self, size: int) -> int:
        """Where the last line begins; the end of the file where no line is open."""
        at = size
        while at:
            below = max(0, at - _CHUNK)
            newline = os.pread(self._descriptor, at - below, below).rfind(b"\n")
            if newline >= 0:
                return below + newline + 1
            at = below
        return 0

    def _refused(self, why: str, do: str = "") -> WriteError:
        return WriteError(f"cannot write the log {printable(self.path)}: {why}", do=do)


def _is_regular(path: StrPath) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:  # nothing is there yet
        return True


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False).encode("ascii") + b"\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
