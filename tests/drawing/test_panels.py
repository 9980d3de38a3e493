"""Panels as data: what is drawn, limits and ticks of the kinds of axis, the legend; and one rendering."""

import math

import pytest

from hookscope.drawing.panels import Mark, Panel, decades, draw_panels, panel_legend, plain_ticks, row_plot, tick_label
from hookscope.drawing.plot import draw_rows, figure_bytes


def dots(axis: str = "linear", **more: float) -> Panel:
    return Panel("size", 2.0, [Mark("dot", lambda row: row, "k", "dot size")], axis, **more)  # type: ignore[arg-type]


def test_a_mark_takes_numbers_ends_and_lists_and_leaves_out_the_rest() -> None:
    rows = [2.0, (1.0, 3.0), [4.0, None, 5.0], None, math.nan, math.inf]
    assert Mark("dot", lambda row: row, "k").spans(rows) == [(0, 2, 2), (1, 1, 3), (2, 4, 4), (2, 5, 5)]
    assert Mark("bar", lambda row: row, "k", shift=0.25).spans(rows[:1]) == [(0.25, 0, 2)]
    assert Mark("left", lambda row: row == 2.0, "k", marker="<").spans(rows) == [(0, 0, 0)]


def test_panels_without_values_are_left_out_but_the_first_if_all_are_empty() -> None:
    zeros = Panel("zeros", 1.0, [Mark("bar", lambda row: 0.0, "k")], "share")
    assert [panel.title for panel in draw_panels([1.0], [zeros, dots()])] == ["size"]
    assert [panel.title for panel in draw_panels([], [dots(), zeros])] == ["size"]


@pytest.mark.parametrize(
    ("axis", "rows", "title", "limits", "labels"),
    [
        ("linear", [-1.0, 3.0], "size", (-1.2, 3.2), ["-1", "0", "1", "2", "3"]),
        ("linear", [0.0], "size", (-0.05, 0.05), ["-0.04", "-0.02", "0", "0.02", "0.04"]),
        ("share", [0.2], "size (%)", (0, 100), ["0", "50", "100"]),
        ("bytes", [500.0, 2e6], "size (MB)", (0, 2.1), ["0", "0.5", "1", "1.5", "2"]),
        ("count", [2e4], "size (thousand)", (0, 21), ["0", "5", "10", "15", "20"]),
        ("seconds", [2e-3], "size (ms)", (0, 2.1), ["0", "0.5", "1", "1.5", "2"]),
        ("log", [1e-3, 1e3], "size", (1e-3 / 10**0.3, 10**3.3), ["0.001", "0.1", "10", "1000"]),
        ("log", [1.0, 1.0], "size", (12**-0.5, 12**0.5), ["0.5", "1", "2"]),
    ],
)
def test_limits_and_ticks_of_each_axis(
    axis: str, rows: list[float], title: str, limits: tuple[float, float], labels: list[str]
) -> None:
    [panel] = draw_panels(rows, [dots(axis)])
    assert (panel.title, list(panel.labels)) == (title, labels)
    assert panel.limits == pytest.approx(limits)


def test_a_symlog_axis_is_linear_while_one_scale_suits_all_rows() -> None:
    assert draw_panels([1.0, 2.0], [dots("symlog", typical=1.0)])[0].scale == "linear"
    [wide] = draw_panels([-1.0, 1e4], [dots("symlog", typical=1.0)])
    assert (wide.scale, wide.threshold, list(wide.labels)) == ("symlog", 1.0, ["-1", "0", "1", "100", "1e4"])


def test_a_log_axis_marks_lines_that_go_on_and_has_at_most_its_decades() -> None:
    line = Panel("norm", 2.0, [Mark("line", lambda row: row, "k", "line least to largest")], "log", decades=3)
    [panel] = draw_panels([(0.0, 1.0), (1e-9, 1.0), (0.5, 1.0)], [line])
    assert panel.beyond == ([0, 1], ()) and panel.limits[0] == pytest.approx(1e-3 / 1.7)
    assert [low for _, low, _ in panel.marks[0][1]] == pytest.approx([panel.limits[0], panel.limits[0], 0.5])
    assert panel_legend([panel]) == ["norm: line least to largest; red arrowhead: the line goes on to 0 or below"]


def test_the_legend_names_panels_of_the_same_marks_together_and_edges_once() -> None:
    lost = Mark("left", lambda row: row > 1, "k", "x lost", marker="x")
    panels = draw_panels([1.0, 2.0], [Panel(name, 1.0, [*dots().marks, lost]) for name in "ab"])
    assert panel_legend(panels, ["blank: none"]) == ["a, b: dot size", "x lost   blank: none"]
    assert panel_legend(draw_panels([1.0], [dots()])) == ["size: dot size"]


@pytest.mark.parametrize("rows", [[], [0.0], [1e-300, 1e300], [-1.0, 1.0], [1e-9, 5e3]])
@pytest.mark.parametrize("axis", ["linear", "symlog", "log", "share", "bytes"])
def test_any_values_are_drawn(axis: str, rows: list[float]) -> None:
    [panel] = draw_panels(rows, [dots(axis, typical=1e-3)])
    assert panel.limits[0] < panel.limits[1] and len(panel.ticks) == len(panel.labels) < 12


def test_every_kind_of_mark_is_drawn() -> None:
    kinds = [Mark(kind, lambda row: row, "k", kind) for kind in ("line", "bar", "dot", "tick", "path")]
    edges = [Mark("left", bool, "k", marker="x"), Mark("right", bool, "k", marker=">")]
    texts = [Mark("text", lambda row: "left" if row < 2 else (row, "inside"), "r")]
    plot = row_plot([1.0, 2.0], [Panel("all", 2.0, [*kinds, *edges, *texts])], ["a", "b"], legend=["first"])
    figure = draw_rows(plot, "title", ["a line"])
    assert [text.get_text() for text in figure.texts] == ["title", "a line", "first", "all: line, bar, dot, tick, path"]
    [axes] = figure.axes
    assert (len(axes.collections), len(axes.lines)) == (2, 5)
    assert [(text.get_text(), text.get_ha()) for text in axes.texts[1:3]] == [("left", "left"), ("inside", "right")]
    assert figure_bytes(figure, ".png").startswith(b"\x89PNG")


def test_ticks_are_short_and_differ() -> None:
    assert [tick_label(value) for value in (0, 0.001, 1, 250, 1e5, 2e-5)] == ["0", "0.001", "1", "250", "1e5", "2e-5"]
    near = (4.55e-10, 4.6e-10)
    assert [tick_label(value, near) for value in near] == ["4.5e-10", "4.6e-10"]
    assert [tick_label(value, (1234.1, 1234.2)) for value in (1234.1, 1234.2)] == ["1234.1", "1234.2"]
    assert plain_ticks((-0.2, 0.21), 5)[1] == ["-0.2", "-0.1", "0", "0.1", "0.2"]
    assert plain_ticks((0, 2.1e6), 3)[1] == ["0", "1e6", "2e6"]
    assert decades(1e-6, 1.0) == [1e-6, 1e-4, 1e-2, 1.0] and decades(0.5, 3) == [0.5, 1, 2]
