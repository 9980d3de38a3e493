"""Statistics of channels and layers: NumPy in float64 on the stored values is the judge, whatever the split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookscope.hooks import Call
from hookscope.statistics import QUANTILES
from hookscope.statistics.accumulator import LayerAccumulator
from hookscope.statistics.moments import ChannelMoments, ValueHistogram, in_intervals, sums_of_maps
from tests.statistics.judge import add, check_layer, layer_of, names, random


def moments_of(values: Tensor, *sizes: int) -> ChannelMoments:
    """The moments of ``values`` ``(N, C, P)``, added in batches of these sizes."""
    moments = ChannelMoments.empty(values.shape[1])
    for batch in values.split(list(sizes) or len(values)):
        moments.merge(ChannelMoments.of(sums_of_maps(batch)))
    return moments


def check(moments: ChannelMoments, values: Tensor) -> None:
    """Against NumPy, channel by channel."""
    for channel, stored in enumerate(values.double().numpy().swapaxes(0, 1).reshape(values.shape[1], -1)):
        finite = stored[np.isfinite(stored)]
        own = {name: array[channel] for name, array in vars(moments).items()}
        assert (own["count"], own["zeros"]) == (finite.size, (stored == 0).sum())
        assert (own["nan"], own["inf"]) == (np.isnan(stored).sum(), np.isinf(stored).sum())
        assert (own["low"], own["high"]) == (finite.min(initial=np.inf), finite.max(initial=-np.inf))
        if finite.size:
            scale = np.abs(finite).mean()
            np.testing.assert_allclose(own["mean"], finite.mean(), rtol=1e-12, atol=1e-12 * scale)
            # nine digits hold for any mean up to 1e8 standard deviations; float32 itself has lost the rest beyond
            np.testing.assert_allclose(moments.variance[channel] ** 0.5, finite.std(), rtol=1e-9, atol=0)


def normal(*shape: int, mean: float = 0.0, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(dtype)


@pytest.mark.parametrize("sizes", [(), (1,) * 7, (3, 3, 1), (2, 5)])
@pytest.mark.parametrize(
    ("mean", "std", "dtype"),
    [
        (0, 1, torch.float32),
        (5, 1e-3, torch.float32),
        (1e4, 1, torch.float32),
        (-1e6, 1, torch.float32),
        (1e8, 1, torch.float64),
        (0, 1e-30, torch.float32),
        (0, 1e37, torch.float32),
        (1e300, 1e140, torch.float64),
        (3, 1, torch.float64),
    ],
)
def test_mean_and_spread(mean: float, std: float, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    values = normal(7, 3, 40, mean=mean, std=std, dtype=dtype)
    check(moments_of(values, *sizes), values)


def test_a_batch_of_several_parts_and_one_channel_with_a_large_mean() -> None:
    values = normal(5, 2, 70_000, mean=2000)
    check(moments_of(values), values)
    values = normal(4, 3, 50)
    values[:, 1] += 1e5
    values[2, 1, 3], values[0, 1, 0] = torch.inf, torch.nan
    check(moments_of(values, 1, 3), values)


@pytest.mark.parametrize("value", [0.1, 1e5 + 0.1, -3e38, 1e-40])
def test_a_constant_has_no_spread_at_all(value: float) -> None:
    moments = moments_of(torch.full((5, 2, 33), value), 2, 3)
    assert moments.low.tolist() == moments.high.tolist() == [float(torch.tensor(value))] * 2
    np.testing.assert_allclose(moments.variance**0.5, 0, atol=1e-15 * abs(value))


BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_are_not_finite_are_counted_apart(bad: float, dtype: torch.dtype) -> None:
    for where in ((slice(None), 1), (0,), (3, 2, 5), (slice(None),)):
        values = normal(6, 3, 20, mean=1e4, dtype=dtype)
        values[where] = bad
        check(moments_of(values, 1, 2, 3), values)


@pytest.mark.parametrize("cuts", [(4, 3), (1, 6), (0, 7), (2, 1, 4)])
def test_merged_shards_equal_the_whole(cuts: tuple[int, ...]) -> None:
    values = normal(7, 3, 30, mean=1e4)
    values[1, 0, 2], values[6, 2] = torch.nan, torch.inf
    shards = [moments_of(part) if len(part) else ChannelMoments.empty(3) for part in values.split(list(cuts))]
    for ordered in (shards, shards[::-1]):
        whole = ChannelMoments.empty(3)
        for shard in ordered:
            whole.merge(ChannelMoments.from_state(shard.state_dict()))
        check(whole, values)


def test_means_of_maps_leave_out_maps_with_nothing_finite() -> None:
    values = normal(5, 2, 9)
    values[1, 0], values[2, 1, :4] = torch.nan, torch.inf
    moments = ChannelMoments.of_map_means(sums_of_maps(values))
    stored = np.where(np.isfinite(values.numpy()), values.double().numpy(), np.nan)
    for channel in range(2):
        means = [np.nanmean(one) for one in stored[:, channel] if np.isfinite(one).any()]
        assert moments.count[channel] == len(means)
        np.testing.assert_allclose(moments.mean[channel], np.mean(means), rtol=1e-12)
        np.testing.assert_allclose(moments.variance[channel], np.var(means), rtol=1e-9)
        assert (moments.low[channel], moments.high[channel]) == pytest.approx((min(means), max(means)))


SHARES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
SMALLEST = 2.0**-133  # how wide a bin is where float32 has no more exponents


def histogram_of(*batches: Tensor) -> ValueHistogram:
    histogram = ValueHistogram()
    for batch in batches:
        histogram.update(batch)
    return histogram


def check_quantiles(quantiles: Mapping[float, float], values: Tensor) -> None:
    stored = np.sort(values.double().numpy(), axis=None)
    stored = stored[np.isfinite(stored)]
    for share, quantile in quantiles.items():
        rank = share * (stored.size - 1)
        largest = max(abs(stored[math.floor(rank)]), abs(stored[math.ceil(rank)]))
        assert abs(quantile - np.quantile(stored, share)) <= 2.0**-7 * largest + SMALLEST, share


VALUES = {
    "normal": random(20_000),
    "relu": random(20_000).relu(),
    "one": torch.tensor([3.3]),
    "two": torch.tensor([0.0, 100.0]),
    "opposite": torch.tensor([-8.0, 8.0]),
    "spikes": torch.cat([torch.ones(900), torch.full((100,), 2.0)]),
    "just below a power": torch.full((100,), 1.9999),
    "negative": -random(1000).sigmoid() - 5,
    "every size": torch.logspace(-44, 38, 5000) * (-1) ** torch.arange(5000),
    "zeros": torch.tensor([0.0, -0.0, 0.0]),
    "ends": torch.tensor([-3.4028234663852886e38, 1e-45, 3.4028234663852886e38]),
    "holes": torch.tensor([1.0, torch.nan, 2.0, torch.inf, -torch.inf, 3.0, -torch.nan]),
    "cut off": random(5000).mul(9).clamp(0, 6),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_against_numpy(values: Tensor) -> None:
    check_quantiles(dict(zip(SHARES, histogram_of(values).quantiles(SHARES), strict=True)), values)


def test_where_values_lie_close_the_error_is_far_smaller() -> None:
    values = random(100_000)
    histogram = histogram_of(values).quantiles(SHARES[1:-1])
    np.testing.assert_allclose(histogram, np.quantile(values.double(), SHARES[1:-1]), atol=2e-3)


def test_bins_hold_each_value_between_their_ends() -> None:
    values = VALUES["every size"]
    lower, upper, counts = histogram_of(values).bins()
    assert counts.sum() == len(values) and (lower <= upper).all() and (lower[1:] >= upper[:-1]).all()
    for low, high, count in zip(lower, upper, counts, strict=True):
        stored = values.double().numpy()
        inside = (stored >= low) & (stored < high) if low >= 0 else (stored > low) & (stored <= high)
        assert count == inside.sum() or 0 in (low, high) or high == upper[-1]


def test_equal_intervals_count_as_numpy_does_also_where_numpy_refuses() -> None:
    values, counts = VALUES["every size"].double().numpy(), np.arange(len(VALUES["every size"]))
    expected, _ = np.histogram(values, 48, (values.min(), values.max()), weights=counts)
    assert np.array_equal(in_intervals(values, counts, values.min(), values.max(), 48), expected)
    near = np.array([1, np.nextafter(1, 2), np.nextafter(1, 2)])
    assert in_intervals(near, np.array([5, 2, 1]), near[0], near[1], 48).tolist() == [5, *[0] * 46, 3]
    assert in_intervals(np.ones(2), np.array([5, 2]), 1, 1, 3).tolist() == [0, 7, 0]


def test_nothing_finite() -> None:
    for histogram in (
        ValueHistogram(),
        histogram_of(torch.tensor([torch.nan, torch.inf])),
        histogram_of(torch.zeros(0)),
    ):
        assert all(math.isnan(value) for value in histogram.quantiles(SHARES))
        assert histogram.bins()[2].size == 0


def test_halves_merged_are_the_whole_to_the_last_count() -> None:
    values = VALUES["every size"]
    whole, empty = histogram_of(values), ValueHistogram()
    for first, second in ((values[:10], values[10:]), (values[::2], values[1::2]), (values[3000:], values[:3000])):
        joined = ValueHistogram.from_state(histogram_of(first).state_dict())
        joined.merge(histogram_of(second))
        joined.merge(empty)
        for a, b in zip(joined.bins(), whole.bins(), strict=True):
            assert np.array_equal(a, b)
        assert joined.quantiles(SHARES) == whole.quantiles(SHARES)


CALL = Call("stage.relu", "ReLU", 1, 4)
measured = partial(layer_of, call=CALL)


def check_batches(values: Tensor, *sizes: int) -> None:
    """Every number of these batches against NumPy's; a position holds its value and is the first that does."""
    layer, stored = measured(values, *sizes), values.double().numpy()
    check_layer(layer, stored)
    finite = np.isfinite(stored)
    if (~finite).any():
        first = np.unravel_index((~finite).argmax(), stored.shape)
        assert layer.nonfinite_at == (names(len(values))[first[0]], first[1], first[2:])
    assert list(layer.quantiles) == list(QUANTILES) * bool(finite.any())
    check_quantiles(layer.quantiles, values)


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
        check_batches(values, *sizes)


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
