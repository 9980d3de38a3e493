"""Changes of gradients: each against torch's own function or numbers from paper, and gone after the block."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, ModelError, SelectionError, UsageError
from hookscope.gradients.modify import (
    ClampGradientSign,
    ClipGradientNorm,
    ClipGradientValue,
    GradientChanges,
    ScaleGradient,
    ZeroGradient,
    change_gradients,
    clip_total_norm,
)
from hookscope.hooks.model_state import ModelSnapshot
from tests.helpers import hooks_on, numbers, refused
from tests.nets import Fails, Function, Twice, conv, named, row
from tests.training.watched import sgd, train

X = row(1, -2, 3)


def chain(inplace: bool = True) -> Any:
    """2x, a ReLU, 5x + 1."""
    return named(first=conv(2), relu=nn.ReLU(inplace=inplace), last=conv(5, 1))


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
def test_clips_are_those_of_torch(limit: float, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 1e-6 if dtype == torch.float32 else 1e-14, "atol": 0}
    for value in gradients(dtype):
        assert torch.equal(ClipGradientValue(limit)(value), by_torch(nn.utils.clip_grad_value_, [value], limit)[0])
        torch.testing.assert_close(
            ClipGradientNorm(limit)(value), by_torch(nn.utils.clip_grad_norm_, [value], limit)[0], **tolerance
        )
    together = by_torch(nn.utils.clip_grad_norm_, gradients(dtype), limit)
    torch.testing.assert_close(clip_total_norm(gradients(dtype), limit), together, **tolerance)


def test_small_and_empty_gradients_are_not_clipped_and_norms_of_half_precision_do_not_overflow() -> None:
    value = torch.tensor([0.3, -0.4])
    assert torch.equal(ClipGradientNorm(0.6)(value), value)
    assert torch.equal(ClipGradientValue(0.4)(value), value)
    assert clip_total_norm([], 1.0) == []
    assert numbers(ClipGradientNorm(1.0)(torch.zeros(3))) == [0, 0, 0]
    assert ClipGradientNorm(1.0)(torch.zeros(0)).shape == (0,)
    for dtype in (torch.float16, torch.bfloat16):
        value = torch.full((100,), 6e4).to(dtype)  # its norm, 6e5, is more than a float16 holds
        assert ClipGradientNorm(1.0)(value).dtype == dtype
        assert ClipGradientNorm(1.0)(value).tolist() == pytest.approx([0.1] * 100, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (ClampGradientSign("positive"), [0, 0, 0.5, 4]),
        (ClampGradientSign(), [0, 0, 0.5, 4]),
        (ClampGradientSign("negative"), [-3, 0, 0, 0]),
        (ScaleGradient(-1), [3, 0, -0.5, -4]),
        (ScaleGradient(0.5), [-1.5, 0, 0.25, 2]),
        (ZeroGradient(), [0, 0, 0, 0]),
    ],
    ids=repr,
)
def test_sign_scale_and_zero_equal_values_computed_by_hand(
    change: Callable[[Tensor], Tensor], expected: list[float]
) -> None:
    assert numbers(change(torch.tensor([-3.0, 0.0, 0.5, 4.0]))) == expected


def test_zero_removes_nan_value_clips_keep_it_and_norm_clips_spread_it() -> None:
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
def test_the_argument_is_not_changed(change: Callable[[Tensor], Tensor]) -> None:
    value = torch.tensor([[1.0, -2.0], [3.0, 4.0]]).T
    changed = change(value)
    assert numbers(value) == [1, 3, -2, 4] and changed is not value
    assert (changed.shape, changed.dtype, changed.stride()) == (value.shape, value.dtype, value.stride())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        *(
            (lambda kind=kind, limit=limit: kind(limit), r"limit .* is not a number above 0")
            for kind in (ClipGradientValue, ClipGradientNorm)
            for limit in (0, -1.0, math.nan)
        ),
        (lambda: ClampGradientSign("up"), "unknown sign 'up'; the signs are positive and negative"),
        (lambda: GradientChanges(clip_norm=0.0), "clip norm 0 is not a number above 0"),
        (lambda: GradientChanges(clip_value=-1.0), "clip value -1"),
        (lambda: GradientChanges(clip_norm=math.nan), "clip norm nan"),
        (lambda: GradientChanges(scale=math.inf), "scale inf is not finite"),
        (lambda: GradientChanges(sign="up"), "unknown sign 'up'"),
        (lambda: GradientChanges(("conv#1",)), "cannot freeze 'conv#1'"),
        (lambda: GradientChanges((",",)), "nothing to freeze"),
    ],
)
def test_invalid_changes_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()


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
def test_changes_at_layers_equal_values_computed_by_hand(
    changes: dict[str, Any], at_input: list[float], first: float, last: float, inplace: bool
) -> None:
    net = chain(inplace)
    if "" in changes:
        changes = {"re:^$": changes[""]}  # the model itself
    with change_gradients(net, changes):
        assert numbers(run(net)) == at_input
    assert numbers(net.first.weight.grad) == [first] and numbers(net.last.weight.grad) == [last]
    assert hooks_on(net) == 0


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
def test_a_layer_that_runs_twice_can_be_changed_as_a_whole_or_by_call(
    changes: dict[str, Any], weight: float, bias: float
) -> None:
    net = Twice()
    with change_gradients(net, changes):
        net(row(1)).sum().backward()
    assert (numbers(net.layer.weight.grad), numbers(net.layer.bias.grad)) == ([weight], [bias])


def test_each_tensor_of_a_container_is_changed_by_itself() -> None:
    parts = Function(lambda x: {"two": 2 * x, "rest": [3 * x, x.argmax()], "same": x})
    net = named(parts=parts, sum=Function(lambda outputs: outputs["two"] + outputs["rest"][0] + 10 * outputs["same"]))
    x = row(1).requires_grad_()
    with change_gradients(net, {"parts": ClipGradientValue(0.5)}):
        net(x).sum().backward()
    assert x.grad is not None and numbers(x.grad) == [0.5 * 2 + 0.5 * 3 + 0.5]


def test_changes_of_parameters_equal_values_computed_by_hand() -> None:
    net = chain()
    with change_gradients(
        net, {"first.weight": ScaleGradient(-1), "last.bias": ZeroGradient(), "last.weight": ClipGradientNorm(7)}
    ):
        assert numbers(run(net)) == [10, 0, -1000]  # the gradient of the input does not change
    assert numbers(net.first.weight.grad) == [1495]
    assert numbers(net.first.bias.grad) == [5 - 500]
    assert numbers(net.last.bias.grad) == [0]
    assert numbers(net.last.weight.grad) == pytest.approx([-7])
    net = chain()
    with change_gradients(net, {"last.bias": ScaleGradient(3)}):
        (gradient,) = torch.autograd.grad(net(X).sum(), net.last.bias)
    assert numbers(gradient) == [9] and net.last.bias.grad is None


def test_frozen_parameters_are_skipped_and_shared_ones_changed_under_either_name() -> None:
    net = chain()
    net.first.requires_grad_(False)
    with change_gradients(
        net, {"first.weight": ScaleGradient(2), "first": ScaleGradient(2), "last.bias": ScaleGradient(2)}
    ):
        run(net)
    assert net.first.weight.grad is None and numbers(net.last.bias.grad) == [2 * -89]
    net = chain()
    net.last.weight = net.first.weight
    for name in ("first.weight", "last.weight"):
        net.zero_grad()
        with change_gradients(net, {name: ZeroGradient()}):
            run(net)
        assert numbers(net.first.weight.grad) == [0]


def test_three_steps_of_training_equal_gradients_clipped_by_hand() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    by_hand, start = copy.deepcopy(net), copy.deepcopy(net)
    data = [(torch.randn(6, 4), torch.randn(6, 2))] * 3

    def clip_by_hand(net: nn.Module) -> None:
        first, *rest = net.parameters()
        first.grad.zero_()
        for parameter in rest:
            nn.utils.clip_grad_norm_([parameter], 0.05)

    changes = {name: ClipGradientNorm(0.05) for name, _ in net.named_parameters()} | {"0.weight": ZeroGradient()}
    with change_gradients(net, changes):
        train(net, sgd(net, 0.5, momentum=0.9), data, nn.functional.mse_loss)
    train(by_hand, sgd(by_hand, 0.5, momentum=0.9), data, nn.functional.mse_loss, before_step=clip_by_hand)
    torch.testing.assert_close(net.state_dict(), by_hand.state_dict(), rtol=1e-6, atol=1e-7)
    assert torch.equal(net[0].weight, start[0].weight) and not torch.equal(net[0].bias, start[0].bias)
    assert hooks_on(net) == 0


@pytest.mark.filterwarnings("ignore:no pass of")  # compiled code of an earlier test
def test_outside_the_block_and_in_a_copy_nothing_is_changed() -> None:
    net = chain()
    with change_gradients(net, {"first": ZeroGradient(), "first.weight": ZeroGradient(), "last": ZeroGradient()}):
        inside = net(X).sum()
    before, net_after = inside, net(X).sum()
    before.backward()  # of a pass inside the block, but itself outside
    assert numbers(net.first.weight.grad) == [5 * (1 + 3)]
    net.zero_grad()
    net_after.backward()
    assert numbers(net.first.weight.grad) == [20]
    with change_gradients(net, {"first": ZeroGradient()}):
        twin = copy.deepcopy(net)
        twin(X).sum().backward()
    assert numbers(twin.first.weight.grad) == [20]


def test_a_block_entered_again_changes_its_own_passes_and_nested_ones_both_act() -> None:
    net = chain()
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
    net = chain()
    with (
        change_gradients(net, {"last": ScaleGradient(2)}),
        change_gradients(net, {"last": ScaleGradient(3), "last.bias": ScaleGradient(10)}),
    ):
        run(net, row(1, 0, 0))
    assert numbers(net.last.bias.grad) == [60]
    assert hooks_on(net) == 0


@pytest.mark.parametrize("where", ["forward", "backward", "block"])
def test_no_hook_stays_after_an_exception(where: str) -> None:
    def fails(gradient: Tensor) -> Tensor:
        raise RuntimeError("as planned")

    net = nn.Sequential(chain(), Fails() if where == "forward" else nn.Identity())
    changes = {"0.first": fails if where == "backward" else ZeroGradient(), "0.last.weight": ZeroGradient()}
    before = ModelSnapshot(net)
    with pytest.raises(RuntimeError, match="as planned"), change_gradients(net, changes):  # noqa: PT012
        loss = net(X).sum()
        if where == "backward":
            torch.autograd.grad(loss, net[0].first.weight)
        raise RuntimeError("as planned")
    assert before.changes() == [] and hooks_on(net) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("frist", "no layer or parameter 'frist'; nearest: first"),
        ("last.weigth", "no layer or parameter 'last.weigth'; nearest: last.weight"),
        ("zebra", "no layer or parameter 'zebra'; "),
    ],
)
def test_unknown_names_are_refused_on_entry(name: str, said: str) -> None:
    net = chain()
    changes = {"first.weight": ZeroGradient(), "last": ZeroGradient(), name: ZeroGradient()}
    with refused(LayerError, said, part="begins"):
        change_gradients(net, changes).__enter__()
    assert hooks_on(net) == 0


def test_a_number_is_an_index_even_if_a_layer_has_that_name() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(LayerError, match=r"no layer of type Conv2d.*'name:1' is the layer of that name"):
        change_gradients(net, {"1": ZeroGradient()}).__enter__()
    with change_gradients(net, {"re:^1$": ZeroGradient()}):
        net(torch.ones(1, 2)).sum().backward()
    assert numbers(net[0].bias.grad) == [0, 0]
    with change_gradients(net, {"0": ScaleGradient(4)}, types=("Linear",)):
        net.zero_grad()
        net(torch.full((1, 2), 9.0)).sum().backward()
    assert set(numbers(net[0].bias.grad)) <= {0, 4}


def test_indices_that_no_pass_reaches_and_invalid_selections_and_models_are_refused() -> None:
    net = chain()
    changes = {"7": ZeroGradient(), "first": ZeroGradient(), "first.bias": ZeroGradient()}
    with pytest.raises(LayerError, match="7"), change_gradients(net, changes):
        net(X).sum().backward()
    assert hooks_on(net) == 0
    with pytest.raises(SelectionError):
        change_gradients(net, {"1:2:3:4": ZeroGradient()}).__enter__()
    net.compile(backend="eager")
    with pytest.raises(ModelError, match="compiled"):
        change_gradients(net, {"first.bias": ZeroGradient(), "first": ZeroGradient()}).__enter__()
    assert hooks_on(net) == 0


@pytest.mark.parametrize(
    ("where", "change", "said"),
    [
        ("relu", lambda gradient: gradient[..., :1], "returns 1x1x1x1; the gradient is 1x1x1x3"),
        ("relu", lambda gradient: 7, "returns int; the gradient is 1x1x1x3"),
        ("last.bias", lambda gradient: 7, "returns int; the gradient is 1"),
    ],
)
def test_the_error_of_a_wrong_gradient_names_the_layer(where: str, change: Callable[[Tensor], Any], said: str) -> None:
    net = chain()
    with refused(UsageError, f"the change of the gradient at '{where}' {said}"), change_gradients(net, {where: change}):
        run(net)
    assert hooks_on(net) == 0


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_output_does_not_change(around: Any) -> None:
    net = chain().train()
    before = ModelSnapshot(net)
    with around(), change_gradients(net, dict.fromkeys(("first", "relu", "last.weight"), ZeroGradient())):
        assert numbers(net(X)) == [11, 1, 31]
    assert before.changes() == []


def test_the_block_does_not_keep_a_pass_alive() -> None:
    net = chain()
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
