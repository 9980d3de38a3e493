"""The graph of a network: what becomes a node, what is folded, joined or left out, and where its lines lead."""

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.structure import GraphNode, dot_text, layer_graph
from tests.nets import Function


def conv(width: int = 4, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(width, 4, 1, **options)


def edges(model: nn.Module, depth: int | None = 1, size: tuple[int, ...] = (1, 4, 8, 8)) -> set[tuple[str, str]]:
    """Pairs of names; a function has its type, and a junction the names of what it joins."""
    graph = layer_graph(model, size, depth)
    names: list[str] = []
    for at, node in enumerate(graph.nodes):
        sources = [names[edge.source] for edge in graph.edges if edge.target == at]
        joined = "(" + " ".join(sorted(sources)) + ")"
        name = node.type if node.kind == "operation" else node.name or node.kind
        names.append(joined if node.kind == "junction" else name)
    assert all(edge.source < edge.target for edge in graph.edges)
    return {(names[edge.source], names[edge.target]) for edge in graph.edges}


def joins(width: int) -> nn.Module:
    return Function(lambda net, *kept: net.conv(torch.cat(kept, 1)), conv=conv(width))


def dense(net: nn.Module, x: Tensor) -> Tensor:
    kept = [x]
    for layer in (net.a, net.b, net.c):
        kept.append(layer(*kept))
    return torch.cat(kept, 1)


CASES: list[tuple[nn.Module, set[tuple[str, str]]]] = [
    # equal layers in a row are one node
    (nn.Sequential(conv(), conv(), conv()), {("input", "0–2"), ("0–2", "output")}),
    # not where another one reads between
    (
        Function(lambda net, x: net.b(y := net.a(x)) + y, a=conv(), b=conv()),
        {("input", "a"), ("a", "b"), ("a", "add"), ("b", "add"), ("add", "output")},
    ),
    # what only hands values on is left out, and so are constants
    (
        Function(
            lambda net, x: net.b(net.a(x).flatten(2).unflatten(2, (8, 8)) * 2 + torch.ones(8)),
            a=conv(),
            b=conv(bias=False),
        ),
        {("input", "a"), ("a", "b"), ("b", "output")},
    ),
    # functions that do what layers do are nodes
    (
        Function(lambda net, x: nn.functional.max_pool2d(net.a(x), 2), a=conv()),
        {("input", "a"), ("a", "max_pool2d"), ("max_pool2d", "output")},
    ),
    # so are parts of a map that together have its values at a lower resolution
    (
        Function(lambda net, x: net.a(torch.cat([x[..., ::2, ::2], x[..., 1::2, 1::2]], 1)), a=conv(8)),
        {("input", "getitem, cat"), ("getitem, cat", "a"), ("a", "output")},
    ),
    # not another view of the same values
    (
        Function(lambda net, x: net.a(x.view(1, 16, 4, 4)), a=conv(16)),
        {("input", "a"), ("a", "output")},
    ),
    # what a layer computes without torch is its own work
    (
        Function(
            lambda net, x: net.b(net.numpy(net.a(x))), a=conv(), b=conv(bias=False),
            numpy=Function(lambda x: torch.from_numpy(x.detach().numpy() * 2)),
        ),
        {("input", "a"), ("a", "numpy"), ("numpy", "b"), ("b", "output")},
    ),
    # lines to several readers meet
    (
        Function(dense, a=joins(4), b=joins(8), c=joins(12)),
        {
            ("input", "a"), ("input", "(a input)"), ("a", "(a input)"), ("(a input)", "b"),
            ("(a input)", "((a input) b)"), ("b", "((a input) b)"), ("((a input) b)", "c"),
            ("((a input) b)", "cat"), ("c", "cat"), ("cat", "output"),
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "expected"), CASES)
def test_lines_lead_where_the_values_go(model: nn.Module, expected: set[tuple[str, str]]) -> None:
    assert edges(model) == expected


def test_blocks_that_differ_in_functions_alone_are_one_node() -> None:
    def block(shift: bool) -> nn.Module:
        return Function(lambda net, x: net.conv(x.roll(1, 2) if shift else x).clone(), conv=conv())

    assert edges(nn.Sequential(block(False), block(True))) == {("input", "0–1"), ("0–1", "output")}


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (1, {("input", "a"), ("a", "output")}),
        (2, {("input", "a.0"), ("a.0", "a.1"), ("a.1", "output")}),
        (9, {("input", "a.0.0"), ("a.0.0", "a.0.1"), ("a.0.1", "a.1"), ("a.1", "output")}),
    ],
)
def test_depth_opens_blocks(depth: int, expected: set[tuple[str, str]]) -> None:
    inside = nn.Sequential(nn.Sequential(conv(), nn.ReLU()), nn.Sigmoid())
    assert edges(Function(lambda net, x: net.a(x), a=inside), depth) == expected


