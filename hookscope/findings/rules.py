"""The rules of a question: each one looks for one kind of finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hookscope.findings.catalogue import GRAVITY, FindingKind, add_kind
from hookscope.findings.finding import Finding

Rule = Callable[[Any], Iterable[Finding]]
RowRule = Callable[[Any, Any], Finding | None]


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

        def register(judge: RowRule) -> RowRule:
            @self.rule(kind, before)
            def judge_rows(measured: Any) -> Iterator[Finding]:
                return existing(judge(row, measured.thresholds) for row in self.rows(measured))

            return judge

        return register

    def findings(self, measured: Any) -> Iterator[Finding]:
        """What the rules find, in the order of `GRAVITY`."""
        for name in GRAVITY[self.question]:
            if name in self.by_name:
                yield from self.by_name[name](measured)


def existing(findings: Iterable[Finding | None]) -> Iterator[Finding]:
    """The findings without None."""
    return (finding for finding in findings if finding is not None)
