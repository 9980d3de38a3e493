"""Planted faults are found, each once and with its layer; sound nets are not accused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.findings import CATALOGUE
from hookscope.findings.finding import Finding
from hookscope.gradients.anomaly import first_anomaly
from hookscope.gradients.autograd_flow import gradient_stops
from hookscope.gradients.backward_pass import layer_gradients
from hookscope.gradients.findings import (
    GradientThresholds,
    anything_unreached,
    diagnose_gradients,
    layer_finding_names,
    parameter_finding_names,
)
from hookscope.scores.objective import Loss
from tests.nets import Function

SCORE = Loss("score", "1")


def deep(function: Callable[[], nn.Module], layers: int = 20) -> nn.Sequential:
    body = [part for at in range(layers) for part in (nn.Conv2d(8 if at else 3, 8, 3, padding=1), function())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def picture() -> Tensor:
    return torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def findings_of(net: nn.Module, loss: Loss = SCORE, **more: Any) -> list[Finding]:
    report = layer_gradients(net, picture(), loss)
    stops = gradient_stops(net, picture(), loss) if anything_unreached(report) else ()
    return diagnose_gradients(report, stops, **more)


@pytest.mark.parametrize("loss", ["score", "cross-entropy", "mse"])
def test_a_sound_net_has_no_finding(loss: str) -> None:
    assert findings_of(deep(nn.ReLU, 6), Loss(loss, "1")) == []


def test_twenty_sigmoids_vanish_in_one_chain() -> None:
    net = deep(nn.Sigmoid)
    (found,) = findings_of(net)
    assert found.finding == "vanishing-gradient"
    report = layer_gradients(net, picture(), SCORE)
    small = [p for p in report.parameters if len(p.shape) == 4 and p.ratio is not None and p.ratio < 1e-7]
    assert 5 <= len(small) < 20
    assert (found.layer, found.numbers["weights"], found.numbers["of"]) == (small[-1].layer, len(small), 21)
    least = min(small, key=lambda p: p.ratio or 0)
    begin = f"the gradient of '{small[-1].name}' has norm {small[-1].gradient.norm:.2g}, {small[-1].ratio:.2g} of the"
    assert found.evidence == (
        f"{begin} weight's norm; also affected: all {len(small) - 1} weights nearer the input, least in '0.weight':"
        f" {least.ratio:.2g}"
    )
    assert (found.numbers["worst"], found.numbers["worst_ratio"]) == ("0.weight", least.ratio)
    assert "The model's Sigmoid layers shrink a gradient" in found.meaning
    # every link is marked, as a layer and as a parameter, and nothing else
    names = {p.name for p in report.parameters if parameter_finding_names(p) == ("vanishing-gradient",)}
    assert names == {p.name for p in small}
    marked = [layer.call.name for layer in report.layers if layer_finding_names(layer, report.parameters)]
    assert marked == [p.layer for p in small]


def test_advice_blames_functions_that_the_model_has() -> None:
    (found,) = findings_of(deep(nn.Tanh), thresholds=GradientThresholds(vanishing=10.0))
    assert "The model's Tanh layers" in found.meaning
    (found,) = findings_of(deep(nn.ReLU), thresholds=GradientThresholds(vanishing=10.0))
    assert "layers" not in found.meaning and found.meaning.endswith(".")


def test_a_chain_in_the_middle_says_how_many_of_those_before_it() -> None:
    net = deep(nn.ReLU, 4)
    for at in (2, 4):
        net[at].weight.data *= 1e9
        net[at + 1] = Function(lambda x: (x * 1e-9).relu())
    (found,) = findings_of(net)
    assert (found.layer, found.numbers["weights"]) == ("4", 2)
    assert "; also affected: 1 of the 2 weights nearer the input, least in '" in found.evidence


def test_a_dead_relu_stops_all_before_it() -> None:
    net = deep(nn.ReLU, 5)
    net[4].bias.data.fill_(-100)
    (found,) = findings_of(net)
    assert (found.finding, found.layer) == ("vanishing-gradient", "6")
    zero = "the gradient of '6.weight' is 0 everywhere, because the input is 0"
    assert found.evidence == f"{zero}; also affected: all 3 weights nearer the input"
    assert found.meaning == CATALOGUE["vanishing-gradient"].text("zero up to the input") and found.severity == "error"


def test_weights_scaled_up_explode_in_one_chain() -> None:
    net = deep(nn.ReLU, 10)
    for parameter in net.parameters():
        parameter.data *= 12
    (found,) = findings_of(net)
    assert (found.finding, found.layer, found.numbers["weights"]) == ("exploding-gradient", "22", 11)
    report = layer_gradients(net, picture(), SCORE)
    worst = max((p for p in report.parameters if len(p.shape) > 1), key=lambda p: p.ratio or 0)
    assert found.evidence.endswith(
        f"also affected: all 10 weights nearer the input, most in '{worst.name}': {worst.ratio:.2g}"
    )
    assert " times the weight's norm; " in found.evidence
    assert all(layer_finding_names(layer, report.parameters) == (found.finding,) for layer in report.layers)
    assert len(report.layers) == 11


def test_nearer_the_input_is_by_execution() -> None:
    net = Function(lambda net, x: net.head(net.stem(x).mean((2, 3))))
    net.head, net.stem = nn.Linear(4, 2), nn.Conv2d(3, 4, 3)
    (found,) = findings_of(net, thresholds=GradientThresholds(vanishing=1e2))
    assert found.layer == "head" and "; also affected: the weight nearer the input, least in '" in found.evidence


def test_a_loss_of_zero_is_named_and_scales_near_zero_are_no_weights() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    net[1].bias.data = torch.tensor([0.0, 500.0])
    report = layer_gradients(net, picture(), Loss("cross-entropy", "1"), "all", ("all",))
    (found,) = diagnose_gradients(report)
    assert found.evidence.startswith("the loss is 0: the gradient of '1.weight' is 0 everywhere")
    net = Function(lambda net, x: (net.conv(x) * (1 + net.scale)).mean((2, 3)))
    net.conv, net.scale = nn.Conv2d(3, 2, 1), nn.Parameter(torch.full((2, 1, 1), 1e-6))
    report = layer_gradients(net, picture(), SCORE)
    (scale,) = [p for p in report.parameters if p.name == "scale"]
    assert scale.ratio is not None and scale.ratio > 1e3
    assert diagnose_gradients(report) == []


def test_nan_is_one_finding_at_the_gradient_nearest_to_the_loss() -> None:
    net = deep(nn.ReLU, 4)
    net[5] = Function(lambda x: (x - x).sqrt() * 0 + x)
    (found,) = findings_of(net)
    assert (found.finding, found.layer) == ("exploding-gradient", "4")
    assert found.evidence == "8 NaN in the gradient of '4.bias', and in 5 parameters before it"
    assert "detect_anomaly" in found.meaning
    (found,) = findings_of(net, looked_for_anomaly=True)
    assert "detect_anomaly" not in found.meaning
    (found,) = findings_of(net, anomaly=first_anomaly(net, picture()))
    assert (found.finding, found.layer) == ("exploding-gradient", "5")
    assert re.fullmatch(r"SqrtBackward0 of sqrt at \S+:\d+ makes the first NaN of the backward pass", found.evidence)
    assert found.numbers["operation"] == found.numbers["nan_operation"] == "SqrtBackward0"
    assert "detect_anomaly" not in found.meaning


def inf_of_both_signs(x: Tensor, bias: Tensor) -> Tensor:
    signs = torch.ones_like(x)
    signs[..., ::2] = -1
    return (x * 0 + bias).sqrt() * signs + x


def test_the_origin_of_inf_stands_before_that_of_nan() -> None:
    net = deep(nn.ReLU, 4)
    bias = nn.Parameter(torch.zeros(1, 8, 1, 1))  # the sum of its gradient over an image is NaN
    net[5] = Function(lambda x: inf_of_both_signs(x, bias))
    net[5].bias = bias
    (found,) = findings_of(net, anomaly=first_anomaly(net, picture()))
    assert re.fullmatch(
        r"SqrtBackward0 of sqrt at \S+ makes the first Inf of the backward pass; AddBackward0 of add at \S+ turns it"
        r" into NaN",
        found.evidence,
    )
    assert (found.layer, found.numbers["operation"], found.numbers["kind"]) == ("5", "SqrtBackward0", "Inf")
    assert found.numbers["nan_operation"] == "AddBackward0"
    net = deep(nn.ReLU, 4)
    net[5] = Function(lambda x: (x - x).sqrt() + x)
    anomaly = first_anomaly(net, picture())
    assert anomaly is not None and (anomaly.operation, anomaly.kind, anomaly.layer) == ("SqrtBackward0", "Inf", "5")


def test_nan_in_the_forward_pass_is_found_at_its_first_activation() -> None:
    net = deep(nn.ReLU, 4)
    net[2].weight.data[0, 0] = float("nan")
    (found,) = findings_of(net)
    assert (found.finding, found.layer, found.numbers["phase"]) == ("exploding-gradient", "2", "forward")
    assert found.evidence == "64 values of its activation are NaN or Inf already in the forward pass"
    (found,) = findings_of(net, anomaly=first_anomaly(net, picture()))
    assert (found.layer, found.evidence) == ("2", "parameter '2.weight' holds NaN, which conv2d uses")


def branches() -> nn.Module:
    net = Function(
        lambda net, x: (y := net.bn(net.stem(x)).detach(), net.side(y), net.head(net.last(y).mean((2, 3))))[-1]
    )
    net.stem, net.bn, net.side = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
    net.idle, net.last, net.head = nn.Linear(2, 2), nn.Conv2d(4, 4, 3), nn.Linear(4, 2)
    return net.eval()


def test_no_gradient_says_where_and_why() -> None:
    found = findings_of(branches())
    assert [(f.layer, f.numbers["reason"], f.numbers["parameters"]) for f in found] == [
        ("bn", "detached", 4),
        ("side", "unused", 2),
        ("idle", "unused", 2),
    ]
    assert {f.finding for f in found} == {"no-gradient"}
    assert "detached between 'bn' and 'side' by detach at test_findings.py:" in found[0].evidence
    assert found[0].evidence.endswith("; 2 calls and 4 parameters, from 'stem' on, get none")
    assert len({f.meaning for f in found}) == 2


def test_frozen_layers_are_grouped_up_to_all_and_let_gradients_through() -> None:
    net = deep(nn.ReLU, 4)
    net[:4].requires_grad_(False)
    net[6].bias.requires_grad_(False)
    one, other = findings_of(net)
    assert one.evidence == "2 layers from '0' to '2' are frozen (requires_grad is False): 4 parameters"
    assert other.evidence == "'6.bias' is frozen (requires_grad is False): 1 parameter"
    assert [f.numbers["reason"] for f in (one, other)] == ["frozen", "frozen"]
    report = layer_gradients(net, picture(), SCORE)
    assert all(layer.grad_output and layer.grad_output.norm > 0 for layer in report.layers)
    assert not anything_unreached(report)
    (found,) = findings_of(deep(nn.ReLU, 3).requires_grad_(False))
    assert found.evidence.startswith("all 4 layers from '0' to '8' are frozen")


def backbone() -> nn.Module:
    net = Function(lambda net, x: net.head(torch.no_grad()(lambda x: net.two(net.one(x)))(x).mean((2, 3))))
    net.one, net.two, net.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 2)
    net.one.requires_grad_(False)
    net.two.requires_grad_(False)
    return net


def test_frozen_layers_without_a_graph_have_both_findings() -> None:
    cut, frozen = findings_of(backbone())
    assert cut.evidence.endswith("runs under no_grad; 2 calls, from 'one' on, get none")
    assert cut.evidence.startswith("no graph inside 'one': conv2d at test_findings.py:")
    assert frozen.evidence == (
        "2 layers from 'one' to 'two' are frozen (requires_grad is False): 4 parameters, and no gradient reaches them"
    )
    assert "requires_grad=True alone would not help" in frozen.meaning and frozen.numbers["cut_off"] == 2
    # also where the layers asked for do not show it, and where nobody looked for stops
    report = layer_gradients(backbone(), picture(), "mse", "head")
    assert anything_unreached(report)
    stops = gradient_stops(backbone(), picture(), "mse")
    assert diagnose_gradients(report, stops)[-1].numbers["cut_off"] == 2
    assert diagnose_gradients(layer_gradients(backbone(), picture()))[-1].numbers["cut_off"] == 2


def test_without_stops_an_unreached_parameter_is_still_found() -> None:
    net = deep(nn.ReLU, 1)
    net[0].idle = nn.Linear(2, 2)
    (found,) = diagnose_gradients(layer_gradients(net, picture(), SCORE))
    assert (found.finding, found.layer) == ("no-gradient", "0.idle")
    assert found.evidence == "no gradient arrives at 0.idle.weight, 0.idle.bias"


def test_many_places_are_one_finding() -> None:
    net = deep(nn.ReLU, 10)
    report = layer_gradients(net, picture(), SCORE)
    ratios = [p.ratio for p in report.parameters if p.ratio is not None and len(p.shape) == 4]
    (found,) = diagnose_gradients(report, thresholds=GradientThresholds(vanishing=max(ratios) * 0.999))
    assert found.finding == "vanishing-gradient"
    assert found.numbers["weights"] == sum(ratio < max(ratios) * 0.999 for ratio in ratios)


def test_names_of_rows() -> None:
    net = deep(nn.ReLU, 4)
    net[2].bias.data.fill_(-100)
    net[4].bias.requires_grad_(False)
    report = layer_gradients(net, picture(), SCORE)
    assert [layer_finding_names(layer) for layer in report.layers] == [("vanishing-gradient",)] * 2 + [()] * 3
    with_parameters = [layer_finding_names(layer, report.parameters) for layer in report.layers]
    assert with_parameters == [*[("vanishing-gradient",)] * 2, ("vanishing-gradient", "no-gradient"), (), ()]
    names = {p.name: parameter_finding_names(p) for p in report.parameters}
    assert names["0.weight"] == names["2.weight"] == ("vanishing-gradient",)
    assert names["4.bias"] == ("no-gradient",) and names["2.bias"] == names["6.weight"] == ()


@pytest.mark.parametrize(("vanishing", "exploding"), [(2.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 1.0)])
def test_thresholds_that_leave_nothing(vanishing: float, exploding: float) -> None:
    with pytest.raises(UsageError, match="the first must be smaller"):
        GradientThresholds(vanishing, exploding)
