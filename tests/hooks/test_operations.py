"""Operations that are not modules: which are observed, in which module, and with which results."""

import copy
import pickle
import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, fx, nn
from torch.overrides import _get_current_function_mode_stack

import hookscope
from hookscope.errors import LayerError
from hookscope.hooks import HookHandles, Observer, Operation, OperationCounter
from hookscope.hooks.operations import class_names, holder_of, is_leaf, is_single, layers_with_weights, types_in
from tests.helpers import hooks_on, seeded
from tests.nets import Fails, Function, PaddedConv, named


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(1)), nn.Linear(2, 2))


def test_facts_about_modules() -> None:
    net = small()
    assert class_names(net[0]) == ["Conv2d", "_ConvNd"] and class_names(nn.Module()) == []
    assert is_leaf(net[0]) and not is_leaf(net) and is_leaf(nn.Sequential())
    childless = nn.Module()
    childless.register_module("absent", None)
    assert is_leaf(childless)
    assert types_in(net) == Counter({"Sequential": 2, "Conv2d": 1, "ReLU": 1, "BatchNorm2d": 1, "Linear": 1})


def test_layers_with_weights_are_those_with_a_matrix_or_filters_whatever_is_in_them() -> None:
    assert layers_with_weights(small()).plain_names == ("0", "2")
    nn.utils.parametrizations.weight_norm((net := small())[2])
    assert layers_with_weights(net).plain_names == ("0", "2")
    assert layers_with_weights(nn.Sequential(nn.ReLU())).plain_names == ("0",)  # every leaf, then
    inside = layers_with_weights(with_own_parameters()).plain_names
    assert inside == ("attention", "attention.out_proj", "normed", "padded")


def with_own_parameters() -> nn.Sequential:
    net = named(
        padded=PaddedConv(3, 4, 3),
        attention=nn.MultiheadAttention(4, 2),
        normed=nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        scaled=nn.Sequential(nn.ReLU()),
    )
    net.scaled.scale = nn.Parameter(torch.ones(4, 1, 1))
    net.token = nn.Parameter(torch.ones(1, 1, 4))
    return net


def test_a_layer_that_holds_parameters_is_a_layer_and_parametrizations_are_part_of_theirs() -> None:
    named_modules = with_own_parameters().named_modules()
    assert [name for name, module in named_modules if is_single(name, module)] == [
        "", "padded", "padded.pad", "attention", "attention.out_proj", "normed", "scaled", "scaled.0"
    ]  # fmt: skip
    names = ["weight", "a.bias", "a.b.parametrizations.weight.original0", "parametrizations.weight.0.base"]
    assert [holder_of(name) for name in names] == ["", "a", "a.b", ""]


@pytest.mark.filterwarnings("ignore")  # torch announces that quantized tensors will be removed
def test_a_quantized_linear_is_one_layer_with_its_packed_weights() -> None:
    net = nn.Sequential(torch.ao.nn.quantized.Linear(3, 2))
    assert [name for name, module in net.named_modules() if is_single(name, module)] == ["0"]


X = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)) - 0.5


