"""Panels as data: what is drawn, limits, ticks, the legend; and plots: settings, suffixes, bytes, pages of rows."""

import io
import math
import os
import xml.dom.minidom
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from hookscope.drawing.files import read_provenance
from hookscope.drawing.panels import Mark, Panel, decades, draw_panels, panel_legend, plain_ticks, row_plot, tick_label
from hookscope.drawing.plot import SUFFIXES, draw_rows, figure_bytes, plain_settings, plot_suffix, short_label, write
from hookscope.errors import UsageError
from tests.drawing.rows import page_of


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


@pytest.mark.parametrize("unit", [1.0, 1e3, 1e7])
def test_an_arrowhead_is_at_what_goes_beyond_the_limits_in_any_unit(unit: float) -> None:
    rows = [0.5 * unit, 2 * unit]
    [whole] = draw_panels(rows, [Panel("moved", 2.0, [Mark("bar", float, "k")], "bytes")])
    assert whole.beyond == ([], []) and "arrowhead" not in panel_legend([whole])
    [cut] = draw_panels(rows, [Panel("moved", 2.0, [Mark("bar", float, "k")], "linear", limits=(0, unit))])
    assert cut.beyond == ([], [1])


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


def test_the_suffix_is_the_format_and_others_are_refused() -> None:
    assert [plot_suffix(path) for path in ("a.png", "b/c.SVG", "x.y.pdf")] == [".png", ".svg", ".pdf"]
    for path in ("a", "a.jpg", "", "png", ".png/", "-"):
        with pytest.raises(UsageError, match="plots are PNG, SVG or PDF files"):
            plot_suffix(path)


@pytest.mark.skipif(os.name != "posix", reason="a device of POSIX")
def test_a_device_takes_a_png(tmp_path: Path) -> None:
    assert plot_suffix("/dev/null") == ".png"
    with pytest.raises(UsageError):
        plot_suffix(str(tmp_path))


def page(**more: object) -> object:
    return page_of(["conv1", "fc"], {"weights": 2.6, "zeros": 2.6}, "a net", [("a line", "red")], **more)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_figure_has_the_same_bytes(suffix: str) -> None:
    assert figure_bytes(page(), suffix, {"model": "a"}) == figure_bytes(page(), suffix, {"model": "a"})


def test_provenance_is_in_every_format() -> None:
    provenance = {"model": "a\x1b", "findings": [1, None]}
    assert read_provenance(figure_bytes(page(), ".png", provenance)) == provenance
    text = '{"model":"a\\u001b","findings":[1,null]}'
    document = xml.dom.minidom.parseString(figure_bytes(page(), ".svg", provenance))
    assert document.getElementsByTagName("dc:description")[0].firstChild.data == text
    assert b"/Keywords" in figure_bytes(page(), ".pdf", provenance)


def test_settings_around_us_change_nothing() -> None:
    plain = figure_bytes(page(), ".png")
    with matplotlib.rc_context({"figure.dpi": 30, "font.size": 30, "savefig.bbox": "tight", "axes.facecolor": "red"}):
        assert figure_bytes(page(), ".png") == plain
        assert matplotlib.rcParams["font.size"] == 30
    before = dict.copy(matplotlib.rcParams)  # an error gives them back too
    with pytest.raises(ZeroDivisionError), plain_settings():
        raise ZeroDivisionError
    assert dict.copy(matplotlib.rcParams) == before


def test_text_is_text() -> None:
    text = write(page(), 0, 0, "$x$\x1b[2J\n")
    assert (text.get_text(), text.get_parse_math()) == ("$x$\\x1b[2J\\n", False)
    names = ["$\\frac$", "a\nb", "c" * 300, "", "wide 漢字"]
    figure = page_of(names, {"$": 2.6}, "$_", [("$^", "red")], marked={1: "$"})
    assert "…" in figure.axes[0].texts[3].get_text()
    with Image.open(io.BytesIO(figure_bytes(figure, ".svg") and figure_bytes(figure, ".png"))) as image:
        assert image.width < 1500


def labels(figure: object) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts[1:]]


def test_a_page_is_as_high_as_its_rows() -> None:
    assert figure_bytes(page_of([], {"a": 2.6}, "b"), ".png")
    small, large = (page_of([f"layer{n}" for n in range(count)], {"a": 2.6}, "b") for count in (10, 300))
    heights = [figure.get_size_inches()[1] for figure in (small, large)]
    rows = [figure.axes[0].bbox.height / figure.dpi for figure in (small, large)]
    assert heights[1] - heights[0] == pytest.approx(rows[1] - rows[0]) == pytest.approx(29 * rows[0])
    assert len(labels(large)) == 300


def test_very_many_rows_are_labelled_where_they_can_be_read() -> None:
    figure = page_of([f"layer{n}" for n in range(1500)], {"a": 2.6}, "b", marked={1001: "look", 1002: "here"})
    assert figure.get_size_inches()[1] < 80
    shown = labels(figure)
    assert {"layer1001", "layer1002", "layer0"} <= set(shown)
    assert 300 < len(shown) < 1200


def test_rows_run_from_top_to_bottom_and_marked_ones_have_a_ground() -> None:
    figure = page_of(["a", "b", "c"], {"one": 2.6, "two": 2.6}, "head", marked={1: "broken"})
    for axes in figure.axes:
        assert axes.get_ylim() == (2.5, -0.5)
    pixels = np.asarray(Image.open(io.BytesIO(figure_bytes(figure, ".png"))).convert("RGB")).astype(int)
    tinted = ((pixels[..., 0] > 245) & (pixels[..., 2] < 235) & (pixels[..., 1] > 220)).any(axis=1)
    assert tinted.any()
    assert figure.axes[-1].texts[-1].get_text() == "broken"


def test_a_short_label_still_tells_its_layer() -> None:
    names = [f"encoder.layers.encoder_layer_{at}.self_attention.in_proj_weight" for at in range(12)]
    for most, begin in ((56, "encoder…encoder_layer_"), (50, "…encoder_layer_")):
        shorter = [short_label(name, most) for name in names]
        assert len(set(shorter)) == 12 and all(len(label) <= most for label in shorter)
        assert all(label.startswith(begin) for label in shorter)
    assert short_label("a.b", 3) == "a.b"
    assert short_label("x" * 40, 11) == "x" * 5 + "…" + "x" * 5
