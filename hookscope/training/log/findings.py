"""Findings on a training run: what went wrong, in which layer, from which step on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from hookscope.findings import GRAVITY, counted, merged, ranked
from hookscope.system import StrPath
from hookscope.training.log.cause_findings import with_causes
from hookscope.training.log.file import Run, last_run
from hookscope.training.log.intervals import FindingInterval, grouped, judge, spacing
from hookscope.training.log.loss import loss_findings
from hookscope.training.log.non_finite import contained_findings, nonfinite_findings, note_finding
from hookscope.training.log.rules import RULES, LayerContext, Rule, TrainingThresholds
from hookscope.training.log.series import LayerSeries, RunSeries, series_of
from hookscope.training.log.summary import TimedFinding, as_grave, summary, timed_finding, when_words

_ENOUGH = 20  # samples that show a trend
# Findings that may follow from a dead layer before.
_FOLLOW = ("dead-channels", "constant-output", "vanishing-activations", "saturated", "batchnorm-drift")
_DIVERGENCE = ("non-finite", "loss-rises", "dead-layer", "constant-output")
_LEADS_TO = {"update-too-large": _DIVERGENCE, "exploding-gradient": _DIVERGENCE}
"""What may follow from a finding."""
_UNCHANGED = ("no-update", "no-gradient", "frozen")  # each says why a weight does not change

_Intervals = Mapping[str, Sequence[FindingInterval]]


def findings_over_time(run: Run | StrPath, thresholds: TrainingThresholds | None = None) -> list[TimedFinding]:
    """Findings on a run, or on the last run of the log at a path: the most severe first, then by their first step.

    Layers that began together have one finding. A finding must show in `TrainingThresholds.patience` sampled steps in
    a row, unless values are not finite. Findings that begin in a model while it computes NaN or Inf are consequences,
    and left out. A warning that explains a later error is an error; one that has passed while the loss fell is a note.
    If fewer steps were sampled, the last finding says so.
    """
    thresholds = thresholds or TrainingThresholds()
    run = last_run(run)
    series = series_of(run)
    causes = nonfinite_findings(series, run.notes)
    with np.errstate(over="ignore"):  # exploding values may overflow
        models = sorted({layer.model for layer in series.layers})
        findings = [finding for model in models for finding in _of_model(model, series, thresholds)]
    findings = [*loss_findings(series, thresholds), *findings]
    findings = [finding for finding in findings if not any(_begins_within(finding, cause) for cause in causes)]
    notes = [note_finding(note) for note in run.notes if note.get("note") != "non-finite"]
    findings = [*causes, *contained_findings(series), *findings, *notes]
    findings.sort(key=lambda finding: (finding.step if finding.time is None else finding.time, finding.step))
    findings = [_as_grave_as_its_symptoms(finding, findings, series) for finding in findings]
    findings = with_causes(run, series, thresholds, findings)
    return ranked([*map(_of_parts, merged(findings)), *_few_samples(run, series, thresholds)])


def _as_grave_as_its_symptoms(finding: TimedFinding, findings: Sequence[TimedFinding], run: RunSeries) -> TimedFinding:
    """A cause as an error if it explains an error that begins later; a warning as a note if it passed without harm."""
    if finding.severity != "warning" or not finding.layers:
        return finding
    finding = as_grave(finding, _LEADS_TO.get(finding.finding, ()), findings)
    has_passed = finding.severity == "warning" and not finding.lasts
    is_harmless = has_passed and run.loss_of(finding.optimizer).falls_after(finding.step)
    return dataclasses.replace(finding, severity="note") if is_harmless else finding


def _of_parts(finding: TimedFinding) -> TimedFinding:
    """A finding that was made of several, with their layers, to the end of the last."""
    parts = cast("tuple[TimedFinding, ...]", finding.parts)
    if not parts:
        return finding
    last_step, lasts = max(part.last_step for part in parts), any(part.lasts for part in parts)
    layers = tuple(layer for part in parts for layer in part.layers)
    return dataclasses.replace(finding, layers=layers, last_step=last_step, lasts=lasts)


def _begins_within(finding: TimedFinding, cause: TimedFinding) -> bool:
    """Whether it begins while its model computes NaN or Inf."""
    if None not in (finding.model, cause.model) and finding.model != cause.model:
        return False
    if finding.optimizer != cause.optimizer and finding.time is not None and cause.time is not None:
        return cause.lasts and finding.time >= cause.time
    return finding.step >= cause.step and (cause.lasts or finding.step <= cause.last_step)


def _of_model(model: int, run: RunSeries, thresholds: TrainingThresholds) -> Iterator[TimedFinding]:
    layers = [layer for layer in run.layers if layer.model == model]
    first_calls = _first_calls(layers)
    judged: dict[str, int] = {}
    intervals: dict[str, list[FindingInterval]] = {}
    for name in GRAVITY["training"]:
        if name in RULES:
            judged_layers = first_calls if RULES[name].of_parameters else layers
            results = [judge(RULES[name], LayerContext(layer, run, thresholds)) for layer in judged_layers]
            judged[name] = sum(applies for applies, _ in results)
            intervals[name] = [interval for _, interval in results if interval is not None]
    consequences = _consequences(intervals, first_calls, run, thresholds)
    for name in intervals:
        own = [interval for interval in intervals[name] if interval not in consequences.get(name, ())]
        for group in grouped(own, thresholds.patience):
            after = _consequence_words(group, consequences, thresholds) if name == "dead-layer" else ""
            yield _finding(RULES[name], group, judged[name], after)


def _first_calls(layers: Sequence[LayerSeries]) -> list[LayerSeries]:
    by_name: dict[str, LayerSeries] = {}
    for layer in sorted(layers, key=lambda layer: layer.call):
        by_name.setdefault(layer.name, layer)
    return sorted(by_name.values(), key=lambda layer: layer.index)


def _consequences(
    intervals: _Intervals, layers: Sequence[LayerSeries], run: RunSeries, thresholds: TrainingThresholds
) -> dict[str, list[FindingInterval]]:
    """What layers have because a layer before them is dead, by name of the finding; ``layers`` have parameters."""
    dead = intervals["dead-layer"]
    consequences = {name: [each for each in intervals[name] if _follows(each, dead, thresholds)] for name in _FOLLOW}
    explained = {each.layer.label for name in _UNCHANGED for each in intervals[name]}
    unchanged = [_unchanged(layer, dead, run) for layer in layers if layer.label not in explained]
    consequences["no-update"] = [interval for interval in unchanged if interval is not None]
    return {name: parts for name, parts in consequences.items() if parts}


def _follows(interval: FindingInterval, dead: Sequence[FindingInterval], thresholds: TrainingThresholds) -> bool:
    """Whether the layer is dead itself or comes after a dead one, and its finding begins about when that died."""
    near = max(thresholds.patience * spacing(interval.layer), thresholds.warm_up)
    return any(each.layer.index <= interval.layer.index and abs(each.step - interval.step) <= near for each in dead)


def _unchanged(layer: LayerSeries, dead: Sequence[FindingInterval], run: RunSeries) -> FindingInterval | None:
    """When a weight after a dead layer does not change while others do, from when that layer died."""
    for cause in (each for each in dead if each.layer.index < layer.index):
        during = (layer.steps >= cause.step) & (layer.steps <= cause.last_step) & (layer.values["frozen"] != 1)
        if not during.any() or not run.changing(layer, 0.0)[during].any():
            continue
        if (layer.values["update_to_weight"][during] == 0).all():
            at = np.flatnonzero(during).tolist()
            return FindingInterval(layer, at[0], at[-1], at[0], 0.0, len(at), cause.lasts)
    return None


def _consequence_words(
    group: Sequence[FindingInterval], consequences: _Intervals, thresholds: TrainingThresholds
) -> str:
    own = {interval.layer.label for interval in group}
    parts = []
    for name, intervals in consequences.items():
        layers = [each.layer for each in intervals if each.layer.label not in own and _follows(each, group, thresholds)]
        labels = [layer.label for layer in sorted(layers, key=lambda layer: layer.index)]
        if len(labels) > 2:
            parts.append(f"{name} in {len(labels)} layers from '{labels[0]}' to '{labels[-1]}'")
        elif labels:
            parts.append(f"{name} in " + " and ".join(f"'{label}'" for label in labels))
    return f"; this explains {', '.join(parts)}" if parts else ""


def _finding(rule: Rule, group: Sequence[FindingInterval], judged: int, after: str) -> TimedFinding:
    """One finding for layers that began together; ``judged`` layers could have had it."""
    worst = (min if rule.lowest else max)(group, key=lambda interval: interval.value)
    named = {"first": group[0], "last": group[-1], "worst": worst}[rule.named]
    first = min(group, key=lambda interval: interval.step)
    time, lasts = float(first.layer.times[first.first]), any(interval.lasts for interval in group)
    when = first.step, max(interval.last_step for interval in group), time, lasts
    text = when_words(*when, len(named.layer.steps))
    text += f", called as '{named.layer.called_as}'" if named.layer.called_as else ""
    span = named.last - named.first + 1
    if len(group) == 1 and named.times < span:
        text += f", in {named.times} of {span} sampled steps"
    text += f": {_values(rule, named, first.step)}{_other_layers(rule, group, named, worst, judged)}{after}"
    value = worst.value if abs(worst.value) < float("inf") else None
    severity: dict[str, Any] = {"severity": rule.severity} if rule.severity else {}
    if rule.of_all and len(group) == judged:
        severity = {"severity": rule.of_all}
    return timed_finding(
        rule.kind.name,
        text,
        *when,
        layer=named.layer.label,
        numbers={"worst": value, "worst_step": worst.worst_step, "layers": len(group)},
        layers=tuple(interval.layer.label for interval in group),
        model=named.layer.model,
        optimizer=named.layer.optimizer,
        **severity,
    )


def _values(rule: Rule, named: FindingInterval, begin: int) -> str:
    """The evidence of the layer's first step, and of the worst where that says more."""
    text, worst = rule.words(named.layer, named.first), rule.words(named.layer, named.worst)
    text = text if named.step == begin else f"at step {named.step:,} {text}"
    if named.worst == named.first or text.endswith(worst):
        return text
    return f"{text}; at its worst, step {named.worst_step:,}, {worst}"


