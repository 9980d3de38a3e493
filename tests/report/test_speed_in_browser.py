"""How large a page is, and how long a click on it takes until the next frame is drawn."""

import statistics
from dataclasses import replace

import pytest
import torchvision
from PIL import Image

import hookscope
from hookscope.hooks import Call
from hookscope.report import draw_page
from tests.helpers import seeded
from tests.report.example import example

pytestmark = pytest.mark.slow

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
