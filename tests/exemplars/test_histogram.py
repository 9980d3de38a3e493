"""Histograms with bins that follow the values, against NumPy's, for any order and any parts."""

from __future__ import annotations

import numpy as np
import pytest

from hookscope.exemplars.histogram import ChannelHistograms


def of(*parts: np.ndarray) -> ChannelHistograms:
    histogram = ChannelHistograms(parts[0].shape[1])
    for part in parts:
        histogram.update(part)
    return histogram


VALUES = np.random.default_rng(0).normal(size=(500, 6)) * [1e-8, 1, 1, 1e6, 0, 1e-300] + [0, 0, 1e6, 0, 7, 0]
VALUES[0, 1], VALUES[1, 1] = np.nan, np.inf
VALUES[:, 2] = np.where(np.arange(500) % 2, 0, VALUES[:, 2])


def test_counts_are_those_of_numpy_with_the_same_edges() -> None:
    for channel, (counts, edges) in enumerate(of(VALUES).shown()):
        values = VALUES[:, channel]
        values = values[np.isfinite(values)]
        assert counts.sum() == len(values)
        assert np.array_equal(counts, np.histogram(values, edges)[0])
        assert len(counts) <= 64
        assert np.allclose(np.diff(edges), edges[1] - edges[0])


def test_the_range_has_about_half_of_the_bins_at_least() -> None:
    shown = of(VALUES).shown()
    assert [len(shown[channel][0]) >= 31 for channel in (0, 1, 2, 3, 5)] == [True] * 5
    counts, edges = shown[4]
    assert (counts.tolist(), edges.tolist()) == ([500], [6.5, 7.5]), "one value"


@pytest.mark.parametrize("seed", range(3))
def test_order_and_parts_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [of(part) for part in np.array_split(VALUES[rng.permutation(500)], int(rng.integers(2, 40)))]
    while len(parts) > 1:
        parts[0].merge(parts.pop(int(rng.integers(1, len(parts)))))
    again = ChannelHistograms.from_state(parts[0].state_dict(), 6)
    for one, other, restored in zip(of(VALUES).shown(), parts[0].shown(), again.shown(), strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])
        assert np.array_equal(one[0], restored[0])


def test_a_channel_without_finite_values_has_no_intervals() -> None:
    [(counts, edges)] = of(np.full((3, 1), np.nan)).shown()
    assert (len(counts), len(edges)) == (0, 1)
