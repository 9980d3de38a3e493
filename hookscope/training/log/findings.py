"""Named findings on a training run, in order of time: what went wrong, in which layer, from which step on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hookscope.findings import CATALOGUE, counted
from hookscope.hooks import call_key
from hookscope.training.log.consequences import consequences, consequences_words
from hookscope.training.log.few_samples import few_samples
from hookscope.training.log.file import Run
from hookscope.training.log.intervals import FindingInterval, grouped, interval_of
from hookscope.training.log.loss import loss_findings
from hookscope.training.log.non_finite import nonfinite_findings
from hookscope.training.log.rules import RULES, LayerContext, Rule
from hookscope.training.log.series import LayerSeries, RunSeries, series_of
from hookscope.training.log.thresholds import TrainingThresholds
from hookscope.training.log.timed import TimedFinding, when_words


def findings_over_time(run: Run, thresholds: TrainingThresholds | None = None) -> list[TimedFinding]:
    """What went wrong in a run, in order of the step at which it began; one finding for layers that began together.

    A finding must show in `TrainingThresholds.patience` sampled steps in a row, unless values are not finite. While a
    model computes NaN or Inf, what begins in it is a consequence and is not told. Where fewer steps were sampled than
    that, a last finding says so: then no others prove little.

    Args:
        run: As `read_runs` reads it; one that goes on still is told as far as it is.
        thresholds: From where on something is a finding.

    Example:
        >>> from types import SimpleNamespace
        >>> row = {"layer": "relu", "type": "ReLU", "zero_share": 1.0, "channels": 8, "dead_channels": 8}
        >>> rows = [{"step": step, "time": step / 10, "non_finite": 0, **row} for step in (0, 50, 100)]
        >>> [found] = findings_over_time(SimpleNamespace(rows=rows, notes=[]))
        >>> found.finding, found.layer, found.evidence
        ('dead-layer', 'relu', 'from step 0 (0 s) to the end: all 8 channels are 0 for the whole batch')
    """
    thresholds = thresholds or TrainingThresholds()
    series = series_of(run)
    spoiled = nonfinite_findings(series, run.notes)
    with np.errstate(over="ignore"):  # what explodes may be beyond what numbers can hold
        found = [one for model in _models(series) for one in _of_model(model, series, thresholds)]
    found = [one for one in found if not any(_within(one, bad) for bad in spoiled)]
    losses = [one for one in loss_findings(series, thresholds) if not any(_within(one, bad) for bad in spoiled)]
    everything = [*spoiled, *losses, *found, *_noted(run.notes)]
    in_order = sorted(everything, key=lambda one: (one.step if one.time is None else one.time, one.step))
    return [*in_order, *few_samples(run, series, thresholds)]


def _within(one: TimedFinding, spoiled: TimedFinding) -> bool:
    """Whether it begins while its model computes NaN or Inf."""
    if None not in (one.model, spoiled.model) and one.model != spoiled.model:
        return False
    if one.optimizer != spoiled.optimizer and None not in (one.time, spoiled.time):
        return spoiled.lasts and (one.time or 0) >= (spoiled.time or 0)
    return one.step >= spoiled.step and (spoiled.lasts or one.step <= spoiled.last_step)


def _models(run: RunSeries) -> list[int]:
    return sorted({layer.model for layer in run.layers})


def _of_model(model: int, run: RunSeries, thresholds: TrainingThresholds) -> Iterator[TimedFinding]:
    layers = [layer for layer in run.layers if layer.model == model]
    judged = {judge.finding: _judged(judge, layers, run, thresholds) for judge in RULES}
    spells = {name: [one for one in found if isinstance(one, FindingInterval)] for name, found in judged.items()}
    hidden = consequences(spells, _first_calls(layers), run, thresholds)
    for judge in RULES:
        told = [one for one in spells[judge.finding] if one not in hidden.get(judge.finding, ())]
        could = sum(one is not None for one in judged[judge.finding])
        for group in grouped(told, thresholds.patience):
            after = consequences_words(group, hidden, thresholds) if judge.finding == "dead-layer" else ""
            yield _told(judge, group, could, after)


def _judged(
    judge: Rule, layers: Sequence[LayerSeries], run: RunSeries, thresholds: TrainingThresholds
) -> list[FindingInterval | bool | None]:
    judged = _first_calls(layers) if judge.of_parameters else layers
    return [interval_of(judge, LayerContext(layer, run, thresholds)) for layer in judged]


def _first_calls(layers: Sequence[LayerSeries]) -> list[LayerSeries]:
    found: dict[str, LayerSeries] = {}
    for layer in sorted(layers, key=lambda one: one.call):
        found.setdefault(layer.name, layer)
    return sorted(found.values(), key=lambda one: one.index)


def _told(judge: Rule, group: Sequence[FindingInterval], could: int, after: str) -> TimedFinding:
    worst = (min if judge.lowest else max)(group, key=lambda one: one.figure)
    one = {"first": group[0], "last": group[-1], "worst": worst}[judge.telling]
    layer, lasts = one.layer, any(spell.lasts for spell in group)
    begin, last_step = min(group, key=lambda spell: spell.step), max(spell.last_step for spell in group)
    time = float(begin.layer.times[begin.first])
    when = when_words(begin.step, last_step, time, lasts, len(layer.steps))
    text = f"{when}{_on_and_off(group)}: {_figures(judge, one, begin.step)}"
    text += f"{_others(judge, group, one, worst, could)}{after}"
    return TimedFinding(
        judge.finding,
        layer.label,
        text,
        CATALOGUE[judge.finding].text(),
        numbers={
            "worst": _plain(worst.figure),
            "worst_step": int(worst.layer.steps[worst.worst]),
            "layers": len(group),
        },
        step=begin.step,
        last_step=last_step,
        time=None if time != time else time,
        lasts=lasts,
        layers=tuple(spell.layer.label for spell in group),
        model=layer.model,
        optimizer=layer.optimizer,
    )


def _plain(figure: float) -> float | None:
    return figure if abs(figure) < float("inf") else None


def _on_and_off(group: Sequence[FindingInterval]) -> str:
    if len(group) > 1:
        return ""
    between = group[0].last - group[0].first + 1
    return f", in {group[0].times} of {between} sampled steps" if group[0].times < between else ""


def _figures(judge: Rule, one: FindingInterval, begin: int) -> str:
    """The figures of the layer's first step, and of the worst where that tells more."""
    text, worst = judge.words(one.layer, one.first), judge.words(one.layer, one.worst)
    text = text if one.step == begin else f"at step {one.step:,} {text}"
    return (
        text
        if one.worst == one.first or text.endswith(worst)
        else f"{text}; at its worst, step {int(one.layer.steps[one.worst]):,}, {worst}"
    )


