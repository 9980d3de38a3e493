"""What a page of maps is about: the place of a peak, words and provenance."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from PIL import Image

from hookscope.drawing.sheet import Origin
from hookscope.explain.overlay_source import OverlaySource, answer_facts, answer_lines
from hookscope.scores.logits import Prediction

ORIGIN = Origin("resnet34", "random (seed 0)", "a/cat.jpg", "ab" * 32, "ImageClassification resize 256 crop 224")


def subject_of(box: tuple[float, float, float, float], origin: Origin = ORIGIN) -> OverlaySource:
    return OverlaySource(Image.new("RGB", (400, 300)), box, origin)


def test_the_peak_is_the_middle_of_the_highest_cell_in_the_box() -> None:
    values = np.zeros((3, 5), np.float32)
    values[2, 1] = 0.5
    values[0, 0] = 0.25
    assert subject_of((100, 0, 200, 30)).peak_in(values) == (100 + 1.5 * 20, 25)
    assert subject_of((-50, -30, 450, 330)).peak_in(values) == (-50 + 150, -30 + 300)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_no_peak_where_nothing_is_above_zero(value: float) -> None:
    assert subject_of((0, 0, 9, 9)).peak_in(np.full((2, 2), value, np.float32)) is None


def test_two_lines_say_where_it_comes_from() -> None:
    assert subject_of((0, 0, 9, 9)).lines("gradcam") == [
        "resnet34  gradcam  weights: random (seed 0)",
        "cat.jpg  input: ImageClassification resize 256 crop 224",
    ]
    assert subject_of((0, 0, 9, 9), Origin("m", "w", "folder/", "", "p")).image == "folder/"


@pytest.mark.parametrize(
    ("weights", "warns"),
    [("random (seed 0)", True), ("IMAGENET1K_V1", False), ("from factory (seed 0)", False), ("my random.pth", False)],
)
def test_random_weights_are_warned_of(weights: str, warns: bool) -> None:
    found = subject_of((0, 0, 9, 9), Origin("m", weights, "cat.jpg", "", "p")).warning
    assert found == ("the weights are random: class and map mean nothing" if warns else "")


def test_the_provenance_is_json() -> None:
    told = subject_of((0, 1 / 3, 9, 9)).provenance("gradcam", "inferno", (30, 20))
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
