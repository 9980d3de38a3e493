"""Counts, means, variances, extremes of channels: NumPy in float64 is the judge, whatever the split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hookscope.statistics.moments import ChannelMoments, sums_of_maps


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
