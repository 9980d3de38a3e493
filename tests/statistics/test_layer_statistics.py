"""Statistics of a layer against NumPy in float64 on the stored activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookscope.hooks.selection import Call
from hookscope.statistics.accumulator import LayerAccumulator
from hookscope.statistics.layer_statistics import QUANTILES, LayerStatistics

CALL = Call("stage.relu", "ReLU", 1, 4)


def random(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def names(count: int) -> list[str]:
    return [f"{number}.jpg" for number in range(count)]


def measured(values: Tensor, *sizes: int, images: Sequence[str | None] | None = None, **told: Any) -> LayerStatistics:
    """Statistics of ``values`` ``(N, C, *positions)``, added in batches of these sizes."""
    found = LayerAccumulator(CALL, values.shape[1], **told)
    images, start = names(len(values)) if images is None else images, 0
    for batch in values.split(list(sizes) or len(values)):
        found.update(batch, images[start : start + len(batch)])
        start += len(batch)
    return found.statistics(calls=2)


def check(found: LayerStatistics, values: Tensor) -> None:
    """Every number of ``found`` against NumPy's: counts and extremes to the last digit, means and spreads to nine."""
    stored = values.double().numpy()
    finite = stored[np.isfinite(stored)]
    assert (found.values, found.nan, found.inf) == (stored.size, np.isnan(stored).sum(), np.isinf(stored).sum())
    assert found.zeros == pytest.approx((stored == 0).mean(), rel=1e-12)
    assert found.channels == stored.shape[1]
    check_places(found, stored)
    if not finite.size:
        assert (found.mean, found.std, found.min, found.max, found.rms) == (None,) * 5 and found.quantiles == {}
        return
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12 * np.abs(finite).mean())
    assert found.std == pytest.approx(finite.std(), rel=1e-9, abs=1e-15 * np.abs(finite).max())
    assert found.rms == pytest.approx(np.sqrt((finite**2).mean()), rel=1e-9)
    ordered = np.sort(finite)
    for share in QUANTILES:
        rank = share * (finite.size - 1)
        largest = max(abs(ordered[math.floor(rank)]), abs(ordered[math.ceil(rank)]))
        assert abs(found.quantiles[share] - np.quantile(finite, share)) <= 2.0**-7 * largest + 1e-40
    by_channel = stored.swapaxes(0, 1).reshape(stored.shape[1], -1)
    dead = [at for at, one in enumerate(by_channel) if one.size > 1 and (one == one[0]).all()]
    assert found.dead_channels == tuple(dead)


def check_places(found: LayerStatistics, stored: np.ndarray[Any, Any]) -> None:
    """The places really hold the value, and are the first that do."""
    finite = np.isfinite(stored)
    low, high = (np.where(finite, stored, sign * np.inf) for sign in (1, -1))
    for place, mask in (
        (found.low_at, finite & (stored == low.min())),
        (found.high_at, finite & (stored == high.max())),
        (found.nonfinite_at, ~finite),
    ):
        if not mask.any():
            assert place is None
            continue
        assert place is not None
        first = np.unravel_index(mask.argmax(), mask.shape)
        assert (names(len(stored)).index(place.image or ""), place.channel, *place.position) == first


def nasty(*where: tuple[Any, float]) -> Tensor:
    values = random(6, 4, 5, 3)
    for at, value in where:
        values[at] = value
    return values


EVERY = slice(None)
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
    "nan in one channel": nasty(((EVERY, 2), torch.nan)),
    "inf in one map": nasty(((3, 1), torch.inf), ((4, 0, 0, 0), -torch.inf)),
    "nan in the first image alone": nasty(((0,), torch.nan)),
    "nan everywhere": nasty(((EVERY,), torch.nan)),
    "all of them": nasty(((5, 3, 4, 2), torch.nan), ((5, 3, 4, 1), torch.inf), ((2, 0, 1), -torch.inf)),
}


