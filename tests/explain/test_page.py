"""Pages of class activation maps and saliency maps: what they say, how they are laid out, what their files hold."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hookscope.drawing.overlay import Panel
from hookscope.drawing.png import read_provenance, write_png
from hookscope.drawing.sheet import Origin
from hookscope.errors import UsageError
from hookscope.explain import page as pages
from hookscope.explain.cam import ClassActivationMap, fused
from hookscope.explain.page import (
    OverlaySource,
    answer_facts,
    answer_lines,
    draw_overlay,
    draw_saliency,
    draw_sheet,
    why_empty,
)
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.hooks.selection import Call
from hookscope.scores.logits import Prediction

ORIGIN = Origin("resnet34", "random (seed 0)", "a/cat.jpg", "ab" * 32, "ImageClassification resize 256 crop 224")
TABBY = Prediction(281, "tabby", 12.25, 0.875)
SOURCE = OverlaySource(Image.new("RGB", (400, 300), (200, 10, 10)), (50.0, 0.0, 350.0, 300.0), ORIGIN)
VALUES = np.arange(49, dtype=np.float32).reshape(7, 7)


def subject(width: int = 400, height: int = 300, name: str = "a/cat.jpg") -> OverlaySource:
    origin = Origin(ORIGIN.model, ORIGIN.weights, name, ORIGIN.sha256, ORIGIN.preprocess)
    return OverlaySource(Image.new("RGB", (width, height), (90, 90, 90)), (50.0, 0.0, 350.0, 300.0), origin)


def cam(layer: str = "layer4", values: Any = VALUES, answer: Prediction = TABBY, **more: Any) -> ClassActivationMap:
    call = Call(layer, more.pop("type", "Sequential"), more.pop("call", 0), None)
    return ClassActivationMap(call, answer, "gradcam", np.asarray(values, np.float32), 512, (224, 224), **more)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last page was made of."""
    kept: dict[str, Any] = {}
    draw = pages.draw_page

    def record(photograph: Any, heading: Any, rows: Any, cmap: str, width: Any = None, warning: str = "") -> Any:
        kept.update(heading=heading, rows=rows, cmap=cmap, width=width, warning=warning)
        return draw(photograph, heading, rows, cmap, width, warning=warning)

    monkeypatch.setattr(pages, "draw_page", record)
    return kept


def only(drawn: dict[str, Any]) -> Panel:
    [[panel]] = drawn["rows"]
    assert isinstance(panel, Panel)
    return panel


def test_the_overlay_says_class_score_origin_and_layer(drawn: dict[str, Any]) -> None:
    draw_overlay(subject(), [cam()], "magma")
    assert drawn["heading"] == [
        "tabby (281)",
        "score 12.25  probability 87.5 %",
        "resnet34  gradcam  weights: random (seed 0)",
        "cat.jpg  input: ImageClassification resize 256 crop 224",
    ]
    assert drawn["warning"] == "the weights are random: class and map mean nothing"
    panel = only(drawn)
    assert (list(panel.words), panel.alarm, panel.scale) == (
        ["layer4", "Sequential  512 channels of 7×7"],
        "",
        "value of the map",
    )
    assert panel.heat is not None
    assert np.array_equal(panel.heat.values, VALUES)
    assert (panel.heat.box, panel.heat.top) == ((50, 0, 350, 300), 48)
    assert panel.heat.peak == pytest.approx((50 + 6.5 / 7 * 300, 6.5 / 7 * 300))
    assert (drawn["cmap"], drawn["width"]) == ("magma", None)


@pytest.mark.parametrize(
    ("values", "unreached", "says"),
    [
        (np.zeros((2, 2)), False, "all zero: no place of this layer speaks for this class"),
        (np.zeros((2, 2)), True, "all zero: the score does not depend on any place of this map"),
        (np.full((2, 2), -1), False, "nothing is above 0: no place of this layer speaks for this class"),
        (np.ones((2, 2)), False, ""),
    ],
)
def test_a_map_that_is_all_zero_is_said(drawn: dict[str, Any], values: Any, unreached: bool, says: str) -> None:
    found = cam(values=values, unreached=unreached)
    draw_overlay(subject(), [found])
    assert only(drawn).alarm == why_empty(found) == says
    heat = only(drawn).heat
    assert heat is not None
    assert (heat.peak is None, only(drawn).scale == "") == (bool(says), bool(says))