def observed(net: nn.Module, x: Any = X, layers: str = "*::*") -> dict[str, tuple[Any, Any]]:
    """What each operation is and returned, by its key."""
    kept: dict[str, tuple[Any, Any]] = {}

    def keep(call: Any, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        kept[call.key] = module, output.clone() if isinstance(output, Tensor) else output

    with torch.no_grad(), Observer(net.eval(), layers, ("all",), keep, ops=True):
        net(x)
    assert hooks_on(net) == 0 and not _get_current_function_mode_stack()
    return kept


def test_operations_are_calls_of_the_module_in_which_they_run() -> None:
    block = Function(lambda net, x: torch.relu(net.conv(x)) + F.gelu(x[:, :1]), conv=nn.Conv2d(3, 4, 1))
    net = Function(lambda net, x: torch.cat([1 - net.block(x), net.block(x)], 1).mean((2, 3)), block=block)
    names = ["block::relu", "block::getitem", "block::gelu", "block::add"]
    second = [f"{name}#1" for name in names]
    assert list(observed(net)) == [*names, "::sub", *second, "::cat", "::mean"]


@pytest.mark.parametrize(
    ("function", "name", "in_place", "hands_on"),
    [
        (lambda x: x + 1, "add", False, False),
        (lambda x: 2 - x, "sub", False, False),
        (lambda x: x.add_(1), "add_", True, False),
        (lambda x: F.relu(x, inplace=True), "relu", True, False),
        (lambda x: torch.relu_(x), "relu_", True, False),
        (lambda x: x @ x, "matmul", False, False),
        (lambda x: x.mT, "mT", False, True),
        (lambda x: x.flatten(1), "flatten", False, True),
        (lambda x: x[0], "getitem", False, True),
        (lambda x: torch.split(x, 1), "split", False, True),
        (lambda x: next(iter(x)), "unbind", False, True),
        (lambda x: F.softmax(x, 1), "softmax", False, False),
        (lambda x: F.interpolate(x, scale_factor=2.0), "interpolate", False, False),
    ],
)
def test_what_an_operation_is(function: Any, name: str, in_place: bool, hands_on: bool) -> None:
    operation, _ = observed(Function(function), X.clone())[f"::{name}"]
    assert isinstance(operation, Operation)
    assert (operation.type, operation.in_place, operation.hands_on) == (name, in_place, hands_on)


def test_what_was_written_later_does_not_change_what_is_seen() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y += 1
        y[:, 0] = 7
        return y.clamp_(0, 1)

    seen = {key: output for key, (_, output) in observed(Function(forward)).items()}
    assert list(seen) == ["::mul", "::add_", "::setitem", "::clamp_"]
    assert torch.equal(seen["::mul"], X * 2)
    assert torch.equal(seen["::add_"], X * 2 + 1)
    assert seen["::setitem"][:, 0].unique().item() == 7
    assert torch.equal(seen["::clamp_"], seen["::setitem"].clamp(0, 1))


def test_the_pass_itself_is_as_without_observation() -> None:
    for name in ("resnet18", "densenet121"):
        net = seeded(lambda name=name: torchvision.models.get_model(name, weights=None))
        x = torch.rand(1, 3, 64, 64)
        outputs: list[Any] = []
        with torch.no_grad(), Observer(net, "all", ("all",), lambda *_: None, ops=True):
            outputs.append(net(x))
        assert torch.equal(net(x), outputs[0])


def judged_by_fx(net: nn.Module) -> Counter[str]:
    """Functions and methods in the graph of torch.fx, whose leaves are torch's own layers."""
    names = [
        node.target if isinstance(node.target, str) else node.target.__name__
        for node in fx.symbolic_trace(net).graph.nodes
        if node.op in ("call_function", "call_method")
    ]
    return Counter(names)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "densenet121", "mobilenet_v3_small"])
def test_the_operations_are_those_in_the_graph_of_fx(name: str) -> None:
    net = seeded(lambda: torchvision.models.get_model(name, weights=None))
    seen = observed(net, torch.rand(1, 3, 64, 64))
    ours = Counter(operation.type.rstrip("_") for operation, _ in seen.values())
    expected = judged_by_fx(net)
    assert ours == Counter({key.lstrip("i") if key == "iadd" else key: count for key, count in expected.items()})


def test_attention_is_seen_inside() -> None:
    net = seeded(lambda: nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.rand(2, 5, 8)
    types = Counter(op.type for op, _ in observed(Function(lambda net, x: net.a(x, x, x)[0], a=net), x).values())
    assert (types["linear"], types["softmax"], types["bmm"] + types["baddbmm"]) == (2, 1, 2)
    fast = observed(Function(lambda net, x: net.a(x, x, x, need_weights=False)[0], a=net), x)
    assert "a::scaled_dot_product_attention" in fast and "a::linear#1" in fast


def plain(name: str) -> str:
    """The name of a function without its marks of being special, reflected or in place."""
    special = re.fullmatch(r"__(\w+?)__", name)
    return re.sub(r"^[ri](?=add|sub|mul|truediv)", "", special[1] if special else name).strip("_")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "densenet121", "shufflenet_v2_x0_5", "convnext_tiny"])
