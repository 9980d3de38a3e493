"""Pages of class activation maps: what they say, how they are laid out, what their files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hookscope.drawing.files import read_provenance, write_png
from hookscope.errors import UsageError
from hookscope.explain import page as cam_page, page as pages
from hookscope.explain.cam_maps import ClassActivationMap, fuse_maps
from hookscope.explain.page import OverlaySource, draw_cam, why_empty
from hookscope.hooks.calls import Call
from hookscope.scores.logits import Prediction
from tests.explain.pages import (
    BOX,
    SAYS_RANDOM,
    SAYS_UNSEEN,
    TABBY,
    UNSEEN,
    VALUES,
    Drawn,
    net,
    picture,
    record_page,
)

OTHER = Prediction(7, None, -1.5, 0.1)


def cam(layer: str = "layer4", values: Any = VALUES, answer: Prediction = TABBY, **more: Any) -> ClassActivationMap:
    call = Call(layer, more.pop("type", "Sequential"), more.pop("call", 0), None)
    return ClassActivationMap(call, answer, "gradcam", np.asarray(values, np.float32), 512, (224, 224), **more)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return record_page(monkeypatch, cam_page)


def about(image: Image.Image) -> Any:
    return json.loads(image.info["hookscope"])


def test_one_map_names_class_score_origin_and_layer(drawn: Drawn) -> None:
    draw_cam([cam()], picture(), net("random (seed 0)"), cmap="magma")
    assert drawn.words == [
        "tabby (281)",
        "score 12.25, probability 87.5 %",
        "resnet34, weights: random (seed 0), method: gradcam",
        f"cat.jpg, preprocessing: {net().preprocess.describe()}",
    ]
    assert drawn["heading"].warning == SAYS_RANDOM
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
def test_a_map_that_is_all_zero_has_a_line_and_no_cross(drawn: Drawn, values: Any, unreached: bool, says: str) -> None:
    found = cam(values=values, unreached=unreached)
    draw_cam([found], picture(), net())
    assert drawn.only.alarm == why_empty(found) == says
    heat = drawn.only.heat
    assert heat is not None
    assert (heat.mark is None, drawn.only.scale == "") == (bool(says), bool(says))


def test_negative_values_are_counted_and_not_drawn(drawn: Drawn) -> None:
    draw_cam([cam(values=VALUES - 10)], picture(), net())
    assert (drawn.only.words[-1], drawn.only.heat.top) == ("lowest -10, not drawn", 38)  # type: ignore[union-attr]


def test_of_a_clip_the_mean_of_the_frames_is_drawn(drawn: Drawn) -> None:
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
    assert (heading.warning, heading.photograph) == (SAYS_RANDOM, True)
    assert heading.scale == "share of the layer's highest value"
    assert [row.words for row in drawn["rows"]] == [
        [layer, "Sequential, 512 channels of 7×7, highest value of all classes 48"] for layer in ("layer3", "layer4")
    ]
    assert [[list(panel.words) for panel in row.panels] for row in drawn["rows"]] == 2 * [
        [
            ["tabby (281)", "score 12.25, probability 87.5 %", "highest 48"],
            ["class 7", "score -1.5, probability 10 %", "highest 48"],
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
    assert drawn["heading"].warning == f"{SAYS_RANDOM}; {SAYS_UNSEEN}"
    draw_cam(maps, picture(), net())
    assert [panel.alarm for panel in drawn.panels] == ["", SAYS_UNSEEN]
    draw_cam([maps[0]], picture(), net(), scale_of=maps)
    assert drawn["heading"].warning == "" and drawn.only.words[-1] == "Sequential, 512 channels of 7×7"


def test_the_file_remembers_where_it_comes_from(tmp_path: Path) -> None:
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


def test_the_peak_is_under_the_mark() -> None:
    values = np.zeros((6, 6), np.float32)
    values[4, 1] = 1
    page = draw_cam([cam(values=values)], picture())
    top = 14 + 21 + 3 * 17 + 12  # margin, heading of three more lines, gap
    black = np.argwhere((np.asarray(page)[top : top + 300, 14:414] == 0).all(-1))
    middle = (black.min(0) + black.max(0)) / 2
    assert middle == pytest.approx((4.5 * 50, 1.5 * 400 / 6), abs=1)


def test_no_map_and_a_colour_map_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="no class activation map to draw"):
        draw_cam([], picture())
    with pytest.raises(UsageError, match="no colour map"):
        draw_cam([cam()], picture(), cmap="infern")
