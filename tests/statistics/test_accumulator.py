"""Accumulated statistics of a layer, and which of its channels are alike: judged by NumPy, whatever the split."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.hooks import Call
from hookscope.hooks.calls import ACTIVATION_FUNCTIONS
from hookscope.statistics import RunningStatistics
from hookscope.statistics.accumulator import (
    Bounds,
    ChannelCovariance,
    LayerAccumulator,
    PatternSketch,
    bounds_of,
    effective_rank,
    margins,
    rotations_of,
)
from hookscope.statistics.moments import ChannelMoments, sums_of_maps
from tests.statistics.judge import add, check_same, names, random


class Gate(nn.Sigmoid):
    pass


BOUNDS = [
    (nn.Sigmoid(), (0.0, 1.0)),
    (nn.Hardsigmoid(), (0.0, 1.0)),
    (nn.Tanh(), (-1.0, 1.0)),
    (nn.Softsign(), (-1.0, 1.0)),
    (nn.ReLU6(), (None, 6.0)),
    (nn.Hardtanh(), (-1.0, 1.0)),
    (nn.Hardtanh(-3, 7), (-3.0, 7.0)),
    (nn.Hardtanh(0, 4), (None, 4.0)),
    (nn.Hardtanh(-2, 0), (-2.0, None)),
    (nn.ELU(), (-1.0, None)),
    (nn.ELU(alpha=0.0), (None, None)),
    (nn.CELU(alpha=2.5), (-2.5, None)),
    (nn.SELU(), (-1.7580993408473766, None)),
    (Gate(), (0.0, 1.0)),
    (nn.ReLU(), (None, None)),
    (nn.Conv2d(1, 1, 1), (None, None)),
    (torch.ao.nn.quantized.ReLU6(), (None, 6.0)),
    (torch.ao.nn.quantized.Sigmoid(1 / 256, 0), (0.0, 1.0)),
]


@pytest.mark.parametrize(("module", "bounds"), BOUNDS, ids=[repr(module) for module, _ in BOUNDS])
def test_bounds(module: nn.Module, bounds: Bounds) -> None:
    assert bounds_of(module) == pytest.approx(bounds)


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
def test_a_function_has_no_limits_but_its_bounds_and_zero(name: str) -> None:
    cls = getattr(nn, name)
    module = cls(0.5, 0.0) if name == "Threshold" else cls()
    far = 1e6  # softsign comes near only slowly
    low, high = (float(value) for value in module(torch.tensor([[-far, far]] * 2)).detach()[0, [0, -1]])
    if name == "GLU":
        assert bounds_of(module) == (None, None)
        return
    for at, value in zip(bounds_of(module), (low, high), strict=True):
        if at is None:
            assert abs(value) > 1e3 or abs(value) < 1e-5
        else:
            assert value == pytest.approx(at, abs=1e-5)


def test_margins_are_a_hundredth_of_the_distance() -> None:
    assert margins((0.0, 1.0)) == pytest.approx((0.01, 0.99))
    assert margins((-1.0, 1.0)) == pytest.approx((-0.98, 0.98))
    assert margins((None, 6.0)) == (-math.inf, pytest.approx(5.94))
    assert margins((-2.0, None)) == (pytest.approx(-1.98), math.inf)
    assert margins((None, None)) == (-math.inf, math.inf)


NAMES = names(9)


def activations() -> Tensor:
    """Nine images of 8 channels: one dead, two copies, one far off, NaN and Inf in some."""
    values = torch.randn(9, 8, 5, 4, generator=torch.Generator().manual_seed(2)).tanh()
    values[:, 1] = 0.5
    values[:, 6] = 2 * values[:, 3] + 9
    values[:, 4] += 1e4
    values[5, 4, 2, 3] = 10_003.0  # the highest, once
    values[2, 5, 1, 1], values[7, 0, 0, 0] = torch.nan, -torch.inf
    return values


def accumulated(*order: int, batch: int = 9, with_rank: bool = True) -> LayerAccumulator:
    """An accumulator of these images, in this order."""
    accumulator = LayerAccumulator(Call("block.tanh", "Tanh", 2, 5), 8, (-1.0, 1.0), with_rank, "out")
    values = activations()
    for start in range(0, len(order), batch):
        part = list(order[start : start + batch])
        add(accumulator, values[part], [NAMES[at] for at in part])
    return accumulator


def restored(accumulator: LayerAccumulator) -> LayerAccumulator:
    return LayerAccumulator.from_state(accumulator.state_dict())


def state_text(state: dict[str, Any]) -> str:
    return json.dumps(state, default=lambda array: array.tolist())


def same(accumulator: LayerAccumulator, other: LayerAccumulator, places: bool = True) -> None:
    check_same(*(RunningStatistics(layers={"": each}) for each in (accumulator, other)), places)
    for field, moments in vars(accumulator.moments).items():
        np.testing.assert_allclose(moments, getattr(other.moments, field), rtol=1e-9)


def test_planted_facts_are_found() -> None:
    layer = accumulated(*range(9)).statistics()
    assert (layer.dead_channels, layer.duplicate_channels, layer.nan, layer.inf) == ((1,), ((3, 6),), 1, 1)
    assert layer.nonfinite_at == ("2.jpg", 5, (1, 1)) and layer.items == 9 and layer.shape == (8, 5, 4)


@pytest.mark.parametrize("batch", [1, 4, 9])
def test_the_order_of_images_changes_only_which_position_is_first(batch: int) -> None:
    same(accumulated(8, 3, 5, 7, 0, 2, 6, 1, 4, batch=batch), accumulated(*range(9)), places=False)


@pytest.mark.parametrize("ends", [(4,), (1,), (3, 5), (0,), (9,)])
def test_merged_shards_equal_the_whole(ends: tuple[int, ...]) -> None:
    whole = accumulated(*range(9))
    shards = [accumulated(*range(start, end), batch=2) for start, end in zip((0, *ends), (*ends, 9), strict=True)]
    joined = accumulated()
    for shard in shards:
        joined.merge(restored(shard))
    same(joined, whole)
    backwards = restored(shards[-1])
    for shard in shards[-2::-1]:
        backwards.merge(shard)
    same(backwards, whole, places=False)


def test_a_merged_shard_and_a_state_do_not_change_with_later_updates() -> None:
    first, second, values = accumulated(0, 1, 2), accumulated(3, 4), activations()
    state, before = second.state_dict(), state_text(second.state_dict())
    first.merge(second)
    for accumulator in (first, second):
        add(accumulator, values[5:], NAMES[5:])
    assert state_text(state) == before
    same(first, accumulated(*range(9)))
    again = LayerAccumulator.from_state(state)
    add(again, values[5:], NAMES[5:])
    same(again, second)
    assert again.key == "block.tanh#2 out"
    assert (again.bounds, again.with_rank, again.low_at) == ((-1.0, 1.0), True, second.low_at)


def test_without_covariance_on_one_side_there_is_no_rank() -> None:
    joined = accumulated(3, 4)
    joined.merge(accumulated(0, 1, with_rank=False))
    assert joined.statistics().rank is None and restored(joined).statistics().rank is None
    joined.merge(accumulated(5))
    assert joined.items == 5 and joined.statistics().rank is None


def test_an_extreme_that_occurs_twice_keeps_its_first_position() -> None:
    accumulator = LayerAccumulator(Call("relu", "ReLU", 0, None), 1)
    for image in ("a", "b"):
        add(accumulator, torch.tensor([[[0.0, 2.0]]]), [image])
    other = restored(accumulator)
    other.merge(accumulator)
    for each in (accumulator, other):
        assert (each.low_at, each.high_at) == (("a", 0, (0,)), ("a", 0, (1,)))


def test_an_update_returns_the_moments_of_its_batch_alone_and_follows_no_gradient() -> None:
    accumulator, values = accumulated(), activations().requires_grad_()
    for part in (slice(0, 4), slice(4, 9)):
        batch = add(accumulator, values[part] * 2, NAMES[part])
        stored = 2 * values[part, 2].detach().double().numpy()
        assert batch.count[2] == stored.size and batch.mean[2] == pytest.approx(stored.mean(), rel=1e-12)
    assert accumulator.items == 9 and values.grad is None


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
