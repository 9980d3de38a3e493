"""Pages of class activation maps: what they say, how they are laid out, and what their files remember."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hookscope.drawing.overlay import Panel
from hookscope.drawing.png import read_provenance, write_png
from hookscope.drawing.sheet import Origin
from hookscope.errors import UsageError
from hookscope.explain import cam_page as cam_pages
from hookscope.explain.cam import ClassActivationMap, fused
from hookscope.explain.cam_page import draw_overlay, draw_sheet, still_of, why_empty
from hookscope.explain.overlay_source import OverlaySource
from hookscope.hooks.selection import Call
from hookscope.scores.logits import Prediction

ORIGIN = Origin("resnet34", "random (seed 0)", "a/cat.jpg", "ab" * 32, "ImageClassification resize 256 crop 224")
TABBY = Prediction(281, "tabby", 12.25, 0.875)
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
    draw = cam_pages.draw_page

    def record(photograph: Any, heading: Any, rows: Any, cmap: str, width: Any = None, warning: str = "") -> Any:
        kept.update(heading=heading, rows=rows, cmap=cmap, width=width, warning=warning)
        return draw(photograph, heading, rows, cmap, width, warning=warning)

    monkeypatch.setattr(cam_pages, "draw_page", record)
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
    assert np.array_equal(still_of(clip), (VALUES + VALUES[::-1, ::-1] * 3) / 2)
    heat = only(drawn).heat
    assert heat is not None
    assert heat.peak == subject().peak_in(still_of(clip))


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
    assert cam_pages._LARGEST == 60_000_000
    monkeypatch.setattr(cam_pages, "_LARGEST", 600_000)
    page, _ = draw_overlay(subject(600, 400), [cam(f"layer{at}") for at in range(4)])
    assert drawn["width"] == int(600 * (60 / 96) ** 0.5) == 474
    assert drawn["heading"][-1].endswith("  drawn at 79 % of its size")
    assert page.width == 4 * 474 + 3 * 12 + 28


def test_one_map_of_a_large_photograph_has_its_size(drawn: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cam_pages, "_LARGEST", 1000)
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
