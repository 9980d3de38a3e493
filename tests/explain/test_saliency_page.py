"""The page of a saliency map: its words, its colours' end, and what its file remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hookscope.drawing.png import read_provenance, write_png
from hookscope.drawing.sheet import Origin
from hookscope.explain import saliency_page
from hookscope.explain.overlay_source import OverlaySource
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.explain.saliency_page import draw_saliency, saliency_still
from hookscope.scores.logits import Prediction

ORIGIN = Origin("resnet34", "random (seed 0)", "a/cat.jpg", "ab" * 32, "ImageClassification resize 256 crop 224")
SUBJECT = OverlaySource(Image.new("RGB", (400, 300), (200, 10, 10)), (50.0, 0.0, 350.0, 300.0), ORIGIN)
TABBY = Prediction(281, "tabby", 12.25, 0.875)


def saliency(values: Any = None, method: str = "gradient", answer: Prediction = TABBY) -> Saliency:
    values = np.random.default_rng(0).normal(size=(3, 40, 40)) if values is None else values
    return Saliency(answer, method, torch.as_tensor(values, dtype=torch.float32))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last page was made of."""
    kept: dict[str, Any] = {}
    draw = saliency_page.draw_page

    def record(photograph: Any, heading: Any, rows: Any, cmap: str, faded: bool, warning: str) -> Any:
        [[panel]] = rows
        kept.update(heading=heading, panel=panel, faded=faded, warning=warning)
        return draw(photograph, heading, rows, cmap, faded=faded, warning=warning)

    monkeypatch.setattr(saliency_page, "draw_page", record)
    return kept


def test_the_page_says_class_origin_and_where_colours_end(drawn: dict[str, Any]) -> None:
    found = saliency()
    draw_saliency(SUBJECT, found)
    assert drawn["heading"] == ["tabby (281)", "score 12.25  probability 87.5 %", *SUBJECT.lines("gradient")]
    assert drawn["warning"] == "the weights are random: class and map mean nothing"
    values = found.map.numpy()
    top, panel = np.sort(values.ravel())[round(0.995 * 1600) - 1], drawn["panel"]
    assert panel.words[0] == "how strongly the score reacts to the pixel: |dS/dx|, largest of its colours"
    assert panel.words[1] == f"colours end at {top:.3g}, 99.5 % of the pixels; highest {values.max():.3g}"
    assert panel.heat.top == pytest.approx(top)
    assert (values > panel.heat.top).mean() == pytest.approx(0.005, abs=1e-3)
    assert (panel.scale, panel.alarm, drawn["faded"]) == ("value of the map", "", True)
    y, x = np.unravel_index(values.argmax(), values.shape)
    assert panel.heat.peak == pytest.approx((50 + (x + 0.5) * 7.5, (y + 0.5) * 7.5))


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_every_method_has_its_words(drawn: dict[str, Any], method: str) -> None:
    draw_saliency(SUBJECT, saliency(method=method))
    assert "colours" in drawn["panel"].words[0]


def test_all_zero_is_said(drawn: dict[str, Any]) -> None:
    draw_saliency(SUBJECT, saliency(np.zeros((3, 4, 4))))
    panel = drawn["panel"]
    assert panel.alarm == "all zero: the score does not depend on any pixel"
    assert (panel.heat.peak, panel.scale, len(panel.words)) == (None, "", 1)


def test_one_pixel_that_counts_is_drawn(drawn: dict[str, Any]) -> None:
    values = np.zeros((3, 40, 40))
    values[1, 20, 10] = -4
    draw_saliency(SUBJECT, saliency(values))
    assert drawn["panel"].heat.top == 4
    assert drawn["panel"].heat.peak == pytest.approx((50 + 10.5 * 7.5, 20.5 * 7.5))


def test_a_single_position_is_enough(drawn: dict[str, Any]) -> None:
    draw_saliency(SUBJECT, saliency(np.ones((1, 1, 1))))
    assert drawn["panel"].heat.top == 1


def test_of_a_clip_the_mean_of_the_frames(drawn: dict[str, Any]) -> None:
    clip = np.random.default_rng(1).random((3, 4, 10, 10))
    draw_saliency(SUBJECT, saliency(clip))
    assert np.allclose(saliency_still(saliency(clip)), np.abs(clip).max(0).mean(0))
    assert drawn["panel"].words[0].endswith("|dS/dx|, largest of its colours, mean of 4 frames")


def test_half_precision_is_drawn() -> None:
    draw_saliency(SUBJECT, Saliency(TABBY, "gradient", torch.ones(3, 4, 4, dtype=torch.bfloat16)))


@pytest.mark.parametrize("score", [12.25, float("nan")])
def test_the_file_remembers_where_it_comes_from(tmp_path: Path, score: float) -> None:
    found = saliency(answer=Prediction(281, "tabby", score, 0.875))
    page, about = draw_saliency(SUBJECT, found, "magma")
    write_png(page, tmp_path / "x.png", about)
    told = read_provenance(tmp_path / "x.png")
    assert told == about == json.loads(json.dumps(about, allow_nan=False))
    assert (told["model"], told["weights"], told["image"]) == ("resnet34", "random (seed 0)", "cat.jpg")
    assert (told["method"], told["cmap"], told["size"]) == ("gradient", "magma", list(page.size))
    assert (told["class"], told["label"], told["score"]) == (281, "tabby", score if score == score else None)
    assert (told["shape"], told["seen"]) == ([3, 40, 40], [50, 0, 350, 300])
    assert 0 < told["top"] < told["high"] == pytest.approx(float(found.map.max()))


def test_outside_of_what_was_seen_it_is_darker() -> None:
    page, _ = draw_saliency(SUBJECT, saliency(np.eye(3)[:, :, None].repeat(3, 2)))
    pixels = np.asarray(page)
    grey = pixels[200, 14 + 20]
    assert len(set(grey.tolist())) == 1
    assert grey[0] == pytest.approx(0.45 * 0.4 * 66.8, abs=1)  # 66.8 is the grey of the photograph
