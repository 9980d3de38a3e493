"""Monitor against a plain recording loop written by hand, and the run it watches against the same one unwatched."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hookscope.errors import LayerError, ModelError, NonFiniteError, UsageError, WriteError
from hookscope.training import Monitor
from hookscope.training.log.file import RunLog, read_runs
from tests.nets import Function, named

Row = dict[str, Any]


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

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = self.relu(self.fc1(self.drop(x.flatten(1))))
        return self.fc2(x)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    net = Small()
    with torch.no_grad():
        net.bn.bias[2] = -50  # a dead channel
    return net


def batches(count: int = 4, size: int = 5) -> list[tuple[Tensor, Tensor]]:
    seeded = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, 1, 6, 6, generator=seeded), torch.randint(0, 3, (size,), generator=seeded))
        for _ in range(count)
    ]


def filled(layer: nn.Linear, weight: float, bias: float = 0.0) -> nn.Linear:
    nn.init.constant_(layer.weight, weight)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, bias)
    return layer


def sgd(net: nn.Module, rate: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=rate, **options)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Any],
    after_step: Callable[[], object] = lambda: None,
) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        after_step()


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor | None = None) -> None:
    net(torch.ones(1, 2) if x is None else x).sum().backward()
    optimizer.step()


def keys(rows: Iterable[Row], step: int | None = None) -> list[tuple[str, int]]:
    return [(row["layer"], row["call"]) for row in rows if step in (None, row["step"])]


def by_key(rows: list[Row], step: int = 0, optimizer: int = 0) -> dict[tuple[str, int], Row]:
    return {(r["layer"], r["call"]): r for r in rows if r["step"] == step and r["optimizer"] == optimizer}


def close(a: Any, b: Any) -> bool:
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=2e-4, abs_tol=2e-6)


def hand_metrics(values: Tensor) -> Row:
    """The metrics of an activation, computed the plain and slow way."""
    values = values.double()
    return {
        "activation_mean": float(values.mean()),
        "activation_std": float(values.std(correction=0)),
        "zero_share": float((values == 0).double().mean()),
        "channels": values.shape[1],
        "dead_channels": sum(not bool(values[:, c].any()) for c in range(values.shape[1])),
        "non_finite": 0,
    }


def hand_step(net: Small, x: Tensor, y: Tensor) -> tuple[Tensor, dict[tuple[str, int], Tensor]]:
    """The forward pass written out, with a copy of the output of every call."""
    outputs: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, call: int, value: Tensor) -> Tensor:
        outputs[name, call] = value.detach().clone()
        return value

    x = keep("conv", 0, F.conv2d(x, net.conv.weight, net.conv.bias))
    bn = net.bn
    x = keep("bn", 0, F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, True, 0.1, bn.eps))
    x = keep("relu", 0, F.relu(x))
    x = keep("drop", 0, F.dropout(x.flatten(1), 0.25, True))
    x = keep("fc1", 0, F.linear(x, net.fc1.weight, net.fc1.bias))
    x = keep("relu", 1, F.relu(x))
    x = keep("fc2", 0, F.linear(x, net.fc2.weight, net.fc2.bias))
    return F.cross_entropy(x, y), outputs


ORDER = [("conv", 0), ("bn", 0), ("relu", 0), ("drop", 0), ("fc1", 0), ("relu", 1), ("fc2", 0)]
LAYERS = {name for name, _ in ORDER}


def test_every_metric_is_that_of_a_plain_recording_loop() -> None:
    watched, plain = small(), small()
    data = batches()
    of_watched, of_plain = (sgd(net, momentum=0.9) for net in (watched, plain))
    torch.manual_seed(3)
    with Monitor(watched, of_watched, every=2) as monitor:
        train(watched, of_watched, data)
    torch.manual_seed(3)
    for step, (x, y) in enumerate(data):
        running = plain.bn.running_mean.clone(), plain.bn.running_var.clone()
        loss, outputs = hand_step(plain, x, y)
        of_plain.zero_grad()
        loss.backward()
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in plain.named_parameters()}
        of_plain.step()
        if step % 2:
            continue
        rows = by_key(monitor.rows, step)
        assert keys(sorted(rows.values(), key=lambda row: row["order"])) == ORDER
        assert {row["layer"]: row["index"] for row in rows.values() if row["index"] is not None} == {"conv": 0}
        for key, values in outputs.items():
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
            assert close(row["gradient_norm"], float(torch.cat([gradients[name].flatten() for name in own]).norm()))
            assert close(row["weight_norm"], float(before[weight].norm()))
            assert close(row["update_to_weight"], float(update.norm() / before[weight].norm()))
            assert (row["gradient_non_finite"], row["weight_non_finite"], row["frozen"]) == (0, 0, False)
        batch = outputs["conv", 0]
        mean, variance = batch.mean((0, 2, 3)), batch.var((0, 2, 3), correction=0)
        shift = ((mean - running[0]) / (running[1] + plain.bn.eps).sqrt()).square().mean().sqrt()
        ratio = ((variance + plain.bn.eps) / (running[1] + plain.bn.eps)).log().mean().exp()
        assert close(rows["bn", 0]["running_mean_shift"], float(shift))
        assert close(rows["bn", 0]["running_var_ratio"], float(ratio))
        assert rows["conv", 0]["running_mean_shift"] is None and rows["relu", 0]["dead_channels"] == 1
    assert (monitor.steps, monitor.sampled, monitor.trouble) == (4, 2, None)
    assert sorted({row["step"] for row in monitor.rows}) == [0, 2]


def seeded_run(watching: Callable[[nn.Module, Any], Any]) -> tuple[bytes, Tensor]:
    """Weights and random state after two epochs with shuffling, dropout and momentum; the model is copied and saved."""
    net = small()
    optimizer = sgd(net, momentum=0.9)

    def copies() -> None:
        assert pickle.loads(pickle.dumps(copy.deepcopy(net))).conv._forward_hooks == {}

    xs, ys = (torch.cat(part) for part in zip(*batches(), strict=True))
    with watching(net, optimizer):
        for _ in range(2):
            train(net, optimizer, DataLoader(TensorDataset(xs, ys), batch_size=4, shuffle=True), copies)
    stream = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict()["state"]], stream)
    return stream.getvalue(), torch.get_rng_state()


@pytest.mark.parametrize("model_is_given", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"stop_on": "non-finite"}, {"to": "tensorboard:events", "histograms": 1}, {"log": "log"}], ids=str
)
def test_a_seeded_run_ends_with_the_same_bits(
    options: Any, model_is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bits, chance = seeded_run(lambda net, optimizer: nullcontext())
    watched_bits, watched_chance = seeded_run(
        lambda net, optimizer: Monitor(*((net, optimizer) if model_is_given else ()), every=1, **options)
    )
    assert watched_bits == bits and torch.equal(chance, watched_chance)


def test_hooks_are_gone_after_the_block_and_after_an_exception() -> None:
    tables = [modules._global_forward_hooks, modules._global_forward_pre_hooks]
    tables += [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    before, backward = [dict(table) for table in tables], torch.autograd._tensor_or_tensors_to_tuple
    for error in (None, ValueError("x"), KeyboardInterrupt(), SystemExit(3)):
        with suppress(BaseException), Monitor(every=1):
            assert all(tables) and torch.autograd._tensor_or_tensors_to_tuple is not backward
            if error is not None:
                raise error
        assert [dict(table) for table in tables] == before and torch.autograd._tensor_or_tensors_to_tuple is backward


def test_module_hooks_are_on_only_for_a_step_that_is_sampled() -> None:
    net, are_on = small(), []
    with Monitor(every=3):
        are_on.append(bool(modules._global_forward_hooks))
        train(net, sgd(net), batches(), lambda: are_on.append(bool(modules._global_forward_hooks)))
    assert are_on == [True, False, False, True, False]


class TestPasses:
    def test_accumulated_passes_are_one_batch(self) -> None:
        def rows(chunks: int) -> list[Row]:
            fc = nn.Linear(1, 3, bias=False)
            fc.weight.data.copy_(torch.tensor([[1.0], [-1.0], [0.0]]))
            forward = lambda net, x: net.relu(net.fc(x)).square() + 0 * net.bn(x)  # noqa: E731
            net = Function(forward, fc=fc, relu=nn.ReLU(), bn=nn.BatchNorm1d(1))
            optimizer = sgd(net)
            with Monitor(every=1) as monitor:
                for part in torch.tensor([[1.0], [2.0], [-1.0], [-4.0]]).chunk(chunks):  # two dead channels a half
                    (net(part).mean() / chunks).backward()
                optimizer.step()
            return monitor.rows

        for whole, parts in zip(rows(1), rows(2), strict=True):
            assert (whole["passes"], parts["passes"]) == (1, 2)
            names = whole.keys() - {"time", "passes"}
            if whole["layer"] == "bn":  # its output depends on the batch
                names = {"running_mean_shift", "running_var_ratio"}
            for name in names:
                a, b = whole[name], parts[name]
                assert close(a, b) if isinstance(a, float) else a == b, (whole["layer"], name, a, b)

    @pytest.mark.parametrize("divides", ["loss / 4", "0.25 * loss", "scale(loss / 4)", "undivided"])
    def test_the_loss_is_the_mean_over_the_passes(self, divides: str) -> None:
        net = nn.Linear(1, 1)
        optimizer, scaler = sgd(net, 0.01), torch.amp.GradScaler("cpu", 64.0)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "loss / 4": lambda loss: loss / 4,
            "0.25 * loss": lambda loss: 0.25 * loss,
            "scale(loss / 4)": lambda loss: scaler.scale(loss / 4),
            "undivided": lambda loss: loss,
        }
        losses: list[float] = []
        with Monitor(every=1) as monitor:
            for x in torch.randn(10, 2, 1):
                loss = net(x).square().mean()
                losses.append(loss.item())
                ways[divides](loss).backward()
                if len(losses) % 4 == 0 or len(losses) == 10:
                    optimizer.step()
        expected = [sum(part) / len(part) for part in (losses[:4], losses[4:8], losses[8:])]
        assert [row["loss"] for row in monitor.rows] == pytest.approx(expected)
        assert [row["passes"] for row in monitor.rows] == [4, 4, 2]

    def test_a_sum_that_is_divided_by_the_samples_of_all_passes_is_their_mean(self) -> None:
        net, (x, y) = nn.Linear(2, 3), (torch.randn(12, 2), torch.arange(12) % 3)
        with Monitor(every=1) as monitor:
            expected = F.cross_entropy(net(x), y).item()
            for part, labels in ((x[:3], y[:3]), (x[3:5], y[3:5]), (x[5:], y[5:])):
                (F.cross_entropy(net(part), labels, reduction="sum") / torch.tensor(12)).backward()
            sgd(net).step()
        [row] = monitor.rows
        assert (row["loss"], row["passes"]) == (pytest.approx(expected), 3)

    def test_a_closure_is_the_last_of_the_accumulated_passes(self) -> None:
        net, losses = nn.Linear(1, 1), []

        def closure() -> Tensor:
            losses.append(net(torch.randn(2, 1)).square().mean())
            (losses[-1] / 3).backward()
            return losses[-1]

        with Monitor(every=1) as monitor:
            closure(), closure()
            sgd(net).step(closure)
        [row] = monitor.rows
        assert (row["loss"], row["passes"]) == (pytest.approx(sum(losses).item() / 3), 3)

    def test_layers_that_no_pass_with_gradients_reaches_have_lines_of_their_parameters(self) -> None:
        def forward(net: Any, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = net.backbone(x)
            return net.head.forward(net.neck(x))

        net = Function(
            forward, backbone=nn.Linear(2, 2), neck=nn.Linear(2, 2), head=nn.Linear(2, 1), unused=nn.Linear(2, 1)
        )

        def lines(layers: Any, types: Any = ("all",)) -> list[tuple[str, Any, bool, bool]]:
            optimizer = sgd(net)
            with Monitor(every=1, layers=layers, types=types) as monitor:
                net(torch.randn(3, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [
                (row["layer"], row["order"], row["activation_mean"] is not None, row["gradient_norm"] is not None)
                for row in monitor.rows
            ]

        absent = [("backbone", None, False, False), ("head", None, False, True), ("unused", None, False, False)]
        assert lines("all") == [absent[0], ("neck", 0, True, True), *absent[1:]]
        assert lines("neck,unused") == [("neck", 0, True, True), absent[2]]
        assert lines("0", ("Linear",)) == [("neck", 0, True, True)]

    def test_inf_of_one_sign_and_the_spread_of_one_number(self) -> None:
        ways = {"mask": lambda x: x.masked_fill(x > 0, -math.inf), "loss": lambda x: x.exp().sum()}
        ways["mixed"] = lambda x: torch.where(x > 0, math.inf, -math.inf)
        layers: dict[str, nn.Module] = {name: Function(forward) for name, forward in ways.items()}

        def forward(net: Any, x: Tensor) -> Tensor:
            net.mixed(net.fc(x))
            return net.loss(net.mask(net.fc(x)))

        net = Function(forward, fc=filled(nn.Linear(2, 2), 1.0), **layers)
        with Monitor(every=1) as monitor:
            net(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).backward()
            sgd(net).step()
        found = {row["layer"]: (row["non_finite"], row["infinite"], row["activation_std"]) for row in monitor.rows}
        assert found["mask"][:2] == (2, True) and found["mixed"][:2] == (4, False)
        assert found["loss"] == (0, None, None) and found["fc"][:2] == (0, None) and found["fc"][2] > 1

    def test_a_call_of_a_layer_with_several_names_has_its_first_name_and_the_place_that_calls_it(self) -> None:
        def block(net: Any, x: Tensor) -> Tensor:
            return net.twin(net.act(net.fc(x)))

        act = nn.ReLU()
        blocks = [Function(block, fc=nn.Linear(2, 2), act=act, twin=act) for _ in range(3)]
        net = nn.Sequential(*blocks, act)

        def calls(layers: str) -> list[tuple[str, int, str | None]]:
            with Monitor(every=1, layers=layers) as monitor:
                net(torch.randn(2, 2)).sum().backward()
                sgd(net).step()
            return [(row["layer"], row["call"], row["called_as"]) for row in monitor.rows if row["type"] == "ReLU"]

        places = [None, None, "1.act", "1.act", "2.act", "2.act", "3"]
        assert calls("all") == calls("1.twin") == [("0.act", call, place) for call, place in enumerate(places)]
        assert calls("2.twin#5") == calls("0.act#5") == [("0.act", 5, "2.act")]

    def test_validation_recomputation_and_functional_transforms_are_no_passes(self) -> None:
        net = small()
        optimizer = sgd(net)
        (x, y), (other, _), *_ = batches()
        with Monitor(net, every=1, stop_on="non-finite") as monitor:
            with torch.no_grad():
                net.eval()(other * 100)
            torch.func.vmap(net)(other[:, None])
            torch.func.grad(lambda x: net(x).sum())(other)
            net.train()
            hidden = checkpoint(lambda v: net.relu(net.bn(net.conv(v))), x, use_reentrant=False)
            F.cross_entropy(net.fc2(net.relu(net.fc1(hidden.flatten(1)))), y).backward()
            optimizer.step()
        called = keys(monitor.rows)
        assert len(called) == len(set(called)) and monitor.trouble is None
        assert abs(by_key(monitor.rows)["conv", 0]["activation_mean"]) < 5

    def test_a_forward_that_raised_and_was_caught_is_over(self) -> None:
        def forward(net: Any, x: Tensor) -> Tensor:
            x = net.inner(x)
            if net.fails:
                raise ValueError("no")
            return net.inner(x)

        net = Function(forward, inner=nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        optimizer = sgd(net)
        with Monitor(every=1) as monitor:
            net.fails = True
            with pytest.raises(ValueError, match="no"):
                net(torch.ones(1, 2))
            net.fails = False
            step(net, optimizer)
            step(net.inner, optimizer)  # a part of it alone keeps its names
        assert keys(monitor.rows, 0) == [("inner.0", 0), ("inner.1", 0), ("inner.0", 1), ("inner.1", 1)]
        assert keys(monitor.rows, 1) == [("inner.0", 0), ("inner.1", 0)]

    def test_a_model_that_calls_itself(self) -> None:
        def forward(net: Any, x: Tensor, again: bool = True) -> Tensor:
            x = net.fc(x)
            return net(x, again=False) if again else x

        net = Function(forward, fc=nn.Linear(2, 2))
        with Monitor(every=1) as monitor:
            step(net, sgd(net))
        assert keys(monitor.rows) == [("fc", 0), ("fc", 1)]

    def test_a_layer_that_is_put_in_later(self) -> None:
        net = nn.Sequential(nn.Linear(2, 2))
        optimizer = sgd(net)
        with Monitor(every=1) as monitor:
            step(net, optimizer)
            net.append(nn.Tanh())
            step(net, optimizer)
        assert [row["layer"] for row in monitor.rows] == ["0", "0", "1"]


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
            assert [(row["step"], row["type"]) for row in rows] == [(step, kind) for step in (0, 2) for kind in types]
            assert {row["learning_rate"] for row in rows} == {(0.1, 0.2)[number]}
            assert close(rows[-1]["loss"], losses[4 + number].item()) and rows[0]["gradient_norm"] > 0
        assert monitor.steps == 8 and monitor.sampled == 4

    def test_two_of_one_model_share_its_passes(self) -> None:
        net = small()
        first, second = sgd(net.conv), sgd(nn.ModuleList([net.fc1, net.fc2, net.bn]), 0.2)
        with Monitor(every=1) as monitor:
            train(net, first, batches(2), second.step)
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
            train(net, optimizer, batches(2), schedule.step)
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
            train(net, optimizer, batches(3), lambda: step(stranger, other, torch.ones(1, 1)))
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
        assert monitor.steps == 3 and [(r["step"], r["optimizer"]) for r in monitor.rows] == [(0, 0), (2, 0)]
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
        # a fused optimizer leaves a step out itself: the first is passed over, the third counts, as it is not sampled
        monitor = self.scaled(torch.amp.GradScaler("cpu", init_scale=4.0), fused, spoilt=(0, 2))
        assert [row["step"] for row in monitor.rows] == [0, 2] and monitor.steps == steps

    @pytest.mark.parametrize(("fused", "unscaled"), [(False, False), (True, False), (False, True)])
    def test_metrics_under_a_grad_scaler_are_those_without(self, fused: bool, unscaled: bool) -> None:
        plain = self.scaled(torch.amp.GradScaler("cpu", enabled=False), False)
        scaled = self.scaled(torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=2), fused, unscaled)
        assert [row["step"] for row in plain.rows] == [row["step"] for row in scaled.rows] == [0, 2, 4]
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


class TestKindsOfModels:
    def rows(self, net: nn.Module, call: Callable[[], Tensor], **options: Any) -> list[Row]:
        """The lines of two sampled steps."""
        with Monitor(every=1, **options) as monitor:
            loss = call()  # a lazy model has its parameters after its first pass
            optimizer = sgd(net, 0.01)
            for _ in range(2):
                loss.backward()
                optimizer.step()
                loss = call()
        assert monitor.trouble is None and monitor.steps == 2
        return monitor.rows

    def test_recurrent_and_attention(self) -> None:
        def forward(net: Any, x: Tensor) -> Row:
            x, state = net.lstm(x)
            return {"out": net.attention(x, x, x), "state": state}

        lstm, attention = nn.LSTM(3, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
        net = Function(forward, lstm=lstm, attention=attention)
        norm = torch.cat([p.detach().flatten() for name, p in lstm.named_parameters() if "bias" not in name]).norm()
        rows = by_key(self.rows(net, lambda: net(torch.randn(2, 5, 3))["out"][0].sum()))
        assert close(rows["lstm", 0]["weight_norm"], float(norm))
        assert rows["attention", 0]["gradient_norm"] > 0 and rows["attention", 0]["channels"] == 4

    def test_lazy_layers(self) -> None:
        net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU())
        rows = self.rows(net, lambda: net(torch.randn(4, 2)).sum())
        assert [row["type"] for row in rows if row["step"] == 1] == ["Linear", "BatchNorm1d", "ReLU"]

    @pytest.mark.filterwarnings("ignore:Complex modules")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
    def test_other_numbers(self, dtype: torch.dtype) -> None:
        net = nn.Linear(3, 2).to(dtype)
        row = self.rows(net, lambda: net(torch.ones(4, 3, dtype=dtype)).abs().sum(), stop_on="non-finite")[0]
        assert row["weight_norm"] > 0 and row["activation_std"] >= 0

    def test_autocast_and_empty_tensors(self) -> None:
        net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())

        def call() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return net(torch.randn(4, 3)).sum() + net(torch.empty(0, 3)).sum()

        assert self.rows(net, call, stop_on="non-finite")[0]["activation_mean"] is not None
        empty = self.rows(net, lambda: net(torch.empty(0, 3)).sum())[0]
        assert empty["activation_mean"] is None and empty["zero_share"] is None

    def test_tied_and_parametrized_weights(self) -> None:
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        net = named(words=nn.Embedding(5, 3), normed=normed, out=nn.Linear(3, 5))
        net.out.weight = net.words.weight
        rows = by_key(self.rows(net, lambda: net(torch.tensor([[0, 1]])).square().sum()))
        assert list(rows) == [("words", 0), ("normed", 0), ("out", 0)]
        assert rows["words", 0]["weight_norm"] == rows["out", 0]["weight_norm"]
        assert rows["normed", 0]["weight_norm"] > 0

    def test_a_sparse_gradient(self) -> None:
        net = nn.Embedding(5, 2, sparse=True)
        rows = self.rows(net, lambda: net(torch.tensor([1, 1, 3])).sum(), stop_on="non-finite")
        assert close(rows[0]["gradient_norm"], math.sqrt(2 * 4 + 2 * 1))

    def test_names_without_the_words_of_wrappers(self) -> None:
        net = nn.DataParallel(small())
        rows = self.rows(net, lambda: net(torch.randn(4, 1, 6, 6)).sum())
        assert {row["layer"] for row in rows} == LAYERS

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("in_place", [True, False])
    @pytest.mark.parametrize("given", [True, False])
    def test_compiled_models_have_metrics_of_parameters(self, in_place: bool, given: bool) -> None:
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        counter, inner, notes = CompileCounter(), nn.Sequential(nn.Linear(2, 3), nn.Sigmoid()), []
        net: Any = inner
        if in_place:
            inner.compile(backend=counter)
        else:
            net = torch.compile(inner, backend=counter)
        optimizer = sgd(inner)
        with Monitor(*((net, optimizer) if given else ()), every=2, on_trouble=notes.append) as monitor:
            for _ in range(20):
                step(net, optimizer)
        assert len(notes) == 1 and "compiled" in notes[0]
        row = by_key(monitor.rows, 18)["0", 0]
        assert row["gradient_norm"] > 0 and row["index"] is row["non_finite"] is None
        assert row["activation_mean"] is None and row["loss"] is not None
        assert counter.frame_count <= 2  # as hooks come and go nothing is compiled anew each time


class TestChoice:
    @pytest.mark.parametrize(
        ("options", "layers"),
        [
            ({"layers": "fc*"}, ["fc1", "fc2"]),
            ({"layers": "relu#1"}, ["relu"]),
            ({"types": ("Linear",)}, ["fc1", "fc2"]),
            ({"types": ("Linear",), "layers": "-1"}, ["fc2"]),
            ({"layers": "0:2"}, ["conv"]),
            ({"layers": "0:2", "types": ("all",)}, ["conv", "bn"]),
            ({"layers": ["conv", "fc2"]}, ["conv", "fc2"]),
        ],
        ids=str,
    )
    def test_layers_and_types(self, options: Row, layers: list[str]) -> None:
        net = small()
        optimizer = sgd(net)
        with Monitor(net, optimizer, **options) as monitor:
            train(net, optimizer, batches(1))
        assert [row["layer"] for row in monitor.rows] == layers

    @pytest.mark.parametrize(
        ("options", "error", "match"),
        [
            ({"model": Small(), "layers": "fc3"}, LayerError, r"no layer 'fc3'.*nearest: fc"),
            ({"model": Small(), "types": ("Conv3d",)}, LayerError, "no layer of type Conv3d"),
            ({"model": Small(), "optimizer": sgd(nn.Linear(1, 1))}, LayerError, "no parameter of the model"),
            *(({"every": every}, UsageError, "every must be an integer") for every in (0, -1, 1.5, True)),
            ({"stop_on": "nonfinite"}, UsageError, "nearest: non-finite"),
            ({"optimizer": 3}, UsageError, "optimizer must be .*, not int"),
            ({"model": "resnet18"}, ModelError, "model must be .*, not str"),
        ],
        ids=str,
    )
    def test_wrong_arguments_are_refused(self, options: Row, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match), Monitor(**options):
            pytest.fail("the block was entered")

    @pytest.mark.filterwarnings("ignore:.*deprecated")
    def test_scripted_models_are_refused(self) -> None:
        with pytest.raises(ModelError, match="scripted"):
            Monitor(torch.jit.script(nn.ReLU()))

    def test_a_selection_that_matches_nothing_is_reported_once(self) -> None:
        net, notes = small(), []
        with Monitor(every=1, layers="fc3", on_trouble=notes.append) as monitor:
            train(net, sgd(net), batches())
        assert len(notes) == 1 and "no layer 'fc3' in Small" in notes[0] and monitor.steps == 4


def spoils_its_weight(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.fc.weight.div_(x.amax() < 2)
    return net.fc(x)


def of_fc(forward: Callable[..., Tensor], bias: float = 0.0, **layers: nn.Module) -> Function:
    return Function(forward, fc=filled(nn.Linear(3, 3), 0, bias), **layers)


NON_FINITE = {
    "layer": (
        named(**{"0": filled(nn.Linear(3, 3), 1e30), "1": filled(nn.Linear(3, 3), 0)}),
        1e20,
        "Inf in the output of 0 (Linear); its input and its parameters are finite",
        "Linear",
    ),
    "weight": (of_fc(spoils_its_weight), 2.0, "the output of fc (Linear); fc.weight is not finite", "weight of fc"),
    "input": (
        of_fc(lambda net, x: net.fc(x)),
        float("nan"),
        "NaN in the input of fc (Linear); it comes from the data; look at the data of this step",
        "input",
    ),
    "function before it": (
        of_fc(lambda net, x: net.fc((x * net.fc.bias.exp()).log())),
        -1.0,
        "NaN in the input of fc (Linear); made by log",
        "log",
    ),
    "overwritten input": (
        of_fc(lambda net, x: net.relu((net.fc(x) - 1e3 * x).log()), 1e4, relu=nn.ReLU(inplace=True)),
        1e4,
        "NaN in the input of relu (ReLU); made by log",
        "log",
    ),
    "after the last layer": (
        of_fc(lambda net, x: (net.fc(x) - x).log(), 9),
        10.0,
        "NaN in the output of the model (Function); made by log",
        "log",
    ),
}


class TestStop:
    @pytest.mark.parametrize("name", NON_FINITE)
    def test_a_value_in_a_pass(self, name: str, tmp_path: Path) -> None:
        net, x, words, operation = NON_FINITE[name]
        optimizer, log = sgd(net), tmp_path / "run.ndjson"
        with pytest.raises(NonFiniteError) as caught, Monitor(every=50, stop_on="non-finite", log=log):  # noqa: PT012
            step(net, optimizer, torch.ones(2, 3))
            step(net, optimizer, torch.full((2, 3), x))
        text = str(caught.value)
        assert text.startswith("step 1: ") and words in text and "\n" not in text and caught.value.exit_code == 3
        [run] = read_runs(log)
        [note] = run.notes
        assert (note["note"], note["text"], note["operation"], note["step"]) == ("non-finite", text, operation, 1)
        assert run.end["reason"] == "stopped"

    def test_the_loss(self) -> None:
        net = filled(nn.Linear(1, 1), 0, -1)
        match = "step 0: the loss is NaN; made by log"
        with pytest.raises(NonFiniteError, match=match), Monitor(stop_on="non-finite"):  # noqa: PT012
            (net(torch.ones(1, 1)).log() * 2).mean().neg().backward()
            pytest.fail("backward went on")

    def test_the_gradient_before_the_weights_are_spoilt(self) -> None:
        net = nn.Sequential(filled(nn.Linear(1, 1), 0), nn.Linear(1, 1, bias=False))
        optimizer = sgd(net)
        before = copy.deepcopy(net.state_dict())
        match = r"gradient of 1\.weight"
        with pytest.raises(NonFiniteError, match=match), Monitor(stop_on="non-finite"):  # noqa: PT012
            net(torch.ones(1, 1)).abs().sqrt().sum().backward()
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_an_error_that_the_loop_catches_is_raised_again(self) -> None:
        net, errors = nn.Linear(1, 1), 0
        with Monitor(stop_on="non-finite"):
            for value in (float("inf"), 1.0, 1.0):
                try:
                    net(torch.full((1, 1), value))
                except NonFiniteError:
                    errors += 1
        assert errors == 3

    def test_finite_numbers_whose_sum_is_infinite(self) -> None:
        net = nn.Identity()
        with Monitor(stop_on="non-finite"):
            net(torch.full((8,), 3e38, requires_grad=True))
            net(torch.full((999,), 6e4, dtype=torch.float16, requires_grad=True))


class FailingDataset(Dataset[Tensor]):
    """Trains a model with NaN in the process that loads the data."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: int) -> Tensor:
        inner = nn.Linear(2, 2)
        inner(torch.full((1, 2), float("nan")))
        # by hand: after any torch.compile in the parent, a child that was forked off cannot call backward
        inner.weight.grad = torch.full((2, 2), float("nan"))
        sgd(inner).step()
        return torch.zeros(1, 6, 6)


