"""Named findings on weights: one rule for each kind, registered with its entry in the catalogue.

This file needs no torch: the help of ``hookscope weights`` reads the thresholds of every registered rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hookscope.columns import Row
from hookscope.findings import (
    CATALOGUE,
    Finding,
    Rules,
    counted,
    default,
    listed,
    merged,
    never_updated,
    nonfinite_words,
    ranked,
)
from hookscope.parameters.facts import WEIGHTS, ParameterStatistics, ParameterThresholds


class Measured(NamedTuple):
    """What the rules judge."""

    rows: Sequence[ParameterStatistics]
    thresholds: ParameterThresholds


_MANY = default("dead-filters", "many")

RULES = Rules("weights", lambda measured: measured.rows)
rule, parameter_rule = RULES.rule, RULES.row_rule


def finding_names(row: ParameterStatistics, thresholds: ParameterThresholds | None = None) -> tuple[str, ...]:
    """The names of the findings on one parameter, the most severe first."""
    return tuple(finding.finding for finding in parameter_findings([row], thresholds))


def weights_rows(
    rows: Sequence[ParameterStatistics], thresholds: ParameterThresholds | None = None, weights: str = ""
) -> list[Row]:
    """A row of `WEIGHTS` for each parameter."""
    return [WEIGHTS.row(row, findings=finding_names(row, thresholds), weights=weights) for row in rows]


def parameter_findings(
    rows: Sequence[ParameterStatistics], thresholds: ParameterThresholds | None = None
) -> list[Finding]:
    """The findings on all parameters, the most severe first, then in order of registration.

    More than three alike are `merged`. If no BatchNorm was ever updated, as with random weights, this is one finding
    for the whole model. ``thresholds`` come from the call of `parameter_statistics`; the evidence quotes them.
    """
    return ranked(merged(RULES.findings(Measured(rows, thresholds or ParameterThresholds()))))


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


@parameter_rule(CATALOGUE["negative-variance"])
def _negative(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    if not row.name.endswith("running_var") or row.min is None or row.min >= 0:
        return None
    return CATALOGUE["negative-variance"].finding(row.name, f"down to {row.min:.4g}", numbers={"lowest": row.min})


@parameter_rule(CATALOGUE["exploding-weights"])
def _exploding(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    largest, limit = max(-(row.min or 0.0), row.max or 0.0), thresholds["largest_weight"]
    if row.buffer or len(row.shape) < 2 or "Embedding" in row.type or largest <= limit:
        return None
    text = f"weights from {row.min:.4g} to {row.max:.4g}, beyond {limit:g}"
    return CATALOGUE["exploding-weights"].finding(row.name, text, numbers={"min": row.min, "max": row.max})


@parameter_rule(CATALOGUE["exploding-variance"])
def _exploding_variance(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    limit = thresholds["largest_variance"]
    if not row.name.endswith("running_var") or (row.max or 0.0) <= limit:
        return None
    text = f"running variances up to {row.max:.4g}, beyond {limit:.4g}"
    return CATALOGUE["exploding-variance"].finding(row.name, text, numbers={"max": row.max})


@parameter_rule(CATALOGUE["constant-weights"])
def _constant(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    if not row.name.endswith("weight") or row.count < 2 or row.std != 0 or row.nan or row.inf:
        return None
    kind = CATALOGUE["constant-weights"]
    if len(row.shape) > 1:
        text = f"all {row.count:,} weights are {row.mean:.4g}"
        return kind.finding(row.name, text, "" if row.mean else "zero", numbers={"value": row.mean})
    if "Norm" in row.type and not row.mean:
        return kind.finding(row.name, f"all {row.count:,} scales are 0", "scale", numbers={"value": 0.0})
    return None


@parameter_rule(CATALOGUE["dead-filters"])
def _dead(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    if not (dead := row.dead_filters) or len(dead) == row.filters:
        return None
    have = "has" if len(dead) == 1 else "have"
    below = f"a norm of 0, or below {thresholds.dead_norm:g} of the layer's median"
    return CATALOGUE["dead-filters"].finding(
        row.name,
        f"{len(dead)} of {counted(row.filters or 0, 'filter')} {have} {below}: {listed(dead)}",
        case="many" if len(dead) > _MANY * (row.filters or 0) else "",
        channels=dead,
        numbers={"dead": len(dead), "filters": row.filters, "dead_norm": thresholds.dead_norm},
    )


@parameter_rule(CATALOGUE["duplicate-filters"])
def _duplicates(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding | None:
    if not (groups := row.duplicate_filters) or row.std == 0:
        return None
    same = listed(["=".join(map(str, group[:8])) + ("=..." if len(group) > 8 else "") for group in groups])
    spare = sum(len(group) - 1 for group in groups)
    are = "is a duplicate" if spare == 1 else "are duplicates"
    return CATALOGUE["duplicate-filters"].finding(
        row.name,
        f"{spare} of {counted(row.filters or 0, 'filter')} {are} (cosine {thresholds.duplicate_cosine:g} or more):"
        f" {same}",
        case="many" if spare > _MANY * (row.filters or 0) else "",
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
        case="many" if len(collapsed) > _MANY * row.count else "",
        channels=collapsed,
        numbers={"collapsed": len(collapsed), "below": least, "eps": row.eps, "lowest": row.min},
    )


@rule(CATALOGUE["never-updated"])
def _never_updated(measured: Measured) -> Iterator[Finding]:
    updated = {row.layer: row.updated for row in measured.rows if row.updated is not None}
    own = [row for row in measured.rows if row.name.endswith((".weight", ".bias")) and updated.get(row.layer) is False]
    trained = any(row.std or (row.norm and row.name.endswith("bias")) for row in own)
    return never_updated(updated, trained)
