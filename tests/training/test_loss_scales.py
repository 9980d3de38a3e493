"""The scale of a loss is that of the GradScaler it went through."""

from __future__ import annotations

from typing import Any

import torch

from hookscope.training.backward_calls import BackwardCalls
from hookscope.training.loss_scales import LossScales


class Halving(torch.amp.GradScaler):
    """One with a method of its own."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs) * 1.0


def seen_by(run: Any) -> list[float]:
    seen: list[float] = []
    calls = BackwardCalls(lambda value, roots: seen.append(value.item()))
    original = torch.amp.GradScaler.scale, Halving.scale, torch.autograd.backward
    calls.on()
    try:
        run()
    finally:
        calls.off()
    assert (torch.amp.GradScaler.scale, Halving.scale, torch.autograd.backward) == original
    return seen


def loss(value: float) -> torch.Tensor:
    return torch.tensor([value], requires_grad=True).sum()


def test_the_loss_is_seen_without_its_scale_however_it_came_to_backward() -> None:
    scaler, other = torch.amp.GradScaler("cpu", init_scale=65536.0), Halving("cpu", init_scale=8.0)

    def run() -> None:
        scaler.scale(loss(3.0)).backward()
        (scaler.scale(loss(3.0)) / 4).backward()
        (scaler.scale(loss(3.0)) + scaler.scale(loss(4.0))).backward()
        torch.autograd.backward(scaler.scale([loss(1.0), loss(2.0)]))
        torch.autograd.backward((scaler.scale(loss(1.0)), other.scale(loss(2.0)), loss(4.0)))
        loss(5.0).backward()
        torch.amp.GradScaler("cpu", enabled=False).scale(loss(6.0)).backward()

    assert seen_by(run) == [3.0, 0.75, 7.0, 3.0, 7.0, 5.0, 6.0]


def test_an_iterator_is_gone_through_once() -> None:
    made = [torch.tensor([value], requires_grad=True) for value in (1.0, 2.0)]
    assert seen_by(lambda: torch.autograd.backward(iter([each.sum() for each in made]))) == [3.0]
    assert [each.grad is not None for each in made] == [True, True]


def test_a_scaler_that_is_none_of_torch_is_left_alone() -> None:
    class Strange(torch.amp.GradScaler):
        def __init__(self) -> None:
            pass

        def scale(self, outputs: Any) -> Any:
            return outputs * 2

    scales = LossScales()
    scales.on()
    try:
        scaled = Strange().scale(loss(3.0))
        assert scaled.item() == 6 and scales.of(scaled) is None
    finally:
        scales.off()
