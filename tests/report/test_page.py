"""Tests of how a page is put together, and that an installed package has what it is made of."""

import base64
import hashlib
import html
import re
import zipfile
from pathlib import Path

import pytest
import torch

import hookscope.report
from hookscope.errors import UsageError
from hookscope.report.page import render
from tests.report.example import HOSTILE

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
