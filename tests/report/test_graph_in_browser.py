"""In a browser: the network as a graph, and how long a click on a large page takes until the next frame is drawn."""

import html
import statistics
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torchvision
from PIL import Image
from torch import nn

import hookscope
from hookscope.errors import printable
from hookscope.findings import Finding
from hookscope.hooks import Call
from hookscope.report import draw_page
from tests.helpers import seeded
from tests.report.example import HOSTILE, example


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        return self.head((x + self.second(x)).mean((2, 3)))


@cache
def drawn():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    inspection = hookscope.inspect(seeded(Net), Image.fromarray(pixels))
    dead = Finding("dead-channels", "first.1", "1 of 4 channels never leaves 0", "Look.", channels=(1,))
    return draw_page(replace(inspection, findings=(dead,)))


def view_box(page):
    return [float(number) for number in page.locator(".graph-frame:visible svg").get_attribute("viewBox").split()]


def shown(page):
    return page.locator(".graph-frame:visible .node text:first-of-type").all_text_contents()


def test_a_page_without_sources_has_no_graph():
    assert 'id="graph"' not in draw_page(example())


def test_the_box_of_a_layer_with_a_finding_is_coloured(opened):
    page = opened(drawn())
    marked, plain = page.locator(".graph-frame:visible .node-warning"), page.locator(".graph-frame:visible .node-layer")
    assert marked.count() == 1 and "1 of 4 channels never leaves 0" in marked.text_content()
    assert marked.locator("text").first.text_content() == "first.1"
    fills = [node.locator("rect, polygon").evaluate("box => getComputedStyle(box).fill") for node in plain.all()]
    assert len(set(fills)) == 2
    page.locator("[data-action='fewer']").click()
    assert page.locator(".graph-frame:visible .node-warning text").first.text_content() == "first"


def test_a_box_leads_to_the_view_of_its_layer_and_back(opened):
    page = opened(drawn())
    page.locator(".graph-frame:visible a", has_text="second.0").click()
    page.locator("section.layer.open").wait_for()
    assert page.locator("section.layer.open h2").inner_text() == "second.0"
    page.keyboard.press("Escape")
    assert page.locator("#graph").is_visible() and not page.locator("section.layer.open").count()


def test_buttons_and_keys_zoom_and_move(opened):
    page = opened(drawn())
    frame = page.locator(".graph-frame:visible")
    frame.focus()
    start = view_box(page)
    page.keyboard.press("+")
    near = view_box(page)
    assert np.allclose(near[2:], np.array(start[2:]) / 1.25)
    page.keyboard.press("-")
    assert np.allclose(view_box(page), start, atol=0.6)
    page.keyboard.press("ArrowDown")
    assert view_box(page)[1] > start[1]
    page.keyboard.press("0")
    whole = view_box(page)
    assert whole[:2] == [0, 0]
    page.locator("[data-action='in']").click()
    assert view_box(page)[2] < whole[2]
    page.locator("[data-action='all']").click()
    assert view_box(page) == whole


def test_the_wheel_zooms_where_the_pointer_is_only_after_a_click(opened):
    page = opened(drawn())
    frame = page.locator(".graph-frame:visible")
    frame.scroll_into_view_if_needed()
    box = frame.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 100)
    start = view_box(page)
    page.mouse.wheel(0, -100)
    page.wait_for_timeout(50)
    assert view_box(page) == start
    frame.focus()
    page.mouse.wheel(0, -100)
    svg = "document.querySelector('.graph-frame:not([hidden]) svg')"
    page.wait_for_function(f"width => {svg}.viewBox.baseVal.width < width", arg=start[2])


def test_a_drag_moves_the_graph_and_follows_no_link(opened):
    page = opened(drawn())
    page.locator("#graph").scroll_into_view_if_needed()
    start, box = view_box(page), page.locator("#graph a:visible").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 90, box["y"] + 60, steps=4)
    page.mouse.up()
    assert view_box(page)[:2] != start[:2] and view_box(page)[2:] == start[2:]
    assert page.locator("section.layer.open").count() == 0


