"""Changes of all parameter gradients: against torch's own functions, and names that freeze takes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, UsageError
from hookscope.gradients.parameter_changes import GradientChanges
from tests.nets import named


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GradientChanges(clip_norm=0.0), "clip norm 0 is not a number above 0"),
        (lambda: GradientChanges(clip_value=-1.0), "clip value -1"),
        (lambda: GradientChanges(clip_norm=math.nan), "clip norm nan"),
        (lambda: GradientChanges(scale=math.inf), "scale inf is not finite"),
        (lambda: GradientChanges(sign="up"), "unknown sign 'up'"),
        (lambda: GradientChanges(("conv#1",)), "cannot freeze 'conv#1'"),
        (lambda: GradientChanges((",",)), "nothing to freeze"),
    ],
)
def test_invalid_changes_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()


def two_blocks() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(3, 4), block, nn.Linear(4, 2))


def with_gradients(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of ``model`` with gradients, and another copy of these."""
    twin = copy.deepcopy(model)
    (twin(torch.arange(3.0)[None]) * 40).sum().backward()
    return twin, {name: parameter.grad.clone() for name, parameter in twin.named_parameters()}


@pytest.mark.parametrize("limit", [0.01, 1.0, 1e9])
@pytest.mark.parametrize("freeze", [(), ("0.weight",)])
def test_changes_of_all_gradients_are_those_of_torch(freeze: tuple[str, ...], limit: float) -> None:
    net = two_blocks()
    judge, before = with_gradients(net)
    judge[0].weight.grad *= not freeze
    nn.utils.clip_grad_value_(judge.parameters(), limit)
    by_value = {name: parameter.grad.clone() for name, parameter in judge.named_parameters()}
    nn.utils.clip_grad_norm_(judge.parameters(), 0.1)
    by_norm = {name: parameter.grad for name, parameter in judge.named_parameters()}
    torch.testing.assert_close(GradientChanges(freeze, limit).of(net)(before), by_value, rtol=0, atol=0)
    torch.testing.assert_close(GradientChanges(freeze, limit, 0.1).of(net)(before), by_norm)
    assert bool(before["0.weight"].any())


def test_gradients_are_scaled_then_clamped_to_a_sign_then_clipped() -> None:
    net = two_blocks()
    _, before = with_gradients(net)
    changed = GradientChanges(clip_value=0.5, scale=-2.0, sign="negative").of(net)(before)
    for name, gradient in before.items():
        assert torch.equal(changed[name], (gradient * -2).clamp(max=0).clamp(-0.5, 0.5))
    assert any(bool((gradient < 0).any()) for gradient in changed.values())


@pytest.mark.parametrize(
    ("freeze", "names"),
    [
        (("1",), ["1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"]),
        (("1.0", "2.bias"), ["1.0.weight", "1.0.bias", "2.bias"]),
        (("2.bias,1.2",), ["1.2.weight", "1.2.bias", "2.bias"]),
        (("re:^[02]$",), ["0.weight", "0.bias", "2.weight", "2.bias"]),
        (("1.*",), ["1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"]),
    ],
)
def test_freeze_selects_layers_with_their_children_and_parameters(freeze: tuple[str, ...], names: list[str]) -> None:
    assert list(GradientChanges(freeze).frozen(two_blocks())) == names


def test_gradient_changes_are_false_only_without_any_change() -> None:
    assert not GradientChanges()
    for change in ({"scale": 1.0}, {"sign": "positive"}, {"clip_norm": 1.0}, {"freeze": ("a",)}, {"clip_value": 1.0}):
        assert GradientChanges(**change)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("conv2", "no layer or parameter 'conv2'; nearest: conv1"),
        *((index, f"no layer or parameter '{index}'") for index in ("3", "0:2", "-1")),
        ("relu", "cannot freeze 'relu'; it has no parameters"),
    ],
)
def test_names_that_cannot_be_frozen_are_refused(name: str, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        GradientChanges((name,)).of(named(conv1=nn.Linear(2, 2), relu=nn.ReLU()))