def test_what_is_negative_is_said_and_not_drawn(drawn: dict[str, Any]) -> None:
    draw_overlay(subject(), [cam(values=VALUES - 10)])
    assert only(drawn).words[-1] == "lowest -10, not drawn"
    assert only(drawn).heat.top == 38  # type: ignore[union-attr]


def test_of_a_clip_the_mean_of_the_frames_is_drawn(drawn: dict[str, Any]) -> None:
    clip = cam(values=np.stack([VALUES, VALUES[::-1, ::-1] * 3]))
    draw_overlay(subject(), [clip])
    assert only(drawn).words[1] == "Sequential  512 channels of 7×7  mean of 2 frames"
    assert np.array_equal(clip.still, (VALUES + VALUES[::-1, ::-1] * 3) / 2)
    heat = only(drawn).heat
    assert heat is not None
    assert heat.peak == subject().peak_in(clip.still)


def test_a_fused_map_has_a_scale_of_its_own(drawn: dict[str, Any]) -> None:
    _, about = draw_overlay(subject(), [fused([cam("layer3"), cam("layer4", type="Conv2d")])], fused=True)
    assert (about["fused"], about["maps"][0]["type"]) == (True, "Sequential + Conv2d")
    assert only(drawn).scale == "mean, each map 0..1"
    assert only(drawn).words[0] == "layer3 + layer4"


@pytest.mark.parametrize(("count", "shape"), [(1, [1]), (4, [4]), (5, [2, 2, 1]), (20, [5, 5, 5, 5])])
def test_maps_stand_side_by_side_and_many_in_rows(drawn: dict[str, Any], count: int, shape: list[int]) -> None:
    draw_overlay(subject(), [cam(f"layer{at}") for at in range(count)])
    assert [len(row) for row in drawn["rows"]] == shape
    assert [panel.words[0] for row in drawn["rows"] for panel in row] == [f"layer{at}" for at in range(count)]


