"""Statistics of a layer against NumPy in float64 on the stored activations."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookscope.hooks import Call
from hookscope.statistics import QUANTILES
from hookscope.statistics.accumulator import LayerAccumulator
from tests.statistics.judge import add, check_layer, layer_of, names, random

CALL = Call("stage.relu", "ReLU", 1, 4)
measured = partial(layer_of, call=CALL)


def check(values: Tensor, *sizes: int) -> None:
    """Every number of these batches against NumPy's; a position holds its value and is the first that does."""
    layer, stored = measured(values, *sizes), values.double().numpy()
    check_layer(layer, stored)
    finite = np.isfinite(stored)
    if (~finite).any():
        first = np.unravel_index((~finite).argmax(), stored.shape)
        assert layer.nonfinite_at == (names(len(values))[first[0]], first[1], first[2:])
    ordered = np.sort(stored[finite])
    for share in QUANTILES if ordered.size else ():
        rank = share * (ordered.size - 1)
        largest = max(abs(ordered[math.floor(rank)]), abs(ordered[math.ceil(rank)]))
        assert abs(layer.quantiles[share] - np.quantile(ordered, share)) <= 2.0**-7 * largest + 1e-40


def spoiled(*where: tuple[Any, float]) -> Tensor:
    values = random(6, 4, 5, 3)
    for at, value in where:
        values[at] = value
    return values


ACTIVATIONS = {
    "convolution": random(6, 4, 5, 3),
    "relu": random(6, 4, 5, 3).relu(),
    "vectors": random(6, 8),
    "tokens": random(6, 7, 4).movedim(-1, 1),
    "channels last": random(6, 5, 3, 4).movedim(-1, 1),
    "memory format": random(6, 4, 5, 3).to(memory_format=torch.channels_last),
    "clips": random(6, 4, 2, 3, 3),
    "strided": random(6, 8, 5, 6)[:, ::2, :, 1::2],
    "expanded": random(6, 1, 1, 3).expand(6, 4, 5, 3),
    "1x1": random(6, 4, 1, 1),
    "one value": random(1, 1),
    "doubles": random(6, 4, 5, 3).double(),
    "far doubles": random(6, 4, 5, 3).double() + 1e8,
    "far": random(6, 4, 5, 3) + 1e4,
    "one far channel": random(6, 4, 5, 3) + torch.tensor([0, 1e5, 0, -3e3]).reshape(4, 1, 1),
    "the ends of float32": random(6, 4, 5, 3).clamp(-1, 1) * 3.4e38,
    "smallest": random(6, 4, 5, 3) * 1e-44,
    "minus zero": torch.where(random(6, 4, 5, 3) > 0, 1.0, -0.0),
    "constants": torch.arange(4.0).add(0.1).reshape(1, 4, 1).expand(6, 4, 9),
    "nan in one channel": spoiled(((slice(None), 2), torch.nan)),
    "inf in one map": spoiled(((3, 1), torch.inf), ((4, 0, 0, 0), -torch.inf)),
    "nan in the first image alone": spoiled(((0,), torch.nan)),
    "nan everywhere": spoiled(((slice(None),), torch.nan)),
    "all of them": spoiled(((5, 3, 4, 2), torch.nan), ((5, 3, 4, 1), torch.inf), ((2, 0, 1), -torch.inf)),
}


