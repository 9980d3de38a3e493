"""What hooks saw, against numbers from paper, against hooks put on by hand, and against autograd."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookscope.errors import InputError, LayerError, ModelError, TargetError, UsageError
from hookscope.hooks.calls import call_key
from hookscope.hooks.model_state import ModelSnapshot
from hookscope.models.load import load_model
from hookscope.scores.objective import Loss
from hookscope.tracing.events import EVENTS, PassRecord, TensorSummary, facts_of, trace_events
from hookscope.tracing.summary import list_layers
from hookscope.verification.paired_passes import noise_pictures
from tests.helpers import not_in_place, small_head
from tests.nets import Function, X, chain


def facts(tensor: Tensor, most: int = 0) -> TensorSummary:
    return facts_of(tensor, most)[""]


@pytest.mark.parametrize(
    ("tensor", "dtype", "least", "most"),
    [
        (torch.tensor([1.5, -2.0]), "float32", -2.0, 1.5),
        (torch.tensor([1.5, -2.0], dtype=torch.float64), "float64", -2.0, 1.5),
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "bfloat16", -2.0, 1.5),
        (torch.tensor([1.5, -2.0], dtype=torch.float16), "float16", -2.0, 1.5),
        (torch.tensor([1.5, -2.0]).to(torch.float8_e5m2), "float8_e5m2", -2.0, 1.5),
        (torch.tensor([3, 2**62]), "int64", 3, 2**62),
        (torch.tensor([3, 7], dtype=torch.uint16), "uint16", 3, 7),
        (torch.tensor([True, False]), "bool", 0, 1),
        (torch.tensor([[0.0, 2.0]]).to_sparse(), "float32", 0.0, 2.0),
        (torch.tensor([5.0]).expand(3, 4), "float32", 5.0, 5.0),
        (torch.tensor([1.0, 2.0], requires_grad=True), "float32", 1.0, 2.0),
    ],
    ids=str,
)
def test_the_range_of_every_type(tensor: Tensor, dtype: str, least: float, most: float) -> None:
    assert facts(tensor) == TensorSummary(tuple(tensor.shape), dtype, least, most, 0)


@pytest.mark.parametrize(
    ("values", "least", "most", "nonfinite"),
    [
        ([math.nan, 2.0, -1.0], -1.0, 2.0, 1),
        ([math.inf, 2.0, -math.inf, math.nan], 2.0, 2.0, 3),
        ([math.nan], None, None, 1),
        ([], None, None, 0),
    ],
)
def test_values_that_are_not_finite_are_counted_and_are_no_extremes(
    values: list[float], least: float | None, most: float | None, nonfinite: int
) -> None:
    summary = facts(torch.tensor(values))
    assert (summary.min, summary.max, summary.nonfinite) == (least, most, nonfinite)


def test_complex_values_have_no_range_and_the_meta_device_no_values() -> None:
    tensor = torch.tensor([1 + 2j, complex(math.nan, 0)]).conj()
    assert facts(tensor[:1], 1) == TensorSummary((1,), "complex64", None, None, 0, [[1.0, -2.0]])
    assert facts(tensor).nonfinite == 1
    assert facts(torch.empty(2, 3, device="meta"), 100) == TensorSummary((2, 3), "float32", None, None, 0)


@pytest.mark.parametrize(
    ("tensor", "most", "values"),
    [
        (torch.arange(4).reshape(2, 2), 4, [[0, 1], [2, 3]]),
        (torch.arange(4).reshape(2, 2), 3, None),
        (torch.arange(4), 0, None),
        (torch.tensor(7.5), 1, 7.5),
        (torch.tensor(7.5), 0, None),
        (torch.empty(0, 4), 1, []),
        (torch.tensor([True]), 1, [True]),
        (torch.tensor([0.1]), 1, [0.10000000149011612]),
    ],
)
def test_summaries_hold_the_values_of_small_tensors(tensor: Tensor, most: int, values: Any) -> None:
    assert facts(tensor, most).values == values


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_decoded() -> None:
    tensor = torch.quantize_per_tensor(torch.tensor([-1.0, 0.6]), 0.5, 10, torch.quint8)
    assert facts(tensor, 2) == TensorSummary((2,), "quint8", -1.0, 0.5, 0, [-1.0, 0.5])


def test_containers_are_summed_up_by_part_without_holding_the_tensors() -> None:
    summary = facts_of({"out": torch.zeros(1, 2), "more": [torch.ones(3), None]})
    assert {part: one.shape for part, one in summary.items()} == {"out": (1, 2), "more.0": (3,)}
    assert facts_of((None, "word")) == {}
    tensor = torch.tensor([1.0, 2.0])
    summary = facts(tensor, 2)
    tensor.zero_()
    assert (summary.max, summary.values) == (2.0, [1.0, 2.0])


def flat(facts: Any) -> list[float]:
    return torch.tensor(facts[""].values).flatten().tolist()


def events_of(record: PassRecord) -> list[tuple[str, str]]:
    return [(event.event, event.call.key) for event in record.events]


def test_weights_of_ones_give_the_numbers_from_paper() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 2, bias=False), nn.Flatten(), nn.Linear(4, 2, bias=False))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    picture = torch.arange(1.0, 10.0).reshape(1, 1, 3, 3)
    record = trace_events(net, picture, backward=True, loss=lambda output: output.sum(), values=9)
    first, flatten, linear = record.calls
    assert first.input[""].values == [[[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]]
    assert first.output[""].values == [[[[1 + 2 + 4 + 5, 2 + 3 + 5 + 6], [4 + 5 + 7 + 8, 5 + 6 + 8 + 9]]]]
    assert flatten.output[""].values == linear.input[""].values == [[12, 16, 24, 28]]
    assert linear.output[""].values == [[80, 80]]
    assert (linear.output[""].min, linear.output[""].shape, record.value) == (80, (1, 2), 160)
    assert linear.gradient[""].values == [[1, 1]]
    assert flatten.gradient[""].values == [[2, 2, 2, 2]]
    assert first.gradient[""].values == [[[[2, 2], [2, 2]]]]


@pytest.mark.parametrize("inplace", [False, True])
def test_inputs_and_outputs_of_in_place_layers(inplace: bool) -> None:
    def loss(output: Tensor) -> Tensor:
        return (output * torch.tensor([1.0, 10.0])).sum()

    given = X.clone()
    record = trace_events(chain(inplace=inplace), given, backward=True, loss=loss, values=2)
    assert [flat(call.input) for call in record.calls] == [[1, -2], [2, -4], [2, 0], [-5, 1], [0, 1]]
    assert [flat(call.output) for call in record.calls] == [[2, -4], [2, 0], [-5, 1], [0, 1], [3, 8]]
    # (1, 10) at the end, times 5, through a ReLU open on the right, times -3, through one open on the left
    assert [flat(call.gradient) for call in record.calls] == [[0, 0], [0, -150], [0, 50], [5, 50], [1, 10]]
    assert record.value == 3 + 80
    assert torch.equal(given, X)


@pytest.mark.parametrize("backward", [False, True])
def test_the_input_of_a_first_layer_that_works_in_place(backward: bool) -> None:
    given = torch.tensor([[-1.0, 2.0]])
    record = trace_events(nn.ReLU(inplace=True), given, types=("*",), backward=backward, values=2)
    assert [(flat(call.input), flat(call.output)) for call in record.calls] == [([-1, 2], [0, 2])]
    assert given.tolist() == [[-1, 2]]


def residual() -> nn.Module:
    """A container, a layer that runs twice, a branch; nothing in place."""

    def block(net: Any, x: Tensor) -> Tensor:
        y = net.relu(net.bn(net.conv(x)))
        return net.relu(y + net.side(x))

    def make(width: int) -> nn.Module:
        inner = {"conv": nn.Conv2d(width, 4, 3, padding=1), "bn": nn.BatchNorm2d(4), "relu": nn.ReLU()}
        return Function(block, **inner, side=nn.Sequential(nn.Conv2d(width, 4, 1), nn.Tanh()))

    return nn.Sequential(make(3), make(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()


def by_hand(net: nn.Module, x: Tensor) -> list[tuple[str, str]]:
    """The same events from torch's own hooks; the last call of a layer comes first in backward."""
    events: list[tuple[str, str]] = []
    calls: Counter[tuple[str, str]] = Counter()

    def hook(event: str, name: str) -> Any:
        def note(*_: Any) -> None:
            calls[event, name] += 1
            number = calls["forward", name] - calls[event, name] if event == "backward" else calls[event, name] - 1
            events.append((event, call_key(name, number)))

        return note

    for name, module in net.named_modules():
        module.register_forward_pre_hook(hook("pre-hook", name))
        module.register_forward_hook(hook("forward", name))
        module.register_full_backward_pre_hook(hook("backward", name))
    net(x).max().backward()
    return events


