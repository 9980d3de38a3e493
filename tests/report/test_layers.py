"""The layers of a page: what a browser shows of them is what NumPy and matplotlib make of the same levels."""

import base64
import io
import json
import re

import matplotlib
import numpy as np
import pytest
from PIL import Image

from hookscope import inspect, load_model
from hookscope.drawing import Scale, colours, palette, values_of_levels
from hookscope.errors import WriteError
from hookscope.report import draw_page
from hookscope.report.layers import COLOUR_MAPS, GAP, fewer_channels, layer_views
from tests.report.example import HOSTILE, inspection_of, layer_of


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def picture_of(address):
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def view_of(layer):
    [view] = layer_views(inspection_of(layer))
    return view


def test_a_picture_holds_every_level_in_the_colours_of_viridis():
    layer = layer_of(noise(5, 7, 6))
    [picture] = view_of(layer).pictures
    image = picture_of(picture.address)
    rows = -(-5 // picture.columns)
    assert image.size == (picture.columns * (6 + GAP), rows * (7 + GAP))
    shown = np.asarray(image.convert("RGBA"))
    for channel in range(5):
        row, column = divmod(channel, picture.columns)
        there = shown[row * 8 : row * 8 + 7, column * 7 : column * 7 + 6]
        assert np.array_equal(there[..., :3], palette("viridis")[layer.images[0].tiles.levels[channel]])
        assert (there[..., 3] == 255).all()
    assert (shown[7::8, :, 3] == 0).all() and (shown[:, 6::7, 3] == 0).all()  # gaps are transparent: dark pages too


def test_a_picture_has_no_filters_because_the_script_knows_none():
    [picture] = view_of(layer_of(noise(16, 28, 28))).pictures
    image = picture_of(picture.address)
    from zlib import decompress

    file = base64.b64decode(picture.address.partition(",")[2])
    parts = re.findall(rb"(?s)IDAT(.*?)(?=....IDAT|....IEND)", file)
    rows = np.frombuffer(decompress(b"".join(part[:-4] for part in parts)), np.uint8).reshape(image.height, -1)
    assert (rows[:, 0] == 0).all() and np.array_equal(rows[:, 1:], np.asarray(image))


def test_the_numbers_of_a_channel_are_on_the_page():
    values = noise(3, 4, 4)
    data = json.loads(view_of(layer_of(values, answer=[0.5, -1.5, 2])).data)
    [image] = data["images"]
    assert image["low"] == values.min((1, 2)).tolist() and image["high"] == values.max((1, 2)).tolist()
    assert np.allclose(image["mean"], values.mean((1, 2)), rtol=1e-8)
    assert image["answer"] == [0.5, -1.5, 2] and image["answerTotal"] == 4
    assert data["channels"] == [0, 1, 2] and data["total"] == 3


def test_the_numbers_are_in_the_page_without_scripts():
    page = draw_page(inspection_of(layer_of(np.arange(8.0).reshape(2, 2, 2)), layer_of(np.array([[[4.5]]]))))
    assert "<noscript><details><summary>Lowest and highest value of each channel</summary>" in page
    assert "<li>0 to 3<li>4 to 7</ol>" in page and "<li>4.5</ol>" in page


def test_maps_of_one_position_have_no_picture_but_their_names():
    view = view_of(layer_of(noise(3, 1, 1), names=("a", "<b>", "c")))
    assert view.pictures == (None,)
    assert json.loads(view.data)["names"] == ["a", "<b>", "c"] and "<" not in view.data
    assert "&lt;b&gt;: " in view.ranges[0]


@pytest.mark.parametrize("colour", [False, True])
def test_filters_have_their_own_scale_about_zero(colour):
    filters = noise(4, 3, 5, *([3] if colour else [])).astype(np.float32)
    filters[2] = 0
    picture = view_of(layer_of(noise(4, 6, 6), filters=filters)).filters
    shown = np.asarray(picture_of(picture.address).convert("RGB")).astype(int)
    cells = [divmod(channel, picture.columns) for channel in range(4)]
    maps = [shown[row * 4 : row * 4 + 3, column * 6 : column * 6 + 5] for row, column in cells]
    for drawn, values in zip(maps, filters, strict=True):
        share = values / (abs(values).max() or 1) / 2 + 0.5
        if colour:
            assert abs(drawn - share * 255).max() <= 0.51
        else:
            assert np.array_equal(drawn, palette("RdBu_r")[np.rint(share * 192).astype(int)])


def test_the_best_channels_are_kept():
    values = noise(6, 4, 4)
    values[2] *= 9
    values[5, 0, 0] = np.nan
    assert view_of(layer_of(values, answer=[1, -8, 0, 3, 2, 0])).best(3).channels == (1, 3, 5)
    assert view_of(layer_of(values)).best(2).channels == (2, 5)
    assert view_of(layer_of(values)).best(7).channels == (0, 1, 2, 3, 4, 5)


def test_a_page_fits_into_a_size_and_says_what_it_left_out():
    layers = [layer_of(noise(64, 16, 16), name="wide"), layer_of(noise(8, 4, 4), name="small")]
    whole = len(draw_page(inspection_of(*layers)).encode())
    page = draw_page(inspection_of(*layers), max_size=whole - 10_000)
    assert whole - 13_500 < len(page.encode()) <= whole - 10_000
    kept = re.findall(r"<strong>([\d,]+) of ([\d,]+) channels kept", page)
    assert len(kept) == 1 and 20 < int(kept[0][0]) < 60 and kept[0][1] == "64"
    assert "channels kept" not in draw_page(inspection_of(*layers), max_size=whole)
    assert "channels kept" not in draw_page(inspection_of(*layers), max_size=None)


def test_a_size_that_not_even_one_channel_fits_into_is_an_error():
    with pytest.raises(WriteError, match=r"does not fit into 20,000 bytes; with one channel of each of its 1 layers"):
        draw_page(inspection_of(layer_of(noise(64, 16, 16))), max_size=20_000)


def test_every_colour_map_is_on_the_page_as_matplotlib_has_it():
    import matplotlib

    tables = json.loads(re.search(r'id="colour-tables">(.*?)</script>', draw_page(inspection_of(layer_of(None))))[1])
    for name in COLOUR_MAPS:
        table = np.frombuffer(base64.b64decode(tables["tables"][name]), np.uint8).reshape(-1, 3)
        assert np.array_equal(table[:193], matplotlib.colormaps[name](np.linspace(0, 1, 193), bytes=True)[:, :3])


@pytest.mark.slow
def test_a_page_of_resnet34_with_all_channels_has_about_6_megabytes():
    inspection = inspect(load_model("resnet34", "none"), "samples/cat.jpg")
    assert len(inspection.layers) == 36 and sum(view.total for view in layer_views(inspection)) == 8_512
    # 4.84 million are pictures of channels, 0.20 million those of the network
    assert len(draw_page(inspection, max_size=None).encode()) <= 6_200_000


def opened_layer(opened, *layers, hash="#layer=0", **options):
    page = opened(draw_page(inspection_of(*layers)), hash, **options)
    page.locator(".layer.open.ready").wait_for()
    return page


def readout(page):
    return page.locator(".open .readout").inner_text()


def choose(page, name, value):
    page.locator(f".open [name={name}]").select_option(value)


def point(page, selector, x, y):
    box = page.locator(selector).first.bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)


