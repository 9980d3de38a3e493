"""Findings on a training run: what went wrong, in which layer, from which step on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from hookscope.display import NOTHING_MEASURED
from hookscope.errors import spelled
from hookscope.findings import REPORT_ORDER, Findings, chains, counted, merged, ranked
from hookscope.system import StrPath
from hookscope.training.log.causes import CAUSES, Cause, Facts, History
from hookscope.training.log.file import Run, last_run
from hookscope.training.log.rules import RULES, LayerContext, Limits, Rule, limits_of
from hookscope.training.log.run_rules import (
    flat_findings,
    layers_not_finite,
    loss_findings,
    nonfinite_findings,
    note_finding,
)
from hookscope.training.log.series import LayerSeries, RunSeries, in_long_runs, series_of
from hookscope.training.log.summary import ENOUGH, TimedFinding, known, timed_finding, when_words, with_severity_of


def with_causes(
    run: Run, series: RunSeries, thresholds: Limits, symptoms: Sequence[TimedFinding]
) -> list[TimedFinding]:
    """The causes in a run, and ``symptoms`` without what the causes explain; a cause comes before its symptoms."""
    classes = next((row["classes"] for row in run.facts if isinstance(row.get("classes"), int)), math.nan)
    flat = list(flat_findings(series, classes, thresholds))
    if any(finding.finding == "learning-rate-vanishes" for finding in flat):  # which no layer causes
        symptoms = [finding for finding in symptoms if finding.finding not in ("no-update", "update-too-small")]
    weak = ["dead-channels"] if flat and "chance" in flat[0].numbers else []  # some dead channels do not make it guess
    if all(f.severity == "note" or f.finding in weak for f in symptoms):  # else they say why the loss is flat
        is_flat = bool(flat) and flat[0].finding == "loss-flat"
        models = sorted({layer.model for layer in series.layers}) if is_flat else []
        is_lost = [is_flat and f.finding == "update-too-large" for f in symptoms]  # nothing shows that it recovered
        symptoms = [replace(f, severity="warning") if lost else f for f, lost in zip(symptoms, is_lost, strict=True)]
        reasons = [finding for model in models for finding in _of_model(model, series, thresholds, is_flat=True)]
        late = [finding for finding in symptoms if finding.finding in weak]
        symptoms = [*(finding for finding in symptoms if finding not in late), *reasons, *flat, *late]
    pairs = _causes(run, series, thresholds)
    if any(finding.finding == "dead-layer" for finding in symptoms):  # which is the cause of gradients of 0
        pairs = [(rule, finding) for rule, finding in pairs if "zero_gradients" not in finding.numbers]
    explaining = [rule for rule, finding in pairs if finding.severity != "note"]
    pairs = [
        (rule, finding)
        for rule, finding in pairs
        if not any(finding.finding in other.explains for other in explaining if other is not rule)
    ]
    notes = [finding for _, finding in pairs if finding.severity == "note"]
    grave = [(rule, finding) for rule, finding in pairs if finding.severity != "note"]
    causes = [with_severity_of(finding, rule.precedes, symptoms) for rule, finding in grave]
    return [*causes, *notes, *(f for f in symptoms if not any(f.finding in rule.explains for rule, _ in grave))]


def _causes(run: Run, series: RunSeries, limits: Mapping[str, float]) -> list[tuple[Cause, TimedFinding]]:
    """The causes in a run, each with its rule; those without an optimizer only where no optimizer has them."""
    by_optimizer: dict[int | None, dict[int, Facts]] = {}
    for row in run.facts:
        if isinstance(row.get("step"), int):
            number = row.get("optimizer")
            number = number if isinstance(number, int) else None
            by_optimizer.setdefault(number, {})[row["step"] if number is not None else row.get("backwards") or 0] = row
    causes: list[tuple[Cause, TimedFinding]] = []
    for number, rows in by_optimizer.items():
        history = [row for _, row in sorted(rows.items())]
        for rule in CAUSES:
            finding = _judge(rule, history, series, limits)
            is_known = number is None and any(other is rule for other, _ in causes)
            causes += [] if finding is None or is_known else [(rule, finding)]
    return sorted(causes, key=lambda pair: CAUSES.index(pair[0]))


def _judge(rule: Cause, rows: Sequence[Facts], series: RunSeries, limits: Mapping[str, float]) -> TimedFinding | None:
    """The finding from the first to the last long enough series of steps that show it."""
    shown = [rule.look(History(rows, at, series, limits)) for at in range(len(rows))]
    needed = min(int(limits["patience"]) if rule.patience is None else rule.patience, len(rows))
    at = in_long_runs(np.array([evidence is not None for evidence in shown]), needed)
    if not at:
        return None
    first, last = at[0], at[-1]
    evidence = shown[last if rows[first].get("optimizer") is None else first]  # counts of a whole run grow
    assert evidence is not None
    time, lasts = known(rows[first].get("time")), last == len(rows) - 1
    when = int(rows[first]["step"]), int(rows[last]["step"]), time, lasts
    layer, optimizer = evidence.layers[0] if len(evidence.layers) == 1 else "", rows[first].get("optimizer")
    more: dict[str, Any] = {"layers": evidence.layers, "optimizer": optimizer or 0, "numbers": dict(evidence.numbers)}
    begin = "" if optimizer is None or "before_step" in evidence.numbers else f"{when_words(*when, len(rows))}: "
    return timed_finding(rule.kind.name, f"{begin}{evidence.words}", when, evidence.case, layer, **more)


_MOST_GROUPS = 3  # of one kind of finding


@dataclass(frozen=True, eq=False)
class FindingInterval:
    """From when to when a layer has a finding, as positions among its sampled steps."""

    layer: LayerSeries
    first: int
    last: int
    worst: int
    value: float  # at the worst
    times: int  # how many steps show it
    lasts: bool  # whether the last sampled step shows it

    @property
    def step(self) -> int:
        return int(self.layer.steps[self.first])

    @property
    def last_step(self) -> int:
        return int(self.layer.steps[self.last])

    @property
    def worst_step(self) -> int:
        return int(self.layer.steps[self.worst])


def judge(rule: Rule, context: LayerContext) -> tuple[bool, FindingInterval | None]:
    """Whether a rule applies to a layer, and from the first to the last long enough series of bad steps, if any."""
    values = rule.measure(context)
    limit = context.thresholds[rule.limit] if isinstance(rule.limit, str) else rule.limit
    limit = context.thresholds[rule.flat] if context.is_flat else limit
    known = np.flatnonzero(~np.isnan(values))
    bad = values[known] < limit if rule.lowest else values[known] > limit
    patience = context.thresholds["patience"] if rule.patience is None else rule.patience
    needed = min(patience, len(context.run.loss_of(context.layer.optimizer).steps))
    at = known[in_long_runs(bad, needed)]
    if not len(at):
        return bool(len(known)), None
    worst = at[np.argmin(values[at]) if rule.lowest else np.argmax(values[at])]
    first, last = int(at[0]), int(at[-1])
    lasts = last == known[-1] == len(values) - 1
    return True, FindingInterval(context.layer, first, last, int(worst), float(values[worst]), len(at), lasts)


def grouped(intervals: Sequence[FindingInterval], patience: float) -> list[list[FindingInterval]]:
    """Layers that began together, give or take ``patience`` sampled steps; late groups are merged into the third."""
    groups = chains(
        sorted(intervals, key=lambda interval: interval.step),
        lambda group, interval: interval.step - group[0].step <= patience * spacing(interval.layer),
    )
    if len(groups) > _MOST_GROUPS:
        groups[_MOST_GROUPS - 1 :] = [[interval for group in groups[_MOST_GROUPS - 1 :] for interval in group]]
    return [sorted(group, key=lambda interval: interval.layer.index) for group in groups]


def spacing(layer: LayerSeries) -> float:
    return (int(layer.steps[-1]) - int(layer.steps[0])) / max(len(layer.steps) - 1, 1)


# Findings that may follow from a dead layer before
_FOLLOW = ("dead-channels", "constant-output", "vanishing-activations", "saturated", "batchnorm-drift")
_DIVERGENCE = ("non-finite", "loss-rises", "dead-layer", "dead-channels", "constant-output")
_LEADS_TO = {"update-too-large": _DIVERGENCE, "exploding-gradient": _DIVERGENCE}
"""What may follow from a finding."""
_MANY_OPTIMIZERS = 10  # with one step each
_UNCHANGED = ("no-update", "no-gradient", "frozen")  # each says why a weight does not change

_Intervals = Mapping[str, Sequence[FindingInterval]]


def findings_over_time(run: Run | StrPath, thresholds: Limits | None = None) -> Findings[TimedFinding]:
    """Findings on a run, or on the last run of the log at a path: the most severe first, then by their first step.

    Layers that began together have one finding. A finding must show in ``patience`` sampled steps in a row, unless
    values are not finite. Findings that begin in a model while it computes NaN or Inf are consequences, and left out. A
    warning that explains a later error is an error; one that has passed while the loss fell is a note. If fewer steps
    were sampled, the last finding says so. ``thresholds`` are by their names in the catalogue.
    """
    thresholds = limits_of(thresholds)
    run = last_run(run)
    series = series_of(run)
    causes = nonfinite_findings(series, run.notes)
    with np.errstate(over="ignore"):  # exploding values may overflow
        models = sorted({layer.model for layer in series.layers})
        findings = [finding for model in models for finding in _of_model(model, series, thresholds)]
    findings = [*loss_findings(series, thresholds), *findings]
    findings = [finding for finding in findings if not any(_begins_within(finding, cause) for cause in causes)]
    notes = [note_finding(note) for note in run.notes if note.get("note") != "non-finite"]
    findings = [*causes, *layers_not_finite(series, True), *findings, *notes]
    findings.sort(key=lambda finding: (finding.step if finding.time is None else finding.time, finding.step))
    findings = [_with_severity_of_symptoms(finding, findings, series) for finding in findings]
    findings = with_causes(run, series, thresholds, findings)
    nothing = "" if run.rows else f"{NOTHING_MEASURED}: no step of an optimizer was sampled"
    return ranked(
        [*map(_of_parts, merged(findings)), *(_new_optimizers(series) or _few_samples(run, series, thresholds))],
        nothing,
    )


def _with_severity_of_symptoms(finding: TimedFinding, findings: Sequence[TimedFinding], run: RunSeries) -> TimedFinding:
    """A cause as an error if it explains an error that begins later; a warning as a note if it passed without harm."""
    if finding.severity != "warning" or not finding.layers:
        return finding
    follow = _LEADS_TO.get(finding.finding, ())
    findings = [other for other in findings if other.numbers.get("operation") != "log"]  # whose input is the cause
    finding = with_severity_of(finding, follow, findings)
    has_passed = finding.severity == "warning" and not finding.lasts
    has_passed = has_passed and not any(f.finding in follow and f.step >= finding.step and f.lasts for f in findings)
    is_harmless = has_passed and run.loss_of(finding.optimizer).falls_after(finding.step)
    return replace(finding, severity="note") if is_harmless else finding


def _of_parts(finding: TimedFinding) -> TimedFinding:
    """A finding that was made of several, with their layers, to the end of the last."""
    parts = cast("tuple[TimedFinding, ...]", finding.parts)
    if not parts:
        return finding
    last_step, lasts = max(part.last_step for part in parts), any(part.lasts for part in parts)
    layers = tuple(layer for part in parts for layer in part.layers)
    return replace(finding, layers=layers, last_step=last_step, lasts=lasts)


def _begins_within(finding: TimedFinding, cause: TimedFinding) -> bool:
    """Whether it begins while its model computes NaN or Inf."""
    if None not in (finding.model, cause.model) and finding.model != cause.model:
        return False
    if finding.optimizer != cause.optimizer and finding.time is not None and cause.time is not None:
        return cause.lasts and finding.time >= cause.time
    return finding.step >= cause.step and (cause.lasts or finding.step <= cause.last_step)


def _of_model(model: int, run: RunSeries, thresholds: Limits, is_flat: bool = False) -> Iterator[TimedFinding]:
    """The findings on the layers of a model; with ``is_flat`` those that tell why its loss stays where it is."""
    layers = [layer for layer in run.layers if layer.model == model]
    by_name: dict[str, LayerSeries] = {}
    for layer in sorted(layers, key=lambda layer: layer.call):
        by_name.setdefault(layer.name, layer)
    first_calls = sorted(by_name.values(), key=lambda layer: layer.index)
    judged: dict[str, int] = {}
    intervals: dict[str, list[FindingInterval]] = {}
    for name in REPORT_ORDER["training"]:
        if name in RULES:
            judged_layers = first_calls if RULES[name].of_parameters else layers
            judged_layers = [] if is_flat and not RULES[name].flat else judged_layers
            results = [judge(RULES[name], LayerContext(layer, run, thresholds, is_flat)) for layer in judged_layers]
            judged[name] = sum(applies for applies, _ in results)
            intervals[name] = [interval for _, interval in results if interval is not None]
    consequences = _consequences(intervals, first_calls, run, thresholds)
    for name in intervals:
        own = [interval for interval in intervals[name] if interval not in consequences.get(name, ())]
        for group in grouped(own, thresholds["patience"]):
            after = _consequence_words(group, consequences, thresholds) if name == "dead-layer" else ""
            yield _finding(RULES[name], group, judged[name], after, "flat" if is_flat else "")


def _consequences(
    intervals: _Intervals, layers: Sequence[LayerSeries], run: RunSeries, thresholds: Limits
) -> dict[str, list[FindingInterval]]:
    """What layers have because a layer before them is dead, by name of the finding; ``layers`` have parameters."""
    dead = intervals["dead-layer"]
    consequences = {name: [span for span in intervals[name] if _follows(span, dead, thresholds)] for name in _FOLLOW}
    zero = [span for span in intervals["no-gradient"] if span.layer.values["gradient_norm"][span.first] == 0]
    consequences["no-gradient"] = [span for span in zero if _follows(span, dead, thresholds, -1)]
    explained = {span.layer.label for name in _UNCHANGED for span in intervals[name]}
    unchanged = [_unchanged(layer, dead, run) for layer in layers if layer.label not in explained]
    consequences["no-update"] = [interval for interval in unchanged if interval is not None]
    return {name: parts for name, parts in consequences.items() if parts}


def _follows(interval: FindingInterval, dead: Sequence[FindingInterval], thresholds: Limits, sign: int = 1) -> bool:
    """Whether the layer is dead itself or comes after a dead one, and its finding begins about when that died.

    With a ``sign`` of -1, whether it comes before a dead layer.
    """
    near = max(thresholds["patience"] * spacing(interval.layer), thresholds["warm_up"])
    ahead = [span for span in dead if (interval.layer.index - span.layer.index) * sign >= 0]
    return any(abs(span.step - interval.step) <= near for span in ahead)


def _unchanged(layer: LayerSeries, dead: Sequence[FindingInterval], run: RunSeries) -> FindingInterval | None:
    """When a weight after a dead layer does not change while others do, from when that layer died."""
    for cause in (span for span in dead if span.layer.index < layer.index):
        during = (layer.steps >= cause.step) & (layer.steps <= cause.last_step) & (layer.values["frozen"] != 1)
        if not during.any() or not run.changing(layer, 0.0)[during].any():
            continue
        if (layer.values["update_to_weight"][during] == 0).all():
            at = np.flatnonzero(during).tolist()
            return FindingInterval(layer, at[0], at[-1], at[0], 0.0, len(at), cause.lasts)
    return None


def _consequence_words(group: Sequence[FindingInterval], consequences: _Intervals, thresholds: Limits) -> str:
    own = {interval.layer.label for interval in group}
    parts = []
    for name, intervals in consequences.items():
        sign = -1 if name == "no-gradient" else 1
        others = [span for span in intervals if span.layer.label not in own]
        layers = [span.layer for span in others if _follows(span, group, thresholds, sign)]
        labels = [layer.label for layer in sorted(layers, key=lambda layer: layer.index)]
        if len(labels) > 2:
            parts.append(f"{name} in {len(labels)} layers from '{labels[0]}' to '{labels[-1]}'")
        elif labels:
            parts.append(f"{name} in " + " and ".join(f"'{label}'" for label in labels))
    return f"; this explains {', '.join(parts)}" if parts else ""


def _finding(rule: Rule, group: Sequence[FindingInterval], judged: int, after: str, case: str) -> TimedFinding:
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
    severity = rule.of_all if rule.of_all and len(group) == judged else rule.severity
    more: dict[str, Any] = {"severity": severity} if severity else {}
    more["numbers"] = {"worst": value, "worst_step": worst.worst_step, "layers": len(group)}
    more["layers"] = tuple(interval.layer.label for interval in group)
    more |= {"model": named.layer.model, "optimizer": named.layer.optimizer}
    return timed_finding(rule.kind.name, text, when, case, named.layer.label, **more)


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


def _new_optimizers(series: RunSeries) -> list[TimedFinding]:
    """A finding where each step has an optimizer of its own."""
    losses = series.losses
    if len(losses) <= _MANY_OPTIMIZERS or any(len(loss.steps) > 1 for loss in losses):
        return []
    step, time = int(losses[0].steps[-1]), float(losses[0].times[-1])
    text, numbers = f"{len(losses)} optimizers made one step each", {"optimizers": len(losses)}
    return [timed_finding("optimizer-settings", text, (step, step, time, True), "new", numbers=numbers)]


def _few_samples(run: Run, series: RunSeries, thresholds: Limits) -> Iterator[TimedFinding]:
    """A finding where fewer steps were sampled than a finding needs; none where NaN or Inf stopped the run."""
    most = max(series.losses, key=lambda loss: len(loss.steps), default=None)
    if most is None or len(most.steps) >= thresholds["patience"] or (run.end or {}).get("reason") == "stopped":
        return
    sampled, last = len(most.steps), int(most.steps[-1])
    steps = 1 + max(last, (run.end or {}).get("step") or 0)
    every = max(1, steps // ENOUGH)
    of = " so far" if run.end is None else f" of {steps:,}"
    text = f"{counted(sampled, 'sampled step')}{of}: too few for a trend"
    if run.end is not None and sampled >= steps:
        text += "; there were no more"
    elif run.end is not None:
        text += spelled(f"; sample more often, ‹every={every}|--every {every}›")
    numbers, when = {"sampled": sampled, "steps": steps, "every": every}, (last, last, float(most.times[-1]), True)
    yield timed_finding("few-samples", text, when, numbers=numbers, optimizer=most.optimizer)