class TestTrouble:
    def notes(self, log: Any = None, after_step: Callable[[], object] = lambda: None) -> list[str]:
        """What is reported of a run of four steps."""
        net, notes = small(), []
        with Monitor(every=1, log=log, on_trouble=notes.append) as monitor:
            train(net, sgd(net), batches(), after_step)
        assert monitor.trouble == (notes[0] if notes else None)
        return notes

    def test_a_failure_of_the_watcher_ends_the_watching_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hookscope.training.recorder.output_sums", lambda *args: 1 / 0)
        [note] = self.notes()
        assert "ZeroDivisionError" in note and "the training goes on" in note

    def test_it_is_a_warning_and_never_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hookscope.training.watcher.StepWeights", lambda *args, **kwargs: 1 / 0)
        net = small()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Monitor(every=1):
                train(net, sgd(net), batches())
        assert len(caught) == 1
        with Monitor(every=1):  # here warnings are errors
            train(net, sgd(net), batches())

    def test_a_log_that_is_removed_ends_the_watching_only(self, tmp_path: Path) -> None:
        log = tmp_path / "run.ndjson"
        [note] = self.notes(log, lambda: log.unlink(missing_ok=True))
        assert "it was removed" in note

    @pytest.mark.parametrize(("method", "notes"), [("write", 1), ("close", 0)])
    def test_whatever_the_log_raises_stays_within(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, notes: int
    ) -> None:
        def refuse(*args: object) -> None:
            raise OSError("no more")

        assert len(self.notes(tmp_path / "log", lambda: monkeypatch.setattr(RunLog, method, refuse))) == notes

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
    def test_a_full_disk(self) -> None:
        with pytest.raises(WriteError, match="No space left"), Monitor(log="/dev/full"):
            pytest.fail("the block was entered")

    def test_a_forked_child_writes_nothing(self, tmp_path: Path) -> None:
        log, net = tmp_path / "run.ndjson", small()
        with Monitor(every=1, log=log, stop_on="non-finite") as monitor:
            for x in DataLoader(FailingDataset(), num_workers=1, batch_size=3):
                train(net, sgd(net), [(x, torch.tensor([0, 1, 2]))])
        (run,) = read_runs(log)
        assert monitor.steps == 1 and len(run.rows) == 7 and run.notes == [] and run.end is not None


