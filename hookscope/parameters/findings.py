"""Named findings on weights: one rule for each kind, registered with its entry in the catalogue.

This file needs no torch: the help of ``hookscope weights`` reads the thresholds of every registered rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hookscope.findings import CATALOGUE, Finding, Rules, counted, listed, nonfinite_words
from hookscope.parameters.facts import ParameterStatistics, ParameterThresholds


class Measured(NamedTuple):
    """What the rules judge."""

    rows: Sequence[ParameterStatistics]
    thresholds: ParameterThresholds


RULES = Rules("weights", lambda measured: measured.rows)
rule, parameter_rule = RULES.rule, RULES.row_rule


def finding_names(row: ParameterStatistics, thresholds: ParameterThresholds | None = None) -> tuple[str, ...]:
    """The names of the findings on one parameter, the gravest first."""
    return tuple(finding.finding for finding in parameter_findings([row], thresholds))


def parameter_findings(
    rows: Sequence[ParameterStatistics], thresholds: ParameterThresholds | None = None
) -> list[Finding]:
    """The findings on all parameters, the gravest first, then in order of registration.

    If no BatchNorm was ever updated, as with random weights, this is one finding for the whole model. ``thresholds``
    are those of the call of `parameter_statistics`; the evidence quotes them.
    """
    return list(RULES.findings(Measured(rows, thresholds or ParameterThresholds())))


@parameter_rule(CATALOGUE["non-finite"])
def _non_finite(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    if not row.nan and not row.inf:
        return None
    place = ", ".join(map(str, row.first_nonfinite or ()))
    first = f", the first at [{place}]" if row.first_nonfinite else ""
    return CATALOGUE["non-finite"].finding(
        row.name,
        f"{nonfinite_words(row.nan, row.inf)} among {counted(row.count, 'value')}{first}",
        case="weights",
        numbers={"nan": row.nan, "inf": row.inf, "values": row.count, "first": f"[{place}]"},
    )


@parameter_rule(CATALOGUE["dead-filters"])
def _dead(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    if not (dead := row.dead_filters):
        return None
    have = "has" if len(dead) == 1 else "have"
    below = f"a norm of 0, or below {thresholds.dead_norm:g} of the layer's median"
    return CATALOGUE["dead-filters"].finding(
        row.name,
        f"{len(dead)} of {counted(row.filters or 0, 'filter')} {have} {below}: {listed(dead)}",
        channels=dead,
        numbers={"dead": len(dead), "filters": row.filters, "dead_norm": thresholds.dead_norm},
    )


@parameter_rule(CATALOGUE["duplicate-filters"])
def _duplicates(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    if not (groups := row.duplicate_filters):
        return None
    same = listed(["=".join(map(str, group[:8])) + ("=..." if len(group) > 8 else "") for group in groups])
    spare = sum(len(group) - 1 for group in groups)
    are = "is a duplicate" if spare == 1 else "are duplicates"
    return CATALOGUE["duplicate-filters"].finding(
        row.name,
        f"{spare} of {counted(row.filters or 0, 'filter')} {are} (cosine {thresholds.duplicate_cosine:g} or more):"
        f" {same}",
        channels=tuple(sorted(member for group in groups for member in group)),
        groups=groups,
        numbers={"groups": len(groups), "duplicates": spare, "filters": row.filters},
    )


@parameter_rule(CATALOGUE["collapsed-variance"])
def _collapsed(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    if not (collapsed := row.collapsed):
        return None
    least = thresholds.collapsed * (row.eps or 0.0)
    have = "has" if len(collapsed) == 1 else "have"
    return CATALOGUE["collapsed-variance"].finding(
        row.name,
        f"{len(collapsed)} of {counted(row.count, 'channel')} {have} a running variance below {least:g}"
        f" ({thresholds.collapsed:g} of eps): {listed(collapsed)}",
        channels=collapsed,
        numbers={"collapsed": len(collapsed), "below": least, "eps": row.eps, "lowest": row.min},
    )


@rule(CATALOGUE["never-updated"])
def _never_updated(measured: Measured) -> Iterator[Finding]:
    updated = {row.layer: row.updated for row in measured.rows if row.updated is not None}
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
    layer, case = never[0] if single else "", "all" if every else ""
    yield CATALOGUE["never-updated"].finding(layer, evidence, case, numbers=numbers)
