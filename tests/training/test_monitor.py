"""Monitor against a plain recording loop written by hand, and the run it watches against the same one unwatched."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hookscope.errors import LayerError, ModelError, NonFiniteError, UsageError, WriteError
from hookscope.training import Monitor
from hookscope.training.log.file import RunLog, read_runs

ROOT = Path(__file__).parents[2]


class Small(nn.Module):
    """Convolution, BatchNorm, an in-place ReLU that runs twice, dropout, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.25)
        self.fc1 = nn.Linear(4 * 16, 6)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = self.relu(self.fc1(self.drop(x.flatten(1))))
        return self.fc2(x)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    net = Small()
    with torch.no_grad():
        net.bn.bias[2] = -50  # a dead channel
    return net


def batches(count: int = 4, size: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, 1, 6, 6, generator=made), torch.randint(0, 3, (size,), generator=made)) for _ in range(count)
    ]


def nothing() -> None:
    """What happens after a step where nothing is to happen."""


def train(net: nn.Module, optimizer: torch.optim.Optimizer, data: Any, after: Callable[[], None] = nothing) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        after()


def with_sgd(net: Any, lr: float = 0.1) -> tuple[Any, torch.optim.SGD]:
    return net, torch.optim.SGD(net.parameters(), lr=lr)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> None:
    net(torch.ones(1, 2) if x is None else x).sum().backward()
    optimizer.step()


def by_key(rows: list[dict[str, Any]], step: int = 0, optimizer: int = 0) -> dict[tuple[str, int], dict[str, Any]]:
    return {(r["layer"], r["call"]): r for r in rows if r["step"] == step and r["optimizer"] == optimizer}


def hand_metrics(values: torch.Tensor) -> dict[str, Any]:
    """The metrics of an activation, computed the plain and slow way."""
    values = values.double()
    dead = sum(not bool(values[:, c].any()) for c in range(values.shape[1]))
    return {
        "activation_mean": float(values.mean()),
        "activation_std": float(values.std(correction=0)),
        "zero_share": float((values == 0).double().mean()),
        "channels": values.shape[1],
        "dead_channels": dead,
        "non_finite": 0,
    }


def hand_step(net: Small, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[tuple[str, int], torch.Tensor]]:
    """The forward pass written out, with a copy of everything on its way."""
    kept: dict[tuple[str, int], torch.Tensor] = {}

    def keep(name: str, call: int, value: torch.Tensor) -> torch.Tensor:
        kept[name, call] = value.detach().clone()
        return value

    x = keep("conv", 0, F.conv2d(x, net.conv.weight, net.conv.bias))
    bn = net.bn
    x = keep("bn", 0, F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, True, 0.1, bn.eps))
    x = keep("relu", 0, F.relu(x))
    x = keep("drop", 0, F.dropout(x.flatten(1), 0.25, True))
    x = keep("fc1", 0, F.linear(x, net.fc1.weight, net.fc1.bias))
    x = keep("relu", 1, F.relu(x))
    x = keep("fc2", 0, F.linear(x, net.fc2.weight, net.fc2.bias))
    return F.cross_entropy(x, y), kept


ORDER = [("conv", 0), ("bn", 0), ("relu", 0), ("drop", 0), ("fc1", 0), ("relu", 1), ("fc2", 0)]


def close(a: Any, b: Any) -> bool:
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=2e-4, abs_tol=2e-6)


def test_every_figure_is_that_of_a_plain_recording_loop() -> None:
    watched, plain = small(), small()
    data = batches()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (watched, plain)]
    torch.manual_seed(3)
    with Monitor(watched, optimizers[0], every=2) as monitor:
        train(watched, optimizers[0], data)
    torch.manual_seed(3)
    for step, (x, y) in enumerate(data):
        running = plain.bn.running_mean.clone(), plain.bn.running_var.clone()
        loss, kept = hand_step(plain, x, y)
        optimizers[1].zero_grad()
        loss.backward()
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in plain.named_parameters()}
        optimizers[1].step()
        if step % 2:
            continue
        rows = by_key(monitor.rows, step)
        assert [(r["layer"], r["call"]) for r in sorted(rows.values(), key=lambda r: r["index"])] == ORDER
        for key, values in kept.items():
            row = rows[key]
            for name, value in hand_metrics(values).items():
                assert close(row[name], value), (key, name, row[name], value)
            assert close(row["loss"], loss.item()) and row["learning_rate"] == 0.1
            assert (row["step"], row["model"], row["optimizer"]) == (step, 0, 0)
            assert row["type"] == type(plain.get_submodule(key[0])).__name__
            own = [name for name in before if name.rpartition(".")[0] == key[0]]
            if not own:
                assert row["gradient_norm"] is row["weight_norm"] is row["update_to_weight"] is row["frozen"] is None
                continue
            weight = f"{key[0]}.weight"
            update = dict(plain.named_parameters())[weight].detach() - before[weight]
            flat = torch.cat([gradients[name].flatten() for name in own])
            assert close(row["gradient_norm"], float(flat.norm()))
            assert close(row["weight_norm"], float(before[weight].norm()))
            assert close(row["update_to_weight"], float(update.norm() / before[weight].norm()))
            assert (row["gradient_non_finite"], row["weight_non_finite"], row["frozen"]) == (0, 0, False)
        batch = kept["conv", 0]
        mean, variance = batch.mean((0, 2, 3)), batch.var((0, 2, 3), correction=0)
        shift = ((mean - running[0]) / (running[1] + plain.bn.eps).sqrt()).square().mean().sqrt()
        ratio = ((variance + plain.bn.eps) / (running[1] + plain.bn.eps)).log().mean().exp()
        assert close(rows["bn", 0]["running_mean_shift"], float(shift))
        assert close(rows["bn", 0]["running_var_ratio"], float(ratio))
        assert rows["conv", 0]["running_mean_shift"] is None
    assert [r["dead_channels"] for r in monitor.rows if r["layer"] == "relu" and r["call"] == 0] == [1, 1]
    assert (monitor.steps, monitor.sampled, monitor.trouble) == (4, 2, None)
    assert sorted({r["step"] for r in monitor.rows}) == [0, 2]