@pytest.mark.parametrize("make", [residual, lambda: not_in_place(small_head("squeezenet1_1"))])
def test_the_order_is_that_of_hooks_put_on_by_hand(make: Callable[[], nn.Module]) -> None:
    net, x = make(), torch.randn(1, 3, 32, 32)
    record = trace_events(net, x, types=("*",), backward=True)
    assert events_of(record) == by_hand(copy.deepcopy(net), x)
    assert [event.number for event in record.events] == list(range(3 * len(record.calls)))
    assert {event.event for event in record.events} == set(EVENTS)


def test_depth_counts_the_chosen_calls_around() -> None:
    net, x = residual(), torch.randn(1, 3, 8, 8)
    every = trace_events(net, x, types=("*",))
    assert {s.call.key: s.depth for s in every.calls if s.call.name in ("", "0", "0.side", "0.side.1", "4")} == {
        "": 0, "0": 1, "0.side": 2, "0.side.1": 3, "4": 1,
    }  # fmt: skip
    assert {s.depth for s in trace_events(net, x).calls} == {0}  # leaves run in no other leaf
    some = trace_events(net, x, ["0.side", "0.side.1", "re:^4$"])
    assert {s.call.key: s.depth for s in some.calls} == {"0.side.1": 1, "0.side": 0, "4": 0}
    assert events_of(some) == [
        ("pre-hook", "0.side"), ("pre-hook", "0.side.1"), ("forward", "0.side.1"), ("forward", "0.side"),
        ("pre-hook", "4"), ("forward", "4"),
    ]  # fmt: skip


