"""Named findings on a training run, in order of time: what went wrong, in which layer, from which step on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookscope.findings import counted
from hookscope.layers import call_key
from hookscope.runs.judges import JUDGES, Case, Judge
from hookscope.runs.loss import loss_findings
from hookscope.runs.meanings import MEANINGS
from hookscope.runs.non_finite import nonfinite_findings
from hookscope.runs.series import LayerSeries, RunSeries, series_of
from hookscope.runs.thresholds import WatchThresholds
from hookscope.runs.timed import TimedFinding, when_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hookscope.runs.log import Run

__all__ = ["findings_over_time"]

_CONSEQUENCES = ("dead-channels", "constant-output", "vanishing-activations", "saturated", "batchnorm-drift")
_MOST_GROUPS = 3  # of one kind of finding; more of them are one thing to know, not thirty


@dataclass(frozen=True)
class _Spell:
    """From when to when a layer has a finding: positions among its sampled steps."""

    layer: LayerSeries
    first: int
    last: int
    worst: int
    figure: float
    times: int
    lasts: bool

    @property
    def step(self) -> int:
        return int(self.layer.steps[self.first])

    @property
    def last_step(self) -> int:
        return int(self.layer.steps[self.last])


def findings_over_time(run: Run, thresholds: WatchThresholds | None = None) -> list[TimedFinding]:
    """What went wrong in a run, in order of the step at which it began; one finding for layers that began together.

    A finding must show in a few sampled steps in a row (`WatchThresholds.patience`), but for what is not finite. While
    a model computes NaN or Inf, what begins in it is a consequence and is not told.

    Args:
        run: As `hookscope.runs.log.read_runs` reads it; one that goes on still is told as far as it is.
        thresholds: From where on something is a finding.

    Example:
        >>> from types import SimpleNamespace
        >>> row = {"layer": "relu", "type": "ReLU", "zero_share": 1.0, "channels": 8, "dead_channels": 8}
        >>> rows = [{"step": step, "time": step / 10, "non_finite": 0, **row} for step in (0, 50, 100)]
        >>> [found] = findings_over_time(SimpleNamespace(rows=rows, notes=[]))
        >>> found.finding, found.layer, found.evidence
        ('dead-layer', 'relu', 'from step 0 (0 s) to the end: all 8 channels are 0 for the whole batch')
    """
    import numpy as np

    thresholds = thresholds or WatchThresholds()
    series = series_of(run)
    spoiled = nonfinite_findings(series, run.notes)
    with np.errstate(over="ignore"):  # what explodes may be beyond what numbers can hold
        found = [one for model in _models(series) for one in _of_model(model, series, thresholds)]
    found = [one for one in found if not any(_within(one, bad) for bad in spoiled)]
    losses = [one for one in loss_findings(series, thresholds) if not any(_within(one, bad) for bad in spoiled)]
    everything = [*spoiled, *losses, *found, *_noted(run.notes)]
    return sorted(everything, key=lambda one: (one.step if one.time is None else one.time, one.step))


def _within(one: TimedFinding, spoiled: TimedFinding) -> bool:
    """Whether it begins while its model computes NaN or Inf."""
    if None not in (one.model, spoiled.model) and one.model != spoiled.model:
        return False
    if one.optimizer != spoiled.optimizer and None not in (one.time, spoiled.time):
        return spoiled.lasts and (one.time or 0) >= (spoiled.time or 0)
    return one.step >= spoiled.step and (spoiled.lasts or one.step <= spoiled.last_step)


def _models(run: RunSeries) -> list[int]:
    return sorted({layer.model for layer in run.layers})


def _of_model(model: int, run: RunSeries, thresholds: WatchThresholds) -> Iterator[TimedFinding]:
    layers = [layer for layer in run.layers if layer.model == model]
    dead: list[_Spell] = []
    for judge in JUDGES:
        judged = _first_calls(layers) if judge.of_parameters else layers
        found = {layer.label: _spell(judge, Case(layer, run, thresholds)) for layer in judged}
        spells = [one for one in found.values() if isinstance(one, _Spell)]
        if judge.finding in _CONSEQUENCES:
            spells = [one for one in spells if not _follows(one, dead, thresholds)]
        dead = spells if judge.finding == "dead-layer" else dead
        could = sum(one is not None for one in found.values())
        for group in _groups(spells, thresholds.patience):
            yield _told(judge, group, could)


def _follows(one: _Spell, dead: Sequence[_Spell], thresholds: WatchThresholds) -> bool:
    """Whether a layer behind a dead one, or that itself, begins about when that died."""
    near = max(thresholds.patience * _spacing(one.layer), thresholds.warm_up)
    return any(spell.layer.index <= one.layer.index and abs(spell.step - one.step) <= near for spell in dead)


def _spacing(layer: LayerSeries) -> float:
    """Steps from one sampled step to the next."""
    return (int(layer.steps[-1]) - int(layer.steps[0])) / max(len(layer.steps) - 1, 1)


def _first_calls(layers: Sequence[LayerSeries]) -> list[LayerSeries]:
    found: dict[str, LayerSeries] = {}
    for layer in sorted(layers, key=lambda one: one.call):
        found.setdefault(layer.name, layer)
    return sorted(found.values(), key=lambda one: one.index)


def _spell(judge: Judge, case: Case) -> _Spell | bool | None:
    """When a layer has it: from the first sampled step of a row of them that is long enough to the last of such.

    Returns:
        False if it does not have it, None if it could not: there is nothing to judge.
    """
    import numpy as np

    figures, limit = judge.measure(case), judge.limit(case.thresholds)
    judged = np.flatnonzero(~np.isnan(figures))
    bad = figures[judged] < limit if judge.lowest else figures[judged] > limit
    patience = case.thresholds.patience if judge.patience is None else judge.patience
    at = judged[_in_a_row(bad, min(patience, case.run.samples(case.layer.optimizer)))]
    if not len(at):
        return False if len(judged) else None
    worst = at[np.argmin(figures[at]) if judge.lowest else np.argmax(figures[at])]
    first, last = int(at[0]), int(at[-1])
    lasts = last == judged[-1] == len(figures) - 1
    return _Spell(case.layer, first, last, int(worst), float(figures[worst]), len(at), lasts)


def _in_a_row(bad: NDArray[np.bool_], patience: int) -> NDArray[np.bool_]:
    """``(S,)`` those that are bad together with their neighbours, so many in a row at least.

    Example:
        >>> import numpy as np
        >>> _in_a_row(np.array([1, 0, 1, 1, 1, 0], bool), 3).astype(int).tolist()
        [0, 0, 1, 1, 1, 0]
    """
    import numpy as np

    edges = np.flatnonzero(np.diff(np.concatenate([[0], bad.astype(int), [0]])))
    found = np.zeros(len(bad), bool)
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        found[begin:end] = end - begin >= patience
    return found


def _groups(spells: Sequence[_Spell], patience: int) -> list[list[_Spell]]:
    """Layers that began together, give or take a few sampled steps; the latest groups are one where there are many."""
    groups: list[list[_Spell]] = []
    for spell in sorted(spells, key=lambda one: one.step):
        if groups and spell.step - groups[-1][0].step <= patience * _spacing(spell.layer):
            groups[-1].append(spell)
        else:
            groups.append([spell])
    if len(groups) > _MOST_GROUPS:
        groups[_MOST_GROUPS - 1 :] = [[spell for group in groups[_MOST_GROUPS - 1 :] for spell in group]]
    return [sorted(group, key=lambda one: one.layer.index) for group in groups]


def _told(judge: Judge, group: Sequence[_Spell], could: int) -> TimedFinding:
    worst = (min if judge.lowest else max)(group, key=lambda one: one.figure)
    one = {"first": group[0], "last": group[-1], "worst": worst}[judge.telling]
    layer, lasts = one.layer, any(spell.lasts for spell in group)
    begin, last_step = min(group, key=lambda spell: spell.step), max(spell.last_step for spell in group)
    time = float(begin.layer.times[begin.first])
    when = when_words(begin.step, last_step, time, lasts, len(layer.steps))
    text = f"{when}{_on_and_off(group)}: {_figures(judge, one, begin.step)}{_others(judge, group, one, worst, could)}"
    return TimedFinding(
        judge.finding,
        layer.label,
        text,
        MEANINGS[judge.finding],
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


def _on_and_off(group: Sequence[_Spell]) -> str:
    if len(group) > 1:
        return ""
    between = group[0].last - group[0].first + 1
    return f", in {group[0].times} of {between} sampled steps" if group[0].times < between else ""


def _figures(judge: Judge, one: _Spell, begin: int) -> str:
    """The figures of the layer's first step, and of the worst where that tells more."""
    text, worst = judge.words(one.layer, one.first), judge.words(one.layer, one.worst)
    text = text if one.step == begin else f"at step {one.step:,} {text}"
    return (
        text
        if one.worst == one.first or text.endswith(worst)
        else f"{text}; at its worst, step {int(one.layer.steps[one.worst]):,}, {worst}"
    )


def _others(judge: Judge, group: Sequence[_Spell], one: _Spell, worst: _Spell, could: int) -> str:
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
            MEANINGS.get(name, ""),
            step=step if isinstance(step, int) else 0,
            last_step=step if isinstance(step, int) else 0,
            time=float(time) if isinstance(time, (int, float)) else None,
            lasts=False,
        )
