"""Where a training run first computes what is no finite number, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hookscope.findings import CATALOGUE, counted
from hookscope.hooks import call_key
from hookscope.training.log.series import LayerSeries, LossSeries, RunSeries
from hookscope.training.log.timed import TimedFinding, step_words, when_words

_FIGURES = ("non_finite", "gradient_non_finite", "weight_non_finite")


def nonfinite_findings(run: RunSeries, notes: Sequence[Mapping[str, Any]] = ()) -> list[TimedFinding]:
    """One finding for each model that computes NaN or Inf, at the layer where they come first.

    In a step the activations come first, in order of execution; then the gradients, from the loss backwards; then the
    weights. Where the run was stopped, the log's own note says where, and which operation made them.

    Args:
        run: The run.
        notes: What the log notes.
    """
    stopped = [note for note in notes if note.get("note") == "non-finite"]
    models = sorted({layer.model for layer in run.layers})
    found = [one for model in models if (one := _of_model(model, run)) is not None]
    if not stopped:
        return found
    return [*_stopped(stopped), *(one for one in found if one.step < _step(stopped[0]))]


def _step(note: Mapping[str, Any]) -> int:
    step = note.get("step")
    return step if isinstance(step, int) else 0


def _stopped(notes: Sequence[Mapping[str, Any]]) -> Iterator[TimedFinding]:
    for note in notes:
        step, time = _step(note), note.get("time")
        time = float(time) if isinstance(time, (int, float)) else None
        layer = call_key(str(note.get("layer") or ""), note.get("call") or 0)
        text = str(note.get("text") or note.get("operation") or "NaN or Inf")
        evidence = f"at step {step_words(step, time)}, where the run was stopped: {text}"
        yield TimedFinding(
            "non-finite",
            layer,
            evidence,
            CATALOGUE["non-finite"].text("training"),
            numbers={"phase": "stopped", "operation": note.get("operation")},
            step=step,
            last_step=step,
            time=time,
            lasts=True,
            layers=(layer,) if layer else (),
        )


def _of_model(model: int, run: RunSeries) -> TimedFinding | None:
    layers = [layer for layer in run.layers if layer.model == model]
    bad = {layer.label: _bad_steps(layer) for layer in layers}
    having = [layer for layer in layers if bad[layer.label]]
    if not having:
        return None
    step = min(bad[layer.label][0] for layer in having)
    begin = [layer for layer in having if bad[layer.label][0] == step]
    phase, source = _source(begin, step)
    last = max(bad[layer.label][-1] for layer in having)
    end = max(int(layer.steps[-1]) for layer in layers)
    time = float(source.times[_at(source, step)])
    known = None if time != time else time
    when = when_words(step, last, known, last == end, max(len(layer.steps) for layer in layers))
    text = f"{when}: {_words(phase, source, step)}{_nearer_the_loss(phase, source, layers, step)}"
    if len(having) > 1:
        text += f"; {counted(len(having) - 1, 'more layer')} too"
    if _loss_was_lost(run, source.optimizer, step):
        text += "; the loss is not finite either"
    sound = [int(at) for layer in layers for at in layer.steps if at < step]
    if sound:
        text += f"; at step {max(sound):,} all was finite"
    return TimedFinding(
        "non-finite",
        source.label,
        text,
        CATALOGUE["non-finite"].text("operation unknown"),
        numbers={"phase": phase, "values": _count(source, phase, step), "layers": len(having)},
        step=step,
        last_step=last,
        time=known,
        lasts=last == end,
        layers=tuple(layer.label for layer in having),
        model=model,
        optimizer=source.optimizer,
    )


def _bad_steps(layer: LayerSeries) -> list[int]:
    bad = np.any([layer.values[name] > 0 for name in _FIGURES], axis=0)
    return [int(step) for step in layer.steps[bad]]


def _at(layer: LayerSeries, step: int) -> int:
    at: int = layer.steps.tolist().index(step)
    return at


def _source(layers: Sequence[LayerSeries], step: int) -> tuple[str, LayerSeries]:
    """Which came first in this step: an activation, a gradient or a weight, and of which layer."""
    for phase, figure, of in (("forward", "non_finite", 0), ("backward", "gradient_non_finite", -1)):
        some = [layer for layer in layers if layer.values[figure][_at(layer, step)] > 0]
        if some:
            return phase, some[of]
    return "weights", layers[0]


def _count(layer: LayerSeries, phase: str, step: int) -> int:
    figure = dict(zip(("forward", "backward", "weights"), _FIGURES, strict=True))[phase]
    return int(layer.values[figure][_at(layer, step)])


def _words(phase: str, layer: LayerSeries, step: int) -> str:
    at, count = _at(layer, step), f"{_count(layer, phase, step):,}"
    if phase == "backward":
        return f"{count} values of its gradient are NaN or Inf; all activations are finite"
    if phase == "weights":
        return f"{count} values of its weights are NaN or Inf, while activations and gradients are finite"
    text = f"{count} values of its activation are NaN or Inf"
    return f"{text}, as are values of its weights" if layer.values["weight_non_finite"][at] > 0 else text


def _nearer_the_loss(phase: str, source: LayerSeries, layers: Sequence[LayerSeries], step: int) -> str:
    """The next layer whose gradient is finite: what spoils it is between the two."""
    after = [one for one in layers if one.index > source.index and one.optimizer == source.optimizer]
    sound = [one for one in after if step in one.steps and one.values["gradient_norm"][_at(one, step)] >= 0]
    if phase != "backward" or not sound:
        return ""
    return f", and so is the gradient of '{sound[0].label}' after it"


def _loss_was_lost(run: RunSeries, optimizer: int, step: int) -> bool:
    """Whether the loss was seen before, and is null from this step on: the log writes so what is not finite."""
    loss: LossSeries = next(one for one in run.losses if one.optimizer == optimizer)
    before, after = loss.losses[loss.steps < step], loss.losses[loss.steps >= step]
    return bool(np.isfinite(before).any() and np.isnan(after[:1]).all())