def test_the_log_has_its_header_lines_and_end(tmp_path: Path) -> None:
    net, log = small(), tmp_path / "run.ndjson"
    for error in (None, SystemExit(5)):
        with suppress(SystemExit), Monitor(every=2, log=log, command=["a.py"], rank=1, world_size=2) as monitor:
            train(net, sgd(net), batches())
            if error is not None:
                raise error
        assert monitor.rows == []
    first, second = read_runs(log)
    header = {"command": ["a.py"], "layers": ["all"], "every": 2, "rank": 1, "pid": os.getpid()}
    assert header == {name: first.header[name] for name in header}
    assert len(first.rows) == len(second.rows) == 14
    ends = [{name: run.end[name] for name in ("step", "sampled", "reason", "status")} for run in (first, second)]
    assert ends[0] == {"step": 3, "sampled": 2, "reason": "done", "status": None}
    assert ends[1] == ends[0] | {"reason": "exit", "status": 5}


def test_the_same_metrics_as_scalars_of_tensorboard(tmp_path: Path) -> None:
    from tests.statistics.test_tensorboard import read

    net = small()
    with Monitor(every=2, to=f"tensorboard:{tmp_path}") as monitor:
        train(net, sgd(net), batches())
    events = read(tmp_path)
    row = by_key(monitor.rows, 2)["relu", 1]
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert math.isclose(scalars["relu#1/activation_mean"][2], row["activation_mean"], rel_tol=1e-6)
    assert math.isclose(scalars["loss"][2], row["loss"], rel_tol=1e-6) and scalars["learning_rate"].keys() == {0, 2}
    assert "conv/running_mean_shift" not in scalars and scalars["bn/frozen"][0] == 0


