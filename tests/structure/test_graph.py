"""The graph of a network: what becomes a node, what is folded, joined or left out, and where its lines lead."""

import itertools
import random
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchinfo
import torchvision
from PIL import Image
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.structure import GraphNode, Structure, dot_text, draw_graph, layer_graph, layer_tree, write_graph
from hookscope.structure.picture import lay_out
from hookscope.tracing import trace_at
from tests.nets import Function, Twice, WithIdle, named


def block(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, width, 1, bias=False), nn.ReLU())


def rows(model: nn.Module, *fields: str, **options: Any) -> list[tuple[Any, ...]]:
    return [tuple(getattr(row, field) for field in fields) for row in layer_tree(model, (1, 4, 2, 2), **options)]


def test_equal_neighbours_share_a_row_with_the_numbers_of_all() -> None:
    net = nn.Sequential(block(), block(), block(8))
    assert rows(net, "depth", "name", "last", "repeats", "params", "macs", "values") == [
        (0, "", "", 1, 64, 256, 2 * 32 + 64),
        (1, "0", "1", 2, 32, 128, 2 * 32),
        (2, "0.0", "1.0", 2, 32, 128, 2 * 16),
        (2, "0.1", "1.1", 2, 0, 0, 2 * 16),
        (1, "2", "2", 1, 32, 128, 64),
        (2, "2.0", "2.0", 1, 32, 128, 32),
        (2, "2.1", "2.1", 1, 0, 0, 32),
    ]


@pytest.mark.parametrize(
    "second",
    [
        nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Sigmoid()),  # another class inside
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()),  # other parameters
        nn.Sequential(nn.Conv2d(4, 4, 1, padding=1, bias=False), nn.ReLU()),  # another shape
        nn.Sequential(nn.Conv2d(4, 4, 1, groups=2, bias=False), nn.ReLU()),  # other arithmetic
    ],
)
def test_neighbours_that_differ_have_rows_of_their_own(second: nn.Module) -> None:
    net = nn.Sequential(block(), second)
    assert rows(net, "name", "repeats", depth=1)[1:] == [("0", 1), ("1", 1)]
    assert "repeats" not in str(layer_tree(net, (1, 4, 6, 6), depth=1)), "one of each is not counted"


def test_equal_layers_that_are_no_neighbours_have_rows_of_their_own() -> None:
    assert rows(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.ReLU()), "name")[1:] == [("0",), ("1",), ("2",)]


def test_the_calls_of_one_layer_share_a_row_and_only_what_was_not_used_was_not_called() -> None:
    twice = [(row.name, row.calls, row.params, row.macs) for row in layer_tree(Twice(), (1, 1, 2, 2))]
    assert twice == [("", 1, 2, 16), ("layer", 2, 2, 16)]
    assert Structure(trace_at(WithIdle(), (1, 3, 2, 2))).not_called() == {"idle": 5}


def test_operations_are_rows_where_they_are_asked_for() -> None:
    net = Function(lambda net, x: net.conv(x).relu() + 1, conv=nn.Conv2d(4, 4, 1))
    assert rows(net, "name") == [("",), ("conv",)]
    assert rows(net, "name", "type", ops=True)[1:] == [("conv", "Conv2d"), ("::relu", "relu"), ("::add", "add")]


@pytest.mark.parametrize(("depth", "deepest"), [(1, 1), (2, 2), (9, 3), (None, 3)])
def test_the_tree_ends_at_the_depth(depth: int | None, deepest: int) -> None:
    net = named(a=named(b=block()), c=nn.ReLU())
    assert max(row.depth for row in layer_tree(net, (1, 4, 2, 2), depth)) == deepest


def test_without_a_depth_a_long_tree_is_cut_where_forty_rows_end() -> None:
    net = named(a=nn.Sequential(*(nn.Conv2d(4, 4, 1, padding=at) for at in range(39))), b=nn.ReLU())
    assert {row.depth for row in layer_tree(net, (1, 4, 2, 2))} == {0, 1}


