"""Blocks and layers that compute something else than those like them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from hookscope.inspection.siblings import unlike_siblings
from hookscope.tracing import trace
from tests.nets import Function


class Block(nn.Module):
    def __init__(self, step: Callable[[Any, Tensor], Tensor], inputs: int = 6) -> None:
        super().__init__()
        self.step, self.conv, self.norm = step, nn.Conv2d(inputs, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def usual(block: Any, x: Tensor) -> Tensor:
    return x + 0.5 * F.relu(block.norm(block.conv(x))).softmax(-1)


STEPS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "skip": (lambda b, x: 0.5 * F.relu(b.norm(b.conv(x))).softmax(-1), "does not run add"),
    "relu": (lambda b, x: x + 0.5 * b.norm(b.conv(x)).softmax(-1), "does not run relu"),
    "norm": (lambda b, x: x + 0.5 * F.relu(b.conv(x)).softmax(-1), "does not run norm BatchNorm2d"),
    "scale": (lambda b, x: x + 0.0 * F.relu(b.norm(b.conv(x))).softmax(-1), "does not run mul(0.5) but runs mul(0)"),
    "axis": (
        lambda b, x: x + 0.5 * F.relu(b.norm(b.conv(x))).softmax(1),
        "does not run softmax(-1) but runs softmax(-3)",
    ),
}


def found(net: nn.Module, inputs: Tensor, severity: str = "warning") -> list[tuple[str, str]]:
    findings = list(unlike_siblings(trace(net, (inputs,), sources=True), net))
    assert all(each.severity == severity for each in findings)
    return [(each.layer, each.evidence) for each in findings]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("at", "others"), [(2, 3), (4, 4), (1, 2)])
def test_a_block_that_differs_in_one_step_from_enough_others_is_named(name: str, at: int, others: int) -> None:
    step, words = STEPS[name]
    blocks = [Block(step if number == at else usual) for number in range(others + 1)]
    named = found(nn.Sequential(*blocks).eval(), torch.randn(1, 6, 5, 5))
    text = f"it {words}, unlike {others} other blocks like it"
    enough = 2 if name in ("relu", "norm") else 3  # which no block leaves out on purpose
    assert named == ([(str(at), text)] if others >= enough else [])


def test_another_scale_of_the_first_two_that_agree_and_another_order_are_no_fault() -> None:
    inputs = torch.randn(1, 6, 5, 5)
    order = [*(Block(usual) for _ in range(3)), Block(lambda b, x: x + F.relu(b.norm(b.conv(0.5 * x))).softmax(-1))]
    assert found(nn.Sequential(*order).eval(), inputs) == []
    skip = STEPS["skip"][0]
    first = [Block(STEPS["scale"][0]), *(Block(usual) for _ in range(4))]
    two = [Block(usual), Block(skip), Block(skip), *(Block(usual) for _ in range(4))]
    for blocks in (first, two):
        assert found(nn.Sequential(*blocks).eval(), inputs) == []


@pytest.mark.parametrize(("name", "severity"), [("skip", "warning"), ("norm", "warning"), ("activation", "note")])
def test_the_first_block_that_leaves_out_a_step_of_all_others_is_named_and_one_with_more_activations_noted(
    name: str, severity: str
) -> None:
    step, words = STEPS[name] if name in STEPS else (lambda b, x: usual(b, x.sigmoid()), "runs sigmoid")
    blocks = [Block(usual), Block(usual), Block(usual), Block(step)]
    blocks = blocks[::-1] if name in STEPS else blocks
    named = found(nn.Sequential(*blocks).eval(), torch.randn(1, 6, 5, 5), severity)
    assert named == [("0" if name in STEPS else "3", f"it {words}, unlike 3 other blocks like it")]


def test_a_stage_whose_only_block_adds_nothing_is_no_fault() -> None:
    skip = STEPS["skip"][0]
    stages = [nn.Sequential(Block(usual), Block(usual)), nn.Sequential(Block(usual)), nn.Sequential(Block(skip))]
    assert found(nn.Sequential(*stages).eval(), torch.randn(1, 6, 5, 5)) == []
    with_another = nn.Sequential(*stages[:2], nn.Sequential(Block(usual), Block(skip))).eval()
    assert [layer for layer, _ in found(with_another, torch.randn(1, 6, 5, 5))] == ["2.1"]


@pytest.mark.parametrize("at", range(5))
def test_a_convolution_without_activation_is_named_where_all_others_have_one(at: int) -> None:
    layers: list[nn.Module] = []
    for number in range(5):
        active = nn.Identity() if number == at else nn.ReLU()
        layers += [nn.Conv2d(4, 4, 3, padding=1), active, *([nn.MaxPool2d(2)] if number == 3 else [])]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 16, 3)).eval()
    place = str(2 * at + (at > 3))
    text = "no activation function follows it, unlike 4 other convolutions"
    named = found(net, torch.randn(1, 4, 8, 8), "note" if at == 4 else "warning")
    assert named == ([(place, text)] if at else []), "the stem may be linear"


def test_a_narrow_code_of_an_autoencoder_is_no_fault() -> None:
    sizes = [(3, 8), (8, 16), (16, 4), (4, 16), (16, 8)]
    layers = [
        layer
        for inputs, outputs in sizes
        for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), *([nn.ReLU()] if outputs > 4 else []))
    ]
    assert found(nn.Sequential(*layers, nn.Conv2d(8, 3, 3)).eval(), torch.randn(1, 3, 8, 8)) == []


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "resnet18", "swin_t"])
def test_networks_of_torchvision_have_no_odd_block(name: str) -> None:
    with torch.device("meta"):
        net = torchvision.models.get_model(name, weights=None).eval()
    assert found(net, torch.zeros(1, 3, 224, 224, device="meta")) == []


@pytest.mark.parametrize(("axis", "wrong"), [(-1, False), (3, False), (1, True), (-2, True)])
@pytest.mark.parametrize("layers", [1, 3])
def test_attention_over_another_axis_than_the_keys_is_named_also_where_all_blocks_are_alike(
    axis: int, wrong: bool, layers: int
) -> None:
    def attend(block: Any, x: Tensor) -> Tensor:
        query, key, value = block.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = block.drop((query @ key.transpose(-2, -1) * 0.5).softmax(axis)) @ value
        return x + mixed.transpose(1, 2).flatten(2)  # type: ignore[no-any-return]

    blocks = (Function(attend, qkv=nn.Linear(8, 24), drop=nn.Dropout(0.1)) for _ in range(layers))
    named = found(nn.Sequential(*blocks).eval(), torch.randn(1, 5, 8))
    assert [layer for layer, _ in named] == ["0"] * wrong
    assert all(f"over axis {axis - 4 if axis > 0 else axis}, " in text for _, text in named)
    assert all((", as in 2 later blocks" in text) == (layers == 3) for _, text in named)


@pytest.mark.parametrize("layout", ["keys x queries", "einsum"])
def test_attention_of_keys_by_queries_is_sound(layout: str) -> None:
    def attend(block: Any, x: Tensor) -> Tensor:
        query, key, value = block.qkv(x).chunk(3, -1)
        weights = (key @ query.transpose(1, 2)).softmax(-2)  # axes: image, key, query
        mixed = torch.einsum("bkq,bkd->bqd", weights, value) if layout == "einsum" else value.transpose(1, 2) @ weights
        return x + (mixed if layout == "einsum" else mixed.transpose(1, 2))  # type: ignore[no-any-return]

    net = nn.Sequential(Function(attend, qkv=nn.Linear(8, 24))).eval()
    assert found(net, torch.randn(1, 5, 8)) == []
