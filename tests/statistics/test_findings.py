"""Findings: faults planted in real models are found, and nothing else; thresholds; where a fault is told."""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torchvision.models import get_model

from hookscope.cli import commands
from hookscope.findings import CATALOGUE, GRAVITY, Finding, FindingKind, Threshold
from hookscope.statistics.collector import StatisticsCollector
from hookscope.statistics.findings import RULES, StatisticsThresholds, diagnose, find_problems, layer_rule
from hookscope.statistics.layer_statistics import LayerStatistics
from hookscope.statistics.totals import RunningStatistics


@cache
def pictures(count: int = 32, side: int = 32) -> Tensor:
    """Blurred spots and noise, no two alike, about as bright as normalised photographs."""
    draw = torch.Generator().manual_seed(0)
    spots = torch.randn(count, 3, 6, 6, generator=draw)
    blurred = nn.functional.interpolate(spots, size=(side, side), mode="bicubic")
    return blurred + 0.5 * torch.randn(count, 3, side, side, generator=draw)


def calibrate(net: nn.Module) -> nn.Module:
    """Running statistics of the very pictures, as after a training."""
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
    with StatisticsCollector(net, **options) as collector, torch.no_grad():
        for batch in (pictures() if inputs is None else inputs).split(16):
            net(batch)
    return collector.totals


def told(found: list[Finding]) -> list[tuple[str, str, tuple[int, ...] | None]]:
    return [(one.finding, one.layer, one.channels) for one in found]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "convnext_tiny"])
def test_an_untouched_model_has_no_findings(name: str) -> None:
    totals = measured(untouched(name))
    assert len(totals.layers) > 30
    assert diagnose(totals) == []


WITH_RANK: dict[str, Any] = {"rank": True, "layers": ["features.0.0", "features.2.1", "features.3.*.block.4"]}


def test_an_untouched_model_has_no_low_rank() -> None:
    assert diagnose(measured(untouched("convnext_tiny"), **WITH_RANK), StatisticsThresholds(rank=0.06)) == []


def kill_behind_batch_norm(net: Any) -> None:
    net.layer1[0].bn1.bias.data[[3, 17, 40]] = -1000.0


def kill_by_bias(net: Any) -> None:
    net.features[3][1].block[3].bias.data[[3, 17, 40]] = -1000.0


def copy_a_filter(net: Any) -> None:
    convolution, norm = net.layer1[0].conv1, net.layer1[0].bn1
    for values in (convolution.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var):
        values.data[9] = values.data[4]


def copy_a_biased_filter(net: Any) -> None:
    convolution = net.features[2][1]
    convolution.weight.data[100] = convolution.weight.data[7]
    convolution.bias.data[100] = convolution.bias.data[7]


def saturate(net: Any) -> None:
    net.features[3].conv[0][1].weight.data *= 1e4
    net.features[3].conv[0][1].bias.data *= 1e4
    calibrate(net)


def spoil_a_weight(net: Any) -> None:
    net.layer2[0].conv2.weight.data[5, 1, 2, 0] = math.nan


def explode(net: Any) -> None:
    net.features[3][0].block[0].weight.data *= 1e7


def vanish(net: Any) -> None:
    net.features[3][0].block[0].weight.data *= 1e-5
    net.features[3][0].block[0].bias.data *= 1e-5


def zero_a_layer(net: Any) -> None:
    net.features[3][0].block[0].weight.data.zero_()


def move_statistics(net: Any) -> None:
    """So that the output stays what it was."""
    norm = net.layer2[0].bn1
    spread = (norm.running_var + norm.eps).sqrt()
    norm.bias.data += 1.5 * norm.weight.data
    norm.running_mean += 1.5 * spread


def widen_statistics(net: Any) -> None:
    norm = net.layer2[0].bn1
    norm.running_var = 5 * (norm.running_var + norm.eps) - norm.eps
    norm.weight.data *= 5**0.5


def flatten(net: Any) -> None:
    """192 filters from 10."""
    weight = net.features[2][1].weight.data
    draw = torch.Generator().manual_seed(1)
    weight.copy_((torch.randn(192, 10, generator=draw) @ weight[:10].flatten(1)).view_as(weight))


