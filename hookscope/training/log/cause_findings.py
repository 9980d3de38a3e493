"""Findings on why a run does not learn, which come before the symptoms that they explain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hookscope.findings import thresholds_for
from hookscope.training.log.causes import CAUSES, CauseRule, Facts, History
from hookscope.training.log.file import Run
from hookscope.training.log.loss import flat_findings
from hookscope.training.log.rules import TrainingThresholds
from hookscope.training.log.series import RunSeries, runs_of_true
from hookscope.training.log.summary import TimedFinding, as_grave, known, timed_finding, when_words


def with_causes(
    run: Run, series: RunSeries, thresholds: TrainingThresholds, symptoms: Sequence[TimedFinding]
) -> list[TimedFinding]:
    """The causes in a run, and ``symptoms`` without what the causes explain; a cause comes before its symptoms."""
    classes = next((row["classes"] for row in run.facts if isinstance(row.get("classes"), int)), math.nan)
    if all(finding.severity == "note" for finding in symptoms):  # else the symptoms say why the loss is flat
        symptoms = [*symptoms, *flat_findings(series, classes, thresholds)]
    pairs = _causes(run, series, {entry.name: thresholds[entry.name] for entry in thresholds_for("training")})
    pairs = [(rule, finding) for rule, finding in pairs if not _is_explained(rule, finding, pairs)]
    explained = frozenset[str]().union(*(rule.explains for rule, finding in pairs if finding.severity != "note"))
    causes = [
        finding if finding.severity == "note" else as_grave(finding, rule.precedes, symptoms) for rule, finding in pairs
    ]
    causes.sort(key=lambda finding: finding.severity == "note")
    return [*causes, *(finding for finding in symptoms if finding.finding not in explained)]


def _is_explained(rule: CauseRule, finding: TimedFinding, causes: Iterable[tuple[CauseRule, TimedFinding]]) -> bool:
    """Whether another of the causes explains the finding, and is more than a note."""
    return any(
        explanation.severity != "note" and finding.finding in other.explains and other is not rule
        for other, explanation in causes
    )


def _causes(run: Run, series: RunSeries, limits: Mapping[str, float]) -> list[tuple[CauseRule, TimedFinding]]:
    """The causes in a run, each with its rule; those without an optimizer only where no optimizer has them."""
    by_optimizer: dict[int | None, dict[int, Facts]] = {}
    for row in run.facts:
        if isinstance(row.get("step"), int):
            number = row.get("optimizer")
            number = number if isinstance(number, int) else None
            by_optimizer.setdefault(number, {})[row["step"] if number is not None else row.get("backwards") or 0] = row
    causes: list[tuple[CauseRule, TimedFinding]] = []
    for number, rows in by_optimizer.items():
        history = [row for _, row in sorted(rows.items())]
        for rule in CAUSES:
            finding = _judge(rule, history, series, limits)
            is_known = number is None and any(other is rule for other, _ in causes)
            causes += [] if finding is None or is_known else [(rule, finding)]
    return sorted(causes, key=lambda pair: CAUSES.index(pair[0]))


def _judge(
    rule: CauseRule, rows: Sequence[Facts], series: RunSeries, limits: Mapping[str, float]
) -> TimedFinding | None:
    """The finding from the first to the last long enough series of steps that show it."""
    shown = [rule.look(History(rows, at, series, limits)) for at in range(len(rows))]
    needed = min(int(limits["patience"]) if rule.patience is None else rule.patience, len(rows))
    mask = np.array([evidence is not None for evidence in shown])
    at = [n for begin, end in runs_of_true(mask) if end - begin >= needed for n in range(begin, end)]
    if not at:
        return None
    first, last = at[0], at[-1]
    evidence = shown[last if rows[first].get("optimizer") is None else first]  # counts of a whole run grow
    assert evidence is not None
    time, lasts = known(rows[first].get("time")), last == len(rows) - 1
    when = int(rows[first]["step"]), int(rows[last]["step"]), time, lasts
    layer = evidence.layers[0] if len(evidence.layers) == 1 else ""
    optimizer = rows[first].get("optimizer") or 0
    more: dict[str, Any] = {"layers": evidence.layers, "optimizer": optimizer, "numbers": dict(evidence.numbers)}
    begin = "" if rows[first].get("optimizer") is None else f"{when_words(*when, len(rows))}: "
    return timed_finding(rule.kind.name, f"{begin}{evidence.words}", *when, evidence.case, layer, **more)
