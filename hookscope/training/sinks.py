"""Runs of TensorBoard, Weights & Biases and MLflow that get what a log gets. Needs no torch until one is opened."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

from hookscope.errors import InstallationError, UsageError, WriteError, first_line, nearest
from hookscope.system import check_folder, import_extra, make_folder, missing_extra

_MOST_IN_A_BATCH = 1000  # metrics in a request of MLflow
_LONGEST_PARAMETER = 500  # characters, of MLflow
Histogram = Mapping[str, Sequence[float]]
"""``edges`` ``(B + 1,)`` in ascending order and ``counts`` ``(B,)``."""
Scalars = Mapping[str, float]  # by their tags
Histograms = Mapping[str, Histogram]


class Sink(ABC):
    """An open run of another program, which gets what the log gets."""

    word: ClassVar[str]
    where: str
    """Where the run is, in words."""

    @abstractmethod
    def __init__(self, place: str) -> None:
        """Open ``place``, empty for the usual one."""

    def begin(self, header: Mapping[str, Any]) -> None:  # noqa: B027  (an event file of TensorBoard has none)
        """Write what runs, by name."""

    @abstractmethod
    def write(self, step: int, optimizer: int, scalars: Scalars, histograms: Histograms) -> None:
        """Write the values of one sampled step of an optimizer."""

    @abstractmethod
    def close(self, failed: bool) -> None: ...


class TensorBoard(Sink):
    """An event file in a folder, which is created if it does not exist."""

    word = "tensorboard"

    def __init__(self, place: str) -> None:
        check_folder(place)
        tensorboard = import_extra("torch.utils.tensorboard", self.word)
        make_folder(place)
        self.where = place
        try:
            self._writer = tensorboard.SummaryWriter(place)
        except OSError as error:
            raise WriteError(f"cannot write {place}: {error.strerror or error}") from error

    def write(self, step: int, optimizer: int, scalars: Scalars, histograms: Histograms) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        for tag, histogram in histograms.items():
            edges, counts = histogram["edges"], histogram["counts"]
            middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
            sums = [sum(n * middle**power for n, middle in zip(counts, middles, strict=True)) for power in (1, 2)]
            of_all = edges[0], edges[-1], sum(counts), *sums
            self._writer.add_histogram_raw(tag, *of_all, list(edges[1:]), list(counts), step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb(Sink):
    """A run of Weights & Biases of its own: the script may have another."""

    word = "wandb"

    def __init__(self, place: str) -> None:
        wandb = import_extra(self.word, self.word)
        settings = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(project=place or None, job_type="hookscope", settings=settings)
        except Exception as error:
            do = "run `wandb login`, or set WANDB_MODE=offline"
            raise WriteError(f"cannot write to wandb: {first_line(error)}", do=do) from error
        # an axis of the run itself: steps of several optimizers do not rise together, and wandb would drop values
        self._run.define_metric("*", step_metric="step")
        self._histogram = wandb.Histogram
        folder = os.path.dirname(self._run.dir)
        self.where = f"{folder}, which `wandb sync` uploads" if self._run.offline else str(self._run.url)

    def begin(self, header: Mapping[str, Any]) -> None:
        self._run.config.update(dict(header))

    def write(self, step: int, optimizer: int, scalars: Scalars, histograms: Histograms) -> None:
        drawn = {tag: self._histogram(np_histogram=_with_width(histogram)) for tag, histogram in histograms.items()}
        self._run.log({"step": step, **scalars, **drawn})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Mlflow(Sink):
    """A run in an experiment of MLflow; its histograms are files of JSON, since MLflow has none."""

    word = "mlflow"

    def __init__(self, place: str) -> None:
        self._mlflow = mlflow = import_extra(self.word, self.word)
        try:
            self._client = mlflow.MlflowClient()
            name = place or "Default"
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            self._run = self._client.create_run(number, run_name="hookscope").info.run_id
        except Exception as error:
            do = "set MLFLOW_TRACKING_URI to a server or a database that can be written"
            raise WriteError(f"cannot write to mlflow: {first_line(error)}", do=do) from error
        self.where = f"{mlflow.get_tracking_uri()}, run {self._run}"

    def begin(self, header: Mapping[str, Any]) -> None:
        new, values = self._mlflow.entities.Param, ((name, v) for name, v in header.items() if v is not None)
        self._client.log_batch(self._run, params=[new(name, str(v)[:_LONGEST_PARAMETER]) for name, v in values])

    def write(self, step: int, optimizer: int, scalars: Scalars, histograms: Histograms) -> None:
        now, new = time.time_ns() // 10**6, self._mlflow.entities.Metric
        # MLflow takes few characters: ``relu:1`` for ``relu#1``
        names = {tag: re.sub(r"[^\w\-./: ]", "_", tag.replace("#", ":")).strip("/_") for tag in scalars}
        metrics = [new(names[tag], value, now, step) for tag, value in scalars.items()]
        for at in range(0, len(metrics), _MOST_IN_A_BATCH):
            self._client.log_batch(self._run, metrics[at : at + _MOST_IN_A_BATCH])
        if histograms:
            folder = f"histograms/optimizer{optimizer}" if optimizer else "histograms"
            self._client.log_dict(self._run, dict(histograms), f"{folder}/step-{step:08}.json")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


SINKS: dict[str, type[Sink]] = {sink.word: sink for sink in (TensorBoard, Wandb, Mlflow)}


def _with_width(histogram: Histogram) -> tuple[Sequence[float], list[float]]:
    """Counts and edges, as NumPy gives them: a half on each side of a single value."""
    edges = list(histogram["edges"])
    return histogram["counts"], [edges[0] - 0.5, edges[-1] + 0.5] if edges[0] == edges[-1] else edges


_PATIENCE = 30.0  # seconds that a script waits at its end
_SECONDS_TO_ANSWER = 60.0  # of a server: its own package may try for many minutes


class SinkProcess(Sink):
    """A sink in a process of its own: wandb and MLflow change signals, exits and the environment of a script."""

    def __init__(self, word: str, place: str) -> None:
        self.word = word  # type: ignore[misc]
        root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        code = f"import sys; sys.path.append({root!r}); from hookscope.training.sinks import serve; serve()"
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

    def write(self, step: int, optimizer: int, scalars: Scalars, histograms: Histograms) -> None:
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
        late = threading.Timer(_SECONDS_TO_ANSWER, self._process.kill)
        late.start()
        line = self._process.stdout.readline()
        is_late = late.finished.is_set()
        late.cancel()
        silent = [f"{self.word} gave no answer for {_SECONDS_TO_ANSWER:g} s", "", "check its server and the network"]
        ended = silent if is_late else ["its process has ended"]
        kind, *words = json.loads(line) if line else ["WriteError", *ended]
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
        """Check, without an import, that the package is installed and that the folder can be written."""
        spec = importlib.util.find_spec(self.word)
        if spec is None or spec.origin is None:  # a folder `wandb` of earlier runs is not a package
            raise missing_extra(self.word, self.word)
        if self.word == TensorBoard.word:
            check_folder(self.place)

    def open(self) -> Sink:
        return TensorBoard(self.place) if self.word == TensorBoard.word else SinkProcess(self.word, self.place)

    def ready(self) -> Sink | SinkChoice:
        """What can be opened before a script runs: not TensorBoard's, which needs torch."""
        return replace(self, place=os.path.abspath(self.place)) if self.word == TensorBoard.word else self.open()
