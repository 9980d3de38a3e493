"""The page of an inspection, in a browser too, and the small picture of it."""

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from hookscope.drawing import palette
from hookscope.errors import printable
from hookscope.models import short_name
from hookscope.report import draw_overview, draw_page
from tests.report.example import HOSTILE, example


def lacking(**facts):
    """The page of an inspection of one image, with other facts of the image or of the inspection."""
    found = example()
    of_image = {name: facts.pop(name) for name in ("name", "predictions", "cam", "without_cam") if name in facts}
    return draw_page(replace(found, images=(replace(found.images[0], **of_image),), **facts))


def test_what_an_inspection_lacks_is_said():
    image = {"predictions": (), "cam": None, "without_cam": "The model gives boxes."}
    page = lacking(**image, places=(), findings=(), layers=(), calls=(), provenance={})
    assert "No place stands out." in page and "The model gives no scores of classes." in page
    assert "No Grad-CAM: The model gives boxes." in page
    page = lacking(predictions=(replace(example().images[0].predictions[0], probability=float("nan")),))
    assert "The scores are NaN." in page and "nan %" not in page
    assert "1 error, 1 warning, 1 note. The first is the most important." in page
    page = lacking(name="")
    assert "shapes on image 0" in page and 'alt="image 0, as the network saw it"' in page


@pytest.mark.parametrize(("images", "first"), [(1, "answer"), (2, "answer"), (3, "places")])
def test_where_to_look_comes_before_the_answers_of_many_images(images: int, first: str) -> None:
    sections = re.findall(r'<section id="(\w+)"', drawn(images=images))
    assert sections[:2] == [first, "places" if first == "answer" else "answer"]
    assert re.findall(r'<a href="#(answer|places)">', drawn(images=images))[:2] == sections[:2]


def test_a_row_has_the_image_its_cam_and_the_maps_of_the_first_places() -> None:
    found = example()
    pixels = np.asarray(draw_overview(found))
    assert pixels.shape == (256, 3 * 256 + 2 * 8, 3)
    seen = np.asarray(found.images[0].seen)
    assert (pixels[::4, :256:4] == seen).all() and (pixels[:, 256:264] == 128).all()
    # the Grad-CAM is 1 on a diagonal: bright there, the darkened image elsewhere
    cam = pixels[:, 264:520].astype(int).sum(-1)
    assert cam[32, 32] > cam[32, 224] + 100 and cam[224, 224] > cam[224, 32] + 100
    first = found.layers[0].images[0].tiles
    assert first.levels.shape[1:] == (16, 16)
    expected = palette("viridis")[first.levels[first.channels.index(3)]]
    assert (pixels[:124, 528:652][3::8, 3::8][:15, :15] == expected[:15, :15]).mean() > 0.9  # 124 / 16 is not whole
    assert (pixels[132:, 528:] == 128).all()  # two places have maps


def test_images_have_rows_and_their_own_places() -> None:
    found = example(images=5)
    pixels = np.asarray(draw_overview(found))
    assert pixels.shape[0] == 3 * 256 + 2 * 8
    own = [pixels[at : at + 256, 660:] for at in (0, 264, 528)]
    assert not (own[0][:124] == 128).all()  # the second place is about the first image
    assert (own[1] == 128).all() and (own[2] == 128).all()


@pytest.mark.parametrize("size", [(64, 16), (16, 64), (1, 1), (700, 300)])
def test_images_of_any_shape_are_whole_and_keep_it(size: tuple[int, int]) -> None:
    found = example()
    image = replace(found.images[0], seen=Image.new("RGB", size, (250, 0, 0)), cam=None, without_cam="no scores")
    pixels = np.asarray(draw_overview(replace(found, images=(image,), places=())))
    red = (pixels == (250, 0, 0)).all(-1)
    assert pixels.shape == (256, 256, 3) and ((pixels == 128).all(-1) | red).all()
    high, wide = red.any(1).sum(), red.any(0).sum()
    assert max(high, wide) == 256 and wide / high == pytest.approx(size[0] / size[1], rel=0.01)


@cache
def drawn(**options):
    return draw_page(example(**options))


def is_seen(page, selector):
    return page.locator(selector).first.is_visible()


def test_every_link_leads_somewhere(opened):
    page = opened(drawn())
    links = page.eval_on_selector_all("a[href]", "links => links.map(link => link.getAttribute('href'))")
    targets = page.eval_on_selector_all("[id]", "elements => elements.map(element => '#' + element.id)")
    assert len(targets) == len(set(targets))
    assert {re.sub("&.*", "", link) for link in links} <= set(targets)
    assert {"#answer", "#places", "#network", "#provenance", "#layer=0&channel=3", "#layer=2&channel=7&image=0"} <= set(
        links
    )