def number_in(text):
    return float(re.search(r"(?:x \d+) · (\S+)", text)[1].replace("Inf", "inf"))


def sequence(page, count):
    """The numbers of the channels in the order of the grid, as the arrow keys go through them."""
    page.locator(".open .channels").focus()
    page.keyboard.press("Home")
    found = []
    for _ in range(count):
        found.append(int(re.match(r"channel (\d+)", readout(page))[1]))
        page.keyboard.press("ArrowRight")
    return found


PIXELS = """canvas => {
    const {width, height} = canvas;
    return [height, width, ...canvas.getContext('2d').getImageData(0, 0, width, height).data];
}"""


def pixels(page, at=0):
    height, width, *data = page.locator(".open .stage canvas").nth(at).evaluate(PIXELS)
    return np.array(data).reshape(height, width, 4)[..., :3]


def coloured(values, low, high, name):
    table = matplotlib.colormaps[name](np.linspace(0, 1, 193), bytes=True)[:, :3]
    return table[np.rint((values - low) / (high - low) * 192).clip(0, 192).astype(int)]


def test_the_value_under_the_pointer_is_that_of_the_layer(opened):
    values = noise(8, 16, 12)
    page = opened_layer(opened, layer_of(values))
    half = (values.max((1, 2)) - values.min((1, 2))) / 192 / 2
    zoom, label, between = 5, 19, 12  # 72 / 16 pixels
    for channel, y, x in ((0, 0, 0), (3, 15, 11), (7, 4, 9)):
        point(
            page, ".open .channels canvas", channel * (12 * zoom + between) + (x + 0.5) * zoom, label + (y + 0.5) * zoom
        )
        text = readout(page)
        assert text.startswith(f"channel {channel} · y {y}, x {x} · ")
        assert abs(number_in(text) - values[channel, y, x]) <= half[channel] * 1.06
        assert abs(float(text.rpartition("± ")[2]) / half[channel] - 1) < 0.05


