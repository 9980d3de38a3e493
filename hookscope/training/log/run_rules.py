"""Findings on a whole training run: its loss, and its first NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookscope.findings import counted
from hookscope.hooks import call_key
from hookscope.training.log.rules import Limits
from hookscope.training.log.series import LayerSeries, LossSeries, RunSeries, runs_of_true
from hookscope.training.log.summary import NON_FINITE, TimedFinding, known, step_words, timed_finding, when_words

Array = NDArray[np.float64]

_SLOW = 0.005  # of the first loss, from the second quarter of the run to the last: learning, if slowly
_FEWEST = 8  # losses that show a trend
_WINDOW = 5  # losses in a median, at least
_WINDOWS = 20  # in a run
_MUCH = 4.0  # times the loss of the first steps
_LEARNED = 0.1  # of the loss of guessing: a run that went on with trained weights has nothing left to learn
_NOISE = 4.0  # standard deviations


def loss_findings(run: RunSeries, thresholds: Limits) -> list[TimedFinding]:
    loss = _known_losses(run)
    return [] if loss is None else [*_rises(loss, thresholds), *_spikes(loss, thresholds)]


def _known_losses(run: RunSeries) -> LossSeries | None:
    """The losses without gaps; None with few, and with several optimizers, whose losses may rise in turn."""
    if len(run.losses) != 1:
        return None
    [loss] = run.losses
    at = ~np.isnan(loss.losses)
    known = LossSeries(loss.optimizer, loss.steps[at], loss.times[at], loss.losses[at], loss.rates[at])
    return known if len(known.steps) >= _FEWEST else None


def _reach(losses: Array) -> int:
    return max(_WINDOW, len(losses) // _WINDOWS) // 2


def _smoothed(losses: Array) -> Array:
    reach = _reach(losses)
    return np.array([np.median(losses[max(at - reach, 0) : at + reach + 1]) for at in range(len(losses))])


def centred(losses: Array) -> tuple[Array, int]:
    """Medians ``(S,)`` of each loss and as many before as after it, and their largest number; gaps are not bridged."""
    most = _reach(losses)
    medians = np.full(len(losses), np.nan)
    for begin, end in runs_of_true(np.isfinite(losses)):
        for at in range(begin, end):
            reach = min(most, at - begin, end - 1 - at)
            medians[at] = np.median(losses[at - reach : at + reach + 1])
    return medians, most


def _rises(loss: LossSeries, thresholds: Limits) -> Iterator[TimedFinding]:
    """After its lowest value the loss rises to the end of the run, by more than its noise.

    A loss of both signs, such as of a policy gradient or a critic, does not say how good the model is.
    """
    smooth = _smoothed(loss.losses)
    if smooth.min() < 0 < smooth.max():
        return
    noise = 1.4826 * float(np.median(np.abs(loss.losses - smooth)))
    lowest = int(np.argmin(smooth))
    limit = smooth[lowest] + max(thresholds["rising"] * abs(smooth[lowest]), _NOISE * noise)
    begin = int(np.flatnonzero(smooth <= limit)[-1]) + 1
    least = 0.05 * float(np.abs(smooth[:_WINDOW]).max())  # a rise from almost 0 to little is not a finding
    if len(smooth) - begin < thresholds["patience"] or smooth[-1] - smooth[lowest] < least:
        return
    at_lowest = step_words(int(loss.steps[lowest]), loss.times[lowest])
    text = f"the lowest loss is {loss.losses[lowest]:.4g} at step {at_lowest}; at step {int(loss.steps[-1]):,} it is"
    text += f" {smooth[-1]:.4g} (median of the last)"
    numbers = {"lowest": smooth[lowest], "last": smooth[-1]}
    finding = _finding("loss-rises", loss, begin, len(smooth) - 1, text, numbers)
    may_move = lowest == 0 and smooth[-1] < _MUCH * smooth[0]  # as the loss of a target network does
    yield replace(finding, severity="warning") if may_move else finding


def _spikes(loss: LossSeries, thresholds: Limits) -> Iterator[TimedFinding]:
    """All losses far above the steps before, and not small beside the first loss, as one finding."""
    losses = loss.losses
    before = np.array([np.median(losses[at - _WINDOW : at]) if at >= _WINDOW else np.inf for at in range(len(losses))])
    rise = losses - before > abs(float(losses[0])) / 2
    at = np.flatnonzero((before > 0) & (losses > thresholds["spike"] * before) & rise)
    if not len(at):
        return
    worst = at[int(np.argmax(losses[at]))]
    text = f"the loss is {losses[worst]:.4g}, about {before[worst]:.4g} in the sampled steps before"
    if len(at) > 1:
        text = f"{len(at)} of {len(losses)} sampled steps; at its worst, step {int(loss.steps[worst]):,}, {text}"
    yield _finding("loss-spike", loss, int(at[0]), int(at[-1]), text, {"worst": float(losses[worst]), "times": len(at)})


def flat_findings(run: RunSeries, classes: float, thresholds: Limits) -> Iterator[TimedFinding]:
    """A loss that ends where it began; ``classes`` are the classes of its cross-entropy, NaN where unknown."""
    loss = _known_losses(run)
    if loss is None or loss.steps[-1] < thresholds["flat_after"]:
        return
    losses, smooth, part = loss.losses, _smoothed(loss.losses), max(3, len(loss.losses) // 4)
    noise = 1.4826 * float(np.median(np.abs(losses - smooth)))
    last = float(losses[-part:].mean())
    first = max(float(losses[:part].mean()), float(losses[0]) - 3 * noise)  # it may fall within few steps
    fall = max(thresholds["flat_loss"] * abs(first), 2 * noise / math.sqrt(part))
    chance = math.log(classes) if classes > 1 else math.nan
    recent = float(losses[part : 2 * part].mean()) - last
    still_falls = recent > max(_SLOW * abs(first), 3 * noise / math.sqrt(part))
    before, jump = float(losses[-2 * part : -part].mean()), 1.05 * float(np.median(np.abs(np.diff(losses))))
    guesses = 0.98 * chance <= last <= 1.1 * chance and before - last <= 3 * jump / math.sqrt(part)
    has_fallen = first - last > fall or first - float(smooth.min()) > 4 * fall
    rises = last - first > thresholds["rising"] * abs(first)
    is_open = losses.min() < 0 or last < _LEARNED * chance  # the loss has no lowest value, or little is left to learn
    if not first or rises or is_open or ((still_falls or has_fallen) and not guesses):
        return
    text = f"the loss is {last:.4g} (mean of the last {part} sampled steps), {losses[0]:.4g} at first"
    text += f"; guessing among {classes:.0f} classes gives {chance:.4g}" if guesses else ""
    frozen = [values[0] for values in (layer.values["frozen"] for layer in run.layers) if not np.isnan(values[0])]
    text += f"; {int(sum(frozen))} of {counted(len(frozen), 'layer')} with parameters are frozen" if any(frozen) else ""
    numbers = {"first": float(losses[0]), "last": last} | ({"chance": chance} if guesses else {})
    updates = [layer.values["update_to_weight"] for layer in run.layers if not layer.starts_small]
    update, rate = (float(np.nanmax([0.0, *values])) for values in (np.concatenate([[], *updates]), loss.rates))
    rates = f"{rate:g}" if loss.rates[0] == rate else f"{loss.rates[0]:g} at first, {rate:g} at most"
    text += f"; learning rate {rates}, a step changes a weight by up to {update:.2g} of its norm" if rate else ""
    is_slow = update * (int(loss.steps[-1]) + 1) < thresholds["least_way"] or (np.diff(loss.rates) > 0).all()
    name = "learning-rate-vanishes" if (update or 0 < rate < thresholds["tiny_rate"]) and is_slow else "loss-flat"
    case = "slow" if name != "loss-flat" else "chance" if guesses else ""
    yield _finding(name, loss, 0, len(smooth) - 1, text, numbers, case)


def _finding(
    name: str, loss: LossSeries, first: int, last: int, text: str, numbers: Mapping[str, float], case: str = ""
) -> TimedFinding:
    when = int(loss.steps[first]), int(loss.steps[last]), float(loss.times[first]), last == len(loss.steps) - 1
    return timed_finding(name, f"{when_words(*when)}: {text}", when, case, numbers=numbers, optimizer=loss.optimizer)


_TRUE_NOTES = ("backward-steps", "compiled", "traced")  # they say how a run was watched, not what is wrong
_PHASES = dict(zip(("forward", "backward", "weights"), NON_FINITE, strict=True))


def nonfinite_findings(run: RunSeries, notes: Sequence[Mapping[str, Any]] = ()) -> list[TimedFinding]:
    """One finding for each model that computes NaN or Inf that spread, at the layer that has them first.

    Within a step, activations come first, in order of execution; then gradients, from the loss backwards; then
    weights. If the run was stopped, the note in its log says where, and which operation made them.
    """
    stops = [note for note in notes if note.get("note") == "non-finite"]
    before = _step(stops[0]) if stops else math.inf
    return [*map(note_finding, stops), *(finding for finding in layers_not_finite(run, False) if finding.step < before)]


def layers_not_finite(run: RunSeries, are_contained: bool) -> list[TimedFinding]:
    """One finding for each model with NaN or Inf that spread, or with Inf that do not, as in an attention mask."""
    models = sorted({layer.model for layer in run.layers})
    return [finding for model in models if (finding := _of_model(model, run, are_contained)) is not None]


def note_finding(note: Mapping[str, Any]) -> TimedFinding:
    name, step, time = str(note.get("note") or "note"), _step(note), known(note.get("time"))
    layer = call_key(str(note.get("layer") or ""), note.get("call") or 0)
    text = str(note.get("text") or "")
    if name != "non-finite":
        more = {"severity": "note"} if name in _TRUE_NOTES else {}
        return timed_finding(name, text, (step, step, time, False), layer=layer, **more)
    operation, layers, text = note.get("operation"), (layer,) if layer else (), text.removeprefix(f"step {step}: ")
    text = f"at step {step_words(step, time)}, where the run was stopped: {text or operation or 'NaN or Inf'}"
    numbers = {"phase": "stopped", "operation": operation}
    return timed_finding(name, text, (step, step, time, True), layer=layer, layers=layers, numbers=numbers)


def _step(note: Mapping[str, Any]) -> int:
    step = note.get("step")
    return step if isinstance(step, int) else 0


def _of_model(model: int, run: RunSeries, are_contained: bool) -> TimedFinding | None:
    layers = [layer for layer in run.layers if layer.model == model]
    contained = {(layer.optimizer, step) for layer in layers for step in _contained_steps(layer.optimizer, run)}
    bad = {
        layer.label: steps
        for layer in layers
        if (steps := [s for s in _bad_steps(layer) if ((layer.optimizer, s) in contained) == are_contained])
    }
    if not bad:
        return None
    step, last = min(steps[0] for steps in bad.values()), max(steps[-1] for steps in bad.values())
    phase, source = _source([layer for layer in layers if bad.get(layer.label, [None])[0] == step], step)
    lasts = last == max(int(layer.steps[-1]) for layer in layers)
    time = float(source.times[source.steps == step][0])
    when = step, last, time, lasts
    text = f"{when_words(*when, max(len(layer.steps) for layer in layers))}: {_words(phase, source, step)}"
    after = [layer for layer in layers if layer.index > source.index and layer.optimizer == source.optimizer]
    nearer = [layer.label for layer in after if (layer.values["gradient_norm"][layer.steps == step] >= 0).any()]
    text += f", and so is the gradient of '{nearer[0]}' after it" if phase == "backward" and nearer else ""
    operation = run.made_by.get((source.optimizer, step)) if phase == "backward" else None
    text += f"; made by {operation}, as far as the graph shows" if operation else ""
    text += f"; {counted(len(bad) - 1, 'more layer')} too" if len(bad) > 1 else ""
    loss = run.loss_of(source.optimizer)  # the log writes NaN and Inf as null
    had_loss = np.isfinite(loss.losses[loss.steps < step]).any()
    is_lost = had_loss and np.isnan(loss.losses[loss.steps >= step][:1]).all()
    text += "; the loss is not finite either" if is_lost else ""
    finite = [int(at) for layer in layers for at in layer.steps if at < step]
    if are_contained:
        text += "; loss, gradients and weights are finite"
    elif finite:
        text += f"; at step {max(finite):,}, sampled before, everything was finite"
    case = "contained" if are_contained else "" if operation else "operation unknown"
    numbers = {"phase": phase, "operation": operation, "values": _count(source, phase, step), "layers": len(bad)}
    of: dict[str, Any] = {"layers": tuple(bad), "model": model, "optimizer": source.optimizer}
    return timed_finding("non-finite", text, when, case, source.label, numbers=numbers, **of)


def _bad_steps(layer: LayerSeries) -> list[int]:
    bad = np.any([layer.values[name] > 0 for name in NON_FINITE], axis=0)
    return [int(step) for step in layer.steps[bad]]


def _contained_steps(optimizer: int, run: RunSeries) -> set[int]:
    """The steps in which some outputs have Inf of one sign, while the loss, all gradients and weights are finite."""
    layers, loss = [layer for layer in run.layers if layer.optimizer == optimizer], run.loss_of(optimizer)
    spread: list[Any] = [loss.steps[np.isnan(loss.losses)] if not np.isnan(loss.losses).all() else []]
    for layer in layers:
        values = layer.values
        parameters = (values["gradient_non_finite"] > 0) | (values["weight_non_finite"] > 0)
        spread.append(layer.steps[parameters | ((values["non_finite"] > 0) & (values["infinite"] != 1))])
    bad = {step for layer in layers for step in _bad_steps(layer)}
    return bad.difference(np.concatenate(spread).tolist())


def _count(layer: LayerSeries, phase: str, step: int) -> int:
    count = layer.values[_PHASES[phase]][layer.steps == step][0]
    return int(count) if count > 0 else 0


def _source(layers: Sequence[LayerSeries], step: int) -> tuple[str, LayerSeries]:
    """Whether an activation, a gradient or a weight was bad first in this step, and of which layer."""
    for phase, position in (("forward", 0), ("backward", -1)):
        bad = [layer for layer in layers if _count(layer, phase, step)]
        if bad:
            return phase, bad[position]
    return "weights", layers[0]


def _words(phase: str, layer: LayerSeries, step: int) -> str:
    count = f"{_count(layer, phase, step):,}"
    if phase == "backward":
        return f"{count} values of its gradient are NaN or Inf; all activations are finite"
    if phase == "weights":
        return f"{count} values of its weights are NaN or Inf, while activations and gradients are finite"
    kind = "Inf" if (layer.values["infinite"][layer.steps == step] == 1).any() else "NaN or Inf"
    text = f"{count} values of its activation are {kind}"
    return f"{text}, as are values of its weights" if _count(layer, "weights", step) else text
