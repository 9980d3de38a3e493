"""Freeze, scale, clamp to a sign, clip by value, by norm: judged by torch's own functions on a copy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hookscope.errors import LayerError, UsageError
from hookscope.gradients.modify import GradientChanges


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        return nn.Sequential(nn.Linear(3, 4), block, nn.Linear(4, 2))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    twin = copy.deepcopy(model)
    (twin(torch.arange(3.0)[None]) * 40).sum().backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def with_grads(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for (_, parameter), gradient in zip(twin.named_parameters(), gradients(model).values(), strict=True):
        parameter.grad = gradient.clone()
    return twin


@pytest.mark.parametrize("limit", [0.01, 1.0, 1e9])
def test_by_norm_as_torch_does_it(limit: float) -> None:
    judge = with_grads(net())
    nn.utils.clip_grad_norm_(judge.parameters(), limit)
    changed = GradientChanges(clip_norm=limit).of(net())(gradients(net()))
    for name, parameter in judge.named_parameters():
        torch.testing.assert_close(changed[name], parameter.grad)


@pytest.mark.parametrize("limit", [0.01, 1.0, 1e9])
def test_by_value_as_torch_does_it(limit: float) -> None:
    judge = with_grads(net())
    nn.utils.clip_grad_value_(judge.parameters(), limit)
    changed = GradientChanges(clip_value=limit).of(net())(gradients(net()))
    for name, parameter in judge.named_parameters():
        assert torch.equal(changed[name], parameter.grad)


def test_together_in_order() -> None:
    judge = with_grads(net())
    judge[0].weight.grad.zero_()
    nn.utils.clip_grad_value_(judge.parameters(), 0.5)
    nn.utils.clip_grad_norm_(judge.parameters(), 0.1)
    changed = GradientChanges(("0.weight",), 0.5, 0.1).of(net())(gradients(net()))
    for name, parameter in judge.named_parameters():
        torch.testing.assert_close(changed[name], parameter.grad)
    assert not changed["0.weight"].any() and changed["0.bias"].any()


def test_scaled_then_clamped_to_a_sign_then_clipped() -> None:
    before = gradients(net())
    changed = GradientChanges(clip_value=0.5, scale=-2.0, sign="negative").of(net())(before)
    for name, gradient in before.items():
        assert torch.equal(changed[name], (gradient * -2).clamp(max=0).clamp(-0.5, 0.5))
    assert any(bool((gradient < 0).any()) for gradient in changed.values())


def test_what_comes_in_is_not_written_to() -> None:
    before = gradients(net())
    kept = {name: gradient.clone() for name, gradient in before.items()}
    GradientChanges(("1",), 0.5, 0.1).of(net())(before)
    assert all(torch.equal(before[name], kept[name]) for name in kept)


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
def test_what_freeze_means(freeze: tuple[str, ...], names: list[str]) -> None:
    assert list(GradientChanges(freeze).frozen(net())) == names


def test_nothing_asked_is_false() -> None:
    assert not GradientChanges()
    assert GradientChanges(scale=1.0) and GradientChanges(sign="positive")
    assert GradientChanges(clip_norm=1.0) and GradientChanges(("a",)) and GradientChanges(clip_value=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_norm": 0.0}, "clip norm 0 sets every gradient to 0; give a number above 0"),
        ({"clip_value": -1.0}, "clip value -1"),
        ({"clip_norm": float("nan")}, "clip norm nan"),
        ({"scale": float("inf")}, "scale inf is not finite"),
        ({"sign": "up"}, "unknown sign 'up'"),
        ({"freeze": ("conv#1",)}, "cannot freeze 'conv#1'"),
        ({"freeze": (",",)}, "nothing to freeze"),
    ],
)
def test_what_makes_no_sense(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GradientChanges(**change)


def test_names_that_are_not_there() -> None:
    model = nn.ModuleDict({"conv1": nn.Linear(2, 2), "relu": nn.ReLU()})
    with pytest.raises(LayerError, match="no layer or parameter 'conv2'; nearest: conv1"):
        GradientChanges(("conv2",)).of(model)
    for index in ("3", "0:2", "-1"):
        with pytest.raises(LayerError, match=f"no layer or parameter '{index}'"):
            GradientChanges((index,)).of(model)
    with pytest.raises(LayerError, match="cannot freeze 'relu'; it has no parameters"):
        GradientChanges(("relu",)).of(model)