def seeded_run(watching: Callable[[nn.Module, Any], Any]) -> tuple[bytes, torch.Tensor]:
    """Weights and random state after two epochs with shuffling, dropout and momentum."""
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    xs, ys = (torch.cat(part) for part in zip(*batches(), strict=True))
    with watching(net, optimizer):
        for _ in range(2):
            train(net, optimizer, DataLoader(TensorDataset(xs, ys), batch_size=4, shuffle=True))
    stream = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict()["state"]], stream)
    return stream.getvalue(), torch.get_rng_state()


@pytest.mark.parametrize("model_is_given", [True, False])
@pytest.mark.parametrize("options", [{}, {"stop_on": "non-finite"}, {"tensorboard": True}, {"log": True}], ids=str)
def test_a_seeded_run_ends_with_the_same_bits(options: Any, model_is_given: bool, tmp_path: Path) -> None:
    from contextlib import nullcontext

    for name in ("tensorboard", "log"):
        if name in options:
            options = options | {name: str(tmp_path / name)}
    bits, chance = seeded_run(lambda net, optimizer: nullcontext())
    seen, chance_seen = seeded_run(
        lambda net, optimizer: Monitor(*((net, optimizer) if model_is_given else ()), every=1, **options)
    )
    assert seen == bits and torch.equal(chance, chance_seen)