PLANTED: list[tuple[str, Callable[[Any], None], str, str, tuple[int, ...] | None]] = [
    ("resnet18", kill_behind_batch_norm, "dead-channels", "layer1.0.relu", (3, 17, 40)),
    ("convnext_tiny", kill_by_bias, "dead-channels", "features.3.1.block.4", (3, 17, 40)),
    ("resnet18", copy_a_filter, "duplicate-channels", "layer1.0.conv1", (4, 9)),
    ("convnext_tiny", copy_a_biased_filter, "duplicate-channels", "features.2.1", (7, 100)),
    ("mobilenet_v2", saturate, "saturated", "features.3.conv.0.2", None),
    ("resnet18", spoil_a_weight, "non-finite", "layer2.0.conv2", None),
    ("convnext_tiny", explode, "exploding-activations", "features.3.0.block.0", None),
    ("convnext_tiny", vanish, "vanishing-activations", "features.3.0.block.0", None),
    ("convnext_tiny", zero_a_layer, "constant-output", "features.3.0.block.0", None),
    ("resnet18", move_statistics, "batchnorm-drift", "layer2.0.bn1", None),
    ("resnet18", widen_statistics, "batchnorm-drift", "layer2.0.bn1", None),
    ("convnext_tiny", flatten, "low-rank", "features.2.1", None),
]


@pytest.mark.parametrize(
    ("name", "plant", "finding", "layer", "channels"), PLANTED, ids=[one[1].__name__ for one in PLANTED]
)
def test_a_planted_fault_is_found_and_nothing_else(
    name: str, plant: Callable[[Any], None], finding: str, layer: str, channels: tuple[int, ...] | None
) -> None:
    net = copy.deepcopy(untouched(name))
    plant(net)
    totals = measured(net, **(WITH_RANK if finding == "low-rank" else {}))
    found = diagnose(totals, StatisticsThresholds(rank=0.06))
    assert told(found) == [(finding, layer, channels)]
    assert found[0].meaning == CATALOGUE[finding].text()


def test_two_faults_are_two_findings() -> None:
    net = copy.deepcopy(untouched("resnet18"))
    kill_behind_batch_norm(net)
    spoil_a_weight(net)
    assert told(diagnose(measured(net))) == [
        ("non-finite", "layer2.0.conv2", None),
        ("dead-channels", "layer1.0.relu", (3, 17, 40)),
    ]


def test_the_first_nan_is_told_with_its_place() -> None:
    net = copy.deepcopy(untouched("resnet18"))
    spoil_a_weight(net)
    totals = measured(net)
    (found,) = diagnose(totals)
    bad = [layer for layer in totals.statistics() if layer.nan]
    first, place = bad[0], bad[0].nonfinite_at
    assert place is not None
    assert (found.layer, place.channel) == ("layer2.0.conv2", 5)
    assert found.numbers == {"nan": first.nan, "inf": 0, "values": 32 * 128 * 4 * 4, "layers": len(bad)}
    where = "channel 5 at row {}, column {} of {}".format(*place.position, place.image)
    text = f"{first.nan} NaN of 65,536 values, the first in {where}; {len(bad) - 1} later calls have some too"
    assert found.evidence == text


def plain(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chain_of(scale: float) -> nn.Sequential:
    torch.manual_seed(0)
    net = plain(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1), nn.Tanh())
    for module in (net[0], net[2], net[3]):
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    net[2].weight.data *= scale
    return net


@pytest.mark.parametrize(("scale", "name"), [(1e9, "exploding-activations"), (1e-9, "vanishing-activations")])
def test_what_goes_on_from_a_layer_is_told_once(scale: float, name: str) -> None:
    net = chain_of(scale)
    (found,) = [one for one in diagnose(measured(net, some(20, 3, 8, 8))) if one.finding == name]
    assert found.layer == "2"
    calls = 2 if scale > 1 else 3
    assert found.numbers["layers"] == calls
    last = "3" if scale > 1 else "4"
    after = "1 call after it too" if calls == 2 else "2 calls after it too"
    assert found.evidence.endswith(f"; {after}, up to {last}")


