"""Hooks that change gradients: each against torch's own function or numbers from paper, and gone after the block."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.errors import LayerError, ModelError, SelectionError, UsageError
from hookscope.gradients.modify import (
    ClampGradientSign,
    ClipGradientNorm,
    ClipGradientValue,
    ScaleGradient,
    ZeroGradient,
    change_gradients,
    clip_total_norm,
)
from hookscope.hooks.model_state import ModelSnapshot
from tests.helpers import hooks_on
from tests.nets import conv


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, 1, 1, -1)


def numbers(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    return tensor.detach().flatten().tolist()


class Chain(nn.Module):
    """2x, an in-place ReLU, 5x + 1."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.first, self.relu, self.last = conv(2), nn.ReLU(inplace=inplace), conv(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.relu(self.first(x)))


X = row(1, -2, 3)


# -- the objects -------------------------------------------------------------------------------------------------------


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(4,), (3, 5), (2, 3, 3, 3), ()]
    return [(10 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def by_torch(clip: Callable[..., Any], values: list[Tensor], limit: float) -> list[Tensor]:
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.clone()
    clip(parameters, limit)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("limit", [1e-3, 0.7, 5.0, 1e6, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clips_are_torchs(limit: float, dtype: torch.dtype) -> None:
    for value in gradients(dtype):
        assert torch.equal(ClipGradientValue(limit)(value), by_torch(nn.utils.clip_grad_value_, [value], limit)[0])
        (expected,) = by_torch(nn.utils.clip_grad_norm_, [value], limit)
        assert torch.allclose(
            ClipGradientNorm(limit)(value), expected, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0
        )
    together = clip_total_norm(gradients(dtype), limit)
    for found, expected in zip(together, by_torch(nn.utils.clip_grad_norm_, gradients(dtype), limit), strict=True):
        assert torch.allclose(found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0)
        assert found.dtype == dtype


def test_the_direction_stays_and_the_length_is_the_limit() -> None:
    for value in gradients():
        clipped = ClipGradientNorm(0.25)(value)
        assert float(clipped.norm()) == pytest.approx(0.25, rel=1e-5)
        assert torch.allclose(clipped / clipped.norm(), value / value.norm(), atol=1e-6)


def test_what_is_short_enough_stays_to_the_bit() -> None:
    value = torch.tensor([0.3, -0.4])
    assert torch.equal(ClipGradientNorm(0.6)(value), value)
    assert torch.equal(ClipGradientValue(0.4)(value), value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_half_precision_does_not_overflow(dtype: torch.dtype) -> None:
    value = torch.full((100,), 6e4).to(dtype)  # its norm, 6e5, is more than a float16 holds
    assert ClipGradientNorm(1.0)(value).dtype == dtype
    assert ClipGradientNorm(1.0)(value).tolist() == pytest.approx([0.1] * 100, rel=1e-2)


def test_nothing_to_clip() -> None:
    assert clip_total_norm([], 1.0) == []
    assert numbers(ClipGradientNorm(1.0)(torch.zeros(3))) == [0, 0, 0]
    assert ClipGradientNorm(1.0)(torch.zeros(0)).shape == (0,)


def test_the_others_from_paper() -> None:
    value = torch.tensor([-3.0, 0.0, 0.5, 4.0])
    assert numbers(ClampGradientSign("positive")(value)) == [0, 0, 0.5, 4]
    assert numbers(ClampGradientSign("negative")(value)) == [-3, 0, 0, 0]
    assert numbers(ClampGradientSign()(value)) == numbers(ClampGradientSign("positive")(value))
    assert numbers(ScaleGradient(-1)(value)) == [3, 0, -0.5, -4]
    assert numbers(ScaleGradient(0.5)(value)) == [-1.5, 0, 0.25, 2]
    assert numbers(ZeroGradient()(value)) == [0, 0, 0, 0]


def test_nan_and_infinity() -> None:
    value = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert numbers(ZeroGradient()(value)) == [0, 0, 0, 0]
    clipped = numbers(ClipGradientValue(2.0)(value))
    assert math.isnan(clipped[0]) and clipped[1:] == [2, -2, 1]
    assert all(map(math.isnan, numbers(ClipGradientNorm(1.0)(value))))  # as torch: a NaN is not hidden


@pytest.mark.parametrize(
    "change",
    [ClipGradientValue(0.1), ClipGradientNorm(0.1), ClampGradientSign("negative"), ScaleGradient(3), ZeroGradient()],
    ids=repr,
)
def test_what_comes_in_is_not_written_to(change: Callable[[Tensor], Tensor]) -> None:
    value = torch.tensor([[1.0, -2.0], [3.0, 4.0]]).T
    made = change(value)
    assert numbers(value) == [1, 3, -2, 4] and made is not value
    assert (made.shape, made.dtype, made.stride()) == (value.shape, value.dtype, value.stride())


@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
@pytest.mark.parametrize("kind", [ClipGradientValue, ClipGradientNorm])
def test_limits_that_make_no_sense(kind: type, limit: float) -> None:
    with pytest.raises(UsageError, match=r"limit .* sets every gradient to 0; give a number above 0"):
        kind(limit)


def test_signs_that_are_none() -> None:
    with pytest.raises(UsageError, match="unknown sign 'up'; the signs are positive and negative"):
        ClampGradientSign("up")


# -- on layers ---------------------------------------------------------------------------------------------------------


def run(net: nn.Module, weight: Tensor | None = None) -> Tensor:
    """Backward of the weighted sum; the gradient of the input."""
    x = X.clone().requires_grad_()
    (net(x) * (row(1, 10, -100) if weight is None else weight)).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("changes", "at_input", "first", "last"),
    [
        # without: (1, 10, -100) times 5, through the ReLU open at 1 and 3, times 2; weights: input times gradient
        ({}, [10, 0, -1000], 5 - 1500, 2 - 600),
        ({"last": ScaleGradient(-1)}, [-10, 0, 1000], -5 + 1500, -2 + 600),
        ({"relu": ScaleGradient(-1)}, [-10, 0, 1000], -5 + 1500, 2 - 600),
        ({"first": ScaleGradient(-1)}, [-10, 0, 1000], -5 + 1500, 2 - 600),
        ({"last": ClipGradientValue(2)}, [10, 0, -20], 5 - 30, 2 - 12),
        ({"relu": ClampGradientSign("positive")}, [10, 0, 0], 5, 2 - 600),
        ({"relu": ClampGradientSign("negative")}, [0, 0, -1000], -1500, 2 - 600),
        ({"first": ZeroGradient()}, [0, 0, 0], 0, 2 - 600),
        ({"relu": ZeroGradient()}, [0, 0, 0], 0, 2 - 600),
        ({"last": ZeroGradient()}, [0, 0, 0], 0, 0),
        ({"first,last": ScaleGradient(2)}, [40, 0, -4000], 4 * (5 - 1500), 2 * (2 - 600)),
        ({"0": ScaleGradient(2)}, [20, 0, -2000], 2 * (5 - 1500), 2 - 600),
        ({"-1": ScaleGradient(2)}, [20, 0, -2000], 2 * (5 - 1500), 2 * (2 - 600)),
        ({"-2:": ScaleGradient(2)}, [40, 0, -4000], 4 * (5 - 1500), 2 * (2 - 600)),
        ({"-2": ScaleGradient(2)}, [20, 0, -2000], 2 * (5 - 1500), 2 - 600),
        ({"": ScaleGradient(2)}, [20, 0, -2000], 2 * (5 - 1500), 2 * (2 - 600)),
        ({"relu": lambda gradient: None}, [10, 0, -1000], 5 - 1500, 2 - 600),
        ({"first": ScaleGradient(3), "last": ScaleGradient(-1)}, [-30, 0, 3000], -3 * (5 - 1500), -2 + 600),
    ],
)
def test_layers_from_paper(
    changes: dict[str, Any], at_input: list[float], first: float, last: float, inplace: bool
) -> None:
    net = Chain(inplace)
    if "" in changes:
        changes = {"re:^$": changes[""]}  # the model itself
    with change_gradients(net, changes):
        found = run(net)
    assert numbers(found) == at_input
    assert numbers(net.first.weight.grad) == [first] and numbers(net.last.weight.grad) == [last]
    assert hooks_on(net) == 0


def test_the_output_is_the_same() -> None:
    net = Chain()
    with change_gradients(net, {"first": ZeroGradient(), "relu": ZeroGradient(), "last.weight": ZeroGradient()}):
        assert numbers(net(X)) == [11, 1, 31]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = conv(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


@pytest.mark.parametrize(
    ("changes", "weight", "bias"),
    [
        # y = w (w x + b) + b at x = 1, w = 3, b = 0: dy/dw = 6, dy/db = 4
        ({}, 6, 4),
        ({"layer#1": ScaleGradient(10)}, 60, 40),
        ({"layer#0": ScaleGradient(10)}, 3 + 10 * 3, 1 + 10 * 3),
        ({"layer": ScaleGradient(10)}, 10 * 3 + 100 * 3, 10 * 1 + 100 * 3),
        ({"layer.weight": ClipGradientValue(5)}, 5, 4),  # once, for both calls together
        ({"layer.weight": ScaleGradient(10), "layer.bias": ZeroGradient()}, 60, 0),
    ],
)
def test_a_layer_that_runs_twice(changes: dict[str, Any], weight: float, bias: float) -> None:
    net = Twice()
    with change_gradients(net, changes):
        net(row(1)).sum().backward()
    assert (numbers(net.layer.weight.grad), numbers(net.layer.bias.grad)) == ([weight], [bias])


class Parts(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"two": 2 * x, "rest": [3 * x, x.argmax()], "same": x}


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def forward(self, x: Tensor) -> Tensor:
        found = self.parts(x)
        return found["two"] + found["rest"][0] + 10 * found["same"]


def test_containers_each_tensor_by_itself() -> None:
    net, x = Joins(), row(1).requires_grad_()
    with change_gradients(net, {"parts": ClipGradientValue(0.5)}):
        net(x).sum().backward()
    assert numbers(x.grad) == [0.5 * 2 + 0.5 * 3 + 0.5]


def in_place_model() -> nn.Module:
    net = torchvision.models.squeezenet1_1(weights=None, num_classes=4).eval()
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            nn.init.constant_(parameter, 0.05)
    return net


def test_guided_gradients_of_an_in_place_model_are_those_of_a_forward_by_hand() -> None:
    class Guided(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient.clamp(min=0) * (x > 0)

    class GuidedReLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Guided.apply(x)

    net = in_place_model()
    by_hand = copy.deepcopy(net)
    for module in by_hand.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, GuidedReLU())
    x = torch.rand(1, 3, 40, 40)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    relus = {name: ClampGradientSign() for name, module in net.named_modules() if isinstance(module, nn.ReLU)}
    with change_gradients(net, relus):
        net(leaf)[0, 2].backward()
    by_hand(other)[0, 2].backward()
    assert leaf.grad is not None and float(leaf.grad.abs().max()) > 0
    assert torch.allclose(leaf.grad, other.grad, rtol=1e-4, atol=1e-6 * float(leaf.grad.abs().max()))


# -- on parameters -----------------------------------------------------------------------------------------------------


def test_parameters_from_paper() -> None:
    net = Chain()
    with change_gradients(
        net, {"first.weight": ScaleGradient(-1), "last.bias": ZeroGradient(), "last.weight": ClipGradientNorm(7)}
    ):
        found = run(net)
    assert numbers(found) == [10, 0, -1000]  # what goes on to the input is as it was
    assert numbers(net.first.weight.grad) == [1495]
    assert numbers(net.first.bias.grad) == [5 - 500]
    assert numbers(net.last.bias.grad) == [0]
    assert numbers(net.last.weight.grad) == pytest.approx([-7])


def test_autograd_grad_sees_the_change_too_and_no_grad_is_written() -> None:
    net = Chain()
    with change_gradients(net, {"last.bias": ScaleGradient(3)}):
        (found,) = torch.autograd.grad(net(X).sum(), net.last.bias)
    assert numbers(found) == [9] and net.last.bias.grad is None


def test_frozen_parameters_are_passed_over() -> None:
    net = Chain()
    net.first.requires_grad_(False)
    with change_gradients(
        net, {"first.weight": ScaleGradient(2), "first": ScaleGradient(2), "last.bias": ScaleGradient(2)}
    ):
        run(net)
    assert net.first.weight.grad is None and numbers(net.last.bias.grad) == [2 * -89]


def test_a_parameter_with_two_names() -> None:
    net = Chain()
    net.last.weight = net.first.weight
    for name in ("first.weight", "last.weight"):
        net.zero_grad()
        with change_gradients(net, {name: ZeroGradient()}):
            run(net)
        assert numbers(net.first.weight.grad) == [0]


def test_three_steps_of_training_equal_gradients_clipped_by_hand() -> None:
    net, by_hand = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Module()
    by_hand = copy.deepcopy(net)
    start = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (net, by_hand)]
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    changes = {name: ClipGradientNorm(0.05) for name, _ in net.named_parameters() if name != "0.weight"} | {
        "0.weight": ZeroGradient()
    }
    with change_gradients(net, changes):
        for _ in range(3):
            optimizers[0].zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizers[0].step()
    for _ in range(3):
        optimizers[1].zero_grad()
        nn.functional.mse_loss(by_hand(x), y).backward()
        for name, parameter in by_hand.named_parameters():
            if name == "0.weight":
                parameter.grad.zero_()
            else:
                nn.utils.clip_grad_norm_([parameter], 0.05)
        optimizers[1].step()
    for (name, one), other in zip(net.named_parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7), name
    assert torch.equal(net[0].weight, start[0].weight) and not torch.equal(net[0].bias, start[0].bias)
    assert hooks_on(net) == 0


# -- the block ---------------------------------------------------------------------------------------------------------


def test_outside_the_block_nothing_is_changed() -> None:
    net = Chain()
    with change_gradients(net, {"first": ZeroGradient(), "first.weight": ZeroGradient(), "last": ZeroGradient()}):
        inside = net(X).sum()
    before, net_after = inside, net(X).sum()
    before.backward()  # of a pass inside the block, but itself outside
    assert numbers(net.first.weight.grad) == [5 * (1 + 3)]
    net.zero_grad()
    net_after.backward()
    assert numbers(net.first.weight.grad) == [20]


def test_a_block_entered_again_changes_its_own_passes() -> None:
    net = Chain()
    block = change_gradients(net, {"last": ZeroGradient()})
    with block:
        first = net(X).sum()
    with block:
        first.backward()
        assert numbers(net.first.weight.grad) == [20]
        net.zero_grad()
        net(X).sum().backward()
    assert numbers(net.first.weight.grad) == [0]
    assert hooks_on(net) == 0


def test_two_blocks_at_once() -> None:
    net = Chain()
    with (
        change_gradients(net, {"last": ScaleGradient(2)}),
        change_gradients(net, {"last": ScaleGradient(3), "last.bias": ScaleGradient(10)}),
    ):
        run(net, row(1, 0, 0))
    assert numbers(net.last.bias.grad) == [60]
    assert hooks_on(net) == 0


@pytest.mark.parametrize("where", ["forward", "backward", "block"])
def test_gone_after_an_exception(where: str) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    def fails(gradient: Tensor) -> Tensor:
        raise RuntimeError("on purpose")

    net = nn.Sequential(Chain(), Fails() if where == "forward" else nn.Identity())
    changes = {"0.first": fails if where == "backward" else ZeroGradient(), "0.last.weight": ZeroGradient()}
    before = ModelSnapshot(net)
    with pytest.raises(RuntimeError, match="on purpose"), change_gradients(net, changes):  # noqa: PT012
        loss = net(X).sum()
        if where == "backward":
            torch.autograd.grad(loss, net[0].first.weight)
        raise RuntimeError("on purpose")
    assert before.changes() == [] and hooks_on(net) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("frist", "no layer or parameter 'frist'; nearest: first"),
        ("last.weigth", "no layer or parameter 'last.weigth'; nearest: last.weight"),
        ("zebra", "no layer or parameter 'zebra'; "),
    ],
)
def test_names_that_are_neither(name: str, said: str) -> None:
    net = Chain()
    with (
        pytest.raises(LayerError) as caught,
        change_gradients(net, {"first.weight": ZeroGradient(), "last": ZeroGradient(), name: ZeroGradient()}),
    ):
        raise AssertionError("entered")
    assert str(caught.value).startswith(said)
    assert hooks_on(net) == 0


def test_a_number_is_an_index_also_where_a_layer_is_called_so() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(LayerError, match=r"no layer of type Conv2d.*'re:\^1\$' is the layer of that name"):
        change_gradients(net, {"1": ZeroGradient()}).__enter__()
    with change_gradients(net, {"re:^1$": ZeroGradient()}):
        net(torch.ones(1, 2)).sum().backward()
    assert numbers(net[0].bias.grad) == [0, 0]
    with change_gradients(net, {"0": ScaleGradient(4)}, types=("Linear",)):
        net.zero_grad()
        net(torch.full((1, 2), 9.0)).sum().backward()
    assert set(numbers(net[0].bias.grad)) <= {0, 4}


def test_an_index_that_no_pass_reaches_is_told_on_leaving_and_all_hooks_are_gone() -> None:
    net = Chain()
    with (
        pytest.raises(LayerError, match="7"),
        change_gradients(net, {"7": ZeroGradient(), "first": ZeroGradient(), "first.bias": ZeroGradient()}),
    ):
        net(X).sum().backward()
    assert hooks_on(net) == 0


def test_selections_and_models_that_make_no_sense() -> None:
    with pytest.raises(SelectionError):
        change_gradients(Chain(), {"1:2:3:4": ZeroGradient()}).__enter__()
    net = Chain()
    net.compile(backend="eager")
    with pytest.raises(ModelError, match="compiled"):
        change_gradients(net, {"first.bias": ZeroGradient(), "first": ZeroGradient()}).__enter__()
    assert hooks_on(net) == 0


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda gradient: gradient[..., :1], "returns 1x1x1x1; the gradient is 1x1x1x3"),
        (lambda gradient: 7, "returns int; the gradient is 1x1x1x3"),
    ],
)
def test_what_is_no_gradient_names_the_layer(made: Callable[[Tensor], Any], said: str) -> None:
    net = Chain()
    with pytest.raises(UsageError) as caught, change_gradients(net, {"relu": made}):
        run(net)
    assert str(caught.value) == f"the change of the gradient at 'relu' {said}"
    with pytest.raises(UsageError, match=r"at 'last\.bias' returns int; the gradient is 1"):  # noqa: SIM117
        with change_gradients(net, {"last.bias": lambda gradient: 7}):
            run(net)
    assert hooks_on(net) == 0


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_nothing_happens(around: Any) -> None:
    net = Chain()
    with around(), change_gradients(net, {"first": ZeroGradient(), "last.weight": ZeroGradient()}):
        assert numbers(net(X)) == [11, 1, 31]


def test_nothing_of_the_model_changes() -> None:
    net = Chain().train()
    before = ModelSnapshot(net)
    with change_gradients(net, {"first": ClipGradientNorm(1), "last.weight": ZeroGradient()}):
        torch.autograd.grad(net(X).sum(), list(net.parameters()))
    assert before.changes() == []


def test_a_pass_and_its_graph_go_with_the_loss() -> None:
    net = Chain()
    gc.disable()
    try:
        with change_gradients(net, {"first": ScaleGradient(2), "relu": ScaleGradient(2)}):
            output = net(X)
            output.sum().backward()
            held = weakref.ref(output)
            del output
            assert held() is None
    finally:
        gc.enable()


def test_a_copy_of_the_model_made_inside_the_block_is_not_meant() -> None:
    net = Chain()
    with change_gradients(net, {"first": ZeroGradient()}):
        twin = copy.deepcopy(net)
        twin(X).sum().backward()
    assert numbers(twin.first.weight.grad) == [20]
