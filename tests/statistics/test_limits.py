"""Limits: each just met and just broken, on a net whose numbers are known."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import SelectionError
from hookscope.statistics import (
    BrokenLimit,
    Coverage,
    LayerStatistics,
    Limits,
    LimitsResult,
    check_limits,
    checked_layers,
    junit_xml,
)
from tests.nets import Function
from tests.statistics import judge


def measured(net: nn.Module, inputs: Tensor, **options: Any) -> list[LayerStatistics]:
    return judge.measured(net, inputs, **options).statistics()


@pytest.fixture(scope="module")
def layers() -> list[LayerStatistics]:
    """A convolution that hands on its 20 channels, and a ReLU6: 1 channel dead, 3 at their bound throughout."""
    net = nn.Sequential(nn.Conv2d(20, 20, 1, bias=False), nn.ReLU6())
    net[0].weight.data = torch.eye(20)[:, :, None, None]
    inputs = 1 + torch.rand(10, 20, 4, 4, generator=torch.Generator().manual_seed(0))
    inputs[:, 0] -= 9
    inputs[:, 1:4] += 9
    inputs[0, 1, 0, 0] = 100.0
    return measured(net, inputs, rank=True)


def broken_limits(layers: list[LayerStatistics], limits: Limits) -> list[BrokenLimit]:
    """What is broken in calls that all have channels."""
    coverage = Coverage(with_channels={layer.key for layer in layers})
    return check_limits(layers, limits, coverage, every=True).broken


def broken(layers: list[LayerStatistics], **limits: Any) -> list[tuple[str, str, int | None]]:
    return [(each.limit, each.layer, each.index) for each in broken_limits(layers, Limits(**limits))]


def test_dead(layers: list[LayerStatistics]) -> None:
    assert layers[1].dead_channels == (0, 1, 2, 3)
    assert broken(layers, max_dead=0.2) == []
    (failure,) = broken_limits(layers, Limits(max_dead=math.nextafter(0.2, 0)))
    assert failure == BrokenLimit(
        "max-dead", "1", None, 0.2, math.nextafter(0.2, 0), "4 of 20 channels are dead: 0, 1, 2, 3", (0, 1, 2, 3),
        order=1,
    )  # fmt: skip
    assert broken(layers, max_dead=0.0) == [("max-dead", "1", None)]


def test_saturated(layers: list[LayerStatistics]) -> None:
    share = layers[1].saturated
    assert share == 3 / 20
    assert broken(layers, max_saturated=share) == []
    (failure,) = broken_limits(layers, Limits(max_saturated=math.nextafter(share, 0)))
    assert (failure.layer, failure.evidence) == ("1", "15 % of values are within 1 % of a bound")


def test_size(layers: list[LayerStatistics]) -> None:
    assert broken(layers, max_abs=100.0) == []
    (failure,) = broken_limits(layers, Limits(max_abs=math.nextafter(100.0, 0)))
    assert (failure.layer, failure.index, failure.value) == ("0", 0, 100.0)
    assert failure.evidence == f"from {layers[0].min:.6g} to 100"
    low = measured(nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.Tanh()), -5 * torch.ones(1, 1, 3, 3), layers="0")
    assert broken(low, max_abs=abs(low[0].min or 0)) == []
    assert len(broken(low, max_abs=abs(low[0].min or 0) * 0.999)) == 1


def test_rank(layers: list[LayerStatistics]) -> None:
    for layer in layers:
        assert layer.rank
        assert layer.highest_rank == 20
        assert broken([layer], min_rank=layer.rank) == []
        assert len(broken([layer], min_rank=math.nextafter(layer.rank, 99))) == 1
        assert broken([layer], min_rank_share=layer.rank / 20 - 1e-9) == []
        (failure,) = broken_limits([layer], Limits(min_rank_share=layer.rank / 20 + 1e-9))
        assert failure.evidence == f"effective rank {layer.rank:.4g} of at most 20 in 20 channels"


def test_a_share_of_the_rank_is_of_what_it_can_be() -> None:
    """8 channels of 1 x 1 maps on 3 images lie in a plane."""
    (layer,) = measured(nn.Conv2d(3, 8, 1), torch.randn(3, 3, 1, 1), rank=True, layers="all")
    assert layer.highest_rank == 2
    assert broken([layer], min_rank_share=0.5) == []
    assert len(broken([layer], min_rank=3.0)) == 1


def test_nan_and_inf() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.ReLU())
    net[0].weight.data.fill_(1.0)
    inputs = torch.tensor([1.0, 2.0, math.nan, math.inf, -math.inf, 3.0]).view(1, 1, 2, 3)
    convolution, function = measured(net, inputs)
    failures = broken_limits([convolution, function], Limits(no_nan=True))
    assert [(failure.layer, failure.value, failure.allowed) for failure in failures] == [("0", 3, 0), ("1", 2, 0)]
    assert failures[1].evidence == "1 NaN and 1 Inf of 6 values"
    # an Inf is beyond any limit, though the extremes are those of the finite values
    one, two = broken_limits([convolution, function], Limits(max_abs=1e30))
    assert (one.value, two.evidence) == (math.inf, "1 Inf, else from 0 to 3")
    only = measured(nn.Sequential(nn.ReLU()), torch.full((1, 1, 2, 2), math.inf))
    assert broken_limits(only, Limits(max_abs=1.0))[0].evidence == "4 Inf, else no finite value"


def test_a_clean_net_breaks_nothing(layers: list[LayerStatistics]) -> None:
    assert broken(layers) == [] and Limits().names == ()
    limits = Limits(0.2, 0.15, True, 100.0, 1.0)
    assert limits.names == ("max-dead", "max-saturated", "no-nan", "max-abs", "min-rank")
    assert broken_limits(layers, limits) == []


def test_several_limits_come_in_order_of_execution(layers: list[LayerStatistics]) -> None:
    assert broken(layers, max_abs=1.0, max_dead=0.0, max_saturated=0.0) == [
        ("max-abs", "0", 0),
        ("max-dead", "1", None),
        ("max-saturated", "1", None),
        ("max-abs", "1", None),
    ]


@pytest.mark.parametrize(
    ("allow", "left"),
    [
        ([], ["conv", "relu", "conv#1", "relu#1"]),
        (["conv"], ["relu", "relu#1"]),
        (["conv#1"], ["conv", "relu", "relu#1"]),
        (["c*", "relu#0"], ["relu#1"]),
        (["re:^r"], ["conv", "conv#1"]),
        (["0"], ["relu", "conv#1", "relu#1"]),
        (["-1,relu"], ["conv"]),
        (["0:"], ["relu", "relu#1"]),
        (["all"], []),
        (["fc", "99"], ["conv", "relu", "conv#1", "relu#1"]),
    ],
)
def test_layers_that_are_allowed(allow: list[str], left: list[str]) -> None:
    net = Function(lambda net, x: net.relu(net.conv(net.relu(net.conv(x)))), conv=nn.Conv2d(3, 3, 1), relu=nn.ReLU())
    assert [layer.key for layer in checked_layers(measured(net, torch.randn(2, 3, 4, 4)), allow)] == left


def test_a_selection_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(SelectionError, match="bad regular expression"):
        checked_layers([], ["re:("])


def checked(limits: list[str], layers: list[str]) -> dict[str, dict[str, str]]:
    return {limit: dict.fromkeys(layers, "Conv2d") for limit in limits}


def test_a_case_for_each_limit_and_layer() -> None:
    failed = BrokenLimit("max-dead", "relu", None, 0.25, 0.05, "1 of 4 channels is dead: 2", (2,))
    unknown = BrokenLimit("no-nan", "fc", None, None, None, "it did not run", unmeasured=True)
    result = LimitsResult(checked(["max-dead", "no-nan"], ["conv", "relu"]), [failed, unknown])
    root = ElementTree.fromstring(junit_xml("check", result))
    suite = root[0]
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    assert suite.attrib == {"name": "check", "tests": "5", "failures": "2", "errors": "0", "skipped": "0"}
    cases = [(case.get("classname"), case.get("name"), len(case)) for case in suite]
    plain = [("max-dead", "conv", 0), ("max-dead", "relu", 1), ("no-nan", "conv", 0), ("no-nan", "relu", 0)]
    assert cases == [*plain, ("no-nan", "fc", 1)]
    failure = suite[1][0]
    assert (failure.tag, failure.get("type"), failure.get("message")) == ("failure", "max-dead", failed.evidence)
    assert failure.text == "1 of 4 channels is dead: 2 (measured 0.25, allowed 0.05)"
    assert suite[4][0].text == "not measured: it did not run"


def test_what_may_be_unmeasured_is_skipped() -> None:
    unknown = BrokenLimit("no-nan", "fc", None, None, None, "it did not run", unmeasured=True)
    suite = ElementTree.fromstring(junit_xml("check", LimitsResult(checked(["no-nan"], ["conv"]), [], [unknown])))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "0", "1")
    (skipped,) = suite[1]
    assert (suite[1].get("name"), skipped.tag, skipped.get("message")) == (
        "fc",
        "skipped",
        "not measured: it did not run",
    )


@pytest.mark.parametrize(
    "name", ['a<b>&"c"\x00\x1b]0;x\x07\n\ud800\uffff\u202e\u00e9', "".join(map(chr, range(32))), "\x7f\x85\ufffe\udcff"]
)
def test_any_name_makes_valid_xml(name: str) -> None:
    failed = BrokenLimit("no-nan", name, 0, float("inf"), 0, name)
    text = junit_xml(name, LimitsResult(checked(["no-nan"], [name]), [failed]))
    assert text.decode("utf-8").startswith("<?xml version='1.0' encoding='utf-8'?>\n")
    assert text.endswith(b">\n")
    suite = ElementTree.fromstring(text)[0]
    assert suite.attrib["name"].isprintable()
    assert suite[0][0].get("message") == suite[0].get("name")


def test_lost_images_are_an_error_of_their_own() -> None:
    suite = ElementTree.fromstring(junit_xml("check", LimitsResult(checked(["no-nan"], ["conv1"])), lost=2))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "1")
    assert [case.get("name") for case in suite if case.find("error") is not None] == ["all could be used"]
