"""Sheets: the header, the scale, the maps where the provenance says, overlays, and what the network saw beside them."""

import json
import math
import runpy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops
from torch import nn

import hookscope
from hookscope.drawing import colours, sheet as sheets
from hookscope.drawing.files import encode_png, read_provenance
from hookscope.drawing.grid import draw_grids, photograph_cells, to_image
from hookscope.drawing.scale import Scale
from hookscope.drawing.sheet import Origin, Sheet, Style, draw_call, shape_text
from hookscope.drawing.text import LABEL_HEIGHT, text_pixels
from hookscope.drawing.tiles import ChannelChoice, reduce_maps, reduce_output
from hookscope.errors import HookscopeError, LayerError, NoMapError, SelectionError, UsageError
from hookscope.geometry import ReceptiveField
from hookscope.hooks.calls import Call
from hookscope.hooks.maps import InputSize
from hookscope.images import InputImage
from hookscope.models.loaded import LoadedModel
from hookscope.models.metadata import WeightsMetadata

ORIGIN = Origin("resnet34", "random (seed 0)", "a/cat.jpg", "ab" * 32, "ImageClassification resize 256 crop 224")
CALL = Call("layer4.0.conv2", "Conv2d", 0, 30)


def test_importing_draws_no_random_number() -> None:
    state = torch.get_rng_state()
    runpy.run_path(sheets.__file__)
    assert torch.equal(torch.get_rng_state(), state)


def sheet_of(output: Any, call: Call = CALL, origin: Origin = ORIGIN, **more: Any) -> Sheet:
    scale = Scale.parse(more.pop("scale", "channel"))
    choice = ChannelChoice.parse(more.pop("channels", "all"))
    names = more.pop("names", ())
    activity = reduce_output(output, more.pop("module", None), more.pop("shown", None), choice, scale, names)
    frames = more.pop("frames", None)
    return draw_call(activity, call, origin, Style(**more), frames)


def random(*shape: int) -> torch.Tensor:
    return torch.manual_seed(0) and torch.randn(shape)


def test_the_header_names_call_origin_values_and_scale(words: list[str]) -> None:
    sheet_of(random(1, 12, 9, 9))
    assert words[0] == "layer4.0.conv2   Conv2d   index 30"
    assert words[1] == "resnet34   cat.jpg   ImageClassification resize 256 crop 224"
    assert words[2] == "weights: random (seed 0), the network is not trained"
    assert words[3].startswith("output 1x12x9x9   values -")
    assert words[4] == "12 channels, 9×9"
    assert words[5:] == [
        "each map has its own scale:",
        "its lowest",
        "its highest value",
        "orange bar: range of a map, relative to the widest (bold)",
    ]
    words.clear()
    sheet_of(random(1, 12, 9, 9), origin=replace(ORIGIN, weights="IMAGENET1K_V1"))
    assert words[1] == "resnet34   cat.jpg   ImageClassification resize 256 crop 224   weights: IMAGENET1K_V1"


def test_random_weights_are_red_on_the_page() -> None:
    for weights, is_red in (("random (seed 0)", True), ("IMAGENET1K_V1", False)):
        pixels = np.asarray(sheet_of(random(1, 12, 9, 9), origin=replace(ORIGIN, weights=weights)).image)
        assert bool((pixels == colours.ALARM).any()) is is_red


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        ("top:4", "4 of 12 channels, 9×9, by mean |value|   all: channels='all'"),
        ("top:12:max", "12 channels, 9×9, by highest value"),
        ("top:4:std", "4 of 12 channels, 9×9, by standard deviation   all: channels='all'"),
        ("3,5", "2 of 12 channels, 9×9   all: channels='all'"),
    ],
)
def test_the_caption_says_how_many_channels_by_what_order(words: list[str], channels: str, expected: str) -> None:
    sheet_of(random(1, 12, 9, 9), channels=channels)
    assert expected in words
    assert not any("(bold)" in line for line in words)


def test_without_a_choice_many_channels_are_the_strongest_64() -> None:
    values = random(1, 100, 5, 5)
    summary = reduce_output(values, choice=ChannelChoice(usual=True))
    strength = values[0].abs().mean((1, 2))
    assert summary.parts[0].tiles.channels == strength.argsort(descending=True)[:64].tolist()
    for count in (64, 3):
        assert reduce_output(values[:, :count], choice=ChannelChoice(usual=True)).parts[0].tiles.channels == [
            *range(count)
        ]