def test_hooks_are_gone_after_the_block_and_after_an_exception() -> None:
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    tables = [modules._global_forward_hooks, modules._global_forward_pre_hooks]
    tables += [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    before, backward = [dict(table) for table in tables], torch.autograd.backward
    for error in (None, ValueError("x"), KeyboardInterrupt(), SystemExit(3)):
        with suppress(BaseException), Monitor(every=1):
            assert all(tables) and torch.autograd.backward is not backward
            if error is not None:
                raise error
        assert [dict(table) for table in tables] == before and torch.autograd.backward is backward


def test_module_hooks_are_on_only_for_a_step_that_is_sampled() -> None:
    from torch.nn.modules import module as modules

    net, on = small(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(every=3):
        on.append(bool(modules._global_forward_hooks))
        train(net, optimizer, batches(), lambda: on.append(bool(modules._global_forward_hooks)))
    assert on == [True, False, False, True, False]


def test_the_model_can_be_copied_and_saved_within(tmp_path: Path) -> None:
    net, optimizer = with_sgd(small())

    def copies() -> None:
        copy.deepcopy(net)
        assert pickle.loads(pickle.dumps(net)).conv._forward_hooks == {}
        torch.save(net, tmp_path / "net.pt")

    with Monitor(every=1) as monitor:
        train(net, optimizer, batches(), copies)
    assert monitor.sampled == 4 and monitor.trouble is None


class TestPasses:
    def test_accumulated_passes_are_one_batch(self) -> None:
        net, data = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(8, 3, generator=torch.Generator())
        whole, parts = [], []
        for chunks, rows in ((1, whole), (4, parts)):
            twin = copy.deepcopy(net)
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
            with Monitor(every=1) as monitor:
                for part in data.chunk(chunks):
                    (twin(part).square().mean() / chunks).backward()
                optimizer.step()
            rows += monitor.rows
        for a, b in zip(whole, parts, strict=True):
            assert all(close(a[k], b[k]) if isinstance(a[k], float) else a[k] == b[k] for k in a if k != "time")

    def test_dead_is_dead_in_every_pass(self) -> None:
        net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU())
        with torch.no_grad():
            net[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with Monitor(every=1) as monitor:
            for signs in ([1.0], [1.0, -1.0]):
                for sign in signs:
                    net(torch.full((2, 1), sign)).sum().backward()
                optimizer.step()
        assert [by_key(monitor.rows, step)["1", 0]["dead_channels"] for step in (0, 1)] == [1, 0]

    def test_batch_norm_over_accumulated_passes(self) -> None:
        net, optimizer = with_sgd(nn.BatchNorm1d(2))
        x = torch.randn(12, 2, generator=torch.Generator().manual_seed(1)) * 3 + 5
        with Monitor(every=1) as monitor:
            for part in x.split([4, 8]):
                net(part).sum().backward()
            optimizer.step()
        (row,) = monitor.rows
        assert close(row["running_mean_shift"], float((x.mean(0) / math.sqrt(1 + 1e-5)).square().mean().sqrt()))
        ratio = ((x.var(0, correction=0) + 1e-5) / (1 + 1e-5)).log().mean().exp()
        assert close(row["running_var_ratio"], float(ratio))

    def test_validation_and_recomputation_are_no_passes(self) -> None:
        net, optimizer = with_sgd(small())
        (x, y), (other, _), *_ = batches()
        with Monitor(net, every=1) as monitor:
            with torch.no_grad():
                net.eval()(other * 100)
            net.train()
            hidden = checkpoint(lambda v: net.relu(net.bn(net.conv(v))), x, use_reentrant=False)
            F.cross_entropy(net.fc2(net.relu(net.fc1(hidden.flatten(1)))), y).backward()
            optimizer.step()
        keys = [(r["layer"], r["call"]) for r in monitor.rows]
        assert len(keys) == len(set(keys)) and abs(by_key(monitor.rows)["conv", 0]["activation_mean"]) < 5

    def test_a_forward_that_raised_and_was_caught_is_over(self) -> None:
        class Fails(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.fail = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), True

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.inner(x)
                if self.fail:
                    raise ValueError("no")
                return self.inner(x)

        net, optimizer = with_sgd(Fails())
        with Monitor(every=1) as monitor:
            with pytest.raises(ValueError, match="no"):
                net(torch.ones(1, 2))
            net.fail = False
            step(net, optimizer)
            net.inner(torch.ones(1, 2)).sum().backward()  # a part of it alone keeps its names
            optimizer.step()
        assert [(r["layer"], r["call"]) for r in monitor.rows if r["step"] == 0] == [
            ("inner.0", 0), ("inner.1", 0), ("inner.0", 1), ("inner.1", 1)]  # fmt: skip
        assert [r["layer"] for r in monitor.rows if r["step"] == 1] == ["inner.0", "inner.1"]

    def test_a_model_that_calls_itself(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(2, 2)

            def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
                x = self.fc(x)
                return self(x, again=False) if again else x

        net, optimizer = with_sgd(Twice())
        with Monitor(every=1) as monitor:
            step(net, optimizer)
        assert [(r["layer"], r["call"]) for r in monitor.rows] == [("fc", 0), ("fc", 1)]

    def test_a_layer_that_is_put_in_later(self) -> None:
        net, optimizer = with_sgd(nn.Sequential(nn.Linear(2, 2)))
        with Monitor(every=1) as monitor:
            step(net, optimizer)
            net.append(nn.Tanh())
            step(net, optimizer)
        assert [r["layer"] for r in monitor.rows] == ["0", "0", "1"]


class TestOptimizers:
    def test_two_in_turn_each_see_their_own_part(self) -> None:
        torch.manual_seed(0)
        generator, critic = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        of_generator = torch.optim.SGD(generator.parameters(), lr=0.2)
        losses = []
        with Monitor(every=2) as monitor:
            for _ in range(4):
                fake = generator(torch.randn(4, 2))
                losses.append(critic(torch.ones(4, 3)).mean() - critic(fake.detach()).mean())
                losses[-1].backward()
                of_critic.step()
                losses.append(critic(fake).mean())
                of_generator.zero_grad()
                losses[-1].backward()
                of_generator.step()
        for number, types in ((0, ["Linear", "Sigmoid"]), (1, ["Linear", "Tanh"])):
            rows = [r for r in monitor.rows if r["optimizer"] == number]
            assert [(r["step"], r["type"]) for r in rows] == [(step, kind) for step in (0, 2) for kind in types]
            assert {r["learning_rate"] for r in rows} == {(0.1, 0.2)[number]}
            assert close(rows[-1]["loss"], losses[4 + number].item()) and rows[0]["gradient_norm"] > 0
        assert monitor.steps == 8 and monitor.sampled == 4

    def test_two_of_one_model_share_its_passes(self) -> None:
        net = small()
        first = torch.optim.SGD(net.conv.parameters(), lr=0.1)
        second = torch.optim.SGD([*net.fc1.parameters(), *net.fc2.parameters(), *net.bn.parameters()], lr=0.2)
        with Monitor(every=1) as monitor:
            for x, y in batches(2):
                F.cross_entropy(net(x), y).backward()
                first.step()
                second.step()
        assert {r["layer"] for r in monitor.rows if r["optimizer"] == 0} == {"conv", "relu", "drop"}
        rows = by_key(monitor.rows, 1, 1)
        assert {name for name, _ in rows} == {"bn", "fc1", "fc2", "relu", "drop"}
        assert rows["fc1", 0]["loss"] == by_key(monitor.rows, 1, 0)["conv", 0]["loss"] is not None

    def test_groups_schedulers_and_frozen_layers(self) -> None:
        net = small()
        net.conv.requires_grad_(False)
        optimizer = torch.optim.SGD([{"params": net.fc1.parameters(), "lr": 0.5},
                                     {"params": net.fc2.parameters(), "lr": 0.25}])  # fmt: skip
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        with Monitor(every=1) as monitor:
            train(net, optimizer, batches(2), schedule.step)
        rates = {(r["step"], r["layer"]): r["learning_rate"] for r in monitor.rows}
        assert rates[0, "fc1"] == rates[0, "relu"] == 0.5 and rates[0, "fc2"] == 0.25
        assert math.isclose(rates[1, "fc2"], 0.025)
        conv = by_key(monitor.rows)["conv", 0]
        assert conv["frozen"] is True and conv["gradient_norm"] is None and conv["update_to_weight"] == 0
        assert ("bn", 0) not in by_key(monitor.rows)  # it could learn, but this optimizer does not hold it

    def test_a_layer_that_no_optimizer_holds_is_told_once_that_is_known(self) -> None:
        net = small()
        optimizer = torch.optim.SGD(net.fc2.parameters(), lr=0.5)
        other = torch.optim.SGD(net.bn.parameters(), lr=0.5)
        with Monitor(net, optimizer, every=1) as monitor:
            train(net, optimizer, batches(3), other.step)
        for step, layers in ((0, set()), (1, {"conv", "fc1"}), (2, {"conv", "fc1"})):
            rows = by_key(monitor.rows, step)
            assert {name for name, _ in rows} - {"fc2", "relu", "drop"} == layers
            assert all(rows[name, 0]["gradient_norm"] > 0 == rows[name, 0]["update_to_weight"] for name in layers)

    @pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
    def test_a_step_with_a_closure(self, kind: str) -> None:
        torch.manual_seed(0)
        net, x = nn.Linear(3, 1), torch.randn(6, 3)
        optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
        if kind == "lbfgs":
            optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
        losses: list[float] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (net(x) - 1).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            return loss

        with Monitor(every=1) as monitor:
            for _ in range(2):
                losses.clear()
                optimizer.step(closure)
        row = monitor.rows[-1]
        assert len(monitor.rows) == 2 and close(row["loss"], losses[0])
        gradient = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
        assert close(row["gradient_norm"], float(gradient)) and row["update_to_weight"] > 0

    def test_a_step_within_a_step_and_one_that_raised(self) -> None:
        class Mine(torch.optim.SGD):
            fails = False

            def step(self, closure: Any = None) -> None:
                if self.fails:
                    raise ValueError("no")
                super().step(closure)

        torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)  # makes torch look at the step of the base too
        net = nn.Linear(2, 2)
        optimizer = Mine(net.parameters(), 0.1)
        with Monitor(every=1) as monitor:
            for fails in (True, False, False):
                optimizer.fails = fails
                net(torch.ones(1, 2)).sum().backward()
                if fails:
                    with pytest.raises(ValueError, match="no"):
                        optimizer.step()
                else:
                    optimizer.step()
        assert monitor.steps == 2 and [r["step"] for r in monitor.rows] == [0, 1]

    @pytest.mark.parametrize("given", [True, False])
    def test_one_that_steps_another(self, given: bool) -> None:
        class Outer(torch.optim.Optimizer):
            def __init__(self, inner: torch.optim.Optimizer) -> None:
                super().__init__(inner.param_groups, {})
                self.inner = inner

            def step(self, closure: Any = None) -> None:
                self.inner.step()

        net = nn.Linear(2, 2)
        optimizer = Outer(torch.optim.SGD(net.parameters(), 0.1))
        with Monitor(*((net, optimizer) if given else ()), every=2) as monitor:
            for _ in range(3):
                step(net, optimizer)
        assert monitor.steps == 3 and [(r["step"], r["optimizer"]) for r in monitor.rows] == [(0, 0), (2, 0)]
        assert monitor.rows[0]["update_to_weight"] > 0

    def test_a_grad_scaler_that_passes_over_a_step(self) -> None:
        net, optimizer = with_sgd(nn.Linear(2, 2))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with Monitor(every=1, stop_on="non-finite") as monitor:
            for spoilt in (False, True, False):
                optimizer.zero_grad()
                scaler.scale(net(torch.ones(1, 2)).sum()).backward()
                if spoilt:
                    assert net.weight.grad is not None
                    net.weight.grad[0, 0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
        assert [r["step"] for r in monitor.rows] == [0, 1] and monitor.trouble is None

    @pytest.mark.parametrize("kind", ["plain", "fused", "unscaled by hand"])
    def test_under_a_grad_scaler_metrics_are_as_without(self, kind: str) -> None:
        def run(scaler: torch.amp.GradScaler, fused: bool) -> list[dict[str, Any]]:
            torch.manual_seed(0)
            net = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=fused)
            with Monitor(every=2) as monitor:
                for step in range(5):
                    optimizer.zero_grad()
                    scaler.scale(net(torch.full((4, 3), 1.0 + step)).square().mean()).backward()
                    if kind == "unscaled by hand":
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
            return monitor.rows

        plain = run(torch.amp.GradScaler("cpu", enabled=False), False)
        scaled = run(torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=2), kind == "fused")
        assert [row["step"] for row in plain] == [row["step"] for row in scaled] == [0, 2, 4]
        for ours, theirs in zip(scaled, plain, strict=True):
            for name in ("loss", "gradient_norm", "weight_norm", "update_to_weight"):
                assert close(ours[name], theirs[name]), name

    def test_a_step_that_a_fused_optimizer_leaves_out_is_not_sampled(self) -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with Monitor(every=2) as monitor:
            for spoilt in (True, False, True, False, False):
                optimizer.zero_grad()
                scaler.scale(net(torch.ones(1, 2)).sum()).backward()
                if spoilt:
                    assert net.weight.grad is not None
                    net.weight.grad[0, 0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
        # the first is passed over, the third left out at a step that is not sampled: that one counts
        assert [r["step"] for r in monitor.rows] == [0, 2] and monitor.steps == 4
        assert [r["gradient_non_finite"] for r in monitor.rows] == [0, 0]

    def test_one_that_never_steps_again_is_not_waited_for(self) -> None:
        from torch.nn.modules import module as modules

        net, other = nn.Linear(1, 1), nn.Linear(1, 1)
        short, long = (torch.optim.SGD(each.parameters(), 0.0) for each in (net, other))
        with Monitor(every=2):
            for _ in range(2):
                step(net, short, torch.ones(1, 1))
            for _ in range(121):
                step(other, long, torch.ones(1, 1))
            assert not modules._global_forward_hooks

    def test_the_loss_where_backward_is_not_called(self) -> None:
        net, judge = nn.Linear(2, 1), nn.MSELoss()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with Monitor(every=1) as monitor:
            loss = judge(net(torch.ones(3, 2)), torch.zeros(3, 1))
            for p, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
                p.grad = gradient
            optimizer.step()
        (row,) = monitor.rows
        assert close(row["loss"], loss.item()) and row["type"] == "Linear"


class TestKindsOfModels:
    def watch(self, net: nn.Module, call: Callable[[], torch.Tensor], steps: int = 2, **options: Any) -> Monitor:
        with Monitor(every=1, **options) as monitor:
            first = call()  # a lazy model has its parameters after its first pass
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            first.backward()
            optimizer.step()
            for _ in range(steps - 1):
                call().backward()
                optimizer.step()
        assert monitor.trouble is None and monitor.steps == steps
        return monitor

    def test_recurrent_and_attention(self) -> None:
        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(3, 4, batch_first=True)
                self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

            def forward(self, x: torch.Tensor) -> dict[str, Any]:
                x, state = self.lstm(x)
                return {"out": self.attention(x, x, x), "state": state}

        net = Mixed()
        monitor = self.watch(net, lambda: net(torch.randn(2, 5, 3))["out"][0].sum())
        rows = by_key(monitor.rows)
        lstm = torch.cat([p.flatten() for n, p in Mixed().lstm.named_parameters() if "bias" not in n])
        assert rows["lstm", 0]["weight_norm"] > 0 and lstm.numel() == 4 * 4 * (3 + 4)
        assert rows["attention", 0]["gradient_norm"] > 0 and rows["attention", 0]["channels"] == 4

    def test_lazy_layers(self) -> None:
        net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU())
        monitor = self.watch(net, lambda: net(torch.randn(4, 2)).sum())
        assert [r["type"] for r in monitor.rows if r["step"] == 1] == ["Linear", "BatchNorm1d", "ReLU"]

    @pytest.mark.filterwarnings("ignore:Complex modules")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
    def test_other_numbers(self, dtype: torch.dtype) -> None:
        net = nn.Linear(3, 2).to(dtype)
        monitor = self.watch(net, lambda: net(torch.ones(4, 3, dtype=dtype)).abs().sum(), stop_on="non-finite")
        assert monitor.rows[0]["weight_norm"] > 0 and monitor.rows[0]["activation_std"] >= 0

    def test_autocast_and_empty_tensors(self) -> None:
        net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())

        def call() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return net(torch.randn(4, 3)).sum() + net(torch.empty(0, 3)).sum()

        monitor = self.watch(net, call, stop_on="non-finite")
        assert monitor.rows[0]["activation_mean"] is not None
        empty = self.watch(net, lambda: net(torch.empty(0, 3)).sum())
        assert empty.rows[0]["activation_mean"] is None and empty.rows[0]["zero_share"] is None

    def test_tied_and_parametrized_weights(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)
                self.out.weight = self.words.weight
                self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.out(self.normed(self.words(x)))

        net = Tied()
        monitor = self.watch(net, lambda: net(torch.tensor([[0, 1]])).square().sum())
        rows = by_key(monitor.rows)
        assert list(rows) == [("words", 0), ("normed", 0), ("out", 0)]
        assert rows["words", 0]["weight_norm"] == rows["out", 0]["weight_norm"]
        assert rows["normed", 0]["weight_norm"] > 0

    def test_a_sparse_gradient(self) -> None:
        net = nn.Embedding(5, 2, sparse=True)
        monitor = self.watch(net, lambda: net(torch.tensor([1, 1, 3])).sum(), stop_on="non-finite")
        assert close(monitor.rows[0]["gradient_norm"], math.sqrt(2 * 4 + 2 * 1))

    def test_names_without_the_words_of_wrappers(self) -> None:
        net = nn.DataParallel(small())
        monitor = self.watch(net, lambda: net(torch.randn(4, 1, 6, 6)).sum())
        assert {name for name, _ in by_key(monitor.rows)} == {name for name, _ in ORDER}

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize("given", [True, False])
    def test_compiled_models_have_metrics_of_parameters(self, in_place: bool, given: bool) -> None:
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        counter, inner, said = CompileCounter(), nn.Sequential(nn.Linear(2, 3), nn.Sigmoid()), []
        net: Any = inner
        if in_place:
            inner.compile(backend=counter)
        else:
            net = torch.compile(inner, backend=counter)
        optimizer = torch.optim.SGD(inner.parameters(), 0.1)
        with Monitor(*((net, optimizer) if given else ()), every=2, on_trouble=said.append) as monitor:
            for _ in range(20):
                step(net, optimizer)
        assert len(said) == 1 and "compiled" in said[0]
        rows = by_key(monitor.rows, 18)
        assert rows["0", 0]["gradient_norm"] > 0 and rows["0", 0]["index"] is None
        assert rows["0", 0]["activation_mean"] is None and rows["0", 0]["loss"] is not None
        assert counter.frame_count <= 2  # as hooks come and go nothing is compiled anew each time

    def test_functional_transforms_are_passed_over(self) -> None:
        net, optimizer = with_sgd(nn.Linear(2, 1))
        with Monitor(every=1, stop_on="non-finite") as monitor:
            torch.func.vmap(net)(torch.ones(3, 2))
            torch.func.grad(lambda x: net(x).sum())(torch.ones(3, 2))
            step(net, optimizer, torch.ones(3, 2))
        assert monitor.trouble is None and len(monitor.rows) == 1


