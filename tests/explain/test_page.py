"""What the pages of maps share: the photograph, the part that the network saw, and words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image
from torch import nn

from hookscope.explain.page import OverlaySource, answer_facts, answer_lines, why_unseen
from hookscope.scores.logits import Prediction
from tests.explain.pages import BOX, SAYS_RANDOM, net, picture


def test_the_source_of_a_loaded_model_is_what_its_network_saw() -> None:
    source = OverlaySource.of(picture(), net())
    assert source.box == BOX != (0, 0, 400, 300)
    assert source.lines("gradcam") == [
        "resnet34, weights: DEFAULT, method: gradcam",
        f"cat.jpg, preprocessing: {net().preprocess.describe()}",
    ]
    assert list(source.panel.words) == ["cat.jpg", "400×300 pixels"]


def test_a_grey_picture_is_drawn_in_rgb_for_every_model() -> None:
    for model in (net(), nn.Identity(), None):
        assert OverlaySource.of(Image.new("LA", (40, 30)), model).photograph.mode == "RGB"


def test_of_a_module_and_of_nothing_the_source_is_the_whole_photograph() -> None:
    source = OverlaySource.of(Image.new("L", (40, 30)), nn.Identity())
    assert (source.box, source.photograph.mode) == ((0, 0, 40, 30), "RGB")
    assert source.lines("gradcam") == ["Identity, method: gradcam"]
    assert OverlaySource.of(Image.new("RGB", (4, 3))).lines("gradcam") == ["method: gradcam"]


def test_the_peak_is_the_middle_of_the_highest_cell_in_the_box() -> None:
    values = np.zeros((3, 5), np.float32)
    values[2, 1] = 0.5
    values[0, 0] = 0.25
    origin = OverlaySource.of(picture()).origin
    for box, peak in (
        ((100, 0, 200, 30), (100 + 1.5 * 20, 25)),
        ((-50, -30, 450, 330), (-50 + 150, -30 + 300)),
    ):
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
    assert OverlaySource.of(picture(), net(weights)).warning == (SAYS_RANDOM if warns else "")


@pytest.mark.parametrize(("share", "best", "unseen"), [(0.0179, 0.9, True), (0.0181, 0.9, False), (1e-5, 1e-5, False)])
def test_a_class_is_unseen_below_a_fiftieth_of_the_best(share: float, best: float, unseen: bool) -> None:
    answer = Prediction(0, None, 0.0, share, best)
    assert answer.low_probability == bool(why_unseen(answer)) == unseen


def test_answers_in_words_and_in_numbers() -> None:
    assert answer_lines(Prediction(3, None, -1.0, 0.00012)) == ["class 3", "score -1, probability 0.012 %"]
    facts = {"class": 3, "label": "owl", "score": 2.5, "probability": 0.5}
    assert answer_facts(Prediction(3, "owl", 2.5, 0.5)) == facts
    broken = {"class": 3, "label": None, "score": None, "probability": None}
    assert answer_facts(Prediction(3, None, math.nan, math.inf)) == broken
