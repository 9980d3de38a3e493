"""Helpers for plots: settings, suffixes, bytes, pages of rows."""

import io
import os
import xml.dom.minidom
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from hookscope.drawing.files import read_provenance
from hookscope.drawing.plot import (
    SUFFIXES,
    figure_bytes,
    plain_settings,
    plot_suffix,
    short_label,
    write,
)
from hookscope.errors import UsageError
from tests.drawing.rows import page_of


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
