"""A sheet for people: its words, its provenance, and pictures laid over."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.drawing import colours, page as pages, sheet as sheets
from hookscope.drawing.png import encode_png, read_provenance
from hookscope.drawing.reduce import reduce_output
from hookscope.drawing.scale import Scale
from hookscope.drawing.sheet import Origin, Sheet, Style, draw_sheet, shape_text
from hookscope.drawing.text import text_pixels
from hookscope.drawing.tiles import ChannelChoice
from hookscope.hooks.maps import InputSize
from hookscope.hooks.selection import Call
from hookscope.images import InputImage
from hookscope.models.loaded import LoadedModel
from hookscope.models.metadata import WeightsMetadata

ORIGIN = Origin("resnet34", "random (seed 0)", "a/cat.jpg", "ab" * 32, "ImageClassification resize 256 crop 224")
CALL = Call("layer4.0.conv2", "Conv2d", 0, 30)


def sheet_of(output: Any, call: Call = CALL, origin: Origin = ORIGIN, **more: Any) -> Sheet:
    scale = Scale.parse(more.pop("scale", "channel"))
    choice = ChannelChoice.parse(more.pop("channels", "0-9999"))
    activity = reduce_output(output, more.pop("module", None), more.pop("shown", None), choice, scale)
    overlay = more.pop("overlay", None)
    return draw_sheet(activity, call, origin, Style(**more), overlay)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every line of text that a sheet has."""
    lines: list[str] = []

    def record(text: str, *rest: Any) -> Any:
        lines.append(text)
        return text_pixels(text, *rest)

    monkeypatch.setattr(pages, "text_pixels", record)
    return lines


def random(*shape: int) -> torch.Tensor:
    return torch.manual_seed(0) and torch.randn(shape)


def test_the_header_names_call_origin_values_and_scale(words: list[str]) -> None:
    sheet_of(random(1, 12, 9, 9))
    assert words[0] == "layer4.0.conv2   Conv2d   1x12x9x9   index 30"
    assert words[1] == "resnet34   weights: random (seed 0)   a/cat.jpg   ImageClassification resize 256 crop 224"
    assert words[2].startswith("values -")
    assert words[3] == "scale: channel, each map from its lowest (first colour) to its highest value"
    assert words[4].startswith("widest range (bold): ")
    assert len(words) == 5


def test_the_header_counts_constant_channels_nan_and_inf(words: list[str]) -> None:
    values = random(1, 12, 9, 9)
    values[0, 3], values[0, 4], values[0, 5, 0, 0], values[0, 6, 0, 0] = 0, 7, math.nan, -math.inf
    sheet_of(values)
    assert words[2].endswith("constant channels: 2   NaN or Inf: 2 values")
    assert " ".join(words[4:]).endswith("NaN magenta, +Inf red, -Inf light blue (!): 5, 6   constant: 3, 4")
    words.clear()
    sheet_of(torch.full((1, 2, 3, 3), math.nan))
    assert words[2] == "no finite value   NaN or Inf: 18 values"


def test_a_shared_scale_has_its_bar(words: list[str]) -> None:
    sheet = sheet_of(random(1, 4, 9, 9), scale="-1:1", columns=4)
    assert {"scale: -1:1, one for all", "-1", "1"} <= set(words)
    pixels = np.asarray(sheet.image)
    bar = np.arange(colours.LEVELS, dtype=np.uint8).tobytes()
    assert any(bar in row.tobytes() for row in pixels[: sheet.provenance["parts"][0]["y"]])
    plain = np.asarray(sheet_of(random(1, 4, 9, 9)).image)
    assert not any(bar in row.tobytes() for row in plain)


