"""A sink in a process of its own, and what runs in that process. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hookscope.errors import InstallationError, WriteError
from hookscope.training.sinks import SINKS, Histogram, Sink, first_line

_PATIENCE = 30.0  # seconds that a script waits at its end


class SinkProcess(Sink):
    """A sink in a process of its own.

    wandb and MLflow change signals, exits, the environment and what a script's own calls of them do.
    """

    def __init__(self, word: str, place: str) -> None:
        self.word = word  # type: ignore[misc]
        root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        code = f"import sys; sys.path.append({root!r}); from hookscope.training.sink_process import serve; serve()"
        self._pid = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, word, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the script does not end it
            text=True,
            encoding="utf-8",
        )
        self._is_answer_due = True
        try:
            self.where = self._answer()
        except BaseException:
            self._end()
            raise

    def begin(self, header: Mapping[str, Any]) -> None:
        self._send("begin", header)

    def write(
        self, step: int, optimizer: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        self._send("write", step, optimizer, scalars, histograms)

    def close(self, failed: bool) -> None:
        if os.getpid() != self._pid:
            return
        try:
            self._send("close", failed)
        finally:
            self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=_PATIENCE)  # it may go on after the script

    def _send(self, *message: Any) -> None:
        """Send a call, when the one before it is answered: the sink writes while the script goes on."""
        assert self._process.stdin is not None
        if self._is_answer_due:
            self._answer()
        self._is_answer_due = True
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        self._is_answer_due = False
        kind, *words = json.loads(self._process.stdout.readline() or '["WriteError", "its process has ended"]')
        if kind == "done":
            return str(words[0])
        raise (InstallationError if kind == "InstallationError" else WriteError)(*words)


def serve() -> None:
    """Run a sink for `SinkProcess`: a line of JSON for each call on standard input, one for each answer on output."""
    word, place = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # packages may print

    def answer(call: Callable[[], Any]) -> Any:
        try:
            value, words = call(), ["done", ""]
            words = ["done", value.where] if isinstance(value, Sink) else words
        except (InstallationError, WriteError) as error:
            value, words = None, [type(error).__name__, error.asked, error.exists, error.do]
        except Exception as error:
            value, words = None, ["WriteError", first_line(error)]
        with contextlib.suppress(OSError):  # the script was killed
            answers.write(json.dumps(words) + "\n")
            answers.flush()
        return value

    sink = answer(lambda: SINKS[word](place))
    name = ""
    for line in sys.stdin if sink is not None else ():
        name, *arguments = json.loads(line)
        answer(partial(getattr(sink, name), *arguments))
    if sink is not None and name != "close":
        sink.close(True)
