"""Building and running without arithmetic: the right shapes, and an unchanged model."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import regnet_y_400mf

from hookscope.hooks.model_state import ModelSnapshot
from hookscope.models.load import load_model
from hookscope.models.meta_device import build_on_meta, meta_forward
from hookscope.models.run import quiet_and_seeded


def test_a_dry_model_has_the_shapes_of_a_real_one() -> None:
    with quiet_and_seeded(0):
        dry = build_on_meta(lambda: regnet_y_400mf(weights=None)).state_dict()  # its builder computes with tensors
    real = load_model("regnet_y_400mf", weights="none").model.state_dict()
    assert [(key, value.shape, value.dtype, value.device.type) for key, value in dry.items()] == [
        (key, value.shape, value.dtype, "meta") for key, value in real.items()
    ]


def test_a_model_larger_than_memory_is_built_at_once() -> None:
    start = time.process_time()
    model = build_on_meta(lambda: nn.Sequential(*(nn.Linear(10**6, 10**6) for _ in range(20))))
    assert sum(parameter.numel() for parameter in model.parameters()) > 2 * 10**13
    assert meta_forward(model, (torch.zeros(3, 10**6),)).shape == (3, 10**6)
    assert time.process_time() - start < 5


def test_building_dry_leaves_torch_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError):
        build_on_meta(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert torch.empty(1).device.type == "cpu"


def test_a_dry_pass_leaves_the_model_unchanged() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    before = ModelSnapshot(net)
    ids = [id(parameter) for parameter in net.parameters()]
    out = meta_forward(net, (torch.full((2, 3, 9, 8), float("nan")),))
    assert out.is_meta and out.shape == (2, 4, 7, 6) and not out.requires_grad
    assert before.changes() == []
    assert [id(parameter) for parameter in net.parameters()] == ids


def test_tensors_inside_arguments_go_along() -> None:
    class Many(nn.Module):
        def forward(self, pictures: list[Tensor], extra: dict[str, Tensor], factor: int) -> Tensor:
            return torch.stack(pictures).sum(0) * extra["scale"] * factor

    out = meta_forward(Many(), ([torch.zeros(3, 4), torch.zeros(3, 4)], {"scale": torch.zeros(4)}, 2))
    assert (out.shape, out.device.type) == ((3, 4), "meta")


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert meta_forward(net, (torch.zeros(2, 4),)).shape == (2, 4)
    assert net[1].weight is net[0].weight and not net[0].weight.is_meta


def test_a_model_that_needs_values_raises_and_stays_unchanged() -> None:
    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x)[: int(x.sum())]

    net = Values()
    with pytest.raises(Exception, match="meta"):
        meta_forward(net, (torch.zeros(1, 3, 2, 2),))
    assert not net.conv.weight.is_meta
