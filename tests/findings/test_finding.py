"""What a finding is, in words and as JSON."""

from __future__ import annotations

import json

import pytest

from hookscope.findings import Finding, counted, listed, nonfinite_words, percent


def test_a_row_has_channels_and_groups_only_if_the_finding_has() -> None:
    plain = Finding("saturated", "act", "60 % of values", "Do this.", numbers={"saturated": 0.6})
    assert plain.as_row() == {
        "finding": "saturated",
        "layer": "act",
        "evidence": "60 % of values",
        "meaning": "Do this.",
        "numbers": {"saturated": 0.6},
    }
    full = Finding("duplicate-channels", "conv", "e", "m", channels=(3, 17), groups=((3, 17),))
    assert json.loads(json.dumps(full.as_row())) == full.as_row()
    assert list(full.as_row()) == ["finding", "layer", "channels", "groups", "evidence", "meaning", "numbers"]
    assert (full.as_row()["channels"], full.as_row()["groups"]) == ([3, 17], [[3, 17]])


def test_a_finding_of_the_whole_model_names_no_layer() -> None:
    assert str(Finding("few-images", "", "2 images", "Take more.")) == "few-images: 2 images. Take more."
    assert str(Finding("dead-channels", "a", "1 of 2", "Prune.")) == "dead-channels a: 1 of 2. Prune."


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "0"), (8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7 and 1 more")]
)
def test_lists_are_cut(count: int, text: str) -> None:
    assert listed(range(count)) == text


def test_numbers_in_words() -> None:
    assert [percent(share) for share in (0, 1, 1 / 3, 1e-7)] == ["0 %", "100 %", "33.3 %", "1e-05 %"]
    assert [counted(number, "call") for number in (0, 1, 12345)] == ["0 calls", "1 call", "12,345 calls"]
    assert [nonfinite_words(*counts) for counts in ((5, 1200), (0, 1), (0, 0))] == ["5 NaN and 1,200 Inf", "1 Inf", ""]
