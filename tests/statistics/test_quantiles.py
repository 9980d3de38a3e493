"""Quantiles of a stream against np.quantile, within the relative error that is promised."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hookscope.statistics.quantiles import ValueHistogram, in_intervals
from tests.statistics.judge import random

SHARES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
SMALLEST = 2.0**-133  # how wide a bin is where float32 has no more exponents


def histogram_of(*batches: Tensor) -> ValueHistogram:
    histogram = ValueHistogram()
    for batch in batches:
        histogram.update(batch)
    return histogram


def check(histogram: ValueHistogram, values: Tensor) -> None:
    stored = np.sort(values.double().numpy(), axis=None)
    stored = stored[np.isfinite(stored)]
    for share, quantile in zip(SHARES, histogram.quantiles(SHARES), strict=True):
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
    check(histogram_of(values), values)


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