class TestChoice:
    def test_layers_and_types(self) -> None:
        data = batches(1)
        for options, names in (
            ({"layers": "fc*"}, ["fc1", "fc2"]),
            ({"layers": "relu#1"}, ["relu"]),
            ({"types": ("Linear",)}, ["fc1", "fc2"]),
            ({"types": ("Linear",), "layers": "-1"}, ["fc2"]),
            ({"layers": "0:2"}, ["conv", "bn"]),
            ({"layers": ["conv", "fc2"]}, ["conv", "fc2"]),
        ):
            net, optimizer = with_sgd(small())
            with Monitor(net, optimizer, **options) as monitor:
                train(net, optimizer, data)
            assert [r["layer"] for r in monitor.rows] == names, options

    def test_what_does_not_fit_is_refused_on_entry(self) -> None:
        net = small()
        with pytest.raises(LayerError, match=r"no layer 'fc3'.*nearest: fc"), Monitor(net, layers="fc3"):
            pass
        with pytest.raises(LayerError, match="no layer of type Conv3d"), Monitor(net, types=("Conv3d",)):
            pass
        stranger = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        with pytest.raises(LayerError, match="no parameter of the model"), Monitor(net, stranger):
            pass

    def test_what_cannot_be_is_refused_at_once(self) -> None:
        for every in (0, -1, 1.5, True):
            with pytest.raises(UsageError, match="every"):
                Monitor(every=every)
        with pytest.raises(UsageError, match=r"nearest: non-finite"):
            Monitor(stop_on="nonfinite")
        with pytest.raises(UsageError, match=r"optimizer must be .*, not int"):
            Monitor(optimizer=3)
        with pytest.raises(ModelError, match=r"model must be .*, not str"):
            Monitor("resnet18")

    @pytest.mark.filterwarnings("ignore:.*deprecated")
    def test_scripted_models_are_refused(self) -> None:
        with pytest.raises(ModelError, match="scripted"):
            Monitor(torch.jit.script(nn.ReLU()))

    def test_a_selection_that_meets_nothing_is_said_once(self) -> None:
        (net, optimizer), said = with_sgd(small()), []
        with Monitor(every=1, layers="fc3", on_trouble=said.append) as monitor:
            train(net, optimizer, batches())
        assert len(said) == 1 and "no layer 'fc3' in Small" in said[0] and monitor.steps == 4

    def test_only_the_given_model_and_optimizer(self) -> None:
        net, other = small(), nn.Linear(1, 1)
        optimizer, second = (torch.optim.SGD(each.parameters(), 0.1) for each in (net, other))
        with Monitor(net, optimizer, every=1) as monitor:
            for x, y in batches(2):
                step(other, second, torch.ones(1, 1))
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
        assert monitor.steps == 2 and {r["layer"] for r in monitor.rows} == {name for name, _ in ORDER}


