"""Best images, histograms and class means of a stream against sorts and NumPy, in any order and any parts."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from hookscope.exemplars import channels
from hookscope.exemplars.channels import (
    BestImages,
    ChannelHistograms,
    ClassMeans,
    Duplicates,
    Ints,
    Prints,
    candidates,
    prints_of,
)
from samples.shapes.draw import draw

SAMPLES = Path(__file__).parents[2] / "samples"


def tensor(image: Image.Image, side: int) -> torch.Tensor:
    """Prepared as torchvision does it: a square, ImageNet's mean and standard deviation."""
    values = torch.from_numpy(np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)).copy())
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((values / 255 - mean) / std).permute(2, 0, 1)


def near(one: Image.Image, other: Image.Image, side: int = 128) -> bool:
    prints = np.concatenate([prints_of(tensor(image, side)[None]) for image in (one, other)])
    return bool(Duplicates(prints)(np.array([0]), np.array([1]))[0])


PICTURES = {
    **{name: Image.open(SAMPLES / f"{name}.jpg").convert("RGB") for name in ("cat", "coffee", "rocket")},
    **{f"drawing {number}": draw(0, number).image for number in range(10)},
}


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return Image.open(stream)


COPIES = {
    "the same": lambda image: image,
    "JPEG 95": lambda image: as_jpeg(image, 95),
    "JPEG 75": lambda image: as_jpeg(image, 75),
    "JPEG 50": lambda image: as_jpeg(image, 50),
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS),
    "twice the size": lambda image: image.resize((image.width * 2, image.height * 2), Image.Resampling.LANCZOS),
    "one level brighter": lambda image: image.point(lambda level: min(level + 1, 255)),
}


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_near_duplicates(copy: str) -> None:
    assert [name for name, image in PICTURES.items() if not near(image, COPIES[copy](image))] == []


@pytest.mark.parametrize(
    ("images", "side"),
    [
        ([*PICTURES.values()], 128),
        *(([draw(0, number, label).image for label in range(10)], 128) for number in range(4)),  # on one background
        ([Image.new("RGB", (8, 8), colour) for colour in ("black", "white", "red", "orange")], 32),
    ],
)
def test_different_pictures_are_none(images: list[Image.Image], side: int) -> None:
    prints = np.concatenate([prints_of(tensor(image, side)[None]) for image in images])
    one, other = np.triu_indices(len(prints), 1)
    assert not Duplicates(prints)(one, other).any()


def test_one_shape_drawn_at_two_places_of_a_background_is_none() -> None:
    background = Image.open(SAMPLES / "coffee.jpg").convert("RGB").resize((128, 128))
    drawn = []
    for x, colour in ((30, "red"), (38, "red"), (30, "blue")):
        drawn.append(background.copy())
        ImageDraw.Draw(drawn[-1]).regular_polygon((x, 60, 20), 3, fill=colour)
    assert not near(drawn[0], drawn[1])
    assert not near(drawn[0], drawn[2])


def test_images_with_nan_are_near_duplicates_of_themselves_only() -> None:
    lost = prints_of(torch.full((2, 3, 8, 8), torch.nan))
    assert Duplicates(lost)(np.array([0, 0]), np.array([0, 1])).tolist() == [True, False]


@pytest.mark.parametrize(
    "images",
    [torch.rand(2, 3, 5, 40, 30), torch.rand(2, 7), [torch.rand(3, 20, 30), torch.rand(3, 50, 9)]],
    ids=["clips", "vectors", "list"],
)
def test_every_kind_of_input_has_a_hash(images: object) -> None:
    prints = prints_of(images)
    assert len(prints) == 2
    assert Duplicates(prints)(np.array([0, 0]), np.array([0, 1])).tolist() == [True, False]


CHANNELS, IMAGES, TOP = 5, 60, 4


