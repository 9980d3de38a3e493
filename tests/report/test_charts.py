"""Plots on a page: panels and charts at the places of the figure."""

import itertools
import math
import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from hookscope.drawing import Chart, Curve, Mark, Panel, draw_rows, row_plot
from hookscope.drawing.panels import AxisKind
from hookscope.report.charts import FOOT, HEAD, RAMP, ROW, chart_data, chart_labels, chart_svg, panel_svg

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
    assert [x / (2 * 70) for x in places(svg, "teal")] == pytest.approx(figure, abs=1e-3)
    ticks = [(text.get("x"), text.text) for text in svg.iter("text") if text.get("class") == "tick"]
    assert [label for _, label in ticks[::2]] == [label.get_text() for label in axes.get_xticklabels()][
        : len(ticks) // 2
    ]


def test_a_tick_label_that_would_overlap_the_one_before_is_left_out() -> None:
    plot = row_plot([1e-4, 10.0], [Panel("size", 1.0, [Mark("dot", float, "teal")], "log")], ["a", "b"])
    svg = ElementTree.fromstring(panel_svg(plot.panels[0], plot))
    ticks = [text for text in svg.iter("text") if text.get("class") == "tick"][::2]
    spans = []
    for tick in ticks:
        width = 5.5 * len(tick.text or "")
        left = float(tick.get("x") or 0) - {"start": 0, "middle": 0.5, "end": 1}[tick.get("text-anchor") or ""] * width
        spans.append((left, left + width))
    assert 2 <= len(spans) < len(plot.panels[0].labels)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(spans))


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
    assert beyond == [4, 0] and math.isclose(float(svg.attrib["height"]), HEAD + 4 * ROW + FOOT)


def test_cells_are_a_picture_and_their_scale_stands_below() -> None:
    cells = Mark("cells", lambda row: np.full((3, 3), 7, np.uint8), "")
    panel = Panel("cells", 2.0, [cells], limits=(0.0, 3.0), ticks=[(1.0, "one")], ramp=("viridis", "abc"))
    plot = row_plot(ROWS, [panel], LABELS)
    svg = ElementTree.fromstring(panel_svg(plot.panels[0], plot))
    assert [part.attrib["href"][:22] for part in svg.iter("image")] == ["data:image/png;base64,"] * 2
    assert [text.text for text in svg.iter("text")] == ["cells", "one", "one", "a", "b", "c"]
    assert float(svg.attrib["height"]) == HEAD + 4 * ROW + FOOT + RAMP
    assert len(draw_rows(plot).axes[0].images) == 1


def test_a_chart_leaves_gaps_and_keeps_its_numbers() -> None:
    nan = float("nan")
    curves = [Curve("b", range(5), [1.0, None, nan, 10.0, 100.0]), Curve("c", [0], [0.0], 1)]
    smooth = Curve("b", range(5), [5.0] * 5, width=0.7, is_read=False)
    chart = Chart("a", [*curves, smooth], [(0, 1, 9), (4, 2, 8)], [(10.0, "#f00", "")], axis="log", unknown=[2])
    assert chart.is_log and chart.span == (0, 4) and chart.limits == pytest.approx((10**-0.2, 10**2.2))
    paths = {part.get("class"): part.attrib["d"] for part in ElementTree.fromstring(f"<g>{chart_svg(chart)}</g>")}
    assert paths["line colour-0"] == "M450 80L600 13.33" and paths["dot colour-0"] == "M0 146.7h0"
    assert {"band", "rule", "unknown", "grid", "line colour-0 faint", None} <= set(paths)
    lines = chart_data(chart)["lines"]
    assert [line["ys"] for line in lines] == [[1.0, None, "NaN", 10.0, 100.0], [0.0]]  # type: ignore[attr-defined]
    assert [label for _, label in chart_labels(chart)["ticks"]] == ["1", "10", "100"]


@pytest.mark.parametrize(
    ("axis", "values", "is_log", "labels"),
    [
        ("auto", [1.0, 2.0, 3.0], False, ["1", "1.5", "2", "2.5", "3"]),
        ("auto", [1.0, 1000.0, 1.0], True, ["1", "10", "100", "1000"]),
        ("auto", [-1.0, 1000.0], False, ["0", "250", "500", "750", "1000"]),
        ("share", [0.2], False, ["0", "0.5", "1"]),
        ("linear", [], False, ["0", "0.25", "0.5", "0.75", "1"]),
        ("log", [0.8, 1.2], True, ["0.75", "1", "1.25", "1.5"]),
    ],
)
def test_the_axis_of_a_chart(axis: Any, values: list[float], is_log: bool, labels: list[str]) -> None:
    chart = Chart("a", [Curve("b", range(len(values)), values)], axis=axis)
    assert (chart.is_log, [label for _, label in chart.ticks()]) == (is_log, labels)