def test_the_enlarged_map_tells_its_values_to_pointer_and_keyboard(opened):
    layer = layer_of(noise(3, 7, 7))
    page = opened_layer(opened, layer, hash="#layer=0&channel=2")
    [read] = shown_values(layer)
    size = page.locator(".open .stage canvas").bounding_box()["width"]
    assert size % 7 == 0
    point(page, ".open .stage canvas", 4.5 * size / 7, 1.5 * size / 7)
    assert readout(page).startswith("channel 2 · y 1, x 4 · ")
    assert abs(number_in(readout(page)) / read[2, 1, 4] - 1) < 1e-3
    page.locator(".open .stage canvas").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp"):
        page.keyboard.press(key)
    assert readout(page).startswith("channel 2 · y 2, x 3 · ")
    assert abs(number_in(readout(page)) / read[2, 2, 3] - 1) < 1e-3


def shown_values(layer):
    """The values of the maps of each image, rounded to the levels that the page holds."""
    scale, tiles = Scale.parse("channel"), [maps.tiles for maps in layer.images]
    return [
        np.stack([values_of_levels(*map_, scale) for map_ in zip(each.levels, each.low, each.high, strict=True)])
        for each in tiles
    ]


def test_every_order_is_the_one_of_numpy(opened):
    values = np.maximum(noise(9, 6, 6), noise(9, 1, 1, seed=1))
    values[[2, 6], :3] = 0
    values[4] = values[1]
    answer = noise(9, seed=2)
    measures = {
        "number": -np.arange(9),
        "range": values.max((1, 2)) - values.min((1, 2)),
        "mean": values.mean((1, 2)),
        "zeros": (values == 0).mean((1, 2)),
        "answer": answer,
    }
    page = opened_layer(opened, layer_of(values, answer=answer))
    for order, measure in measures.items():
        choose(page, "order", order)
        assert sequence(page, 9) == np.argsort(-measure, kind="stable").tolist()


