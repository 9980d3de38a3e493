"""The operation behind the first NaN, planted forward and backward, in weights and in the input."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from hookscope.gradients.anomaly import Anomaly, first_anomaly
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.scores.losses import Loss


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Root(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x).sqrt() * 0 + x  # here


class Log(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 0 - 1
        return y.log() + x  # here


class InPlaceLog(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 0 - 1
        y.log_()  # here
        return y + x


class Difference(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 0 + 1000).exp()
        return y - y  # here


class Masked(Block):
    """Inf that is meant: no anomaly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x.flatten(2).masked_fill(torch.arange(x[0, 0].numel()) % 2 == 0, float("-inf"))
        return x * scores.softmax(-1).view_as(x)


class CustomRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


class Custom(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return CustomRoot.apply(x).relu()


def net(block: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), block, nn.Conv2d(4, 4, 3), *pool)


def place(kind: type[Block]) -> str:
    lines, first = inspect.getsourcelines(kind.forward)
    return f"test_anomaly.py:{first + next(at for at, text in enumerate(lines) if '# here' in text)}"


def found(model: nn.Module, x: torch.Tensor | None = None, loss: str = "score") -> Anomaly | None:
    return first_anomaly(model, torch.rand(1, 3, 10, 10) if x is None else x, Loss(loss, "1"))


@pytest.mark.parametrize(
    ("kind", "phase", "operation", "forward"),
    [
        (Root, "backward", "SqrtBackward0", "sqrt"),
        (Log, "forward", "log", ""),
        (InPlaceLog, "forward", "log_", ""),
        (Difference, "forward", "sub", ""),
    ],
)
def test_the_operation_its_layer_and_its_line(kind: type[Block], phase: str, operation: str, forward: str) -> None:
    anomaly = found(net(kind()))
    assert anomaly is not None
    assert (anomaly.phase, anomaly.kind, anomaly.operation) == (phase, "NaN", operation)
    assert (anomaly.layer, anomaly.place, anomaly.source) == ("2", place(kind), "")
    assert anomaly.forward == forward
    assert str(anomaly) == f"{operation}{' of sqrt' if forward else ''} at {place(kind)} in '2'"


def test_inf_before_the_nan_is_told() -> None:
    anomaly = found(net(Difference()))
    assert anomaly is not None and anomaly.infinite is not None
    assert (anomaly.infinite.operation, anomaly.infinite.layer, anomaly.infinite.kind) == ("exp", "2", "Inf")


@pytest.mark.parametrize("kind", [Block, Masked])
@pytest.mark.parametrize("loss", ["score", "cross-entropy", "mse"])
def test_a_sound_net_has_none(kind: type[Block], loss: str) -> None:
    assert found(net(kind()), loss=loss) is None


