"""Runs that are broken on purpose are told what is wrong with them, and where; sound runs are not accused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookscope.training.log.file import Run
from hookscope.training.log.findings import findings_over_time
from hookscope.training.log.summary import TimedFinding


def norm(tensors: list[torch.Tensor]) -> float | None:
    return torch.stack([t.detach().double().norm() for t in tensors]).norm().item() if tensors else None


def nonfinite(tensors: list[torch.Tensor]) -> int:
    return sum(int((~torch.isfinite(t)).sum()) for t in tensors)


def row_of(name: str, layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    """What the log says of one call, computed the long way round."""
    own = list(layer.parameters(recurse=False))
    gradients = [p.grad for p in own if p.grad is not None]
    weights = [p for name, p in layer.named_parameters(recurse=False) if name == "weight"]
    row: dict[str, Any] = {
        "layer": name,
        "type": type(layer).__name__,
        "activation_mean": y.double().mean().item(),
        "activation_std": y.double().std(correction=0).item(),
        "zero_share": (y == 0).double().mean().item(),
        "channels": y.shape[1],
        "dead_channels": int((y.transpose(0, 1).flatten(1) == 0).all(1).sum()),
        "non_finite": nonfinite([y]),
        "gradient_norm": norm(gradients),
        "gradient_non_finite": nonfinite(gradients) if gradients else None,
        "weight_norm": norm(weights),
        "weight_non_finite": nonfinite(weights) if weights else None,
        "frozen": not any(p.requires_grad for p in own) if own else None,
    }
    if isinstance(layer, nn.BatchNorm2d):
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        spread = layer.running_var + layer.eps
        row["running_mean_shift"] = ((mean - layer.running_mean) / spread.sqrt()).square().mean().sqrt().item()
        row["running_var_ratio"] = ((variance + layer.eps) / spread).log().mean().exp().item()
    return row


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 60,
    every: int = 5,
    scale: float = 1.0,
    before: Callable[[int], None] = lambda _: None,
) -> Run:
    """A plain loop that keeps, at every few steps, what a log would."""
    calls: list[tuple[str, nn.Module, torch.Tensor, torch.Tensor]] = []
    leaves = [(name, layer) for name, layer in net.named_modules() if not list(layer.children())]
    for name, layer in leaves:
        layer.register_forward_hook(
            lambda layer, x, y, name=name: calls.append((name, layer, x[0].detach(), y.detach().clone()))
        )
    rows, began = [], time.perf_counter()
    for step, (x, y) in enumerate(batches(steps)):
        before(step)
        calls.clear()
        optimizer.zero_grad()
        loss = F.cross_entropy(net(scale * x), y)
        loss.backward()
        passed = {"step": step, "time": time.perf_counter() - began, "loss": loss.item(), "optimizer": 0, "model": 0}
        passed["learning_rate"] = optimizer.param_groups[0]["lr"]
        kept = [{**passed, **row_of(*call), "index": at, "call": 0} for at, call in enumerate(calls)]
        old = {name: layer.weight.detach().clone() for name, layer in leaves if hasattr(layer, "weight")}
        optimizer.step()
        for row in kept if step % every == 0 else ():
            weight = old.get(row["layer"])
            if weight is not None and weight.norm() > 0:
                moved = net.get_submodule(row["layer"]).weight.detach() - weight
                row["update_to_weight"] = (moved.double().norm() / weight.double().norm()).item()
            rows.append({name: value if value == value else None for name, value in row.items()})
    return Run({"row": "run", "every": every}, rows, [], None)


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Noisy pictures of four classes."""
    seeded = torch.Generator().manual_seed(0)
    pictures = torch.randn(4, 3, 8, 8, generator=seeded)
    for _ in range(steps):
        classes = torch.randint(4, (16,), generator=seeded)
        yield pictures[classes] + 0.7 * torch.randn(16, 3, 8, 8, generator=seeded), classes


def net(norm: bool = True, function: type[nn.Module] = nn.ReLU, layers: int = 3, momentum: float = 0.1) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body: list[nn.Module] = []
        for before, wide in pairwise([3] + [8] * layers):
            body.append(nn.Conv2d(before, wide, 3, padding=1))
            body += [nn.BatchNorm2d(wide, momentum=momentum)] if norm else []
            body.append(function())
        return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=0.9)


def named(found: list[TimedFinding]) -> list[tuple[str, str]]:
    return [(one.finding, one.layer) for one in found]


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("rate", [0.05, 0.001])
def test_a_sound_run_has_none(every: int, rate: float) -> None:
    model = net()
    run = train(model, sgd(model, rate), 120, every)
    assert findings_over_time(run) == []
    if rate == 0.05:
        assert run.rows[-1]["loss"] < 0.5 * run.rows[0]["loss"]  # it did learn


@pytest.mark.parametrize("steps", [1, 2])
def test_of_a_sound_run_of_few_steps_only_that_is_told(steps: int) -> None:
    model = net()
    [found] = findings_over_time(train(model, sgd(model), steps, 1))
    assert (found.finding, found.layer, found.numbers["sampled"]) == ("few-samples", "", steps)


