"""What tests of statistics share: values, measured layers, and NumPy in float64 as the judge."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.hooks import Call
from hookscope.statistics import LayerStatistics, RunningStatistics, StatisticsCollector
from hookscope.statistics.accumulator import LayerAccumulator, rotations_of
from hookscope.statistics.moments import ChannelMoments

CALL = Call("conv", "Conv2d", 0, 0)


def random(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def names(count: int) -> list[str]:
    return [f"{number}.jpg" for number in range(count)]


def add(accumulator: LayerAccumulator, values: Tensor, images: Sequence[str | None]) -> ChannelMoments:
    """Update with rotations of the names of the images."""
    return accumulator.update(values, images, rotations_of([f"{image}" for image in images]))


def layer_of(values: Any, *sizes: int, call: Call = CALL, **options: Any) -> LayerStatistics:
    """Statistics of ``values`` ``(N, C, *positions)``, added in batches of these sizes; a list is one map."""
    values = torch.as_tensor(values)
    values = values if values.ndim > 1 else values[None, None]
    accumulator = LayerAccumulator(call, values.shape[1], **options)
    images = iter(names(len(values)))
    for batch in values.split(list(sizes) or len(values)):
        add(accumulator, batch, list(islice(images, len(batch))))
    return accumulator.statistics(calls=2)


def measured(net: nn.Module, inputs: Tensor, *sizes: int, **options: Any) -> RunningStatistics:
    """Statistics of ``net`` on ``inputs`` in batches of these sizes."""
    with StatisticsCollector(net, **options) as collector, torch.no_grad():
        for batch in inputs.split(list(sizes) or len(inputs)):
            net(batch)
    return collector.totals


def check_layer(layer: LayerStatistics, stored: np.ndarray[Any, Any]) -> None:
    """The numbers against NumPy's: counts and extremes to the last digit, means and spreads to nine."""
    finite = stored[np.isfinite(stored)]
    assert (layer.values, layer.nan, layer.inf) == (stored.size, np.isnan(stored).sum(), np.isinf(stored).sum())
    assert layer.zeros == pytest.approx((stored == 0).mean(), rel=1e-12)
    assert layer.channels == stored.shape[1]
    if not finite.size:
        assert (layer.mean, layer.std, layer.min, layer.max, layer.rms) == (None,) * 5 and layer.quantiles == {}
        return
    scale = np.abs(finite).mean()
    assert (layer.min, layer.max) == (finite.min(), finite.max())
    assert layer.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12 * scale)
    assert layer.std == pytest.approx(finite.std(), rel=1e-9, abs=1e-12 * scale)
    assert layer.rms == pytest.approx(np.sqrt((finite**2).mean()), rel=1e-9)
    by_channel = stored.swapaxes(0, 1).reshape(stored.shape[1], -1)
    dead = [at for at, values in enumerate(by_channel) if values.size > 1 and (values == values[0]).all()]
    assert layer.dead_channels == tuple(dead)
    for position, value in ((layer.low_at, finite.min()), (layer.high_at, finite.max())):
        first = np.unravel_index((stored == value).argmax(), stored.shape)
        assert position is not None and (position.channel, *position.position) == first[1:]


def check_same(totals: RunningStatistics, other: RunningStatistics, places: bool = True, rel: float = 1e-12) -> None:
    """Equal statistics but for ``rel``; ranks, from products in float32, agree to four digits."""
    assert totals.images == other.images
    for a, b in zip(totals.statistics(), other.statistics(), strict=True):
        for field in ("call", "part", "calls", "items", "shape", "values", "nan", "inf", "channels"):
            assert getattr(a, field) == getattr(b, field), field
        assert (a.dead_channels, a.duplicate_channels) == (b.dead_channels, b.duplicate_channels)
        for field in ("mean", "std", "min", "max", "rms", "between_images"):
            assert getattr(a, field) == pytest.approx(getattr(b, field), rel=rel, abs=rel * (b.rms or 0)), field
        assert a.zeros == pytest.approx(b.zeros, abs=2 / a.values)
        assert not places or (a.low_at, a.high_at, a.nonfinite_at) == (b.low_at, b.high_at, b.nonfinite_at)
        assert a.rank == (None if b.rank is None else pytest.approx(b.rank, rel=1e-4))
        if rel < 1e-9:
            assert (a.quantiles, a.saturated) == (b.quantiles, b.saturated)
    for one, two in zip(totals.drifts(), other.drifts(), strict=True):
        assert (one.layer, one.items, one.updated) == (two.layer, two.items, two.updated)
        np.testing.assert_allclose(one.shift, two.shift, rtol=max(rel, 1e-9), atol=max(rel, 1e-9))
        np.testing.assert_allclose(one.ratio, two.ratio, rtol=max(rel, 1e-9), atol=max(rel, 1e-9))