@pytest.mark.parametrize("scale", ["channel", "layer", "symmetric"])
def test_every_scale_has_the_colours_of_matplotlib(opened, scale):
    layer = layer_of(noise(4, 9, 8) * 2 + 1, noise(4, 9, 8, seed=1))
    page = opened_layer(opened, layer, hash="#layer=0&channel=1")
    choose(page, "scale", scale)
    assert page.locator(".open [name=colours]").input_value() == ("RdBu_r" if scale == "symmetric" else "viridis")
    images = shown_values(layer)
    for name, is_joint in (("viridis", True), ("gray", True), ("magma", False), ("RdBu_r", False)):
        choose(page, "colours", name)
        page.locator(".open [name=joint]").set_checked(is_joint)
        for image in range(2):
            seen = images if is_joint else [images[image]]
            seen = [values[1] for values in seen] if scale == "channel" else seen
            low, high = min(values.min() for values in seen), max(values.max() for values in seen)
            if scale == "symmetric":
                low, high = -max(-low, high), max(-low, high)
            assert np.array_equal(pixels(page, image), coloured(images[image][1], low, high, name))
            ends = page.locator(".open .of-image").nth(image).locator(".bar span").all_inner_texts()
            assert [float(end) for end in ends] == pytest.approx([low, high], rel=1e-3)


def test_the_colour_bar_says_the_ends_of_a_shared_scale(opened):
    values = noise(4, 5, 5)
    page = opened_layer(opened, layer_of(values))
    bar = page.locator(".open .line .bar")
    assert bar.inner_text().split("\n")[0].startswith("its lowest")
    choose(page, "scale", "layer")
    ends = [float(text) for text in bar.locator("span").all_inner_texts()]
    assert ends == pytest.approx([values.min(), values.max()], rel=1e-3)


def test_the_histogram_is_the_one_of_numpy(opened):
    layer = layer_of(noise(3, 20, 20))
    page = opened_layer(opened, layer, hash="#layer=0&channel=1")
    [values] = shown_values(layer)
    low, high = values[1].min(), values[1].max()
    counts, _ = np.histogram(np.rint((values[1] - low) / (high - low) * 192), 24, (0, 192))
    shown = page.locator(".open .histogram svg").get_attribute("aria-label")
    assert [int(text) for text in shown.partition(": ")[2].split(", ")] == counts.tolist()


def test_a_slider_lays_the_map_over_the_image(opened):
    page = opened_layer(opened, layer_of(noise(3, 8, 8)), hash="#layer=0&channel=1")
    behind = page.locator(".open .stage img")
    assert behind.get_attribute("src") == page.locator("#seen-0").get_attribute("src")
    assert behind.bounding_box() == page.locator(".open .stage canvas").bounding_box()
    page.locator(".open [name=opacity]").fill("40")
    opacity = "canvas => getComputedStyle(canvas).opacity"
    assert page.locator(".open .stage canvas").evaluate(opacity) == "0.4"
    page.get_by_label("Next channel").locator("visible=true").click()
    assert page.locator(".open .stage canvas").evaluate(opacity) == "0.4"


def test_what_is_known_of_a_channel_stands_beside_its_map(opened):
    values = np.maximum(noise(3, 8, 8), 0)
    page = opened_layer(opened, layer_of(values, answer=[1, -3, 4]), hash="#layer=0&channel=1")
    facts = page.locator(".open .of-image dl").inner_text().split("\n")
    about = dict(zip(facts[::2], facts[1::2], strict=True))
    assert about["share in the answer"] == "-3 (37.5 % of the layer)"
    assert float(about["mean"]) == pytest.approx(values[1].mean(), rel=1e-3)
    assert float(about["zeros"].removesuffix(" %")) == pytest.approx(100 * (values[1] == 0).mean(), rel=1e-2)
    assert [float(end) for end in about["range"].split(" to ")] == pytest.approx([0, values[1].max()], rel=1e-3)


