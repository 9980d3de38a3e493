"""The operation behind the first NaN, planted forward and backward, in weights and in the input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.gradients.anomaly import first_anomaly
from hookscope.scores.objective import Loss
from tests.nets import Function

NAN, INF = float("nan"), float("inf")
UNKNOWN = "a tensor of unknown origin"
Block = Callable[[Tensor], Tensor]


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * NAN


def root(x: Tensor) -> Tensor:
    return (x - x).sqrt() * 0 + x


def difference_of_inf(x: Tensor) -> Tensor:
    y = (x * 0 + 1000).exp()
    return y - y


def mask_with_inf(x: Tensor) -> Tensor:
    scores = x.flatten(2).masked_fill(torch.arange(x[0, 0].numel()) % 2 == 0, -INF)
    return x * scores.softmax(-1).view_as(x)


def net(block: Block = lambda x: x) -> nn.Sequential:
    ends = [nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), Function(block), *ends)


def anomaly_of(model: nn.Module, x: Tensor | None = None, loss: str = "score") -> Any:
    return first_anomaly(model, torch.rand(1, 3, 10, 10) if x is None else x, Loss(loss, "1"))


def place(block: Block, line: int = 0) -> str:
    """The place of the ``line``-th line after the first of ``block``."""
    return f"test_anomaly.py:{block.__code__.co_firstlineno + line}"


@pytest.mark.parametrize(
    ("block", "line", "operation", "source"),
    [
        (lambda x: (x * 0 - 1).log() + x, 0, "log", ""),
        (lambda x: (x * 0 - 1).log_() + x, 0, "log_", ""),
        (difference_of_inf, 2, "sub", ""),
        (lambda x: x + torch.from_numpy(x.detach().numpy() * NAN), 0, "add", UNKNOWN),
        (lambda x: x * torch.full((1,), NAN), 0, "full", ""),
    ],
    ids=["log", "in place", "difference", "numpy", "constant"],
)
def test_the_operation_of_the_forward_pass_its_layer_and_its_line(
    block: Block, line: int, operation: str, source: str
) -> None:
    anomaly = anomaly_of(net(block))
    assert (anomaly.phase, anomaly.kind, anomaly.operation) == ("forward", "NaN", operation)
    assert (anomaly.layer, anomaly.place, anomaly.source) == ("2", place(block, line), source)


@pytest.mark.parametrize(
    ("block", "operation", "forward", "at"),
    [
        (root, "SqrtBackward0", "sqrt", place(root, 1)),
        (lambda x: NanBackward.apply(x).relu(), "NanBackwardBackward", "", ""),  # not "of relu", the next that is known
    ],
)
def test_the_operation_of_the_backward_pass(block: Block, operation: str, forward: str, at: str) -> None:
    anomaly = anomaly_of(net(block))
    assert (anomaly.phase, anomaly.kind, anomaly.operation, anomaly.layer) == ("backward", "NaN", operation, "2")
    assert (anomaly.forward, anomaly.place) == (forward, at)
    assert str(anomaly) == (f"{operation} of {forward} at {at} in '2'" if forward else f"{operation} in '2'")


@pytest.mark.parametrize(("block", "operation"), [(difference_of_inf, "exp"), (lambda x: (x + INF) - (x + INF), "add")])
def test_the_inf_behind_a_nan_is_named(block: Block, operation: str) -> None:
    anomaly = anomaly_of(net(block))
    assert anomaly.operation == "sub"
    assert (anomaly.infinite.operation, anomaly.infinite.layer, anomaly.infinite.kind) == (operation, "2", "Inf")


@pytest.mark.parametrize("block", [lambda x: x, mask_with_inf])
@pytest.mark.parametrize("loss", ["score", "cross-entropy", "mse"])
def test_a_sound_net_has_no_anomaly(block: Block, loss: str) -> None:
    assert anomaly_of(net(block), loss=loss) is None


def test_an_attribute_and_a_listed_tensor_bring_nan() -> None:
    model, listed = net(), [torch.tensor([NAN])]
    model[2].k = torch.tensor([NAN])
    for function, operation, source in (
        (lambda x: x * model[2].k, "mul", "attribute '2.k'"),
        (lambda x: x.clone().mul_(listed[0]), "mul_", UNKNOWN),
    ):
        model[2].function = function
        anomaly = anomaly_of(model)
        assert (anomaly.operation, anomaly.source) == (operation, source)


@pytest.mark.parametrize(
    ("add", "origin"), [(lambda x: torch.full((1,), INF), "full"), (lambda x: torch.full_like(x, 1000).exp(), "exp")]
)
def test_inf_counts_in_the_loss_and_where_it_becomes_nan(add: Block, origin: str) -> None:
    huge = Function(lambda x: x + add(x))
    anomaly = anomaly_of(nn.Sequential(huge, nn.AdaptiveMaxPool2d(1), nn.Flatten()))
    assert (anomaly.phase, anomaly.kind, anomaly.operation) == ("forward", "Inf", origin)
    anomaly = anomaly_of(nn.Sequential(huge, Function(lambda x: x - x), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    assert (anomaly.operation, anomaly.infinite.operation, anomaly.infinite.kind) == ("sub", origin, "Inf")


def test_memory_that_is_written_before_it_is_read_is_no_anomaly() -> None:
    def filled(x: Tensor) -> Tensor:
        constant, empty, out = torch.full(x.shape, NAN), torch.empty_like(x.detach()), torch.full(x.shape, NAN)
        with torch._C.DisableTorchFunction():
            empty += NAN  # what happened to be there
        constant[:, :2], constant[:, 2:] = x[:, :2], x[:, 2:]
        empty = empty.contiguous(memory_format=torch.channels_last)
        empty[:, :2], empty[:, 2:] = x[:, :2].detach(), x[:, 2:].detach()
        torch.add(x.detach(), 1, out=out)
        mask = torch.full((x.shape[-1], x.shape[-1]), -INF).triu(1)
        return constant + empty + out + x @ (mask + 0).softmax(-1)

    assert anomaly_of(net(filled)) is None


def test_a_loss_that_is_not_finite_is_always_an_anomaly() -> None:
    def hidden(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x.mean((2, 3)) * NAN

    anomaly = anomaly_of(nn.Sequential(nn.Conv2d(3, 4, 3), Function(hidden)))
    assert (anomaly.phase, anomaly.kind, anomaly.source) == ("forward", "NaN", UNKNOWN)
    anomaly = anomaly_of(net(), torch.full((1, 3, 10, 10), 1e25), loss="mse")
    assert (anomaly.phase, anomaly.kind, anomaly.operation) == ("forward", "Inf", "the loss")


def test_nan_in_a_weight_in_the_input_and_in_a_later_call_of_a_layer() -> None:
    model = net()
    anomaly = anomaly_of(model, torch.full((1, 3, 10, 10), NAN))
    assert anomaly.source == "the input"
    model[3].weight.data[1, 2, 0, 0] = NAN
    anomaly = anomaly_of(model)
    assert anomaly.source == "parameter '3.weight'"
    assert (anomaly.phase, anomaly.operation, anomaly.layer) == ("forward", "conv2d", "3")
    log = Function(torch.log1p)
    anomaly = anomaly_of(nn.Sequential(log, Function(lambda x: x - 5), log, Function(lambda x: x.mean((2, 3)))))
    assert (anomaly.operation, anomaly.layer) == ("log1p", "0#1")