def test_numbers_of_resnet18_are_those_of_torchinfo_and_of_plain_hooks() -> None:
    model, picture = torchvision.models.resnet18().eval(), torch.zeros(1, 3, 64, 64)
    values: dict[str, int] = {}
    for name, module in model.named_modules():
        if not list(module.children()):
            add = lambda *call, name=name: values.update({name: values.get(name, 0) + call[2].numel()})  # noqa: E731
            module.register_forward_hook(add)
    infos = torchinfo.summary(model, input_data=picture, depth=9, verbose=0).summary_list
    params = {info.var_name: info.num_params for info in infos if info.depth == 1}
    top = [row for row in layer_tree(model, (64, 64), 1) if row.depth == 1]
    assert {row.name: row.params for row in top} == params
    whole = layer_tree(model, (64, 64))[0]
    assert whole.params == sum(parameter.numel() for parameter in model.parameters())
    expected = {row.name: sum(n for name, n in values.items() if f"{name}.".startswith(f"{row.name}.")) for row in top}
    assert {row.name: row.values for row in top} == expected
    assert whole.values == sum(expected.values())


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


Edges = list[tuple[int, int]]


def random_edges(seed: int, count: int = 30) -> Edges:
    numbers = random.Random(seed)
    back = [(numbers.randrange(max(0, node - 6), node), node) for node in range(1, count) for _ in range(2)]
    return list(dict.fromkeys(back))


@pytest.mark.parametrize("edges", [[], [(0, 1)], [(0, 2), (1, 2)], *map(random_edges, range(8))])
def test_no_two_nodes_touch_and_lines_lead_down(edges: Edges) -> None:
    count = max([1, *(target + 1 for _, target in edges)])
    sizes = [(40.0 + 9 * (node % 5), 20.0 + node % 3) for node in range(count)]
    layout = lay_out(sizes, edges)
    for (a, (x, y)), (b, (u, v)) in itertools.combinations(enumerate(layout.nodes), 2):
        beside = abs(x - u) >= (sizes[a][0] + sizes[b][0]) / 2
        assert beside or abs(y - v) >= (sizes[a][1] + sizes[b][1]) / 2, (a, b)
    for (source, target), line in zip(edges, layout.lines, strict=True):
        ends = (line[0][0], line[-1][0])
        assert ends == (layout.nodes[source][0], layout.nodes[target][0])
        assert all(y <= v for (_, y), (_, v) in itertools.pairwise(line))
    for (x, y), (width, height) in zip(layout.nodes, sizes, strict=True):
        assert -1e-6 <= x - width / 2 and x + width / 2 <= layout.width + 1e-6
        assert 0 <= y - height / 2 and y + height / 2 <= layout.height + 1e-6


def test_lines_that_pass_by_and_chains_are_straight_and_branches_do_not_cross() -> None:
    layout = lay_out([(60.0, 20.0)] * 6, [(at, at + 1) for at in range(5)] + [(0, 5)])
    lane = layout.lines[-1][1:-1]
    assert len({round(x, 3) for x, _ in lane}) == 1
    assert all(abs(lane[0][0] - x) > 30 for x, _ in layout.nodes[1:5])
    layout = lay_out([(60.0, 20.0), (90.0, 20.0), (30.0, 20.0)], [(0, 1), (1, 2)])
    assert len({round(x, 3) for x, _ in layout.nodes}) == 1
    layout = lay_out([(30.0, 20.0)] * 6, [(0, 1), (0, 2), (1, 4), (2, 3), (3, 5), (4, 5)])
    assert (layout.nodes[1][0] < layout.nodes[2][0]) == (layout.nodes[4][0] < layout.nodes[3][0])


SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def resnet() -> str:
    return draw_graph(layer_graph(torchvision.models.resnet18(), (64, 64), 2), "resnet18")


def texts(picture: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(picture).iter(f"{SVG}text")]


