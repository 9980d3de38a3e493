"""The first NaN or Inf of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hookscope.findings import counted
from hookscope.hooks import call_key
from hookscope.training.log.series import LayerSeries, RunSeries
from hookscope.training.log.summary import NON_FINITE, TimedFinding, known, step_words, timed_finding, when_words

_TRUE_NOTES = ("backward-steps", "compiled", "traced")  # they say how a run was watched, not what is wrong
_PHASES = dict(zip(("forward", "backward", "weights"), NON_FINITE, strict=True))


def nonfinite_findings(run: RunSeries, notes: Sequence[Mapping[str, Any]] = ()) -> list[TimedFinding]:
    """One finding for each model that computes NaN or Inf that spread, at the layer that has them first.

    Within a step, activations come first, in order of execution; then gradients, from the loss backwards; then
    weights. If the run was stopped, the note in its log says where, and which operation made them.
    """
    stops = [note for note in notes if note.get("note") == "non-finite"]
    models = sorted({layer.model for layer in run.layers})
    findings = [finding for model in models if (finding := _of_model(model, run, False)) is not None]
    if not stops:
        return findings
    return [*map(note_finding, stops), *(finding for finding in findings if finding.step < _step(stops[0]))]


def contained_findings(run: RunSeries) -> list[TimedFinding]:
    """One finding for each model with Inf that do not spread, as in the mask of an attention."""
    models = sorted({layer.model for layer in run.layers})
    return [finding for model in models if (finding := _of_model(model, run, True)) is not None]


def note_finding(note: Mapping[str, Any]) -> TimedFinding:
    """A note of the log as a finding."""
    name, step, time = str(note.get("note") or "note"), _step(note), known(note.get("time"))
    layer = call_key(str(note.get("layer") or ""), note.get("call") or 0)
    text = str(note.get("text") or "")
    if name != "non-finite":
        more = {"severity": "note"} if name in _TRUE_NOTES else {}
        return timed_finding(name, text, step, step, time, False, layer=layer, **more)
    text = (
        f"at step {step_words(step, time)}, where the run was stopped: {text or note.get('operation') or 'NaN or Inf'}"
    )
    layers = (layer,) if layer else ()
    numbers = {"phase": "stopped", "operation": note.get("operation")}
    return timed_finding(name, text, step, step, time, True, layer=layer, layers=layers, numbers=numbers)


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
    time = float(source.times[_at(source, step)])
    when = when_words(step, last, time, lasts, max(len(layer.steps) for layer in layers))
    text = f"{when}: {_words(phase, source, step)}{_nearer_the_loss(phase, source, layers, step)}"
    text += f"; {counted(len(bad) - 1, 'more layer')} too" if len(bad) > 1 else ""
    text += "; the loss is not finite either" if _loss_is_lost(run, source.optimizer, step) else ""
    finite = [int(at) for layer in layers for at in layer.steps if at < step]
    if are_contained:
        text += "; loss, gradients and weights are finite"
    elif finite:
        text += f"; at step {max(finite):,} everything was finite"
    return timed_finding(
        "non-finite",
        text,
        step,
        last,
        time,
        lasts,
        "contained" if are_contained else "operation unknown",
        layer=source.label,
        layers=tuple(bad),
        numbers={"phase": phase, "values": _count(source, phase, step), "layers": len(bad)},
        model=model,
        optimizer=source.optimizer,
    )


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


def _at(layer: LayerSeries, step: int) -> int:
    at: int = layer.steps.tolist().index(step)
    return at


def _count(layer: LayerSeries, phase: str, step: int) -> int:
    count = layer.values[_PHASES[phase]][_at(layer, step)]
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
    kind = "Inf" if layer.values["infinite"][_at(layer, step)] == 1 else "NaN or Inf"
    text = f"{count} values of its activation are {kind}"
    return f"{text}, as are values of its weights" if _count(layer, "weights", step) else text


def _nearer_the_loss(phase: str, source: LayerSeries, layers: Sequence[LayerSeries], step: int) -> str:
    """The next layer whose gradient is finite: the cause lies between the two."""
    after = [layer for layer in layers if layer.index > source.index and layer.optimizer == source.optimizer]
    finite = [layer for layer in after if step in layer.steps and layer.values["gradient_norm"][_at(layer, step)] >= 0]
    return f", and so is the gradient of '{finite[0].label}' after it" if phase == "backward" and finite else ""


def _loss_is_lost(run: RunSeries, optimizer: int, step: int) -> bool:
    """Whether the loss is in the log before this step and null from it on; null is how the log writes NaN and Inf."""
    loss = run.loss_of(optimizer)
    before, after = loss.losses[loss.steps < step], loss.losses[loss.steps >= step]
    return bool(np.isfinite(before).any() and np.isnan(after[:1]).all())