def test_a_gate_does_not_part_what_belongs_together() -> None:
    net = chain_of(1e9)
    net.insert(3, nn.Identity())
    gated = plain(net[0], net[1], net[2], Gate(), net[4])
    found = [one for one in diagnose(measured(gated, some(20, 3, 8, 8))) if one.finding == "exploding-activations"]
    assert [(one.layer, one.numbers["layers"]) for one in found] == [("2", 2)]


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sigmoid(1e-12 * x)


def test_two_places_are_two_findings() -> None:
    net = chain_of(1e9)
    quiet = nn.Conv2d(6, 6, 1)
    quiet.weight.data *= 1e-12
    loud = nn.Conv2d(6, 6, 1)
    loud.weight.data *= 1e9
    net = plain(*list(net)[:3], quiet, loud)
    found = diagnose(measured(net, some(20, 3, 8, 8)))
    assert [one.layer for one in found if one.finding == "exploding-activations"] == ["2", "4"]


def test_a_zeroed_layer_is_the_one_that_is_told() -> None:
    torch.manual_seed(0)
    net = plain(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.GELU())
    net[2].weight.data.zero_()
    net[2].bias.data.fill_(0.5)  # type: ignore[union-attr,operator]
    (found,) = diagnose(measured(net, some(20, 3, 9, 9)))
    assert (found.finding, found.layer) == ("constant-output", "2")
    assert found.evidence == "all 4 channels have the value 0.5 throughout; 3 calls after it too, up to 5"


def test_the_same_picture_again_and_again_is_one_finding() -> None:
    net = untouched("convnext_tiny")
    totals = measured(net, pictures()[:1].expand(20, -1, -1, -1), layers=["features.0.0", "features.1.*.block.0"])
    (found,) = diagnose(totals)
    assert (found.finding, found.layer, found.numbers["layers"]) == ("constant-output", "features.0.0", 4)
    assert found.evidence == "the same for all 20 images; 3 calls after it too, up to features.1.2.block.0"


def test_one_picture_is_no_constant_output() -> None:
    assert diagnose(measured(untouched("resnet18"), pictures()[:1], layers=["conv1"])) == []


def dead_net() -> nn.Sequential:
    torch.manual_seed(2)
    net = plain(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.ReLU())
    for module in (net[0], net[2], net[4]):
        module.bias.data.fill_(1.0)  # type: ignore[union-attr,operator]
    net[2].weight.data.abs_()
    net[0].bias.data[[1, 4]] = -99.0  # type: ignore[union-attr,operator]
    net[4].weight.data.abs_()
    net[4].bias.data[4] = -99.0  # type: ignore[union-attr,operator]
    return net


def test_death_that_a_depthwise_convolution_hands_on_says_so() -> None:
    first, second, third = diagnose(measured(dead_net(), some(20, 3, 9, 9)))
    assert told([first, second, third]) == [
        ("dead-channels", "1", (1, 4)),
        ("dead-channels", "2", (1, 4)),
        ("dead-channels", "5", (4,)),
    ]
    assert first.evidence == "2 of 6 channels never leave 0: 1, 4"
    assert second.evidence.endswith(": 1, 4 (constant in 1 before it too)")
    assert third.evidence == "1 of 6 channels never leaves 0: 4"


def test_an_activation_function_alone_inherits_from_no_other() -> None:
    net = dead_net()
    found = diagnose(measured(net, some(20, 3, 9, 9), types=["ReLU"]))
    assert told(found) == [("dead-channels", at, (1, 4)) for at in "13"] + [("dead-channels", "5", (4,))]


def test_more_that_were_constant_before_are_counted() -> None:
    torch.manual_seed(0)
    net = plain(nn.Conv2d(3, 6, 1), nn.ReLU())
    net[0].weight.data[2] = 0.0
    net[0].bias.data[5] = -99.0  # type: ignore[union-attr,operator]
    convolution, function = diagnose(measured(net, some(20, 3, 9, 9)))
    assert (convolution.layer, convolution.channels) == ("0", (2,))
    assert function.evidence == "1 of 6 channels never leaves 0: 5 (1 more was constant before it)"


