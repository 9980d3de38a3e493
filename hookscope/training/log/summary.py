"""The totals of a training run, findings with their steps, and the words for steps and times. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hookscope.findings import CATALOGUE, SEVERITIES, Finding, FindingKind, counted
from hookscope.training.log.file import Run

NON_FINITE = ("non_finite", "gradient_non_finite", "weight_non_finite")
ENOUGH = 20  # samples that show a trend
_ENDS = {"exception": "ended by an exception", "exit": "ended by sys.exit"}


def judged(run: Run) -> str:
    """What a verdict on the run is about."""
    if not run.rows and all(facts.get("optimizer") is None for facts in run.facts):
        return "because no step was judged"
    totals, text = summary(run), "in the training steps; data and validation are not judged"
    more = f"; only {totals.sampled:,} steps were sampled: every {max(1, totals.steps // ENOUGH)} shows more"
    return text + more if totals.sampled < min(totals.steps, ENOUGH) else text


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TimedFinding(Finding):
    """A finding on a training run.

    Attributes:
        step: The first sampled step that shows it; ``last_step`` is the last one.
        time: Seconds from the start of the run to ``step``; None where the log does not say.
        lasts: Whether the last sampled step shows it.
        layers: Every call that has it, in order of execution, `layer` among them; empty for the whole run.
        model: The number of its model; None for the whole run.
        optimizer: The number of the optimizer whose steps these are.
    """

    step: int
    last_step: int
    time: float | None
    lasts: bool
    layers: tuple[str, ...] = ()
    model: int | None = None
    optimizer: int = 0

    def as_row(self) -> dict[str, Any]:
        timed = {"step": self.step, "last_step": self.last_step, "time": self.time, "lasts": self.lasts}
        # not super(): slots make a second class, and super() looks for the first
        return timed | Finding.as_row(self) | {"layers": list(self.layers)}


When = tuple[int, int, float | None, bool]
"""The first and the last step, the time of the first, and whether it lasts to the end."""


def timed_finding(name: str, evidence: str, when: When, case: str = "", layer: str = "", **more: Any) -> TimedFinding:
    """A finding with the text that the catalogue has for ``case``; a name that the catalogue lacks has no text."""
    kind = CATALOGUE.get(name, FindingKind(name, "", ""))
    times = dict(zip(("step", "last_step", "time", "lasts"), when, strict=True)) | {"time": known(when[2])}
    text, severity = kind.text(case).strip(), kind.severity_of(case)
    return TimedFinding(name, layer, evidence, text, **{"severity": severity, **times, **more})


def with_severity_of(finding: TimedFinding, follow: Container[str], findings: Iterable[TimedFinding]) -> TimedFinding:
    """The finding, as severe as the worst of the ``findings`` that ``follow`` names: the cause comes first."""
    severities = (other.severity for other in findings if other.finding in follow and other.step >= finding.step)
    return replace(finding, severity=min([finding.severity, *severities], key=SEVERITIES.index))


def known(time: Any) -> float | None:
    return float(time) if isinstance(time, (int, float)) and time == time else None


def when_words(step: int, last_step: int, time: float | None, lasts: bool, samples: int = 2) -> str:
    """From when to when, in words; ``samples`` is the number of sampled steps.

    Example:
        >>> when_words(400, 900, 75.0, True), when_words(0, 50, None, False)
        ('from step 400 (1 min 15 s) to the end', 'steps 0 to 50')
    """
    begin = step_words(step, time)
    if samples == 1:
        return f"at step {begin}, the only one sampled"
    if lasts:
        return f"at step {begin}, the last one sampled" if step == last_step else f"from step {begin} to the end"
    return f"at step {begin}" if step == last_step else f"steps {begin} to {last_step:,}"


def step_words(step: int, time: float | None) -> str:
    """A step and its time, such as ``1,200 (3.2 s)``."""
    return f"{step:,}" if known(time) is None else f"{step:,} ({duration_words(time or 0.0)})"


def duration_words(seconds: float) -> str:
    """A time in its two largest units.

    Example:
        >>> duration_words(3.21), duration_words(75), duration_words(7500)
        ('3.2 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


@dataclass(frozen=True)
class RunSummary:
    """The totals of a run, over all models and optimizers."""

    started: str
    steps: int
    sampled: int
    layers: int
    models: int
    optimizers: int
    first_loss: float | None
    last_loss: float | None  # None where it was no longer finite
    lost_at: int | None  # the sampled step from which on the loss was NaN or Inf to the end
    duration: float | None
    stopped_at: int | None  # the step at which NaN or Inf stopped the run
    reason: str | None  # why it ended, as the log has it; None where it still runs, or was killed
    status: int | None

    @property
    def ended(self) -> str:
        if self.reason is None:
            return "not ended: it still runs, or was killed"
        text = _ENDS.get(self.reason, self.reason)
        text += f" at the first NaN or Inf, in step {self.stopped_at:,}" if self.stopped_at is not None else ""
        return f"{text} with status {self.status}" if self.status else text

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
    rows = [row for row in run.rows if isinstance(row.get("step"), int)]
    end = run.end or {}
    lines = [*rows, *run.notes, end]
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), (int, float))]
    last = {row.get("optimizer") or 0: row["step"] for row in rows}
    own = 1 + max((line["step"] for line in lines if isinstance(line.get("step"), int)), default=-1)
    times = [line["time"] for line in lines if isinstance(line.get("time"), (int, float))]
    lost_at = _lost_at(rows)
    stops = [note.get("step") for note in run.notes if note.get("note") == "non-finite"]
    stopped_at = stops[0] if stops and end.get("reason") == "stopped" and isinstance(stops[0], int) else None
    return RunSummary(
        started=str(run.header.get("started") or ""),
        steps=end.get("steps") or max(own, sum(last.values()) + len(last)),
        sampled=len({(row.get("optimizer") or 0, row["step"]) for row in rows}),
        layers=len({(row.get("model") or 0, row.get("layer")) for row in rows}),
        models=len({row.get("model") or 0 for row in rows}),
        optimizers=len(last),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses and lost_at is None else None,
        lost_at=lost_at,
        duration=max(times, default=None),
        stopped_at=stopped_at,
        reason=None if run.end is None else str(end.get("reason") or "done"),
        status=end.get("status"),
    )


def _lost_at(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The step from which on the loss is null to the end, and values are NaN or Inf; an unknown loss is null too."""
    steps = dict.fromkeys((row.get("optimizer") or 0, row["step"]) for row in rows)
    of = [((row.get("optimizer") or 0, row["step"]), row) for row in rows]
    known = {key for key, row in of if isinstance(row.get("loss"), (int, float))}
    bad = {key for key, row in of if any((row.get(name) or 0) > 0 for name in NON_FINITE)} - known
    lost = list(itertools.takewhile(bad.__contains__, reversed(steps)))
    return lost[-1][1] if lost and known else None