class OwnOptimizer:
    """Plain gradient descent that knows nothing of torch.optim, and writes where no version is counted."""

    def __init__(self, net: nn.Module) -> None:
        self.parameters = list(net.parameters())

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None


class TestOptimizersOfOthers:
    def run(self, watching: Any, every_other: bool = False) -> tuple[Small, list[float]]:
        net, losses = small(), []
        optimizer = OwnOptimizer(net)
        with watching:
            for at, (x, y) in enumerate(batches(7)):
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                losses.append(loss.item())
                if at % 2 or not every_other:
                    optimizer.step()
        return net, losses

    def test_each_backward_pass_counts_as_a_step(self) -> None:
        notes: list[str] = []
        monitor = Monitor(every=3, on_trouble=notes.append)
        net, losses = self.run(monitor)
        plain, _ = self.run(nullcontext())
        assert all(
            torch.equal(a, b) for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True)
        )
        assert len(notes) == 1 and "each backward pass counts as a step" in notes[0]
        assert monitor.steps == 7 and monitor.sampled == 3 and {row["step"] for row in monitor.rows} == {0, 3, 6}
        assert keys(monitor.rows, 0) == keys(monitor.rows, 3) == ORDER
        for at in (0, 3, 6):
            row = by_key(monitor.rows, at)["conv", 0]
            assert close(row["loss"], losses[at])
            assert (
                close(row["update_to_weight"], 0.1 * row["gradient_norm"] / row["weight_norm"]) or row["gradient_norm"]
            )
        assert not modules._global_forward_hooks

    def test_gradients_and_updates_are_those_of_the_step(self) -> None:
        net = nn.Linear(2, 1, bias=False)
        optimizer, monitor, hand = OwnOptimizer(net), Monitor(every=1, on_trouble=lambda text: None), []
        with monitor:
            for at in range(3):
                net(torch.full((1, 2), at + 1.0)).square().sum().backward()
                hand.append((float(net.weight.grad.norm()), float(net.weight.detach().norm())))
                optimizer.step()
        assert len(monitor.rows) == 3
        for row, (gradient, weight) in zip(monitor.rows, hand, strict=True):
            assert close(row["gradient_norm"], gradient) and close(row["weight_norm"], weight)
            assert close(row["update_to_weight"], 0.1 * gradient / weight)

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


