"""The channels that moved, how far and on which scale, compared with NumPy."""

import math

import numpy as np
import pytest
import torch

from hookscope.drawing import MapDifference, colours, compare_maps, difference
from hookscope.hooks import Maps


def moved(before: torch.Tensor, after: torch.Tensor, most_channels: int = 16) -> MapDifference:
    maps = [Maps("", values[0], "N C H W") for values in (before, after)]
    return compare_maps(*maps, ("before", "after", "difference"), most_channels)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(channels: int = 30, side: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    before = random(1, channels, side, side)
    return before, before + random(1, channels, side, side, seed=1) * torch.rand(channels)[:, None, None] * 4


def test_channels_come_in_the_order_of_how_far_they_moved() -> None:
    before, after = pair()
    maps = moved(before, after)
    distances = np.sqrt(((after - before)[0].double().numpy() ** 2).mean((1, 2)))
    order = np.argsort(-distances, kind="stable")[:16]
    assert list(maps.channels) == order.tolist()
    np.testing.assert_allclose(maps.distances, distances[order], rtol=1e-6)
    assert (maps.total, maps.moved) == (30, 30)
    assert len(moved(before, after, most_channels=3).channels) == 3


def test_unmoved_channels_are_not_drawn_and_ties_keep_their_order() -> None:
    before = random(1, 9, 3, 3)
    after = before.clone()
    after[0, 4, 0, 0] += 100
    before[0, 2] = before[0, 7] = 0
    after[0, 2] = after[0, 7] = 1
    before[0, 8], after[0, 8] = 0.0, -0.0
    maps = moved(before, after)
    assert (maps.channels, maps.moved) == ((4, 2, 7), 3)
    assert maps.distances[1:] == (1.0, 1.0)
    still = moved(before, before.clone())
    assert (still.channels, still.moved, still.tiles, still.ranges) == ((), 0, None, ())


def test_before_and_after_share_a_symmetric_scale_and_the_difference_has_its_own() -> None:
    before, after = pair()
    maps = moved(before, after)
    assert maps.tiles is not None
    drawn = list(maps.channels)
    three = [one[0, drawn].double() for one in (before, after)]
    three.append(three[1] - three[0])
    own = [float(one.abs().max()) for one in three]
    both = max(own[:2])
    for tiles, values, pairs, highest in zip(maps.tiles, three, maps.ranges, (both, both, own[2]), strict=True):
        assert set(tiles.low.tolist()) == {-highest}
        assert set(tiles.high.tolist()) == {highest}
        share = (values.numpy() + highest) / (2 * highest) * (colours.LEVELS - 1)
        assert np.abs(tiles.levels - share).max() <= 0.5 + 1e-9
        assert pairs == tuple((float(one.min()), float(one.max())) for one in values)
        np.testing.assert_allclose(tiles.strength, np.sqrt((values.numpy() ** 2).mean((1, 2))), rtol=1e-12)
    assert maps.largest == pytest.approx(float(three[2].abs().max()))


def test_nan_and_inf_that_come_or_go_are_the_farthest() -> None:
    before, after = pair(6, 4)
    before[0, 1, 0, 0] = after[0, 1, 0, 0] = math.nan  # the same as before
    before[0, 2, 0, 0] = after[0, 2, 0, 0] = math.inf
    after[0, 5, 0, 0], before[0, 3, 1, 1] = math.nan, -math.inf
    after[0, :3] = before[0, :3]
    maps = moved(before, after)
    assert maps.channels[:2] == (3, 5)
    assert maps.distances[:2] == (math.inf, math.inf)
    assert math.isfinite(maps.distances[2])
    assert maps.moved == 3
    assert maps.nonfinite == (3, 3, 4)
    assert maps.tiles is not None
    one, other, difference = (tiles.levels for tiles in maps.tiles)
    assert one[0, 1, 1] == colours.MINUS_INF
    assert other[1, 0, 0] == difference[1, 0, 0] == colours.NAN
    assert difference[0, 1, 1] == colours.PLUS_INF
    assert [tiles.nonfinite.tolist()[:2] for tiles in maps.tiles] == [[1, 0], [0, 1], [1, 1]]
    assert maps.facts(1)["distances"] == [None]


def test_differences_that_no_float_holds_are_drawn() -> None:
    before, after = torch.full((1, 1, 2, 2), -3e38), torch.full((1, 1, 2, 2), 3e38)
    maps = moved(before, after)
    assert maps.largest == pytest.approx(6e38)
    assert maps.tiles is not None
    assert maps.tiles[2].levels.tolist() == [[[colours.LEVELS - 1] * 2] * 2]
    tiny = torch.zeros(1, 1, 2, 2)
    tiny[0, 0, 0, 0] = 1e-40
    maps = moved(torch.zeros(1, 1, 2, 2), tiny)
    assert 0 < maps.distances[0] < 1e-40


def test_many_values_are_measured_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = pair()
    after[0, 4, 0, 0] = math.nan
    whole = moved(before, after)
    monkeypatch.setattr(difference, "_AT_ONCE", 80)  # two channels
    parts = moved(before, after)
    assert (parts.channels, parts.distances, parts.nonfinite) == (whole.channels, whole.distances, whole.nonfinite)
