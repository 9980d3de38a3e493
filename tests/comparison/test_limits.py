"""Limits of a comparison: what breaks them, and that nothing passes which was not measured."""

from typing import Any

import pytest

from hookscope.comparison import (
    Agreement,
    Answer,
    ChangedImage,
    Comparison,
    ComparisonLimits,
    Difference,
    PairedCall,
    SideFacts,
    check_comparison,
)
from hookscope.hooks import Call
from hookscope.statistics import junit_xml

SIDE = SideFacts("net", "a.pth", "float32", "cpu", "resize 8")


def found(difference: Difference | None, agreement: Agreement | None = None) -> Comparison:
    call = Call("conv1", "Conv2d", 0, 0, 0)
    pair = PairedCall(call, call, "", "name", (3, 8, 8), (3, 8, 8) if difference else (5,), difference)
    return Comparison(SIDE, SIDE, ("a.png",), Answer("layer", "", "", 0, ""), (pair,), agreement=agreement)


CASES: list[tuple[dict[str, float], Difference | None, str, float | None]] = [
    ({"max_relative": 0.1}, Difference(9, 0, 0.1, None, 0.9), "", None),
    ({"max_relative": 0.1}, Difference(9, 0, 0.2, None, 0.9), "relative L2 difference 0.2", 0.2),
    ({"max_relative": 0.1}, Difference(9, 9, 0.0, None, None), "", None),
    ({"max_relative": 0.1}, Difference(9, 9, None, None, None), "", None),  # the same NaN on both sides
    (
        {"max_relative": 0.1},
        Difference(9, 7, 0.0, None, 1.0, 0, 2),
        "2 values of 9 NaN or Inf on one side only",
        float("inf"),
    ),
    ({"max_relative": 0.1}, Difference(9, 8, None, None, None), "no value is finite on both sides", None),
    ({"max_relative": 0.1}, None, "the shapes differ: 3x8x8 in A and 5 in B", None),
    ({"min_cosine": 0.9}, Difference(9, 0, 0.1, None, 0.9), "", None),
    ({"min_cosine": 0.9}, Difference(9, 0, 0.1, None, 0.8), "cosine 0.8", 0.8),
    ({"min_cosine": 0.9}, Difference(9, 9, 0.0, None, None), "", None),
    ({"min_cosine": 0.9}, Difference(9, 0, 1.0, None, None), "one side is 0 everywhere", None),
    ({"min_cosine": 0.9}, None, "the shapes differ: 3x8x8 in A and 5 in B", None),
    ({"min_cosine": 0.9}, Difference(9, 7, 0.0, None, 1.0, 2), "2 values of 9 NaN or Inf on one side only", None),
    ({"min_agreement": 0.9}, None, "the outputs are not scores of the same classes", None),
]


@pytest.mark.parametrize(("limits", "difference", "evidence", "value"), CASES)
def test_what_breaks_a_limit(limits: dict[str, Any], difference: Difference | None, evidence: str, value: Any) -> None:
    result = check_comparison(found(difference), ComparisonLimits(**limits))
    assert [(each.evidence, each.value) for each in result.broken] == ([(evidence, value)] if evidence else [])
    assert all(each.unmeasured == (each.value is None) for each in result.broken)
    assert len(result.calls) == (not evidence or value is not None)


def test_agreement_is_checked_on_the_output() -> None:
    agreement = Agreement(4, 0.75, 1.0, (ChangedImage(1, "a.png", "cat", "dog", 0.9, 0.6),))
    assert not check_comparison(found(None, agreement), ComparisonLimits(min_agreement=0.75)).broken
    result = check_comparison(found(None, agreement), ComparisonLimits(min_agreement=0.8))
    assert [each.evidence for each in result.broken] == ["1 of 4 images changed class: 75 % agree"]
    assert result.verdict() == "of 1 call, 1 breaks a limit"


def test_junit_has_a_failure_for_what_was_not_measured() -> None:
    result = check_comparison(found(None), ComparisonLimits(max_relative=0.1, min_cosine=0.5))
    text = junit_xml("hookscope compare net net", result).decode()
    assert 'tests="2" failures="2"' in text
    assert "not measured: the shapes differ: 3x8x8 in A and 5 in B" in text
