"""Optimizers of a watched run: several, with closures, within each other, under a GradScaler, and not of torch."""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules

from hookscope.training import Monitor
from tests.helpers import same_values
from tests.training.watched import LAYERS, ORDER, OwnOptimizer, batches, by_key, close, keys, sgd, small, step, train


class TestOptimizers:
    def test_two_in_turn_each_have_their_own_part(self) -> None:
        torch.manual_seed(0)
        generator, critic = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
        of_critic, of_generator = sgd(critic), sgd(generator, 0.2)
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
            rows = [row for row in monitor.rows if row["optimizer"] == number]
            assert [(row["step"], row["type"]) for row in rows] == [
                (step, kind) for step in (0, 1, 2) for kind in types
            ]
            assert {row["learning_rate"] for row in rows} == {(0.1, 0.2)[number]}
            assert close(rows[-1]["loss"], losses[4 + number].item()) and rows[0]["gradient_norm"] > 0
        assert monitor.steps == 8 and monitor.sampled == 6

    def test_two_of_one_model_share_its_passes(self) -> None:
        net = small()
        first, second = sgd(net.conv), sgd(nn.ModuleList([net.fc1, net.fc2, net.bn]), 0.2)
        with Monitor(every=1) as monitor:
            train(net, first, batches(2), after_step=second.step)
        assert {row["layer"] for row in monitor.rows if row["optimizer"] == 0} == {"conv", "relu", "drop"}
        rows = by_key(monitor.rows, 1, 1)
        assert {name for name, _ in rows} == {"bn", "fc1", "fc2", "relu", "drop"}
        assert rows["fc1", 0]["loss"] == by_key(monitor.rows, 1, 0)["conv", 0]["loss"] is not None

    def test_groups_schedulers_and_frozen_layers(self) -> None:
        net = small()
        net.conv.requires_grad_(False)
        groups = [{"params": net.fc1.parameters(), "lr": 0.5}, {"params": net.fc2.parameters(), "lr": 0.25}]
        optimizer = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        with Monitor(every=1) as monitor:
            train(net, optimizer, batches(2), after_step=schedule.step)
        rates = {(row["step"], row["layer"]): row["learning_rate"] for row in monitor.rows}
        assert rates[0, "fc1"] == rates[0, "relu"] == 0.5 and rates[0, "fc2"] == 0.25
        assert math.isclose(rates[1, "fc2"], 0.025)
        conv = by_key(monitor.rows)["conv", 0]
        assert conv["frozen"] is True and conv["gradient_norm"] is None and conv["update_to_weight"] == 0
        assert ("bn", 0) not in by_key(monitor.rows)  # it could learn, but this optimizer does not hold it

    def test_a_layer_that_no_optimizer_holds_is_logged_once_that_is_known(self) -> None:
        net, stranger = small(), nn.Linear(1, 1)
        optimizer, other = sgd(net.fc2, 0.5), sgd(nn.ModuleList([net.bn, stranger]), 0.5)
        with Monitor(net, optimizer, every=1) as monitor:
            train(net, optimizer, batches(3), after_step=lambda: step(stranger, other, torch.ones(1, 1)))
        assert monitor.steps == 3 and {row["layer"] for row in monitor.rows} == LAYERS - {"bn"}
        for sample, layers in ((0, set()), (1, {"conv", "fc1"}), (2, {"conv", "fc1"})):
            rows = by_key(monitor.rows, sample)
            assert {name for name, _ in rows} - {"fc2", "relu", "drop"} == layers
            assert all(rows[name, 0]["gradient_norm"] > 0 == rows[name, 0]["update_to_weight"] for name in layers)

    @pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
    def test_a_step_with_a_closure(self, kind: str) -> None:
        torch.manual_seed(0)
        net, x = nn.Linear(3, 1), torch.randn(6, 3)
        optimizer: Any = sgd(net) if kind == "sgd" else torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
        losses: list[float] = []

        def closure() -> Tensor:
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
        class Inner(torch.optim.SGD):
            fails = False

            def step(self, closure: Any = None) -> None:
                if self.fails:
                    raise ValueError("no")
                super().step(closure)

        sgd(nn.Linear(1, 1))  # makes torch look at the step of the base too
        net = nn.Linear(2, 2)
        optimizer = Inner(net.parameters(), 0.1)
        with Monitor(every=1) as monitor:
            optimizer.fails = True
            with pytest.raises(ValueError, match="no"):
                step(net, optimizer)
            optimizer.fails = False
            for _ in range(2):
                step(net, optimizer)
        assert monitor.steps == 2 and [row["step"] for row in monitor.rows] == [0, 1]

    @pytest.mark.parametrize("given", [True, False])
    def test_one_that_steps_another(self, given: bool) -> None:
        class Outer(torch.optim.Optimizer):
            def __init__(self, inner: torch.optim.Optimizer) -> None:
                super().__init__(inner.param_groups, {})
                self.inner = inner

            def step(self, closure: Any = None) -> None:
                self.inner.step()

        net = nn.Linear(2, 2)
        optimizer = Outer(sgd(net))
        with Monitor(*((net, optimizer) if given else ()), every=2) as monitor:
            for _ in range(3):
                step(net, optimizer)
        assert monitor.steps == 3 and [(r["step"], r["optimizer"]) for r in monitor.rows] == [(0, 0), (1, 0), (2, 0)]
        assert monitor.rows[0]["update_to_weight"] > 0

    def scaled(
        self, scaler: torch.amp.GradScaler, fused: bool, unscaled: bool = False, spoilt: Iterable[int] = ()
    ) -> Monitor:
        """Five steps with a scaler; those that are spoilt have a gradient of Inf."""
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = sgd(net, fused=fused)
        with Monitor(every=2, stop_on="non-finite") as monitor:
            for step in range(5):
                optimizer.zero_grad()
                scaler.scale(net(torch.full((4, 3), 1.0 + step)).square().mean()).backward()
                if step in spoilt:
                    net.weight.grad[0, 0] = float("inf")
                if unscaled:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        assert monitor.trouble is None and [row["gradient_non_finite"] for row in monitor.rows] == [0] * len(
            monitor.rows
        )
        return monitor

    @pytest.mark.parametrize(("fused", "steps"), [(False, 3), (True, 4)])
    def test_a_step_that_a_grad_scaler_leaves_out_is_not_sampled(self, fused: bool, steps: int) -> None:
        # a fused optimizer leaves a step out itself: the first is passed over, the last counts, as it is not sampled
        monitor = self.scaled(torch.amp.GradScaler("cpu", init_scale=4.0), fused, spoilt=(0, 4))
        assert [row["step"] for row in monitor.rows] == [0, 1, 2] and monitor.steps == steps

    @pytest.mark.parametrize(("fused", "unscaled"), [(False, False), (True, False), (False, True)])
    def test_metrics_under_a_grad_scaler_are_those_without(self, fused: bool, unscaled: bool) -> None:
        plain = self.scaled(torch.amp.GradScaler("cpu", enabled=False), False)
        scaled = self.scaled(torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=2), fused, unscaled)
        assert [row["step"] for row in plain.rows] == [row["step"] for row in scaled.rows] == [0, 1, 2, 4]
        for ours, theirs in zip(scaled.rows, plain.rows, strict=True):
            for name in ("loss", "gradient_norm", "weight_norm", "update_to_weight"):
                assert close(ours[name], theirs[name]), name

    def test_one_that_never_steps_again_is_not_waited_for(self) -> None:
        net, other = nn.Linear(1, 1), nn.Linear(1, 1)
        short, long = sgd(net, 0.0), sgd(other, 0.0)
        with Monitor(every=2):
            for _ in range(2):
                step(net, short, torch.ones(1, 1))
            for _ in range(121):
                step(other, long, torch.ones(1, 1))
            assert not modules._global_forward_hooks

    def test_the_loss_where_backward_is_not_called(self) -> None:
        net, judge = nn.Linear(2, 1), nn.MSELoss()
        optimizer = sgd(net)
        with Monitor(every=1) as monitor:
            loss = judge(net(torch.ones(3, 2)), torch.zeros(3, 1))
            for p, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
                p.grad = gradient
            optimizer.step()
        (row,) = monitor.rows
        assert close(row["loss"], loss.item()) and row["type"] == "Linear"