def test_what_is_stuck_at_a_bound_is_saturated_and_not_dead() -> None:
    net = plain(nn.Hardsigmoid())
    inputs = some(20, 4, 5, 5).abs() * 100
    inputs[:, 1] = -5.0
    inputs[:, 2:] = inputs[:, 2:] / 1e3
    totals = measured(net, inputs)
    (found,) = diagnose(totals, StatisticsThresholds(saturated=0.4))
    assert (found.finding, found.numbers["stuck"]) == ("saturated", 1)
    assert found.evidence.endswith("of values within 1 % of a bound; 1 of 4 channels never leaves one")
    assert told(diagnose(totals, StatisticsThresholds(saturated=0.9))) == [("dead-channels", "0", (1,))]


def test_nan_is_no_low_rank_and_no_drift() -> None:
    net = copy.deepcopy(untouched("resnet18"))
    net.conv1.weight.data.fill_(math.nan)  # type: ignore[union-attr,operator]
    assert told(diagnose(measured(net, rank=True))) == [("non-finite", "conv1", None)]


@pytest.mark.parametrize(("seed", "channels"), [(0, 8), (1, 8), (2, 64), (3, 64), (17, 64)])
def test_a_rank_that_cannot_be_higher_is_not_low(seed: int, channels: int) -> None:
    """One direction is found whatever the weights round to: these gave ranks up to 1 + 4e-6."""
    torch.manual_seed(seed)
    vectors = plain(nn.Conv2d(3, channels, 1))
    assert diagnose(measured(vectors, some(2, 3, 1, 1), rank=True)) == []
    same = some(20, 1, 1, 1, seed=seed) * torch.ones(1, 3, 1, 1)
    totals = measured(vectors, same, rank=True)
    assert [one.finding for one in diagnose(totals)] == ["duplicate-channels", "low-rank"]
    assert [one.finding for one in diagnose(totals, StatisticsThresholds(rank=0.0))] == ["duplicate-channels"]


def test_no_layers_no_findings() -> None:
    assert find_problems([], [], 0, StatisticsThresholds()) == []


def quiet(found: LayerStatistics, **thresholds: float) -> bool:
    loose: dict[str, Any] = {"saturated": 1.0, "dead": 1.0, "smallest": 0.0, "largest": math.inf, "rank": 0.0}
    return not find_problems(
        [replace(found, duplicate_channels=())], [], 20, StatisticsThresholds(**{**loose, **thresholds})
    )


def below(value: float) -> float:
    return math.nextafter(value, -math.inf)


def above(value: float) -> float:
    return math.nextafter(value, math.inf)


def test_each_threshold_is_met_and_just_missed() -> None:
    torch.manual_seed(0)
    net = plain(nn.Conv2d(3, 100, 1), nn.ReLU6())
    net[0].bias.data[:29] = -99.0  # type: ignore[union-attr,operator]
    net[0].weight.data *= 3
    layer = measured(net, some(20, 3, 9, 9), rank=True).statistics()[1]
    assert None not in (layer.rms, layer.max, layer.rank, layer.saturated)
    assert layer.rms and layer.max and layer.rank and layer.saturated
    assert len(layer.dead_channels) == 29
    assert quiet(layer, dead=0.29)  # which as a binary fraction times 100 is less than 29
    assert not quiet(layer, dead=below(0.29))
    assert quiet(layer, saturated=layer.saturated)
    assert not quiet(layer, saturated=below(layer.saturated))
    assert quiet(layer, smallest=layer.rms)
    assert not quiet(layer, smallest=above(layer.rms))
    assert quiet(layer, largest=layer.max)
    assert not quiet(layer, largest=below(layer.max))
    assert layer.highest_rank == 100
    assert quiet(layer, rank=layer.rank / 100 - 1e-12)
    assert not quiet(layer, rank=layer.rank / 100 + 1e-12)


def test_the_thresholds_of_drift() -> None:
    net = plain(nn.BatchNorm2d(3))
    norm: Any = net[0]
    norm.running_mean.fill_(1.0)
    totals = measured(net.eval(), some(20, 3, 9, 9), layers="all", types=["BatchNorm2d"])
    (drift,) = totals.drifts()
    shift = float(torch.tensor(drift.shift).abs().median())
    assert 0.9 < shift < 1.1
    assert find_problems([], [drift], 20, StatisticsThresholds(shift=shift)) == []
    (found,) = find_problems([], [drift], 20, StatisticsThresholds(shift=below(shift)))
    assert (found.finding, found.layer) == ("batchnorm-drift", "0")
    ratio = float(found.numbers["ratio"] or 0)
    assert find_problems([], [drift], 20, StatisticsThresholds(shift=9, ratio=ratio)) == []
    assert len(find_problems([], [drift], 20, StatisticsThresholds(shift=9, ratio=below(ratio)))) == 1