def _others(
    judge: Rule, group: Sequence[FindingInterval], one: FindingInterval, worst: FindingInterval, could: int
) -> str:
    """How many more layers have it, between which, and which is worst."""
    more = len(group) - 1
    if not more:
        return ""
    if len(group) == could:
        text = f"; all {more} other layers too" if more > 1 else "; the other layer too"
    elif more == 1:
        other = group[0] if group[1] is one else group[1]
        text = f"; '{other.layer.label}' too"
    else:
        text = f"; {counted(more, 'more layer')} too, from '{group[0].layer.label}' to '{group[-1].layer.label}'"
    if worst is one or judge.words(worst.layer, worst.worst) == judge.words(one.layer, one.worst):
        return text
    return f"{text}, worst in '{worst.layer.label}' at step {int(worst.layer.steps[worst.worst]):,}: " + judge.words(
        worst.layer, worst.worst
    )


def _noted(notes: Sequence[Mapping[str, Any]]) -> Iterator[TimedFinding]:
    """What the log notes, but for values that are not finite."""
    for note in notes:
        name = str(note.get("note") or "note")
        if name == "non-finite":
            continue
        step, time = note.get("step"), note.get("time")
        yield TimedFinding(
            name,
            call_key(str(note.get("layer") or ""), note.get("call") or 0),
            str(note.get("text") or ""),
            CATALOGUE[name].text() if name in CATALOGUE else "",
            step=step if isinstance(step, int) else 0,
            last_step=step if isinstance(step, int) else 0,
            time=float(time) if isinstance(time, (int, float)) else None,
            lasts=False,
        )
