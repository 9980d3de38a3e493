"""Tests of the layers of a page, without a browser."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from hookscope import inspect, load_model
from hookscope.drawing import palette
from hookscope.errors import WriteError
from hookscope.report import draw_page
from hookscope.report.layers import COLOUR_MAPS, GAP, layer_views
from tests.report.example import inspection_of, layer_of


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
