"""Which calls made what each call read: through modules, functions, views and writes in place."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, fx, nn

from hookscope.hooks import OPERATION
from hookscope.tracing import INPUT, trace
from tests.nets import Function


def conv() -> nn.Conv2d:
    return nn.Conv2d(2, 2, 1)


def reads(model: nn.Module, *inputs: Tensor, on_meta: bool = True) -> dict[str, set[str]]:
    """For each call the calls whose outputs it read, and for the name "" what the output of the model reads."""
    traced = trace(model, inputs, sources=True, on_meta=on_meta)
    names = [traced.layers[call.layer].name for call in traced.calls]
    known = {at: f"{name}#{names[:at].count(name)}" if name in names[:at] else name for at, name in enumerate(names)}
    known[INPUT] = "input"
    edges = {known[at]: {known[read] for read in call.reads} for at, call in enumerate(traced.calls) if call.reads}
    return edges | {"": {known[read] for read in traced.answer}}


def in_place(net: nn.Module, x: Tensor) -> Tensor:
    y = net.a(x)
    y += x
    y.relu_()
    return net.b(y)


def written_half(net: nn.Module, x: Tensor) -> Tensor:
    left, right = net.a(x).chunk(2, 1)
    left.relu_()
    return torch.cat([right, left], 1)


def written_part(net: nn.Module, x: Tensor) -> Tensor:
    whole = torch.zeros_like(x)
    whole[:, :1] = net.a(x)[:, :1]
    return net.b(whole)


def kept_outside(net: nn.Module, x: Tensor) -> Tensor:
    net.kept = net.a(x)
    y = net.b(x)
    return y * net.kept


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda net, x: net.b(y := net.a(x)) + y, {"b": {"a"}, "::add": {"a", "b"}, "": {"::add"}}),
        (in_place, {"::add_": {"a", "input"}, "::relu_": {"::add_"}, "b": {"::relu_"}, "": {"b"}}),
        (written_half, {"::chunk": {"a"}, "::relu_": {"::chunk"}, "::cat": {"::chunk", "::relu_"}, "": {"::cat"}}),
        (lambda net, x: {"one": net.a(x), "more": (net.b(x), 3)}, {"b": {"input"}, "": {"a", "b"}}),
        (kept_outside, {"b": {"input"}, "::mul": {"a", "b"}, "": {"::mul"}}),
        (lambda net, x: net.b(net.a(x).data), {"b": {"a"}, "": {"b"}}),
        (lambda net, x: (net.a(x), net.b(x))[1], {"b": {"input"}, "": {"b"}}),
    ],
)
@pytest.mark.parametrize("on_meta", [True, False])
def test_an_edge_is_where_values_go(function: Callable[..., Any], expected: dict[str, set[str]], on_meta: bool) -> None:
    net = Function(function, a=conv(), b=conv())
    assert reads(net, torch.zeros(1, 2, 3, 3), on_meta=on_meta) == {"a": {"input"}, **expected}


def test_a_write_to_a_part_of_a_tensor_is_read_with_the_whole() -> None:
    edges = reads(Function(written_part, a=conv(), b=conv()), torch.zeros(1, 2, 3, 3))
    assert "::setitem" in edges["b"] and edges["::setitem"] >= {"::getitem"} and edges["::getitem"] == {"a"}


def test_a_layer_that_hands_its_input_on_makes_nothing() -> None:
    edges = reads(nn.Sequential(conv(), nn.Dropout(), nn.Identity(), conv()).eval(), torch.zeros(1, 2, 3, 3))
    assert edges == {"0": {"input"}, "3": {"0"}, "": {"3"}}


def test_attention_reads_query_key_and_value() -> None:
    layers = {name: nn.Linear(4, 4) for name in "qkv"}
    net = Function(lambda net, x: net.mix(net.q(x), net.k(x), net.v(x))[0], **layers, mix=nn.MultiheadAttention(4, 2))
    edges = reads(net, torch.zeros(5, 1, 4))
    inside = {read for name, found in edges.items() if name.startswith("mix") for read in found}
    assert {"q", "k", "v"} <= inside


@pytest.mark.parametrize("name", ["resnet18", pytest.param("googlenet", marks=pytest.mark.slow),
                                  pytest.param("densenet121", marks=pytest.mark.slow),
                                  pytest.param("shufflenet_v2_x1_0", marks=pytest.mark.slow)])  # fmt: skip
def test_edges_between_layers_are_those_of_fx(name: str) -> None:
    """fx follows symbols, not tensors: it sees what the code hands on."""
    model = torchvision.models.get_model(name, weights=None, **({"init_weights": False} if name == "googlenet" else {}))
    model.eval()
    handed_on = (nn.Dropout, nn.Identity)
    modules = dict(model.named_modules())
    calls: dict[fx.Node, str] = {}
    symbolic: dict[str, set[str]] = {}
    counts: dict[str, int] = {}

    @cache
    def layers(node: fx.Node) -> set[str]:
        if node in calls:
            return {calls[node]}
        return {"input"} if node.op == "placeholder" else set().union(*map(layers, node.all_input_nodes), set())

    for node in fx.symbolic_trace(model).graph.nodes:
        if node.op == "call_module" and not isinstance(modules[node.target], handed_on):
            symbolic_name = f"{node.target}#{counts[node.target]}" if node.target in counts else node.target
            counts[node.target] = counts.get(node.target, 0) + 1
            symbolic[symbolic_name] = set().union(*map(layers, node.all_input_nodes))
            calls[node] = symbolic_name
    edges = reads(model, torch.zeros(1, 3, 64, 64))

    @cache
    def through(name: str) -> set[str]:
        if OPERATION not in name:
            return {name}
        return set().union(*map(through, edges.get(name, set())))

    found = {name: set().union(*map(through, read)) for name, read in edges.items() if name and OPERATION not in name}
    assert found == symbolic