def test_several_maps_of_a_large_photograph_are_drawn_smaller_and_the_page_says_so(
    drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pages._LARGEST == 60_000_000
    monkeypatch.setattr(pages, "_LARGEST", 600_000)
    page, _ = draw_overlay(subject(600, 400), [cam(f"layer{at}") for at in range(4)])
    assert drawn["width"] == int(600 * (60 / 96) ** 0.5) == 474
    assert drawn["heading"][-1].endswith("  drawn at 79 % of its size")
    assert page.width == 4 * 474 + 3 * 12 + 28


def test_one_map_of_a_large_photograph_has_its_size(drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_LARGEST", 1000)
    draw_overlay(subject(), [cam()])
    assert drawn["width"] is None


def test_a_sheet_has_a_row_for_each_layer_and_a_column_for_each_class(drawn: dict[str, Any]) -> None:
    answers = [TABBY, Prediction(7, None, -1.5, 0.001)]
    maps = [cam(layer, answer=answer) for answer in answers for layer in ("layer3", "layer4")]
    page, about = draw_sheet(subject(), maps)
    assert drawn["heading"] == ["cat.jpg  2 layers, 2 classes", *subject().lines("gradcam")]
    assert drawn["warning"] == "the weights are random: class and map mean nothing"
    words = [[list(panel.words) for panel in row] for row in drawn["rows"]]
    classes = [
        ["tabby (281)", "score 12.25  probability 87.5 %", "highest 48"],
        ["class 7", "score -1.5  probability 0.1 %", "highest 48"],
    ]
    assert words == [[[layer, "Sequential  512 channels of 7×7"], *classes] for layer in ("layer3", "layer4")]
    assert [row[0].heat for row in drawn["rows"]] == [None, None]
    assert page.width == 3 * 300 + 2 * 12 + 28
    assert [(one["layer"], one["class"]) for one in about["maps"]] == [
        ("layer3", 281), ("layer4", 281), ("layer3", 7), ("layer4", 7),
    ]  # fmt: skip


def test_the_classes_of_a_layer_share_a_scale_on_the_sheet(drawn: dict[str, Any]) -> None:
    other = Prediction(7, None, -1.5, 0.001)
    maps = [cam("layer3", VALUES), cam("layer4", VALUES / 100)]
    maps += [cam("layer3", VALUES - 40, other), cam("layer4", -VALUES, other)]
    draw_sheet(subject(), maps)
    cells = [row[1:] for row in drawn["rows"]]
    assert [[cell.heat.top for cell in row] for row in cells] == [[48, 48], [pytest.approx(0.48)] * 2]
    assert [[cell.words[2] for cell in row] for row in cells] == [
        ["highest 48", "highest 8"],
        ["highest 0.48", "highest 0"],
    ]
    assert [[cell.scale == "" for cell in row] for row in cells] == [[False, False], [False, True]]
    assert cells[0][1].words[3] == "lowest -40, not drawn"
    draw_overlay(subject(), [maps[0], maps[1]])  # while beside each other layers have each their own
    assert [panel.heat.top for panel in drawn["rows"][0]] == [48, pytest.approx(0.48)]


def test_a_row_of_the_sheet_without_anything_is_drawn(drawn: dict[str, Any]) -> None:
    other = Prediction(7, None, -1.5, 0.001)
    draw_sheet(subject(), [cam(values=-VALUES - 1), cam(values=-VALUES - 2, answer=other)])
    assert [(cell.scale, cell.words[2]) for cell in drawn["rows"][0][1:]] == [("", "highest -1"), ("", "highest -2")]
    assert all(cell.alarm.startswith("nothing is above 0") for cell in drawn["rows"][0][1:])


def test_trained_weights_are_not_warned_of(drawn: dict[str, Any]) -> None:
    trained = dataclasses.replace(subject(), origin=dataclasses.replace(ORIGIN, weights="IMAGENET1K_V1"))
    for draw in (draw_overlay, draw_sheet):
        draw(trained, [cam()])
        assert drawn["warning"] == ""


def test_a_sheet_of_one_is_singular(drawn: dict[str, Any]) -> None:
    draw_sheet(subject(), [cam()])
    assert drawn["heading"][0] == "cat.jpg  1 layer, 1 class"


def test_calls_of_one_layer_are_told_apart(drawn: dict[str, Any]) -> None:
    draw_sheet(subject(), [cam("relu", call=0), cam("relu", call=1)])
    assert [row[0].words[0] for row in drawn["rows"]] == ["relu", "relu#1"]


def test_the_file_remembers_where_it_comes_from(tmp_path: Path) -> None:
    page, about = draw_overlay(subject(), [cam(), cam("relu", VALUES - 60, call=1, type="ReLU")], "magma")
    write_png(page, tmp_path / "x.png", about)
    told = read_provenance(tmp_path / "x.png")
    assert told == about == json.loads(json.dumps(about, allow_nan=False))
    assert (told["model"], told["weights"], told["image"], told["sha256"]) == (
        "resnet34", "random (seed 0)", "cat.jpg", "ab" * 32,
    )  # fmt: skip
    assert (told["method"], told["cmap"], told["size"]) == ("gradcam", "magma", list(page.size))
    assert (told["seen"], told["fused"]) == ([50, 0, 350, 300], False)
    first, second = told["maps"]
    assert first == {
        "layer": "layer4", "call": 0, "type": "Sequential", "class": 281, "label": "tabby", "score": 12.25,
        "probability": 0.875, "shape": [7, 7], "low": 0.0, "high": 48.0,
    }  # fmt: skip
    assert (second["layer"], second["call"], second["low"], second["high"]) == ("relu", 1, -60.0, -12.0)


def test_a_score_that_is_not_finite_is_no_number_in_the_file() -> None:
    _, about = draw_overlay(subject(), [cam(answer=Prediction(0, None, float("nan"), float("inf")))])
    assert (about["maps"][0]["score"], about["maps"][0]["probability"]) == (None, None)


def test_the_peak_is_under_the_mark() -> None:
    values = np.zeros((6, 6), np.float32)
    values[4, 1] = 1
    page, _ = draw_overlay(subject(), [cam(values=values)])
    pixels = np.asarray(page).astype(int)
    black = np.argwhere((pixels[80:380, 14:414] == 0).all(-1))
    middle = (black.min(0) + black.max(0)) / 2
    x, y = 50 + 1.5 * 50, 4.5 * 50
    top = 14 + 21 + 4 * 17 + 12  # margin, heading of four lines and a warning, gap
    assert middle == pytest.approx((y + top - 80, x), abs=1)


def test_a_colour_map_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="no colour map"):
        draw_sheet(subject(), [cam()], "infern")


def saliency(values: Any = None, method: str = "gradient", answer: Prediction = TABBY) -> Saliency:
    values = np.random.default_rng(0).normal(size=(3, 40, 40)) if values is None else values
    return Saliency(answer, method, torch.as_tensor(values, dtype=torch.float32))


@pytest.fixture
def drawn_saliency(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last page was made of."""
    kept: dict[str, Any] = {}
    draw = pages.draw_page

    def record(photograph: Any, heading: Any, rows: Any, cmap: str, faded: bool, warning: str) -> Any:
        [[panel]] = rows
        kept.update(heading=heading, panel=panel, faded=faded, warning=warning)
        return draw(photograph, heading, rows, cmap, faded=faded, warning=warning)

    monkeypatch.setattr(pages, "draw_page", record)
    return kept


def test_the_page_says_class_origin_and_where_colours_end(drawn_saliency: dict[str, Any]) -> None:
    found = saliency()
    draw_saliency(SOURCE, found)
    assert drawn_saliency["heading"] == ["tabby (281)", "score 12.25  probability 87.5 %", *SOURCE.lines("gradient")]
    assert drawn_saliency["warning"] == "the weights are random: class and map mean nothing"
    values = found.map.numpy()
    top, panel = np.sort(values.ravel())[round(0.995 * 1600) - 1], drawn_saliency["panel"]
    assert panel.words[0] == "how strongly the score reacts to the pixel: |dS/dx|, largest of its colours"
    assert panel.words[1] == f"colours end at {top:.3g}, 99.5 % of the pixels; highest {values.max():.3g}"
    assert panel.heat.top == pytest.approx(top)
    assert (values > panel.heat.top).mean() == pytest.approx(0.005, abs=1e-3)
    assert (panel.scale, panel.alarm, drawn_saliency["faded"]) == ("value of the map", "", True)
    y, x = np.unravel_index(values.argmax(), values.shape)
    assert panel.heat.peak == pytest.approx((50 + (x + 0.5) * 7.5, (y + 0.5) * 7.5))


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_every_method_has_its_words(drawn_saliency: dict[str, Any], method: str) -> None:
    draw_saliency(SOURCE, saliency(method=method))
    assert "colours" in drawn_saliency["panel"].words[0]


def test_all_zero_is_said(drawn_saliency: dict[str, Any]) -> None:
    draw_saliency(SOURCE, saliency(np.zeros((3, 4, 4))))
    panel = drawn_saliency["panel"]
    assert panel.alarm == "all zero: the score does not depend on any pixel"
    assert (panel.heat.peak, panel.scale, len(panel.words)) == (None, "", 1)


def test_one_pixel_that_counts_is_drawn(drawn_saliency: dict[str, Any]) -> None:
    values = np.zeros((3, 40, 40))
    values[1, 20, 10] = -4
    draw_saliency(SOURCE, saliency(values))
    assert drawn_saliency["panel"].heat.top == 4
    assert drawn_saliency["panel"].heat.peak == pytest.approx((50 + 10.5 * 7.5, 20.5 * 7.5))


def test_a_single_position_is_enough(drawn_saliency: dict[str, Any]) -> None:
    draw_saliency(SOURCE, saliency(np.ones((1, 1, 1))))
    assert drawn_saliency["panel"].heat.top == 1


def test_of_a_clip_the_mean_of_the_frames(drawn_saliency: dict[str, Any]) -> None:
    clip = np.random.default_rng(1).random((3, 4, 10, 10))
    draw_saliency(SOURCE, saliency(clip))
    assert np.allclose(saliency(clip).still, np.abs(clip).max(0).mean(0))
    assert drawn_saliency["panel"].words[0].endswith("|dS/dx|, largest of its colours, mean of 4 frames")


def test_half_precision_is_drawn() -> None:
    draw_saliency(SOURCE, Saliency(TABBY, "gradient", torch.ones(3, 4, 4, dtype=torch.bfloat16)))


@pytest.mark.parametrize("score", [12.25, float("nan")])
def test_the_file_of_a_saliency_map_remembers_where_it_comes_from(tmp_path: Path, score: float) -> None:
    found = saliency(answer=Prediction(281, "tabby", score, 0.875))
    page, about = draw_saliency(SOURCE, found, "magma")
    write_png(page, tmp_path / "x.png", about)
    told = read_provenance(tmp_path / "x.png")
    assert told == about == json.loads(json.dumps(about, allow_nan=False))
    assert (told["model"], told["weights"], told["image"]) == ("resnet34", "random (seed 0)", "cat.jpg")
    assert (told["method"], told["cmap"], told["size"]) == ("gradient", "magma", list(page.size))
    assert (told["class"], told["label"], told["score"]) == (281, "tabby", score if score == score else None)
    assert (told["shape"], told["seen"]) == ([3, 40, 40], [50, 0, 350, 300])
    assert 0 < told["top"] < told["high"] == pytest.approx(float(found.map.max()))


def test_outside_of_what_was_seen_it_is_darker() -> None:
    page, _ = draw_saliency(SOURCE, saliency(np.eye(3)[:, :, None].repeat(3, 2)))
    pixels = np.asarray(page)
    grey = pixels[200, 14 + 20]
    assert len(set(grey.tolist())) == 1
    assert grey[0] == pytest.approx(0.45 * 0.4 * 66.8, abs=1)  # 66.8 is the grey of the photograph


def source_of(box: tuple[float, float, float, float], origin: Origin = ORIGIN) -> OverlaySource:
    return OverlaySource(Image.new("RGB", (400, 300)), box, origin)


def test_the_peak_is_the_middle_of_the_highest_cell_in_the_box() -> None:
    values = np.zeros((3, 5), np.float32)
    values[2, 1] = 0.5
    values[0, 0] = 0.25
    assert source_of((100, 0, 200, 30)).peak_in(values) == (100 + 1.5 * 20, 25)
    assert source_of((-50, -30, 450, 330)).peak_in(values) == (-50 + 150, -30 + 300)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_no_peak_where_nothing_is_above_zero(value: float) -> None:
    assert source_of((0, 0, 9, 9)).peak_in(np.full((2, 2), value, np.float32)) is None


def test_two_lines_say_where_it_comes_from() -> None:
    assert source_of((0, 0, 9, 9)).lines("gradcam") == [
        "resnet34  gradcam  weights: random (seed 0)",
        "cat.jpg  input: ImageClassification resize 256 crop 224",
    ]
    assert source_of((0, 0, 9, 9), Origin("m", "w", "folder/", "", "p")).image == "folder/"


@pytest.mark.parametrize(
    ("weights", "warns"),
    [("random (seed 0)", True), ("IMAGENET1K_V1", False), ("from factory (seed 0)", False), ("my random.pth", False)],
)
def test_random_weights_are_warned_of(weights: str, warns: bool) -> None:
    found = source_of((0, 0, 9, 9), Origin("m", weights, "cat.jpg", "", "p")).warning
    assert found == ("the weights are random: class and map mean nothing" if warns else "")


def test_the_provenance_is_json() -> None:
    told = source_of((0, 1 / 3, 9, 9)).provenance("gradcam", "inferno", (30, 20))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert {"hookscope", "torch", "torchvision"} <= told.keys()
    assert (told["model"], told["weights"], told["image"]) == ("resnet34", "random (seed 0)", "cat.jpg")
    assert (told["sha256"], told["preprocess"]) == (ORIGIN.sha256, ORIGIN.preprocess)
    assert (told["seen"], told["method"], told["cmap"], told["size"]) == (
        [0, 0.333, 9, 9],
        "gradcam",
        "inferno",
        [30, 20],
    )


def test_answers_in_words_and_in_numbers() -> None:
    assert answer_lines(Prediction(3, None, -1.0, 0.00012)) == ["class 3", "score -1  probability 0.012 %"]
    assert answer_facts(Prediction(3, "owl", 2.5, 0.5)) == {
        "class": 3,
        "label": "owl",
        "score": 2.5,
        "probability": 0.5,
    }
    broken = answer_facts(Prediction(3, None, math.nan, math.nan))
    assert (broken["score"], broken["probability"]) == (None, None)
