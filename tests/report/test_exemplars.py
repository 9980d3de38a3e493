"""The page of exemplars, and exemplars in the page of an inspection."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hookscope.errors import UsageError
from hookscope.exemplars import cut_crops
from hookscope.report import draw_exemplars_page, draw_page
from tests.exemplars.example import layer_in, shapes
from tests.report.example import example


def pictures(html: str) -> list[Image.Image]:
    """The pictures in the strips of a page."""
    strips = "".join(re.findall(r'<ul class="strip">(.*?)</ul>', html, re.DOTALL))
    addresses = re.findall(r'src="data:image/\w+;base64,([^"]+)"', strips)
    return [Image.open(io.BytesIO(base64.b64decode(address))) for address in addresses]


def test_the_page_has_crops_values_classes_and_selectivity(tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    crops = cut_crops(shapes(), [layer])
    html = draw_exemplars_page([layer], shapes(), crops)
    shown = pictures(html)
    assert len(shown) == 2 * 4 + 1
    expected = crops[layer.key, layer.channels[0].most[0]].image
    assert expected is not None and np.array_equal(np.asarray(shown[0].convert("RGB")), np.asarray(expected))
    assert re.findall(r'class="amount">([^<]+)', html)[:5] == ["9.5", "8.5", "7.5", "7.5", "19"]
    assert "ring 2, star 1" in html and "2.00 × the best" in html and "15×15 pixels" in html
    assert html.count("data-call") == 2 and 'data-value="0.25"' in html


def test_a_large_page_has_the_first_channels_of_each_layer(tmp_path: Path) -> None:
    layers = [layer_in(tmp_path, channels=60), layer_in(tmp_path, channels=20, name="features.4")]
    crops = cut_crops(shapes(), layers)
    whole = draw_exemplars_page(layers, shapes(), crops)
    small = draw_exemplars_page(layers, shapes(), crops, max_size=120_000)
    assert whole.count("data-call") == 80 and len(small) <= 120_000 < len(whole)
    count = int(re.findall(r"The page has the first (\d+) of 60 channels", small)[0])
    assert small.count("data-call") == count + min(count, 20) and "The page has" not in whole


def test_no_layer_is_an_error() -> None:
    with pytest.raises(UsageError, match="no layer"):
        draw_exemplars_page([], shapes())


def inspected(folder: Path) -> str:
    layer = layer_in(folder, name="features.3.squeeze")
    return draw_page(example(), [layer], cut_crops(shapes(), [layer]))


def test_the_page_of_an_inspection_has_them_in_the_view_of_their_layer(tmp_path: Path) -> None:
    html = inspected(tmp_path)
    view = html.partition('data-layer="1"')[2].partition("</section>")[0]
    assert "Exemplars of 2 channels among 3 images" in view and len(pictures(view)) == len(pictures(html)) == 9
    assert "Exemplars of" not in draw_page(example())


# In the browser.


def test_rows_are_sorted_by_selectivity_and_filtered_by_class(opened: Any, tmp_path: Path) -> None:
    layer = layer_in(tmp_path)
    second = replace(layer.channels[1], selectivity=0.75, best_class="cross", classes=(("cross", 3),))
    page = opened(draw_exemplars_page([replace(layer, channels=(layer.channels[0], second))], shapes()))
    shown = "table.calls tbody tr:not([hidden]) th"
    page.get_by_role("button", name="selectivity").click()
    assert page.locator(shown).all_inner_texts() == ["1", "0"]
    page.keyboard.press("/")
    page.keyboard.type("ring")
    assert page.locator(shown).all_inner_texts() == ["0"]
    assert page.locator(".shown").inner_text() == "1 of 2 channels"


def test_an_enlarged_channel_shows_its_exemplars_folded(opened: Any, tmp_path: Path) -> None:
    page = opened(inspected(tmp_path), "#layer=1&channel=0")
    folded = page.locator(".layer.open .enlarged .exemplars-of")
    folded.locator("summary").click()
    assert folded.locator("img:visible").count() == 5 and "selectivity 0.25 for ring" in folded.inner_text()
    page.evaluate("location.hash = 'layer=1&channel=3'")
    page.wait_for_function("document.querySelector('.layer.open .enlarged h3').textContent.includes('3')")
    assert not folded.is_visible()  # the file has no exemplars of channel 3