def test_parts_items_and_clips_are_named(words: list[str]) -> None:
    sheet = sheet_of({"out": random(1, 2, 5, 5), "aux": random(3, 2, 5, 5)})
    assert "out   2x5x5 of N C H W" in words
    assert "aux, item 1 of 3   2x5x5 of N C H W" in words
    assert [part["part"] for part in sheet.provenance["parts"]] == ["out", "aux, item 0 of 3", "aux, item 1 of 3"]
    words.clear()
    sheet_of(random(1, 2, 8, 5, 5), module=nn.Conv3d(1, 1, 1))
    assert "8 frames a channel, left to right" in " ".join(words)


def test_control_characters_are_written_out_and_long_names_broken(words: list[str]) -> None:
    origin = Origin("m", "none", "\x1b]0;evil\n\udcff.jpg", "", "")
    sheet = sheet_of(random(1, 2, 3, 3), Call("very.long." * 60, "Conv2d", 3, None), origin)
    assert all(line.isprintable() for line in words)
    assert "\\x1b]0;evil\\n\\udcff.jpg" in " ".join(words)
    assert sheet.image.width < 720


@pytest.mark.parametrize("style", [{}, {"plain": True}, {"columns": 2, "cell": 30}])
def test_the_maps_lie_where_the_provenance_says(style: dict[str, Any]) -> None:
    values = random(1, 5, 6, 8)
    sheet = sheet_of({"a": values, "b": values[:, :2]}, **style)
    pixels = np.asarray(sheet.image)
    covered = np.zeros(pixels.shape, int)
    for part in sheet.provenance["parts"]:
        for at, _ in enumerate(part["channels"]):
            y = part["y"] + at // part["columns"] * part["step_y"]
            x = part["x"] + at % part["columns"] * part["step_x"]
            covered[y : y + part["height"] * part["zoom"], x : x + part["width"] * part["zoom"]] += 1
    assert covered.max() == 1
    assert np.array_equal(pixels < colours.LEVELS, covered == 1)


def test_plain_is_the_grid_only(words: list[str]) -> None:
    sheet = sheet_of(random(1, 6, 8, 8), plain=True, columns=3, cell=8)
    assert words == []
    assert sheet.image.size == (3 * 8 + 2 * 2, 2 * 8 + 2)


def test_the_provenance_is_json_and_has_the_range_of_each_drawn_channel() -> None:
    sheet = sheet_of(random(1, 12, 9, 9), channels="2,5", cmap="magma")
    provenance = read_provenance(encode_png(sheet.image, sheet.provenance))
    assert provenance == json.loads(json.dumps(sheet.provenance, allow_nan=False))
    assert (provenance["image"], provenance["layer"], provenance["cmap"]) == ("cat.jpg", "layer4.0.conv2", "magma")
    (part,) = provenance["parts"]
    values = random(1, 12, 9, 9)[0, [2, 5]].double()
    assert part["channels"] == [2, 5]
    assert (part["low"], part["high"]) == (values.amin((1, 2)).tolist(), values.amax((1, 2)).tolist())
    (part,) = sheet_of(torch.full((1, 1, 4, 4), math.nan)).provenance["parts"]
    assert (part["low"], part["high"]) == ([None], [None])


def test_optical_flow_names_its_second_picture(words: list[str]) -> None:
    origin = Origin("raft", "none", "a/one.jpg", "11", "", ("a/two.jpg", "22"))
    sheet = sheet_of(random(1, 2, 8, 8), origin=origin)
    assert sheet.provenance["second"] == {"image": "two.jpg", "sha256": "22"}
    assert "a/one.jpg and a/two.jpg" in words[1]
    assert "second" not in sheet_of(random(1, 2, 8, 8)).provenance


def test_channels_beyond_the_limit_are_left_out_and_counted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheets, "MOST_PIXELS", 30_000)
    sheet = sheet_of({"a": random(1, 40, 20, 20), "b": random(1, 3, 2, 2)}, cell=40)
    assert sheet.left_out > 0
    part = sheet.provenance["parts"][0]
    assert len(part["channels"]) == len(part["low"]) < 40
    assert "channels left out: too many pixels, choose with --channels" in " ".join(words)


PHOTOGRAPH = Image.new("RGB", (50, 40), (10, 200, 30))