@pytest.mark.parametrize("values", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_every_number_whatever_the_batches(values: Tensor) -> None:
    for sizes in [(), (1,) * 6, (3, 3), (4, 0, 2)] if len(values) == 6 else [()]:
        check(values, *sizes)


def test_doubles_of_any_size() -> None:
    huge = torch.tensor([[[1e300, -1e300, 3.0]], [[1e200, 1.0, 1.0]]], dtype=torch.float64)
    layer = measured(huge, 1, 1)
    assert (layer.mean, layer.min, layer.max) == (pytest.approx(1e200 / 6), -1e300, 1e300)
    assert layer.std == layer.rms == math.inf  # as NumPy has it: their squares are
    assert layer.quantiles[0.5] == pytest.approx(2.0, rel=2.0**-7) and layer.quantiles[0.99] <= 1e300
    level = measured(torch.full((2, 1, 4), 1e300, dtype=torch.float64), 1, 1)
    assert (level.mean, level.std, level.quantiles[0.5], level.dead_channels) == (1e300, 0, 1e300, (0,))
    tiny = measured(torch.tensor([[[5e-324, 0.0]]], dtype=torch.float64))
    assert (tiny.max, tiny.zeros, tiny.std) == (5e-324, 0.5, 0)


@pytest.mark.parametrize(
    "values", [torch.zeros(0, 3, 4, 4), torch.zeros(2, 3, 0, 4), torch.zeros(2, 0), torch.zeros(0, 0)]
)
def test_no_values(values: Tensor) -> None:
    layer = measured(values)
    assert (layer.items, layer.values, layer.mean, layer.low_at, layer.between_images) == (0, 0, None, None, None)
    assert (layer.zeros, layer.dead_channels, layer.duplicate_channels, layer.quantiles) == (0, (), (), {})


def test_the_shape_has_none_where_items_differ() -> None:
    accumulator = LayerAccumulator(CALL, 3, part="out")
    add(accumulator, random(2, 3, 4, 5), names(2))
    add(accumulator, random(1, 3, 4, 7), names(1))
    layer = accumulator.statistics(calls=2)
    assert (layer.key, layer.call, layer.calls) == ("stage.relu#1 out", CALL, 2)
    assert (layer.items, layer.shape) == (3, (3, 4, None))
    assert measured(random(2, 3)).shape == (3,)


def test_dead_channels_need_more_than_one_value() -> None:
    assert measured(torch.zeros(1, 3, 1, 1)).dead_channels == ()
    assert measured(torch.zeros(2, 3, 1, 1), 1, 1).dead_channels == (0, 1, 2)
    values = random(3, 5, 2, 2)
    values[:, 1], values[:, 3], values[:, 4] = 0.0, -7.25, torch.tensor([0.0, -0.0]).repeat(6).reshape(3, 2, 2)
    assert measured(values, 1, 2).dead_channels == (1, 3, 4)
    values[2, 3, 1, 1] = -7.0  # for one image, at one position
    assert measured(values, 1, 2).dead_channels == (1, 4)
    values[0, 1, 0, 0] = torch.nan
    assert measured(values, 1, 2).dead_channels == (4,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_shares_by_hand(dtype: torch.dtype) -> None:
    sigmoid = torch.tensor([[[0.0, 0.009, 0.011, 0.5], [0.989, 0.991, 1.0, 0.5]]], dtype=dtype)
    layer = measured(sigmoid.expand(4, 2, 4), 1, 3, bounds=(0.0, 1.0))
    assert layer.saturated == 0.5 and layer.saturated_by_channel is not None
    assert layer.saturated_by_channel.tolist() == [0.5, 0.5]
    relu6 = torch.tensor([[[0.0, 0.0, 5.93, 5.95]]], dtype=dtype)
    assert measured(relu6, bounds=(None, 6.0)).saturated == 0.25
    tanh = torch.tensor([[[-0.99, -0.97, 0.97, torch.nan]]], dtype=dtype)
    assert measured(tanh, bounds=(-1.0, 1.0)).saturated == 0.25
    free = measured(relu6)
    assert free.saturated is None and free.saturated_by_channel is None


def test_between_images_against_numpy() -> None:
    values = random(6, 4, 5, 3)
    by_hand = np.sqrt(values.double().numpy().mean((2, 3)).var(0).mean())
    for sizes in ((6,), (1,) * 6, (2, 4)):
        assert measured(values, *sizes).between_images == pytest.approx(by_hand, rel=1e-9)
    assert measured(values[:1]).between_images is None
    assert measured(values[:1].expand(5, 4, 5, 3)).between_images == pytest.approx(0, abs=1e-15)


def test_duplicates_need_a_pattern() -> None:
    values = random(4, 6, 3, 3).relu()
    values[:, 2] = values[:, 5] = 3 * values[:, 0]
    assert measured(values, 1, 3).duplicate_channels == ((0, 2, 5),)
    assert measured(values[:1, :, :1]).duplicate_channels == ()  # three values: alike by chance
    values[:, 1] = values[:, 3] = 0.25
    assert measured(values, 1, 3).duplicate_channels == ((0, 2, 5),)


def test_statistics_do_not_change_with_later_updates() -> None:
    accumulator = LayerAccumulator(CALL, 3)
    add(accumulator, random(2, 3, 4), names(2))
    layer = accumulator.statistics()
    mean, count = layer.by_channel.mean.copy(), layer.histogram.bins()[2].sum()
    add(accumulator, random(5, 3, 4, seed=1), names(5))
    assert np.array_equal(layer.by_channel.mean, mean) and layer.histogram.bins()[2].sum() == count == 24
