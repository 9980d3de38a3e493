"""Passes of a watched run: accumulated, caught, recomputed, without gradients, and stopped at the first NaN or Inf."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hookscope.errors import NonFiniteError
from hookscope.training import Monitor
from hookscope.training.log.file import read_runs
from tests.nets import Function, named
from tests.training.watched import Row, batches, by_key, close, filled, keys, sgd, small, step


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
                step(net, optimizer, torch.randn(3, 2))
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
                step(net, sgd(net), torch.randn(2, 2))
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

    def test_models_that_call_themselves_and_that_grow(self) -> None:
        def forward(net: Any, x: Tensor, again: bool = True) -> Tensor:
            x = net.fc(x)
            return net(x, again=False) if again else x

        net = Function(forward, fc=nn.Linear(2, 2))
        with Monitor(every=1) as monitor:
            step(net, sgd(net))
        assert keys(monitor.rows) == [("fc", 0), ("fc", 1)]
        net = nn.Sequential(nn.Linear(2, 2))
        optimizer = sgd(net)
        with Monitor(every=1) as monitor:
            step(net, optimizer)
            net.append(nn.Tanh())
            step(net, optimizer)
        assert [row["layer"] for row in monitor.rows] == ["0", "0", "1"]


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
        "NaN in the input of fc (Linear); it comes from the data: the input of the model holds it; look at the data",
        "input",
    ),
    "before the first layer": (
        of_fc(lambda net, x: net.fc(x / (x - 2.0))),
        2.0,
        "Inf in the input of fc (Linear); the input of the model is finite, so the model itself makes it; find-nan",
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
        match = r"gradient of 1\.weight; .*; made by the backward pass of sqrt; keep the input of sqrt"
        with pytest.raises(NonFiniteError, match=match), Monitor(stop_on="non-finite"):  # noqa: PT012
            net(torch.ones(1, 1)).abs().sqrt().sum().backward()
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_an_error_that_is_caught_is_raised_again_and_a_sum_that_overflows_is_none(self) -> None:
        net, errors = nn.Linear(1, 1), 0
        with Monitor(stop_on="non-finite"):
            for value in (float("inf"), 1.0, 1.0):
                try:
                    net(torch.full((1, 1), value))
                except NonFiniteError:
                    errors += 1
        assert errors == 3
        net = nn.Identity()
        with Monitor(stop_on="non-finite"):
            net(torch.full((8,), 3e38, requires_grad=True))
            net(torch.full((999,), 6e4, dtype=torch.float16, requires_grad=True))