def test_inf_that_reaches_the_loss_counts() -> None:
    class Huge(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.abs() + torch.full_like(x, 1000).exp()

    anomaly = found(nn.Sequential(Huge(), nn.AdaptiveMaxPool2d(1), nn.Flatten()))
    assert anomaly is not None and (anomaly.phase, anomaly.kind, anomaly.operation) == ("forward", "Inf", "exp")


def test_a_custom_function_is_named_by_its_node() -> None:
    anomaly = found(net(Custom()))
    assert anomaly is not None
    assert (anomaly.phase, anomaly.operation, anomaly.layer) == ("backward", "CustomRootBackward", "2")
    # not "of relu", which is only the next that torch shows
    assert (anomaly.forward, anomaly.place) == ("", "")


NAN, INF = float("nan"), float("inf")


class Unseen(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy() * NAN)  # here


class Constant(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = torch.full((1,), NAN)  # here
        return x * k


class Attribute(Block):
    def __init__(self) -> None:
        super().__init__()
        self.k = torch.tensor([NAN])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k  # here


class Listed(Attribute):
    def __init__(self) -> None:
        super().__init__()
        self.several = [torch.tensor([NAN])]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone().mul_(self.several[0])  # here


UNSEEN = "a tensor of unknown origin"


@pytest.mark.parametrize(
    ("kind", "operation", "source"),
    [
        (Unseen, "add", UNSEEN),
        (Constant, "full", ""),
        (Attribute, "mul", "attribute '2.k'"),
        (Listed, "mul_", UNSEEN),
    ],
)
def test_nan_that_no_operation_with_a_tensor_made(kind: type[Block], operation: str, source: str) -> None:
    anomaly = found(net(kind()))
    assert anomaly is not None
    assert (anomaly.phase, anomaly.kind, anomaly.operation, anomaly.source) == ("forward", "NaN", operation, source)
    assert (anomaly.layer, anomaly.place) == ("2", place(kind))


def test_inf_that_nobody_saw_is_told_where_nan_comes_of_it() -> None:
    class Huge(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.full((1,), INF)

    class Less(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x

    anomaly = found(nn.Sequential(Huge(), Less(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    assert anomaly is not None and anomaly.infinite is not None
    assert (anomaly.operation, anomaly.infinite.operation, anomaly.infinite.kind) == ("sub", "full", "Inf")
    anomaly = found(nn.Sequential(Huge(), nn.AdaptiveMaxPool2d(1), nn.Flatten()))
    assert anomaly is not None and (anomaly.phase, anomaly.kind, anomaly.operation) == ("forward", "Inf", "full")


def test_memory_that_is_written_before_it_is_read_is_no_anomaly() -> None:
    class Filled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            constant, empty, out = torch.full(x.shape, NAN), torch.empty_like(x.detach()), torch.full(x.shape, NAN)
            with torch._C.DisableTorchFunction():
                empty += NAN  # what happened to be there
            constant[:, :2], constant[:, 2:] = x[:, :2], x[:, 2:]
            empty = empty.contiguous(memory_format=torch.channels_last)
            empty[:, :2], empty[:, 2:] = x[:, :2].detach(), x[:, 2:].detach()
            torch.add(x.detach(), 1, out=out)
            mask = torch.full((x.shape[-1], x.shape[-1]), -INF).triu(1)
            return constant + empty + out + x @ (mask + 0).softmax(-1)

    assert found(net(Filled())) is None


def test_a_spoiled_loss_is_never_told_as_sound() -> None:
    class Last(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                return x.mean((2, 3)) * NAN

    anomaly = found(nn.Sequential(nn.Conv2d(3, 4, 3), Last()))
    assert anomaly is not None and (anomaly.phase, anomaly.kind, anomaly.source) == ("forward", "NaN", UNSEEN)
    anomaly = found(net(Block()), torch.full((1, 3, 10, 10), 1e25), loss="mse")
    assert anomaly is not None and (anomaly.phase, anomaly.kind, anomaly.operation) == ("forward", "Inf", "the loss")


def test_nan_in_a_weight() -> None:
    model = net(Block())
    model[3].weight.data[1, 2, 0, 0] = float("nan")
    anomaly = found(model)
    assert anomaly is not None
    assert (anomaly.phase, anomaly.operation, anomaly.layer) == ("forward", "conv2d", "3")
    assert anomaly.source == "parameter '3.weight'"


def test_nan_in_the_input() -> None:
    anomaly = found(net(Block()), torch.full((1, 3, 10, 10), float("nan")))
    assert anomaly is not None and anomaly.source == "the input"


def test_a_call_of_a_layer_that_runs_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = Log1p()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.log(self.log(x) - 5).mean((2, 3))

    class Log1p(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log1p(x)

    anomaly = found(Twice())
    assert anomaly is not None and (anomaly.operation, anomaly.layer) == ("log1p", "log#1")


def test_nothing_of_the_model_changes() -> None:
    for kind in (Root, Log, Block):
        model, x = net(kind()).train(), torch.rand(1, 3, 10, 10)
        state = ModelSnapshot(model)
        with torch.no_grad():
            found(model, x)
        assert state.changes() == []
    assert not torch.is_anomaly_enabled()
    assert not torch.overrides._get_current_function_mode_stack()


def test_nothing_changes_when_the_model_fails() -> None:
    model, x = net(Block()), torch.rand(1, 2, 10, 10)
    state = ModelSnapshot(model)
    with pytest.raises(RuntimeError):
        found(model, x)
    assert state.changes() == []
