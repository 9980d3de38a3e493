"""A kept activation is what the layer returned, and the model is as before: on nets that have one oddity each."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import LayerError
from hookscope.hooks.model_state import ModelSnapshot, same_bits
from hookscope.hooks.tensors import map_tensors, tensors_in
from tests.helpers import hooked, hooks_on, numbers, small_head
from tests.hooks.nets import KINDS, MODES, ZOO, Pyramid, built, captured, containers, kinds, overwrites
from tests.nets import Function, X, chain, conv, row


def test_values_are_those_from_paper_by_key_and_by_index() -> None:
    net = chain(1)
    with torch.no_grad(), hookscope.capture(net) as activations:
        assert numbers(net(X)) == [3, 4]
    assert list(activations) == ["0", "2", "4"] and len(activations) == 3
    assert [numbers(kept) for kept in activations.values()] == [[2, -4], [-5, 1], [3, 4]]
    assert numbers(activations[1]) == numbers(activations["2"]) == numbers(activations[-2]) == [-5, 1]
    assert [(call.key, call.type, call.index) for call in activations.calls] == [
        ("0", "Conv2d", 0), ("2", "Conv2d", 1), ("4", "Conv2d", 2)
    ]  # fmt: skip
    assert activations.complete and activations.did_not_run == () and len(activations.inputs) == 0
    assert hooks_on(net) == 0
    for key in (None, 1.0, slice(0, 2)):
        assert key not in activations
        with pytest.raises(TypeError):
            activations[key]
    assert activations[torch.tensor(1)] is activations[1]


def test_calls_of_a_layer_that_runs_again_and_layers_that_do_not_run() -> None:
    activations = captured(Pyramid(), layers="all", x=row(1))
    assert list(activations) == ["stem", "head.conv", "stem#1", "head.conv#1", "stem#2", "head.conv#2"]
    assert numbers(activations["head.conv#1"]) == numbers(activations[3]) == [20]
    assert numbers(activations["head.conv#0"]) == numbers(activations["head.conv"]) == [10]
    assert numbers(activations["twin#2"]) == [1] and "twin" in activations
    assert activations.did_not_run == ("idle",)


@pytest.mark.parametrize(("layers", "keys"), [("twin#1", ["stem#1"]), ("-1,twin#0", ["stem", "head.conv#2"])])
@pytest.mark.parametrize("stop", [False, True])
def test_single_calls_by_another_name_of_the_layer(layers: str, keys: list[str], stop: bool) -> None:
    activations = captured(Pyramid(), layers, stop=stop, x=row(1))
    assert list(activations) == keys


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (7, r"nothing kept at index 7; kept: 6 calls \(indices 0 to 5\): stem, head.conv, stem#1"),
        (-7, "nothing kept at index -7"),
        ("head.conv#3", r"nothing kept of 'head.conv#3'; nearest: head.conv#"),
        ("idle", "nothing kept of 'idle'"),
        ("zzzzzzzzz", r"nothing kept of 'zzzzzzzzz'; kept: 6 calls"),
    ],
)
def test_an_unknown_key_is_an_error_that_lists_what_is_kept(key: Any, says: str) -> None:
    activations = captured(Pyramid(), x=row(1))
    with pytest.raises(LookupError, match=says) as caught:
        activations[key]
    assert isinstance(caught.value, LayerError)
    assert key not in activations and activations.get(key, "absent") == "absent"


def test_a_call_is_a_key() -> None:
    activations = captured(Pyramid(), x=row(1))
    assert all(activations[call] is activations[call.key] for call in activations.calls)
    assert activations[activations.calls[2]] is activations["stem#1"]


@pytest.mark.filterwarnings("ignore:no pass of")  # another test may have compiled something
def test_without_a_pass_no_index_is_checked_and_nothing_is_kept() -> None:
    with hookscope.capture(chain(1), 99) as activations:
        pass
    assert len(activations) == 0 and not activations.complete
    with pytest.raises(LayerError, match="no forward pass reached a wanted layer"):
        activations[0]


def test_names_with_a_number_sign_are_still_keys() -> None:
    net = nn.Sequential()
    net.add_module("a#0", conv(2))
    net.add_module("a", conv(3))
    activations = captured(net, x=row(1))
    assert [numbers(activations[key]) for key in activations] == [[2], [6]]


@pytest.mark.parametrize(
    ("layers", "keys"),
    [(-1, ["4"]), ("-2:", ["2", "4"]), (":-1", ["0", "2"]), ("-3:-1", ["0", "2"]), ("0,-1", ["0", "4"]),
     ("::-2", ["0", "4"]), ("-1,1", ["2", "4"])],
)  # fmt: skip
def test_indices_from_the_end_also_within_the_block_and_after_a_second_pass(layers: Any, keys: list[str]) -> None:
    net = chain(1)
    with torch.no_grad(), hookscope.capture(net, layers, inputs=True) as activations:
        for x in (X, row(5, 7)):
            net(x)
            assert list(activations) == list(activations.inputs) == keys
            assert torch.equal(activations[int(keys[-1]) // 2], activations[keys[-1]])
    assert list(activations) == keys


def test_while_the_end_is_unknown_only_the_latest_calls_are_held_and_an_index_is_the_same_outside() -> None:
    net, held = nn.Sequential(*(conv(1) for _ in range(6))), []
    with torch.no_grad(), hookscope.capture(net, "-2:") as activations:
        net[5].register_forward_hook(lambda *call: held.append(list(activations)))
        net(X)
    assert held == [["4", "5"]]
    net = chain(1)
    with torch.no_grad(), hookscope.capture(net, "0:2") as activations:
        net(X)
        assert -1 not in activations and numbers(activations[-2]) == [-5, 1]
    assert -1 not in activations and numbers(activations[-2]) == [-5, 1]


def same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and same_bits(value, other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_what_is_kept_is_what_every_module_returned(name: str, mode: str) -> None:
    model, inputs = built(name)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    expected: list[Any] = []  # the slow reference: a copy of what each module returns, at once

    def copied(name: str, output: Any) -> None:
        expected.append(map_tensors(output, lambda tensor: tensor.detach().clone()))

    with MODES[mode](), hooked(twin, copied):
        plain = twin(**inputs)
    torch.manual_seed(1)
    with MODES[mode](), hookscope.capture(model, "*", types=("all",)) as activations:
        watched = model(**inputs)
    assert len(activations) == len(expected) > 0
    assert all(same(kept, output) for kept, output in zip(activations.values(), expected, strict=True))
    assert same(watched, plain)
    assert hooks_on(model) == 0


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda t: t.mul_(0),
    "view": lambda t: t[..., :1].mul_(0),
    "data": lambda t: t.data.mul_(0),
    "out": lambda t: torch.mul(t.detach(), 0, out=t.detach()),
    "numpy": lambda t: t.detach().numpy().fill(0),
    "dlpack": lambda t: torch.from_dlpack(t.detach()).zero_(),
    "storage": lambda t: t.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_no_write_of_the_network_changes_what_is_kept(write: str, mode: str) -> None:
    net = chain(1)[:1]
    save_output = hookscope.SaveOutput()
    handle = net[0].register_forward_hook(save_output)
    with MODES[mode](), hookscope.capture(net) as activations:
        first = net(X)
        kept = activations[0]
        WRITES[write](first)
        assert numbers(first) != [2, -4]  # the write took place
        WRITES[write](net(X))
    handle.remove()
    assert [numbers(t) for t in (kept, activations[0], *save_output.outputs)] == [[2, -4]] * 4


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_write_through_an_array_taken_before_the_hook_changes_nothing_kept(mode: str) -> None:
    arrays = []

    def keeps_its_memory(x: Tensor) -> Tensor:
        out = x * 2
        arrays.append(out.detach().numpy())
        return out

    net = nn.Sequential(Function(keeps_its_memory))
    with MODES[mode](), hookscope.capture(net, types=("all",)) as activations:
        out = net(X)
    arrays[0].fill(0)
    assert numbers(out) == [0, 0]
    assert numbers(activations["0"]) == [2, -4]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_without_gradients_writes_through_an_alias_reach_the_rest_of_the_network(mode: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.conv(x)
        net.drop(x).relu_()
        net.view(x).mul_(3)
        return x

    net = Function(forward, conv=conv(2), drop=nn.Dropout(), view=nn.Flatten()).eval()
    with MODES[mode](), hookscope.capture(net, "*") as activations:
        assert numbers(net(row(1, -2))) == [6, 0]
    assert [numbers(kept) for kept in activations.values()] == [[2, -4], [2, -4], [2, 0], [6, 0]]


@pytest.mark.parametrize("name", ZOO)
def test_gradients_of_parameters_and_inputs_are_those_without_a_capture(name: str) -> None:
    def gradients(watched: bool) -> list[Any]:
        model, inputs = built(name)
        leaves = [t.requires_grad_() for t in tensors_in(inputs).values()]
        torch.manual_seed(1)
        context = hookscope.capture(model, "*", types=("all",), gradients=True) if watched else torch.enable_grad()
        with context:
            loss = sum(t.sum() * 2 for t in tensors_in(model(**inputs)).values() if t.requires_grad)
        loss.backward()
        return [leaf.grad for leaf in [*leaves, *model.parameters()]]

    gradients = list(zip(gradients(True), gradients(False), strict=True))
    assert any(plain is not None for _, plain in gradients)
    for watched, plain in gradients:
        assert (watched is None) == (plain is None)
        if plain is not None and name == "strides":  # summed in another order: a copy of every second column is dense
            assert torch.allclose(watched, plain, rtol=1e-5, atol=1e-5)
        elif plain is not None:
            assert torch.equal(watched, plain)


def test_wanted_inputs_are_kept_as_they_went_in_in_the_graph_and_in_the_dtype() -> None:
    activations = captured(chain(1), types=("all",), inputs=True)
    assert [numbers(kept) for kept in activations.inputs.values()] == [[1, -2], [2, -4], [2, 0], [-5, 1], [0, 1]]
    assert numbers(activations.inputs["2"]) == numbers(activations.inputs[2]) == [2, 0]
    assert [call.key for call in activations.inputs.calls] == ["0", "1", "2", "3", "4"]
    activations = captured(Pyramid(), "head.conv#1,-1", inputs=True, x=row(1))
    assert {key: numbers(kept) for key, kept in activations.inputs.items()} == {"head.conv#1": [2], "head.conv#2": [3]}
    net = chain(1)
    with hookscope.capture(net, 1, inputs=True, dtype=torch.float64) as activations:
        net(X)
    kept = activations.inputs[1]
    assert kept.dtype == torch.float64
    assert torch.autograd.grad(kept.sum(), net[0].weight)[0].item() == 1  # ReLU lets the first alone through


def test_inputs_have_the_shape_of_the_call() -> None:
    def forward(net: Any) -> list[Tensor]:
        return [net.takes(X), net.takes(X, X), net.takes(a=X), net.takes(X, a=X), net.takes()]

    net = Function(forward, takes=Function(lambda *args, **kwargs: row(0)))
    with hookscope.capture(net, "takes", inputs=True) as activations:
        net()
    one, two, keywords, both, nothing = activations.inputs.values()
    assert torch.equal(one, X)
    assert isinstance(two, tuple) and len(two) == 2 and torch.equal(two[1], X)
    assert isinstance(keywords, dict) and list(keywords) == ["a"]
    assert torch.equal(both[0][0], X) and torch.equal(both[1]["a"], X)
    assert nothing == ()


@pytest.mark.parametrize("transform", [lambda o: o.mean(), lambda o: o[..., :1], lambda o: o.view(-1)[:1], lambda o: 7])
def test_with_a_transform_nothing_else_is_kept(transform: Callable[[Tensor], Any]) -> None:
    net, references = nn.Sequential(conv(2), nn.ReLU(inplace=True), conv(3)), []

    def reduce(output: Tensor) -> Any:
        references.append(weakref.ref(output))
        return transform(output)

    activations = captured(net, transform=reduce, x=torch.ones(1, 1, 100, 100))
    gc.collect()
    assert len(references) == 2 and [reference() for reference in references] == [None, None]
    for kept in activations.values():
        assert isinstance(kept, int) or kept.untyped_storage().nbytes() == 4 * kept.numel()


@pytest.mark.parametrize("mode", MODES)
def test_a_transform_that_returns_its_input_keeps_the_output_of_the_layer(mode: str) -> None:
    with MODES[mode](), hookscope.capture(net := chain(1), transform=lambda output: output) as activations:
        assert numbers(net(X)) == [3, 4]
    assert [numbers(kept) for kept in activations.values()] == [[2, -4], [-5, 1], [3, 4]]


def test_what_a_transform_returns_stays_on_the_way_from_the_parameters_to_the_loss() -> None:
    net = overwrites(containers())
    with hookscope.capture(net, "layer", transform=lambda output: output["out"]) as activations:
        loss = net(row(1, -2))
    assert numbers(torch.autograd.grad(loss, activations["layer"])[0]) == [1, 0]
    net = chain(1)
    with hookscope.capture(net, 0, transform=lambda output: output.pow(2).sum()) as activations:
        net(X)
    # d/dw of (w + b)^2 + (-2w + b)^2 at w = 2, b = 0: 2 * 2 - 4 * (-4)
    assert torch.autograd.grad(activations[0], net[0].weight)[0].item() == 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_dtype_converts_what_is_kept_and_nothing_downstream(dtype: torch.dtype, mode: str) -> None:
    net = nn.Sequential(conv(1 / 3), nn.ReLU(inplace=True), conv(1 / 7))
    with MODES[mode](), hookscope.capture(net, dtype=dtype) as activations:
        output = net(row(1, -2))
    assert torch.equal(output, net(row(1, -2)))
    assert activations[0].dtype == dtype and torch.equal(activations[0], net[0](row(1, -2)).to(dtype))


def test_dtype_applies_to_floating_point_tensors_only() -> None:
    activations = captured(kinds(), "kinds.*", dtype=torch.float64)
    assert [kept.dtype for kept in activations.values()] == KINDS[:3] + [torch.float64] * 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_quantized_outputs_stay_quantized(dtype: torch.dtype | None) -> None:
    quantizes = Function(lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.quint8))
    net = nn.Sequential(quantizes, nn.Identity())
    activations = captured(net, types=("all",), dtype=dtype, x=row(1, 2.2))
    assert activations[1].dtype == torch.quint8 and numbers(activations[1].dequantize()) == [1, 2]


def test_device_moves_all_that_is_kept_and_the_model_may_be_on_another() -> None:
    with hookscope.capture(net := chain(1), device="meta", inputs=True, gradients=True) as activations:
        output = net(X)
        output.sum().backward()
    kept = [*activations.values(), *activations.inputs.values(), *activations.grad.values()]
    assert numbers(output) == [3, 4]
    assert [tensor.device.type for tensor in kept] == ["meta"] * 9
    assert numbers(captured(chain(1), device="cpu")[0]) == [2, -4]
    activations = captured(chain(1).to("meta"), x=X.to("meta"))
    assert [tuple(kept.shape) for kept in activations.values()] == [(1, 1, 1, 2)] * 3


def test_gradients_of_activations_before_an_in_place_relu_are_those_from_paper() -> None:
    net = chain(1)[:3]
    with hookscope.capture(net, types=("all",)) as activations:
        loss = net(X).pow(2).sum()
    assert loss.item() == 26  # (-5, 1) squared
    gradients = torch.autograd.grad(loss, list(activations.values()), retain_graph=True)
    assert [numbers(gradient) for gradient in gradients] == [[30, 0], [30, -6], [-10, 2]]
    loss.backward()
    # through the first alone: dloss/dw = 30 * 1, dloss/db = 30; of the last: -10 * 2 + 2 * 0 and -10 + 2
    assert [p.grad.item() for p in net.parameters()] == [30, 30, -20, -8]


def test_kept_tensors_are_in_the_graph_where_there_is_one_and_else_the_network_goes_on_with_its_own() -> None:
    net = chain(1)
    with hookscope.capture(net) as activations:
        net(X)
    assert all(kept.grad_fn is not None for kept in activations.values())
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with hookscope.capture(net) as activations:
        net(X)
    assert not any(kept.requires_grad for kept in activations.values())
    net, returned, arrived = chain(1), [], []
    net[0].register_forward_hook(lambda layer, args, output: returned.append(output))
    net[1].register_forward_pre_hook(lambda layer, args: arrived.append(args[0]))
    activations = captured(net)
    assert arrived[0] is returned[0] and activations[0] is not returned[0]


@pytest.mark.parametrize(
    "function",
    [lambda x: (y := x * 2, y.detach()), lambda x: (x * 2, (x * 2).detach())],
    ids=["one memory", "two memories"],
)
def test_a_graph_and_its_detached_double_in_one_output(function: Callable[..., Any]) -> None:
    net = nn.Sequential(Function(function))
    x = row(1, -2).requires_grad_()
    with hookscope.capture(net, "0", types=("all",)) as activations:
        output, detached = net(x)
        detached.mul_(100)
    assert [numbers(kept) for kept in activations["0"]] == [[2, -4], [2, -4]]
    assert numbers(torch.autograd.grad(output.sum(), activations["0"][0])[0]) == [1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_that_is_returned_twice_is_one_tensor_still(mode: str) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        first, second = net.twice(x.clone().requires_grad_())
        first.add_(1)
        return second

    net = Function(forward, twice=Function(lambda x: (x * 2,) * 2))
    with MODES[mode](), hookscope.capture(net, "twice") as activations:
        assert numbers(net(X)) == [3, -3]
    first, second = activations["twice"]
    assert first is second and numbers(first) == [2, -4]


def test_save_output_keeps_every_call_in_order_and_clears() -> None:
    net, save_output = chain(1), hookscope.SaveOutput()
    handles = [layer.register_forward_hook(save_output) for layer in net]
    for context in MODES.values():
        with context():
            assert numbers(net(X)) == [3, 4]
        assert [numbers(kept) for kept in save_output.outputs] == [[2, -4], [2, 0], [-5, 1], [0, 1], [3, 4]]
        net(X)
        assert len(save_output.outputs) == 10
        save_output.clear()
        assert save_output.outputs == []
    for handle in handles:
        handle.remove()
    assert hooks_on(net) == 0
    net, save_output = chain(1)[:3], hookscope.SaveOutput()  # it stays in the graph before an in-place ReLU
    handle = net[0].register_forward_hook(save_output)
    loss = net(X).pow(2).sum()
    handle.remove()
    assert numbers(torch.autograd.grad(loss, save_output.outputs[0])[0]) == [30, 0]


@pytest.mark.parametrize(
    ("name", "convolutions"), [("resnet18", 20), ("vgg11", 8), ("squeezenet1_1", 26), ("efficientnet_b0", 81)]
)
def test_every_convolution_equals_captums_layer_activation(name: str, convolutions: int) -> None:
    from captum.attr import LayerActivation

    model = small_head(name)
    x = torch.randn(1, 3, 64, 64)
    before = ModelSnapshot(model)
    with torch.no_grad(), hookscope.capture(model, layers="all", types=("Conv2d",)) as activations:
        output = model(x)
    assert before.changes() == []
    assert len(activations) == convolutions
    with torch.no_grad():
        assert torch.equal(output, model(x))
        judges = LayerActivation(model, [model.get_submodule(layer) for layer in activations]).attribute(x)
    for (layer, kept), judge in zip(activations.items(), judges, strict=True):
        assert torch.equal(kept, judge), layer
        assert kept.isfinite().all() and (kept.numel() == 1 or kept.unique().numel() > 1), layer


def test_a_model_in_which_no_module_runs_is_an_error_that_says_so() -> None:
    net = nn.Sequential(nn.Identity())
    net.forward = lambda x: x + 1  # type: ignore[method-assign]
    ran = pytest.raises(LayerError, match=r"^no layer ran as a module; ops=True measures other operations$")
    with ran, hookscope.capture(net, "all", ("all",)):
        net(torch.ones(1))


def test_leaves_begin_a_graph_at_each_part_of_an_output_that_has_none() -> None:
    constant = torch.full((1, 1, 2, 2), 3.0)
    pair = Function(lambda pair, x: (pair.conv(x), constant), conv=nn.Conv2d(1, 1, 1))
    net = Function(lambda net, x: math.prod(net.pair(x)), pair=pair)
    with hookscope.capture(net, "pair", leaves=True) as activations:
        output = net(torch.ones(1, 1, 2, 2))
    in_graph, alone = activations["pair"]
    slopes = torch.autograd.grad(output.sum(), [in_graph, alone])
    assert torch.equal(slopes[0], constant) and torch.equal(slopes[1], in_graph)
    assert not in_graph.is_leaf and not constant.requires_grad