def prints(images: Ints) -> Prints:
    """Images 10 to 39 are copies of image 10; all others differ."""
    groups = np.where((images >= 10) & (images < 40), 10, images)
    return np.random.default_rng(0).normal(size=(IMAGES, 8)).astype(np.float16)[groups]


def on_paper(values: np.ndarray, least: bool) -> list[list[tuple[float, int]]]:
    """Sort all images of each channel, and skip copies of an image that is there already."""
    best: list[list[tuple[float, int]]] = []
    for column in values.T:
        ranked = sorted(range(IMAGES), key=lambda at: ((1 if least else -1) * column[at], at))
        ranked = [at for at in ranked if np.isfinite(column[at])]
        groups: dict[int, int] = {}
        for at in ranked:
            groups.setdefault(10 if 10 <= at < 40 else at, at)
        best.append([(float(column[at]), at) for at in list(groups.values())[:TOP]])
    return best


def found(best: BestImages) -> list[list[tuple[float, int]]]:
    kept = best.best(prints)
    rows = kept[["channel", "value", "image"]].tolist()
    return [[(value, image) for at, value, image in rows if at == channel] for channel in range(CHANNELS)]


def some_values(seed: int) -> np.ndarray:
    """Values with ties, one NaN and one Inf; the copies are the best of channel 0."""
    values = np.random.default_rng(seed).integers(-20, 20, (IMAGES, CHANNELS)).astype(float)
    values[10:40, 0] = 100 + np.arange(30) % 7
    values[3, 1], values[4, 1], values[5, 1] = np.nan, np.inf, -np.inf
    values[:, 4] = 0
    return values


def update(best: BestImages, values: np.ndarray, images: np.ndarray) -> None:
    may = best.may_enter(values, images)
    image, channel = may.nonzero()
    none = np.full(len(image), -1)
    batch = BestImages(CHANNELS, TOP, best.least)
    batch.add(candidates(channel, values[may], images[image], none, none))
    best.merge(batch, prints)


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_batches_in_any_order_merged_in_any_way_give_the_sorted_best(seed: int, least: bool) -> None:
    values, rng = some_values(seed), np.random.default_rng(seed)
    expected = on_paper(values, least)
    for _ in range(4):
        parts = [BestImages(CHANNELS, TOP, least) for _ in range(int(rng.integers(1, 5)))]
        for batch in np.array_split(rng.permutation(IMAGES), int(rng.integers(1, 30))):
            update(parts[rng.integers(len(parts))], values[batch], batch)
        while len(parts) > 1:
            first = parts.pop(int(rng.integers(len(parts))))
            parts[rng.integers(len(parts))].merge(first, prints)
        assert found(parts[0]) == expected
        state = parts[0].state_dict(prints)
        assert found(BestImages.from_state(state, CHANNELS, TOP, least)) == expected


def test_a_value_that_cannot_be_among_the_best_is_no_candidate() -> None:
    best = BestImages(1, 2)
    none = np.full(3, -1)
    best.add(candidates(np.zeros(3, int), np.array([3.0, 5.0, 4.0]), np.array([0, 1, 2]), none, none))
    best.best(prints)
    values = np.array([[4.0], [4.5], [3.0], [np.inf]])
    assert best.may_enter(values, np.array([3, 4, 5, 6])).ravel().tolist() == [False, True, False, False]
    assert best.may_enter(values[:1], np.array([1])).tolist() == [[True]], "of equal values the first image wins"


def histograms_of(*parts: np.ndarray) -> ChannelHistograms:
    histogram = ChannelHistograms(parts[0].shape[1])
    for part in parts:
        histogram.update(part)
    return histogram


VALUES = np.random.default_rng(0).normal(size=(500, 6)) * [1e-8, 1, 1, 1e6, 0, 1e-300] + [0, 0, 1e6, 0, 7, 0]
VALUES[0, 1], VALUES[1, 1] = np.nan, np.inf
VALUES[:, 2] = np.where(np.arange(500) % 2, 0, VALUES[:, 2])