def test_a_call_that_raised_and_was_caught_is_no_call() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError

    def tries(net: Any, x: Tensor) -> Tensor:
        try:
            return net.bad(x)
        except ValueError:
            return net.good(x)

    net = Function(tries, bad=nn.Sequential(nn.Identity(), Function(fails)), good=nn.Identity())
    record = trace_events(net, torch.ones(1, 2), types=("*",))
    assert [(s.call.key, s.depth) for s in record.calls] == [("bad.0", 1), ("good", 1), ("", 0)]
    assert record.did_not_run == ("bad", "bad.1")


def test_events_end_with_forward_where_no_backward_pass_was_asked_for() -> None:
    record = trace_events(chain(), X)
    assert events_of(record)[:2] == [("pre-hook", "0"), ("forward", "0")]
    assert len(record.events) == 10
    assert (record.loss, record.value, record.targets, record.without_backward) == ("", None, (), "")


def test_gradients_equal_those_of_autograd() -> None:
    net, x = small_head("squeezenet1_1"), torch.randn(1, 3, 64, 64)
    record = trace_events(net, x, backward=True, loss=Loss("score", "3"))
    plain, kept = not_in_place(copy.deepcopy(net)), []
    for module in plain.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda module, args, output: kept.append(output))
    gradients = torch.autograd.grad(plain(x)[0, 3], kept)
    assert len(kept) == len(record.calls) > 50
    for call, output, gradient in zip(record.calls, kept, gradients, strict=True):
        assert (call.output[""].min, call.output[""].max) == tuple(map(float, output.detach().aminmax()))
        assert call.gradient[""].shape == tuple(gradient.shape)
        assert call.gradient[""].min == pytest.approx(float(gradient.min()), rel=1e-5, abs=1e-9)
        assert call.gradient[""].max == pytest.approx(float(gradient.max()), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5"])
def test_calls_and_shapes_are_those_of_list_layers(name: str) -> None:
    net = getattr(torchvision.models, name)(num_classes=4)
    rows = [row for row in list_layers(net, (64, 64), types=("all",)) if row.index is not None]
    record = trace_events(net, torch.randn(1, 3, 64, 64), backward=True)
    assert [(s.call.order, s.call.name, s.call.call) for s in record.calls] == [(r.index, r.name, r.call) for r in rows]
    convolutions = [(row.index, row.name) for row in list_layers(net, (64, 64))]
    assert [(s.call.index, s.call.name) for s in record.calls if s.call.index is not None] == convolutions
    assert [s.input[""].shape for s in record.calls] == [r.input_shape for r in rows]
    assert [s.output[""].shape for s in record.calls] == [r.output_shape for r in rows]
    assert not record.unreached


def test_indices_count_within_the_types_and_from_the_end() -> None:
    record = trace_events(chain(), X, "-1", ("Conv2d",), backward=True)
    assert events_of(record) == [("pre-hook", "4"), ("forward", "4"), ("backward", "4")]
    assert trace_events(chain(), X, "0:2", ("ReLU",)).calls[1].call.key == "3"
    with pytest.raises(LayerError, match="no layer 'nope'"):
        trace_events(chain(), X, "nope")


def test_chosen_layers_that_did_not_run_are_listed() -> None:
    net = Function(lambda net, x: net.used[0](x), used=nn.ModuleList([nn.Identity()]), idle=nn.Tanh(), more=nn.ReLU())
    assert trace_events(net, X).did_not_run == ("idle", "more")
    assert trace_events(net, X, types=("*",)).did_not_run == ("idle", "more")
    assert trace_events(net, X, "idle,used.0").did_not_run == ("idle",)
    assert trace_events(net, X, 0, ("all",)).did_not_run == ()


def test_parts_of_containers_and_keywords() -> None:
    def inner(x: Tensor, scale: Tensor, flag: bool = False, extra: Any = None) -> dict[str, Any]:
        return {"out": x * scale, "rest": (x + 1, "word", extra["mask"])}

    def outer(net: Any, x: Tensor) -> Tensor:
        outputs = net.inner(x, scale=torch.tensor(2.0), flag=True, extra={"mask": torch.tensor([True, False])})
        return net.only(x=outputs["out"])

    net = Function(outer, inner=Function(inner), only=Function(lambda x: x * 3))
    record = trace_events(net, X, backward=True, loss=lambda output: output.sum(), values=2)
    first, second = record.calls
    assert list(first.input) == ["0", "scale", "extra.mask"]
    assert (first.input["scale"].values, first.input["extra.mask"].dtype) == (2.0, "bool")
    assert list(first.output) == ["out", "rest.0", "rest.2"]
    assert first.output["rest.0"].values == [[[[2, -1]]]]
    assert list(second.input) == [""]  # one tensor, however it was given
    assert {part: fact.values for part, fact in first.gradient.items()} == {"out": [[[[3, 3]]]]}
    assert events_of(record)[-2:] == [("backward", "only"), ("backward", "inner")]
    net = nn.Sequential(Function(lambda x: [x * 2] * 2), Function(lambda pair: pair[0] * 3 + pair[1] * 5))
    record = trace_events(net, X, "name:0", backward=True, loss=lambda output: output.sum(), values=2)
    assert {part: fact.values for part, fact in record.calls[0].gradient.items()} == {"0": [[[[8, 8]]]]}


def test_the_backward_event_of_several_parts_is_when_the_last_has_come() -> None:
    def outer(net: Any, x: Tensor) -> Tensor:
        early, late = net.split(x)
        return net.b(net.a(early) + late)

    net = Function(
        outer, split=Function(lambda x: (x * 2, x * 3)), a=Function(lambda x: x * 5), b=Function(lambda x: x * 7)
    )
    record = trace_events(net, X, backward=True, loss=lambda output: output.sum(), values=2)
    assert [fact.values for fact in record.calls[0].gradient.values()] == [[[[[35, 35]]]], [[[[7, 7]]]]]
    assert [key for event, key in events_of(record) if event == "backward"] == ["b", "a", "split"]


def test_calls_that_no_gradient_reaches_have_no_backward_event() -> None:
    def second_unused(net: Any, x: Tensor) -> Tensor:
        return net.last(net.chunks(x)[0]) + net.cut(x).detach().sum() + net.whole(x.long()).sum()

    chunks, whole = Function(lambda x: x.chunk(2, -1)), Function(lambda x: x + 1)
    net = Function(second_unused, chunks=chunks, cut=nn.Tanh(), whole=whole, last=nn.Identity())
    record = trace_events(net, X, backward=True, loss=lambda output: output.sum())
    assert [call.key for call in record.unreached] == ["cut", "whole"]
    split = next(call for call in record.calls if call.call.key == "chunks")
    assert list(split.gradient) == ["0"]
    assert ("backward", "whole") not in events_of(record)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_layers() -> None:
    def quantize(x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x.detach(), 0.5, 8, torch.quint8)

    net = nn.Sequential(Function(quantize), nn.ReLU(), Function(lambda x: x.dequantize().flatten(1)))
    record = trace_events(net, X, backward=True, values=2)
    assert [call.output[""].dtype for call in record.calls] == ["quint8", "quint8", "float32"]
    assert [flat(call.output) for call in record.calls] == [[1, -2], [1, 0], [1, 0]]
    assert record.without_backward == "the output of Sequential has no gradient"
    assert len(record.unreached) == 3


def test_the_loss_is_the_best_score_or_the_mean_square_without_classes() -> None:
    scores = trace_events(nn.Flatten(), X, backward=True)
    assert (scores.loss, scores.value, [answer.index for answer in scores.targets]) == ("score", 1.0, [0])
    square = trace_events(nn.ReLU(), -X, backward=True, values=2)
    assert (square.loss, square.value, square.targets) == ("mse", 2.0, ())
    assert flat(square.calls[0].gradient) == [0, 2]  # the derivative of (0² + 2²) / 2
    chosen = trace_events(nn.Flatten(), X, backward=True, loss=Loss("score", "1"), values=2)
    assert (chosen.value, flat(chosen.calls[0].gradient)) == (-2.0, [0, 1])


def test_an_output_without_numbers_or_gradient_leaves_the_forward_events() -> None:
    nothing = trace_events(Function(lambda x: {"boxes": torch.zeros(0, 4)}), X, types=("*",), backward=True)
    assert nothing.without_backward == "Function returned no numbers: there is nothing to differentiate"
    assert events_of(nothing) == [("pre-hook", ""), ("forward", "")]
    several = trace_events(nn.Flatten(), torch.cat([X, X]), backward=True)
    assert (several.loss, several.value, several.without_backward) == ("mse", 2.5, "")
    blind = trace_events(nn.Sequential(nn.Tanh(), Function(lambda x: x.detach())), X, backward=True)
    assert (blind.loss, len(blind.unreached)) == ("mse", 2)
    assert blind.without_backward == "the output of Sequential has no gradient"


def test_a_loss_that_does_not_fit_the_output_is_refused() -> None:
    with pytest.raises(ModelError, match="no score for each class"):
        trace_events(nn.ReLU(), X, backward=True, loss=Loss("score"))
    with pytest.raises(TargetError):
        trace_events(nn.Flatten(), X, backward=True, loss=Loss("score", "7"))
    with pytest.raises(UsageError, match="no loss"):
        trace_events(nn.ReLU(), X, backward=True, loss="nope")


def test_checkpoints_are_passed_and_reentrant_ones_refused() -> None:
    def through(reentrant: bool) -> nn.Module:
        return Function(lambda net, x: net.last(checkpoint(net.inner, x, use_reentrant=reentrant)),
            inner=nn.Sequential(nn.Conv2d(1, 1, 1), nn.Tanh()), last=nn.Flatten())  # fmt: skip

    record = trace_events(through(False), X, backward=True)
    assert events_of(record)[-3:] == [("backward", "last"), ("backward", "inner.1"), ("backward", "inner.0")]
    assert len(record.events) == 9
    with pytest.raises(ModelError, match="reentrant"):
        trace_events(through(True), X, backward=True)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_model_changes(backward: bool, fails: bool) -> None:
    def restless(net: Any, x: Tensor) -> Tensor:
        net.passes += torch.rand(1) + 1
        x = net.relu(net.bn(net.conv(x)))
        if fails:
            raise ValueError("in the middle")
        return net.drop(x).flatten(1)

    layers = {"conv": nn.Conv2d(1, 2, 1), "bn": nn.BatchNorm2d(2).eval(), "relu": nn.ReLU(inplace=True)}
    net = Function(restless, **layers, drop=nn.Dropout())
    net.register_buffer("passes", torch.zeros(1))
    net.conv.weight.grad = torch.ones_like(net.conv.weight)
    net.conv.bias.requires_grad_(False)
    net.conv.register_forward_hook(lambda *_: None)
    state = ModelSnapshot(net)
    with pytest.raises(InputError, match="ValueError: in the middle") if fails else nullcontext():
        assert len(trace_events(net, X, types=("*",), backward=backward).calls) == 5
    assert state.changes() == []


def test_nothing_is_left_when_another_hook_raises_in_backward() -> None:
    def refuse(gradient: Tensor) -> None:
        raise ValueError("in backward")

    def outer(net: Any, x: Tensor) -> Tensor:
        y = net.a(x) * 1
        y.register_hook(refuse)
        return net.b(y)

    net = Function(outer, a=nn.Conv2d(1, 1, 1), b=nn.Tanh())
    state = ModelSnapshot(net)
    with pytest.raises(ValueError, match="in backward"):
        trace_events(net, X, backward=True)
    assert state.changes() == []


def test_frozen_models_have_gradients_too_and_inputs_may_be_a_tuple() -> None:
    assert not trace_events(chain().requires_grad_(False), X, backward=True).unreached
    net = Function(lambda net, x, y: net.last(x + y), last=nn.Flatten())
    assert flat(trace_events(net, (X, X), values=2).calls[0].output) == [2, -4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["vgg11", "googlenet", "densenet121", "vit_b_16", "swin_t", "raft_small", "r3d_18", "fcn_resnet50",
     "maskrcnn_resnet50_fpn"],
)  # fmt: skip
def test_real_models_are_as_before_and_every_event_has_its_place(name: str) -> None:
    net = load_model(name, weights="none", device="cpu")
    state = ModelSnapshot(net.model)
    record = trace_events(net.model, net.inputs(*noise_pictures(net)), types=("*",), backward=True)
    assert state.changes() == []
    assert len(record.events) == 3 * len(record.calls) - len(record.unreached)
    assert {call.name.split(".")[0] for call in record.unreached} <= {"rpn"}  # boxes are detached there
    assert record.events[0].event == "pre-hook" and record.calls[-1].call.name == ""
    open_calls: list[str] = []
    for event in record.events:
        if event.event == "pre-hook":
            assert event.depth == len(open_calls)
            open_calls.append(event.call.key)
        elif event.event == "forward":
            assert open_calls.pop() == event.call.key