def test_statistics_that_were_never_updated_do_not_drift() -> None:
    net = plain(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    assert diagnose(measured(net.eval(), 100 * some(20, 3, 9, 9))) == []


def test_a_wrong_input_range_is_one_finding_at_the_first_batch_norm() -> None:
    found = [one for one in diagnose(measured(untouched("resnet18"), 10 * pictures())) if "drift" in one.finding]
    assert found[0].layer == "bn1"
    assert found[0].evidence.startswith("in the median channel the mean is off by ")
    assert int(found[0].numbers["layers"] or 0) > 10


@pytest.mark.parametrize(("correlation", "same"), [(0.99, True), (0.9999, False)])
def test_the_threshold_of_duplicates(correlation: float, same: bool) -> None:
    net = plain(nn.Conv2d(3, 3, 1, bias=False))
    net[0].weight.data = torch.tensor([[1.0, 0, 0], [1.0, 0.05, 0], [0, 0, 1.0]])[
        :, :, None, None
    ]  # correlation 0.9988
    found = diagnose(measured(net, some(40, 3, 9, 9)), StatisticsThresholds(correlation=correlation))
    assert told(found) == ([("duplicate-channels", "0", (0, 1))] if same else [])
    assert not same or found[0].groups == ((0, 1),)


@pytest.mark.parametrize(("images", "told_of"), [(1, "1 image"), (15, "15 images"), (16, "")])
def test_death_on_few_images_says_so(images: int, told_of: str) -> None:
    torch.manual_seed(0)
    net = plain(nn.Conv2d(3, 6, 1), nn.ReLU())
    net[0].bias.data[5] = -99.0  # type: ignore[union-attr,operator]
    found = diagnose(measured(net, some(images, 3, 9, 9)))
    assert [one.finding for one in found] == ["dead-channels"] + ["few-images"] * bool(told_of)
    if told_of:
        assert found[1].evidence == f"1 finding of dead, constant or drifting layers rests on {told_of}"
        assert found[1].layer == ""


def test_few_images_alone_are_no_finding() -> None:
    torch.manual_seed(0)
    assert diagnose(measured(plain(nn.Conv2d(3, 6, 1)), some(1, 3, 9, 9))) == []


def test_a_new_finding_is_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule runs in `stats`, and its threshold is an option with a help."""
    limit = Threshold("sparse", 0.2, "a test", "--sparse-share", "Zeros are a finding above this share.", share=True)
    kind = FindingKind("sparse-channels", "Many values are 0.", "Prune the layer.", (limit,))
    monkeypatch.setitem(GRAVITY, "activations", [*GRAVITY["activations"]])
    for table in (CATALOGUE, RULES.by_name):
        monkeypatch.setitem(table, kind.name, None)  # type: ignore[arg-type]

    @layer_rule(kind, before="non-finite")
    def judge(layer: LayerStatistics, thresholds: StatisticsThresholds) -> Finding | None:
        return kind.finding(layer.key, f"{layer.zeros:.0%} of 0") if layer.zeros > thresholds["sparse"] else None

    name = "hookscope.cli.commands.stats"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(commands, "stats", None, raising=False)
    command = importlib.import_module(name).command  # its options are those of the catalogue now
    monkeypatch.delitem(sys.modules, name)
    words = ["shapes", str(Path(__file__).parents[2] / "samples" / "cat.jpg"), "--format", "json"]
    first = json.loads(CliRunner().invoke(command, words).stdout)["findings"][0]
    assert (first["finding"], first["meaning"]) == (kind.name, "Many values are 0. Prune the layer.")
    assert kind.name not in CliRunner().invoke(command, [*words, "--sparse-share", "100%"]).stdout
    shown = " ".join(CliRunner().invoke(command, ["--help"]).stdout.split())
    assert "--sparse-share SHARE Zeros are a finding above this share. [default: 20%]" in shown