def test_functions_on_boxes_are_one_node_where_nothing_runs_between() -> None:
    def decode(net: nn.Module, x: Tensor) -> Tensor:
        boxes, scores = net.a(x).flatten(1), net.b(x).flatten(1)
        low, high = boxes - scores, boxes + scores
        return torch.stack([low * high, high / low])

    graph = layer_graph(Function(decode, a=conv(), b=conv()), (1, 4, 8, 8), 1)
    assert [node.type for node in graph.nodes if node.kind == "operation"] == ["sub, add, mul, div, stack"]


@pytest.mark.parametrize(
    ("before", "after", "resolution"),
    [
        ((1, 3, 224, 224), (1, 64, 112, 112), (224, 112)),
        ((1, 64, 7, 9), (1, 64, 1, 1), (7, 1)),
        ((1, 56, 56, 96), (1, 28, 28, 192), (56, 28)),  # channels last
        ((1, 8, 16, 56, 56), (1, 8, 8, 28, 28), (56, 28)),  # a clip
        ((1, 8, 14, 14), (1, 8, 28, 28), (14, 28)),
        ((1, 8, 32, 32), (1, 8, 30, 30), None),
        ((1, 197, 768), (1, 197, 384), None),
        ({"0": (1, 8, 8, 8)}, (1, 8, 4, 4), None),
    ],
)
def test_a_node_knows_where_the_resolution_changes(before: Any, after: Any, resolution: object) -> None:
    assert GraphNode("layer", input_shape=before, output_shape=after).resolution == resolution


def test_repeats_hold_the_numbers_of_all() -> None:
    graph = layer_graph(torchvision.models.resnet18(), depth=2)
    node = next(node for node in graph.nodes if node.repeats > 1)
    assert (node.name, node.type, node.repeats, node.params) == ("layer1.0–1", "BasicBlock", 2, 147_968)
    assert node.layers == ("layer1.0", "layer1.1") and node.key == "layer1.0"
    assert graph.nodes[0].output_shape == (1, 3, 224, 224) and graph.nodes[-1].output_shape == (1, 1000)


def test_a_graph_of_a_model_with_two_inputs() -> None:
    net = Function(lambda net, x, y: net.a(x) + y, a=conv())
    graph = layer_graph(net, inputs=(torch.ones(1, 4, 8, 8), torch.ones(1, 4, 8, 8)))
    assert [node.name or node.type or node.kind for node in graph.nodes] == ["input", "a", "add", "output"]
    assert {(edge.source, edge.target) for edge in graph.edges} == {(0, 1), (0, 2), (1, 2), (2, 3)}


def test_without_a_depth_forty_nodes_are_the_most() -> None:
    assert layer_graph(torchvision.models.resnet18()).depth == 2
    assert layer_graph(nn.Sequential(*[nn.Sequential(conv(), nn.ReLU())] * 2)).depth == 2


def test_names_do_not_break_the_language_of_graphviz() -> None:
    net = nn.Sequential()
    net.add_module('a"\n\\b', nn.ReLU())
    text = dot_text(layer_graph(net, (1, 4, 8, 8)))
    assert text.count("\n") == 6 and r"a\"" in text
