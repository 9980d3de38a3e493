"""Which maps are most faithful over several images, what is within noise, and a page that shows them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from hookscope.display import Cells, RowTuple, Shown
from hookscope.drawing import HeatPanel, HeatRow
from hookscope.errors import UsageError, all_of
from hookscope.explain import OverlaySource, why_unseen
from hookscope.faithfulness.facts import BASELINES, NUMBERS, Faithfulness
from hookscope.findings import counted, percent
from hookscope.images import AnyImage
from hookscope.models import LoadedModel

MEASURES: Mapping[str, int] = {"road": 1, "insertion": 1, "deletion": -1, "drop": -1}
"""What maps are compared by, and the sign of what is better."""
_WORDS = {"road": "ROAD"} | {name: name for name in ("insertion", "deletion", "drop")}
FEWEST = 10
"""With fewer images the resampled means are too narrow to tell maps apart."""
_EQUAL = 5e-4  # in three digits
_RESAMPLES = 10_000
_LEVEL = 0.95
_ROUNDING = 1e-9  # of the largest value

Interval = tuple[float, float] | None
_SHAPE = 1.6  # width of the page by its height, about
_NARROWEST, _WIDEST = 220, 320  # pixels of a map: the page has a dozen


@dataclass(frozen=True, slots=True)
class MapScores:
    """One map, such as the map of one method, over all images: means, and how sure they are.

    Attributes:
        name: Name of the map.
        road: Mean, as all that follow but the intervals; see `Faithfulness`.
        insertion: Mean.
        deletion: Mean.
        drop: Mean: the average drop.
        increase: Share of the images whose score rises.
        points: Share of the images with boxes whose highest value lies in a box; None without boxes.
        in_box: Mean share of the map inside the boxes.
        randomized: Mean rank correlation with the map of random weights.
        interval: The 95 % interval of the mean of what maps are compared by, over resampled images; None for one image.
        behind: The interval of how far it is behind the best map, wide enough for all maps at once; None for the best
            and for few images.
        passes: Number of images that the model saw for it.
    """

    name: str
    road: float
    insertion: float
    deletion: float
    drop: float
    increase: float
    points: float | None
    in_box: float | None
    randomized: float | None
    interval: tuple[float, float] | None
    behind: tuple[float, float] | None
    passes: int

    @property
    def within_noise(self) -> bool:
        """Whether the difference to the best map is within noise."""
        return self.behind is not None and self.behind[0] <= 0


@dataclass(frozen=True, repr=False)
class MapComparison(Shown, rows="maps"):
    """Maps over images, the best first.

    Attributes:
        by: What they are compared by, such as ``road``.
        images: Number of images.
        maps: The means of each map.
        verdict: Sentences: which map suits the model, and what is within noise.
    """

    by: str
    images: int
    maps: RowTuple[MapScores]
    verdict: tuple[str, ...]

    def _cells(self) -> Cells:
        return {"images": self.images, "by": self.by, "verdict": " ".join(self.verdict)}


def compare_maps(measured: Sequence[Sequence[Faithfulness]], by: str = "road", *, seed: int = 0) -> MapComparison:
    """Compare maps over images: the means, the best map, and which differences are within noise.

    The images are resampled 10,000 times. A map is behind the best one if the interval of their mean difference is
    above 0. The best map was chosen on these images, so the intervals hold for all pairs of maps at once (Tukey's range
    test, with resampled images); they are only given for 10 images or more.

    Args:
        measured: For each image what `cam_faithfulness` or `measure_faithfulness` returns, with the same names.
        by: What maps are compared by: ``road``, ``insertion``, ``deletion`` or ``drop``.
        seed: Seed of the resampling.

    Raises:
        UsageError: for no images, for images with different maps, or for an unknown measure.

    Example:
        >>> import torch
        >>> from hookscope import cam_faithfulness
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> images = torch.rand(2, 1, 3, 16, 16)
        >>> found = compare_maps([cam_faithfulness(net, image, methods=["gradcam"]) for image in images])
        >>> found.images, len(found.maps)
        (2, 3)
    """
    if not isinstance(by, str) or by not in MEASURES:
        raise UsageError(f"maps are not compared by '{by}'", do=f"there are {', '.join(MEASURES)}")
    several = isinstance(measured, Sequence) and not all(isinstance(image, Faithfulness) for image in measured)
    each = measured if several else [measured]
    images = [{test.name: test for test in all_of(Faithfulness, image, "measure_faithfulness")} for image in each]
    names = list(images[0]) if images else []
    if not names:
        raise UsageError("no map to compare", do="give what measure_faithfulness returns for each image")
    if other := next((image for image in images if list(image) != names), None):
        exists = f"{', '.join(names)}; {', '.join(other)}"
        raise UsageError("the images have different maps", exists, "measure the same")
    values = MEASURES[by] * np.array([[getattr(image[name], by) for name in names] for image in images])
    means, intervals, behind = _resampled(values, seed)
    scores = [
        _scores([image[name] for image in images], interval, gap, MEASURES[by])
        for name, interval, gap in zip(names, intervals, behind, strict=True)
    ]
    ranked = RowTuple(scores[at] for at in np.argsort(-means, kind="stable"))
    return MapComparison(by, len(images), ranked, tuple(_verdict(ranked, by, len(images))))


def _resampled(values: NDArray[np.float64], seed: int) -> tuple[NDArray[np.float64], list[Interval], list[Interval]]:
    """Of ``values`` ``(images, maps)`` the means, their intervals, and the intervals of the distance to the best."""
    count, maps = values.shape
    means: NDArray[np.float64] = values.mean(0)
    none: list[Interval] = [None] * maps
    if count == 1:
        return means, none, list(none)
    random = np.random.default_rng(seed)
    weights = random.multinomial(count, [1 / count] * count, _RESAMPLES) / count
    intervals = _intervals(*np.quantile(weights @ values, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], axis=0))
    if count < FEWEST:
        return means, intervals, none
    # the best map was chosen on these images: the intervals hold for all pairs at once, as in Tukey's range test
    first, second = np.triu_indices(maps, 1)
    pairs = values[:, first] - values[:, second]
    deviations = np.where(pairs.std(0) > _ROUNDING * np.abs(values).max(), pairs.std(0), np.inf)
    errors = np.abs(weights @ pairs - pairs.mean(0)) * np.sqrt(count) / deviations
    student = np.sqrt((count - 1) / random.chisquare(count - 1, _RESAMPLES))  # the spread of few images is uncertain
    times = np.quantile(errors.max(1, initial=0) * student, _LEVEL) / np.sqrt(count - 1)
    best = int(means.argmax())
    gaps = values[:, best, None] - values
    behind = _intervals(gaps.mean(0) - times * gaps.std(0), gaps.mean(0) + times * gaps.std(0))
    return means, intervals, [None if at == best else gap for at, gap in enumerate(behind)]


def _intervals(low: NDArray[np.float64], high: NDArray[np.float64]) -> list[Interval]:
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _scores(tests: Sequence[Faithfulness], interval: Interval, behind: Interval, sign: int) -> MapScores:
    means = dict[str, Any]()
    for name in NUMBERS[:-1]:
        known = [value for test in tests if (value := getattr(test, name)) is not None]
        means[name] = float(np.mean(known)) if known else None
    if interval is not None and sign < 0:
        interval = -interval[1], -interval[0]
    passes = sum(test.passes for test in tests)
    return MapScores(tests[0].name, **means, interval=interval, behind=behind, passes=passes)


def _verdict(ranked: Sequence[MapScores], by: str, images: int) -> Iterator[str]:
    """Sentences on maps, the best first; baselines are never named as the best."""
    maps = [scores for scores in ranked if scores.name not in BASELINES]
    baselines = [scores for scores in ranked if scores.name in BASELINES]
    if maps:
        yield from (_of_few_images if images < FEWEST else _of_many_images)(maps, baselines, by, images)


def _of_few_images(maps: Sequence[MapScores], baselines: Sequence[MapScores], by: str, images: int) -> Iterator[str]:
    best, *others = maps
    equal = [scores for scores in others if abs(getattr(scores, by) - getattr(best, by)) < _EQUAL]
    place = "this image" if images == 1 else f"these {images} images"
    ahead = [BASELINES[base.name] for base in baselines if is_no_better(best, base, by)]
    if ahead:
        yield f"No map is better than {' or '.join(ahead)} on {place}."
    have, among = "have" if equal else "has", ", among the methods" if ahead else ""
    yield f"{_names([best, *equal])} {have} the best {_value(best, by)} on {place}{among}."
    few = "One image does not" if images == 1 else f"{images} images do not"
    yield f"{few} show which map suits the model: give {FEWEST} or more."
    for base in baselines:
        behind = [scores for scores in maps if is_no_better(scores, base, by)]
        if behind and len(behind) < len(maps):
            yield f"No better than {BASELINES[base.name]} here: {_names(behind)}."


def is_no_better(each: MapScores | Faithfulness, base: MapScores | Faithfulness, by: str) -> bool:
    """Whether a map is no better than a baseline, in three digits."""
    return bool(MEASURES[by] * (getattr(each, by) - getattr(base, by)) < _EQUAL)


def _of_many_images(maps: Sequence[MapScores], baselines: Sequence[MapScores], by: str, images: int) -> Iterator[str]:
    best, over = maps[0], f"over {counted(images, 'image')}"
    limit = max((MEASURES[by] * getattr(scores, by) for scores in baselines), default=-np.inf)
    level = [scores for scores in maps if scores.within_noise and _worst(scores, by) > limit]
    unsure = [scores for scores in maps if scores.within_noise and scores not in level]
    close = [scores for scores in baselines if scores.behind is None or scores.within_noise]  # the best, or near it
    if close:
        yield f"No map is better than {BASELINES[close[0].name]} by more than noise {over}, in {_WORDS[by]}."
        yield f"The best is {best.name}: {_value(best, by)}."
    elif level:
        yield f"{_names([best, *level])} suit this model best {over}: they differ within noise in {_WORDS[by]}."
        yield f"The first is {best.name}: {_value(best, by)}."
    else:
        others = "; all others are behind by more than noise" if not unsure else ""
        verdict = "suits this model best" if len(maps) > 1 else "is better than the maps that know no model"
        yield f"{best.name} {verdict} {over}: {_value(best, by)}{others if len(maps) > 1 else ''}."
    if unsure and not close:
        yield f"Undecided, because images differ much: {_names(unsure)}."
    for other in (name for name in ("insertion", "deletion") if name != by):
        first = max(maps, key=lambda scores: MEASURES[other] * getattr(scores, other))
        if first not in (best, *level):
            yield f"By {other} the first is {first.name}: {getattr(first, other):.3g}."


def _value(scores: MapScores, by: str) -> str:
    return f"{_WORDS[by]} {getattr(scores, by):.3g}"


def _worst(scores: MapScores, by: str) -> float:
    """The worse end of the interval of the mean, as a number of which more is better."""
    low, high = scores.interval or (-np.inf, np.inf)
    return low if MEASURES[by] > 0 else -high


def _names(maps: Sequence[MapScores]) -> str:
    *others, last = [scores.name for scores in maps]
    return f"{', '.join(others)} and {last}" if others else last


def draw_faithfulness(
    measured: Faithfulness | Sequence[Faithfulness],
    photograph: AnyImage,
    net: LoadedModel | nn.Module | None = None,
    *,
    cmap: str | None = None,
    width: int | None = None,
) -> Image.Image:
    """Draw the maps of one image side by side over the photograph, each with its numbers, the verdict first.

    Each map has its own scale from 0, and a cross at its highest value. Equal maps are drawn once, with all their
    names. A map that is no better on this image than a baseline says so in red.

    Args:
        measured: What `cam_faithfulness` or `measure_faithfulness` returns.
        photograph: The photograph that the input was made of.
        net: The model, see `draw_cam`.
        cmap: A colour map of matplotlib; None for inferno.
        width: Width of a map in pixels; None for 220 to 320.

    Raises:
        UsageError: for no maps, or an unknown colour map.

    Example:
        >>> import hookscope, torch
        >>> from PIL import Image
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> found = hookscope.cam_faithfulness(net, torch.rand(1, 3, 16, 16), methods=["gradcam", "layercam"])
        >>> draw_faithfulness(found, Image.new("RGB", (64, 64)), net, width=200).size[0] > 2 * 200
        True
    """
    measured = all_of(Faithfulness, measured, "cam_faithfulness")
    if not measured:
        raise UsageError("no map to draw", do="choose methods or layers that have maps")
    cmap = cmap or "inferno"
    comparison = compare_maps([measured])
    source, answer = OverlaySource.of(photograph, net), measured[0].prediction
    best_first = [scores.name for scores in comparison.maps]
    ordered = sorted(measured, key=lambda test: best_first.index(test.name))
    baselines = [test for test in measured if test.name in BASELINES]
    equal: dict[str, list[Faithfulness]] = {}
    for test in ordered:
        equal.setdefault(test.same_as or test.name, []).append(test)
    panels = [source.panel, *(_panel(source, tests, baselines, comparison.by) for tests in equal.values())]
    picture = source.photograph
    rows = max(1, round(math.sqrt(len(panels) * picture.width / (_SHAPE * picture.height))))
    columns = math.ceil(len(panels) / rows)
    own = picture.width * math.ceil(_NARROWEST / picture.width)  # magnified by a whole number
    width = min(_WIDEST, own) if width is None else width
    share = f", probability {percent(answer.probability or 0)}" if source.has_probability(answer) else ""
    words = [*comparison.verdict, f"This image: {answer.name}{share}"]
    words.append("better: higher ROAD and insertion, lower deletion and drop")
    heading = source.heading(words, "one for each map", why_unseen(answer), scale="share of the map's highest")
    lines = [HeatRow(panels[at : at + columns]) for at in range(0, len(panels), columns)]
    facts = [
        {"map": test.name, **{name: getattr(test, name) for name in NUMBERS}, "shape": list(test.values.shape)}
        for test in ordered
    ]
    more = {"verdict": list(comparison.verdict), "maps": facts, **answer._cells()}
    return source.page(heading, lines, "comparison", cmap, more, width)


def _panel(
    source: OverlaySource, tests: Sequence[Faithfulness], baselines: Sequence[Faithfulness], by: str
) -> HeatPanel:
    """One map of methods that agree; what they make of random weights may differ."""
    test = tests[0]
    worse = [BASELINES[base.name] for base in baselines if test.name not in BASELINES and is_no_better(test, base, by)]
    words = [", ".join(equal.name for equal in tests), f"ROAD {test.road:.3f}"]
    words.append(f"insertion {test.insertion:.3f}, deletion {test.deletion:.3f}")
    words.append("score rises under the map" if test.increase else f"drop {percent(test.drop)}")
    if test.in_box is not None:
        words.append(f"{percent(test.in_box)} in the box, highest value {'inside' if test.points else 'outside'}")
    if randomized := [f"{equal.randomized:.2f}" for equal in tests if equal.randomized is not None]:
        words.append(f"random weights: correlation {', '.join(randomized)}")
    alarm = f"no better than {' or '.join(worse)}" if worse else ""
    return HeatPanel(source.heat(test.still, max(float(test.still.max()), 0.0)), words, alarm)
