"""Pages of maps: the photograph, what the network saw of it, the maps, what they say, what their files hold."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.drawing.files import read_provenance, write_png
from hookscope.drawing.heat import DARK, LIGHT
from hookscope.errors import UsageError
from hookscope.explain import class_activation_maps, page as pages
from hookscope.explain.cam_maps import ClassActivationMap, fuse_maps
from hookscope.explain.page import (
    OverlaySource,
    answer_facts,
    draw_cam,
    draw_saliency,
    why_empty,
    why_unseen,
)
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.hooks.calls import Call
from hookscope.images import ImageWarning
from hookscope.models import load_model
from hookscope.scores.logits import Prediction
from tests.explain.pages import BOX, SAYS_RANDOM, SAYS_UNSEEN, TABBY, UNSEEN, VALUES, Drawn, net, picture, record_page

OTHER = Prediction(7, None, -1.5, 0.1)


def cam(layer: str = "layer4", values: Any = VALUES, answer: Prediction = TABBY, **more: Any) -> ClassActivationMap:
    call = Call(layer, more.pop("type", "Sequential"), more.pop("call", 0), None)
    return ClassActivationMap(call, answer, "gradcam", np.asarray(values, np.float32), 512, (224, 224), **more)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return record_page(monkeypatch)


def about(image: Image.Image) -> Any:
    return json.loads(image.info["hookscope"])


def test_the_source_of_a_loaded_model_is_what_its_network_saw() -> None:
    source = OverlaySource.of(picture(), net())
    assert source.box == BOX != (0, 0, 400, 300)
    assert source.lines("gradcam") == [
        "resnet34, weights: DEFAULT, method: gradcam",
        f"cat.jpg, preprocessing: {net().preprocess.describe()}",
    ]
    assert list(source.panel.words) == ["cat.jpg", "400×300 pixels"]


def test_of_a_module_and_of_nothing_the_source_is_the_whole_photograph_in_rgb() -> None:
    source = OverlaySource.of(Image.new("L", (40, 30)), nn.Identity())
    assert (source.box, source.photograph.mode) == ((0, 0, 40, 30), "RGB")
    assert source.lines("gradcam") == ["Identity, method: gradcam"]
    assert OverlaySource.of(Image.new("RGB", (4, 3))).lines("gradcam") == ["method: gradcam"]
    for model in (net(), nn.Identity(), None):
        assert OverlaySource.of(Image.new("LA", (40, 30)), model).photograph.mode == "RGB"


def test_the_peak_is_the_middle_of_the_highest_cell_in_the_box() -> None:
    values = np.zeros((3, 5), np.float32)
    values[2, 1] = 0.5
    values[0, 0] = 0.25
    origin = OverlaySource.of(picture()).origin
    for box, peak in (((100, 0, 200, 30), (100 + 1.5 * 20, 25)), ((-50, -30, 450, 330), (-50 + 150, -30 + 300))):
        assert OverlaySource(picture().image, box, origin).peak_in(values) == peak
    for value in (0.0, -1.0):
        assert OverlaySource.of(picture()).peak_in(np.full((2, 2), value, np.float32)) is None


@pytest.mark.parametrize(
    ("weights", "warns"),
    [
        ("random (seed 0)", True),
        ("IMAGENET1K_V1", False),
        ("from factory (seed 0): untrained unless it loads its own", False),
        ("my random.pth", False),
    ],
)
def test_random_weights_are_warned_of(weights: str, warns: bool) -> None:
    heading = OverlaySource.of(picture(), net(weights)).heading(["a cat"], "gradcam", "an alarm")
    assert (heading.first, heading.warning) == (SAYS_RANDOM if warns else "", "an alarm")


@pytest.mark.parametrize(("share", "best", "unseen"), [(0.0179, 0.9, True), (0.0181, 0.9, False), (1e-5, 1e-5, False)])
def test_a_class_is_unseen_below_a_fiftieth_of_the_best(share: float, best: float, unseen: bool) -> None:
    answer = Prediction(0, None, 0.0, share, best)
    assert answer.low_probability == bool(why_unseen(answer)) == unseen


def test_answers_in_words_and_in_numbers() -> None:
    source, small = OverlaySource.of(picture(), net("IMAGENET1K_V1")), Prediction(3, None, -1.0, 0.00012)
    assert source.answer_lines(small) == ["class 3", "score -1, probability 0.012 %"]
    assert OverlaySource.of(picture(), net("random (seed 1)")).answer_lines(small) == ["class 3", "score -1"]
    facts = {"class": 3, "label": "owl", "score": 2.5, "probability": 0.5}
    assert answer_facts(Prediction(3, "owl", 2.5, 0.5)) == facts
    broken = {"class": 3, "label": None, "score": None, "probability": None}
    assert answer_facts(Prediction(3, None, math.nan, math.inf)) == broken


def test_one_map_names_class_score_origin_and_layer(drawn: Drawn) -> None:
    draw_cam([cam()], picture(), net("random (seed 0)"), cmap="magma")
    assert drawn.words == [
        "tabby (281)",
        "score 12.25",
        "resnet34, weights: random (seed 0), method: gradcam",
        f"cat.jpg, preprocessing: {net().preprocess.describe()}",
    ]
    assert drawn["heading"].first == SAYS_RANDOM
    panel = drawn.only
    assert (list(panel.words), panel.alarm, panel.scale) == (
        ["layer4", "Sequential, 512 channels of 7×7"],
        "",
        "value of the map",
    )
    assert panel.heat is not None
    assert np.array_equal(panel.heat.values, VALUES)
    assert (panel.heat.box, panel.heat.top) == (BOX, 48)
    left, top, right, bottom = BOX
    assert panel.heat.peak == pytest.approx((left + 6.5 / 7 * (right - left), top + 6.5 / 7 * (bottom - top)))
    assert (drawn["cmap"], drawn["width"]) == ("magma", None)


@pytest.mark.parametrize(
    ("values", "unreached", "says"),
    [
        (np.zeros((2, 2)), False, "all zero: no position of this layer raises the score"),
        (np.zeros((2, 2)), True, "all zero: the score does not depend on any position of this map"),
        (np.full((2, 2), -1), False, "no value is above 0: no position of this layer raises the score"),
        (np.ones((2, 2)), False, ""),
    ],
)
def test_a_class_activation_map_that_is_all_zero_has_a_line_and_no_cross(
    drawn: Drawn, values: Any, unreached: bool, says: str
) -> None:
    found = cam(values=values, unreached=unreached)
    draw_cam([found], picture(), net())
    assert drawn.only.alarm == why_empty(found) == says
    heat = drawn.only.heat
    assert heat is not None
    assert (heat.mark is None, drawn.only.scale == "") == (bool(says), bool(says))


def test_negative_values_are_counted_and_not_drawn(drawn: Drawn) -> None:
    draw_cam([cam(values=VALUES - 10)], picture(), net())
    assert (drawn.only.words[-1], drawn.only.heat.top) == ("lowest -10, not drawn", 38)  # type: ignore[union-attr]


def test_of_maps_of_a_clip_the_mean_is_drawn(drawn: Drawn) -> None:
    clip = cam(values=np.stack([VALUES, VALUES[::-1, ::-1] * 3]))
    draw_cam([clip], picture(), net())
    assert drawn.only.words[1] == "Sequential, 512 channels of 7×7, mean of 2 frames"
    assert np.array_equal(clip.still, (VALUES + VALUES[::-1, ::-1] * 3) / 2)
    assert drawn.only.heat.peak == OverlaySource.of(picture(), net()).peak_in(clip.still)  # type: ignore[union-attr]


def test_a_fused_map_has_a_scale_of_its_own(drawn: Drawn) -> None:
    page = draw_cam(fuse_maps([cam("layer3"), cam("layer4", type="Conv2d")]), picture(), net())
    assert (about(page)["fused"], about(page)["maps"][0]["type"]) == (True, "Sequential + Conv2d")
    assert drawn.only.scale == "mean, each map 0..1"
    assert drawn.only.words[0] == "layer3 + layer4"


@pytest.mark.filterwarnings("error:the maps are of an input of")
def test_maps_of_another_input_than_the_photographs_are_told() -> None:
    shapes, photograph = load_model("shapes"), Image.new("RGB", (300, 200))
    draw_cam(class_activation_maps(shapes, torch.rand(1, 3, 128, 128)), photograph, shapes)
    maps = class_activation_maps(shapes, torch.rand(1, 3, 96, 96))
    with pytest.raises(ImageWarning, match=r"^the maps are of an input of 96x96, and shapes makes one of 128x128"):
        draw_cam(maps, photograph, shapes)


@pytest.mark.parametrize(("count", "shape"), [(1, [1]), (3, [4]), (5, [3, 3]), (20, [5, 5, 5, 5, 1])])
def test_the_maps_of_a_class_stand_side_by_side_after_the_photograph(
    drawn: Drawn, count: int, shape: list[int]
) -> None:
    draw_cam([cam(f"layer{at}") for at in range(count)], picture(), net(), width=40)
    assert [len(row.panels) for row in drawn["rows"]] == shape
    photograph = ["cat.jpg"] if count > 1 else []
    assert [panel.words[0] for panel in drawn.panels] == [*photograph, *(f"layer{at}" for at in range(count))]
    assert [panel.heat is None for panel in drawn.panels].count(True) == len(photograph)


def test_several_maps_of_a_large_photograph_are_drawn_smaller_with_a_line(
    drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pages._LARGEST == 60_000_000
    monkeypatch.setattr(pages, "_LARGEST", 600_000)
    draw_cam([cam()], picture(600, 400))
    assert drawn["width"] is None  # one map keeps the size of the photograph
    page = draw_cam([cam(f"layer{at}") for at in range(3)], picture(600, 400))
    assert drawn["width"] == int(600 * (60 / 96) ** 0.5) == 474
    assert drawn.words[-1].endswith(", drawn at 79 % of its size")
    assert page.width == 4 * 474 + 3 * 12 + 28


def test_several_classes_have_a_row_for_each_layer_one_photograph_and_one_scale(drawn: Drawn) -> None:
    maps = [cam(layer, answer=answer) for answer in (TABBY, OTHER) for layer in ("layer3", "layer4")]
    page = draw_cam(maps, picture(), net("random (seed 0)"), width=300)
    heading = drawn["heading"]
    assert heading.words == [
        "gradcam of 2 classes in 2 layers",
        *OverlaySource.of(picture(), net("random (seed 0)")).lines("gradcam"),
    ]
    assert (heading.first, heading.photograph) == (SAYS_RANDOM, True)
    assert heading.scale == "share of the layer's highest value"
    assert [row.words for row in drawn["rows"]] == [
        [layer, "Sequential, 512 channels of 7×7, highest value of all classes 48"] for layer in ("layer3", "layer4")
    ]
    assert [[list(panel.words) for panel in row.panels] for row in drawn["rows"]] == 2 * [
        [
            ["tabby (281)", "score 12.25", "highest 48"],
            ["class 7", "score -1.5", "highest 48"],
        ]
    ]
    assert not [panel for panel in drawn.panels if panel.heat is None or panel.scale]
    assert page.width == 2 * 300 + 12 + 28 + 0
    assert [(one["layer"], one["class"]) for one in about(page)["maps"]] == [
        ("layer3", 281), ("layer4", 281), ("layer3", 7), ("layer4", 7),
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "shape"), [(5, [5]), (6, [3, 3]), (7, [4, 3]), (12, [4, 4, 4])])
def test_many_classes_of_a_layer_stand_in_rows_of_about_one_length(drawn: Drawn, count: int, shape: list[int]) -> None:
    draw_cam([cam(answer=Prediction(at, None, 0.0, 0.1)) for at in range(count)], picture(), width=60)
    assert [len(row.panels) for row in drawn["rows"]] == shape
    assert [bool(row.words) for row in drawn["rows"]] == [True] + [False] * (len(shape) - 1)


def test_the_classes_of_a_layer_share_a_scale_and_a_map_without_a_colour_says_so(drawn: Drawn) -> None:
    maps = [cam("layer3", VALUES), cam("layer4", VALUES / 100)]
    maps += [cam("layer3", VALUES - 40, OTHER), cam("layer4", VALUES / 2000, OTHER)]
    draw_cam(maps, picture(), net())
    cells = [row.panels for row in drawn["rows"]]
    assert [[cell.heat.top for cell in row] for row in cells] == [[48, 48], [pytest.approx(0.48)] * 2]
    assert [[cell.words[2] for cell in row] for row in cells] == [
        ["highest 48", "highest 8"],
        ["highest 0.48", "highest 0.024"],
    ]
    assert [[cell.heat.mark is None for cell in row] for row in cells] == [[False, False], [False, True]]
    assert (list(cells[0][1].words[3:]), list(cells[1][1].words[3:])) == (
        ["lowest -40, not drawn"],
        ["hardly visible on this scale"],
    )
    draw_cam([maps[0], maps[1]], picture(), net())  # of one class the layers have each their own
    assert [panel.heat.top for panel in drawn.maps] == [48, pytest.approx(0.48)]  # type: ignore[union-attr]


def test_a_weak_class_is_drawn_on_the_scale_of_the_best_and_in_red_the_page_says_that_the_model_does_not_see_it(
    drawn: Drawn,
) -> None:
    maps = [cam("layer3", VALUES), cam("layer3", VALUES / 8, UNSEEN)]
    page = draw_cam([maps[1]], picture(), net(), scale_of=maps)
    assert drawn["heading"].warning == SAYS_UNSEEN and drawn.only.words[-1] == "highest 6, of all classes 48"
    assert drawn.only.heat.top == about(page)["maps"][0]["top"] == 48  # type: ignore[union-attr]
    draw_cam([maps[1]], picture(), net("random (seed 3)"))
    assert (drawn["heading"].first, drawn["heading"].warning) == (SAYS_RANDOM, SAYS_UNSEEN)
    draw_cam(maps, picture(), net())
    assert [panel.alarm for panel in drawn.panels] == ["", SAYS_UNSEEN]
    draw_cam([maps[0]], picture(), net(), scale_of=maps)
    assert drawn["heading"].warning == "" and drawn.only.words[-1] == "Sequential, 512 channels of 7×7"


def test_the_file_of_class_activation_maps_remembers_where_it_comes_from(tmp_path: Path) -> None:
    page = draw_cam([cam(), cam("relu", VALUES - 60, call=1, type="ReLU")], picture(), net(), cmap="magma")
    write_png(page, tmp_path / "x.png")
    told = read_provenance(tmp_path / "x.png")
    assert told == about(page)
    assert (told["model"], told["weights"], told["image"], told["sha256"]) == (
        "resnet34", "DEFAULT", "cat.jpg", "ab" * 32,
    )  # fmt: skip
    assert (told["method"], told["cmap"], told["size"]) == ("gradcam", "magma", list(page.size))
    assert (told["seen"], told["fused"]) == ([round(side, 3) for side in BOX], False)
    first, second = told["maps"]
    assert first == {
        "index": None, "order": None, "layer": "layer4", "call": 0, "type": "Sequential", "class": 281,
        "label": "tabby", "score": 12.25,
        "probability": 0.875, "shape": [7, 7], "low": 0.0, "high": 48.0,
        "top": 48.0,
    }  # fmt: skip
    assert (second["layer"], second["call"], second["low"], second["high"]) == ("relu", 1, -60.0, -12.0)


def test_no_map_and_a_colour_map_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="no class activation map to draw"):
        draw_cam([], picture())
    with pytest.raises(UsageError, match="no colour map"):
        draw_cam([cam()], picture(), cmap="infern")


def saliency(values: Any = None, method: str = "gradient", answer: Prediction = TABBY) -> Saliency:
    values = np.random.default_rng(0).normal(size=(3, 40, 40)) if values is None else values
    return Saliency(answer, method, torch.as_tensor(values, dtype=torch.float32))


def test_the_page_has_the_photograph_the_map_and_the_smoothed_map(drawn: Drawn) -> None:
    found = saliency()
    draw_saliency(found, picture(), net("random (seed 0)"))
    source = OverlaySource.of(picture(), net("random (seed 0)"))
    assert drawn.words == ["tabby (281)", "score 12.25", *source.lines("gradient")]
    assert (drawn["heading"].first, drawn["ground"], drawn["cmap"]) == (SAYS_RANDOM, DARK, "inferno")
    photograph, raw, smoothed = drawn.panels
    assert photograph.heat is None and len(drawn["rows"]) == 1
    values = found.map.numpy()
    top = np.sort(values.ravel())[round(0.995 * 1600) - 1]
    assert list(raw.words) == [
        "how strongly the score reacts to each pixel: |dS/dx|, largest of its colour channels",
        f"scale clipped at the 99.5th percentile; highest value {values.max():.3g}",
    ]
    assert raw.heat is not None and smoothed.heat is not None
    assert (raw.heat.top, raw.heat.box, raw.heat.signed) == (pytest.approx(top), BOX, False)
    assert (values > raw.heat.top).mean() == pytest.approx(0.005, abs=1e-3)
    assert (raw.scale, raw.alarm) == ("value of the map", "")
    y, x = np.unravel_index(values.argmax(), values.shape)
    left, above, right, below = BOX
    side = (right - left) / 40
    assert raw.heat.peak == pytest.approx((left + (x + 0.5) * side, above + (y + 0.5) * (below - above) / 40))
    assert smoothed.words[0] == "smoothed: Gaussian, sigma 0.625 pixels of the input"
    assert np.array_equal(smoothed.heat.values, found.smoothed(40 / 64))
    assert smoothed.heat.top < raw.heat.top


@pytest.mark.parametrize("sigma", [0.5, 2.0, 30.0])
@pytest.mark.parametrize("shape", [(40, 40), (17, 60)])
def test_the_smoothed_map_is_the_gaussian_filter_of_the_map(sigma: float, shape: tuple[int, int]) -> None:
    found = saliency(np.random.default_rng(0).normal(size=(3, *shape)), "gradient-input")
    expected = found.still.astype(float)
    for axis, side in enumerate(shape):  # by arithmetic: mirrored at the edges, weights up to four sigmas
        radius = min(int(np.ceil(4 * sigma)), min(shape) - 1)
        steps = np.arange(-radius, radius + 1)
        weights = np.exp(-0.5 * (steps / sigma) ** 2)
        places = np.abs(np.arange(side)[:, None] + steps)
        places = np.where(places > side - 1, 2 * (side - 1) - places, places)
        weighted = np.take(expected, places, axis) * (weights / weights.sum()).reshape((-1, 1) if axis == 0 else -1)
        expected = weighted.sum(axis + 1)
    assert found.smoothed(sigma) == pytest.approx(expected, abs=1e-5)


def test_smoothing_is_refused_below_zero_and_left_out_at_zero(drawn: Drawn) -> None:
    draw_saliency(saliency(), picture(), smooth=0)
    assert [panel.heat is None for panel in drawn.panels] == [True, False]
    draw_saliency(saliency(), picture(), smooth=3)
    assert drawn.panels[2].words[0] == "smoothed: Gaussian, sigma 3 pixels of the input"
    with pytest.raises(UsageError, match="smoothing by -1 pixels; give a number above 0"):
        draw_saliency(saliency(), picture(), smooth=-1)
    assert saliency(np.ones((3, 1, 1))).smoothed().tolist() == [[1]]


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_every_method_has_its_words_and_those_with_signs_two_colours_about_zero(drawn: Drawn, method: str) -> None:
    values = np.zeros((3, 40, 40))
    values[:, :20] = 0.25
    values[0, 20:] = -3.0
    found = saliency(values, method)
    draw_saliency(found, picture())
    raw, _ = drawn.maps
    assert raw.heat is not None
    look = drawn["cmap"], drawn["ground"], raw.heat.signed, raw.heat.values.min()
    if SALIENCY_METHODS[method].signed:
        assert look == ("RdBu_r", LIGHT, True, -3) and (raw.heat.top, raw.heat.values.max()) == (3, 0.75)
        assert raw.words[1] == "red raises the score, blue lowers it"
        assert raw.words[2] == "scale clipped at the 99.5th percentile; highest value 0.75, lowest -3"
        draw_saliency(found, picture(), cmap="PiYG")
        assert drawn.maps[0].words[1] == "the right half of the colours raises the score, the left half lowers it"
    else:
        assert look == ("inferno", DARK, False, 0.25)
    assert "colour channels" in raw.words[0] or not SALIENCY_METHODS[method].gradient
    assert np.array_equal(np.abs(found.still), found.map.numpy())


def test_maps_of_several_classes_share_a_scale(drawn: Drawn) -> None:
    found, wide = saliency(np.full((3, 4, 4), 2.0), answer=UNSEEN), saliency(np.full((3, 4, 4), 8.0))
    page = draw_saliency(found, picture(), net(), scale_of=[found, wide])
    assert [panel.heat.top for panel in drawn.maps] == [8, pytest.approx(8)]  # type: ignore[union-attr]
    assert about(page)["top"] == 8
    words = "scale clipped at the 99.5th percentile of the class with the widest scale, here 2; highest value 2"
    assert drawn.maps[0].words[-1] == words
    assert drawn["heading"].warning == SAYS_UNSEEN
    both = draw_saliency([found, wide], picture(), net())
    assert both.height > 1.8 * page.height and [page["top"] for page in about(both)["pages"]] == [8, 8]


def test_a_saliency_map_that_is_all_zero_has_a_line_and_one_pixel_that_counts_is_drawn(drawn: Drawn) -> None:
    draw_saliency(saliency(np.zeros((3, 4, 4))), picture())
    [panel] = drawn.maps
    assert panel.alarm == "all zero: the score does not depend on any pixel"
    assert (panel.heat.mark, panel.scale, len(panel.words)) == (None, "", 1)  # type: ignore[union-attr]
    values = np.zeros((3, 40, 40))
    values[1, 20, 10] = -4
    draw_saliency(saliency(values), picture())
    assert drawn.maps[0].heat.top == 4  # type: ignore[union-attr]
    assert drawn.maps[0].heat.mark == pytest.approx((10.5 * 10, 20.5 * 7.5))  # type: ignore[union-attr]


def test_the_cross_of_a_map_with_signs_is_on_the_highest_value_above_zero(drawn: Drawn) -> None:
    values = np.zeros((3, 40, 40))
    values[1, 20, 10], values[0, 5, 30] = -4, 1
    draw_saliency(saliency(values, "gradient-input"), picture(), smooth=0)
    [panel] = drawn.maps
    assert panel.heat.mark == pytest.approx((30.5 * 10, 5.5 * 7.5))  # type: ignore[union-attr]
    values[0, 5, 30] = 0
    draw_saliency(saliency(values, "gradient-input"), picture(), smooth=0)
    [panel] = drawn.maps
    assert panel.heat.mark is None and panel.scale  # type: ignore[union-attr]
    assert panel.alarm == "no value is above 0: no pixel raises the score"


def test_of_saliency_of_a_clip_the_mean_is_drawn(drawn: Drawn) -> None:
    clip = np.random.default_rng(1).normal(size=(3, 4, 10, 10))
    draw_saliency(saliency(clip), picture())
    assert np.allclose(saliency(clip).still, np.abs(clip).max(0).mean(0))
    assert drawn.maps[0].words[0].endswith("|dS/dx|, largest of its colour channels, mean of 4 frames")
    assert np.allclose(saliency(clip, "gradient-input").still, clip.sum(0).mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("size", "side", "rows", "width"), [((400, 300), 8, 1, None), ((3000, 2000), 8, 1, 640), ((900, 300), 800, 3, 800)]
)
def test_panels_are_as_wide_as_the_map_needs(
    drawn: Drawn, size: tuple[int, int], side: int, rows: int, width: int | None
) -> None:
    draw_saliency(saliency(np.ones((3, 4, side))), picture(*size), smooth=0)
    assert (len(drawn["rows"]), drawn["width"]) == (rows if rows == 1 else 2, width)


@pytest.mark.parametrize("score", [12.25, float("nan")])
def test_the_file_of_saliency_remembers_where_it_comes_from(tmp_path: Path, score: float) -> None:
    found = saliency(answer=Prediction(281, "tabby", score, 0.875))
    page = draw_saliency(found, picture(), net(), cmap="magma")
    write_png(page, tmp_path / "x.png")
    told = read_provenance(tmp_path / "x.png")
    assert told == about(page)
    assert (told["model"], told["weights"], told["image"]) == ("resnet34", "DEFAULT", "cat.jpg")
    assert (told["method"], told["cmap"], told["size"]) == ("gradient", "magma", list(page.size))
    assert (told["class"], told["label"], told["score"]) == (281, "tabby", score if score == score else None)
    assert (told["shape"], told["seen"]) == ([3, 40, 40], [round(side, 3) for side in BOX])
    assert 0 < told["top"] < told["high"] == pytest.approx(float(found.map.max()))
    assert (told["smooth"], told["smooth_top"] < told["top"]) == (0.625, True)
