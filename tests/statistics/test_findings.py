"""Findings: faults planted in real models are found, and nothing else; thresholds; where a fault is reported."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model

from hookscope.findings import CATALOGUE, Finding
from hookscope.statistics import LayerStatistics, RunningStatistics, StatisticsThresholds, diagnose, find_problems
from tests.nets import Function
from tests.statistics import judge

some = partial(judge.random, seed=0)
COUNT = 16  # with fewer images findings are uncertain


@cache
def pictures() -> Tensor:
    """Blurred spots and noise, no two alike, about as bright as normalised photographs."""
    blurred = nn.functional.interpolate(some(COUNT, 3, 6, 6), size=(32, 32), mode="bicubic")
    return blurred + 0.5 * judge.random(COUNT, 3, 32, 32, seed=1)


def calibrate(net: nn.Module) -> nn.Module:
    """Set the running statistics to those of the pictures, as after a training."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    with torch.no_grad():
        net.train()(pictures())
    return net.eval()


@cache
def untouched(name: str) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = get_model(name, weights=None)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
        nn.init.constant_(norm.bias, 1.0)  # most of what reaches a ReLU is above 0: none is dead by chance
    return calibrate(net) if norms else net.eval()


def measured(net: nn.Module, inputs: Tensor | None = None, **options: Any) -> RunningStatistics:
    return judge.measured(net, pictures() if inputs is None else inputs, **options)


def rows(findings: list[Finding]) -> list[tuple[str, str, tuple[int, ...] | None]]:
    return [(finding.finding, finding.layer, finding.channels) for finding in findings]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "convnext_tiny"])
def test_an_untouched_model_has_no_findings(name: str) -> None:
    totals = measured(untouched(name))
    assert len(totals.layers) > 30
    assert diagnose(totals) == []


WITH_RANK: dict[str, Any] = {"rank": True, "layers": ["features.0.0", "features.2.1", "features.3.0.block.4"]}


def test_an_untouched_model_has_no_low_rank() -> None:
    assert diagnose(measured(untouched("convnext_tiny"), **WITH_RANK), StatisticsThresholds(rank=0.06)) == []


def kill(layer: Any) -> None:
    layer.bias.data[[3, 17, 40]] = -1000.0


def scaled(factor: float) -> Callable[[Any], None]:
    def scale(layer: Any) -> None:
        for parameter in layer.parameters():
            parameter.data *= factor

    return scale


def copied(first: int, second: int) -> Callable[[Any], None]:
    def copy_channel(layer: Any) -> None:
        for values in layer.state_dict().values():
            if values.dim():
                values[second] = values[first]

    return copy_channel


def spoil(layer: Any) -> None:
    layer.weight.data[5, 1, 2, 0] = math.nan


def move_statistics(norm: Any) -> None:
    """Move mean and bias, so that the output is the same."""
    norm.bias.data += 1.5 * norm.weight.data
    norm.running_mean += 1.5 * (norm.running_var + norm.eps).sqrt()


def widen_statistics(norm: Any) -> None:
    norm.running_var = 5 * (norm.running_var + norm.eps) - norm.eps
    norm.weight.data *= 5**0.5


def flatten(layer: Any) -> None:
    """Mix 192 filters from 10."""
    weight = layer.weight.data
    weight.copy_((some(192, 10, seed=1) @ weight[:10].flatten(1)).view_as(weight))


def planted(name: str, layers: str, change: Callable[[Any], None]) -> nn.Module:
    net: Any = copy.deepcopy(untouched(name))
    if name == "convnext_tiny":  # its two later stages, 192 to 768 wide, are as the two before
        net.features = net.features[:4]
        net.classifier = nn.Sequential(nn.LayerNorm([192, 1, 1]), nn.Flatten(), nn.Linear(192, 1000))
    for layer in layers.split():
        change(net.get_submodule(layer))
    return calibrate(net) if name == "mobilenet_v2" else net