def test_a_picture_has_names_repeats_shapes_and_resolutions(resnet: str) -> None:
    shown = texts(resnet)
    assert {"input", "conv1", "Conv2d  64 → 32", "layer1.0–1", "BasicBlock ×2", "64×16×16", "output"} <= set(shown)
    assert resnet.count("<polygon") == 6  # conv1, maxpool, three blocks, avgpool
    merge = Function(lambda x: torch.cat([x[..., ::2, ::2], x[..., 1::2, 1::2]], 1))
    assert "functions in (model)  8 → 4" in texts(draw_graph(layer_graph(merge, (1, 3, 8, 8))))


def test_everything_lies_in_the_picture(resnet: str) -> None:
    root = ET.fromstring(resnet)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        if "x" in box.attrib:
            assert 0 <= float(box.attrib["x"]) and float(box.attrib["x"]) + float(box.attrib["width"]) <= width
            assert 0 <= float(box.attrib["y"]) and float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_marks_colour_nodes_and_links_lead_on() -> None:
    graph = layer_graph(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()), (8, 8))
    root = ET.fromstring(draw_graph(graph, marks={1: ("error", "dead <b>")}, links={2: "#layer=1"}))
    nodes = [group for group in root.iter(f"{SVG}g") if "node" in group.attrib.get("class", "")]
    assert [node.attrib["class"] for node in nodes] == [
        "node node-input", "node node-layer node-error", "node node-layer", "node node-output",
    ]  # fmt: skip
    assert "dead <b>" in (nodes[1].find(f"{SVG}title").text or "")  # type: ignore[union-attr]
    assert [link.attrib["href"] for link in root.iter(f"{SVG}a")] == ["#layer=1"]


def test_markup_in_a_name_stays_text() -> None:
    net = nn.Sequential()
    net.add_module("<script>&\u202e\x1b", nn.ReLU())
    picture = draw_graph(layer_graph(net, (1, 3, 8, 8)), "</title>")
    assert "<script>" not in picture and "\u202e" not in picture and "\x1b" not in picture
    assert any(text.startswith("<script>&") for text in texts(picture))


def test_the_suffix_of_a_file_is_its_format(tmp_path: Path) -> None:
    graph = layer_graph(nn.Sequential(nn.ReLU()), (1, 3, 8, 8))
    write_graph(graph, str(tmp_path / "a.svg"))
    write_graph(graph, str(tmp_path / "a.DOT"))
    assert (tmp_path / "a.svg").read_text().startswith("<svg") and "digraph" in (tmp_path / "a.DOT").read_text()
    with pytest.raises(UsageError, match=r"a graph is an SVG, PNG or DOT file; name it \.svg, \.png, \.dot"):
        write_graph(graph, str(tmp_path / "a.pdf"))


def test_a_png_shows_the_shapes_of_the_svg_at_their_places(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 3, stride=2), nn.ReLU())
    graph = layer_graph(net, (1, 1, 9, 9))
    write_graph(graph, str(tmp_path / "a.png"))
    root = ET.fromstring(draw_graph(graph))
    pixels = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    scale = pixels.shape[1] / float(root.attrib["width"])
    assert pixels.shape[0] == pytest.approx(float(root.attrib["height"]) * scale, abs=1)
    [corners] = [element.attrib["points"] for element in root.iter(f"{SVG}polygon")]
    (left, top), _, _, (_, bottom) = (map(float, pair.split(",")) for pair in corners.split())
    row = pixels[round((top + bottom + 48) / 2 * scale)]
    assert row[: round((left + 20) * scale)].min() == 255  # the box begins 24 to the right, and is narrower below
    assert row[round((left + 20) * scale) : round((left + 34) * scale)].min() < 220


def test_a_drawn_graph_shows_itself_in_a_notebook_and_is_short_at_a_prompt() -> None:
    drawn = draw_graph(layer_graph(nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU()), input_size=(8, 8)))
    assert isinstance(drawn, str) and drawn.startswith("<svg") and drawn._repr_svg_() == str(drawn)  # type: ignore[attr-defined]
    assert len(repr(drawn)) < 100