def test_the_header_counts_constant_channels_nan_and_inf(words: list[str]) -> None:
    values = random(1, 12, 9, 9)
    values[0, 3], values[0, 4], values[0, 5, 0, 0], values[0, 6, 0, 0] = 0, 7, math.nan, -math.inf
    sheet_of(values)
    assert words[3].endswith("constant channels: 2   NaN or Inf: 2 values")
    assert words[-1] == "NaN magenta, +Inf red, -Inf light blue (!): 5, 6   constant: 3, 4"
    words.clear()
    sheet_of(torch.full((1, 2, 3, 3), math.nan))
    assert words[3] == "output 1x2x3x3   no finite value   NaN or Inf: 18 values"


@pytest.mark.parametrize(
    ("scale", "caption", "ends"),
    [
        ("-1:1", "one scale for all maps (-1:1):", ("-1", "1")),
        ("symmetric", "one scale for all maps, symmetric about 0:", None),
        ("percentile:1,99", "one scale for all maps, clipped at percentiles 1 and 99:", None),
        ("channel", "each map has its own scale:", ("its lowest", "its highest value")),
    ],
)
def test_every_scale_has_its_bar(words: list[str], scale: str, caption: str, ends: tuple[str, str] | None) -> None:
    sheet = sheet_of(random(1, 4, 9, 9), scale=scale, columns=4)
    assert {caption, *(ends or ())} <= set(words)
    pixels = np.asarray(sheet.image)
    bar = np.arange(colours.LEVELS, dtype=np.uint8).tobytes()
    assert any(bar in row.tobytes() for row in pixels[: sheet.provenance["parts"][0]["y"]])


def test_parts_items_and_clips_are_named(words: list[str]) -> None:
    sheet = sheet_of({"out": random(1, 2, 5, 5), "aux": random(3, 2, 5, 5)})
    assert "out   2 channels, 5×5" in words
    assert "aux, item 1 of 3   2 channels, 5×5" in words
    assert [part["part"] for part in sheet.provenance["parts"]] == ["out", "aux, item 0 of 3", "aux, item 1 of 3"]
    words.clear()
    sheet_of(random(1, 2, 8, 5, 5), module=nn.Conv3d(1, 1, 1))
    assert "2 channels, 5×5, 8 frames from left to right" in words


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
    assert (pixels[covered == 1] < colours.LEVELS).all()
    elsewhere = ((pixels < colours.LEVELS) & (covered == 0)).sum(1)
    assert set(elsewhere.tolist()) == ({0} if style.get("plain") else {0, colours.LEVELS})  # colour bars


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
    assert "one.jpg and two.jpg" in words[1]
    assert "second" not in sheet_of(random(1, 2, 8, 8)).provenance


def test_channels_beyond_the_limit_are_left_out_and_counted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheets, "MOST_PIXELS", 30_000)
    sheet = sheet_of({"a": random(1, 40, 20, 20), "b": random(1, 3, 2, 2)}, cell=40)
    assert sheet.left_out > 0
    part = sheet.provenance["parts"][0]
    assert len(part["channels"]) == len(part["low"]) < 40
    assert "channels left out: too many pixels, choose with channels=" in " ".join(words)


PHOTOGRAPH = Image.new("RGB", (50, 40), (10, 200, 30))


