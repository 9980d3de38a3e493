"""Blocks, layers and channels unlike those of their kind, planted, and measured by plain hooks."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hookscope.inspection.facts import Place
from hookscope.inspection.outliers import block_places, deviations, far_beyond, map_places
from hookscope.inspection.places import answer_places
from hookscope.models import LoadedModel
from tests.inspection.faults import recorded
from tests.nets import Function

STAR = str(Path(__file__).parents[2] / "samples" / "shapes" / "star.png")


@pytest.fixture
def blocks() -> nn.Module:
    """Six residual blocks."""
    blocks = [
        Function(lambda net, x: x + net.conv(net.act(x)), conv=nn.Conv2d(8, 8, 3, padding=1), act=nn.ReLU())
        for _ in range(6)
    ]
    return nn.Sequential(nn.Conv2d(3, 8, 3, 4), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


def planted(net: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        net[4].conv.weight.mul_(factor)
        net[4].conv.bias.mul_(factor)
    return net


@pytest.mark.parametrize(("factor", "kind"), [(0.0, "adds-nothing"), (1e-4, "adds-nothing"), (100.0, "adds-most")])
def test_a_block_unlike_the_others_is_told(blocks: nn.Module, factor: float, kind: str) -> None:
    [place] = block_places(recorded(planted(blocks, factor), [STAR]))
    assert (place.kind, place.severity, place.layer, place.numbers["blocks"]) == (kind, "note", "4", 6)


def test_the_sentence_of_a_block_has_the_numbers(blocks: nn.Module) -> None:
    evidence = replace(recorded(blocks, [STAR]), changes={str(n): np.array([0.5]) for n in range(1, 6)})
    assert list(block_places(evidence)) == []
    [place] = block_places(replace(evidence, changes={**evidence.changes, "6": np.array([0.004])}))
    assert place.numbers == {"change": 0.004, "median": 0.5, "blocks": 6}
    assert place.reason == "6 changes its input by 0.4 %; the median of the 6 blocks of its class is 50 %."
    [place] = block_places(replace(evidence, changes={**evidence.changes, "6": np.array([339.0])}))
    assert place.reason == "6 changes its input by 339 times its norm; the median of the 6 blocks of its class is 50 %."


@pytest.mark.parametrize("change", [0.0, 1e-6, 0.7])
def test_blocks_that_are_alike_are_no_places(blocks: nn.Module, change: float) -> None:
    evidence = replace(recorded(blocks, [STAR]), changes={str(n): np.array([change]) for n in range(1, 7)})
    assert list(block_places(evidence)) == []


def test_few_blocks_and_blocks_of_other_shapes_are_no_places(blocks: nn.Module) -> None:
    evidence = recorded(blocks, [STAR])
    few = {"1": np.array([0.5]), "2": np.array([0.5]), "3": np.array([0.0]), "4": np.array([np.nan])}
    assert list(block_places(replace(evidence, changes=few))) == []


def test_deviations_on_paper() -> None:
    """Logarithms 0, 1, 2, 3, 10: median 2, median distance 1."""
    distance, times = deviations(np.exp([0.0, 1, 2, 3, 10]))
    assert distance == pytest.approx(np.array([-2, -1, 0, 1, 8]) / 1.4826)
    assert times == pytest.approx(np.exp([-2.0, -1, 0, 1, 8]))
    assert far_beyond(np.array([1.0, 1, 1, 1, 7.9])) == {}
    assert list(far_beyond(np.array([0.0, 1, 1, 1, 1, 9, 10]))) == [6, 5]


def changed(net: LoadedModel, change: Callable[[nn.Module], Any]) -> LoadedModel:
    model = copy.deepcopy(net.model)
    with torch.no_grad():
        change(model)
    return replace(net, model=model)


def of_maps(net: LoadedModel) -> list[Place]:
    return list(map_places(recorded(net, [STAR])))


def test_a_sound_network_has_no_unusual_maps_and_blocks(shapes: LoadedModel) -> None:
    assert [place.kind for place in answer_places(recorded(shapes, [STAR]))] == ["carries-answer"]


def test_the_widest_channel_is_told_with_its_size(shapes: LoadedModel) -> None:
    net = changed(shapes, lambda model: model.get_submodule("features.10.expand3x3").weight[5].mul_(40))
    [place] = of_maps(net)
    with torch.no_grad():
        kept: list[Tensor] = []
        net.model.get_submodule("features.10.expand3x3").register_forward_hook(
            lambda module, args, output: kept.append(output.clone())
        )
        net.model(*net.inputs(net.prepare(Image.open(STAR))))
    sizes = kept[0][0].abs().amax((1, 2))
    assert (place.kind, place.layer, place.channels) == ("widest-maps", "features.10.expand3x3", (5,))
    assert place.numbers["largest"] == pytest.approx(float(sizes[5]))
    assert place.numbers["usual"] == pytest.approx(float(np.median(sizes.numpy())))
    assert place.numbers["times"] == pytest.approx(float(sizes[5] / np.median(sizes.numpy())), rel=1e-2)


def test_the_widest_layer_is_reported(shapes: LoadedModel) -> None:
    def widen(model: nn.Module) -> None:
        conv = model.get_submodule("features.12.expand1x1")
        conv.weight *= 100
        conv.bias *= 100

    [place] = of_maps(changed(shapes, widen))
    assert (place.kind, place.layer, place.channels) == ("widest-maps", "features.12.expand1x1", None)
    assert "that is usual for Conv2d here" in place.reason
