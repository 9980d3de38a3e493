"""The catalogue: every kind is complete, belongs to a question, and its thresholds have one default each."""

from dataclasses import fields
from typing import Any

import pytest

from hookscope.errors import spelled
from hookscope.findings import CATALOGUE, REPORT_ORDER, FindingKind, add_kind, thresholds_for
from hookscope.gradients import GradientThresholds
from hookscope.parameters import ParameterThresholds
from hookscope.statistics import StatisticsThresholds
from hookscope.training.log.rules import TrainingThresholds


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_kind_is_complete_and_short(name: str) -> None:
    kind = CATALOGUE[name]
    for text in (kind.meaning, kind.advice, *(kind.text(case) for case in kind.cases)):
        assert text.endswith(".") and text.isprintable() and len(text) < 250
    assert kind.text("no such case") == kind.text() == spelled(f"{kind.meaning} {kind.advice}")
    assert all(threshold.source and bool(threshold.option) == bool(threshold.help) for threshold in kind.thresholds)


def test_every_finding_belongs_to_a_question() -> None:
    assert {name for order in REPORT_ORDER.values() for name in order} == set(CATALOGUE)
    assert all(len(set(order)) == len(order) for order in REPORT_ORDER.values())


@pytest.mark.parametrize(
    ("question", "thresholds"),
    [
        ("activations", StatisticsThresholds()),
        ("gradients", GradientThresholds()),
        ("weights", ParameterThresholds()),
        ("training", TrainingThresholds()),
    ],
)
def test_the_thresholds_have_the_defaults_of_the_catalogue(question: str, thresholds: Any) -> None:
    defaults = {threshold.name: threshold.default for threshold in thresholds_for(question)}
    own = {field.name: getattr(thresholds, field.name) for field in fields(thresholds) if field.name != "others"}
    if question == "training":
        assert own.pop("dead") == defaults["dead_in_batch"]
    assert own == {name: defaults[name] for name in own}


def test_a_kind_is_added_before_a_less_grave_one_and_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPORT_ORDER, "weights", ["non-finite", "dead-filters"])
    kind = FindingKind("toy", "It is a toy.", "Leave it.")
    monkeypatch.setitem(CATALOGUE, "toy", kind)
    add_kind(kind, "weights", before="dead-filters")
    add_kind(kind, "weights")
    assert REPORT_ORDER["weights"] == ["non-finite", "toy", "dead-filters"]
