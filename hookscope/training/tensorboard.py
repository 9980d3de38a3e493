"""The figures of a training run as an event file of TensorBoard that grows with the run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from hookscope.errors import WriteError, printable
from hookscope.hooks import call_key
from hookscope.statistics import check_installed
from hookscope.system import StrPath, check_folder, make_folder

# What tells which line it is, and no figure of a layer.
_ABOUT = frozenset(
    ("row", "step", "time", "loss", "learning_rate", "optimizer", "layer", "call", "index", "type", "model")
)


class TensorBoardWriter:
    """An event file with a scalar ``LAYER/FIGURE`` for each figure of a line of the log, and ``loss``.

    Those of further models have ``modelN/`` before their names, those of further optimizers ``optimizerN/``. What is
    null has no scalar; true is 1.

    Args:
        folder: What ``tensorboard --logdir`` takes; it is made where it is missing.

    Raises:
        InstallationError: TensorBoard is not installed.
        WriteError: the folder cannot be written.
    """

    def __init__(self, folder: StrPath) -> None:
        check_installed()
        check_folder(folder)
        make_folder(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TensorFlow, which it imports where there is one
            from torch.utils.tensorboard import SummaryWriter
        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise WriteError(f"cannot write {folder}: {error.strerror or error}") from error

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the scalars of the lines of one sampled step, and bring them to the disk."""
        once: dict[str, float] = {}
        step = 0
        for row in rows:
            step = row["step"]
            optimizer = f"optimizer{row['optimizer']}/" if row["optimizer"] else ""
            for name in ("loss", "learning_rate"):
                if row[name] is not None:
                    once.setdefault(optimizer + name, row[name])
            for name, value in row.items():
                if name not in _ABOUT and value is not None:
                    self._writer.add_scalar(f"{_tag(row)}/{name}", float(value), step)
        for tag, value in once.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


def _tag(row: Mapping[str, Any]) -> str:
    # a tag that begins with a slash has no group
    name = printable(call_key(row["layer"] or "(model)", row["call"]))
    return f"model{row['model']}/{name}" if row["model"] else name