class TestModes:
    def test_modes_of_the_script_see_what_they_see_unwatched(self) -> None:
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode

        seen: list[str] = []

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        def run(mode: Any, watching: Any) -> list[str]:
            net = small()
            seen.clear()
            scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), sgd(net)
            with watching, mode:
                for x, y in batches(3):
                    scaler.scale(F.cross_entropy(net(x), y)).backward()
                    scaler.step(optimizer)
                    scaler.update()
            return list(seen)

        for mode in (Functions, Operations):
            plain = run(mode(), nullcontext())
            assert run(mode(), Monitor(every=1)) == plain and len(plain) > 20
            assert run(mode(), Monitor(every=1, stop_on="non-finite")) == plain

    def test_a_pass_of_fake_tensors_is_no_pass(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        net = small()
        with Monitor(every=1) as monitor:
            with FakeTensorMode(allow_non_fake_inputs=True):
                net(torch.ones(2, 1, 6, 6))
            train(net, sgd(net), batches(1))
        assert monitor.trouble is None and keys(monitor.rows) == ORDER

    @pytest.mark.parametrize("name", ["settrace", "setprofile"])
    def test_a_script_that_traces_its_calls_gets_one_note(self, name: str) -> None:
        import sys

        net, notes = small(), []
        before = getattr(sys, name.replace("set", "get"))()
        with Monitor(every=1, on_trouble=notes.append):
            getattr(sys, name)(lambda frame, event, argument: None)
            try:
                train(net, sgd(net), batches(3))
            finally:
                getattr(sys, name)(before)
        assert len(notes) == 1 and f"sys.{name}" in notes[0]

    def test_models_copied_and_pickled_in_a_sampled_step_have_no_hooks(self) -> None:
        net, copies = small(), []
        with Monitor(every=1, stop_on="non-finite"):
            handle = net.fc1.register_forward_hook(
                lambda module, args, output: copies.extend((copy.deepcopy(net), pickle.loads(pickle.dumps(net.conv))))
            )
            hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]
            with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
                pickle.dumps(net)  # because of the lambda of the script's own
            train(net, sgd(net), batches(1))
            handle.remove()
            pickle.loads(pickle.dumps(net))
        assert len(copies) == 2 and sum(hooks) == 1
        assert not any(module._forward_hooks for module in copies[1].modules())
