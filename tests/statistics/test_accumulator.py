"""Accumulators that are split, merged, saved and restored equal one accumulator of all images."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.hooks import Call
from hookscope.hooks.calls import ACTIVATION_FUNCTIONS
from hookscope.statistics import RunningStatistics
from hookscope.statistics.accumulator import Bounds, LayerAccumulator, bounds_of, margins
from tests.statistics.judge import add, check_same, names


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
