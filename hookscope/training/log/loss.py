"""Findings on the loss of a training run: that it rises, and that single steps are far above those before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hookscope.findings import CATALOGUE
from hookscope.training.log.series import LossSeries, RunSeries
from hookscope.training.log.thresholds import TrainingThresholds
from hookscope.training.log.timed import TimedFinding, step_words, when_words

Array = NDArray[np.float64]


_FEWEST = 8  # losses that tell a trend from noise
_WINDOW = 5  # losses at least, whose median stands for them
_WINDOWS = 20  # of a run
_NOISE = 4.0  # standard deviations


def loss_findings(run: RunSeries, thresholds: TrainingThresholds) -> list[TimedFinding]:
    """What is wrong with the loss; nothing of runs with several optimizers, whose losses may well rise in turn.

    Args:
        run: The run.
        thresholds: From where on something is a finding.
    """
    if len(run.losses) != 1:
        return []
    [loss] = run.losses
    at = loss.losses == loss.losses
    loss = LossSeries(loss.optimizer, loss.steps[at], loss.times[at], loss.losses[at], loss.rates[at])
    if len(loss.steps) < _FEWEST:
        return []
    return [*_rises(loss, thresholds), *_spikes(loss, thresholds)]


def smoothed(losses: Array) -> Array:
    """The median of each loss and of those around it, ``(S,)``.

    Example:
        >>> import numpy as np
        >>> smoothed(np.array([1.0, 1.0, 9.0, 1.0, 1.0, 1.0])).tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    around = max(_WINDOW, len(losses) // _WINDOWS) // 2
    return np.array([np.median(losses[max(at - around, 0) : at + around + 1]) for at in range(len(losses))])


def centred(losses: Array) -> tuple[Array, int]:
    """The median of each loss and of as many before as after it, ``(S,)``, and how many these are at most.

    At both ends, and beside what is NaN, they are fewer: the first is the first itself, and no gap is bridged.

    Example:
        >>> import numpy as np
        >>> centred(np.array([2.0, 300.0, 9.0, 4.0, 1.0, np.nan, 7.0]))
        (array([ 2.,  9.,  4.,  4.,  1., nan,  7.]), 2)
    """
    around = max(_WINDOW, len(losses) // _WINDOWS) // 2
    known = np.isfinite(losses)
    middle = np.full(len(losses), np.nan)
    ends = np.flatnonzero(np.diff(np.concatenate([[0], known.astype(int), [0]])))
    for begin, end in zip(ends[::2], ends[1::2], strict=True):
        for at in range(begin, end):
            reach = min(around, at - begin, end - 1 - at)
            middle[at] = np.median(losses[at - reach : at + reach + 1])
    return middle, around


def _rises(loss: LossSeries, thresholds: TrainingThresholds) -> Iterator[TimedFinding]:
    """From the lowest on it goes up for good, by more than its noise."""
    smooth = smoothed(loss.losses)
    noise = 1.4826 * float(np.median(np.abs(loss.losses - smooth)))
    lowest = int(np.argmin(smooth))
    limit = smooth[lowest] + max(thresholds.rising * abs(smooth[lowest]), _NOISE * noise)
    below = np.flatnonzero(smooth <= limit)
    begin = int(below[-1]) + 1
    of_first = 0.05 * float(np.abs(smooth[:_WINDOW]).max())  # a rise from next to nothing to little is none
    if len(smooth) - begin < thresholds.patience or smooth[-1] - smooth[lowest] < of_first:
        return
    text = (
        f"from {loss.losses[lowest]:.4g} at step {step_words(int(loss.steps[lowest]), loss.times[lowest])}, its lowest,"
    )
    text += f" to {smooth[-1]:.4g} (median of the last) at step {int(loss.steps[-1]):,}"
    yield _finding("loss-rises", loss, begin, len(smooth) - 1, text, {"lowest": smooth[lowest], "last": smooth[-1]})


def _spikes(loss: LossSeries, thresholds: TrainingThresholds) -> Iterator[TimedFinding]:
    """All spikes as one finding: far above the steps before, and high beside where the run began."""
    losses = loss.losses
    before = np.array(
        [np.median(losses[max(at - _WINDOW, 0) : at]) if at >= _WINDOW else np.inf for at in range(len(losses))]
    )
    begun = abs(float(losses[0]))
    at = np.flatnonzero((before > 0) & (losses > thresholds.spike * before) & (losses - before > begun / 2))
    if not len(at):
        return
    worst = at[int(np.argmax(losses[at]))]
    text = f"the loss is {losses[worst]:.4g}, about {before[worst]:.4g} in the sampled steps before"
    if len(at) > 1:
        text = f"{len(at)} of {len(losses)} sampled steps; at its worst, step {int(loss.steps[worst]):,}, {text}"
    yield _finding("loss-spike", loss, int(at[0]), int(at[-1]), text, {"worst": float(losses[worst]), "times": len(at)})


def _finding(
    name: str, loss: LossSeries, first: int, last: int, text: str, numbers: dict[str, float | int | str | None]
) -> TimedFinding:
    step, last_step, time = int(loss.steps[first]), int(loss.steps[last]), float(loss.times[first])
    known, lasts = None if time != time else time, last == len(loss.steps) - 1
    return TimedFinding(
        name,
        "",
        f"{when_words(step, last_step, known, lasts)}: {text}",
        CATALOGUE[name].text(),
        numbers=numbers,
        step=step,
        last_step=last_step,
        time=known,
        lasts=lasts,
        optimizer=loss.optimizer,
    )
