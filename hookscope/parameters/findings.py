"""What is wrong with the weights of a model: named findings on the numbers of `hookscope.parameters.statistics`."""

from __future__ import annotations

from collections.abc import Sequence

from hookscope.findings import Finding, counted, listed
from hookscope.parameters.statistics import ParameterStatistics, ParameterThresholds

_MEANINGS = {
    "non-finite": "All that comes after it turns into NaN: load an earlier checkpoint, and look for a loss that blew"
    " up (learning rate, gradient clipping, half precision without loss scaling).",
    "dead-filters": "Their channels hold nothing but the bias: prune them, or train again with a lower learning rate,"
    " less weight decay or another initialisation.",
    "duplicate-filters": "They see the same thing more than once: prune all but one of each group, or look for weights"
    " that were copied or set to one value.",
    "collapsed-variance": "The channel had one and the same value for every picture in training: its filter is dead or"
    " nothing reaches it; prune it, or look for dead ReLUs before it.",
}
_ONE_NEVER = (
    "In eval mode it passes values on as they are: look for a layer left out of the checkpoint, frozen or unused."
)
_ALL_NEVER = (
    "Random weights are like this; trained ones are not: look for a checkpoint without buffers, or a model that was"
    " trained in eval mode."
)


def finding_names(row: ParameterStatistics) -> tuple[str, ...]:
    """The names of what is wrong with one parameter, in the order in which findings come.

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
    return tuple(name for name, found in holds.items() if found)


def parameter_findings(
    rows: Sequence[ParameterStatistics], thresholds: ParameterThresholds | None = None
) -> list[Finding]:
    """What is wrong with the weights, the most urgent first: in the order of `finding_names`, then of the model.

    Where no BatchNorm was ever updated, as with random weights, that is one finding for the whole model.

    Args:
        rows: As `parameter_statistics` made them.
        thresholds: Those they were made with, for the words.

    Example:
        >>> import torch
        >>> from hookscope.parameters import parameter_statistics
        >>> [found] = parameter_findings(parameter_statistics(torch.nn.BatchNorm2d(2)))
        >>> found.finding, found.evidence
        ('never-updated', 'the running statistics of the only BatchNorm still have their first values, 0 and 1')
    """
    thresholds = thresholds or ParameterThresholds()
    found = [_finding(name, row, thresholds) for name in _MEANINGS for row in rows if name in finding_names(row)]
    return found + _never_updated(rows)


def _finding(name: str, row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding:
    make = {
        "non-finite": _non_finite,
        "dead-filters": _dead,
        "duplicate-filters": _duplicates,
        "collapsed-variance": _collapsed,
    }
    return make[name](row, thresholds)


def _non_finite(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding:
    kinds = [f"{count} {what}" for count, what in ((row.nan, "NaN"), (row.inf, "Inf")) if count]
    place = ", ".join(map(str, row.first_nonfinite or ()))
    first = f", the first at [{place}]" if row.first_nonfinite else ""
    return Finding(
        "non-finite",
        row.name,
        f"{' and '.join(kinds)} among {counted(row.count, 'value')}{first}",
        _MEANINGS["non-finite"],
        numbers={"nan": row.nan, "inf": row.inf, "values": row.count, "first": f"[{place}]"},
    )


def _dead(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding:
    dead = row.dead_filters or ()
    have = "has" if len(dead) == 1 else "have"
    below = f"a norm of 0, or below {thresholds.dead_norm:g} of the layer's median"
    return Finding(
        "dead-filters",
        row.name,
        f"{len(dead)} of {counted(row.filters or 0, 'filter')} {have} {below}: {listed(dead)}",
        _MEANINGS["dead-filters"],
        channels=dead,
        numbers={"dead": len(dead), "filters": row.filters, "dead_norm": thresholds.dead_norm},
    )


def _duplicates(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding:
    groups = row.duplicate_filters or ()
    same = listed(["=".join(map(str, group[:8])) + ("=..." if len(group) > 8 else "") for group in groups])
    spare = sum(len(group) - 1 for group in groups)
    what = f"{spare} of {counted(row.filters or 0, 'filter')} {'is a duplicate' if spare == 1 else 'are duplicates'}"
    return Finding(
        "duplicate-filters",
        row.name,
        f"{what} (cosine {thresholds.duplicate_cosine:g} or more): {same}",
        _MEANINGS["duplicate-filters"],
        channels=tuple(sorted(member for group in groups for member in group)),
        groups=groups,
        numbers={"groups": len(groups), "duplicates": spare, "filters": row.filters},
    )


def _collapsed(row: ParameterStatistics, thresholds: ParameterThresholds) -> Finding:
    collapsed = row.collapsed or ()
    least = thresholds.collapsed * (row.eps or 0.0)
    have = "has" if len(collapsed) == 1 else "have"
    return Finding(
        "collapsed-variance",
        row.name,
        f"{len(collapsed)} of {counted(row.count, 'channel')} {have} a running variance below {least:g}"
        f" ({thresholds.collapsed:g} of eps): {listed(collapsed)}",
        _MEANINGS["collapsed-variance"],
        channels=collapsed,
        numbers={"collapsed": len(collapsed), "below": least, "eps": row.eps, "lowest": row.min},
    )


def _never_updated(rows: Sequence[ParameterStatistics]) -> list[Finding]:
    updated = {row.layer: row.updated for row in rows if row.updated is not None}
    never = [layer for layer, was in updated.items() if not was]
    numbers: dict[str, float | int | str | None] = {"never": len(never), "batch_norms": len(updated)}
    still = "still have their first values, 0 and 1"
    if never and len(never) == len(updated):
        whose = "the only BatchNorm" if len(never) == 1 else f"all {len(never)} BatchNorms"
        layer = never[0] if len(never) == 1 else ""
        evidence = f"the running statistics of {whose} {still}"
        return [Finding("never-updated", layer, evidence, _ALL_NEVER, numbers=numbers)]
    if not never:
        return []
    if len(never) == 1:
        evidence = f"its running statistics {still}; 1 of {len(updated)} BatchNorms are like this"
        return [Finding("never-updated", never[0], evidence, _ONE_NEVER, numbers=numbers)]
    evidence = f"the running statistics of {len(never)} of {len(updated)} BatchNorms {still}: {listed(never)}"
    return [Finding("never-updated", "", evidence, _ONE_NEVER, numbers=numbers)]
