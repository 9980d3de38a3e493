"""The sinks of a watched run as a user names them. Needs no torch."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from hookscope.errors import InstallationError, UsageError, WriteError, nearest
from hookscope.system import check_folder
from hookscope.training.sinks import SINKS, Histogram, Sink, TensorBoard, first_line, not_installed

_PATIENCE = 30.0  # seconds that a script waits at its end


class SinkProcess(Sink):
    """A sink in a process of its own.

    wandb and MLflow change signals, exits, the environment and what a script's own calls of them do.
    """

    def __init__(self, word: str, place: str) -> None:
        self.word = word  # type: ignore[misc]
        root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        code = f"import sys; sys.path.append({root!r}); from hookscope.training.sink_choice import serve; serve()"
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


@dataclass(frozen=True, slots=True)
class SinkChoice:
    """``tensorboard:DIR``, ``wandb``, ``wandb:PROJECT``, ``mlflow`` or ``mlflow:EXPERIMENT``."""

    word: str
    place: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """What ``text`` spells; a UsageError for another program, and for TensorBoard without a folder."""
        word, _, place = str(text).partition(":")
        if word not in SINKS:
            exists = nearest(word, list(SINKS))
            raise UsageError(f"cannot write to '{text}'", exists, "give tensorboard:DIR, wandb or mlflow")
        if word == TensorBoard.word and not place:
            raise UsageError("tensorboard needs a folder", do="write tensorboard:DIR")
        return cls(word, place)

    def __str__(self) -> str:
        return f"{self.word}:{self.place}" if self.place else self.word

    def of_rank(self, rank: int) -> Self:
        """The sink of one process of several: each has a folder of its own; the runs of others have its rank."""
        return replace(self, place=os.path.join(self.place, f"rank{rank}")) if self.word == TensorBoard.word else self

    def check(self) -> None:
        """Check, without an import, that the package is installed and that the folder can be written.

        Raises:
            InstallationError: the package is missing.
            WriteError: the folder cannot be written.
        """
        spec = importlib.util.find_spec(self.word)
        if spec is None or spec.origin is None:  # a folder `wandb` of earlier runs is not a package
            raise not_installed(self.word)
        if self.word == TensorBoard.word:
            check_folder(self.place)

    def open(self) -> Sink:
        return TensorBoard(self.place) if self.word == TensorBoard.word else SinkProcess(self.word, self.place)

    def ready(self) -> Sink | SinkChoice:
        """What can be opened before a script runs: not TensorBoard's, which needs torch."""
        return replace(self, place=os.path.abspath(self.place)) if self.word == TensorBoard.word else self.open()
