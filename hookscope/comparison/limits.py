"""Limits on the differences of two sides, and which pairs of calls break them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hookscope.comparison.facts import Agreement, Comparison, PairedCall
from hookscope.display import text_of
from hookscope.findings import counted, percent
from hookscope.statistics import BrokenLimit, LimitsResult


@dataclass(frozen=True, slots=True)
class ComparisonLimits:
    """Limits of a comparison, None for no limit.

    Attributes:
        max_relative: Largest allowed relative L2 difference of a pair of calls.
        min_cosine: Smallest allowed cosine of a pair.
        min_agreement: Smallest allowed share of images with the same best class.
    """

    max_relative: float | None = None
    min_cosine: float | None = None
    min_agreement: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the limits that are set, as the options are called."""
        names = [each.name for each in fields(self) if getattr(self, each.name) is not None]
        return tuple(name.replace("_", "-") for name in names)


def check_comparison(found: Comparison, limits: ComparisonLimits) -> LimitsResult:
    """Check every pair of calls, and the agreement; what was not measured has not passed."""
    result = LimitsResult({name: {} for name in limits.names})
    if limits.max_relative is not None:
        for pair in found.calls:
            _check(result, "max-relative", pair, _distance(pair), limits.max_relative)
    if limits.min_cosine is not None:
        for pair in found.calls:
            _check(result, "min-cosine", pair, _cosine(pair), limits.min_cosine)
    if limits.min_agreement is not None:
        _check(result, "min-agreement", found.calls[-1], _agreement(found.agreement), limits.min_agreement)
    return result


_Measured = tuple[float | None, str]  # the value, None where there is none, and what it says in words


def _check(result: LimitsResult, limit: str, pair: PairedCall, measured: _Measured, allowed: float) -> None:
    value, evidence = measured
    call, unknown = pair.a, value is None
    about = BrokenLimit(
        limit,
        pair.key,
        call.index,
        value,
        None if unknown else allowed,
        evidence,
        unmeasured=unknown,
        order=call.order,
        part=pair.part,
    )
    if value is not None:
        result.checked[limit][pair.key] = call.type
        if value <= allowed if limit.startswith("max") else value >= allowed:
            return
    result.broken.append(about)


def _distance(pair: PairedCall) -> _Measured:
    difference = pair.difference
    if difference is None:
        return None, _shapes(pair)
    if nonfinite := difference.nonfinite_a + difference.nonfinite_b:
        return math.inf, f"{counted(nonfinite, 'value')} of {difference.values:,} NaN or Inf on one side only"
    if difference.is_same:
        return 0.0, "the same to the bit"
    if difference.relative_l2 is None:
        return None, "no value is finite on both sides"
    return difference.relative_l2, f"relative L2 difference {difference.relative_l2:.4g}"


def _cosine(pair: PairedCall) -> _Measured:
    difference = pair.difference
    if difference is None:
        return None, _shapes(pair)
    if nonfinite := difference.nonfinite_a + difference.nonfinite_b:
        return None, f"{counted(nonfinite, 'value')} of {difference.values:,} NaN or Inf on one side only"
    if difference.is_same:
        return 1.0, "the same to the bit"
    if difference.cosine is None:
        return None, "one side is 0 everywhere"
    return difference.cosine, f"cosine {difference.cosine:.4g}"


def _agreement(agreement: Agreement | None) -> _Measured:
    if agreement is None:
        return None, "the outputs are not scores of the same classes"
    changed, images = len(agreement.changed), counted(agreement.images, "image")
    return agreement.top1, f"{changed:,} of {images} changed class: {percent(agreement.top1)} agree"


def _shapes(pair: PairedCall) -> str:
    return f"the shapes differ: {text_of(pair.shape_a)} in A and {text_of(pair.shape_b)} in B"
