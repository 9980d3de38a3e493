"""The rules of a question: functions that judge what was measured by thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from hookscope.findings.catalogue import CATALOGUE, REPORT_ORDER, add_kind, thresholds_for
from hookscope.findings.finding import Finding, FindingKind, listed


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of one question: fields for the catalogue, ``others`` for registered rules."""

    question: ClassVar[str]

    others: Mapping[str, float] = field(default_factory=dict, kw_only=True)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        own = {entry.name for entry in fields(cls)}
        others = {name: value for name, value in values.items() if name not in own}
        return cls(**{name: value for name, value in values.items() if name in own}, others=others)

    def __getitem__(self, name: str) -> float:
        defaults = {threshold.name: threshold.default for threshold in thresholds_for(self.question)}
        return float({**defaults, **vars(self), **self.others}[name])


Rule = Callable[[Any], Iterable[Finding]]
RowRule = Callable[..., Finding | None]


class Rules:
    """The rules of ``question`` by the name of their finding; ``rows`` gives the rows of a measurement."""

    def __init__(self, question: str, rows: Callable[[Any], Iterable[Any]]) -> None:
        self.question = question
        self.rows = rows
        self.by_name: dict[str, Rule] = {}

    def rule(self, kind: FindingKind, before: str | None = None) -> Callable[[Rule], Rule]:
        """Register a rule that judges a measurement; ``kind`` joins the catalogue, see `add_kind`."""
        add_kind(kind, self.question, before)

        def register(judge: Rule) -> Rule:
            self.by_name[kind.name] = judge
            return judge

        return register

    def row_rule(self, kind: FindingKind, before: str | None = None) -> Callable[[RowRule], RowRule]:
        """Register a rule that judges one row of a measurement by the thresholds, see `rule`."""
        return self.each_rule(
            kind, lambda measured: ((row, measured.thresholds) for row in self.rows(measured)), before
        )

    def each_rule(
        self, kind: FindingKind, cases: Callable[[Any], Iterable[tuple[Any, ...]]], before: str | None = None
    ) -> Callable[[RowRule], RowRule]:
        """Register a rule that judges each of ``cases`` of a measurement, see `rule`."""

        def register(judge: RowRule) -> RowRule:
            self.rule(kind, before)(lambda measured: existing(judge(*case) for case in cases(measured)))
            return judge

        return register

    def findings(self, measured: Any) -> Iterator[Finding]:
        for name in REPORT_ORDER[self.question]:
            if name in self.by_name:
                yield from self.by_name[name](measured)


def never_updated(
    updated: Mapping[str, bool], trained: bool, others: Iterable[Finding] | None = None
) -> Iterator[Finding]:
    """One finding on the BatchNorms whose running statistics were never ``updated``, if there are any.

    ``trained`` says whether their scales and biases were. With ``others``, a model that was not trained at all is
    mentioned only if one of them follows from that.
    """
    never = [layer for layer, was_updated in updated.items() if not was_updated]
    if not never:
        return
    every, single = len(never) == len(updated), len(never) == 1
    whose = f"{len(never)} of {len(updated)} BatchNorms"
    if every:
        whose = "the only BatchNorm" if single else f"all {len(never)} BatchNorms"
    evidence = f"the running statistics of {whose} still have their first values, 0 and 1"
    evidence += "" if every or single else f": {listed(never)}"
    numbers = {"never": len(never), "batch_norms": len(updated)}
    case = "trained" if trained else "all" if every else ""
    if case == "all" and others is not None:
        kinds = ((finding, CATALOGUE[finding.finding]) for finding in others)
        if not any("untrained" in kind.cases and finding.meaning == kind.text("untrained") for finding, kind in kinds):
            return
    yield CATALOGUE["never-updated"].finding(never[0] if single or not every else "", evidence, case, numbers=numbers)


def existing(findings: Iterable[Finding | None]) -> Iterator[Finding]:
    return (finding for finding in findings if finding is not None)