@pytest.mark.parametrize("values", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_every_number_whatever_the_batches(values: Tensor) -> None:
    check(measured(values), values)
    if len(values) == 6:
        check(measured(values, *[1] * 6), values)
        check(measured(values, 3, 3), values)
        check(measured(values, 4, 2), values)


def test_doubles_of_any_size() -> None:
    huge = torch.tensor([[[1e300, -1e300, 3.0]], [[1e200, 1.0, 1.0]]], dtype=torch.float64)
    found = measured(huge, 1, 1)
    assert (found.mean, found.min, found.max) == (pytest.approx(1e200 / 6), -1e300, 1e300)
    assert found.std == found.rms == math.inf  # as NumPy has it: their squares are
    assert found.quantiles[0.5] == pytest.approx(2.0, rel=2.0**-7) and found.quantiles[0.99] <= 1e300
    level = measured(torch.full((2, 1, 4), 1e300, dtype=torch.float64), 1, 1)
    assert (level.mean, level.std, level.quantiles[0.5], level.dead_channels) == (1e300, 0, 1e300, (0,))
    tiny = measured(torch.tensor([[[5e-324, 0.0]]], dtype=torch.float64))
    assert (tiny.max, tiny.zeros, tiny.std) == (5e-324, 0.5, 0)


@pytest.mark.parametrize(
    "values", [torch.zeros(0, 3, 4, 4), torch.zeros(2, 3, 0, 4), torch.zeros(2, 0), torch.zeros(0, 0)]
)
def test_nothing_at_all(values: Tensor) -> None:
    found = measured(values)
    assert (found.items, found.values, found.mean, found.low_at, found.between_images) == (0, 0, None, None, None)
    assert (found.zeros, found.dead_channels, found.duplicate_channels, found.quantiles) == (0, (), (), {})


def test_an_empty_batch_between_others_adds_nothing() -> None:
    values = random(4, 3, 5)
    check(measured(values, 2, 0, 2), values)
    assert measured(values, 2, 0, 2).items == 4


def test_what_a_call_is_and_what_its_shape_has_in_common() -> None:
    found = LayerAccumulator(CALL, 3, part="out")
    found.update(random(2, 3, 4, 5), names(2))
    found.update(random(1, 3, 4, 7), names(1))
    known = found.statistics(calls=2)
    assert (known.key, known.call, known.calls, known.items, known.shape) == (
        "stage.relu#1 out", CALL, 2, 3, (3, 4, None),
    )  # fmt: skip
    assert measured(random(2, 3)).shape == (3,)


def test_dead_channels_rest_on_more_than_one_value() -> None:
    assert measured(torch.zeros(1, 3, 1, 1)).dead_channels == ()
    assert measured(torch.zeros(2, 3, 1, 1), 1, 1).dead_channels == (0, 1, 2)
    values = random(3, 5, 2, 2)
    values[:, 1], values[:, 3], values[:, 4] = 0.0, -7.25, torch.tensor([0.0, -0.0]).repeat(6).reshape(3, 2, 2)
    assert measured(values, 1, 2).dead_channels == (1, 3, 4)
    values[2, 3, 1, 1] = -7.0  # it awakes for one image, at one place
    assert measured(values, 1, 2).dead_channels == (1, 4)
    values[0, 1, 0, 0] = torch.nan
    assert measured(values, 1, 2).dead_channels == (4,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_shares_by_hand(dtype: torch.dtype) -> None:
    sigmoid = torch.tensor([[[0.0, 0.009, 0.011, 0.5], [0.989, 0.991, 1.0, 0.5]]], dtype=dtype)
    found = measured(sigmoid.expand(4, 2, 4), 1, 3, bounds=(0.0, 1.0))
    assert found.saturated == 0.5 and found.saturated_by_channel is not None
    assert found.saturated_by_channel.tolist() == [0.5, 0.5]
    relu6 = torch.tensor([[[0.0, 0.0, 5.93, 5.95]]], dtype=dtype)
    assert measured(relu6, bounds=(None, 6.0)).saturated == 0.25
    tanh = torch.tensor([[[-0.99, -0.97, 0.97, torch.nan]]], dtype=dtype)
    assert measured(tanh, bounds=(-1.0, 1.0)).saturated == 0.25
    free = measured(relu6)
    assert free.saturated is None and free.saturated_by_channel is None


def test_by_channel() -> None:
    values = random(6, 4, 5, 3)
    found = measured(values, 2, 4)
    stored = values.double().numpy()
    np.testing.assert_allclose(found.by_channel.mean, stored.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(found.by_channel.variance, stored.var((0, 2, 3)), rtol=1e-9)
    assert found.histogram.bins()[2].sum() == values.numel()


def test_between_images_against_numpy() -> None:
    values = random(6, 4, 5, 3)
    by_hand = np.sqrt(values.double().numpy().mean((2, 3)).var(0).mean())
    for sizes in ((6,), (1,) * 6, (2, 4)):
        assert measured(values, *sizes).between_images == pytest.approx(by_hand, rel=1e-9)
    assert measured(values[:1]).between_images is None
    assert measured(values[:1].expand(5, 4, 5, 3)).between_images == pytest.approx(0, abs=1e-15)


def test_rank_only_where_it_is_asked_for() -> None:
    values = random(6, 4, 5, 3)
    covariance = np.cov(values.double().movedim(1, 0).flatten(1), bias=True)
    shares = np.linalg.eigvalsh(covariance) / covariance.trace()
    rank = np.exp(-(shares * np.log(shares)).sum())
    for sizes in ((6,), (1,) * 6, (2, 4)):
        assert measured(values, *sizes, with_rank=True).rank == pytest.approx(rank, rel=1e-5)
    assert measured(values).rank is None
    assert measured(torch.zeros(2, 3, 4), with_rank=True).rank == 0


def test_duplicates_need_a_pattern() -> None:
    values = random(4, 6, 3, 3).relu()
    values[:, 2] = values[:, 5] = 3 * values[:, 0]
    assert measured(values, 1, 3).duplicate_channels == ((0, 2, 5),)
    assert measured(values[:1, :, :1]).duplicate_channels == ()  # three values: alike by chance
    values[:, 1] = values[:, 3] = 0.25
    assert measured(values, 1, 3).duplicate_channels == ((0, 2, 5),)


def test_many_items_of_one_image_are_no_duplicates() -> None:
    """A head's proposals: were they turned alike, sketches would know their sum alone, which is the same for all."""
    values = random(200, 300, 1)
    values[:, 7] = values[:, 100]
    for images in (["cat.jpg"] * 200, [None] * 200, names(200)):
        assert measured(values, images=images).duplicate_channels == ((7, 100),)


def test_half_precision_around_it_changes_nothing() -> None:
    values = random(4, 6, 9)
    plain = measured(values, with_rank=True)
    with torch.autocast("cpu", torch.bfloat16):
        halved = measured(values, with_rank=True)
        assert torch.is_autocast_enabled("cpu")
    assert halved.rank == plain.rank and halved.mean == plain.mean


def test_facts_do_not_change_when_counting_goes_on() -> None:
    found = LayerAccumulator(CALL, 3)
    found.update(random(2, 3, 4), names(2))
    known = found.statistics()
    mean, count = known.by_channel.mean.copy(), known.histogram.bins()[2].sum()
    found.update(random(5, 3, 4, seed=1), names(5))
    assert np.array_equal(known.by_channel.mean, mean) and known.histogram.bins()[2].sum() == count
