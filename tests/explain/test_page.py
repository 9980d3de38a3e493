"""Pages of class activation maps and saliency maps: what they say, how they are laid out, what their files hold."""

from __future__ import annotations

import dataclasses
import inspect
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
from hookscope.explain.cam import ClassActivationMap, fused, shared_tops
from hookscope.explain.page import (
    OverlaySource,
    answer_facts,
    answer_lines,
    draw_overlay,
    draw_saliency,
    draw_sheet,
    saliency_top,
    why_empty,
    why_unseen,
)
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.hooks.selection import Call
from hookscope.scores.logits import Prediction

ORIGIN = Origin("resnet34", "random (seed 0)", "a/cat.jpg", "ab" * 32, "ImageClassification resize 256 crop 224")
TABBY = Prediction(281, "tabby", 12.25, 0.875)
VALUES = np.arange(49, dtype=np.float32).reshape(7, 7)


def source(width: int = 400, height: int = 300, box: Any = (50.0, 0.0, 350.0, 300.0), **origin: str) -> OverlaySource:
    return OverlaySource(Image.new("RGB", (width, height), (200, 10, 10)), box, dataclasses.replace(ORIGIN, **origin))


def cam(layer: str = "layer4", values: Any = VALUES, answer: Prediction = TABBY, **more: Any) -> ClassActivationMap:
    call = Call(layer, more.pop("type", "Sequential"), more.pop("call", 0), None)
    return ClassActivationMap(call, answer, "gradcam", np.asarray(values, np.float32), 512, (224, 224), **more)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the last page."""
    arguments: dict[str, Any] = {}
    draw, signature = pages.draw_page, inspect.signature(pages.draw_page)

    def record(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        arguments.update(bound.arguments)
        return draw(*args, **options)

    monkeypatch.setattr(pages, "draw_page", record)
    return arguments


def only(drawn: dict[str, Any]) -> Panel:
    [[panel]] = drawn["rows"]
    assert isinstance(panel, Panel)
    return panel


def test_the_overlay_names_class_score_origin_and_layer(drawn: dict[str, Any]) -> None:
    draw_overlay(source(), [cam()], "magma")
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
        (np.zeros((2, 2)), False, "all zero: no position of this layer raises the score of this class"),
        (np.zeros((2, 2)), True, "all zero: the score does not depend on any position of this map"),
        (np.full((2, 2), -1), False, "no value is above 0: no position of this layer raises the score of this class"),
        (np.ones((2, 2)), False, ""),
    ],
)
def test_a_map_that_is_all_zero_has_a_line(drawn: dict[str, Any], values: Any, unreached: bool, says: str) -> None:
    found = cam(values=values, unreached=unreached)
    draw_overlay(source(), [found])
    assert only(drawn).alarm == why_empty(found) == says
    heat = only(drawn).heat
    assert heat is not None
    assert (heat.peak is None, only(drawn).scale == "") == (bool(says), bool(says))


def test_negative_values_are_counted_and_not_drawn(drawn: dict[str, Any]) -> None:
    draw_overlay(source(), [cam(values=VALUES - 10)])
    assert (only(drawn).words[-1], only(drawn).heat.top) == ("lowest -10, not drawn", 38)  # type: ignore[union-attr]
    draw_sheet(source(), [cam("relu", -VALUES - 1), cam("relu", -VALUES - 2, call=1)])
    assert drawn["heading"][0] == "cat.jpg  2 layers, 1 class"
    assert [row[0].words[0] for row in drawn["rows"]] == ["relu", "relu#1"]
    assert [(row[1].scale, row[1].words[2]) for row in drawn["rows"]] == [("", "highest -1"), ("", "highest -2")]


def test_of_a_clip_the_mean_of_the_frames_is_drawn(drawn: dict[str, Any]) -> None:
    clip = cam(values=np.stack([VALUES, VALUES[::-1, ::-1] * 3]))
    draw_overlay(source(), [clip])
    assert only(drawn).words[1] == "Sequential  512 channels of 7×7  mean of 2 frames"
    assert np.array_equal(clip.still, (VALUES + VALUES[::-1, ::-1] * 3) / 2)
    heat = only(drawn).heat
    assert heat is not None
    assert heat.peak == source().peak_in(clip.still)


def test_a_fused_map_has_a_scale_of_its_own(drawn: dict[str, Any]) -> None:
    _, about = draw_overlay(source(), [fused([cam("layer3"), cam("layer4", type="Conv2d")])], fused=True)
    assert (about["fused"], about["maps"][0]["type"]) == (True, "Sequential + Conv2d")
    assert only(drawn).scale == "mean, each map 0..1"
    assert only(drawn).words[0] == "layer3 + layer4"


@pytest.mark.parametrize(("count", "shape"), [(1, [1]), (4, [4]), (5, [2, 2, 1]), (20, [5, 5, 5, 5])])
def test_maps_stand_side_by_side_and_many_in_rows(drawn: dict[str, Any], count: int, shape: list[int]) -> None:
    draw_overlay(source(), [cam(f"layer{at}") for at in range(count)])
    assert [len(row) for row in drawn["rows"]] == shape
    assert [panel.words[0] for row in drawn["rows"] for panel in row] == [f"layer{at}" for at in range(count)]


def test_several_maps_of_a_large_photograph_are_drawn_smaller_with_a_line(
    drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pages._LARGEST == 60_000_000
    monkeypatch.setattr(pages, "_LARGEST", 600_000)
    draw_overlay(source(600, 400), [cam()])
    assert drawn["width"] is None  # one map keeps the size of the photograph
    page, _ = draw_overlay(source(600, 400), [cam(f"layer{at}") for at in range(4)])
    assert drawn["width"] == int(600 * (60 / 96) ** 0.5) == 474
    assert drawn["heading"][-1].endswith("  drawn at 79 % of its size")
    assert page.width == 4 * 474 + 3 * 12 + 28


def test_a_sheet_has_a_row_for_each_layer_and_a_column_for_each_class(drawn: dict[str, Any]) -> None:
    answers = [TABBY, Prediction(7, None, -1.5, 0.001)]
    maps = [cam(layer, answer=answer) for answer in answers for layer in ("layer3", "layer4")]
    page, about = draw_sheet(source(), maps)
    assert drawn["heading"] == ["cat.jpg  2 layers, 2 classes", *source().lines("gradcam")]
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
    draw_sheet(source(), maps)
    cells = [row[1:] for row in drawn["rows"]]
    assert [[cell.heat.top for cell in row] for row in cells] == [[48, 48], [pytest.approx(0.48)] * 2]
    assert [[cell.words[2] for cell in row] for row in cells] == [
        ["highest 48", "highest 8"],
        ["highest 0.48", "highest 0"],
    ]
    assert [[cell.scale == "" for cell in row] for row in cells] == [[False, False], [False, True]]
    assert cells[0][1].words[3] == "lowest -40, not drawn"
    draw_overlay(source(), [maps[0], maps[1]])  # while beside each other layers have each their own
    assert [panel.heat.top for panel in drawn["rows"][0]] == [48, pytest.approx(0.48)]


UNSEEN = Prediction(7, None, -1.5, 0.006, 0.875)


def test_a_weak_class_is_drawn_on_the_scale_of_the_best_and_a_line_says_that_the_model_does_not_see_it(
    drawn: dict[str, Any],
) -> None:
    maps = [cam("layer3", VALUES), cam("layer3", VALUES / 64, UNSEEN)]
    says = "the model does not see this class: it has 0.6 %, the best class 87.5 %"
    _, about = draw_overlay(source(weights="DEFAULT"), [maps[1]], tops=shared_tops(maps))
    assert drawn["warning"] == says and only(drawn).words[-1] == "highest 0.75, of all classes 48"
    assert only(drawn).heat.top == about["maps"][0]["top"] == 48  # type: ignore[union-attr]
    draw_overlay(source(), [maps[1]])
    assert drawn["warning"] == f"the weights are random: class and map mean nothing; {says}"
    draw_sheet(source(), maps)
    assert [panel.alarm for panel in drawn["rows"][0]] == ["", "", says]
    draw_overlay(source(weights="DEFAULT"), [maps[0]], tops=shared_tops(maps))
    assert drawn["warning"] == "" and only(drawn).words[-1] == "Sequential  512 channels of 7×7"


def test_saliency_maps_of_several_classes_share_a_scale(drawn: dict[str, Any]) -> None:
    found = saliency(np.full((3, 4, 4), 2.0), answer=UNSEEN)
    assert saliency_top(found) == 2
    _, about = draw_saliency(source(weights="DEFAULT"), found, top=8.0)
    assert (only(drawn).heat.top, about["top"]) == (8, 8)  # type: ignore[union-attr]
    assert only(drawn).words[-1] == "colours end at 8, as for the other classes, here 2; highest 2"
    assert drawn["warning"].startswith("the model does not see this class")


@pytest.mark.parametrize(("share", "best", "unseen"), [(0.0179, 0.9, True), (0.0181, 0.9, False), (1e-5, 1e-5, False)])
def test_a_class_is_unseen_below_a_fiftieth_of_the_best(share: float, best: float, unseen: bool) -> None:
    answer = Prediction(0, None, 0.0, share, best)
    assert answer.unseen == bool(why_unseen(answer)) == unseen


def test_the_file_remembers_where_it_comes_from(tmp_path: Path) -> None:
    page, about = draw_overlay(source(), [cam(), cam("relu", VALUES - 60, call=1, type="ReLU")], "magma")
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
        "top": 48.0,
    }  # fmt: skip
    assert (second["layer"], second["call"], second["low"], second["high"]) == ("relu", 1, -60.0, -12.0)


def test_the_peak_is_under_the_mark() -> None:
    values = np.zeros((6, 6), np.float32)
    values[4, 1] = 1
    page, _ = draw_overlay(source(), [cam(values=values)])
    pixels = np.asarray(page).astype(int)
    black = np.argwhere((pixels[80:380, 14:414] == 0).all(-1))
    middle = (black.min(0) + black.max(0)) / 2
    x, y = 50 + 1.5 * 50, 4.5 * 50
    top = 14 + 21 + 4 * 17 + 12  # margin, heading of four lines and a warning, gap
    assert middle == pytest.approx((y + top - 80, x), abs=1)


def test_a_colour_map_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="no colour map"):
        draw_sheet(source(), [cam()], "infern")


def saliency(values: Any = None, method: str = "gradient", answer: Prediction = TABBY) -> Saliency:
    values = np.random.default_rng(0).normal(size=(3, 40, 40)) if values is None else values
    return Saliency(answer, method, torch.as_tensor(values, dtype=torch.float32))


def test_the_page_names_class_origin_and_the_end_of_the_colours(drawn: dict[str, Any]) -> None:
    found = saliency()
    draw_saliency(source(), found)
    assert drawn["heading"] == ["tabby (281)", "score 12.25  probability 87.5 %", *source().lines("gradient")]
    assert drawn["warning"] == "the weights are random: class and map mean nothing"
    values = found.map.numpy()
    top, panel = np.sort(values.ravel())[round(0.995 * 1600) - 1], only(drawn)
    assert panel.words[0] == "how strongly the score reacts to the pixel: |dS/dx|, largest of its colours"
    assert panel.words[1] == f"colours end at {top:.3g}, 99.5 % of the pixels; highest {values.max():.3g}"
    assert panel.heat.top == pytest.approx(top)
    assert (values > panel.heat.top).mean() == pytest.approx(0.005, abs=1e-3)
    assert (panel.scale, panel.alarm, drawn["faded"]) == ("value of the map", "", True)
    y, x = np.unravel_index(values.argmax(), values.shape)
    assert panel.heat.peak == pytest.approx((50 + (x + 0.5) * 7.5, (y + 0.5) * 7.5))


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_every_method_has_its_words(drawn: dict[str, Any], method: str) -> None:
    draw_saliency(source(), saliency(method=method))
    assert "colours" in only(drawn).words[0]


def test_a_saliency_map_that_is_all_zero_has_a_line(drawn: dict[str, Any]) -> None:
    draw_saliency(source(), saliency(np.zeros((3, 4, 4))))
    panel = only(drawn)
    assert panel.alarm == "all zero: the score does not depend on any pixel"
    assert (panel.heat.peak, panel.scale, len(panel.words)) == (None, "", 1)


def test_one_pixel_that_counts_is_drawn(drawn: dict[str, Any]) -> None:
    values = np.zeros((3, 40, 40))
    values[1, 20, 10] = -4
    draw_saliency(source(), saliency(values))
    assert only(drawn).heat.top == 4
    assert only(drawn).heat.peak == pytest.approx((50 + 10.5 * 7.5, 20.5 * 7.5))


def test_of_a_clip_the_mean_of_the_frames(drawn: dict[str, Any]) -> None:
    clip = np.random.default_rng(1).random((3, 4, 10, 10))
    draw_saliency(source(), saliency(clip))
    assert np.allclose(saliency(clip).still, np.abs(clip).max(0).mean(0))
    assert only(drawn).words[0].endswith("|dS/dx|, largest of its colours, mean of 4 frames")


@pytest.mark.parametrize("score", [12.25, float("nan")])
def test_the_file_of_a_saliency_map_remembers_where_it_comes_from(tmp_path: Path, score: float) -> None:
    found = saliency(answer=Prediction(281, "tabby", score, 0.875))
    page, about = draw_saliency(source(), found, "magma")
    write_png(page, tmp_path / "x.png", about)
    told = read_provenance(tmp_path / "x.png")
    assert told == about == json.loads(json.dumps(about, allow_nan=False))
    assert (told["model"], told["weights"], told["image"]) == ("resnet34", "random (seed 0)", "cat.jpg")
    assert (told["method"], told["cmap"], told["size"]) == ("gradient", "magma", list(page.size))
    assert (told["class"], told["label"], told["score"]) == (281, "tabby", score if score == score else None)
    assert (told["shape"], told["seen"]) == ([3, 40, 40], [50, 0, 350, 300])
    assert 0 < told["top"] < told["high"] == pytest.approx(float(found.map.max()))


def test_the_photograph_is_darker_outside_the_seen_part() -> None:
    page, _ = draw_saliency(source(), saliency(np.eye(3)[:, :, None].repeat(3, 2)))
    pixels = np.asarray(page)
    grey = pixels[200, 14 + 20]
    assert len(set(grey.tolist())) == 1
    assert grey[0] == pytest.approx(0.45 * 0.4 * 66.8, abs=1)  # 66.8 is the grey of the photograph


def test_the_peak_is_the_middle_of_the_highest_cell_in_the_box() -> None:
    values = np.zeros((3, 5), np.float32)
    values[2, 1] = 0.5
    values[0, 0] = 0.25
    assert source(box=(100, 0, 200, 30)).peak_in(values) == (100 + 1.5 * 20, 25)
    assert source(box=(-50, -30, 450, 330)).peak_in(values) == (-50 + 150, -30 + 300)
    for value in (0.0, -1.0):
        assert source().peak_in(np.full((2, 2), value, np.float32)) is None


@pytest.mark.parametrize(
    ("weights", "warns"),
    [("random (seed 0)", True), ("IMAGENET1K_V1", False), ("from factory (seed 0)", False), ("my random.pth", False)],
)
def test_random_weights_are_warned_of(drawn: dict[str, Any], weights: str, warns: bool) -> None:
    for draw in (draw_overlay, draw_sheet):
        draw(source(weights=weights), [cam()])
        assert drawn["warning"] == ("the weights are random: class and map mean nothing" if warns else "")


def test_answers_in_words_and_in_numbers() -> None:
    assert answer_lines(Prediction(3, None, -1.0, 0.00012)) == ["class 3", "score -1  probability 0.012 %"]
    facts = {"class": 3, "label": "owl", "score": 2.5, "probability": 0.5}
    assert answer_facts(Prediction(3, "owl", 2.5, 0.5)) == facts
    broken = {"class": 3, "label": None, "score": None, "probability": None}
    assert answer_facts(Prediction(3, None, math.nan, math.inf)) == broken