def test_an_overlay_shows_the_photograph_through_the_map() -> None:
    values = random(1, 3, 4, 5)
    values[0, 1, 0, 0] = math.nan
    plain = sheet_of(values, cell=8, columns=3)
    laid = sheet_of(values, cell=8, columns=3, overlay=[[PHOTOGRAPH]])
    assert (laid.image.mode, laid.image.size, laid.provenance["overlay"]) == ("RGB", plain.image.size, True)
    before, after = np.asarray(plain.image.convert("RGB")).astype(int), np.asarray(laid.image).astype(int)
    part = plain.provenance["parts"][0]
    mask = np.asarray(plain.image) < colours.LEVELS
    mixed = before * (255 - 96) / 255 + np.array([10, 200, 30]) * 96 / 255
    assert abs(after - mixed)[mask].max() <= 1
    assert (after == before)[~mask].all()
    x = part["x"] + part["step_x"]
    assert after[part["y"], x].tolist() == [255, 0, 255]


def test_each_frame_and_each_item_lies_over_its_own() -> None:
    red, blue = Image.new("RGB", (9, 9), "red"), Image.new("RGB", (9, 9), "blue")
    clip = random(1, 1, 2, 3, 3)
    laid = np.asarray(sheet_of(clip, module=nn.Conv3d(1, 1, 1), overlay=[[red, red, blue, blue]], plain=True).image)
    even = np.asarray(sheet_of(clip, module=nn.Conv3d(1, 1, 1), plain=True).image.convert("RGB"))
    gain = laid.astype(int) - even
    middle = laid.shape[1] // 2
    assert gain[:, : middle - 2, 0].min() > 0 > gain[:, : middle - 2, 2].max()
    assert gain[:, middle + 2 :, 2].min() > 0
    pair = sheet_of(random(2, 1, 3, 3), overlay=[[red], [blue]], plain=True, cell=6)
    first, second = (part["y"] for part in pair.provenance["parts"])
    pixels = np.asarray(pair.image).astype(int)
    assert pixels[first, 0, 0] > pixels[first, 0, 2] or pixels[first, 0, 0] >= 96
    assert pixels[second, 0, 2] >= 96


def test_proposals_and_single_positions_are_not_laid_over() -> None:
    for values in (random(1000, 2, 7, 7), random(1, 8, 1, 1)):
        laid, plain = sheet_of(values, overlay=[[PHOTOGRAPH]]), sheet_of(values)
        assert np.array_equal(np.asarray(laid.image), np.asarray(plain.image.convert("RGB")))


def test_tokens_and_other_shapes_are_drawn(words: list[str]) -> None:
    sheet = sheet_of(random(1, 50, 6), Call("encoder", "Encoder", 0, None), shown=InputSize(28, 28))
    assert [part["part"] for part in sheet.provenance["parts"]] == ["", "class token"]
    assert "maps   6x7x7 of N L C" in words
    assert "index" not in words[0]


def test_shapes_in_words() -> None:
    assert shape_text((1, 64, 7, 7)) == "1x64x7x7"
    assert shape_text({"out": (1, 2), "aux": (3,)}) == "out: 1x2  aux: 3"
    assert (shape_text(None), shape_text(())) == ("-", "-")


def test_the_origin_of_a_loaded_model_of_a_module_and_of_nothing() -> None:
    image = Image.new("RGB", (4, 4))
    net = LoadedModel.of(nn.Conv2d(3, 1, 1), "net", "best.pth", WeightsMetadata(), "classification")
    first, second = (InputImage(image, name, name * 4, (), (image,)) for name in "ab")
    assert Origin.of(net, first, second) == Origin(
        "net", "best.pth", "a", "aaaa", net.preprocess.describe(), ("b", "bbbb")
    )
    assert Origin.of(nn.Identity(), image) == Origin("Identity", "", "", "", "")
    assert Origin.of(None) == Origin("", "", "", "", "")