def test_nothing_hostile_runs(opened):
    page = opened(drawn(name=HOSTILE, images=2))
    shown, title = printable(HOSTILE), printable(short_name(f"shapes {HOSTILE}"))
    assert "<img src=x onerror=alert(1)>" in title and page.title().startswith(f"{title} on ")
    assert page.locator("h1").inner_text() == title
    assert page.locator(".bars th").nth(3).inner_text() == shown
    assert page.locator("#calls tbody th").nth(1).inner_text().strip() == f"features.{shown}"
    assert page.locator("img[src='x']").count() == 0
    for number in range(3):
        page.evaluate(f"location.hash = 'layer={number}'")
        page.locator(f"[data-layer='{number}']").wait_for()
    assert page.locator("h2:visible").first.inner_text() == "classifier.1"


ATTEMPTS = {
    "markup": "document.body.innerHTML = '<b>harm</b>'",
    "script": "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = true'}))",
    "handler": "document.body.setAttribute('onclick', 'window.ran = true')",
    "style": "document.body.setAttribute('style', 'color: red')",
    "image": "document.body.append(Object.assign(new Image(), {src: 'https://example.com/x.png'}))",
    "request": "fetch('https://example.com').catch(() => {})",
}


def test_the_policy_forbids_scripts_styles_and_requests(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(drawn())
    page = browser.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("requestfinished", lambda request: said.append(f"sent {request.url}"))
    page.goto(path.as_uri())
    for name, attempt in ATTEMPTS.items():
        said.clear()
        page.evaluate(f"() => {{ try {{ {attempt} }} catch (error) {{ console.log(`${{error}}`) }} }}")
        page.evaluate("() => new Promise(resolve => setTimeout(resolve, 20))")
        assert page.evaluate("window.ran") is None
        assert not any(text.startswith("sent") for text in said)
        assert any("Content Security Policy" in text or "This document requires" in text for text in said), name
    page.close()


@pytest.mark.parametrize("weights", ["random (seed 0)", "shapes.safetensors"])
def test_random_weights_are_said_everywhere(opened, weights):
    page = opened(drawn(weights=weights))
    is_random = weights.startswith("random")
    assert page.title().startswith("RANDOM WEIGHTS: ") == is_random
    assert page.locator(".band").count() == is_random
    if not is_random:
        return
    page.evaluate("scrollTo({top: document.body.scrollHeight, behavior: 'instant'})")
    band = page.locator(".band").bounding_box()
    assert band["y"] == 0 and "not trained" in page.locator(".band").inner_text()
    page.goto(page.url.split("#")[0] + "#layer=1")
    page.locator("[data-layer='1']").wait_for()
    assert is_seen(page, ".band")
    assert page.title() == "RANDOM WEIGHTS: shapes on star-0.png · features.3.squeeze"
    page.emulate_media(media="print")
    assert is_seen(page, ".band")
    assert page.evaluate("getComputedStyle(document.body).page") == "random"  # whose sheets say it in their margin


def visible_rows(page):
    return page.eval_on_selector_all(
        "#calls tbody tr:not([hidden]) th", "heads => heads.map(head => head.querySelector('bdi').textContent)"
    )


def test_modules_fold(opened):
    page = opened(drawn())
    everything = visible_rows(page)
    assert everything == [
        *["features", "features.star", "features.1", "features.2", "features.3", "features.3.squeeze"],
        *["features.3.squeeze_activation", "classifier.1", "star"],
    ]
    fold = page.get_by_role("button", name="Calls in features.3")
    assert fold.get_attribute("aria-expanded") == "true"
    fold.click()
    assert fold.get_attribute("aria-expanded") == "false"
    assert visible_rows(page) == [*everything[:5], *everything[7:]]
    assert page.locator("#shown-0").inner_text() == "5 of 7 calls"
    page.get_by_role("button", name="Unfold all").click()
    assert visible_rows(page) == everything
    page.get_by_role("button", name="Fold all").click()
    assert visible_rows(page) == ["features", "classifier.1", "star"]


def test_the_list_is_sorted_by_any_column(opened):
    page = opened(drawn())
    calls = [call for call in example().calls if call.call.order is not None]
    for column, key in ((4, "params"), (5, "macs")):
        head = page.locator("#calls thead th").nth(column)
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        by_size = sorted(calls, key=lambda call: -getattr(call, key))
        assert visible_rows(page) == [call.call.key for call in by_size]
        assert "descending" in page.locator("#status").inner_text()
    for column in range(9):
        page.locator("#calls thead button").nth(column).click()
        assert sorted(visible_rows(page)) == sorted(call.call.key for call in calls) or column == 0
    page.locator("#calls thead button").nth(0).click()
    assert visible_rows(page)[0] == "features" and page.locator("th[aria-sort='ascending']").count() == 1


def test_the_list_is_filtered_by_name_and_type(opened):
    page = opened(drawn())
    page.get_by_label("Filter").fill("conv2d FEATURES")
    assert visible_rows(page) == ["features.star", "features.3.squeeze"]
    assert page.locator("#shown-0").inner_text() == "2 of 7 calls"
    page.get_by_label("Filter").fill("nothing like it")
    assert visible_rows(page) == []


def focused(page):
    return page.evaluate("document.activeElement.querySelector('bdi')?.textContent ?? document.activeElement.id")


def test_the_keyboard_alone_is_enough(opened):
    page = opened(drawn())
    press = page.keyboard.press
    press("j")
    assert focused(page) == "features"
    press("h")
    assert len(visible_rows(page)) == 3
    press("l")
    press("j")
    press("j")
    press("k")
    assert focused(page) == "features.star"
    press("Enter")
    page.locator("[data-layer='0']").wait_for()
    assert page.url.endswith("#layer=0") and focused(page) == "features.star"
    assert not is_seen(page, "#overview")
    press("j")
    press("j")
    press("k")
    assert page.url.endswith("#layer=1")
    press("Escape")
    assert is_seen(page, "#overview") and focused(page) == "features.star"
    press("/")
    assert focused(page) == "filter-0"
    page.keyboard.type("squeeze_")
    press("Enter")
    assert focused(page) == "features.3.squeeze_activation"
    press("/")
    press("Escape")
    assert focused(page) == "features" and len(visible_rows(page)) == 9
    press("?")
    assert page.get_by_role("dialog").is_visible()
    press("j")
    press("Escape")
    assert not page.get_by_role("dialog").is_visible() and focused(page) == "features"


def test_the_way_back_of_the_browser_closes_a_layer(opened):
    page = opened(drawn(), "#places")
    page.get_by_role("link", name="classifier.1").first.click()
    page.locator("[data-layer='2']").wait_for()
    assert page.url.endswith("#layer=2&channel=7&image=0")
    page.go_back()
    page.locator("#overview").wait_for()
    assert page.url.endswith("#places") and page.title() == "shapes on star-0.png"


def test_an_unknown_place_shows_the_page(opened):
    page = opened(drawn(), "#layer=99")
    for hash in ("#layer=99", "#layer=x", "#layer=", "#call=999", "#channel=3", "#%", "#layer=-1", "#layer=1e0"):
        page.evaluate("hash => { location.hash = hash }", hash)
        assert is_seen(page, "#overview"), hash


def test_a_call_is_found_by_its_address(opened):
    page = opened(drawn(), "#call=6")
    assert focused(page) == "features.3.squeeze_activation"
    page.get_by_label("Filter").fill("nothing like it")
    page.locator(".calls thead button").nth(5).click()
    page.evaluate("location.hash = 'call=4'")
    assert focused(page) == "features.3" and len(visible_rows(page)) == 9


# [contrast, name, text] of every text that is seen, by the formula of WCAG 2
CONTRASTS = """() => {
    const rgb = text => text.match(/[\\d.]+/g).map(Number);
    const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const ground = element => {
        const [r, g, b, a = 1] = rgb(getComputedStyle(element).backgroundColor);
        return a === 1 ? [r, g, b] : ground(element.parentElement);
    };
    const measure = element => {
        const both = [ground(element), rgb(getComputedStyle(element).color)].map(luminance);
        return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    };
    const found = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const element = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
        if (!text || !element.checkVisibility() || element.closest('script, svg')) continue;
        found.push([measure(element), element.className || element.tagName, text]);
    }
    return found;
}"""


@pytest.mark.parametrize("hash", ["", "#layer=0&channel=1"])
def test_text_has_the_contrast_of_wcag_aa(opened, hash):
    page = opened(drawn(weights="random (seed 0)"), hash)
    if hash:
        page.locator(".layer.open.ready").wait_for()
    page.evaluate("document.querySelector('details').open = true")
    grounds = []
    for media in ({"color_scheme": "light"}, {"color_scheme": "dark"}, {"color_scheme": "dark", "media": "print"}):
        page.emulate_media(**media)
        measured = page.evaluate(CONTRASTS)
        assert len(measured) > (10 if hash else 80)
        assert [text for text in measured if text[0] < 4.5] == []
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 26)", "rgb(255, 255, 255)"]