BLOCK = "features.3.0.block.0"
PLANTED: dict[str, tuple[str, str, Callable[[Any], None], str, str, tuple[int, ...] | None]] = {
    "kill": ("resnet18", "layer1.0.bn1", kill, "dead-channels", "layer1.0.relu", (3, 17, 40)),
    "kill by bias": (
        "convnext_tiny", "features.3.1.block.3", kill, "dead-channels", "features.3.1.block.4", (3, 17, 40),
    ),
    "copy": ("resnet18", "layer1.0.conv1 layer1.0.bn1", copied(4, 9), "duplicate-channels", "layer1.0.conv1", (4, 9)),
    "copy bias": ("convnext_tiny", "features.2.1", copied(7, 100), "duplicate-channels", "features.2.1", (7, 100)),
    "saturate": ("mobilenet_v2", "features.3.conv.0.1", scaled(1e4), "saturated", "features.3.conv.0.2", None),
    "spoil": ("resnet18", "layer2.0.conv2", spoil, "non-finite", "layer2.0.conv2", None),
    "explode": ("convnext_tiny", BLOCK, scaled(1e7), "exploding-activations", BLOCK, None),
    "vanish": ("convnext_tiny", BLOCK, scaled(1e-6), "vanishing-activations", BLOCK, None),
    "zero": ("convnext_tiny", BLOCK, scaled(0.0), "constant-output", BLOCK, None),
    "move": ("resnet18", "layer2.0.bn1", move_statistics, "sudden-drift", "layer2.0.bn1", None),
    "widen": ("resnet18", "layer2.0.bn1", widen_statistics, "sudden-drift", "layer2.0.bn1", None),
    "flatten": ("convnext_tiny", "features.2.1", flatten, "low-rank", "features.2.1", None),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layers", "change", "finding", "layer", "channels"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(
    name: str, layers: str, change: Any, finding: str, layer: str, channels: tuple[int, ...] | None
) -> None:
    totals = measured(planted(name, layers, change), **(WITH_RANK if finding == "low-rank" else {}))
    findings = diagnose(totals, StatisticsThresholds(rank=0.06))
    assert rows(findings) == [(finding, layer, channels)]
    case = {"vanishing-activations": "recovers", "constant-output": "bypassed"}.get(
        finding, ""
    )  # ConvNeXt has shortcuts
    assert findings[0].meaning == CATALOGUE[finding].text(case)
    assert findings[0].severity == ("warning" if "drift" in finding else CATALOGUE[finding].severity_of(case))


def test_two_faults_are_two_findings_and_the_first_nan_has_its_position() -> None:
    net = planted("resnet18", "layer1.0.bn1", kill)
    spoil(net.get_submodule("layer2.0.conv2"))
    totals = measured(net)
    findings = diagnose(totals)
    assert rows(findings) == [("non-finite", "layer2.0.conv2", None), ("dead-channels", "layer1.0.relu", (3, 17, 40))]
    layers = [layer for layer in totals.statistics() if layer.nan]
    first, place = layers[0], layers[0].nonfinite_at
    assert place is not None and place.channel == 5
    assert findings[0].numbers == {"nan": first.nan, "inf": 0, "values": COUNT * 128 * 4 * 4, "layers": len(layers)}
    where = "channel 5 at row {}, column {} of image {}".format(*place.position, place.image)
    first_text = f"{first.nan} NaN of {first.values:,} values, the first in {where}"
    assert findings[0].evidence == f"{first_text}; {len(layers) - 1} later calls have NaN or Inf too"


def plain(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


def chain_of(scale: float) -> nn.Sequential:
    torch.manual_seed(0)
    net = plain(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1), nn.Tanh())
    for module in (net[0], net[2], net[3]):
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    net[2].weight.data *= scale
    return net


@pytest.mark.parametrize(
    ("scale", "name", "calls", "text"),
    [
        (1e9, "exploding-activations", 2, "; also affected: 1 call after it, up to 3"),
        (1e-9, "vanishing-activations", 3, "; also affected: 2 calls after it, up to 4"),
    ],
)
def test_what_later_calls_inherit_is_one_finding(scale: float, name: str, calls: int, text: str) -> None:
    findings = diagnose(measured(chain_of(scale), some(20, 3, 8, 8)))
    (finding,) = [finding for finding in findings if finding.finding == name]
    assert (finding.layer, finding.numbers["layers"]) == ("2", calls) and finding.evidence.endswith(text)


