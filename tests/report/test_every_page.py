"""What is true of every page: names are text, nothing is asked for, and it fits a telephone and the dark."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hookscope
from hookscope.report import (
    draw_comparison_page,
    draw_exemplars_page,
    draw_page,
    draw_training_page,
    draw_weights_page,
)
from tests.comparison import example as comparisons
from tests.exemplars.example import layer_in, shapes
from tests.report.example import HOSTILE, example

RANDOM = "random (seed 0)"


def inspection(folder: Path, name: str) -> str:
    return draw_page(example(name=name, images=2, weights=RANDOM))


def comparison(folder: Path, name: str) -> str:
    found, side = comparisons.example(30, name=name, images=[name] * 4), replace(comparisons.SIDE, weights=RANDOM)
    return draw_comparison_page(replace(found, a=replace(side, model=name), b=side, unpaired_a=(found.calls[1].a,)))


def exemplars(folder: Path, name: str) -> str:
    layer, net = layer_in(folder, name=name), replace(shapes(), weights=RANDOM)
    hostile = replace(layer.channels[0].most[0], name=name, label=name)
    layer = replace(layer, channels=(replace(layer.channels[0], most=(hostile,), best_class=name), *layer.channels[1:]))
    return draw_exemplars_page([layer], net, title=name, provenance={"a": name})


def weights(folder: Path, name: str) -> str:
    net = nn.Sequential()
    net.add_module(name.replace(".", ""), nn.Linear(2, 2))
    return draw_weights_page(hookscope.parameter_statistics(net, bins=3), title=name, weights=RANDOM)


def training(folder: Path, name: str) -> str:
    lines = [{"step": n, "layer": name, "gradient_norm": 1.0} for n in range(3)]
    return draw_training_page([hookscope.Run({"command": [name]}, lines)], title=name)


PAGES = [inspection, comparison, exemplars, weights, training]
Draw = Callable[[Path, str], str]


@pytest.mark.parametrize("draw", PAGES)
def test_names_are_text_and_a_page_asks_for_nothing(draw: Draw, opened: Any, tmp_path: Path) -> None:
    html = draw(tmp_path, HOSTILE)
    assert "<img src=x" not in html and "\u202e" not in html and "style=" not in html
    assert html.count("</script>") == 1 + html.count('<script type="application/json"')
    assert "default-src &#39;none&#39;" in html and not re.search(r"(src|href)=\"(?!data:|#)", html)
    page = opened(html)
    assert page.locator("img[src='x']").count() == 0 and "onerror=alert" in page.locator("h1").inner_text()


@pytest.mark.parametrize("draw", PAGES[:-1])
def test_random_weights_are_said(draw: Draw, tmp_path: Path) -> None:
    html = draw(tmp_path, "star")
    assert 'class="band"' in html and "<title>RANDOM WEIGHTS: " in html


@pytest.mark.parametrize("scripts", [True, False])
@pytest.mark.parametrize("draw", PAGES)
def test_a_page_fits_a_telephone_and_the_dark(draw: Draw, scripts: bool, opened: Any, tmp_path: Path) -> None:
    page = opened(draw(tmp_path, HOSTILE), width=400, height=800, color_scheme="dark", scripts=scripts)
    for hash in ("", "#layer=0") if scripts else ("",):
        page.evaluate("hash => { location.hash = hash }", hash)
        assert page.evaluate("document.scrollingElement.scrollWidth") == 400
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


@pytest.mark.parametrize("draw", PAGES)
def test_the_judge_of_accessibility_finds_nothing(draw: Draw, opened: Any, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(draw(tmp_path, "star"))
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    found = axe.run(page).response
    assert len(found["passes"]) > 20
    assert [(rule["id"], node["html"]) for rule in found["violations"] for node in rule["nodes"]] == []
