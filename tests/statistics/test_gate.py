"""Gates: no broken model passes, whatever hides the fault; limits that are just met and just broken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from hookscope.errors import SelectionError
from hookscope.hooks import Selection
from hookscope.models import load_model
from hookscope.statistics import (
    BrokenLimit,
    Coverage,
    LayerStatistics,
    Limits,
    LimitsResult,
    StatisticsCollector,
    check_limits,
    checked_layers,
    junit_xml,
)
from tests.helpers import seeded, small_head
from tests.nets import Function
from tests.statistics import judge

NAN = float("nan")
X = torch.rand(6, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def checked(
    net: nn.Module,
    x: Any = X,
    layers: str | None = None,
    types: tuple[str, ...] = (),
    allow: str | tuple[()] = (),
    allow_unmeasured: bool = False,
    ops: bool | None = None,
    **limits: Any,
) -> LimitsResult:
    """What ``check`` finds: without ``layers`` and ``types`` in every call."""
    every = layers is None and not types
    options: dict[str, Any] = {"rank": "min_rank" in limits or "min_rank_share" in limits}
    options |= {"ops": every if ops is None else ops, "handed_on": not every}
    with StatisticsCollector(net.eval(), "*" if every else layers, types, **options) as collector, torch.no_grad():
        net(x)
    return check_limits(
        collector.totals.statistics(),
        Limits(**limits),
        collector.coverage,
        allow,
        every=every,
        allow_unmeasured=allow_unmeasured,
    )


def conv(**options: Any) -> nn.Conv2d:
    return seeded(lambda: nn.Conv2d(3, 8, 3, **options))  # type: ignore[return-value]


def linear(factor: float = 1.0, width: int = 5) -> nn.Linear:
    layer = seeded(lambda: nn.Linear(8, width))
    layer.weight.data *= factor  # type: ignore[union-attr, operator]
    return layer  # type: ignore[return-value]


def of(forward: Callable[..., Any], **layers: nn.Module) -> nn.Module:
    return Function(forward, **layers)


def through(change: Callable[[Tensor], Any]) -> nn.Module:
    """A convolution, then ``change`` in functional code."""
    return of(lambda net, x: change(net.conv(x)), conv=conv())


def poisoned(layer: nn.Module) -> nn.Module:
    next(layer.parameters()).data.view(-1)[0] = NAN
    return layer


def hidden_branch(net: Any, x: Tensor) -> Tensor:
    x = net.conv(x)
    return x + torch.sqrt(-x.abs() - 1).nan_to_num(0.0)


def dead_branch(net: Any, x: Tensor) -> Tensor:
    x = net.conv(x)
    return torch.cat([x, F.relu(x - 99)], 1).mean((2, 3)) + 0 * x.mean((2, 3)).repeat(1, 2)


def some_dead(net: Any, x: Tensor) -> Tensor:
    shift = torch.zeros(1, 8, 1, 1)
    shift[:, :3] = 99
    return net.fc(F.relu(net.conv(x) - shift).mean((2, 3)))


class Direct(nn.Module):
    """Calls a layer past its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = poisoned(conv()), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv.forward(x).nan_to_num(0.0).mean((2, 3)))