def test_a_quiet_layer_ends_a_chain_and_a_gate_does_not() -> None:
    gate = Function(lambda net, x: x * net.sigmoid(1e-12 * x), sigmoid=nn.Sigmoid())
    quiet, loud = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)
    quiet.weight.data *= 1e-12
    loud.weight.data *= 1e9
    for between, layers in ((gate, ["2"]), (quiet, ["2", "4"])):
        findings = diagnose(measured(plain(*chain_of(1e9)[:3], between, loud), some(20, 3, 8, 8)))
        assert [finding.layer for finding in findings if finding.finding == "exploding-activations"] == layers


def test_a_layer_of_zeros_is_reported_and_later_layers_are_not() -> None:
    net: Any = plain(
        nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.GELU()
    )
    net[2].weight.data.zero_()
    net[2].bias.data.fill_(0.5)
    (finding,) = diagnose(measured(net, some(20, 3, 9, 9)))
    assert (finding.finding, finding.layer) == ("constant-output", "2")
    assert finding.evidence == "all 4 channels have the value 0.5 everywhere; also affected: 3 calls after it, up to 5"


def test_equal_images_are_one_finding_and_one_image_is_none() -> None:
    net = untouched("convnext_tiny")
    layers = ["features.0.0", "features.1.*.block.0"]
    (finding,) = diagnose(measured(net, pictures()[:1].expand(20, -1, -1, -1), layers=layers))
    assert (finding.finding, finding.layer, finding.numbers["layers"]) == ("constant-output", "features.0.0", 4)
    assert (
        finding.evidence
        == "the output is the same for all 20 images; also affected: 3 calls after it, up to features.1.2.block.0"
    )
    assert diagnose(measured(net, pictures()[:1], layers=layers)) == []


def one_layer(*dead: int) -> Any:
    """A convolution and a ReLU that is 0 in these of its 6 channels."""
    net: Any = plain(nn.Conv2d(3, 6, 1), nn.ReLU())
    net[0].bias.data[list(dead)] = -99.0
    return net


def dead_net() -> nn.Sequential:
    torch.manual_seed(2)
    net: Any = plain(
        nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.ReLU()
    )
    for module in (net[0], net[2], net[4]):
        module.bias.data.fill_(1.0)
    for module in (net[2], net[4]):
        module.weight.data.abs_()
    net[0].bias.data[[1, 4]] = net[4].bias.data[4] = -99.0
    return net


def test_dead_channels_are_named_where_they_die_and_not_behind_a_depthwise_convolution() -> None:
    first, second = diagnose(measured(dead_net(), some(20, 3, 9, 9)))
    assert rows([first, second]) == [("dead-channels", "1", (1, 4)), ("dead-channels", "5", (4,))]
    assert first.evidence == "2 of 6 channels never leave 0: 1, 4"
    assert second.evidence == "1 of 6 channels never leaves 0: 4"


def test_an_activation_function_inherits_from_no_other_one() -> None:
    findings = diagnose(measured(dead_net(), some(20, 3, 9, 9), types=["ReLU"]))
    assert rows(findings) == [("dead-channels", at, (1, 4)) for at in "13"] + [("dead-channels", "5", (4,))]


def test_channels_that_were_constant_before_are_counted() -> None:
    net = one_layer(5)
    net[0].weight.data[2] = 0.0
    convolution, function = diagnose(measured(net, some(20, 3, 9, 9)))
    assert (convolution.layer, convolution.channels) == ("0", (2,))
    assert function.evidence == "1 of 6 channels never leaves 0: 5 (1 more was constant before it, in 0)"


def test_channels_that_stay_at_a_bound_are_saturated_and_not_dead() -> None:
    net = plain(nn.Hardsigmoid())
    inputs = some(20, 4, 5, 5).abs() * 100
    inputs[:, 1] = -5.0
    inputs[:, 2:] = inputs[:, 2:] / 1e3
    totals = measured(net, inputs)
    (finding,) = diagnose(totals, StatisticsThresholds(saturated=0.4))
    assert (finding.finding, finding.numbers["stuck"]) == ("saturated", 1)
    assert finding.evidence.endswith("of values within 1 % of a bound; 1 of 4 channels never leaves a bound")
    assert rows(diagnose(totals, StatisticsThresholds(saturated=0.9))) == [("dead-channels", "0", (1,))]


