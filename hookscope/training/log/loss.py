"""Findings on the loss of a training run: it rises, or single steps are far above those before."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hookscope.training.log.rules import TrainingThresholds
from hookscope.training.log.series import LossSeries, RunSeries, runs_of_true
from hookscope.training.log.summary import TimedFinding, step_words, timed_finding, when_words

Array = NDArray[np.float64]

_SLOW = 0.005  # of the first loss, from the second quarter of the run to the last: learning, if slowly
_FEWEST = 8  # losses that show a trend
_WINDOW = 5  # losses in a median, at least
_WINDOWS = 20  # in a run
_NOISE = 4.0  # standard deviations


def loss_findings(run: RunSeries, thresholds: TrainingThresholds) -> list[TimedFinding]:
    """None with several optimizers, whose losses may rise in turn."""
    if len(run.losses) != 1:
        return []
    [loss] = run.losses
    at = ~np.isnan(loss.losses)
    loss = LossSeries(loss.optimizer, loss.steps[at], loss.times[at], loss.losses[at], loss.rates[at])
    return [] if len(loss.steps) < _FEWEST else [*_rises(loss, thresholds), *_spikes(loss, thresholds)]


def _reach(losses: Array) -> int:
    return max(_WINDOW, len(losses) // _WINDOWS) // 2


def _smoothed(losses: Array) -> Array:
    """The median of each loss and its neighbours, ``(S,)``."""
    reach = _reach(losses)
    return np.array([np.median(losses[max(at - reach, 0) : at + reach + 1]) for at in range(len(losses))])


def centred(losses: Array) -> tuple[Array, int]:
    """The median of each loss and of as many before as after it, ``(S,)``, and the largest number before and after.

    At the ends and beside NaN there are fewer: the first median is the first loss, and no gap is bridged.
    """
    most = _reach(losses)
    medians = np.full(len(losses), np.nan)
    for begin, end in runs_of_true(np.isfinite(losses)):
        for at in range(begin, end):
            reach = min(most, at - begin, end - 1 - at)
            medians[at] = np.median(losses[at - reach : at + reach + 1])
    return medians, most


def _rises(loss: LossSeries, thresholds: TrainingThresholds) -> Iterator[TimedFinding]:
    """After its lowest value the loss rises to the end of the run, by more than its noise."""
    smooth = _smoothed(loss.losses)
    noise = 1.4826 * float(np.median(np.abs(loss.losses - smooth)))
    lowest = int(np.argmin(smooth))
    limit = smooth[lowest] + max(thresholds.rising * abs(smooth[lowest]), _NOISE * noise)
    begin = int(np.flatnonzero(smooth <= limit)[-1]) + 1
    least = 0.05 * float(np.abs(smooth[:_WINDOW]).max())  # a rise from almost 0 to little is not a finding
    if len(smooth) - begin < thresholds.patience or smooth[-1] - smooth[lowest] < least:
        return
    at_lowest = step_words(int(loss.steps[lowest]), loss.times[lowest])
    text = f"the lowest loss is {loss.losses[lowest]:.4g} at step {at_lowest}; at step {int(loss.steps[-1]):,} it is"
    text += f" {smooth[-1]:.4g} (median of the last)"
    yield _finding("loss-rises", loss, begin, len(smooth) - 1, text, {"lowest": smooth[lowest], "last": smooth[-1]})


def _spikes(loss: LossSeries, thresholds: TrainingThresholds) -> Iterator[TimedFinding]:
    """All losses far above the steps before, and not small beside the first loss, as one finding."""
    losses = loss.losses
    before = np.array([np.median(losses[at - _WINDOW : at]) if at >= _WINDOW else np.inf for at in range(len(losses))])
    rise = losses - before > abs(float(losses[0])) / 2
    at = np.flatnonzero((before > 0) & (losses > thresholds.spike * before) & rise)
    if not len(at):
        return
    worst = at[int(np.argmax(losses[at]))]
    text = f"the loss is {losses[worst]:.4g}, about {before[worst]:.4g} in the sampled steps before"
    if len(at) > 1:
        text = f"{len(at)} of {len(losses)} sampled steps; at its worst, step {int(loss.steps[worst]):,}, {text}"
    yield _finding("loss-spike", loss, int(at[0]), int(at[-1]), text, {"worst": float(losses[worst]), "times": len(at)})


def flat_findings(run: RunSeries, classes: float, thresholds: TrainingThresholds) -> Iterator[TimedFinding]:
    """A loss that ends where it began; ``classes`` are the classes of its cross-entropy, NaN where unknown."""
    if len(run.losses) != 1:
        return
    [whole] = run.losses
    at = ~np.isnan(whole.losses)
    loss = LossSeries(whole.optimizer, whole.steps[at], whole.times[at], whole.losses[at], whole.rates[at])
    if len(loss.steps) < _FEWEST or loss.steps[-1] < thresholds["flat_after"]:
        return
    losses, smooth, part = loss.losses, _smoothed(loss.losses), max(3, len(loss.losses) // 4)
    noise = 1.4826 * float(np.median(np.abs(losses - smooth)))
    last = float(losses[-part:].mean())
    first = max(float(losses[:part].mean()), float(losses[0]) - 3 * noise)  # it may fall within few steps
    fall = max(thresholds["flat_loss"] * abs(first), 2 * noise / math.sqrt(part))
    chance = math.log(classes) if classes > 1 else math.nan
    recent = float(losses[part : 2 * part].mean()) - last
    still_falls = recent > max(_SLOW * abs(first), 3 * noise / math.sqrt(part))
    guesses = abs(last - chance) <= 0.02 * chance and recent <= fall
    has_fallen = first - last > fall or first - float(smooth.min()) > 4 * fall
    rises = last - first > thresholds.rising * abs(first)
    if not first or rises or still_falls or (has_fallen and not guesses):
        return
    text = f"the loss is {last:.4g} (mean of the last {part} sampled steps), {losses[0]:.4g} at first"
    text += f"; guessing among {classes:.0f} classes gives {chance:.4g}" if guesses else ""
    numbers: dict[str, float | int | str | None] = {"first": float(losses[0]), "last": last}
    case = "chance" if guesses else ""
    yield _finding("loss-flat", loss, 0, len(smooth) - 1, text, numbers, case)


def _finding(
    name: str,
    loss: LossSeries,
    first: int,
    last: int,
    text: str,
    numbers: dict[str, float | int | str | None],
    case: str = "",
) -> TimedFinding:
    when = int(loss.steps[first]), int(loss.steps[last]), float(loss.times[first]), last == len(loss.steps) - 1
    return timed_finding(name, f"{when_words(*when)}: {text}", *when, case, numbers=numbers, optimizer=loss.optimizer)
