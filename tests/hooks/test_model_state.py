"""A pass for gradients, whatever surrounds it; and nothing of the model, of its gradients or of chance has changed."""

import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import ModelError
from hookscope.hooks import differentiable, leaf_tensors, leaves_of, passed_on
from hookscope.hooks.model_state import (
    ModelSnapshot,
    StateChange,
    largest_difference,
    largest_value,
    one_thread,
    random_states_kept,
    same_bits,
)
from tests.nets import Function


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.5),
        (torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf]), 0.0),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 3.0]), 2.0),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), math.inf),
        (torch.tensor([math.nan]), torch.tensor([0.0]), math.inf),
        (torch.zeros(2), torch.zeros(3), math.inf),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), math.inf),
        ([torch.zeros(2)], torch.zeros(2), math.inf),
        ({"a": torch.tensor(1)}, {"a": torch.tensor(4)}, 3.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 5.0),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (None, None, 0.0),
    ],
)
def test_largest_difference(one: Any, other: Any, expected: float) -> None:
    assert largest_difference(one, other) == largest_difference(other, one) == expected


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_same_bits() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert same_bits({"a": nan}, {"a": nan.clone()})
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.tensor(True), torch.tensor(True))
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    assert same_bits(quantized, quantized.clone())


@pytest.mark.parametrize(
    ("value", "largest"),
    [([torch.tensor([1.0, -3.0]), torch.tensor(math.inf)], 3.0), (torch.tensor(3 + 4j), 5.0), (torch.zeros(0), 0.0)],
)
def test_largest_value(value: Any, largest: float) -> None:
    assert largest_value(value) == largest


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_one_thread_inside_the_block_and_the_same_number_as_before_after_it(threads: int) -> None:
    with one_thread(), one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads
    with pytest.raises(ValueError, match="on purpose"), one_thread():
        raise ValueError("on purpose")
    assert torch.get_num_threads() == threads


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 2)
    )


X = torch.tensor([[[[1.0, -2.0], [3.0, 0.5]]]])
SURROUNDINGS = {"plain": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def score_gradient(net: nn.Module, x: Tensor) -> Tensor:
    leaf = leaves_of(x)
    (gradient,) = torch.autograd.grad(net(passed_on(leaf))[0, 0], leaf)
    return gradient


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_gradients_flow_whatever_surrounds_the_block(around: type[AbstractContextManager[None]]) -> None:
    net = small().train()
    expected = score_gradient(net.eval(), X)
    net.train()
    with around():
        outside, picture = (torch.is_grad_enabled(), torch.is_inference_mode_enabled()), X * 1
        with differentiable(net):
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            gradient = score_gradient(net, picture)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == outside
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails: bool) -> None:
    net = small().train()
    net[1].eval()  # some layers of many are: each gets its own mode back
    net[4].eval()
    net(X)[0].sum().backward()
    with torch.no_grad():
        net[1].train()(torch.rand(3, 2, 4, 4))
        net[1].eval()
    state = ModelSnapshot(net)
    kept = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    assert len(kept) == 6
    error = pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext()
    with error, differentiable(net):
        assert not any(module.training for module in net.modules())
        score_gradient(net, X)
        random.random(), np.random.rand(), torch.rand(3)
        if fails:
            raise RuntimeError("on purpose")
    assert state.changes() == []
    assert all(map(torch.equal, kept, [parameter.grad for parameter in net.parameters()]))
    assert [module.training for module in net] == [True, False, True, True, False, True]


def test_a_snapshot_names_what_changed() -> None:
    net = small()
    state = ModelSnapshot(net)
    assert state.changes() == []
    with torch.no_grad():
        net[1].running_var.mul_(3)
        net[0].weight.add_(0)
    net[5].register_buffer("new", torch.zeros(1))
    with random_states_kept():
        torch.rand(1)
        random.random()
        np.random.rand()
        changes = state.changes()
    assert changes == [
        StateChange("0", "parameter 'weight'"),
        StateChange("1", "buffer 'running_var'", 2.0),
        StateChange("", "random state of torch"),
        StateChange("", "random state of Python"),
        StateChange("", "random state of numpy"),
        StateChange("5", "buffer 'new' that was not there"),
    ]
    assert [change.layer for change in state.changes()] == ["0", "1", "5"]


