"""Maps compared over images: intervals, verdicts, and the page of maps side by side."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hookscope import compare_maps, draw_faithfulness
from hookscope.errors import UsageError
from hookscope.faithfulness import Faithfulness
from hookscope.scores import Prediction, Score
from tests.explain.pages import BOX, TABBY, VALUES, net, picture, record_page

CAT = Prediction(0, "cat", 1.0, 0.5)


def fact(name: str, road: float, insertion: float = 0.5, deletion: float = 0.5) -> Faithfulness:
    values = np.zeros((1, 1), np.float32)
    return Faithfulness(name, CAT, values, deletion, insertion, road, 0.1, False, None, None, {}, 7)


def images(count: int, seed: int = 0, noise: float = 0.05, **means: float) -> list[list[Faithfulness]]:
    random = np.random.default_rng(seed)
    return [[fact(name, mean + noise * random.normal()) for name, mean in means.items()] for _ in range(count)]


def test_a_map_that_is_ahead_by_more_than_noise_is_named_alone() -> None:
    found = compare_maps(images(30, good=0.4, fair=0.2, random=0.0, centred=0.1))
    assert [row.name for row in found.maps] == ["good", "fair", "centred", "random"]
    assert found.verdict[0].startswith("good suits this model best over 30 images: ROAD 0.")
    assert found.maps[0].behind is None and not any(row.within_noise for row in found.maps)


GOOD = images(30, good=0.4, random=0.0, centred=0.1)
VERDICTS: dict[str, tuple[list[list[Faithfulness]], str, str]] = {
    "a map that changes much between images": (
        [[*image, fact("wild", 0.9 * (at % 4 == 0))] for at, image in enumerate(GOOD)],
        "good suits this model best",
        "Undecided, because images differ much: wild.",
    ),
    "a baseline as good as the best": (
        images(30, good=0.2, random=0.0, centred=0.21),
        "No map is better than a bright spot in the middle by more than noise over 30 images",
        "",
    ),
    "one image": (
        [[fact("good", 0.4), fact("bad", 0.1), fact("random", 0.2), fact("centred", 0.0)]],
        "good has the best ROAD 0.4 on this image. One image does not show which map suits the model",
        "No better than a random map here: bad.",
    ),
    "maps that change nothing": (
        [[fact("a", 0.0), fact("b", 0.0), fact("random", 0.0), fact("centred", 0.0)]],
        "No map is better than a random map or a bright spot in the middle on this image. a and b",
        "",
    ),
    "equal maps": ([[fact("a", 0.4), fact("b", 0.4), fact("random", 0.2)]], "a and b have the best ROAD 0.4", ""),
    "another first by another measure": (
        [[fact("a", 0.4, 0.5, 0.2), fact("b", 0.1, 0.9, 0.3), fact("random", 0.0)]] * 12,
        "a suits this model best",
        "By insertion the first is b: 0.9.",
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_names_the_best_maps_and_what_is_within_noise_of_them(case: str) -> None:
    measured, begins, says = VERDICTS[case]
    text = " ".join(compare_maps(measured).verdict)
    assert text.startswith(begins) and says in text and ("middle" in text) == ("middle" in begins)


def test_differences_within_noise_are_said() -> None:
    [first, *_] = compare_maps(images(30, good=0.4, alike=0.401, random=0.0, centred=0.1)).verdict
    assert first.startswith(("good and alike suit this model best", "alike and good suit this model best"))
    assert "they differ within noise in ROAD" in first


def test_a_few_images_are_not_enough_whatever_they_show() -> None:
    found = compare_maps(images(9, good=0.9, random=0.0, centred=0.0, noise=0.0))
    assert "9 images do not show which map suits the model" in found.verdict[1]
    assert all(row.behind is None and row.interval is not None for row in found.maps)


def test_of_deletion_the_lowest_is_the_best() -> None:
    measured = [[fact("a", 0.4, 0.5, 0.3), fact("b", 0.1, 0.5, 0.1 + at / 1000)] for at in range(12)]
    found = compare_maps(measured, "deletion")
    assert [row.name for row in found.maps] == ["b", "a"]
    low, high = found.maps[0].interval or (0, 0)
    assert 0.1 <= low < found.maps[0].deletion < high <= 0.111


def test_the_interval_is_that_of_the_mean_and_its_resampling_has_a_seed() -> None:
    values = np.random.default_rng(2).normal(0.3, 0.1, 100)
    low, high = compare_maps([[fact("a", value)] for value in values]).maps[0].interval or (0, 0)
    wide = 1.96 * values.std() / 10
    assert (low, high) == (pytest.approx(values.mean() - wide, abs=2e-3), pytest.approx(values.mean() + wide, abs=2e-3))
    measured = images(12, a=0.3)
    first, again, other = (compare_maps(measured, seed=seed).maps[0].interval for seed in (0, 0, 1))
    assert first == again != other


def test_of_equally_good_maps_few_seem_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.faithfulness.answer._RESAMPLES", 1000)
    names = {f"map {at}": 0.3 for at in range(9)} | {"random": 0.3}
    runs = [compare_maps(images(12, seed, **names)) for seed in range(100)]
    wrong = sum(any(row.behind is not None and not row.within_noise for row in run.maps) for run in runs)
    assert wrong <= 15  # of 100; with an interval for each map on its own it is more than 30
    assert sum(not run.verdict[0].startswith("No map is better") for run in runs) <= wrong


@pytest.mark.parametrize(
    ("measured", "by", "words"),
    [
        ([], "road", "no map to compare"),
        ([[fact("a", 0)], [fact("b", 0)]], "road", "the images have different maps"),
        ([[fact("a", 0)]], "score", "maps are not compared by 'score'"),
    ],
)
def test_what_cannot_be_compared_is_refused(measured: list[list[Faithfulness]], by: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compare_maps(measured, by)


def shown(name: str, road: float, prediction: Score = TABBY, increase: bool = False) -> Faithfulness:
    return Faithfulness(name, prediction, VALUES, 0.25, 0.75, road, 0.125, increase, 0.5, True, {}, 7, 0.0625)


MEASURED = [shown("weak", 0.1), shown("good", 0.4, increase=True), shown("level", 0.2004), shown("random", 0.2)]


def test_the_best_map_is_first_and_what_is_no_better_than_a_baseline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = record_page(monkeypatch)
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


def test_equal_maps_are_drawn_once_with_all_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = record_page(monkeypatch)
    twin = replace(shown("twin", 0.4), same_as="good", randomized=0.5)
    found = draw_faithfulness([*MEASURED, twin], picture(), net())
    assert [panel.words[0] for panel in drawn.maps] == ["good, twin", "level", "random", "weak"]
    assert drawn.maps[0].words[-1] == "random weights: correlation 0.06, 0.50"
    assert len(json.loads(found.info["hookscope"])["maps"]) == 5


def test_pages_of_a_score_without_a_probability_of_a_clip_and_of_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = record_page(monkeypatch)
    draw_faithfulness([shown("a", 0.1, Score(None, None, 2.0, None, target="box 0"))], picture(), width=200)
    assert "This image: box 0" in drawn.words and drawn["width"] == 200
    clip = shown("a", 0.1)
    object.__setattr__(clip, "values", np.stack([VALUES, 3 * VALUES]))
    draw_faithfulness([clip], picture(), net())
    assert np.allclose(drawn.maps[0].heat.values, 2 * VALUES)
    with pytest.raises(UsageError, match="no map to draw"):
        draw_faithfulness([], picture())
