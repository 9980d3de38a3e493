"""The picture of a graph: well-formed, whole, honest about names that look like markup."""

import itertools
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from hookscope.errors import UsageError
from hookscope.structure import draw_graph, layer_graph, write_graph
from hookscope.structure.picture import lay_out
from tests.nets import Function

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