def test_nan_inf_and_constant_maps_have_their_colours_and_are_named(opened):
    values = noise(5, 6, 6)
    values[1, 0, 0], values[1, 0, 1], values[1, 0, 2] = np.nan, np.inf, -np.inf
    values[2], values[3] = 7.25, np.nan
    page = opened_layer(opened, layer_of(values), hash="#layer=0&channel=1")
    fixed = colours.palette("viridis")[[colours.NAN, colours.PLUS_INF, colours.MINUS_INF]]
    assert np.array_equal(pixels(page)[0, :3], fixed)
    assert "NaN or Inf\n3 values" in page.locator(".open dl").inner_text()
    page.locator(".open .stage canvas").focus()
    shown = []
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        shown.append(readout(page).rpartition(" · ")[2])
    assert shown == ["NaN", "+Inf", "-Inf"]
    page.keyboard.press("n")
    assert (pixels(page) == colours.palette("viridis")[colours.CONSTANT]).all()
    assert "constant\nevery value is the same" in page.locator(".open dl").inner_text()
    assert "NaN magenta, +Inf red, -Inf light blue (!): channels 1, 3" in page.locator(".open .marks").inner_text()
    assert "constant, grey (=): channel 2" in page.locator(".open .marks").inner_text()
    choose(page, "scale", "layer")
    assert np.array_equal(pixels(page)[0, 0], coloured(np.array(7.25), np.nanmin(values[[0, 4]]), 7.25, "viridis"))
    page.keyboard.press("Tab")
    page.locator(".open .stage canvas").press("n")
    assert (pixels(page) == fixed[0]).all()
    assert "no finite value" in page.locator(".open dl").inner_text()


def test_maps_of_one_position_are_bars_with_names(opened):
    values = noise(120, 1, 1).astype(np.float32)
    names = (HOSTILE, *(f"class {number}" for number in range(1, 120)))
    page = opened_layer(opened, layer_of(values, values * 2, names=names))
    rows = page.locator(".open .values tbody tr")
    order = np.argsort(-values.ravel(), kind="stable")
    assert rows.count() == 100
    assert rows.first.locator("th").inner_text().split() == [str(order[0]), *names[order[0]].split()]
    shown = [float(text) for text in rows.first.locator(".value").all_inner_texts()]
    assert shown == pytest.approx([values[order[0], 0, 0], 2 * values[order[0], 0, 0]], rel=1e-5)
    page.get_by_text("Show all 120 channels").click()
    assert rows.count() == 120
    widths = [bar.bounding_box()["width"] for bar in rows.first.locator(".fill").all()]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.02)


def test_frames_of_a_clip_stand_side_by_side(opened):
    values = noise(3, 6, 4 * 5)
    layer = layer_of(values, frames=4)
    page = opened_layer(opened, layer, hash="#layer=0&channel=1")
    assert page.locator(".open .frame").all_inner_texts() == ["frame 1", "frame 2", "frame 3", "frame 4"]
    [read] = shown_values(layer)
    low, high = read[1].min(), read[1].max()
    for frame in range(4):
        assert np.array_equal(
            pixels(page, frame), coloured(read[1, :, frame * 5 : frame * 5 + 5], low, high, "viridis")
        )
    page.locator(".open .stage canvas").nth(2).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "frame 3, y 0, x 1" in readout(page)
    assert abs(number_in(readout(page)) / read[1, 0, 11] - 1) < 1e-3


def test_one_image_of_several_can_be_chosen(opened):
    page = opened_layer(opened, *[layer_of(*[noise(3, 6, 6, seed=at) for at in range(6)])], hash="#layer=0&channel=1")
    whose = page.locator(".open .whose")
    assert whose.all_inner_texts() == [f"star-{at}.png" for at in range(4)]
    choose(page, "image", "5")
    assert whose.all_inner_texts() == ["star-5.png"] and "image=5" in page.url and "channel=1" in page.url


def test_the_filter_of_a_channel_is_drawn(opened):
    filters = noise(4, 3, 3).astype(np.float32)
    page = opened_layer(opened, layer_of(noise(4, 8, 8), filters=filters), hash="#layer=0&channel=2")
    page.wait_for_function("document.querySelector('.open .filter canvas').width === 3")
    page.wait_for_timeout(50)
    height, width, *data = page.locator(".open .filter canvas").evaluate(PIXELS)
    most = abs(filters[2]).max()
    drawn = np.array(data).reshape(height, width, 4)[..., :3]
    assert np.array_equal(drawn, coloured(filters[2], -most, most, "RdBu_r"))