class OwnAttention(nn.Module):
    """A layer without children that computes in functional code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), 1e30))

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.weight) @ (x @ self.weight).mT
        return torch.softmax(scores.nan_to_num(0.0, 0.0, 0.0), -1) @ x


@dataclass
class Result:
    logits: Tensor
    aux: list[Tensor]


def classifier(fc: nn.Module, after: Callable[[Tensor], Tensor] = lambda x: x) -> nn.Module:
    return of(lambda net, x: after(net.fc(net.conv(x).mean((2, 3)))), conv=conv(), fc=fc)


def all_nan(function: nn.Module) -> nn.Module:
    return nn.Sequential(poisoned(nn.Conv2d(3, 1, 1)), function)


NO_NAN: dict[str, Any] = {"no_nan": True}
ALL: dict[str, Any] = {"no_nan": True, "max_abs": 1e6, "max_dead": 0.9}
# fmt: off
BROKEN: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "nan in a Linear": (classifier(poisoned(linear())), NO_NAN),
    "nan in functional code": (through(lambda x: torch.log(-x.abs() - 1)), NO_NAN),
    "nan in one functional branch": (of(hidden_branch, conv=conv()), NO_NAN),
    "nan at the output": (through(lambda x: x / 0 * 0), NO_NAN),
    "nan in a dictionary": (through(lambda x: {"a": x, "b": {"c": x * NAN}}), NO_NAN),
    "nan in a list": (through(lambda x: [x, [x * NAN]]), NO_NAN),
    "nan in a dataclass": (through(lambda x: Result(x, [x.mean(), x * NAN])), NO_NAN),
    "nan in a namespace": (through(lambda x: SimpleNamespace(a=x, b=x * NAN)), NO_NAN),
    "nan in a layer without children": (
        of(lambda net, x: net.own(net.conv(x).flatten(2).mT), conv=conv(), own=OwnAttention()), NO_NAN,
    ),
    "nan in a layer called past its hooks": (Direct(), NO_NAN),
    "nan in an in-place operation": (through(lambda x: x.mul_(NAN).nan_to_num_(0.0)), NO_NAN),
    "inf at the output of a Linear": (classifier(linear(1e39), lambda x: x.clamp(-1, 1)), NO_NAN),
    "inf and a size": (through(lambda x: x / 0), {"max_abs": 1e9}),
    "a huge Linear": (classifier(linear(1e9), torch.tanh), {"max_abs": 1e4}),
    "a huge functional value": (through(lambda x: torch.tanh(x * 1e9)), {"max_abs": 1e4}),
    "huge whole numbers": (through(lambda x: (x * 1e6).round().long()), {"max_abs": 1e4}),
    "nothing but nan, and a size": (all_nan(nn.ReLU()), {"max_abs": 1.0}),
    "nothing but nan, and death": (all_nan(nn.ReLU()), {"max_dead": 0.05}),
    "nothing but nan, and saturation": (all_nan(nn.Sigmoid()), {"max_saturated": 0.5}),
    "nothing but nan, and rank": (all_nan(nn.ReLU()), {"min_rank": 0.5}),
    "a dead functional relu": (of(some_dead, conv=conv(), fc=linear()), {"max_dead": 0.05}),
    "a dead branch": (of(dead_branch, conv=conv()), {"max_dead": 0.05}),
    "a saturated functional sigmoid": (through(lambda x: torch.sigmoid(x * 1e4).mean()), {"max_saturated": 0.5}),
    "a saturated hardtanh with bounds": (through(lambda x: F.hardtanh(x * 1e4, -3.0, 3.0)), {"max_saturated": 0.5}),
    "the same for all images": (classifier(linear(0.0)), {"max_dead": 0.5}),
    "an output that is constant": (through(lambda x: x.mean((2, 3)) * 0 + 3), {"max_dead": 0.5}),
    "a layer too wide for a rank": (nn.Sequential(nn.Conv2d(3, 2100, 1)), {"min_rank_share": 0.001}),
    "a layer that does not run": (of(lambda net, x: net.conv(x), conv=conv(), lost=linear()), ALL),
    "a block that does not run": (of(lambda net, x: net.conv(x), conv=conv(), lost=nn.Sequential(linear())), ALL),
    "nothing runs": (of(lambda net, x: x, conv=conv()), ALL),
    "no output": (through(lambda x: None), ALL),
    "an output without tensors": (through(lambda x: str(x.shape)), ALL),
    "an output without values": (through(lambda x: x[:0]), NO_NAN),
    "an output without values, and death": (through(lambda x: x[:0]), {"max_dead": 0.5}),
    "an output without values, and rank": (through(lambda x: x[:0]), {"min_rank": 1.0}),
    "whole numbers alone have no rank": (of(lambda x: (x > 2).long()), {"max_saturated": 0.5}),
}
# fmt: on


@pytest.mark.parametrize(("net", "limits"), BROKEN.values(), ids=BROKEN)
def test_a_broken_model_never_passes(net: nn.Module, limits: dict[str, Any]) -> None:
    result = checked(net, **limits)
    assert result.broken, list(result.words())
    assert all(each.evidence for each in result.broken)
    assert "within the limits" not in result.verdict()


@pytest.mark.parametrize("limits", [NO_NAN, {"max_dead": 0.5}, {"min_rank": 1.0}])
def test_an_output_without_values_breaks_the_limit_as_such(limits: dict[str, Any]) -> None:
    broken = checked(through(lambda x: x[:0]), **limits).broken
    assert [(each.layer, each.evidence) for each in broken] == [("(model)", "it returned no values")]


def test_images_of_nan_break_every_limit() -> None:
    limits = {"max_dead": 0.99, "max_saturated": 0.99, "no_nan": True, "max_abs": 1e30, "min_rank": 0.0}
    net = of(lambda net, x: torch.sigmoid(net.conv(x)), conv=conv())
    result = checked(net, torch.full((4, 3, 9, 9), math.nan), **limits)
    assert (
        {each.limit for each in result.broken} == set(result.checked) | {"max-saturated"} == set(Limits(**limits).names)
    )


@pytest.mark.parametrize(
    ("layers", "limits", "evidence"),
    [
        ("flat", {"max_saturated": 0.5}, "Flatten has no bound"),
        ("conv", {"max_saturated": 0.5}, "Conv2d has no bound"),
        ("lost", NO_NAN, "it did not run"),
        ("silent", NO_NAN, "it returned no tensor"),
        ("fc", {"max_dead": 0.1}, "5 values in 5 channels"),
        ("fc", {"min_rank": 1.0}, "5 values in 5 channels"),
        ("empty", NO_NAN, "it returned no values"),
    ],
)
def test_a_chosen_layer_without_the_quantity_breaks_the_limit(layers: str, limits: Any, evidence: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.conv(x)
        net.silent("word")
        net.empty(x[:0])
        return net.fc(net.flat(x.mean((2, 3))))

    parts = {"conv": conv(), "flat": nn.Flatten(), "fc": linear(), "lost": nn.ReLU(), "silent": nn.Identity()}
    net = of(forward, **parts, empty=nn.Identity())
    assert not checked(net, X[:1], max_abs=1e4, no_nan=True).broken
    (found,) = checked(net, X[:1], layers, **limits).broken
    assert (found.layer, found.evidence, found.value) == (layers, evidence, None)
    (skipped,) = checked(net, X[:1], layers, allow_unmeasured=True, **limits).allowed
    assert skipped == found
    assert not checked(net, X[:1], layers, allow_unmeasured=True, **limits).broken


def test_a_limit_that_no_call_can_be_checked_against_is_broken() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    (found,) = checked(net, max_saturated=0.5).broken
    assert (found.limit, found.layer, found.evidence) == (
        "max-saturated",
        "",
        "nothing was checked: no call has this value",
    )
    assert not checked(net, max_saturated=0.5, allow_unmeasured=True).broken
    (found,) = checked(net, no_nan=True, allow="*").broken
    assert (found.limit, found.layer) == ("no-nan", "")


def test_layers_that_did_not_run_are_named_once_and_may_be_allowed() -> None:
    lost = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Linear(3, 3)))
    net = of(lambda net, x: net.conv(x), conv=conv(), lost=lost, spare=nn.Dropout())
    assert [(each.layer, each.evidence) for each in checked(net, no_nan=True).broken] == [("lost", "it did not run")]
    assert not checked(net, no_nan=True, allow="lost").broken
    assert not checked(net, no_nan=True, allow_unmeasured=True).broken
    chosen = [each.layer for each in checked(net, layers="lost*,spare,conv", no_nan=True).broken]
    assert chosen == ["lost", "spare"]


def test_parameters_that_functional_code_uses_have_run() -> None:
    net = seeded(lambda: nn.MultiheadAttention(8, 2, batch_first=True))
    attention = of(lambda net, x: net.attention(x, x, x)[0], attention=net)
    x = torch.rand(2, 5, 8)
    assert not checked(attention, x, no_nan=True).broken
    assert not checked(attention, x, no_nan=True, ops=False).broken
    (found,) = checked(attention, x, "attention.out_proj", no_nan=True).broken
    assert (found.layer, found.evidence) == ("attention.out_proj", "it did not run")


@pytest.mark.parametrize(
    ("allow", "words"), [((), "1 call is within the limits"), ("*", "no call is checked against a limit")]
)
def test_one_call_or_none_is_named_as_such(allow: Any, words: str) -> None:
    assert checked(conv(), allow=allow, allow_unmeasured=True, no_nan=True).verdict() == words


def test_checked_calls_are_counted_by_type() -> None:
    def forward(net: Any, x: Tensor) -> Any:
        x = F.relu(net.conv(x))
        return {"logits": net.fc(x.mean((2, 3))), "maps": x + 1}

    result = checked(of(forward, conv=conv(), fc=linear()), max_dead=0.9, no_nan=True)
    assert result.verdict() == "all 5 calls are within the limits"
    assert list(result.words()) == [
        "max-dead: 4 calls (1 Conv2d, 1 relu, 1 Linear, 1 add)",
        "no-nan: 5 calls (1 Conv2d, 1 relu, 1 mean, 1 Linear, 1 add)",
    ]
    maps = checked(of(lambda net, x: net.conv(x).max(), conv=conv()), layers="(model)", no_nan=True)
    assert maps.checked == {"no-nan": {"(model)": "Function"}}


SOUND = ["resnet18", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5"]
MORE_SOUND = ["efficientnet_b0", "mnasnet0_5", "densenet121", "alexnet"]


@pytest.mark.parametrize("name", [*SOUND, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_SOUND)])
def test_a_sound_model_passes_reasonable_limits(name: str) -> None:
    # random weights and two images: the gates of squeeze-excitation hardly move, and they are dead to the last digit
    result = checked(small_head(name), torch.rand(2, 3, 64, 64), no_nan=True, max_abs=1e4, max_dead=1.0)
    assert not result.broken
    assert len(result.checked["no-nan"]) > len(result.checked["max-dead"]) > 10


def test_the_bundled_model_passes() -> None:
    net = load_model("shapes").model
    x = torch.rand(4, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    assert not checked(net, x, no_nan=True, max_abs=1e4, max_dead=0.9, min_rank=0.5).broken


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit_b_32", "swin_t", "convnext_tiny", "fcos_resnet50_fpn", "lraspp_mobilenet_v3_large", "r3d_18"]
)
def test_sound_models_of_other_kinds_pass(name: str) -> None:
    backbone = {"weights_backbone": None} if name in ("fcos_resnet50_fpn", "lraspp_mobilenet_v3_large") else {}
    net = seeded(lambda: torchvision.models.get_model(name, weights=None, **backbone))
    shape = (1, 3, 4, 64, 64) if name == "r3d_18" else (2, 3, 224, 224)
    x: Any = torch.rand(shape)
    if name.startswith("fcos"):  # with random weights it finds nothing, and nothing cannot be checked against a limit
        assert {each.layer for each in checked(net, list(x), no_nan=True).broken} <= {
            *("(model) boxes", "(model) scores", "(model) labels")
        }
        assert not checked(net, list(x), no_nan=True, max_abs=1e4, max_dead=1.0, allow="(model)").broken
    else:
        assert not checked(net, x, no_nan=True, max_abs=1e4, max_dead=1.0).broken


def test_a_selection_with_operations_checks_them_alone() -> None:
    net = of(some_dead, conv=conv(), fc=linear())
    assert [each.layer for each in checked(net, layers="::relu", ops=True, max_dead=0.05).broken] == ["::relu"]
    assert str(Selection("::relu")) == "::relu"


def test_operations_of_an_allowed_module_are_allowed_with_it() -> None:
    net = of(lambda net, x: net.block(x).mean((2, 3)), block=through(lambda x: torch.log(-x.abs() - 1).nan_to_num(0.0)))
    assert [each.layer for each in checked(net, no_nan=True).broken] == ["block::log"]
    assert not checked(net, no_nan=True, allow="block").broken


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


@pytest.mark.parametrize(
    ("limit", "value", "layer", "evidence", "channels"),
    [
        ("max_dead", 0.2, "1", "4 of 20 channels are dead: 0, 1, 2, 3", (0, 1, 2, 3)),
        ("max_saturated", 3 / 20, "1", "15 % of values are within 1 % of a bound", None),
        ("max_abs", 100.0, "0", "from {:.6g} to 100", None),
    ],
)
def test_a_limit_is_just_met_and_just_broken(
    layers: list[LayerStatistics], limit: str, value: float, layer: str, evidence: str, channels: Any
) -> None:
    below, at = math.nextafter(value, 0), int(layer)
    assert broken(layers, **{limit: value}) == []
    (failure,) = broken_limits(layers, Limits(**{limit: below}))
    name, words, index = limit.replace("_", "-"), evidence.format(layers[0].min), (0, None)[at]
    assert failure == BrokenLimit(name, layer, index, value, below, words, channels, order=at)


def test_a_low_value_is_large_too() -> None:
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


def types_of(limits: list[str], layers: list[str]) -> dict[str, dict[str, str]]:
    return {limit: dict.fromkeys(layers, "Conv2d") for limit in limits}


def test_a_case_for_each_limit_and_layer() -> None:
    failed = BrokenLimit("max-dead", "relu", None, 0.25, 0.05, "1 of 4 channels is dead: 2", (2,))
    unknown, allowed = (BrokenLimit("no-nan", name, None, None, None, "it did not run") for name in ("fc", "spare"))
    result = LimitsResult(types_of(["max-dead", "no-nan"], ["conv", "relu"]), [failed, unknown], [allowed])
    root = ElementTree.fromstring(junit_xml("check", result, lost=2))
    suite = root[0]
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    assert suite.attrib == {"name": "check", "tests": "7", "failures": "2", "errors": "1", "skipped": "1"}
    cases = [(case.get("classname"), case.get("name"), *(part.tag for part in case)) for case in suite]
    assert cases == [
        ("images", "all could be used", "error"),
        ("max-dead", "conv"),
        ("max-dead", "relu", "failure"),
        ("no-nan", "conv"),
        ("no-nan", "relu"),
        ("no-nan", "fc", "failure"),
        ("no-nan", "spare", "skipped"),
    ]
    failure = suite[2][0]
    assert (failure.get("type"), failure.get("message")) == ("max-dead", failed.evidence)
    assert failure.text == "1 of 4 channels is dead: 2 (measured 0.25, allowed 0.05)"
    assert suite[5][0].text == suite[6][0].get("message") == "not measured: it did not run"


@pytest.mark.parametrize(
    "name", ['a<b>&"c"\x00\x1b]0;x\x07\n\ud800\uffff\u202e\u00e9', "".join(map(chr, range(32))), "\x7f\x85\ufffe\udcff"]
)
def test_any_name_makes_valid_xml(name: str) -> None:
    failed = BrokenLimit("no-nan", name, 0, float("inf"), 0, name)
    text = junit_xml(name, LimitsResult(types_of(["no-nan"], [name]), [failed]))
    assert text.decode("utf-8").startswith("<?xml version='1.0' encoding='utf-8'?>\n")
    assert text.endswith(b">\n")
    suite = ElementTree.fromstring(text)[0]
    assert suite.attrib["name"].isprintable()
    assert suite[0][0].get("message") == suite[0].get("name")