def test_nan_is_no_low_rank_and_no_drift() -> None:
    net = planted("resnet18", "conv1", scaled(math.nan))
    findings = diagnose(measured(net, rank=True, layers=["conv1", "bn1", "relu", "layer1.*", "layer4.1.bn2"]))
    assert rows(findings) == [("non-finite", "conv1", None)]
    assert "the first in channel 0 at row 0, column 0 of image 0" in findings[0].evidence


@pytest.mark.parametrize(("seed", "channels"), [(0, 8), (1, 8), (2, 64), (3, 64), (17, 64)])
def test_a_rank_that_cannot_be_higher_is_not_low(seed: int, channels: int) -> None:
    """One direction is found whatever the weights round to: these gave ranks up to 1 + 4e-6."""
    torch.manual_seed(seed)
    vectors = plain(nn.Conv2d(3, channels, 1))
    assert diagnose(measured(vectors, some(2, 3, 1, 1), rank=True)) == []
    same = some(20, 1, 1, 1, seed=seed) * torch.ones(1, 3, 1, 1)
    totals = measured(vectors, same, rank=True)
    assert [finding.finding for finding in diagnose(totals)] == ["duplicate-channels", "low-rank"]
    assert [finding.finding for finding in diagnose(totals, StatisticsThresholds(rank=0.0))] == ["duplicate-channels"]


def quiet(layer: LayerStatistics, **thresholds: float) -> bool:
    """Whether there is no finding by these thresholds alone."""
    loose: dict[str, Any] = {"saturated": 1.0, "dead": 1.0, "smallest": 0.0, "largest": math.inf, "rank": 0.0}
    layers = [replace(layer, duplicate_channels=())]
    return not find_problems(layers, [], 20, StatisticsThresholds(**{**loose, **thresholds}))


def below(value: float) -> float:
    return math.nextafter(value, -math.inf)


def test_each_threshold_is_met_and_just_missed() -> None:
    net = plain(nn.Conv2d(3, 100, 1), nn.ReLU6())
    net[0].bias.data[:29] = -99.0  # type: ignore[union-attr,operator]
    net[0].weight.data *= 3
    layer = measured(net, some(20, 3, 9, 9), rank=True).statistics()[1]
    assert layer.rms and layer.max and layer.rank and layer.saturated
    assert (len(layer.dead_channels), layer.highest_rank) == (29, 100)
    assert quiet(layer, dead=0.29)  # which as a binary fraction times 100 is less than 29
    assert not quiet(layer, dead=below(0.29))
    assert quiet(layer, saturated=layer.saturated)
    assert not quiet(layer, saturated=below(layer.saturated))
    assert quiet(layer, smallest=layer.rms)
    assert not quiet(layer, smallest=math.nextafter(layer.rms, math.inf))
    assert quiet(layer, largest=layer.max)
    assert not quiet(layer, largest=below(layer.max))
    assert quiet(layer, rank=layer.rank / 100 - 1e-12)
    assert not quiet(layer, rank=layer.rank / 100 + 1e-12)


def test_the_thresholds_of_drift() -> None:
    norm: Any = nn.BatchNorm2d(3).eval()
    norm.running_mean.fill_(1.0)
    (drift,) = measured(plain(norm), some(20, 3, 9, 9), layers="all", types=["BatchNorm2d"]).drifts()
    shift = float(torch.tensor(drift.shift).abs().median())
    assert 0.9 < shift < 1.1
    assert find_problems([], [drift], 20, StatisticsThresholds(shift=shift)) == []
    (finding,) = find_problems([], [drift], 20, StatisticsThresholds(shift=below(shift)))
    assert (finding.finding, finding.layer) == ("batchnorm-drift", "0")
    ratio = float(finding.numbers["ratio"] or 0)
    assert find_problems([], [drift], 20, StatisticsThresholds(shift=9, ratio=ratio)) == []
    assert len(find_problems([], [drift], 20, StatisticsThresholds(shift=9, ratio=below(ratio)))) == 1


