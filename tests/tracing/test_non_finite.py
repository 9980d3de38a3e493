"""NaN and Inf planted at every kind of place; the record of the pass says which call is the first that holds it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookscope.errors import InputError, ModelError
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.tracing.events import trace_events
from hookscope.tracing.non_finite import NonFinite, NonFiniteReport, find_non_finite
from tests.nets import Function, WithIdle

NAN, INF = float("nan"), float("inf")
IMAGE = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
Block = Callable[[Tensor], Any]


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * np.float32(NAN))


def net(block: Block) -> nn.Sequential:
    torch.manual_seed(0)
    ends = [nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), Function(block), Function(Tensor.float), *ends)


def found(block: Block, x: Tensor = IMAGE) -> NonFiniteReport:
    return find_non_finite(net(block), x)


def first(model: nn.Module, x: Any = IMAGE) -> NonFinite:
    call = find_non_finite(model, x).first
    assert call is not None
    return call


def written(x: Tensor) -> Tensor:
    x[0, 0, 0] = (x[0, 0, 0] * 0).log()
    return x


PLANTS: dict[str, tuple[Block, str, str, str]] = {
    "division": (lambda x: (x * 0) / (x * 0), "2::div", "NaN", "0 / 0: 64 of 64 divisors are 0"),
    "reflected": (lambda x: 1 / (x * 0), "2::div", "Inf", "division by 0: 64 of 64 divisors are 0"),
    "in place": (lambda x: x.div_(torch.tensor(0.0)), "2::div_", "Inf", "division by 0: 1 of 1 divisor is 0"),
    "square root": (lambda x: (x - 2).sqrt(), "2::sqrt", "NaN", "the square root of a negative number in 64 of 64 "),
    "log": (lambda x: x.sub_(2).log_(), "2::log_", "NaN", "the logarithm of a negative number in 64 of 64 values"),
    "log of 0": (lambda x: (x * 0).log(), "2::log", "Inf", "the logarithm of 0 in 64 of 64 values"),
    "arc": (lambda x: (x + 1).acos(), "2::acos", "NaN", "the arc sine or cosine of a number outside -1 to 1 in 64 "),
    "power": (lambda x: (x - 2) ** 0.5, "2::pow", "NaN", "a fractional power of a negative number in 64 of 64"),
    "deviation": (lambda x: x + x[:1, 0, 0, 0].std(), "2::std", "NaN", "a deviation needs two values or more"),
    "no values": (lambda x: x + x[:, :0].mean(), "2::mean", "NaN", "the mean of no values"),
    "float16": (lambda x: (x * 0 + 101).half() * 1000, "2::mul#1", "Inf", "overflow: the largest float16 is 65,504"),
    "cast": (lambda x: (x * 0 + 1e5).half(), "2::half", "Inf", "its input has values up to 100,000, and the largest"),
    "exponential": (lambda x: (x + 1000).exp(), "2::exp", "Inf", "overflow: the largest float32 is 3.40282e+38"),
    "number": (lambda x: x * NAN, "2::mul", "NaN", "the code gives it the number nan"),
    "part": (written, "2::log", "Inf", "the logarithm of 0 in 4 of 4 values"),
    "dictionary": (lambda x: {"a": (x, [x.rsqrt() / (x - x)])}["a"][1][0], "2::div", "Inf", "divisors are 0"),
    "product": (lambda x: x.addcdiv(x, x * 0), "2::addcdiv", "Inf", "division by 0: 64 of 64 divisors are 0"),
    "pole": (lambda x: (x * 0).lgamma(), "2::lgamma", "Inf", "overflow or a division by 0 inside: the largest float32"),
    "layer norm": (
        lambda x: F.layer_norm(x * 0 + 3, (4, 4), eps=0),
        "2::layer_norm",
        "NaN",
        "0 / 0: eps is 0, and all values are the same in 4 of 4 groups",
    ),
    "group norm": (lambda x: F.group_norm(x * 0, 2, eps=0), "2::group_norm", "NaN", "are the same in 2 of 2 groups"),
    "norm": (lambda x: F.normalize(x * 0, eps=0), "2::normalize", "NaN", "all values are 0 in 16 of 16 groups"),
    "reflected power": (lambda x: 0.0 ** (x - 2), "2::pow", "Inf", "division by 0: a negative power of 0 in 64 of 64"),
    "new tensor": (lambda x: x + x.new_tensor([NAN]), "2::new_tensor", "NaN", "the code writes NaN as a constant"),
    "constant": (lambda x: x + torch.full((1,), NAN), "2::full", "NaN", "the code writes NaN as a constant"),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.filterwarnings("ignore:std():UserWarning")
def test_the_call_that_makes_it_and_why(plant: str) -> None:
    block, key, kind, cause = PLANTS[plant]
    model = net(block)
    report = find_non_finite(model, IMAGE)
    call = report.first
    assert call is not None and (call.call.key, call.kind) == (key, kind)
    assert cause in call.cause and call.place.startswith("test_non_finite.py:")
    calls = trace_events(model, IMAGE, ops=True).calls
    bad = next(record for record in calls if any(part.nonfinite for part in record.output.values()))
    assert (call.call, call.call.order) == (bad.call, bad.call.order)
    assert call.operation == call.call.type
    if "constant" not in cause:
        assert {part.min for part in call.inputs.values()} == {part.min for part in bad.input.values()}
        assert call.nonfinite == sum(part.nonfinite for part in bad.output.values())
    assert report.output == {"": 4} and report.passed_on >= 1


@pytest.mark.parametrize("where", ["weight", "running_var", "input"])
def test_what_brings_it_into_the_pass(where: str) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), IMAGE.clone()
    if where == "weight":
        model[0].weight.data[1, 2, 0, 0] = NAN
    elif where == "running_var":
        model[1].running_var[:2] = -1
    else:
        x[0, 0, 0, :2] = NAN
    call = first(model, x)
    causes = {
        "weight": ("0", "conv2d", "parameter '0.weight' holds 1 NaN"),
        "running_var": ("1", "batch_norm", "running_var + eps is negative in 2 of 4 channels"),
        "input": ("0", "conv2d", "the input holds 2 NaN"),
    }
    key, operation, cause = causes[where]
    assert (call.call.key, call.operation) == (key, operation) and cause in call.cause
    assert set(call.inputs) >= {"0", f"{key}.weight", f"{key}.bias"}
    assert bool(call.source) == (where != "running_var")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_an_input_counts_where_an_operation_swallows_its_nan() -> None:
    x = IMAGE.clone()
    x[0, 0, 0, :2] = NAN
    report = find_non_finite(Function(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize()), x)
    [call] = report.made
    assert (call.call.key, call.cause, report.output) == ("::quantize_per_tensor", "the input holds 2 NaN", {})
    clean = Function(lambda x: torch.zeros_like(x).where(x.isnan(), x))
    assert [call.call.key for call in find_non_finite(clean, x).made] == ["::where"]


def test_a_mask_counts_where_it_becomes_nan_or_reaches_the_output() -> None:
    even = torch.arange(16) % 2 == 0
    sound = found(lambda x: x * x.flatten(2).masked_fill(even, -INF).softmax(-1).view_as(x))
    assert sound.first is None and [call.call.key for call in sound.contained] == ["2::masked_fill"]
    spoiled = found(lambda x: x * x.flatten(2).masked_fill(even >= 0, -INF).softmax(-1).view_as(x))
    assert [(call.call.key, call.deliberate) for call in spoiled.made] == [
        ("2::masked_fill", True),
        ("2::softmax", False),
    ]
    assert spoiled.first is spoiled.made[1] and spoiled.first.cause == "all values are -Inf in 4 of 4 rows"
    reached = find_non_finite(Function(lambda x: x.masked_fill(x > 0.5, INF)), IMAGE)
    assert [call.deliberate for call in reached.made] == [True] and reached.output == {"": int((IMAGE > 0.5).sum())}


def test_an_operation_inside_attention() -> None:
    everywhere, x = torch.ones(3, 3, dtype=torch.bool), torch.rand(1, 3, 4)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = Function(lambda net, x: net.attention(x, x, x, attn_mask=everywhere), attention=attention)
    assert first(model, x).call.key == "attention::softmax"
    assert find_non_finite(model, x).output == {"0": 12, "1": 9}


def test_an_inf_that_becomes_nan_stands_before_it() -> None:
    made = found(lambda x: (x + 1000).exp() - (x + 999).exp()).made
    assert [(call.call.key, call.kind) for call in made] == [("2::exp", "Inf"), ("2::exp#1", "Inf"), ("2::sub", "NaN")]
    assert made[2].cause == "Inf - Inf: its inputs hold 128 Inf"


@pytest.mark.parametrize(("block", "key"), [(Hidden.apply, "2"), (lambda x: Hidden.apply(x).relu(), "2::relu")])
def test_what_no_function_of_torch_makes(block: Block, key: str) -> None:
    call = first(net(block))
    assert (call.call.key, call.cause) == (key, "an operation that torch does not report made 64 NaN")


def test_an_operation_inside_vmap() -> None:
    call = first(net(torch.vmap(lambda x: (x * 0).log())))
    assert (call.call.key, call.cause) == ("2::log", "the logarithm of 0 in 64 of 64 values")


def test_a_sound_pass_says_what_was_looked_at_and_what_did_not_run() -> None:
    model = net(lambda x: x.nan_to_num())
    model.append(nn.Identity())
    model[3] = Function(lambda net, x: x, idle=nn.Linear(1, 1))
    report = find_non_finite(model, IMAGE)
    # the values of the two convolutions, the sigmoid, nan_to_num, the pooling and flatten
    assert (report.made, report.operations, report.values) == ((), 6, 64 + 64 + 64 + 16 + 4 + 4)
    assert (report.layers, report.did_not_run, report.passed_on, report.output) == (9, ("3.idle",), 0, {})
    assert find_non_finite(WithIdle(), torch.ones(1, 3, 2, 2)).did_not_run == ("idle",)


def test_a_model_that_raises_after_the_first_nan() -> None:
    def strict(x: Tensor) -> Tensor:
        if (y := (x - 2).sqrt()).isnan().any():
            raise ValueError("there is NaN\nin it")
        return y

    report = found(strict)
    assert report.first is not None and report.first.operation == "sqrt"
    assert report.error == "ValueError: there is NaN"
    with pytest.raises(InputError, match=r"ZeroDivisionError: .* in <lambda>"):
        found(lambda x: 1 // 0)


def test_nothing_is_said_of_a_model_that_cannot_be_looked_at() -> None:
    with pytest.raises(InputError, match="the output of Function holds no floating-point tensor"):
        find_non_finite(Function(lambda x: x.argmax()), IMAGE)
    with pytest.raises(ModelError, match="compiled"):
        find_non_finite(torch.compile(nn.ReLU()), IMAGE)


@pytest.mark.parametrize("block", [lambda x: x, lambda x: x.div_(0), lambda x: x @ torch.ones(9)])
def test_the_model_and_its_input_do_not_change(block: Block) -> None:
    model, x = net(block).train(), IMAGE.clone()
    state = ModelSnapshot(model)
    with suppress(InputError):
        find_non_finite(model, x)
    assert state.changes() == [] and torch.equal(x, IMAGE)
    assert not torch.overrides._get_current_function_mode_stack()
