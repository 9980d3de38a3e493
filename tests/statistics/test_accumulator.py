"""Accumulators split, merged, written down and taken up again are the whole."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookscope.hooks.selection import Call
from hookscope.statistics.accumulator import LayerAccumulator
from hookscope.statistics.layer_statistics import LayerStatistics

BOUNDS = (-1.0, 1.0)


def activations() -> Tensor:
    """Nine images of 8 channels: one dead, two copies, one far off, NaN and Inf in some."""
    values = torch.randn(9, 8, 5, 4, generator=torch.Generator().manual_seed(2)).tanh()
    values[:, 1] = 0.5
    values[:, 6] = 2 * values[:, 3] + 9
    values[:, 4] += 1e4
    values[5, 4, 2, 3] = 10_003.0  # the highest, once
    values[2, 5, 1, 1], values[7, 0, 0, 0] = torch.nan, -torch.inf
    return values


def names(count: int = 9) -> list[str]:
    return [f"{number}.jpg" for number in range(count)]


def new() -> LayerAccumulator:
    return LayerAccumulator(Call("block.tanh", "Tanh", 2, 5), 8, BOUNDS, with_rank=True, part="out")


def counted(*order: int, batch: int = 9) -> LayerAccumulator:
    """What is counted of these images, in this order."""
    found, values = new(), activations()
    for start in range(0, len(order), batch):
        part = list(order[start : start + batch])
        found.update(values[part], [names()[at] for at in part])
    return found


def taken_up(found: LayerAccumulator) -> LayerAccumulator:
    return LayerAccumulator.from_state(found.state_dict())


def same(found: LayerStatistics, whole: LayerStatistics, places: bool = True) -> None:
    """Counts, extremes, quantiles to the last digit; float sums to twelve; ranks, from products in float32, to five."""
    plain = ["call", "part", "items", "shape", "values", "min", "max", "zeros", "nan", "inf", "quantiles", "channels"]
    plain += ["dead_channels", "saturated", "duplicate_channels", "low_at", "high_at"] + ["nonfinite_at"] * places
    for field in plain:
        assert getattr(found, field) == getattr(whole, field), field
    for field in ("mean", "std", "rms", "between_images"):
        assert getattr(found, field) == pytest.approx(getattr(whole, field), rel=1e-12), field
    assert found.rank == pytest.approx(whole.rank, rel=1e-5)
    for field in vars(found.by_channel):
        np.testing.assert_allclose(getattr(found.by_channel, field), getattr(whole.by_channel, field), rtol=1e-9)


WHOLE = range(9)


def test_the_whole_knows_what_was_planted() -> None:
    found = counted(*WHOLE).statistics()
    assert (found.dead_channels, found.duplicate_channels, found.nan, found.inf) == ((1,), ((3, 6),), 1, 1)
    assert found.nonfinite_at == ("2.jpg", 5, (1, 1)) and found.items == 9 and found.shape == (8, 5, 4)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_the_size_of_batches_changes_nothing(batch: int) -> None:
    same(counted(*WHOLE, batch=batch).statistics(), counted(*WHOLE).statistics())


@pytest.mark.parametrize("batch", [1, 4, 9])
def test_the_order_of_images_changes_only_which_is_first(batch: int) -> None:
    same(counted(8, 3, 5, 7, 0, 2, 6, 1, 4, batch=batch).statistics(), counted(*WHOLE).statistics(), places=False)


SPLITS = [
    [range(4), range(4, 9)],
    [range(1), range(1, 9)],
    [range(3), range(3, 5), range(5, 9)],
    [range(0), range(9)],
    [range(9), range(0)],
]


@pytest.mark.parametrize("split", SPLITS)
def test_shards_merged_are_the_whole(split: list[range]) -> None:
    whole = counted(*WHOLE).statistics()
    shards = [counted(*part, batch=2) for part in split]
    joined = new()
    for shard in shards:
        joined.merge(taken_up(shard))
    same(joined.statistics(), whole)
    backwards = taken_up(shards[-1])
    for shard in shards[-2::-1]:
        backwards.merge(shard)
    same(backwards.statistics(), whole, places=False)


def test_a_shard_that_was_merged_goes_on_unharmed() -> None:
    first, second = counted(0, 1, 2), counted(3, 4)
    before = json.dumps(second.state_dict(), default=lambda array: array.tolist())
    first.merge(second)
    first.update(activations()[5:], names()[5:])
    assert json.dumps(second.state_dict(), default=lambda array: array.tolist()) == before
    same(first.statistics(), counted(*WHOLE).statistics())


def test_taken_up_again_it_goes_on() -> None:
    found = counted(0, 1, 2, 3)
    state = found.state_dict()
    frozen = json.dumps(state, default=lambda array: array.tolist())
    found.update(activations()[4:], names()[4:])
    assert json.dumps(state, default=lambda array: array.tolist()) == frozen  # no window on what goes on
    again = LayerAccumulator.from_state(state)
    again.update(activations()[4:], names()[4:])
    same(again.statistics(), found.statistics())
    assert again.key == "block.tanh#2 out"
    assert (again.bounds, again.with_rank, again.low_at) == (BOUNDS, True, found.low_at)


def test_without_covariance_on_one_side_there_is_no_rank() -> None:
    one = LayerAccumulator(Call("block.tanh", "Tanh", 2, 5), 8, BOUNDS, part="out")
    one.update(activations()[:2], names()[:2])
    joined = counted(3, 4)
    joined.merge(one)
    assert joined.statistics().rank is None and taken_up(joined).statistics().rank is None
    joined.merge(counted(5))
    assert joined.items == 5 and joined.statistics().rank is None


def test_the_first_place_stays_where_an_extreme_comes_again() -> None:
    found = LayerAccumulator(Call("relu", "ReLU", 0, None), 1)
    for image in ("a", "b"):
        found.update(torch.tensor([[[0.0, 2.0]]]), [image])
    other = taken_up(found)
    other.merge(found)
    for known in (found, other):
        assert (known.low_at, known.high_at) == (("a", 0, (0,)), ("a", 0, (1,)))


def test_what_an_update_returns_is_the_batch_alone() -> None:
    found, values = new(), activations()
    for part in (slice(0, 4), slice(4, 9)):
        batch = found.update(values[part], names()[part])
        stored = values[part, 2].double().numpy()
        assert batch.count[2] == stored.size and batch.mean[2] == pytest.approx(stored.mean(), rel=1e-12)


def test_gradients_are_not_followed() -> None:
    values: Any = activations().requires_grad_()
    found = new()
    found.update(values * 2, names())
    assert found.items == 9 and values.grad is None
