"""Wrapped functions of torch see the loss, do what they did before, and are put back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from hookscope.hooks.registration import HookHandles
from hookscope.training import Monitor
from hookscope.training.loss_tap import LossTap, Patch, scalar_of


class Halving(torch.amp.GradScaler):
    """A scaler with a method of its own."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs) * 1.0


@contextmanager
def tapped() -> Iterator[list[float]]:
    """The losses of the block; the wrapped functions are back afterwards."""
    losses: list[float] = []
    tap = LossTap(lambda value, roots: losses.append(value.item()))
    originals = torch.amp.GradScaler.scale, Halving.scale, torch.autograd.backward
    tap.on()
    tap.on()
    try:
        yield losses
    finally:
        tap.off()
    assert (torch.amp.GradScaler.scale, Halving.scale, torch.autograd.backward) == originals


def loss(value: float) -> torch.Tensor:
    return torch.tensor([value], requires_grad=True).sum()


class TestPatch:
    def double(self, original: Callable[[int], int], value: int) -> int:
        return 2 * original(value)

    def add_one(self, value: int) -> int:
        return value + 1

    def test_the_original_is_put_back(self) -> None:
        owner = SimpleNamespace(f=self.add_one)
        patch = Patch(owner, "f", self.double)
        patch.on()
        first = owner.f
        patch.on()
        assert owner.f is first and owner.f(1) == 4 and owner.f.__name__ == "add_one"
        patch.off()
        patch.off()
        assert owner.f == self.add_one and first(1) == 2

    def test_two_that_end_in_the_wrong_order(self) -> None:
        owner = SimpleNamespace(f=self.add_one)
        inner, outer = Patch(owner, "f", self.double), Patch(owner, "f", self.double)
        inner.on()
        outer.on()
        assert owner.f(1) == 8
        inner.off()
        assert owner.f(1) == 4  # the outer patch stays
        outer.off()
        assert owner.f(1) == 2


class TestBackward:
    def test_losses_are_seen_and_gradients_stay_the_same(self) -> None:
        x = torch.ones(2, requires_grad=True)
        with tapped() as losses:
            (x * 3).sum().backward(retain_graph=True)
            torch.autograd.backward([x.sum(), (2 * x).sum()])
            torch.autograd.backward(x * 2, torch.ones(2))  # a vector-Jacobian product has no loss
            (x * 2).backward(gradient=torch.ones(2))
            torch.autograd.backward(tensors=(x[:1] * 2,))
        assert losses == [6.0, 6.0, 2.0] and x.grad is not None and x.grad.tolist() == [12.0, 10.0]

    def test_a_wrapper_put_over_it_stays(self) -> None:
        losses: list[float] = []
        tap, original = LossTap(lambda value, roots: losses.append(value.item())), torch.autograd.backward
        tap.on()
        ours = torch.autograd.backward

        def theirs(*args: object, **kwargs: object) -> None:
            ours(*args, **kwargs)  # type: ignore[arg-type]

        torch.autograd.backward = theirs
        tap.off()
        try:
            assert torch.autograd.backward is theirs
            x = torch.ones(1, requires_grad=True)
            x.sum().backward()
            assert losses == [] and x.grad is not None
        finally:
            torch.autograd.backward = original

    def test_an_exception_of_on_loss_replaces_the_backward_pass(self) -> None:
        def refuse(value: object, roots: object) -> None:
            raise ValueError("no")

        tap, x = LossTap(refuse), torch.ones(1, requires_grad=True)
        tap.on()
        try:
            with pytest.raises(ValueError, match="no"):
                x.sum().backward()
        finally:
            tap.off()
        assert x.grad is None

    def test_an_iterator_is_consumed_once(self) -> None:
        leaves = [torch.tensor([value], requires_grad=True) for value in (1.0, 2.0)]
        with tapped() as losses:
            torch.autograd.backward(iter([leaf.sum() for leaf in leaves]))
        assert losses == [3.0] and all(leaf.grad is not None for leaf in leaves)

    def test_a_scalar_is_a_copy(self) -> None:
        x = torch.tensor(1.0, requires_grad=True)
        value = scalar_of(x)
        with torch.no_grad():
            x.add_(1)
        assert value is not None and value.item() == 1 and not value.requires_grad
        assert scalar_of(torch.tensor(3)) is None and scalar_of(torch.empty(0)) is None


class TestLossScale:
    def test_the_scale_is_divided_out_wherever_the_loss_went_after_it(self) -> None:
        scaler, other = torch.amp.GradScaler("cpu", init_scale=65536.0), Halving("cpu", init_scale=8.0)
        with tapped() as losses:
            scaler.scale(loss(3.0)).backward()
            (scaler.scale(loss(3.0)) / 4).backward()
            (scaler.scale(loss(3.0)) + scaler.scale(loss(4.0))).backward()
            torch.autograd.backward(scaler.scale([loss(1.0), loss(2.0)]))
            torch.autograd.backward((scaler.scale(loss(1.0)), other.scale(loss(2.0)), loss(4.0)))
            loss(5.0).backward()
            torch.amp.GradScaler("cpu", enabled=False).scale(loss(6.0)).backward()
        assert losses == [3.0, 0.75, 7.0, 3.0, 7.0, 5.0, 6.0]

    def test_a_scaler_built_unlike_that_of_torch_has_no_scale(self) -> None:
        class Strange(torch.amp.GradScaler):
            def __init__(self) -> None:
                pass

            def scale(self, outputs: Any) -> Any:
                return outputs * 2

        with tapped() as losses:
            Strange().scale(loss(3.0)).backward()
        assert losses == [6.0]


class TestCompile:
    def train(self, steps: int) -> None:
        net = nn.Linear(3, 2)
        compiled = torch.compile(net, backend="eager")
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(steps):
            compiled(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    def test_a_script_that_makes_errors_of_warnings_goes_on(self) -> None:
        torch._dynamo.reset()
        original, hooks = modules._has_any_global_hook, dict(modules._global_forward_hooks_with_kwargs)
        filters = list(warnings.filters)
        notes: list[str] = []
        with Monitor(every=2, on_trouble=notes.append) as monitor:
            assert warnings.filters == filters
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # after the hooks are on
                self.train(5)
        assert monitor.sampled == 3 and ["compiled" in note for note in notes] == [True]
        assert modules._has_any_global_hook is original and not original()
        assert modules._global_forward_hooks_with_kwargs == hooks

    def test_hooks_of_others_still_cause_the_warning(self) -> None:
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught, HookHandles() as handles:
            warnings.simplefilter("always")
            handles.every_forward_pre(lambda module, args: None)
            with Monitor(every=1, on_trouble=lambda text: None):
                self.train(1)
        assert any("global hooks" in str(warning.message) for warning in caught)
