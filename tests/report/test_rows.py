"""A plot of rows on a page: the panels of the figure at the same places."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from hookscope.drawing import Mark, Panel, draw_rows, row_plot
from hookscope.drawing.panels import AxisKind
from hookscope.report.rows import HEAD, ROW, panel_svg

ROWS = [-2.0, 0.5, 7.0, 900.0]
KINDS = ("line", "bar", "dot", "tick", "path")
LABELS = ["<a>", "b  ReLU", "c", "d"]


def drawn(*marks: Mark, axis: AxisKind = "linear", **more: Any) -> tuple[Any, Any]:
    """The plot of these marks, and its panel as SVG."""
    plot = row_plot(ROWS, [Panel("size", 2.0, marks, axis, typical=1.0, **more)], LABELS, {1: "look"}, first=1)
    return plot, ElementTree.fromstring(panel_svg(plot.panels[0], plot))


def places(svg: Any, stroke: str) -> list[float]:
    """The x of what a path begins with, in each row."""
    [path] = [part for part in svg.iter("path") if part.get("stroke") == stroke]
    return [float(x) for x in re.findall(r"M([-\d.e]+) ", path.attrib["d"])]


@pytest.mark.parametrize("axis", ["linear", "symlog", "log", "count"])
def test_values_have_the_places_of_the_figure(axis: AxisKind) -> None:
    plot, svg = drawn(Mark("dot", lambda row: row, "teal"), axis=axis)
    [axes] = draw_rows(plot, "a net").axes
    box = axes.get_window_extent()
    values = [high for _, _, high in plot.panels[0].marks[0][1]]
    figure = [(axes.transData.transform((value, 0))[0] - box.x0) / box.width for value in values]
    assert [x / (2 * 72) for x in places(svg, "teal")] == pytest.approx(figure, abs=1e-3)
    ticks = [(text.get("x"), text.text) for text in svg.iter("text") if text.get("class") == "tick"]
    assert [label for _, label in ticks[::2]] == [label.get_text() for label in axes.get_xticklabels()][
        : len(ticks) // 2
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mark_is_a_path_with_a_part_for_each_row(kind: Any) -> None:
    _, svg = drawn(Mark(kind, lambda row: None if row == 7 else row, "teal"))
    paths = [part for part in svg.iter("path") if part.get("stroke") == "teal"]
    assert [path.attrib["d"].count("M") for path in paths] == ([1, 3] if kind == "path" else [3])  # a gap breaks a path


def test_edges_texts_grounds_and_readings() -> None:
    text = Mark("text", lambda row: "<left>" if row < 0 else (row, "inside") if row > 800 else "", "red")
    line = Mark("line", lambda row: (-9.0, row), "teal")
    edges = [Mark("left", lambda row: row < 0, "k", marker="x"), Mark("right", lambda row: row > 8, "k", marker=">")]
    _, svg = drawn(line, text, *edges, Mark("dot", lambda row: 3.0, "navy", marker="D"), limits=(-5.0, 1000.0))
    said = {part.text: (part.get("text-anchor"), part.get("fill")) for part in svg.iter("text") if part.get("fill")}
    assert said == {"<left>": ("start", "red"), "inside": ("end", "var(--paper)")}
    assert [part.get("class") for part in svg.iter("path")][:3] == ["first", "even", "grid"]
    assert [title.text for title in svg.iter("title")][:2] == ["<a>: size -9, -2, 3", "b  ReLU: size -9, 0.5, 3"]
    beyond = [part.attrib["d"].count("M") for part in svg.iter("path") if part.get("fill") == "#606060"]
    assert beyond == [4, 0] and math.isclose(float(svg.attrib["height"]), HEAD + 4 * ROW + 16)