def test_counts_are_those_of_numpy_with_the_same_edges() -> None:
    for channel, (counts, edges) in enumerate(histograms_of(VALUES).shown()):
        values = VALUES[:, channel]
        values = values[np.isfinite(values)]
        assert counts.sum() == len(values)
        assert np.array_equal(counts, np.histogram(values, edges)[0])
        assert len(counts) <= 64
        assert np.allclose(np.diff(edges), edges[1] - edges[0])


def test_the_range_has_about_half_of_the_bins_at_least() -> None:
    shown = histograms_of(VALUES).shown()
    assert [len(shown[channel][0]) >= 31 for channel in (0, 1, 2, 3, 5)] == [True] * 5
    counts, edges = shown[4]
    assert (counts.tolist(), edges.tolist()) == ([500], [6.5, 7.5]), "one value"


@pytest.mark.parametrize("seed", range(3))
def test_order_and_parts_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [histograms_of(part) for part in np.array_split(VALUES[rng.permutation(500)], int(rng.integers(2, 40)))]
    for part in parts[:: seed + 1]:
        part.shown()  # counts what waited
    while len(parts) > 1:
        parts[0].merge(parts.pop(int(rng.integers(1, len(parts)))))
    again = ChannelHistograms.from_state(parts[0].state_dict(), 6)
    for one, other, restored in zip(histograms_of(VALUES).shown(), parts[0].shown(), again.shown(), strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])
        assert np.array_equal(one[0], restored[0])


def test_a_channel_without_finite_values_has_no_intervals() -> None:
    [(counts, edges)] = histograms_of(np.full((3, 1), np.nan)).shown()
    assert (len(counts), len(edges)) == (0, 1)


def means_of(values: list[list[float]], labels: list[str]) -> ClassMeans:
    means = ClassMeans(len(values[0]))
    means.update(np.array(values), labels)
    return means


def test_the_index_compares_the_best_class_with_the_mean_of_the_others() -> None:
    means = means_of([[6, 1], [2, 1], [1, 1], [3, 1]], ["cat", "cat", "dog", "owl"])
    # cat (6 + 2) / 2 = 4, dog 1, owl 3: (4 - 2) / (4 + 2)
    assert means.selectivity() == [("cat", pytest.approx(1 / 3)), ("cat", 0.0)]


def test_parts_merge_and_images_without_a_label_are_left_out() -> None:
    means = means_of([[6.0]], ["cat"])
    means.merge(means_of([[2.0], [100.0]], ["cat", ""]))
    means.merge(means_of([[1.0], [3.0]], ["dog", "owl"]))
    assert means.selectivity() == [("cat", pytest.approx(1 / 3))]
    assert ClassMeans.from_state(means.state_dict(), 1).selectivity() == means.selectivity()


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([[1.0], [2.0]], ["cat", "cat"]),
        ([[1.0], [2.0]], ["", ""]),
        ([[-1.0], [2.0]], ["cat", "dog"]),
        ([[np.nan], [2.0]], ["cat", "dog"]),
        ([[0.0], [0.0]], ["cat", "dog"]),
    ],
    ids=["one class", "no label", "negative mean", "NaN", "all zero"],
)
def test_there_is_no_index_without_two_classes_of_positive_means(values: list[list[float]], labels: list[str]) -> None:
    assert means_of(values, labels).selectivity() == [("", None)]


def test_too_many_labels_are_given_up_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MOST_LABELS", 2)
    many = means_of([[1.0], [2.0], [3.0]], ["a", "b", "c"])
    few = means_of([[1.0], [2.0]], ["a", "b"])
    few.merge(many)
    many.merge(means_of([[1.0]], ["a"]))
    assert few.selectivity() == many.selectivity() == [("", None)]
    assert ClassMeans.from_state(few.state_dict(), 1).too_many
