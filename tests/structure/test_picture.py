"""The picture of a graph: well-formed, whole, honest about names that look like markup."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torchvision
from torch import nn

from hookscope.errors import UsageError
from hookscope.structure import draw_graph, layer_graph, write_graph

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
    with pytest.raises(UsageError, match=r"a graph is an SVG or DOT file.*name it \.svg or \.dot"):
        write_graph(graph, str(tmp_path / "a.bmp"))
