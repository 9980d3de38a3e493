"""What a script calls backward on."""

from __future__ import annotations

import pytest
import torch

from hookscope.training.backward_calls import BackwardCalls, scalar_of


def test_values_and_gradients_are_as_without() -> None:
    seen: list[float] = []
    calls, original = BackwardCalls(lambda value, roots: seen.append(value.item())), torch.autograd.backward
    calls.on()
    calls.on()
    try:
        x = torch.ones(2, requires_grad=True)
        (x * 3).sum().backward(retain_graph=True)
        torch.autograd.backward([x.sum(), (2 * x).sum()])
        torch.autograd.backward(x * 2, torch.ones(2))  # a vector times a Jacobian is no loss
        (x * 2).backward(gradient=torch.ones(2))
        torch.autograd.backward(tensors=(x[:1] * 2,))
    finally:
        calls.off()
    assert torch.autograd.backward is original
    assert seen == [6.0, 6.0, 2.0] and x.grad is not None and x.grad.tolist() == [12.0, 10.0]


def test_what_was_put_over_it_stays() -> None:
    seen: list[float] = []
    calls, original = BackwardCalls(lambda value, roots: seen.append(value.item())), torch.autograd.backward
    calls.on()
    ours = torch.autograd.backward

    def theirs(*args: object, **kwargs: object) -> None:
        ours(*args, **kwargs)  # type: ignore[arg-type]

    torch.autograd.backward = theirs
    calls.off()
    try:
        assert torch.autograd.backward is theirs
        x = torch.ones(1, requires_grad=True)
        x.sum().backward()
        assert seen == [] and x.grad is not None
    finally:
        torch.autograd.backward = original


def test_what_it_raises_comes_in_place_of_the_pass() -> None:
    def refuse(value: object, roots: object) -> None:
        raise ValueError("no")

    calls = BackwardCalls(refuse)
    calls.on()
    x = torch.ones(1, requires_grad=True)
    try:
        with pytest.raises(ValueError, match="no"):
            x.sum().backward()
    finally:
        calls.off()
    assert x.grad is None


def test_a_scalar_is_a_copy() -> None:
    x = torch.tensor(1.0, requires_grad=True)
    value = scalar_of(x)
    with torch.no_grad():
        x.add_(1)
    assert value is not None and value.item() == 1 and not value.requires_grad
    assert scalar_of(torch.tensor(3)) is None and scalar_of(torch.empty(0)) is None