def _other_layers(
    rule: Rule, group: Sequence[FindingInterval], named: FindingInterval, worst: FindingInterval, judged: int
) -> str:
    """How many more layers have it, between which, and which is worst."""
    more = len(group) - 1
    if not more:
        return ""
    if len(group) == judged:
        text = f"; all {more} other layers too" if more > 1 else "; the other layer too"
    elif more == 1:
        other = group[0] if group[1] is named else group[1]
        text = f"; '{other.layer.label}' too"
    else:
        text = f"; {counted(more, 'more layer')} too, from '{group[0].layer.label}' to '{group[-1].layer.label}'"
    words = rule.words(worst.layer, worst.worst)
    if worst is named or words == rule.words(named.layer, named.worst):
        return text
    return f"{text}, worst in '{worst.layer.label}' at step {worst.worst_step:,}: {words}"


def _few_samples(run: Run, series: RunSeries, thresholds: TrainingThresholds) -> Iterator[TimedFinding]:
    """A finding where fewer steps were sampled than a finding needs; none where NaN or Inf stopped the run."""
    most = max(series.losses, key=lambda loss: len(loss.steps), default=None)
    if most is None or len(most.steps) >= thresholds.patience or (run.end or {}).get("reason") == "stopped":
        return
    sampled, steps, last = len(most.steps), summary(run).steps, int(most.steps[-1])
    every = max(1, steps // _ENOUGH)
    of = " so far" if run.end is None else f" of {steps:,}"
    text = f"{counted(sampled, 'sampled step')}{of}: too few for a trend"
    if run.end is not None and sampled >= steps:
        text += "; there were no more"
    elif run.end is not None:
        text += f"; sample more often, {f'--every {every}' if run.header.get('command') else f'every={every}'}"
    numbers = {"sampled": sampled, "steps": steps, "every": every}
    time = float(most.times[-1])
    yield timed_finding("few-samples", text, last, last, time, True, numbers=numbers, optimizer=most.optimizer)
