"""Findings on the weights of a model, from their statistics."""

from __future__ import annotations

from collections.abc import Sequence

from hookscope.findings import CATALOGUE, GRAVITY, Finding, counted, listed, nonfinite_words
from hookscope.parameters.statistics import ParameterStatistics, ParameterThresholds


def finding_names(row: ParameterStatistics) -> tuple[str, ...]:
    """The names of the findings on one parameter, the gravest first.

    Example:
        >>> import torch
        >>> from hookscope.parameters import parameter_statistics
        >>> [finding_names(row) for row in parameter_statistics(torch.nn.BatchNorm2d(2, affine=False))]
        [('never-updated',), ('never-updated',)]
    """
    holds = {
        "non-finite": bool(row.nan or row.inf),
        "dead-filters": bool(row.dead_filters),
        "duplicate-filters": bool(row.duplicate_filters),
        "collapsed-variance": bool(row.collapsed),
        "never-updated": row.updated is False,
    }
    return tuple(name for name, holds_here in holds.items() if holds_here)


def parameter_findings(
    rows: Sequence[ParameterStatistics], thresholds: ParameterThresholds | None = None
) -> list[Finding]:
    """The findings on all parameters, the gravest first, then in order of registration.

    If no BatchNorm was ever updated, as with random weights, this is one finding for the whole model.

    Args:
        rows: From `parameter_statistics`.
        thresholds: Those of the call of `parameter_statistics`; the evidence quotes them.

    Example:
        >>> import torch
        >>> from hookscope.parameters import parameter_statistics
        >>> [finding] = parameter_findings(parameter_statistics(torch.nn.BatchNorm2d(2)))
        >>> finding.finding, finding.evidence
        ('never-updated', 'the running statistics of the only BatchNorm still have their first values, 0 and 1')
    """
    thresholds = thresholds or ParameterThresholds()
    findings = [
        _RULES[name](row, thresholds)
        for name in GRAVITY["weights"]
        for row in rows
        if name in _RULES and name in finding_names(row)
    ]
    return findings + _never_updated(rows)


def _non_finite(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding:
    place = ", ".join(map(str, row.first_nonfinite or ()))
    first = f", the first at [{place}]" if row.first_nonfinite else ""
    return CATALOGUE["non-finite"].finding(
        row.name,
        f"{nonfinite_words(row.nan, row.inf)} among {counted(row.count, 'value')}{first}",
        case="weights",
        numbers={"nan": row.nan, "inf": row.inf, "values": row.count, "first": f"[{place}]"},
    )


def _dead(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding:
    dead = row.dead_filters or ()
    have = "has" if len(dead) == 1 else "have"
    below = f"a norm of 0, or below {thresholds.dead_norm:g} of the layer's median"
    return CATALOGUE["dead-filters"].finding(
        row.name,
        f"{len(dead)} of {counted(row.filters or 0, 'filter')} {have} {below}: {listed(dead)}",
        channels=dead,
        numbers={"dead": len(dead), "filters": row.filters, "dead_norm": thresholds.dead_norm},
    )


def _duplicates(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding:
    groups = row.duplicate_filters or ()
    same = listed(["=".join(map(str, group[:8])) + ("=..." if len(group) > 8 else "") for group in groups])
    spare = sum(len(group) - 1 for group in groups)
    what = f"{spare} of {counted(row.filters or 0, 'filter')} {'is a duplicate' if spare == 1 else 'are duplicates'}"
    return CATALOGUE["duplicate-filters"].finding(
        row.name,
        f"{what} (cosine {thresholds.duplicate_cosine:g} or more): {same}",
        channels=tuple(sorted(member for group in groups for member in group)),
        groups=groups,
        numbers={"groups": len(groups), "duplicates": spare, "filters": row.filters},
    )


def _collapsed(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding:
    collapsed = row.collapsed or ()
    least = thresholds.collapsed * (row.eps or 0.0)
    have = "has" if len(collapsed) == 1 else "have"
    return CATALOGUE["collapsed-variance"].finding(
        row.name,
        f"{len(collapsed)} of {counted(row.count, 'channel')} {have} a running variance below {least:g}"
        f" ({thresholds.collapsed:g} of eps): {listed(collapsed)}",
        channels=collapsed,
        numbers={"collapsed": len(collapsed), "below": least, "eps": row.eps, "lowest": row.min},
    )


_RULES = {
    "non-finite": _non_finite,
    "dead-filters": _dead,
    "duplicate-filters": _duplicates,
    "collapsed-variance": _collapsed,
}


def _never_updated(rows: Sequence[ParameterStatistics]) -> list[Finding]:
    updated = {row.layer: row.updated for row in rows if row.updated is not None}
    never = [layer for layer, was in updated.items() if not was]
    numbers: dict[str, float | int | str | None] = {"never": len(never), "batch_norms": len(updated)}
    still = "still have their first values, 0 and 1"
    if never and len(never) == len(updated):
        whose = "the only BatchNorm" if len(never) == 1 else f"all {len(never)} BatchNorms"
        layer = never[0] if len(never) == 1 else ""
        evidence = f"the running statistics of {whose} {still}"
        return [CATALOGUE["never-updated"].finding(layer, evidence, "all", numbers=numbers)]
    if not never:
        return []
    if len(never) == 1:
        evidence = f"its running statistics {still}; 1 of {len(updated)} BatchNorms are like this"
        return [CATALOGUE["never-updated"].finding(never[0], evidence, numbers=numbers)]
    evidence = f"the running statistics of {len(never)} of {len(updated)} BatchNorms {still}: {listed(never)}"
    return [CATALOGUE["never-updated"].finding("", evidence, numbers=numbers)]
