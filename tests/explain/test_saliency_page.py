"""Pages of saliency maps: the photograph, the map and the smoothed map, what they say, what their files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hookscope.drawing.files import read_provenance, write_png
from hookscope.drawing.heat import DARK, LIGHT
from hookscope.errors import UsageError
from hookscope.explain import page as saliency_page
from hookscope.explain.page import OverlaySource, draw_saliency
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.scores.logits import Prediction
from tests.explain.pages import BOX, SAYS_RANDOM, SAYS_UNSEEN, TABBY, UNSEEN, Drawn, net, picture, record_page


def saliency(values: Any = None, method: str = "gradient", answer: Prediction = TABBY) -> Saliency:
    values = np.random.default_rng(0).normal(size=(3, 40, 40)) if values is None else values
    return Saliency(answer, method, torch.as_tensor(values, dtype=torch.float32))


def about(image: Image.Image) -> Any:
    return json.loads(image.info["hookscope"])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return record_page(monkeypatch, saliency_page)


def test_the_page_has_the_photograph_the_map_and_the_smoothed_map(drawn: Drawn) -> None:
    found = saliency()
    draw_saliency(found, picture(), net("random (seed 0)"))
    source = OverlaySource.of(picture(), net("random (seed 0)"))
    assert drawn.words == ["tabby (281)", "score 12.25, probability 87.5 %", *source.lines("gradient")]
    assert (drawn["heading"].warning, drawn["ground"], drawn["cmap"]) == (SAYS_RANDOM, DARK, "inferno")
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
    expected = found.drawn.astype(float)
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
    if SALIENCY_METHODS[method].signed:
        assert (drawn["cmap"], drawn["ground"], raw.heat.signed) == ("RdBu_r", LIGHT, True)
        assert (raw.heat.top, raw.heat.values.min(), raw.heat.values.max()) == (3, -3, 0.75)
        assert raw.words[1] == "red raises the score, blue lowers it"
        assert raw.words[2] == "scale clipped at the 99.5th percentile; highest |value| 3"
        draw_saliency(found, picture(), cmap="PiYG")
        assert drawn.maps[0].words[1] == "the right half of the colours raises the score, the left half lowers it"
    else:
        assert (drawn["cmap"], drawn["ground"], raw.heat.signed, raw.heat.values.min()) == (
            "inferno",
            DARK,
            False,
            0.25,
        )
    assert "colour channels" in raw.words[0] or not SALIENCY_METHODS[method].gradient
    assert np.array_equal(np.abs(found.drawn), found.still)


def test_the_signs_are_red_and_blue_and_nothing_is_transparent() -> None:
    values = np.zeros((3, 40, 40))
    values[0, :, :10], values[0, :, 30:] = 1, -1
    page = np.asarray(draw_saliency(saliency(values, "gradient-input"), picture(), smooth=0)).astype(int)
    row = page[14 + 21 + 2 * 17 + 12 + 150, 14 + 412 :]  # margin, heading, gap, the middle of the photograph
    (red, blue, none) = row[50], row[350], row[200]
    assert red[0] > red[2] + 50 and blue[2] > blue[0] + 50 and len(set(none.tolist())) == 1


def test_maps_of_several_classes_share_a_scale(drawn: Drawn) -> None:
    found, wide = saliency(np.full((3, 4, 4), 2.0), answer=UNSEEN), saliency(np.full((3, 4, 4), 8.0))
    page = draw_saliency(found, picture(), net(), scale_of=[found, wide])
    assert [panel.heat.top for panel in drawn.maps] == [8, pytest.approx(8)]  # type: ignore[union-attr]
    assert about(page)["top"] == 8
    words = "scale clipped at the 99.5th percentile of the class with the widest scale, here 2; highest value 2"
    assert drawn.maps[0].words[-1] == words
    assert drawn["heading"].warning == SAYS_UNSEEN


def test_a_map_that_is_all_zero_has_a_line_and_no_cross(drawn: Drawn) -> None:
    draw_saliency(saliency(np.zeros((3, 4, 4))), picture())
    [panel] = drawn.maps
    assert panel.alarm == "all zero: the score does not depend on any pixel"
    assert (panel.heat.mark, panel.scale, len(panel.words)) == (None, "", 1)  # type: ignore[union-attr]


def test_one_pixel_that_counts_is_drawn(drawn: Drawn) -> None:
    values = np.zeros((3, 40, 40))
    values[1, 20, 10] = -4
    draw_saliency(saliency(values), picture())
    assert drawn.maps[0].heat.top == 4  # type: ignore[union-attr]
    assert drawn.maps[0].heat.mark == pytest.approx((10.5 * 10, 20.5 * 7.5))  # type: ignore[union-attr]


def test_of_a_clip_the_mean_of_the_frames(drawn: Drawn) -> None:
    clip = np.random.default_rng(1).normal(size=(3, 4, 10, 10))
    draw_saliency(saliency(clip), picture())
    assert np.allclose(saliency(clip).still, np.abs(clip).max(0).mean(0))
    assert drawn.maps[0].words[0].endswith("|dS/dx|, largest of its colour channels, mean of 4 frames")
    assert np.allclose(saliency(clip, "gradient-input").drawn, clip.sum(0).mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("size", "side", "rows", "width"), [((400, 300), 8, 1, None), ((3000, 2000), 8, 1, 640), ((900, 300), 800, 3, 800)]
)
def test_panels_are_as_wide_as_the_map_needs(
    drawn: Drawn, size: tuple[int, int], side: int, rows: int, width: int | None
) -> None:
    draw_saliency(saliency(np.ones((3, 4, side))), picture(*size), smooth=0)
    assert (len(drawn["rows"]), drawn["width"]) == (rows if rows == 1 else 2, width)


@pytest.mark.parametrize("score", [12.25, float("nan")])
def test_the_file_remembers_where_it_comes_from(tmp_path: Path, score: float) -> None:
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


def test_the_photograph_is_darker_outside_the_seen_part() -> None:
    page = draw_saliency(saliency(np.eye(3)[:, :, None].repeat(3, 2)), picture(), net())
    grey = np.asarray(page)[200, 14 + 412 + 20]
    assert len(set(grey.tolist())) == 1
    assert grey[0] == pytest.approx(0.45 * 0.5 * 66.8, abs=1)  # 66.8 is the grey of the photograph
