"""How a page is put together, and what is true of every page: names are text, and it fits a telephone and the dark."""

import base64
import hashlib
import html
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookscope
import hookscope.report
from hookscope.errors import UsageError
from hookscope.report import (
    draw_comparison_page,
    draw_exemplars_page,
    draw_page,
    draw_training_page,
    draw_weights_page,
)
from hookscope.report.page import render
from hookscope.training import Run
from tests.comparison import example as comparisons
from tests.exemplars.example import layer_in, shapes
from tests.report.example import HOSTILE, example

ROOT = Path(__file__).parents[2]


def test_the_policy_names_the_hashes_of_the_only_style_and_the_only_script():
    facts = {"kind": "Inspection", "title": "net", "is_random": False, "summary": {}, "provenance": {}}
    page = render("base.html", ("page.css",), ("page.js", "list.js"), **facts)
    policy = html.unescape(re.search('http-equiv="Content-Security-Policy" content="(.*?)"', page)[1])
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    for element, rule in (("style", "style-src"), ("script", "script-src")):
        [text] = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_values_are_text(tmp_path, monkeypatch):
    (tmp_path / "one.html").write_text("<p title='{{ value }}'>{{ value }}</p>{{ missing }}")
    monkeypatch.setattr("hookscope.report.page._FOLDER", tmp_path)
    monkeypatch.setattr("hookscope.report.page._environment", hookscope.report.page._environment.__wrapped__)
    page = render("one.html", (), (), value=HOSTILE, missing=None)
    assert "<img" not in page and "\u202e" not in page and "\x1b" not in page and "\u2028" not in page
    assert html.unescape(page).count("{{7*7}}{% x %}<!--\\u202e\\u2028\\x1b[31m\\x07&amp;") == 2


def test_a_wheel_has_templates_styles_and_scripts(tmp_path, monkeypatch):
    build = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(ROOT)
    wheel = zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path)))
    folder = Path(hookscope.report.__file__).parent
    files = {f"hookscope/report/{path.name}" for path in folder.iterdir() if path.is_file()}
    assert {path.rpartition(".")[2] for path in files} == {"py", "pyi", "html", "css", "js"}
    assert files <= set(wheel.namelist())


def test_the_page_of_a_result_is_written_by_its_kind(tmp_path):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()).eval()
    with hookscope.StatisticsCollector(net) as collector, torch.no_grad():
        net(torch.rand(2, 3, 5, 5))
    results = {
        "Statistics of activations": collector.totals,
        "Weights": hookscope.parameter_statistics(net),
        "Gradients": hookscope.layer_gradients(net, torch.rand(1, 3, 5, 5)),
        "Comparison": hookscope.compare(net, net, torch.rand(2, 3, 5, 5)),
    }
    for kind, result in results.items():
        hookscope.write_page(result, tmp_path / "page.html")
        assert f'<p class="kind">{kind}</p>' in (tmp_path / "page.html").read_text()
    with pytest.raises(UsageError, match="there is no page of Sequential"):
        hookscope.write_page(net, tmp_path / "no.html")


def test_the_findings_on_a_result_are_those_of_its_kind():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten()).eval()
    net[0].weight.data[0] = float("nan")
    with hookscope.StatisticsCollector(net) as collector, torch.no_grad():
        net(torch.rand(2, 3, 5, 5))
    gradients = hookscope.layer_gradients(net, torch.rand(1, 3, 5, 5))
    results = collector.totals, hookscope.parameter_statistics(net), gradients
    names = [hookscope.diagnose(result)[0].finding for result in results]
    assert names == ["non-finite", "non-finite", "exploding-gradient"]
    assert hookscope.diagnose([]) == []
    with pytest.raises(UsageError, match="there is no finding of Sequential; there is one of RunningStatistics, Param"):
        hookscope.diagnose(net)


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
    return draw_training_page([Run({"command": [name]}, lines)], title=name)


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
