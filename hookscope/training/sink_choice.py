"""The sinks of a watched run as a user names them. Needs no torch."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from typing import Self

from hookscope.errors import UsageError, nearest
from hookscope.system import check_folder
from hookscope.training.sink_process import SinkProcess
from hookscope.training.sinks import SINKS, Sink, TensorBoard, not_installed


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
        """That of one process of several: each has a folder of its own; the runs of others have its rank."""
        return replace(self, place=os.path.join(self.place, f"rank{rank}")) if self.word == TensorBoard.word else self

    def check(self) -> None:
        """Check, without an import, that the package is installed and that the folder can be written.

        Raises:
            InstallationError: the package is missing.
            WriteError: the folder cannot be written.
        """
        spec = importlib.util.find_spec(self.word)
        if spec is None or spec.origin is None:  # a folder `wandb` of earlier runs is no package
            raise not_installed(self.word)
        if self.word == TensorBoard.word:
            check_folder(self.place)

    def open(self) -> Sink:
        return TensorBoard(self.place) if self.word == TensorBoard.word else SinkProcess(self.word, self.place)

    def ready(self) -> Sink | SinkChoice:
        """What can be opened before a script runs: not TensorBoard's, which needs torch."""
        return replace(self, place=os.path.abspath(self.place)) if self.word == TensorBoard.word else self.open()
