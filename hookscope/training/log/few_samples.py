"""Whether enough steps of a run were sampled to judge it by."""

from __future__ import annotations

from collections.abc import Iterator

from hookscope.findings import CATALOGUE, counted
from hookscope.training.log.file import Run
from hookscope.training.log.series import RunSeries
from hookscope.training.log.summary import summary
from hookscope.training.log.thresholds import TrainingThresholds
from hookscope.training.log.timed import TimedFinding

_ENOUGH = 20  # samples that show a trend


def few_samples(run: Run, series: RunSeries, thresholds: TrainingThresholds) -> Iterator[TimedFinding]:
    """A finding where fewer steps of each optimizer were sampled than a finding must show in.

    Of a run that was stopped at NaN or Inf there is nothing more to know.

    Args:
        run: The run.
        series: The same as arrays.
        thresholds: How many steps are enough.
    """
    most = max(series.losses, key=lambda one: len(one.steps), default=None)
    if most is None or len(most.steps) >= thresholds.patience or (run.end or {}).get("reason") == "stopped":
        return
    steps, last, time = summary(run).steps, int(most.steps[-1]), float(most.times[-1])
    every = max(1, steps // _ENOUGH)
    yield TimedFinding(
        "few-samples",
        "",
        _words(run, len(most.steps), steps, every),
        CATALOGUE["few-samples"].text(),
        numbers={"sampled": len(most.steps), "steps": steps, "every": every},
        step=last,
        last_step=last,
        time=None if time != time else time,
        lasts=True,
        optimizer=most.optimizer,
    )


def _words(run: Run, sampled: int, steps: int, every: int) -> str:
    number = counted(sampled, "sampled step")
    if run.end is None:
        return f"{number} so far: too few to tell a trend"
    text = f"{number} of {steps:,}: too few to tell a trend"
    if sampled >= steps:
        return f"{text}; there were no more"
    return f"{text}; sample more often, {f'--every {every}' if run.header.get('command') else f'every={every}'}"
