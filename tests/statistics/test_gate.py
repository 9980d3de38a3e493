"""Gates: no broken model passes, whatever hides the fault, and sound models do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from hookscope.hooks import Selection
from hookscope.models import load_model
from hookscope.statistics import Limits, LimitsResult, StatisticsCollector, check_limits
from tests.helpers import seeded, small_head
from tests.nets import Function

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
    "whole numbers alone have no rank": (of(lambda x: (x > 2).long()), {"max_saturated": 0.5}),
}
# fmt: on


@pytest.mark.parametrize(("net", "limits"), BROKEN.values(), ids=BROKEN)
def test_a_broken_model_never_passes(net: nn.Module, limits: dict[str, Any]) -> None:
    result = checked(net, **limits)
    assert result.broken, list(result.words())
    assert all(each.evidence for each in result.broken)
    assert "within the limits" not in result.verdict()


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


@pytest.mark.parametrize("limits", [{"max_dead": 0.5}, {"min_rank": 1}, {"no_nan": True}])
def test_a_model_that_puts_out_no_values_never_passes(limits: dict[str, Any]) -> None:
    (found,) = checked(through(lambda y: y[:0]), **limits).broken
    assert (found.layer, found.evidence, found.unmeasured) == ("(model)", "it returned no values", True)


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
    "name",
    ["vit_b_32", "swin_t", "convnext_tiny", "fcos_resnet50_fpn", "lraspp_mobilenet_v3_large", "r3d_18"],
)
def test_sound_models_of_other_kinds_pass(name: str) -> None:
    backbone = {"weights_backbone": None} if name in ("fcos_resnet50_fpn", "lraspp_mobilenet_v3_large") else {}
    net = seeded(lambda: torchvision.models.get_model(name, weights=None, **backbone))
    shape = (1, 3, 4, 64, 64) if name == "r3d_18" else (2, 3, 224, 224)
    x: Any = torch.rand(shape)
    if name.startswith("fcos"):  # with random weights it finds nothing, and nothing cannot be checked against a limit
        assert {each.layer for each in checked(net, list(x), no_nan=True).broken} <= {
            *("(model) boxes", "(model) scores", "(model) labels"),
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
