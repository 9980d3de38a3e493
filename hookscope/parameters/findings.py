"""What is measured of a parameter, and one rule for each kind of finding, with its catalogue entry. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hookscope.columns import Column, Columns, Row
from hookscope.display import Shown
from hookscope.errors import UsageError
from hookscope.findings import (
    CATALOGUE,
    Finding,
    Rules,
    Thresholds,
    counted,
    default,
    listed,
    merged,
    never_updated,
    nonfinite_words,
    ranked,
)


def _count(groups: Sequence[object] | None) -> int | None:
    return None if groups is None else len(groups)


def _duplicate_count(row: ParameterStatistics) -> int | None:
    groups = row.duplicate_filters
    return None if groups is None else sum(len(group) - 1 for group in groups)


WEIGHTS = Columns(
    Column("name"),
    Column("type", need=5),
    Column("shape", need=7),
    Column("mean", need=10),
    Column("std"),
    Column("min", need=8),
    Column("max", need=8),
    Column("norm", need=6),
    Column("zeros", need=9),
    Column("nan", hide="zero"),
    Column("inf", hide="zero"),
    Column("filters", need=3, hide="unknown"),
    Column("filter_norm_min", need=2, hide="unknown"),
    Column("filter_norm_mean", need=1, hide="unknown"),
    Column("filter_norm_max", need=2, hide="unknown"),
    Column("dead", lambda row: _count(row.dead_filters), hide="zero"),
    Column("duplicate", _duplicate_count, hide="zero"),
    Column("collapsed", lambda row: _count(row.collapsed), hide="zero"),
    Column("updated", need=4, hide="unknown"),
    Column("findings", hide="zero"),
    Column("weights", where="rows"),
    Column("layer", where="nested"),
    Column("buffer", where="nested"),
    Column("dead_filters", where="nested"),
    Column("duplicate_filters", where="nested"),
    Column("collapsed_channels", lambda row: row.collapsed, where="nested"),
    Column("first_nonfinite", where="nested"),
)
"""What ``weights`` says of a parameter, a `ParameterStatistics`."""


@dataclass(frozen=True)
class ParameterThresholds(Thresholds):
    """Thresholds of the findings on weights; the catalogue says where the defaults come from.

    Attributes:
        dead_norm: A filter is dead if its norm is 0 or below this share of the layer's median norm.
        duplicate_cosine: Least cosine of two filters on the same inputs that are duplicates.
        collapsed: A channel has collapsed if its running variance is below this share of the layer's eps.

    Raises:
        UsageError: for a share outside [0, 1), or a cosine outside (0, 1].
    """

    question = "weights"

    dead_norm: float = default("dead-filters", "dead_norm")
    duplicate_cosine: float = default("duplicate-filters", "duplicate_cosine")
    collapsed: float = default("collapsed-variance", "collapsed")

    def __post_init__(self) -> None:
        for what, share in (("dead norm", self.dead_norm), ("share of eps", self.collapsed)):
            if not 0 <= share < 1:
                raise UsageError(f"{what} {share:g} is not a share", do="give at least 0, and less than 1")
        if not 0 < self.duplicate_cosine <= 1:
            raise UsageError(f"duplicate cosine {self.duplicate_cosine:g}", do="give more than 0, at most 1")


@dataclass(frozen=True, slots=True, repr=False)
class ParameterStatistics(Shown):
    """Statistics of one parameter, or of one buffer of a BatchNorm, computed in float64 from its finite values.

    Attributes:
        name: As in ``named_parameters()``, or the name of the buffer or the computed weight. A parameter that
            layers share has the first of its names.
        layer: Dotted path of the layer that has the parameter.
        type: Class name of that layer.
        shape: Of the tensor. Quantised values are decoded; of complex values the magnitude counts.
        buffer: Whether it is not a parameter: running statistics, the weights of frozen BatchNorms, and weights that
            pruning and parametrizations compute from parameters.
        mean: Mean. If no value is finite, it is None, like all others up to ``norm``.
        std: Population standard deviation.
        min: Lowest value.
        max: Highest value.
        norm: L2 norm.
        zeros: Share of values that are 0, in 0..1; None without values.
        nan: Count of NaN.
        inf: Count of +Inf and -Inf.
        first_nonfinite: Position of the first NaN or Inf.
        filters: Count of filters in the weight of a convolution, one for each output channel. For other parameters
            it is None, like all others up to ``duplicate_filters``.
        filter_norm_min: Least norm of the filters without NaN and Inf.
        filter_norm_mean: Mean norm of the same filters.
        filter_norm_max: Largest norm of the same filters.
        dead_filters: Numbers of dead filters, see `ParameterThresholds`; of other layers, rows or scales that are 0.
        duplicate_filters: Groups of duplicate filters, see `duplicate_filters`; None for more than 16,384 filters.
        collapsed: Collapsed channels of a running variance.
        eps: The layer's eps, for running statistics.
        updated: Whether running statistics were ever updated: a mean is not 0, or a variance is not 1.
        histogram: Numbers of finite values in equal intervals from ``min`` to ``max``; empty if none were asked for.
    """

    name: str
    layer: str
    type: str
    shape: tuple[int, ...]
    buffer: bool
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    norm: float | None
    zeros: float | None
    nan: int
    inf: int
    first_nonfinite: tuple[int, ...] | None = None
    filters: int | None = None
    filter_norm_min: float | None = None
    filter_norm_mean: float | None = None
    filter_norm_max: float | None = None
    dead_filters: tuple[int, ...] | None = None
    duplicate_filters: tuple[tuple[int, ...], ...] | None = None
    collapsed: tuple[int, ...] | None = None
    eps: float | None = None
    updated: bool | None = None
    histogram: tuple[int, ...] = ()

    def _columns(self) -> Columns:
        return WEIGHTS

    @property
    def count(self) -> int:
        """Count of all values."""
        return math.prod(self.shape)


class Measured(NamedTuple):
    """What the rules judge."""

    rows: Sequence[ParameterStatistics]
    thresholds: ParameterThresholds


_MANY = default("dead-filters", "many")

RULES = Rules("weights", lambda measured: measured.rows)
rule, parameter_rule = RULES.rule, RULES.row_rule


def finding_names(row: ParameterStatistics, thresholds: ParameterThresholds | None = None) -> tuple[str, ...]:
    return tuple(finding.finding for finding in parameter_findings([row], thresholds))


def weights_rows(
    rows: Sequence[ParameterStatistics], thresholds: ParameterThresholds | None = None, weights: str = ""
) -> list[Row]:
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
    filters = row.filters or row.shape[0]  # of a normalisation its scales, of a Linear layer its rows
    if not (dead := row.dead_filters) or len(dead) == filters:
        return None
    have = "has" if len(dead) == 1 else "have"
    below = f"a norm of 0, or below {thresholds.dead_norm:g} of the layer's median"
    kind = "scales" if len(row.shape) == 1 else "rows of weights"
    what = (
        f"{counted(filters, 'filter')} {have} {below}"
        if row.filters
        else f"{filters} {kind} {'is' if len(dead) == 1 else 'are'} 0"
    )
    return CATALOGUE["dead-filters"].finding(
        row.name,
        f"{len(dead)} of {what}: {listed(dead)}",
        case="many" if len(dead) > _MANY * filters else "",
        channels=dead,
        numbers={"dead": len(dead), "filters": filters, "dead_norm": thresholds.dead_norm},
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
