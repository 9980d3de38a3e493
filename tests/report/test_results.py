"""The pages of statistics, weights, gradients and training runs: against the rows of the commands, and in a browser."""

import contextlib
import io
import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookscope
from hookscope.cli.main import main

STAR = str(Path(__file__).parents[2] / "samples" / "shapes" / "star.png")
COMMANDS = {
    "stats": ("shapes", STAR, "--layer", "features.[0-4]*"),
    "weights": ("shapes", "--layer", "features.3"),
    "gradients": ("shapes", STAR, "--layer", "0:3"),
}
KINDS = [*COMMANDS, "watch"]


def run(*words: str) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0), out.getvalue(), errors.getvalue()


class Tables(HTMLParser):
    """The heads and the values of the rows of each table that can be sorted, and the facts of each view."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[tuple[list[str], list[list[str]]]] = []
        self.views: list[list[str]] = []
        self.inside: str = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        if tag == "table" and fields.get("class") == "calls":
            self.tables.append(([], []))
        if tag == "tr" and self.tables and "data-call" in fields:
            self.tables[-1][1].append([])
        if "data-value" in fields:
            self.tables[-1][1][-1].append(fields["data-value"] or "")
        if tag == "section" and fields.get("class") == "layer":
            self.views.append([])
        self.inside = "head" if tag == "th" and fields.get("scope") == "col" else tag

    def handle_data(self, data: str) -> None:
        if self.inside == "head" and data.strip():
            self.tables[-1][0].append(data.strip())
        if self.inside in ("dt", "dd") and self.views and data.strip():
            self.views[-1].append(data.strip())


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The log of two runs of a net with a dead layer."""
    path = tmp_path_factory.mktemp("log") / "run.ndjson"
    for rate in (0.1, 0.01):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        nn.init.constant_(net[0].bias, -100.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        with hookscope.Monitor(net, optimizer, every=1, log=path):
            for _ in range(6):
                optimizer.zero_grad()
                (net(torch.rand(16, 4)) - 1).square().mean().backward()
                optimizer.step()
    return str(path)


@cache
def made(kind: str, log: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The page of a command, and its answer in JSON."""
    path = folder / f"{kind}.html"
    words = ["show-run", log] if kind == "watch" else [kind, *COMMANDS[kind]]
    status, out, errors = run(*words, "--html", str(path), "--format", "json")
    assert status == 0, errors
    return path.read_text(encoding="utf-8"), json.loads(out)


@pytest.fixture(scope="module")
def page_of(log: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("pages")
    return lambda kind: made(kind, log, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_a_page_are_those_of_the_rows(page_of: Any, kind: str) -> None:
    html, answer = page_of(kind)
    tables = Tables(html).tables
    lists = [answer[name] for name in ("layers", "parameters") if name in answer]
    assert len(tables) == len(lists)
    for (heads, rows), expected in zip(tables, lists, strict=True):
        assert len(rows) == len(expected)
        compared = 0
        for cells, row in zip(rows, expected, strict=True):
            for name, text in zip(heads, cells, strict=True):
                value = row.get(name)
                if isinstance(value, int | float) and not isinstance(value, bool) and name != "findings":
                    assert float(text) == value, name
                    compared += 1
        assert compared > 3 * len(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_view_of_a_row_has_all_its_fields(page_of: Any, kind: str) -> None:
    html, answer = page_of(kind)
    rows = [row for name in ("layers", "parameters") for row in answer.get(name, [])]
    views = Tables(html).views
    assert len(views) == len(rows)
    for view, row in zip(views, rows, strict=True):
        known = {name for name, value in row.items() if value not in (None, "", [], {})}
        assert known - {"name", "layer", "findings"} <= set(view[::2]) | {"findings"}


@pytest.mark.parametrize("kind", KINDS)
def test_findings_come_first_and_causes_before_consequences(page_of: Any, kind: str) -> None:
    html, answer = page_of(kind)
    said = re.findall(r'<span class="of">([a-z-]+)</span></p>', html.partition('id="table=0"')[0])
    assert said == [finding["finding"] for finding in answer["findings"]]
    if kind == "watch":
        assert said[0] == "dead-layer" and '<span class="severity">error</span>' in html


def test_the_histogram_of_weights_is_that_of_numpy() -> None:
    torch.manual_seed(1)
    conv = nn.Conv2d(3, 8, 3)
    weight, bias = hookscope.parameter_statistics(conv, bins=10)
    values = conv.weight.detach().double().numpy()
    assert list(weight.histogram) == np.histogram(values, bins=10, range=(values.min(), values.max()))[0].tolist()
    assert sum(bias.histogram) == 8 and hookscope.parameter_statistics(conv)[0].histogram == ()
    with torch.no_grad():
        conv.weight[0] = torch.nan
        conv.bias.fill_(2.0)
    weight, bias = hookscope.parameter_statistics(conv, bins=10)
    assert (sum(weight.histogram), bias.histogram) == (7 * 27, (*[0] * 5, 8, *[0] * 4))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--html", "page.png"], "cannot write page.png; the page is an HTML file; name it .html"),
        (["--html", "p.html", "--kernels", "p.html"], "sheets are PNG files"),
        (["--html", "p.svg", "--plot", "p.svg"], "name it .html"),
        (["--html", "no/such/p.html"], "no/such"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_first(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, errors = run("weights", "shapes", *words)
    assert status and not out and message in errors and not list(tmp_path.iterdir())


# In the browser.


def shown(page: Any) -> list[str]:
    return page.locator("table.calls").first.locator("tbody tr:not([hidden]) th bdi").all_inner_texts()


def test_columns_sort_as_numpy_does(opened: Any, page_of: Any) -> None:
    html, answer = page_of("stats")
    page = opened(html)
    table = page.locator("table.calls").first
    names = [row["name"] for row in answer["layers"]]
    for field in ("std", "max"):
        table.get_by_role("button", name=field, exact=True).click()
        order = np.argsort([-row[field] for row in answer["layers"]], kind="stable")
        assert shown(page) == [names[at] for at in order]


def test_a_filter_and_the_keyboard_lead_to_a_row_and_back(opened: Any, page_of: Any) -> None:
    html, _ = page_of("stats")
    page = opened(html)
    page.keyboard.press("/")
    page.keyboard.type("features.4 conv2d")
    assert page.locator(".shown").first.inner_text().startswith("3 of ")
    page.keyboard.press("Enter")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.locator(".layer.open").wait_for()
    assert page.locator(".layer.open h2").inner_text() == "features.4.expand1x1"
    page.keyboard.press("Escape")
    page.locator("#overview").wait_for()
    assert page.evaluate("document.activeElement.closest('tr') !== null")


def test_a_click_on_a_row_opens_it(opened: Any, page_of: Any) -> None:
    html, answer = page_of("weights")
    page = opened(html)
    page.locator("table.calls tbody tr").nth(2).locator("td").nth(1).click()
    page.locator(".layer.open").wait_for()
    assert page.locator(".layer.open h2").inner_text() == answer["parameters"][2]["name"]


def test_both_tables_of_gradients_sort_on_their_own(opened: Any, page_of: Any) -> None:
    html, answer = page_of("gradients")
    page = opened(html)
    before = shown(page)
    second = page.locator("table.calls").nth(1)
    second.get_by_role("button", name="norm", exact=True).click()
    names = [row["name"] for row in sorted(answer["parameters"], key=lambda row: -row["norm"])]
    assert second.locator("tbody th bdi").all_inner_texts() == names and shown(page) == before


def test_the_value_under_the_pointer_is_that_of_the_log(opened: Any, page_of: Any, log: str) -> None:
    html, _ = page_of("watch")
    page = opened(html)
    runs = hookscope.read_runs(log)
    chart = page.locator(".chart").first  # the loss of both runs
    chart.scroll_into_view_if_needed()
    box = chart.locator(".curves").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 3 / 5, box["y"] + 20)
    said = chart.locator(".reading").inner_text()
    losses = [next(row["loss"] for row in run.rows if row["step"] == 3) for run in runs]
    assert said.startswith("step 3: run 1") and [float(n) for n in re.findall(r" (\d\.\d+)", said)] == [
        pytest.approx(loss, rel=1e-5) for loss in losses
    ]
    chart.locator(".curves").focus()
    page.mouse.move(0, 0)
    page.keyboard.press("ArrowRight")
    assert chart.locator(".reading").inner_text().startswith("step 0: run 1")


def test_without_scripts_tables_curves_and_views_are_there(opened: Any, page_of: Any) -> None:
    html, answer = page_of("watch")
    page = opened(html, scripts=False)
    assert page.locator("table.calls tbody tr").count() == len(answer["layers"])
    assert page.locator(".layer:visible").count() == len(answer["layers"])
    assert page.locator(".chart path.line:visible").count() > 4


def test_runs_of_other_scripts_in_the_log_are_counted_and_not_drawn(log: str, tmp_path: Path) -> None:
    both, page = tmp_path / "both.ndjson", tmp_path / "page.html"
    [_, first, second] = Path(log).read_text().split('{"row": "run"')
    runs = {"a.py": first, "b.py": first, "a.py --long": second}
    both.write_text(
        "".join(
            '{"row": "run"' + text.replace('"command": null', f'"command": {json.dumps(command.split())}')
            for command, text in runs.items()
        )
    )
    status, out, _ = run("show-run", str(both), "--html", str(page), "--format", "table")
    assert status == 0 and "a.py --long, started" in out
    assert "the last of 3 runs in the log (2 of a.py, 1 of b.py)" in " ".join(out.split())
    numbers = re.findall(r'class="numbers">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert [line["name"][:5] for line in json.loads(numbers[0])["lines"]] == ["run 1", "run 2"]


def test_the_page_grows_with_the_log(log: str, tmp_path: Path) -> None:
    """Run again, the command writes the page anew with what the log has then."""
    lines = Path(log).read_text().splitlines(keepends=True)
    part, page = tmp_path / "part.ndjson", tmp_path / "page.html"
    sizes = []
    for share in (len(lines) // 4, len(lines)):
        part.write_text("".join(lines[:share]))
        assert run("show-run", str(part), "--html", str(page))[0] == 0
        numbers = re.findall(r'class="numbers">(.*?)</script>', page.read_text(encoding="utf-8"))
        sizes.append([len(line["xs"]) for line in json.loads(numbers[0])["lines"]])
    assert len(sizes[0]) == 1 and sizes[1] == [6, 6] and sizes[0][0] < 6
