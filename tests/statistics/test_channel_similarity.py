"""Duplicates against np.corrcoef, effective rank against np.linalg.eigvalsh of np.cov."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hookscope.statistics.accumulator import ChannelCovariance, PatternSketch, effective_rank, rotations_of
from hookscope.statistics.moments import ChannelMoments, sums_of_maps
from tests.statistics.judge import names, random

LEAST = 0.999


def groups_of(values: Tensor, batch: int = 4, order: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Duplicates among the channels of ``values`` ``(N, C, P)``, looked at in batches, in this order of images."""
    order = list(order or range(len(values)))
    moments, sketch = ChannelMoments.empty(values.shape[1]), PatternSketch.empty(values.shape[1])
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        moments.merge(ChannelMoments.of(sums_of_maps(values[part])))
        sketch.update(values[part], rotations_of([names(len(values))[at] for at in part]))
    return sketch.groups(moments, np.ones(values.shape[1], bool), LEAST)


def alike_by_numpy(values: Tensor) -> set[tuple[int, int]]:
    with np.errstate(invalid="ignore"):
        correlation = np.corrcoef(values.double().movedim(1, 0).flatten(1).numpy())
    return {(int(a), int(b)) for a, b in np.argwhere(np.triu(correlation >= LEAST, 1))}


def pairs(groups: list[tuple[int, ...]]) -> set[tuple[int, int]]:
    return {(a, b) for group in groups for at, a in enumerate(group) for b in group[at + 1 :]}


@pytest.mark.parametrize("shape", [(1, 40, 64), (6, 40, 25), (64, 40, 1), (3, 40, 1000)])
@pytest.mark.parametrize("activation", ["linear", "relu"])
def test_planted_copies_alone_are_duplicates(shape: tuple[int, int, int], activation: str) -> None:
    for seed in range(3):
        values = random(*shape, seed=seed)
        values = values.relu() if activation == "relu" else values
        values[:, 11] = values[:, 3]
        values[:, 12] = 5 * values[:, 3] + 2
        values[:, 30] = 0.01 * values[:, 7] - 100
        values[:, 31] = -values[:, 8]
        assert groups_of(values) == [(3, 11, 12), (7, 30)]
        assert pairs(groups_of(values)) == alike_by_numpy(values)


def test_the_same_mean_is_no_likeness() -> None:
    values = random(4, 2, 100)
    values -= values.mean((0, 2), keepdim=True) - 3
    values /= values.std((0, 2), keepdim=True)
    assert groups_of(values) == []
    values[:, 1] = values[:, 0].flip(1)  # the same values at other places: same mean, spread and extremes
    assert groups_of(values) == []


@pytest.mark.parametrize("positions", [1, 49])
def test_maps_of_one_value_distinguish_channels(positions: int) -> None:
    """A projection of each map alone would have few directions."""
    near = random(64, 300, 1, seed=2)
    near[:, 1::2] = 0.9 * near[:, ::2] + 0.19**0.5 * near[:, 1::2]  # 150 pairs of correlation 0.9
    values = near.expand(64, 300, positions)
    assert alike_by_numpy(values) == set()
    assert groups_of(values, 16) == []


def test_channels_that_fire_at_one_position_only() -> None:
    values = torch.zeros(40, 12, 30)
    for channel in range(12):
        values[:, channel, channel] = random(40, seed=channel).abs() + 0.5
    values[:, 9, :] = 2 * values[:, 4, :]
    assert groups_of(values) == [(4, 9)]
    assert pairs(groups_of(values)) == alike_by_numpy(values)


@pytest.mark.parametrize(
    ("scale", "mean"), [(1, 0.0), (1, 1e3), (1, 1e5), (1e-38, 0.0), (1e-20, 0.0), (1e20, 0.0), (5e37, 0.0)]
)
def test_copies_of_any_size_and_mean(scale: float, mean: float) -> None:
    values = random(6, 8, 400).clamp(-6, 6)
    values[:, 5] = values[:, 2]
    assert groups_of(values * scale + mean) == [(2, 5)]


def test_doubles_of_any_size_raise_nothing() -> None:
    values = random(3, 4, 20).double()
    values[:, 3] = values[:, 0]
    assert groups_of(values * 1e100) == [(0, 3)]
    assert groups_of(values * 1e300) == []  # beyond the range of squares no pattern is known


def test_near_copies_on_either_side_of_the_threshold() -> None:
    values, noise = random(8, 3, 500), random(8, 2, 500, seed=9)
    values[:, 1] = values[:, 0] + 0.01 * noise[:, 0]  # correlation 0.99995
    values[:, 2] = values[:, 0] + 0.3 * noise[:, 1]  # 0.958
    assert groups_of(values) == [(0, 1)]


