"""The totals of a training run: how far it came, how it ended, what became of the loss. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookscope.findings import counted
from hookscope.training.log.file import Run
from hookscope.training.log.timed import duration_words

_NON_FINITE = ("non_finite", "gradient_non_finite", "weight_non_finite")
_ENDS = {
    "done": "done",
    "exception": "ended by an exception",
    "stopped": "stopped",
    "exit": "ended by sys.exit",
}


@dataclass(frozen=True)
class RunSummary:
    """What a run comes to.

    Attributes:
        started: When, as the log writes it; empty where it does not.
        steps: Optimizer steps that were seen; of several optimizers, of the one that made most.
        sampled: How many of these were sampled.
        layers: How many layers were watched, of all models.
        models: How many root models ran.
        optimizers: How many optimizers made steps.
        first_loss: The loss of the first sampled step in which it was seen; None where it never was.
        last_loss: That of the last; None where it was no finite number any more.
        lost_at: The sampled step from which on it was NaN or Inf, to the last; None where it was not.
        duration: Seconds from the start of the run to its last line; None where the log does not tell.
        stopped_at: The step in which NaN or Inf stopped it; None where they did not.
        reason: Why it ended, as the log writes it; None where it goes on still, or was killed.
        status: Its exit status, where known.
    """

    started: str
    steps: int
    sampled: int
    layers: int
    models: int
    optimizers: int
    first_loss: float | None
    last_loss: float | None
    lost_at: int | None
    duration: float | None
    stopped_at: int | None
    reason: str | None
    status: int | None

    @property
    def ended(self) -> str:
        """How it ended, in words."""
        if self.reason is None:
            return "no end: it goes on still, or was killed"
        text = _ENDS.get(self.reason, self.reason)
        text += f" at the first NaN or Inf, in step {self.stopped_at:,}" if self.stopped_at is not None else ""
        return f"{text} with status {self.status}" if self.status else text

    def as_row(self) -> dict[str, Any]:
        """The totals by name, for programs."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        text = f"{counted(self.steps, 'step')}, {self.sampled:,} sampled, of {counted(self.layers, 'layer')}"
        text += f" in {self.models} models" if self.models > 1 else ""
        text += f" with {self.optimizers} optimizers" if self.optimizers > 1 else ""
        if self.duration is not None:
            text += f" in {duration_words(self.duration)}"
        if self.first_loss is not None and self.lost_at is not None:
            text += f"; loss {self.first_loss:.4g} -> nan or inf (from step {self.lost_at:,} on)"
        elif self.first_loss is not None and self.sampled == 1:
            text += f"; loss {self.first_loss:.4g}"
        elif self.first_loss is not None and self.last_loss is not None:
            text += f"; loss {self.first_loss:.4g} -> {self.last_loss:.4g}"
        return f"{text}; {self.ended}"


def summary(run: Run) -> RunSummary:
    """The totals of a run.

    Args:
        run: As `read_runs` reads it.

    Example:
        >>> from hookscope.training import Run
        >>> rows = [{"step": step, "time": 0.1 * step, "layer": "fc", "loss": 2 / (1 + step)} for step in (0, 1)]
        >>> str(summary(Run({}, rows, [], {"step": 1, "time": 0.5, "reason": "done"})))
        '2 steps, 2 sampled, of 1 layer in 0.5 s; loss 2 -> 1; done'
    """
    rows = [row for row in run.rows if isinstance(row.get("step"), int)]
    end = run.end or {}
    marks = [*rows, *run.notes, end]
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), (int, float))]
    times = [mark["time"] for mark in marks if isinstance(mark.get("time"), (int, float))]
    lost_at = _lost_at(rows)
    last = max((mark["step"] for mark in marks if isinstance(mark.get("step"), int)), default=-1)
    return RunSummary(
        started=str(run.header.get("started") or ""),
        steps=last + 1,
        sampled=len({(row.get("optimizer") or 0, row["step"]) for row in rows}),
        layers=len({(row.get("model") or 0, row.get("layer")) for row in rows}),
        models=len({row.get("model") or 0 for row in rows}),
        optimizers=len({row.get("optimizer") or 0 for row in rows}),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses and lost_at is None else None,
        lost_at=lost_at,
        duration=max(times, default=None),
        stopped_at=_stopped_at(run),
        reason=None if run.end is None else str(end.get("reason") or "done"),
        status=end.get("status"),
    )


def _lost_at(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Where the loss is seen no more while there are values that are not finite, up to the last sampled step.

    The log writes a loss that is NaN or Inf as it writes one that was not seen.
    """
    steps: dict[tuple[Any, int], tuple[bool, bool]] = {}
    for row in rows:
        at = row.get("optimizer") or 0, row["step"]
        seen, bad = steps.get(at, (False, False))
        spoiled = any((row.get(name) or 0) > 0 for name in _NON_FINITE)
        steps[at] = seen or isinstance(row.get("loss"), (int, float)), bad or spoiled
    found = None
    for (_, step), (seen, bad) in reversed(steps.items()):
        if seen or not bad:
            break
        found = step
    return found if any(seen for seen, _ in steps.values()) else None


def _stopped_at(run: Run) -> int | None:
    if (run.end or {}).get("reason") != "stopped":
        return None
    steps = [note.get("step") for note in run.notes if note.get("note") == "non-finite"]
    return steps[0] if steps and isinstance(steps[0], int) else None
