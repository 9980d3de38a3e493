"""The effective receptive field against NumPy, and on networks that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hookscope.geometry import effective_fields, receptive_fields
from hookscope.models import LoadedModel, WeightsMetadata
from tests.nets import Function


def fields(net: nn.Module, images: torch.Tensor) -> dict[str, float]:
    return effective_fields(LoadedModel.of(net.eval(), "net", "random", WeightsMetadata()), (images,), "*")


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_convolutions_of_ones_are_box_filters_again_and_again(depth: int) -> None:
    net = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1, bias=False) for _ in range(depth)))
    for layer in net:
        nn.init.ones_(layer.weight)
    line = np.ones(1)
    for _ in range(depth):
        line = np.convolve(line, np.ones(3))
    strength = np.outer(line, line)
    expected = round(np.sqrt((strength > (1 - 0.9545) * strength.max()).sum()), 2)
    found = fields(net, torch.rand(2, 1, 41, 41))[str(depth - 1)]
    assert found == pytest.approx(expected)
    assert found <= 2 * depth + 1  # what the geometry allows


def test_a_gradient_that_never_arrives_is_nothing_and_positions_are_needed() -> None:
    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net.head(net.closed(net.conv(x)).mean((2, 3)))

    net = Function(forward, conv=nn.Conv2d(3, 4, 3), closed=nn.Threshold(1e9, 0.0), head=nn.Linear(4, 2))
    found = fields(net, torch.rand(1, 3, 9, 9))
    assert found == {"conv": 3.0, "closed": 0.0}


def test_the_model_and_the_random_state_stay_as_they_are() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout()).train()
    images = torch.rand(2, 3, 9, 9)
    state, mean = torch.get_rng_state(), net[1].running_mean.clone()
    loaded = LoadedModel.of(net, "net", "random", WeightsMetadata())
    with torch.no_grad():
        found = effective_fields(loaded, (images,), "all")
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(net[1].running_mean, mean) and net.training
    assert all(parameter.grad is None for parameter in net.parameters()) and not net[0]._forward_hooks
    assert list(found) == list(receptive_fields(loaded, (images,)))