def test_the_first_cell_is_the_photograph_as_the_network_saw_it() -> None:
    sheet = sheet_of(random(1, 16, 9, 9), frames=[[PHOTOGRAPH]])
    part = sheet.provenance["parts"][0]
    assert (part["columns"], part["x"] > 144) == (4, True)
    pixels = np.asarray(sheet.image.convert("RGB")).astype(int)
    cell = pixels[part["y"] : part["y"] + 9 * part["zoom"] * 4 // 5, 14 : 14 + 9 * part["zoom"]]
    assert abs(cell - (10, 200, 30)).max() < 10
    without = sheet_of(random(1, 16, 9, 9)).provenance["parts"][0]
    assert {key: part[key] for key in ("columns", "zoom")} == {key: without[key] for key in ("columns", "zoom")}
    assert sheet_of(random(1, 16, 9, 9), frames=[[PHOTOGRAPH]], plain=True).provenance["parts"][0]["x"] == 0


@pytest.mark.parametrize(("size", "side"), [((1, 3, 2000, 9), 480), ((1, 3, 9, 2000), 480), ((1, 3, 7, 7), 144)])
def test_the_photograph_is_neither_tiny_nor_as_large_as_huge_maps(size: tuple[int, ...], side: int) -> None:
    picture = Image.new("RGB", (size[3], size[2]))
    sheet = sheet_of(random(*size), frames=[[picture]], cell=7)
    part = sheet.provenance["parts"][0]
    without = sheet_of(random(*size), cell=7).provenance["parts"][0]
    width = side if size[3] >= size[2] else max(round(side * size[3] / size[2]), text_pixels("input 9×2000").shape[1])
    assert part["x"] - without["x"] == width + 14


def test_each_item_of_a_batch_has_its_photograph(words: list[str]) -> None:
    pictures = [[Image.new("RGB", (40, 40), colour)] for colour in ("red", "blue")]
    sheet = sheet_of(random(2, 3, 9, 9), frames=pictures)
    pixels = np.asarray(sheet.image.convert("RGB")).astype(int)
    first, second = (pixels[part["y"] + 20, 20] for part in sheet.provenance["parts"])
    assert first[0] > 200 > 60 > first[2] and second[2] > 200 > 60 > second[0]


def test_an_overlay_shows_the_grey_photograph_through_weak_values() -> None:
    values = torch.tensor([0.0, 1.0, -2.0, 4.0, math.nan, -4.0]).view(1, 1, 2, 3)
    laid = sheet_of(values, scale="symmetric", cmap="RdBu_r", cell=20, alpha=0.5, frames=[[PHOTOGRAPH]])
    assert (laid.image.mode, laid.provenance["overlay"]) == ("RGB", True)
    part, pixels = laid.provenance["parts"][0], np.asarray(laid.image).astype(float)
    zoom = part["zoom"]
    cells = [pixels[part["y"] + at // 3 * zoom, part["x"] + at % 3 * zoom] for at in range(6)]
    grey = np.full(3, 0.8 * PHOTOGRAPH.convert("L").getpixel((0, 0)))
    palette = colours.palette("RdBu_r").astype(float)
    assert abs(cells[0] - grey).max() <= 1  # 0 is transparent
    assert abs(cells[3] - (grey + palette[colours.LEVELS - 1]) / 2).max() <= 1  # the largest has the opacity alpha
    assert abs(cells[5] - (grey + palette[0]) / 2).max() <= 1
    assert cells[4].tolist() == [255, 0, 255]
    from_grey = [abs(cell - grey).sum() for cell in cells]
    assert from_grey[0] < from_grey[1] < from_grey[3]
    assert cells[1][0] > cells[1][2] and cells[2][2] > cells[2][0]  # red above 0, blue below


def test_each_frame_and_each_item_lies_over_its_own() -> None:
    black, white = Image.new("RGB", (9, 9)), Image.new("RGB", (9, 9), "white")
    clip = sheet_of(torch.zeros(1, 1, 2, 3, 3), module=nn.Conv3d(1, 1, 1), scale="-1:1", alpha=1, plain=True,
                    frames=[[black, black, white, white]])  # fmt: skip
    laid = np.asarray(clip.image)
    middle = laid.shape[1] // 2
    assert laid[:, : middle - 2].max() < 3 and laid[:, middle + 2 :].min() > 200
    pair = sheet_of(torch.zeros(2, 1, 3, 3), scale="-1:1", alpha=1, plain=True, cell=6, frames=[[black], [white]])
    first, second = (np.asarray(pair.image)[part["y"], 0, 0] for part in pair.provenance["parts"])
    assert first < 3 and second > 200


def test_proposals_and_single_positions_are_not_laid_over() -> None:
    for values in (random(1000, 2, 7, 7), random(1, 8, 1, 1)):
        laid, plain = (sheet_of(values, frames=[[PHOTOGRAPH]], alpha=alpha) for alpha in (0.5, None))
        assert np.array_equal(np.asarray(laid.image), np.asarray(plain.image.convert("RGB")))


def test_tokens_and_other_shapes_are_drawn(words: list[str]) -> None:
    sheet = sheet_of(random(1, 50, 6), Call("encoder", "Encoder", 0, None), shown=InputSize(28, 28))
    assert [part["part"] for part in sheet.provenance["parts"]] == ["", "class token"]
    assert "maps   6 channels, 7×7 tokens" in words
    assert "class token   6 channels" in words
    assert "index" not in words[0]


def test_single_values_are_bars_as_long_as_the_values() -> None:
    sheet = sheet_of(torch.tensor([[4.0, -1.0, 2.0]]), plain=True)
    pixels = np.asarray(sheet.image)
    bars = [(row == colours.BAR).sum() for row in pixels if (row == colours.TRACK).any() or (row == colours.BAR).any()]
    assert sorted(set(bars)) == [48, 96, 192]
    assert sheet.provenance["parts"][0]["values"] == [4.0, -1.0, 2.0]


def test_scores_of_classes_are_in_their_order_with_their_names(words: list[str]) -> None:
    scores = torch.arange(1000.0).view(1, 1000).sin()
    names = [f"name {number}" for number in range(1000)]
    summary = reduce_output(scores, choice=ChannelChoice(usual=True), names=names)
    sheet = draw_call(summary, CALL, ORIGIN)
    assert sheet.provenance["parts"][0]["channels"] == scores[0].argsort(descending=True)[:24].tolist()
    assert "24 of 1,000 classes, by value   all: channels='all'" in words
    without = reduce_output(scores, choice=ChannelChoice(usual=True)).parts[0].tiles
    assert without.channels == scores[0].abs().argsort(descending=True, stable=True)[:24].tolist()


def test_maps_of_classes_are_named(words: list[str]) -> None:
    summary = reduce_output(random(1, 3, 4, 4), names=["cat", "dog", "hen"])
    draw_call(summary, CALL, ORIGIN)
    assert "3 classes, 4×4" in words
    assert reduce_output(random(1, 6, 4, 4), names=["cat", "dog", "hen"]).parts[0].names == ()


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


def test_draw_sheet_takes_channels_shapes_scales_and_colour_maps() -> None:
    values = random(1, 6, 4, 4)
    same = [hookscope.draw_sheet(values, channels=c).tobytes() for c in ("1,3", [1, 3], (1, 3), np.array([1, 3]))]
    assert len(set(same)) == 1
    draw = hookscope.draw_sheet
    assert draw(values[0], plain=True).tobytes() == draw(values, plain=True).tobytes()
    assert draw(values[0, 0], plain=True).tobytes() == draw(values[:, :1], plain=True).tobytes()
    assert draw(values, scale=(-1, 1)).tobytes() == draw(values, scale="-1:1").tobytes() != draw(values).tobytes()
    assert draw(values, cmap="gray").getpalette() != draw(values).getpalette()
    assert draw(values[0].half()).mode == "P"
    assert draw(random(1, 30)).tobytes() == draw(random(1, 30)[0]).tobytes()  # single values, not a map of one row
    assert draw(random(4, 4, 9), plain=True, cell=1).size == (2 * 9 + 2, 2 * 4 + 2)  # never channels-last
    assert draw(random(1, 4, 4, 9), layer=nn.LayerNorm(9), plain=True, cell=1, columns=9).size == (9 * 4 + 16, 4)


def test_with_a_model_the_sheet_says_where_it_is_from_and_shows_what_the_network_saw(words: list[str]) -> None:
    net = LoadedModel.of(nn.Conv2d(3, 8, 1), "net", "random (seed 0)", WeightsMetadata(), "classification")
    image = hookscope.draw_sheet(random(8, 7, 7), PHOTOGRAPH, net, title="conv1")
    assert words[:2] == ["conv1", f"net   {net.preprocess.describe()}"]
    assert words[2] == "weights: random (seed 0), the network is not trained"
    assert image.mode == "P"


def test_draw_overlay_is_the_overlay_of_the_command() -> None:
    values, picture = random(1, 4, 5, 5), PHOTOGRAPH.resize((50, 50))
    laid = hookscope.draw_overlay(values, picture, alpha=0.3, columns=2)
    command = sheet_of(values, scale="symmetric", cmap="RdBu_r", alpha=0.3, frames=[[picture]], columns=2)
    part = command.provenance["parts"][0]
    height, width = 2 * part["step_y"] - 6, part["x"] + 2 * part["step_x"]
    below = [np.asarray(image)[-height:, :width] for image in (laid, command.image)]
    assert np.array_equal(*below)


def test_slices_of_a_volume_stand_side_by_side() -> None:
    volume = torch.rand(1, 4, 3, 5, 6)
    flat = torch.cat([volume[0, :, depth] for depth in range(3)], dim=2)  # (4, 5, 18)
    judge = to_image(draw_grids([reduce_maps(flat)], 2, 12, True, 3)[0].pixels, "viridis")
    for given in (volume, volume.numpy()):
        assert hookscope.draw_sheet(given, columns=2, cell=12, plain=True).tobytes() == judge.tobytes()


@pytest.mark.parametrize(
    ("shape", "options", "error", "words"),
    [
        ((3, 0, 4), {}, NoMapError, "has no maps"),
        ((), {}, NoMapError, "has no maps"),
        ((1, 1, 2, 3, 4, 4), {}, NoMapError, "not a feature map"),
        ((3, 4, 4), {"scale": "loud"}, UsageError, "no scale 'loud'"),
        ((3, 4, 4), {"cmap": "virids"}, UsageError, "nearest: viridis"),
        ((3, 4, 4), {"names": ["cat"]}, UsageError, "there are 1 names for 3 channels"),
        ((3, 4, 4), {"columns": 0}, UsageError, "columns must be an integer of at least 1"),
        ((3, 4, 4), {"channels": "x"}, SelectionError, "bad channels"),
        ((3, 4, 4), {"channels": []}, SelectionError, "bad channels"),
        ((3, 4, 4), {"channels": [3]}, LayerError, "there are 3: 0 to 2"),
    ],
)
def test_draw_sheet_refuses_wrong_arguments(
    shape: tuple[int, ...], options: dict, error: type[HookscopeError], words: str
) -> None:
    with pytest.raises(error, match=words):
        hookscope.draw_sheet(torch.rand(shape), **options)
    if not options:
        with pytest.raises(UsageError, match="alpha must be from 0 to 1"):
            hookscope.draw_overlay(torch.rand(3, 4, 4), PHOTOGRAPH, alpha=2)


@pytest.mark.parametrize(
    ("field", "said", "box"),
    [
        (ReceptiveField("computed", (24, 32), (16, 16), (-8, 0)), "32×24 (box: of the middle unit)", (32 + 2, 24 + 2)),
        (ReceptiveField("computed", (400, 400), (16, 16), (-190, -190)), "400×400", None),
        (ReceptiveField("whole", (96, 144)), ": the whole input", None),
    ],
    ids=["a part", "larger than the input", "whole"],
)
def test_the_photograph_shows_what_the_middle_unit_sees(
    field: ReceptiveField, said: str, box: tuple[int, ...] | None, words: list[str]
) -> None:
    photograph = [[Image.new("RGB", (144, 96), (90, 120, 60))]]
    summary = reduce_output(torch.rand(1, 4, 6, 7), None, None, ChannelChoice.parse("all"), Scale.parse("channel"))
    plain = draw_call(summary, CALL, ORIGIN, Style(cell=12), photograph).image.convert("RGB")
    seen = replace(summary, field=field, input_size=InputSize(96, 144))
    drawn = draw_call(seen, CALL, ORIGIN, Style(cell=12), photograph).image.convert("RGB")
    assert f"receptive field{' ' * (said[0] != ':')}{said}" in next(line for line in words if "receptive" in line)
    below = 20 + sheets._HEAD * 5  # below the text of the header
    moved = ImageChops.difference(plain.crop((0, below, *plain.size)), drawn.crop((0, below, *plain.size))).getbbox()
    if box is None:
        assert moved is None
    else:  # a white frame on the edge of the box, and a black one around it
        assert moved is not None and (moved[2] - moved[0], moved[3] - moved[1]) == box


def test_each_photograph_has_a_cell_of_the_size_of_its_maps() -> None:
    frames = [[Image.new("RGB", (40, 20), "red")], [Image.new("RGB", (20, 20), name) for name in ("black", "blue")]]
    cells, table = photograph_cells({0: (0, 200), 2: (1, 0)}, frames, None)
    first, second = cells[0], cells[2]
    assert first.shape == (LABEL_HEIGHT + 100, 200) and second.shape[0] == LABEL_HEIGHT + 144
    shown = [tuple(map(int, table[int(cell[-1, 0]) - colours.PHOTOGRAPH])) for cell in (first, second)]
    assert shown == [(255, 0, 0), (0, 0, 255)]


def test_the_box_lies_on_its_shares_of_the_photograph() -> None:
    grey = [[Image.new("RGB", (200, 200), (128, 128, 128))]]
    with_box = photograph_cells({0: (0, 200)}, grey, (0.25, 0.5, 0.75, 1.0))[0][0]
    rows, columns = np.nonzero(with_box[LABEL_HEIGHT:] != with_box[-1, 0])
    assert (columns.min(), columns.max(), rows.min(), rows.max()) == (49, 150, 99, 199)
