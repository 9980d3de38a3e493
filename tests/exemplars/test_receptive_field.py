"""Receptive fields, against arithmetic on paper and the pixels that gradients reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import get_model

from hookscope.exemplars import ReceptiveField, receptive_fields
from hookscope.models import LoadedModel, WeightsMetadata


def fields_of(
    model: nn.Module, size: tuple[int, int] = (96, 96), layers: Any = "all", **more: Any
) -> dict[str, ReceptiveField]:
    net = LoadedModel.of(model.eval(), "net", "random", WeightsMetadata())
    return receptive_fields(net, net.inputs(torch.rand(3, *size)), layers)


# size, stride and start on paper: size += (kernel - 1) * stride so far, start -= padding * stride so far
PUBLISHED = {
    "alexnet": {"features.0": (11, 4, -2), "features.10": (163, 16, -66), "features.12": (195, 32, -66)},
    "vgg11": {"features.3": (8, 2, -3), "features.18": (134, 16, -59), "features.20": (150, 32, -59)},
    "resnet18": {"conv1": (7, 2, -3), "layer2.1": (99, 8, -49), "layer4": (435, 32, -217)},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_are_those_of_arithmetic_on_paper(name: str) -> None:
    fields = fields_of(get_model(name, weights=None), (64, 80), list(PUBLISHED[name]))
    for layer, (size, stride, start) in PUBLISHED[name].items():
        assert fields[layer] == ReceptiveField("computed", (size, size), (stride, stride), (start, start))
