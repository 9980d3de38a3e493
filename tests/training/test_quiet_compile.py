"""A compiled model warns of the hooks of others, not of the watcher's; nothing of them stays."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.modules import module as modules

from hookscope.hooks.registration import HookHandles
from hookscope.training import Monitor


def train(net: nn.Module, steps: int) -> None:
    compiled = torch.compile(net, backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(steps):
        compiled(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_a_script_that_makes_errors_of_warnings_goes_on() -> None:
    torch._dynamo.reset()
    original, kept = modules._has_any_global_hook, dict(modules._global_forward_hooks_with_kwargs)
    filters = list(warnings.filters)
    said: list[str] = []
    with Monitor(every=2, on_trouble=said.append) as monitor:
        assert warnings.filters == filters
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # after the hooks are on
            train(nn.Linear(3, 2), 5)
    assert monitor.sampled == 3 and [text.startswith("no hook tells") for text in said] == [True]
    assert modules._has_any_global_hook is original and not original()
    assert modules._global_forward_hooks_with_kwargs == kept


def test_hooks_of_others_are_warned_of_still() -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as seen, HookHandles() as door:
        warnings.simplefilter("always")
        door.every_forward_pre(lambda module, args: None)
        with Monitor(every=1, on_trouble=lambda text: None):
            train(nn.Linear(3, 2), 1)
    assert any("global hooks" in str(each.message) for each in seen)