def keep(x: Tensor, net: Any) -> Tensor:
    """Counts its passes, and keeps what it saw, in buffers."""
    net.count += 1
    net.seen = x.detach().flatten()[:2].clone()
    net.cache = x.detach() * 2
    net.grown.data = torch.zeros(5)
    net.register_buffer("later", torch.ones(1))
    return x * (net.count + net.same.sum())


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_that_a_pass_writes_are_put_back(fails: bool) -> None:
    net = nn.Sequential(Function(lambda x: keep(x, net[0])))
    buffers = {"count": torch.zeros(()), "seen": torch.full((2,), torch.nan), "cache": None}
    for name, buffer in (buffers | {"grown": torch.ones(2), "same": torch.ones(3)}).items():
        net[0].register_buffer(name, buffer)
    before = dict(net[0]._buffers)
    error = pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext()
    with error, differentiable(net):
        net(torch.ones(4))
        assert net[0].count == 1 and net[0].cache is not None
        if fails:
            raise RuntimeError("on purpose")
    assert net[0]._buffers.keys() == before.keys()
    assert all(net[0]._buffers[name] is before[name] for name in before)
    assert (net[0].count.item(), net[0].seen.isnan().all(), net[0].cache) == (0, True, None)
    assert net[0].grown.tolist() == [1, 1]


def test_an_earlier_graph_that_saved_a_buffer_can_still_run_backward() -> None:
    net = small().eval()
    x = X.clone().requires_grad_()
    score = net(x)[0, 0]  # saves the running statistics
    with differentiable(net):
        score_gradient(net, X)
    score.backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_buffers_without_plain_values_and_lazy_layers_are_accepted() -> None:
    net = small().eval()
    net.register_buffer("sparse", torch.eye(3).to_sparse())
    net.register_buffer("meta", torch.ones(3, device="meta"))
    with differentiable(net):
        assert score_gradient(net, X).abs().sum() > 0
    net = nn.Sequential(nn.LazyConv2d(2, 1), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
    with pytest.raises(RuntimeError, match="on purpose"), differentiable(net):
        raise RuntimeError("on purpose")
    with differentiable(net):
        assert score_gradient(net, X).shape == X.shape


@pytest.mark.parametrize("what", ["0.weight", "1.running_mean"])
def test_weights_made_in_inference_mode_are_an_error(what: str) -> None:
    net = small().train()
    layer, name = what.split(".")
    with torch.inference_mode():
        made = torch.ones_like(getattr(net[int(layer)], name))
    if name == "weight":
        del net[0].weight
        net[0].weight = nn.Parameter(made, requires_grad=False)
    else:
        net[1].running_mean = made
    with pytest.raises(ModelError) as caught, differentiable(net):
        pass
    message = (
        f"'{what}' was made inside torch.inference_mode: no gradient can pass it; build and load the model outside"
    )
    assert str(caught.value) == message
    assert net.training


def test_leaves_are_copies_and_what_is_passed_on_may_be_written_to() -> None:
    x, half, counts = X.clone().requires_grad_(), torch.ones(2, dtype=torch.float16), torch.arange(2)
    inputs = (x * 1, {"half": half, "counts": counts}, "word")
    leaves = leaves_of(inputs)
    handed = passed_on(leaves)
    assert [tensor.dtype for tensor in leaf_tensors(leaves)] == [torch.float32, torch.float16]
    assert all(tensor.is_leaf for tensor in leaf_tensors(leaves))
    assert leaves[2] == "word" and not leaves[1]["counts"].requires_grad
    handed[0].mul_(3).sum().backward()
    handed[1]["counts"].add_(1)
    assert leaves[0].grad.tolist() == [[[[3, 3], [3, 3]]]]
    assert torch.equal(leaves[0], X) and counts.tolist() == [0, 1] and x.grad is None