def test_without_scripts_pictures_and_tables_are_there(opened):
    page = opened(drawn(), "#layer=2", scripts=False)
    assert page.locator("#calls tbody tr").count() == 9
    for selector in ("#overview", "#calls tbody tr:last-child", "[data-layer='0']", "[data-layer='2']"):
        assert is_seen(page, selector)
    assert not is_seen(page, ".scripted")
    assert 0 <= page.locator("[data-layer='2']").bounding_box()["y"] < 900  # the address alone leads there


def test_on_paper_there_are_no_controls(opened):
    page = opened(drawn(), media="print")
    assert not is_seen(page, ".tools") and not is_seen(page, "nav")
    assert page.locator("button:visible").count() == page.locator("#calls thead button:visible").count()


def test_a_screen_reader_finds_names_and_headings(opened):
    page = opened(drawn(images=2))
    levels = page.eval_on_selector_all(
        "h1, h2, h3", "all => all.filter(h => h.checkVisibility()).map(h => +h.tagName[1])"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for role in ("main", "banner", "navigation", "table", "searchbox"):
        assert page.get_by_role(role).count() >= 1, role
    assert (
        page.eval_on_selector_all("img:not([alt]), svg:not([aria-label]):not([aria-hidden])", "all => all.length") == 0
    )
    assert page.locator("html").get_attribute("lang") == "en"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert focused(page) == "content" or page.evaluate("document.activeElement.id") == "content"
