"""The page of maps side by side: their order, their numbers, and which are no better than a baseline."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hookscope import Faithfulness, draw_faithfulness
from hookscope.errors import UsageError
from hookscope.faithfulness import page
from hookscope.scores import Score
from tests.explain.pages import BOX, TABBY, VALUES, net, picture, record_page


def fact(name: str, road: float, prediction: Score = TABBY, increase: bool = False) -> Faithfulness:
    return Faithfulness(name, prediction, VALUES, 0.25, 0.75, road, 0.125, increase, 0.5, True, {}, 7, 0.0625)


MEASURED = [fact("weak", 0.1), fact("good", 0.4, increase=True), fact("level", 0.2004), fact("random", 0.2)]


def test_the_best_map_is_first_and_what_is_no_better_than_a_baseline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = record_page(monkeypatch, page)
    found = draw_faithfulness(MEASURED, picture(), net())
    assert [panel.words[0] for panel in drawn.maps] == ["good", "level", "random", "weak"]
    assert [panel.alarm for panel in drawn.maps] == [
        "",
        "no better than a random map",
        "",
        "no better than a random map",
    ]
    assert list(drawn.maps[0].words[1:]) == [
        "ROAD 0.400",
        "insertion 0.750, deletion 0.250",
        "score rises under the map",
        "50 % in the box, highest value inside",
        "random weights: correlation 0.06",
    ]
    assert "drop 12.5 %" in drawn.maps[1].words
    assert drawn.words[0].startswith("good has the best ROAD 0.4 on this image")
    assert "This image: tabby, probability 87.5 %" in drawn.words
    assert drawn.maps[0].heat.values is VALUES and drawn.maps[0].heat.box == BOX
    facts = json.loads(found.info["hookscope"])
    assert [(each["map"], each["road"]) for each in facts["maps"]][:2] == [("good", 0.4), ("level", 0.2004)]
    assert facts["seen"] == [round(side, 3) for side in BOX] and facts["method"] == "comparison"


def test_a_score_without_a_probability_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = record_page(monkeypatch, page)
    draw_faithfulness([fact("a", 0.1, Score(None, None, 2.0, None, target="box 0"))], picture(), width=200)
    assert "This image: box 0" in drawn.words and drawn["width"] == 200


def test_there_is_no_page_without_a_map() -> None:
    with pytest.raises(UsageError, match="no map to draw"):
        draw_faithfulness([], picture())


def test_a_clip_is_drawn_as_the_mean_over_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = record_page(monkeypatch, page)
    clip = fact("a", 0.1)
    object.__setattr__(clip, "values", np.stack([VALUES, 3 * VALUES]))
    draw_faithfulness([clip], picture(), net())
    assert np.allclose(drawn.maps[0].heat.values, 2 * VALUES)