def test_the_keyboard_leads_through_a_layer(opened):
    page = opened_layer(opened, layer_of(noise(6, 8, 8)), layer_of(noise(2, 4, 4), name="second"))
    page.locator(".open .channels").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.url.endswith("#layer=0&channel=1")
    assert page.evaluate("document.activeElement.closest('.stage') !== null")
    page.keyboard.press("n")
    assert page.url.endswith("#layer=0&channel=2")
    page.keyboard.press("p")
    page.keyboard.press("Escape")
    assert page.url.endswith("#layer=0") and page.evaluate("document.activeElement.className") == "channels"
    page.keyboard.press("n")
    assert page.url.endswith("#layer=0&channel=1")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.locator(".layer.open[data-layer='1'].ready").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#overview").is_visible()


def test_without_scripts_a_layer_is_a_picture_with_its_numbers(opened):
    page = opened(draw_page(inspection_of(layer_of(noise(4, 8, 8)))), scripts=False)
    picture = page.locator("img.maps")
    assert picture.is_visible() and picture.evaluate("image => image.naturalWidth") > 0
    page.locator("noscript summary").click()
    assert page.locator("noscript li").count() == 4 and page.locator("noscript li").last.is_visible()
    assert not page.locator(".controls").count()


@pytest.mark.parametrize("shape", [(64, 112, 112), (2048, 7, 7)])
def test_a_click_is_answered_in_a_tenth_of_a_second(opened, shape):
    values = noise(*shape).astype(np.float32)
    page = opened(draw_page(inspection_of(*[layer_of(values, name=f"layer{at}") for at in range(3)])))
    answered = """number => new Promise(done => {
        const start = performance.now();
        location.hash = `layer=${number}&channel=3`;
        const look = () => document.querySelector('.open .stage canvas, .open .here')
            ? requestAnimationFrame(() => done(performance.now() - start)) : requestAnimationFrame(look);
        look();
    })"""
    assert min(page.evaluate(answered, number) for number in range(3)) <= 100
    again = """at => {
        const start = performance.now();
        hookscope.go({layer: 2, channel: at});
        return performance.now() - start;
    }"""
    assert min(page.evaluate(again, at) for at in range(3)) <= 100


def test_a_telephone_shows_a_layer_without_scrolling_sideways(opened):
    page = opened_layer(
        opened, layer_of(noise(40, 14, 14), noise(40, 14, 14)), hash="#layer=0&channel=3", width=400, height=800
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_layer_whose_numbers_cannot_be_read_keeps_its_plain_picture(browser, tmp_path):
    file = tmp_path / "page.html"
    html = draw_page(inspection_of(layer_of(noise(2, 4, 4))))
    file.write_text(html.replace('class="numbers">{', 'class="numbers">'), encoding="utf-8")
    page = browser.new_page()
    page.goto(file.as_uri() + "#layer=0")
    page.locator(".layer.open.unread").wait_for()
    assert page.locator("img.maps").is_visible()
    page.close()


def test_views_that_are_far_too_large_are_cut_before_they_are_drawn():
    layers = [layer_of(*(noise(40, side, side, seed=at) for at in range(3)), name=str(side)) for side in (6, 40)]
    views = layer_views(inspection_of(*layers))
    whole = [view.weight for view in layer_views(inspection_of(*layers))]
    assert all(weight <= view.expected <= 2 * weight for view, weight in zip(views, whole, strict=True))
    few = fewer_channels(views, sum(whole) / 10)
    assert sum(view.weight for view in few) <= sum(whole) / 10
    assert all(len(view.channels) >= 1 for view in few) and not any("pictures" in vars(view) for view in views)
    assert fewer_channels(views, sum(whole)) is views