def test_adam_and_a_schedule_from_0_to_0_are_sound() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def schedule(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 3e-3 * min(step / 10, (99 - step) / 30, 1)

    assert findings_over_time(train(model, optimizer, 100, 3, before=schedule)) == []


def test_a_rate_a_hundred_times_too_large() -> None:
    model = net()
    found = findings_over_time(train(model, sgd(model, 5.0)))
    assert found[0].finding == "update-too-large"
    assert found[0].step == 0
    assert "(learning rate 5)" in found[0].evidence


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.Adam])
def test_a_rate_next_to_0_is_one_finding_for_all_layers(optimizer: Any) -> None:
    model = net()
    [found] = findings_over_time(train(model, optimizer(model if optimizer is sgd else model.parameters(), 1e-9)))
    assert (found.finding, found.step, found.lasts) == ("update-too-small", 0, True)
    assert found.layers == ("0", "1", "3", "4", "6", "7", "11")
    assert "; all 6 other layers too" in found.evidence


def test_a_bias_far_below_0_kills_the_relu_and_what_comes_before_gets_no_gradient() -> None:
    model = net(norm=False)
    model[2].bias.data.fill_(-10)
    found = findings_over_time(train(model, sgd(model)))
    assert named(found) == [("dead-layer", "3"), ("no-gradient", "2")]
    assert found[0].evidence.endswith(
        "to the end: all 8 channels are 0 for the whole batch; this explains dead-channels in 3"
        " layers from '5' to '7', no-update in '4'"
    )
    assert found[1].evidence.endswith("to the end: its gradient is 0 everywhere; '0' too")
    assert found[1].layers == ("0", "2")


def test_a_layer_that_begins_with_zeros() -> None:
    model = net(norm=False)
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    found = findings_over_time(train(model, sgd(model)))
    assert named(found)[:2] == [("dead-layer", "2"), ("no-gradient", "2")]


def test_a_zeroed_scale_that_learns_is_sound() -> None:
    model = net()
    nn.init.zeros_(model[4].weight)
    nn.init.constant_(model[4].bias, 0.1)
    assert "update-too-large" not in dict(named(findings_over_time(train(model, sgd(model), every=1))))


def test_a_frozen_layer() -> None:
    model = net()
    model[3].requires_grad_(False)
    [found] = findings_over_time(train(model, sgd(model)))
    assert (found.finding, found.layer, found.layers) == ("frozen", "3", ("3",))


class Root(nn.Module):
    """A root whose slope at its lowest value is infinite, once it is switched on."""

    on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.amin()).sqrt() if self.on else x.relu()


def test_a_root_of_0_spoils_the_gradient_before_it_and_then_everything() -> None:
    model = net()
    model[5] = Root()

    def switch(step: int) -> None:
        model[5].on = step >= 20

    [found] = findings_over_time(train(model, sgd(model), before=switch))
    assert (found.finding, found.layer, found.step, found.lasts) == ("non-finite", "4", 20, True)
    assert found.numbers["phase"] == "backward"
    assert "its gradient are NaN or Inf; all activations are finite, and so is the gradient of '6' after it" in (
        found.evidence
    )
    assert found.evidence.endswith("; 11 more layers too; at step 15 everything was finite")


def test_twenty_sigmoids_vanish() -> None:
    model = net(False, nn.Sigmoid, 20)
    found = findings_over_time(train(model, sgd(model), 30))
    assert {one.finding for one in found} == {"vanishing-gradient"}
    (first, *_) = found
    assert first.layers[0] == "0" and first.layer == first.layers[-1]
    assert "worst in '0'" in first.evidence


class Branches(nn.Module):
    """One branch of two learns."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x).relu().mean((2, 3)), self.right(x).relu().mean((2, 3))
        return self.fc(torch.cat([left, right.detach() if self.detached else right], 1))


def branches(detached: bool) -> Branches:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Branches(detached)


def test_a_detached_branch() -> None:
    model = branches(detached=True)
    [found] = findings_over_time(train(model, sgd(model)))
    assert (found.finding, found.layer) == ("no-gradient", "right")
    assert found.evidence.endswith("to the end: no gradient arrives")


def test_a_layer_that_no_optimizer_has() -> None:
    model = branches(detached=False)
    optimizer = torch.optim.SGD([*model.left.parameters(), *model.fc.parameters()], 0.05)
    [found] = findings_over_time(train(model, optimizer))
    assert (found.finding, found.layer) == ("no-update", "right")


def test_running_statistics_that_hardly_move() -> None:
    model = net(momentum=1e-4)
    [found] = findings_over_time(train(model, sgd(model), 100, scale=5.0))
    assert (found.finding, found.layer, found.step, found.lasts) == ("batchnorm-drift", "1", 50, True)


def test_a_rate_that_jumps_is_told_from_there_on() -> None:
    model = net()
    optimizer = sgd(model)

    def jump(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 if step < 60 else 20.0

    found = findings_over_time(train(model, optimizer, 120, 2, before=jump))
    assert {"loss-rises", "update-too-large"} <= {one.finding for one in found}
    assert all(one.step >= 60 for one in found)
    assert [one.time for one in found] == sorted(one.time or 0 for one in found)
