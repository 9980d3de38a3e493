"""The page of a comparison: its numbers against the facts, and in a browser."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hookscope.comparison import Answer
from hookscope.errors import WriteError
from hookscope.report import draw_comparison_page
from tests.comparison.example import SIDE, example, maps, pair


def cells(html: str) -> list[list[str]]:
    """The values that each row of a pair is sorted by."""
    rows = re.findall(r"<tr id=\"call=\d+\"[^>]* data-call.*?</tr>", html, re.DOTALL)
    return [re.findall(r"data-value=\"(.*?)\"", row) for row in rows]


def test_the_numbers_of_the_page_are_those_of_the_pairs() -> None:
    comparison = example(30)
    html = draw_comparison_page(comparison)
    heads = re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", html[html.index('data-rows="pairs"') :])
    rows = [dict(zip(heads, row, strict=False)) for row in cells(html)]
    assert [row["layer"] for row in rows] == [each.key for each in comparison.calls]
    for row, each in zip(rows, comparison.calls, strict=True):
        assert each.difference is not None and each.difference.relative_l2 is not None
        assert float(row["relative_l2"]) == each.difference.relative_l2
        assert [row[name] for name in ("isolated_l2", "cka", "noise", "parameters")] == [
            "" if value is None else json.dumps(value)
            for value in (each.isolated_l2, each.cka, each.noise, each.parameters)
        ]
    assert not {"layer_b", "paired_by", "dead_a"} & {*heads}
    assert comparison.answer.sentence in html and "1 image was lost" in html


def test_a_page_says_how_pairs_differ() -> None:
    nan = pair("nan", 1, 0.1)
    assert nan.difference is not None
    other = pair("other", 5, 0.1, b=pair("theirs", 5, kind="Conv").a, paired_by="map")
    pairs = (
        pair("same", 0),
        replace(nan, difference=replace(nan.difference, nonfinite_b=3)),
        pair("shapes", 2, None, shape_b=(4,)),
        pair("inf", 3, math.inf),
        pair("noise", 4, 1e-6, noise=1e-6),
        other,
    )
    comparison = replace(example(), calls=pairs, answer=Answer("layer", "", "", 0, ""), agreement=None, matrix=None)
    html = draw_comparison_page(comparison)
    assert [row[2] for row in cells(html)] == ["same", "NaN or Inf", "other shapes", "differs", "noise", "differs"]
    assert "Infinity" in cells(html)[3] and "8×16×16 / 4" in html and "theirs" in html and "Conv2d / Conv" in html


def test_a_large_page_has_fewer_channels_and_says_so() -> None:
    comparison = replace(example(), maps=(maps("layer1.0.relu", channels=range(16), size=64),), matrix=None)
    whole = draw_comparison_page(comparison, max_size=None)
    size = len(whole.encode())
    small = draw_comparison_page(comparison, max_size=size - 1)
    assert small.count('class="trio"') == 15 and "1 channel not on the page" in small and len(small) < size
    with pytest.raises(WriteError, match="does not fit into 1,000 bytes"):
        draw_comparison_page(comparison, max_size=1000)


def test_maps_of_one_position_are_numbers() -> None:
    kept = maps("head", size=1)
    b = np.array(kept.a) + 1
    html = draw_comparison_page(replace(example(), maps=(replace(kept, b=b),)))
    assert 'class="trio"' not in html and f"<td>{float(kept.a[0, 0, 0]):.4g}</td>" in html


def test_random_weights_of_one_side_are_said() -> None:
    html = draw_comparison_page(replace(example(), b=replace(SIDE, weights="random (seed 0)")))
    assert "<title>RANDOM WEIGHTS: resnet18 and resnet18: Comparison</title>" in html and "B is not trained" in html
    untrained = replace(SIDE, weights="random (seed 0)")
    assert "Neither network is trained:" in draw_comparison_page(replace(example(), a=untrained, b=untrained))


def test_the_page_reads_its_numbers_to_pointer_and_keyboard(opened: Any) -> None:
    comparison = example(30)
    page = opened(draw_comparison_page(comparison))
    matrix = page.locator(".matrix svg")
    matrix.scroll_into_view_if_needed()
    box, cka = matrix.bounding_box(), comparison.matrix
    assert cka is not None
    page.mouse.move(box["x"] + box["width"] * 3.5 / 28, box["y"] + box["height"] * 5.5 / 28)
    said = page.locator(".matrix .reading")
    assert said.inner_text() == f"A {cka.names_a[5]}, B {cka.names_b[3]}: {round(cka.values[5, 3], 4)}"
    page.mouse.move(0, 0)
    matrix.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert said.inner_text() == f"A {cka.names_a[0]}, B {cka.names_b[1]}: {round(cka.values[0, 1], 4)}"
    page.get_by_role("button", name="isolated_l2", exact=True).click()
    shown = page.locator(".calls tbody tr:visible th").all_inner_texts()
    order = sorted(comparison.calls, key=lambda each: -(each.isolated_l2 or 0))
    assert shown[:3] == [each.key for each in order[:3]]