def test_a_running_variance_of_0_is_named_with_its_channel() -> None:
    net = plain(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    net.train()(some(200, 3, 9, 9))
    net[1].momentum = net[3].momentum = None
    net(some(200, 3, 9, 9))
    net[3].running_var[5] = 0.0  # type: ignore[index]
    [finding] = diagnose(measured(net.eval(), some(20, 3, 9, 9)))
    assert (finding.layer, finding.channels, finding.severity) == ("3", (5,), "warning")
    assert finding.meaning == CATALOGUE["sudden-drift"].text("lost")


def test_statistics_that_were_never_updated_do_not_drift() -> None:
    net = plain(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    assert diagnose(measured(net.eval(), 100 * some(20, 3, 9, 9))) == []
    cause, consequence = diagnose(measured(net.eval(), 1e6 * some(20, 3, 9, 9)))
    assert (cause.finding, cause.layer, cause.severity) == ("never-updated", "1", "note")
    assert (consequence.finding, consequence.severity) == ("exploding-activations", "note")
    nn.init.normal_(net[1].bias)  # type: ignore[arg-type]
    (finding,) = diagnose(measured(net, some(20, 3, 9, 9)))
    assert (finding.severity, finding.meaning) == ("warning", CATALOGUE["never-updated"].text("trained"))


def test_the_first_of_some_batch_norms_that_were_never_updated_is_the_place() -> None:
    net = plain(nn.Conv2d(3, 3, 1), *(nn.BatchNorm2d(3) for _ in range(4)))
    for norm in (net[1], net[4]):
        norm(some(20, 3, 9, 9))
    nn.init.normal_(net[2].bias)  # type: ignore[arg-type]
    found = diagnose(measured(net.eval(), some(20, 3, 9, 9)))
    assert [(each.finding, each.layer) for each in found][:1] == [("never-updated", "2")]


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.ReLU()])
def test_channels_pushed_far_below_zero_are_dead_after_smooth_activations_too(activation: nn.Module) -> None:
    values = some(9, 4, 5, 5)
    values[:, 1] -= 60
    values[:, 3] *= 1e-3
    assert measured(plain(activation), values).statistics()[0].dead_channels == (1,)


def test_a_wrong_input_range_is_one_finding_at_the_first_batch_norm() -> None:
    findings = diagnose(measured(untouched("resnet18"), 10 * pictures()))
    first = next(finding for finding in findings if "drift" in finding.finding)
    assert first.layer == "bn1" and int(first.numbers["layers"] or 0) > 10
    assert first.evidence.startswith("in the median channel the mean is off by ")


@pytest.mark.parametrize(("correlation", "same"), [(0.99, True), (0.9999, False)])
def test_the_threshold_of_duplicates(correlation: float, same: bool) -> None:
    net = plain(nn.Conv2d(3, 3, 1, bias=False))
    weight = torch.tensor([[1.0, 0, 0], [1.0, 0.05, 0], [0, 0, 1.0]])  # correlation 0.9988
    net[0].weight.data = weight[:, :, None, None]
    findings = diagnose(measured(net, some(40, 3, 9, 9)), StatisticsThresholds(correlation=correlation))
    assert rows(findings) == ([("duplicate-channels", "0", (0, 1))] if same else [])
    assert not same or findings[0].groups == ((0, 1),)


@pytest.mark.parametrize(("images", "words"), [(1, "1 image"), (15, "15 images"), (16, "")])
def test_dead_channels_on_few_images_are_only_counted(images: int, words: str) -> None:
    totals = measured(one_layer(5), some(images, 3, 9, 9))
    (finding,) = diagnose(totals)
    assert (finding.finding, finding.severity) == ("few-images" if words else "dead-channels", "note")
    assert totals.statistics()[1].dead_channels == (5,)
    if words:
        assert finding.evidence == f"1 channel of 1 call is constant on {words}"
        assert finding.layer == ""


def test_few_images_or_no_layers_alone_are_no_finding() -> None:
    assert diagnose(measured(one_layer(), some(1, 3, 9, 9))) == []
    assert find_problems([], [], 0, StatisticsThresholds()) == []
