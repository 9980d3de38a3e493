"""How a page and its list are put together, and what is true of every page: names are text, it fits a telephone."""

import base64
import hashlib
import html
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

import hookscope
import hookscope.report
from hookscope.display import engineering
from hookscope.errors import UsageError
from hookscope.hooks import Call
from hookscope.inspection import CallFacts
from hookscope.report import draw_comparison_page, draw_exemplars_page, draw_page, draw_training_page, draw_weights_page
from hookscope.report.charts import outline
from hookscope.report.inspection import network_rows
from hookscope.report.page import render
from hookscope.training import Run
from tests.comparison import example as comparisons
from tests.exemplars.example import layer_in, shapes
from tests.helpers import seeded
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


@pytest.mark.parametrize(("draw", "hash"), [*((draw, "") for draw in PAGES), (inspection, "#layer=0&channel=1")])
def test_the_judge_of_accessibility_finds_nothing(draw: Draw, hash: str, opened: Any, tmp_path: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(draw(tmp_path, "star"), hash)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    found = axe.run(page).response
    assert len(found["passes"]) > 20
    assert [(rule["id"], node["html"]) for rule in found["violations"] for node in rule["nodes"]] == []


@pytest.fixture(scope="module")
def resnet():
    net = seeded(lambda: torchvision.models.resnet18(num_classes=3))
    return net, hookscope.inspect(net, [Image.new("RGB", (64, 64), "teal")])


def test_a_module_has_the_parameters_that_torch_counts_in_it(resnet):
    net, inspection = resnet
    modules = [row for row in network_rows(inspection) if row.is_module]
    assert [row.name for row in modules if not row.parents] == ["layer1", "layer2", "layer3", "layer4"]
    for row in modules:
        assert row.params == sum(parameter.numel() for parameter in net.get_submodule(row.name).parameters())
    whole = re.findall(r"(?:Parameters|accumulates)</dt><dd>(.*?)</dd>", draw_page(inspection))
    macs = sum(row.macs for row in network_rows(inspection) if not row.parents)
    assert whole == [engineering(sum(parameter.numel() for parameter in net.parameters())), engineering(macs)]


def test_rows_are_in_order_of_execution_each_in_its_modules(resnet):
    _, inspection = resnet
    rows = network_rows(inspection)
    assert [row.number for row in rows] == list(range(len(rows)))
    calls = [row for row in rows if not row.is_module]
    assert [row.name for row in calls] == [facts.call.key for facts in inspection.calls]
    for row in rows:
        for parent in row.parents:
            assert row.name.startswith(f"{rows[parent].name}.") and parent < row.number
    by_name = {row.name: row for row in rows}
    assert by_name["layer2.0"].orders == f"{by_name['layer2.0.conv1'].orders}–{by_name['layer2.0.relu#1'].orders}"
    assert by_name["layer2"].cam_of == "layer2.1.conv2"  # of the last layer in it


def test_few_rows_are_open_at_first(resnet):
    _, inspection = resnet
    rows = network_rows(inspection)
    seen = [row for row in rows if all(rows[parent].is_open for parent in row.parents)]
    assert len(seen) <= 40 and any(row.is_open for row in rows)
    assert all(row.is_open for row in network_rows(example()) if row.is_module)  # a small one is all open


def facts(name, order, params=0, macs=0, call=0):
    return CallFacts(Call(name, "Conv2d", call, None, order), (1,), params, macs, 0, 0, 0, 0, 0, (1,))


def with_calls(*calls):
    inspection = example()
    return type(inspection)(**{**vars(inspection), "calls": calls, "layers": (), "places": ()})


def test_a_layer_that_is_called_twice_has_its_parameters_once():
    rows = network_rows(with_calls(facts("head.conv", 0, 10, 100), facts("head.conv", 1, 10, 100, call=1)))
    assert [(row.name, row.params, row.macs) for row in rows] == [
        *[("head", 10, 200), ("head.conv", 10, 100), ("head.conv#1", 10, 100)]
    ]
    assert [row.number for row in rows] == [0, 1, 2]


def test_a_module_that_runs_twice_stands_where_it_runs():
    rows = network_rows(with_calls(facts("a.0", 0), facts("a.1", 1), facts("b", 2), facts("a.0", 3), facts("a.1", 4)))
    assert [row.name for row in rows] == ["a", "a.0", "a.1", "b", "a", "a.0", "a.1"]
    assert [row.parents for row in rows] == [(), (0,), (0,), (), (), (4,), (4,)]


def test_a_block_is_the_head_of_the_calls_in_it():
    block = facts("block", None, 5)
    rows = network_rows(with_calls(facts("block.0", 0, 1), facts("block.1", 1, 2), block, facts("", 2, 3)))
    assert [(row.label, row.is_module, row.is_call, row.params, row.calls) for row in rows] == [
        ("block", True, False, 8, 2),
        ("0", False, True, 1, 1),
        ("1", False, True, 2, 1),
        ("(model)", False, True, 3, 1),
    ]
    assert rows[0].facts is block


def test_the_outline_of_a_distribution_has_square_roots_of_its_numbers():
    assert outline((4, 0, 1)) == "M0 20V0h1V20h1V10h1V20Z"
    assert outline((0, 0)) == "M0 20V20h1V20h1V20Z"
    assert len(outline(tuple(np.random.default_rng(0).integers(0, 10**9, 32)))) < 400
