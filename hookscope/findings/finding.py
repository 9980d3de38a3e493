"""What a finding and a kind of finding are, and the words and groups that findings of every question share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from hookscope.display import Cells, Rows, Shown
from hookscope.errors import spelled

Item = TypeVar("Item")

SEVERITIES = ("error", "warning", "note")
"""The most severe first."""


@dataclass(frozen=True, slots=True, repr=False)
class Finding(Shown):
    """Something that a person should look at.

    Attributes:
        finding: Its name, such as ``dead-channels``.
        layer: The call (``name`` or ``name#call``) or the parameter; empty for the whole model.
        evidence: The numbers in words, such as ``3 of 64 channels never leave 0``.
        meaning: What it means and what to do about it.
        channels: The channels or filters, None if it is not about channels.
        groups: Channels that belong together, such as duplicates of each other; None if it is not about groups.
        numbers: The evidence by name, for programs.
        severity: ``error``, ``warning`` or ``note``.
        parts: The findings that `merged` made one of, in order of execution; empty for a single finding.

    Example:
        >>> finding = Finding("dead-channels", "features.0", "1 of 64 channels never leaves 0", "...", channels=(3,))
        >>> finding.as_row()["channels"]
        [3]
    """

    finding: str
    layer: str
    evidence: str
    meaning: str
    channels: tuple[int, ...] | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    numbers: Mapping[str, float | int | str | None] = field(default_factory=dict)
    severity: str = "warning"
    parts: tuple[Finding, ...] = ()

    def as_row(self) -> dict[str, Any]:
        """The fields for JSON, without ``channels`` and ``groups`` that are None and ``parts`` that are empty."""
        row: dict[str, Any] = {"finding": self.finding, "severity": self.severity, "layer": self.layer}
        if self.channels is not None:
            row["channels"] = list(self.channels)
        if self.groups is not None:
            row["groups"] = [list(group) for group in self.groups]
        row |= {"evidence": self.evidence, "meaning": self.meaning, "numbers": dict(self.numbers)}
        return row | ({"parts": [part.as_row() for part in self.parts]} if self.parts else {})

    def _cells(self) -> Cells:
        names = ("severity", "finding", "layer", "evidence", "meaning")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        where = f" {self.layer}" if self.layer else ""
        return f"{self.finding}{where}: {self.evidence}. {self.meaning}"


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number beyond which something is a finding.

    ``source`` says where the default comes from. ``option`` and ``help`` are empty if it has no name on the
    command line. ``endless`` allows infinity, which switches the finding off. A
    ``share`` is given as ``5%`` or ``0.05``.
    """

    name: str
    default: float
    source: str
    option: str = ""
    help: str = ""
    least: float = 0.0
    most: float = math.inf
    endless: bool = False
    share: bool = False


class Case(NamedTuple):
    """A special meaning, advice and severity of a finding; empty where it is the usual one."""

    meaning: str = ""
    advice: str = ""
    severity: str = ""


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One kind of finding; ``severity`` is one of `SEVERITIES`."""

    name: str
    meaning: str
    advice: str
    thresholds: tuple[Threshold, ...] = ()
    cases: Mapping[str, Case] = field(default_factory=dict)
    severity: str = "warning"

    def text(self, case: str = "") -> str:
        special = self.cases.get(case, Case())
        return spelled(f"{special.meaning or self.meaning} {special.advice or self.advice}")

    def severity_of(self, case: str = "") -> str:
        return self.cases.get(case, Case()).severity or self.severity

    def finding(self, layer: str, evidence: str, case: str = "", **details: Any) -> Finding:
        """A finding of this kind; ``details`` are the other fields of `Finding`."""
        return Finding(self.name, layer, evidence, self.text(case), **{"severity": self.severity_of(case), **details})

    def as_case(self, finding: Finding, case: str) -> Finding:
        """``finding``, which is of this kind, with the text and the severity of ``case``."""
        return replace(finding, meaning=self.text(case), severity=self.severity_of(case))


AnyFinding = TypeVar("AnyFinding", bound=Finding)


class Findings(Rows[AnyFinding]):
    """The findings on a result; none are good news."""

    nothing = "no findings"


def ranked(findings: Iterable[AnyFinding], nothing: str = "") -> Findings[AnyFinding]:
    """The findings by severity, the most severe first, or ``nothing``; those alike keep their order."""
    found = Findings(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
    found.nothing = nothing or found.nothing
    return found


def merged(findings: Iterable[AnyFinding], most: int = 3) -> list[AnyFinding]:
    """More than ``most`` findings that differ only in layer and evidence become one, at the place of the first.

    Example:
        >>> findings = [Finding("saturated", f"act{n}", f"{n} %", "Scale down.") for n in range(60, 65)]
        >>> [str(finding) for finding in merged(findings)]
        ['saturated act60: 60 %; 4 more layers too: act61, act62, act63, act64. Scale down.']
    """
    groups: dict[tuple[str, str, str], list[AnyFinding]] = {}
    for finding in findings:
        groups.setdefault((finding.finding, finding.severity, finding.meaning), []).append(finding)
    whole = list[AnyFinding]()
    for first, *others in groups.values():
        more = list(dict.fromkeys(part.layer for part in others))
        evidence = f"{first.evidence}; {counted(len(more), 'more layer')} too: {listed(more)}"
        merges = len(others) >= most
        whole += [replace(first, evidence=evidence, parts=(first, *others))] if merges else [first, *others]
    return whole


def single(findings: Iterable[AnyFinding]) -> Iterator[AnyFinding]:
    """The findings with each merged one replaced by its parts."""
    for finding in findings:
        yield from finding.parts or (finding,)  # type: ignore[misc]  # the parts are of the type of the whole


def numbers_by_severity(findings: Iterable[Any]) -> dict[str, int]:
    """How many findings, or places, have which severity; those that are there, the most severe first."""
    numbers = Counter(finding.severity for finding in findings)
    return {severity: numbers[severity] for severity in SEVERITIES if numbers[severity]}


def severity_counts(findings: Iterable[Any]) -> str:
    """How many findings, or places, have which severity, such as ``1 error, 2 notes``; empty if there are none."""
    return ", ".join(counted(number, severity) for severity, number in numbers_by_severity(findings).items())


def verdict(findings: Sequence[Finding], judged: str = "") -> str:
    """One line that says how severe the findings are, and where to look first; without any, what was ``judged``.

    Example:
        >>> verdict([Finding("dead-layer", "features.3", "every value is 0", "...", severity="error")])
        '1 error: look first at features.3 (dead-layer)'
    """
    counts = severity_counts(findings)
    if not numbers_by_severity(findings).keys() - {"note"}:
        kinds = listed(list(dict.fromkeys(finding.finding for finding in ranked(findings))), 3)
        return "no errors and no warnings" + (f", {counts} ({kinds})" if counts else "") + (judged and f" {judged}")
    first = ranked(findings)[0]
    return f"{counts}: look first at {f'{first.layer} ({first.finding})' if first.layer else first.finding}"


def listed(items: Sequence[Any], most: int = 8) -> str:
    """The first ``most`` items, and how many more there are: ``0, 1, 2 and 9 more``."""
    shown = ", ".join(map(str, items[:most]))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


def alike(groups: Sequence[Sequence[int]]) -> str:
    """The first groups of equal channels, each by its first channels: ``0 = 3, 1 = 2 = 4 = 5 = …``."""
    return listed([" = ".join(map(str, [*group[:4], "…"] if len(group) > 4 else group)) for group in groups], 4)


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as ``1 image`` or ``20,000 images``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def operations_in_words(operations: Counter[str]) -> str:
    """``8 operations that are not modules (8 add)`` from the number of each; empty where there are none."""
    parts = [f"{count:,} {name}" for name, count in operations.most_common()]
    are = "is not a module" if operations.total() == 1 else "are not modules"
    return f"{counted(operations.total(), 'operation')} that {are} ({listed(parts, 4)})" if parts else ""


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def nonfinite_words(nan: int, inf: int) -> str:
    """The counts of NaN and Inf that are not 0, such as ``5 NaN and 1,200 Inf``."""
    return " and ".join(f"{count:,} {name}" for count, name in ((nan, "NaN"), (inf, "Inf")) if count)


def chains(items: Iterable[Item], joins: Callable[[list[Item], Item], bool]) -> list[list[Item]]:
    """Split ``items`` into chains; ``joins`` says whether an item belongs to the chain before it.

    The first item of a chain is the source; the others follow from it.

    Example:
        >>> chains([3, 4, 5, 8, 9], lambda chain, number: number == chain[-1] + 1)
        [[3, 4, 5], [8, 9]]
    """
    split: list[list[Item]] = []
    for item in items:
        if split and joins(split[-1], item):
            split[-1].append(item)
        else:
            split.append([item])
    return split
