"""The best images of a stream against a sort of all of them, in any order and in any parts."""

from __future__ import annotations

import numpy as np
import pytest

from hookscope.exemplars.duplicates import Ints, Prints
from hookscope.exemplars.top import BestImages, Candidates

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
    rows = list(zip(kept.channel.tolist(), kept.value.tolist(), kept.image.tolist(), strict=True))
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
    batch.add(Candidates(channel, values[may], images[image], none, none))
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


def test_thirty_copies_of_the_best_image_leave_room_for_others() -> None:
    values, best = some_values(0), BestImages(CHANNELS, TOP)
    for at in range(IMAGES):
        update(best, values[at : at + 1], np.array([at]))
    first = found(best)[0]
    assert first[0] == (106, 16)
    assert len(first) == TOP
    assert all(not 10 <= image < 40 for _, image in first[1:])


def test_a_value_that_cannot_be_among_the_best_is_no_candidate() -> None:
    best = BestImages(1, 2)
    none = np.full(3, -1)
    best.add(Candidates(np.zeros(3, int), np.array([3.0, 5.0, 4.0]), np.array([0, 1, 2]), none, none))
    best.best(prints)
    values = np.array([[4.0], [4.5], [3.0], [np.inf]])
    assert best.may_enter(values, np.array([3, 4, 5, 6])).ravel().tolist() == [False, True, False, False]
    assert best.may_enter(values[:1], np.array([1])).tolist() == [[True]], "of equal values the first image wins"
