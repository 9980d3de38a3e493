"""What findings say, how they merge and rank, and that each kind in the catalogue is complete."""

import json
from dataclasses import fields
from typing import Any

import pytest

from hookscope.errors import spelled
from hookscope.findings import (
    CATALOGUE,
    REPORT_ORDER,
    Finding,
    FindingKind,
    add_kind,
    alike,
    counted,
    listed,
    merged,
    nonfinite_words,
    percent,
    ranked,
    thresholds_for,
    verdict,
)
from hookscope.gradients import GradientThresholds
from hookscope.parameters import ParameterThresholds
from hookscope.statistics import StatisticsThresholds


def test_a_row_has_channels_and_groups_only_if_the_finding_has_and_one_of_the_whole_model_no_layer() -> None:
    plain = Finding("saturated", "act", "60 % of values", "Do this.", numbers={"saturated": 0.6})
    assert plain.as_row() == {
        "finding": "saturated",
        "severity": "warning",
        "layer": "act",
        "evidence": "60 % of values",
        "meaning": "Do this.",
        "numbers": {"saturated": 0.6},
    }
    full = Finding("duplicate-channels", "conv", "e", "m", channels=(3, 17), groups=((3, 17),))
    assert json.loads(json.dumps(full.as_row())) == full.as_row()
    assert list(full.as_row()) == [
        *("finding", "severity", "layer", "channels", "groups", "evidence", "meaning", "numbers")
    ]
    assert (full.as_row()["channels"], full.as_row()["groups"]) == ([3, 17], [[3, 17]])
    assert str(Finding("few-images", "", "2 images", "Take more.")) == "few-images: 2 images. Take more."
    assert str(Finding("dead-channels", "a", "1 of 2", "Prune.")) == "dead-channels a: 1 of 2. Prune."


def finding(layer: str, severity: str = "warning", name: str = "saturated", meaning: str = "m") -> Finding:
    return Finding(name, layer, f"evidence of {layer}", meaning, severity=severity)


def test_the_gravest_findings_come_first_and_others_keep_their_order() -> None:
    findings = [finding("a", "note"), finding("b"), finding("c", "error"), finding("d"), finding("e", "error")]
    assert [each.layer for each in ranked(findings)] == ["c", "e", "b", "d", "a"]


def test_only_many_findings_of_one_kind_severity_and_meaning_become_one() -> None:
    alike = [finding(f"conv{number}") for number in range(12)]
    others = [finding("x", "error"), finding("y", name="dead-channels"), finding("z", meaning="other")]
    first, *rest = merged([alike[0], *others, *alike[1:]])
    assert rest == others and merged(alike[:3]) == alike[:3]
    assert (first.layer, first.parts) == ("conv0", tuple(alike))
    assert first.evidence.startswith("evidence of conv0; 11 more layers too: conv1, conv2")
    assert first.evidence.endswith("conv8 and 3 more")
    assert [part["layer"] for part in first.as_row()["parts"]] == [each.layer for each in alike]


@pytest.mark.parametrize(
    ("findings", "text"),
    [
        ([], "no errors and no warnings"),
        ([finding("a", "note")], "no errors and no warnings, 1 note (saturated)"),
        ([finding("", name="few-images")], "1 warning: look first at few-images"),
        ([finding("a"), finding("b", "error"), finding("c")], "1 error, 2 warnings: look first at b (saturated)"),
    ],
)
def test_the_verdict_counts_severities_and_names_the_first_place_to_look(findings: list[Finding], text: str) -> None:
    assert verdict(findings) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "0"), (8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7 and 1 more")]
)
def test_lists_are_cut(count: int, text: str) -> None:
    assert listed(range(count)) == text


def test_numbers_and_groups_in_words() -> None:
    assert [percent(share) for share in (0, 1, 1 / 3, 1e-7)] == ["0 %", "100 %", "33.3 %", "1e-05 %"]
    assert [counted(number, "call") for number in (0, 1, 12345)] == ["0 calls", "1 call", "12,345 calls"]
    assert [nonfinite_words(*counts) for counts in ((5, 1200), (0, 1), (0, 0))] == ["5 NaN and 1,200 Inf", "1 Inf", ""]
    assert alike([(0, 3), range(5, 149)]) == "0 = 3, 5 = 6 = 7 = 8 = …"


def test_every_kind_is_complete_and_short() -> None:
    for name, kind in CATALOGUE.items():
        for text in (kind.meaning, kind.advice, *(kind.text(case) for case in kind.cases)):
            assert text.endswith(".") and text.isprintable() and len(text) < 250, name
        assert kind.text("no such case") == kind.text() == spelled(f"{kind.meaning} {kind.advice}"), name
        for threshold in kind.thresholds:
            assert threshold.source and bool(threshold.option) == bool(threshold.help), name


def test_every_finding_belongs_to_a_question() -> None:
    assert {name for order in REPORT_ORDER.values() for name in order} == set(CATALOGUE)
    assert all(len(set(order)) == len(order) for order in REPORT_ORDER.values())


@pytest.mark.parametrize(
    ("question", "thresholds"),
    [
        ("activations", StatisticsThresholds()),
        ("gradients", GradientThresholds()),
        ("weights", ParameterThresholds()),
    ],
)
def test_the_thresholds_have_the_defaults_of_the_catalogue(question: str, thresholds: Any) -> None:
    defaults = {threshold.name: threshold.default for threshold in thresholds_for(question)}
    own = {field.name: getattr(thresholds, field.name) for field in fields(thresholds) if field.name != "others"}
    assert own == {name: defaults[name] for name in own}


def test_a_kind_is_added_before_a_less_grave_one_and_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPORT_ORDER, "weights", ["non-finite", "dead-filters"])
    kind = FindingKind("toy", "It is a toy.", "Leave it.")
    monkeypatch.setitem(CATALOGUE, "toy", kind)
    add_kind(kind, "weights", before="dead-filters")
    add_kind(kind, "weights")
    assert REPORT_ORDER["weights"] == ["non-finite", "toy", "dead-filters"]