def test_batches_order_and_shards_change_nothing() -> None:
    values = random(9, 20, 30)
    values[:, 4], values[:, 15] = 3 * values[:, 1] + 1, values[:, 7]
    order = [4, 0, 8, 2, 6, 1, 7, 3, 5]
    expected = [(1, 4), (7, 15)]
    for batch in (1, 3, 9):
        assert groups_of(values, batch) == groups_of(values, batch, order) == expected
    whole, joined = PatternSketch.empty(20), PatternSketch.empty(20)
    whole.update(values, rotations_of(names(9)))
    for part in (order[:2], [], order[2:]):
        shard = PatternSketch.empty(20)
        if part:
            shard.update(values[part], rotations_of([names(9)[at] for at in part]))
        joined.merge(PatternSketch.from_state(shard.state_dict()))
    np.testing.assert_allclose(joined.products, whole.products, atol=1e-5 * np.abs(whole.products).max())
    np.testing.assert_allclose(joined.ones, whole.ones, atol=1e-9)


def test_channels_that_fire_between_sampled_positions_are_no_duplicates() -> None:
    values = torch.zeros(1, 4, 112 * 112)  # every 13th position is sampled
    values[0, 0, 1:391:13] = values[0, 1, 2:392:13] = 1.0
    values[0, 2] = values[0, 3] = random(112 * 112)
    assert alike_by_numpy(values) == {(2, 3)}
    assert groups_of(values) == [(2, 3)]


def test_candidates_and_a_threshold_of_one() -> None:
    values = random(2, 4, 50)
    values[:, 3] = values[:, 1] = values[:, 0]
    moments, sketch = ChannelMoments.empty(4), PatternSketch.empty(4)
    moments.merge(ChannelMoments.of(sums_of_maps(values)))
    sketch.update(values, rotations_of(names(2)))
    assert sketch.groups(moments, np.ones(4, bool), 1.0) == [(0, 1, 3)]
    assert sketch.groups(moments, np.array([False, True, True, True]), LEAST) == [(1, 3)]


def test_rotations_are_orthogonal_and_equal_for_equal_names() -> None:
    rotations = rotations_of(["cat.jpg", "dog.jpg", "caf\udce9.jpg", "\ud800", ""])
    assert torch.allclose(rotations @ rotations.mT, torch.eye(16, dtype=torch.float64).expand(5, 16, 16))
    assert torch.equal(rotations_of(["dog.jpg"])[0], rotations[1])
    assert len({str(rotation.tolist()) for rotation in rotations}) == 5


def test_defaults_and_generators_of_the_caller_have_no_effect() -> None:
    values = random(2, 3, 37)  # a size that no other test has: its vectors are not at hand
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        sketch = PatternSketch.empty(3)
        sketch.update(values, rotations_of(names(2)))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(37)
    vectors = torch.randn(37, 16, generator=generator).double()
    by_hand = sum(values[at].double() @ vectors @ rotations_of(names(2))[at] for at in range(2))
    np.testing.assert_allclose(sketch.products, by_hand, atol=1e-4)
    assert torch.equal(torch.get_rng_state(), before)


def rank_by_numpy(values: Tensor) -> float:
    covariance = np.cov(values.double().movedim(1, 0).flatten(1).numpy(), bias=True)
    shares = np.linalg.eigvalsh(covariance).clip(min=0)
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def covariance_of(values: Tensor, *sizes: int) -> ChannelCovariance:
    covariance = ChannelCovariance.empty(values.shape[1])
    for batch in values.split(list(sizes) or len(values)):
        covariance.update(batch)
    return covariance


@pytest.mark.parametrize("sizes", [(), (1,) * 6, (2, 4), (5, 1)])
@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e37])
def test_covariance_and_rank_against_numpy(scale: float, sizes: tuple[int, ...]) -> None:
    mixed = torch.einsum("ncp,cd->ndp", random(6, 3, 80), random(3, 10, seed=6)) + 0.1 * random(6, 10, 80, seed=8)
    values = (mixed + 4) * scale
    covariance = covariance_of(values, *sizes).covariance
    by_numpy = np.cov(values.double().movedim(1, 0).flatten(1).numpy(), bias=True)
    np.testing.assert_allclose(covariance, by_numpy, atol=1e-5 * np.abs(by_numpy).max(), rtol=0)
    assert effective_rank(covariance) == pytest.approx(rank_by_numpy(values), rel=1e-5)


def test_doubles_are_exact_and_beyond_their_range_unknown() -> None:
    values = random(4, 5, 60).double()
    shifted = covariance_of(values + 1e8, 1, 3).covariance
    np.testing.assert_allclose(shifted, np.cov((values + 1e8).movedim(1, 0).flatten(1), bias=True), atol=1e-7)
    np.testing.assert_allclose(
        covariance_of(values, 1, 3).covariance, np.cov(values.movedim(1, 0).flatten(1), bias=True), rtol=1e-10
    )
    assert effective_rank(covariance_of(values * 1e140).covariance) == pytest.approx(rank_by_numpy(values), rel=1e-9)
    assert np.isnan(effective_rank(covariance_of(values * 1e300, 1, 3).covariance))


def test_ranks_known_on_paper() -> None:
    assert effective_rank(np.zeros((3, 3))) == 0
    assert effective_rank(covariance_of(torch.full((2, 3, 5), 0.1)).covariance) == 0
    assert effective_rank(np.eye(5)) == pytest.approx(5)
    assert effective_rank(np.ones((4, 4))) == pytest.approx(1)
    assert ChannelCovariance.empty(3).covariance.tolist() == [[0, 0, 0]] * 3