class TestOptimizersOfOthers:
    @pytest.mark.parametrize("every", [1, 3])
    def test_each_backward_pass_counts_as_a_step(self, every: int) -> None:
        notes: list[str] = []
        losses: list[Tensor] = []
        norms: list[tuple[float, float]] = []

        def loss_of(logits: Tensor, y: Tensor) -> Tensor:
            losses.append(F.cross_entropy(logits, y))
            return losses[-1]

        def note(net: Any) -> None:
            norms.append((float(net.conv.weight.grad.norm()), float(net.conv.weight.detach().norm())))

        def run(watching: Any) -> nn.Module:
            net = small()
            with watching:
                return train(net, OwnOptimizer(net), batches(7), loss_of, before_step=note, leaves_out="zero_grad")

        monitor = Monitor(every=every, on_trouble=notes.append)
        assert same_values(run(monitor), run(nullcontext()).state_dict())
        assert len(notes) == 1 and "each backward pass counts as a step" in notes[0]
        sampled = {*range(0, 7, every), 1, 2}
        assert monitor.steps == 7 and {row["step"] for row in monitor.rows} == sampled
        for at in sampled:
            assert keys(monitor.rows, at) == ORDER
            row, (gradient, weight) = by_key(monitor.rows, at)["conv", 0], norms[at]
            assert close(row["loss"], losses[at].item())
            assert close(row["weight_gradient_norm"], gradient) and close(row["weight_norm"], weight)
            assert close(row["update_to_weight"], 0.1 * gradient / weight)
        assert not modules._global_forward_hooks

    def test_what_never_steps_or_steps_with_torch_later_has_no_such_steps(self) -> None:
        net, notes = nn.Linear(2, 1), []
        optimizer = sgd(net)
        with Monitor(every=1, on_trouble=notes.append) as monitor:
            for at in range(6):
                net(torch.ones(1, 2)).sum().backward()
                if at > 2:
                    optimizer.step()
        assert notes == [] and monitor.steps == 3 and [row["passes"] for row in monitor.rows] == [4, 1, 1]
        with Monitor(every=1, on_trouble=notes.append) as monitor:
            for _ in range(6):
                net(torch.ones(1, 2)).sum().backward()
        assert notes == [] and monitor.steps == 0 and monitor.rows == []