def test_there_are_fewer_and_more_blocks(opened):
    page = opened(drawn())
    deep = shown(page)
    page.locator("[data-action='fewer']").click()
    few = shown(page)
    assert len(few) < len(deep) and "first" in "".join(few)
    assert page.locator("#graph .shown").inner_text() == "3 blocks and layers"
    assert page.locator("[data-action='fewer']").is_disabled()
    page.locator("[data-action='more']").click()
    assert shown(page) == deep


def test_without_scripts_the_graph_is_a_picture(opened):
    page = opened(drawn(), scripts=False)
    assert page.locator(".graph-frame:visible").count() == 1
    assert page.locator(".graph-frame:visible svg").bounding_box()["height"] > 300
    assert not page.locator("[data-action='in']").is_visible()


def test_names_in_the_graph_stay_text():
    net = nn.Sequential()
    net.add_module(HOSTILE.replace(".", ""), nn.Conv2d(3, 2, 1))
    page = draw_page(hookscope.inspect(net, Image.new("RGB", (8, 8))))
    graph = page[page.index('id="graph"') : page.index('id="network"')]
    assert (
        "<img" not in graph and "<script" not in graph and printable(HOSTILE.replace(".", "")) in html.unescape(graph)
    )


def test_axe_finds_nothing_in_the_graph(opened):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    assert axe.run(opened(drawn()), "#graph").response["violations"] == []


FRAME = "new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn)))"


def milliseconds(page, action: str) -> float:
    """The processor time of the page's thread from `action`, JavaScript, until its frame is drawn; median of five.

    A clock would also count what else runs on the machine.
    """
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def used() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1000 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    times = []
    for _ in range(5):
        page.wait_for_timeout(300)  # until nothing is left to draw
        before = used()
        page.evaluate(f"async () => {{ {action}; await {FRAME} }}")
        times.append(used() - before)
    return statistics.median(times)


def list_times(page):
    typed = "filter.value = filter.value ? '' : 'conv'; filter.dispatchEvent(new Event('input'))"
    return {
        "sort": milliseconds(page, "document.querySelectorAll('.calls thead button')[5].click()"),
        "in order": milliseconds(page, "document.querySelectorAll('.calls thead button')[0].click()"),
        "filter": milliseconds(page, f"const filter = document.getElementById('filter-0'); {typed}"),
        "fold": milliseconds(page, "document.querySelector('.fold').click()"),
        "fold all": milliseconds(page, "document.querySelector('.unfold').click()"),
    }


@pytest.mark.slow
def test_a_list_of_a_thousand_calls_answers_soon(opened):
    found = example()
    calls = [
        replace(
            found.calls[0], call=Call(f"stage{at // 100}.{at // 10 % 10}.conv{at % 10}", "Conv2d", 0, at, at), macs=at
        )
        for at in range(1000)
    ]
    page = opened(draw_page(replace(found, calls=tuple(calls))))
    page.get_by_role("button", name="Unfold all").click()
    times = list_times(page)
    assert max(times.values()) <= 200, times


@pytest.mark.slow
def test_a_page_of_resnet34_is_small_and_answers_at_once(opened):
    net = seeded(lambda: torchvision.models.resnet34(num_classes=1000))
    html = draw_page(hookscope.inspect(net, Image.effect_mandelbrot((320, 320), (-3, -2.5, 2, 2.5), 100)))
    assert len(html.encode()) <= 6_000_000
    page = opened(html)
    assert page.locator("section.layer").count() == 36
    go = "location.hash = location.hash.endsWith('layer=35') ? '{}' : 'layer=35'"
    times = list_times(page) | {
        "open the widest": milliseconds(page, go.format("layer=0")),
        "open the deepest": milliseconds(page, go.format("")),
        "open a channel": milliseconds(page, "location.hash = 'layer=30&channel=' + Math.floor(Math.random() * 512)"),
        "go back": milliseconds(page, "location.hash = location.hash ? '' : 'layer=1'"),
    }
    assert max(times.values()) <= 100, times