class TestStop:
    def run(self, net: nn.Module, x: torch.Tensor, log: Path | None = None, **options: Any) -> str:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        watching = Monitor(every=50, stop_on="non-finite", log=log, **options)
        with pytest.raises(NonFiniteError) as caught, watching:  # noqa: PT012
            step(net, optimizer, torch.ones(2, 3))
            step(net, optimizer, x)
        assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
        return str(caught.value)

    def test_the_layer_itself(self) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU())
        with torch.no_grad():
            net[0].weight.fill_(1e30)
            net[1].weight.fill_(0)
        text = self.run(net, torch.full((2, 3), 1e20))
        assert "step 1: Inf in the output of 0 (Linear); its input and its parameters are finite" in text

    def test_a_function_before_it(self, tmp_path: Path) -> None:
        class Logs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.ReLU(), nn.Linear(3, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.b((x * self.b.bias.exp()).log().reshape(-1, 3))

        log = tmp_path / "run.ndjson"
        text = self.run(Logs(), torch.tensor([[1.0, 2.0, -1.0]]), log)
        assert "NaN in the input of b (Linear); made by log" in text
        (run,) = read_runs(log)
        (note,) = run.notes
        assert (note["note"], note["layer"], note["operation"], note["step"]) == ("non-finite", "b", "log", 1)
        assert note["text"] == text and run.end is not None and run.end["reason"] == "stopped"

    def test_the_weight(self) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

        class Spoils(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                super().step()
                with torch.no_grad():
                    net[0].weight[0, 0] = float("nan")

        optimizer = Spoils(net.parameters(), 0.1)
        match = r"output of 0 \(Linear\); 0.weight is not finite"
        with pytest.raises(NonFiniteError, match=match), Monitor(stop_on="non-finite"):  # noqa: PT012
            for _ in range(2):
                step(net, optimizer, torch.ones(2, 3))

    def test_the_input(self) -> None:
        text = self.run(nn.Sequential(nn.Linear(3, 3)), torch.full((1, 3), float("nan")))
        assert "NaN in the input of 0 (Linear)" in text and "the data of this step" in text

    def test_an_input_that_is_overwritten(self) -> None:
        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.relu = nn.Linear(3, 3), nn.ReLU(inplace=True)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.relu((self.fc(x) - 1e3 * x.abs().amax()).log())

        net = Root()
        with torch.no_grad():
            net.fc.bias.fill_(1e4)
        assert "NaN in the input of relu (ReLU); made by log" in self.run(net, torch.full((2, 3), 1e4))

    def test_after_the_last_layer(self) -> None:
        class Ends(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (super().forward(x) - x.amax()).log()

        net = Ends(nn.Linear(3, 3))
        with torch.no_grad():
            net[0].weight.fill_(0), net[0].bias.fill_(9)
        assert "NaN in the output of the model (Ends); made by log" in self.run(net, torch.full((2, 3), 10.0))

    def test_the_loss(self) -> None:
        net = nn.Linear(1, 1)
        with torch.no_grad():
            net.weight.fill_(0), net.bias.fill_(-1)
        match = "step 0: the loss is NaN; made by log"
        with pytest.raises(NonFiniteError, match=match), Monitor(stop_on="non-finite"):  # noqa: PT012
            (net(torch.ones(1, 1)).log() * 2).mean().neg().backward()
            pytest.fail("backward went on")

    def test_the_gradient_before_the_weights_are_spoilt(self) -> None:
        net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            net[0].weight.fill_(0), net[0].bias.fill_(0)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        before = copy.deepcopy(net.state_dict())
        match = r"gradient of 1\.weight"
        with pytest.raises(NonFiniteError, match=match), Monitor(stop_on="non-finite"):  # noqa: PT012
            net(torch.ones(1, 1)).abs().sqrt().sum().backward()
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_one_that_is_swallowed_comes_again(self) -> None:
        net, seen = nn.Linear(1, 1), 0
        with Monitor(stop_on="non-finite"):
            for value in (float("inf"), 1.0, 1.0):
                try:
                    net(torch.full((1, 1), value))
                except NonFiniteError:
                    seen += 1
        assert seen == 3

    def test_finite_numbers_that_sum_up_to_more_than_there_is(self) -> None:
        net = nn.Identity()
        with Monitor(stop_on="non-finite"):
            net(torch.full((8,), 3e38, requires_grad=True))
            net(torch.full((999,), 6e4, dtype=torch.float16, requires_grad=True))


class TestTrouble:
    def test_a_failure_of_the_watcher_ends_the_watching_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[str] = []
        monkeypatch.setattr("hookscope.training.recorder.output_sums", lambda *args: 1 / 0)
        net, optimizer = with_sgd(small())
        with Monitor(every=1, on_trouble=said.append) as monitor:
            train(net, optimizer, batches())
        assert said == [monitor.trouble] and "ZeroDivisionError" in said[0] and "the training goes on" in said[0]

    def test_it_is_a_warning_and_never_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hookscope.training.watcher.StepWeights", lambda *args, **kwargs: 1 / 0)
        net, optimizer = with_sgd(small())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with Monitor(every=1):
                train(net, optimizer, batches())
        assert len(seen) == 1
        with Monitor(every=1):  # here warnings are errors
            train(net, optimizer, batches())

    def test_a_log_that_is_removed_ends_the_watching_only(self, tmp_path: Path) -> None:
        said: list[str] = []
        (net, optimizer), log = with_sgd(small()), tmp_path / "run.ndjson"
        with Monitor(every=1, log=log, on_trouble=said.append):
            train(net, optimizer, batches(), lambda: log.unlink(missing_ok=True))
        assert len(said) == 1 and "it was removed" in said[0]

    @pytest.mark.parametrize("given_out_again", [False, True])
    def test_a_log_that_the_script_closes_ends_the_watching_only(self, tmp_path: Path, given_out_again: bool) -> None:
        said: list[str] = []
        net, log, other = small(), RunLog(tmp_path / "run.ndjson"), tmp_path / "precious"
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        number = log._descriptor

        def closes() -> None:
            if not other.exists():
                spare = os.open(other, os.O_WRONLY | os.O_CREAT)
                os.dup2(spare, number)
                os.close(spare)
                if not given_out_again:
                    os.close(number)

        with Monitor(every=1, log=log, on_trouble=said.append) as monitor:
            train(net, optimizer, batches(), closes)
        if given_out_again:
            os.close(number)  # which it has left open
        assert other.read_bytes() == b"" and monitor.sampled == 1
        assert len(said) == 1 and "somebody closed it" in said[0] and "the training goes on" in said[0]
        (run,) = read_runs(tmp_path / "run.ndjson")
        assert len(run.rows) == 7 and run.end is None

    @pytest.mark.parametrize("what", ["write", "close"])
    def test_whatever_the_log_raises_stays_within(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        def refuse(*args: object) -> None:
            raise OSError("no more")

        (net, optimizer), said = with_sgd(small()), []
        with Monitor(every=1, log=tmp_path / "run.ndjson", on_trouble=said.append):
            monkeypatch.setattr(RunLog, what, refuse)
            train(net, optimizer, batches())
        assert len(said) == (what == "write")

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
    def test_a_full_disk(self) -> None:
        with pytest.raises(WriteError, match="No space left"), Monitor(log="/dev/full"):
            pytest.fail("the block was entered")

    def test_a_forked_child_writes_nothing(self, tmp_path: Path) -> None:
        log, (net, optimizer) = tmp_path / "run.ndjson", with_sgd(small())

        class Models(torch.utils.data.Dataset[torch.Tensor]):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, at: int) -> torch.Tensor:
                inner = nn.Linear(2, 2)
                chosen = torch.optim.SGD(inner.parameters(), 0.1)
                inner(torch.full((1, 2), float("nan")))
                # by hand: after any torch.compile in the parent, a child that was forked off cannot call backward
                inner.weight.grad = torch.full((2, 2), float("nan"))
                chosen.step()
                return torch.zeros(1, 6, 6)

        with Monitor(every=1, log=log, stop_on="non-finite") as monitor:
            for x in DataLoader(Models(), num_workers=1, batch_size=3):
                train(net, optimizer, [(x, torch.tensor([0, 1, 2]))])
        (run,) = read_runs(log)
        assert monitor.steps == 1 and len(run.rows) == 7 and run.notes == [] and run.end is not None


def test_the_log_has_its_header_lines_and_end(tmp_path: Path) -> None:
    (net, optimizer), log = with_sgd(small()), tmp_path / "run.ndjson"
    for _ in range(2):
        with Monitor(every=2, log=log, command=["train.py"], rank=1, world_size=2) as monitor:
            train(net, optimizer, batches())
        assert monitor.rows == []
    first, second = read_runs(log)
    assert first.header["command"] == ["train.py"] and first.header["layers"] == ["all"]
    assert (first.header["every"], first.header["rank"], first.header["pid"]) == (2, 1, os.getpid())
    assert len(first.rows) == len(second.rows) == 14
    assert second.end == {**second.end, "row": "end", "step": 3, "sampled": 2, "reason": "done", "status": None}
    with pytest.raises(SystemExit), Monitor(log=log):
        raise SystemExit(5)
    assert {**read_runs(log)[-1].end}.items() >= {"reason": "exit", "status": 5}.items()


def test_the_same_metrics_as_scalars_of_tensorboard(tmp_path: Path) -> None:
    from tests.statistics.test_tensorboard import read

    net, optimizer = with_sgd(small())
    with Monitor(every=2, tensorboard=tmp_path) as monitor:
        train(net, optimizer, batches())
    events = read(tmp_path)
    row = by_key(monitor.rows, 2)["relu", 1]
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert math.isclose(scalars["relu#1/activation_mean"][2], row["activation_mean"], rel_tol=1e-6)
    assert math.isclose(scalars["loss"][2], row["loss"], rel_tol=1e-6) and scalars["learning_rate"].keys() == {0, 2}
    assert "conv/running_mean_shift" not in scalars and scalars["bn/frozen"][0] == 0