def test_torchlens_sees_the_same(name: str) -> None:
    torchlens = pytest.importorskip("torchlens")
    net, x = seeded(lambda: torchvision.models.get_model(name, weights=None)), torch.rand(1, 3, 64, 64)
    ours = Counter(plain(operation.type) for operation, _ in observed(net, x).values())
    with torch.no_grad():
        logged = {op.func_call_id: op for op in torchlens.trace(net, x).compute_ops}
    modules = dict(net.named_modules())
    theirs = Counter(
        plain(op.func_name)
        for op in logged.values()
        if not (op.modules and type(modules[str(op.modules[-1]).split(":")[0]]).__module__.startswith("torch.nn"))
    )
    theirs.pop("identity", None)  # its name for a module that returns its input
    assert ours == theirs


def test_operations_are_selected_by_name() -> None:
    net = Function(lambda x: torch.relu(x).add(1).relu().mul(2))
    assert list(observed(net, layers="::relu")) == ["::relu", "::relu#1"]
    assert list(observed(net, layers="::relu#1,*::m*")) == ["::relu#1", "::mul"]
    assert list(observed(net, layers="1:3")) == ["::add", "::relu#1"]
    with pytest.raises(LayerError, match=r"no operation '::rela' ran; nearest: ::relu"):
        observed(net, layers="::rela")
    with pytest.raises(LayerError, match=r"names an operation; record it with trace_events\(…, ops=True"):
        Observer(net, "::relu", ("all",), lambda *_: None).__enter__()


def test_all_is_put_back_after_an_exception() -> None:
    net = nn.Sequential(Function(lambda x: x + 1), Fails())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="as planned"):
            observed(net)
        assert not _get_current_function_mode_stack() and hooks_on(net) == 0


def test_a_caught_exception_books_what_follows_to_the_right_module() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        try:
            net.fails(x)
        except RuntimeError:
            x = x + 1
        return x

    assert list(observed(Function(forward, fails=Fails()))) == ["::add"]


def test_copies_made_while_operations_are_observed_do_nothing() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    seen: list[str] = []
    with Observer(net, "*::*", ("all",), lambda call, *_: seen.append(call.key), ops=True):
        twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    for twin in twins:
        twin(X)
    assert seen == []


def test_the_counter_counts_what_is_computed_outside_of_layers() -> None:
    net = Function(lambda net, x: torch.relu(net.conv(x)).flatten(1) + 1, conv=nn.Conv2d(3, 4, 1))
    counter = OperationCounter(net)
    with HookHandles() as handles, torch.no_grad():
        counter.modules.watch(handles)
        net(X)
        counter.paused(net, X)
    assert counter.counts == {"relu": 1, "add": 1}


def test_rows_and_events_of_operations() -> None:
    net = seeded(lambda: Function(lambda net, x: net.conv(x).relu_().mul(2).sum(), conv=nn.Conv2d(3, 4, 1)))
    rows = hookscope.list_layers(net, inputs=(X,), types=("all",), ops=True)
    record = hookscope.trace_events(net, X, ops=True, backward=True)
    names = ["conv", "::relu_", "::mul", "::sum"]
    assert [row.name for row in rows] == [call.call.name for call in record.calls] == names
    assert [row.index for row in rows] == [call.call.order for call in record.calls] == [0, 1, 2, 3]
    assert [call.call.index for call in record.calls] == [0, None, None, None]
    assert [row.output_shape for row in rows] == [call.output[""].shape for call in record.calls]
    assert rows[0].note == "overwritten by ::relu_"
    assert record.calls[0].output[""].min < 0 <= record.calls[1].output[""].min
    assert [call.gradient[""].max for call in record.calls[1:3]] != [None, None]
    assert [row.name for row in hookscope.list_layers(net, inputs=(X,), types=("all",))] == ["conv"]


def test_macs_of_operations_are_those_of_the_block_without_them() -> None:
    net = Function(
        lambda net, x: net.block(x), block=Function(lambda net, x: F.linear(x, net.w.weight), w=nn.Linear(6, 5))
    )
    with_ops = hookscope.list_layers(net, inputs=(X,), types=("all",), ops=True)
    without = hookscope.list_layers(net, inputs=(X,), types=("all",))
    assert [(row.name, row.macs) for row in with_ops if row.macs] == [("block::linear", 2 * 3 * 6 * 6 * 5)]
    assert [(row.name, row.macs) for row in without if row.macs] == [("block", 2 * 3 * 6 * 6 * 5)]
