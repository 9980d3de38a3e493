"""Wrapped functions of torch pass the loss on, do what they did before, and are put back."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from hookscope.hooks.registration import HookHandles
from hookscope.training import Monitor
from hookscope.training.loss_graph import divisor_of
from hookscope.training.loss_tap import LossTap, scalar_of
from tests.training.watched import step


class Halving(torch.amp.GradScaler):
    """A scaler with a method of its own."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs) * 1.0


class Strange(torch.amp.GradScaler):
    """A scaler without the attributes of torch's."""

    def __init__(self) -> None:
        pass

    def scale(self, outputs: Any) -> Any:
        return outputs * 2


@contextmanager
def tapped(*on_loss: Any) -> Iterator[list[float]]:
    """The losses of the block, or a tap that does something else; the wrapped functions are back afterwards."""
    losses: list[float] = []
    tap = LossTap(*(on_loss or (lambda value, roots: losses.append(value.item()),)))
    originals = torch.amp.GradScaler.scale, Halving.scale, torch.autograd._tensor_or_tensors_to_tuple
    tap.on()
    tap.on()
    try:
        yield losses
    finally:
        tap.off()
    assert (torch.amp.GradScaler.scale, Halving.scale, torch.autograd._tensor_or_tensors_to_tuple) == originals


def loss(value: float) -> torch.Tensor:
    return torch.tensor([value], requires_grad=True).sum()


def test_losses_are_passed_on_and_gradients_stay_the_same() -> None:
    x = torch.ones(2, requires_grad=True)
    with tapped() as losses:
        (x * 3).sum().backward(retain_graph=True)
        torch.autograd.backward([x.sum(), (2 * x).sum()])
        torch.autograd.backward(x * 2, torch.ones(2))  # a vector-Jacobian product has no loss
        (x * 2).backward(gradient=torch.ones(2))
        torch.autograd.backward(tensors=(x[:1] * 2,))
        torch.autograd.backward(iter([x[:1].sum(), x[1:].sum()]))  # can be consumed only once
    assert losses == [6.0, 6.0, 2.0, 2.0] and x.grad.tolist() == [13.0, 11.0]


def test_a_wrapper_put_over_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    scale, tap = torch.amp.GradScaler.scale, LossTap(lambda value, roots: losses.append(value.item()))
    monkeypatch.setattr(torch.amp.GradScaler, "scale", scale)
    tap.on()
    ours = torch.amp.GradScaler.scale
    torch.amp.GradScaler.scale = theirs = lambda *args: ours(*args)
    tap.off()
    assert torch.amp.GradScaler.scale is theirs
    assert torch.amp.GradScaler("cpu", init_scale=2.0).scale(loss(3.0)).item() == 6 and losses == []


def test_an_error_in_a_backward_pass_has_the_traceback_that_it_has_unwatched() -> None:
    import traceback

    def frames() -> list[str]:
        x = torch.ones(2, requires_grad=True)
        try:
            (x * 2).backward()
        except RuntimeError as error:
            shape = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        y = x.sum()
        y.backward()
        try:
            y.exp().backward(retain_graph=True)
            torch.autograd.backward(y.detach())
        except RuntimeError as error:
            return shape + [f"{frame.filename}:{frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
        return []

    plain = frames()
    with tapped() as losses:
        assert frames() == plain and len(plain) > 3
    assert len(losses) == 3


def test_the_end_of_a_backward_pass_is_reported_when_all_gradients_exist() -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    with tapped(lambda value, roots: None, lambda: seen.append(x.grad.tolist())):
        y = x.prod()
        y.backward(retain_graph=True)
        y.backward()
        (x.sum() + y.detach()).backward()
    assert seen[0] == [1, 1] and seen[-1] == [3, 3]


def test_an_exception_of_on_loss_replaces_the_backward_pass() -> None:
    def refuse(value: object, roots: object) -> None:
        raise ValueError("no")

    x = torch.ones(1, requires_grad=True)
    with tapped(refuse), pytest.raises(ValueError, match="no"):
        x.sum().backward()
    assert x.grad is None


def test_a_scalar_is_a_copy() -> None:
    x = torch.tensor(1.0, requires_grad=True)
    value = scalar_of(x)
    with torch.no_grad():
        x.add_(1)
    assert value.item() == 1 and not value.requires_grad
    assert scalar_of(torch.tensor(3)) is None and scalar_of(torch.empty(0)) is None


def test_the_scale_is_divided_out_wherever_the_loss_went_after_it() -> None:
    scaler, other = torch.amp.GradScaler("cpu", init_scale=65536.0), Halving("cpu", init_scale=8.0)
    with tapped() as losses:
        scaler.scale(loss(3.0)).backward()
        (scaler.scale(loss(3.0)) / 4).backward()
        (scaler.scale(loss(3.0)) + scaler.scale(loss(4.0))).backward()
        torch.autograd.backward(scaler.scale([loss(1.0), loss(2.0)]))
        torch.autograd.backward((scaler.scale(loss(1.0)), other.scale(loss(2.0)), loss(4.0)))
        loss(5.0).backward()
        torch.amp.GradScaler("cpu", enabled=False).scale(loss(6.0)).backward()
        Strange().scale(loss(3.0)).backward()
    assert losses == [3.0, 0.75, 7.0, 3.0, 7.0, 5.0, 6.0, 6.0]


def train_compiled(steps: int) -> None:
    torch._dynamo.reset()
    net = nn.Linear(3, 2)
    compiled, optimizer = torch.compile(net, backend="eager"), torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(steps):
        step(compiled, optimizer, torch.ones(2, 3))


def test_the_divisor_of_a_loss() -> None:
    free = loss(6.0) / 4
    free.backward()
    assert divisor_of([free]) == 1  # its graph is gone
    ways = [loss(6.0) / 4, 0.25 * loss(6.0), loss(6.0) / 8 * 2 / torch.tensor(1), -loss(6.0), loss(6.0) * 0, loss(6.0)]
    assert [divisor_of([way]) for way in ways] == [4, 4, 4, 1, 1, 1]
    assert divisor_of([loss(1.0) / 4, loss(2.0) / 4]) == 1
    assert (
        divisor_of([nn.functional.cross_entropy(loss(1.0).expand(2, 3), torch.zeros(2).long(), reduction="sum") / 9])
        == math.inf
    )


def test_a_script_that_compiles_and_makes_errors_of_warnings_goes_on() -> None:
    original, filters, notes = modules._has_any_global_hook, list(warnings.filters), []
    with Monitor(every=2, on_trouble=notes.append) as monitor:
        assert warnings.filters == filters
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # after the hooks are on
            train_compiled(5)
    assert monitor.sampled == 4 and ["compiled" in note for note in notes] == [True]
    assert modules._has_any_global_hook is original and not original()


def test_compiled_models_still_warn_of_hooks_of_others() -> None:
    with warnings.catch_warnings(record=True) as caught, HookHandles() as handles:
        warnings.simplefilter("always")
        handles.every_forward_pre(lambda module, args: None)
        with Monitor(every=1, on_trouble=lambda text: None):
            train_compiled(1)
    assert any("global hooks" in str(warning.message) for warning in caught)
