"""Running statistics of whole models: merged in any order they equal the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from hookscope.errors import InputError
from hookscope.hooks import Call, was_updated
from hookscope.statistics import RunningStatistics
from hookscope.statistics.accumulator import LayerAccumulator
from hookscope.statistics.totals import BatchNormAccumulator
from tests.statistics.judge import add, names, random


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 3 + 5


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(4), (9, 4)),
        (nn.BatchNorm1d(4), (9, 4, 7)),
        (nn.BatchNorm2d(4), (9, 4, 3, 5)),
        (nn.BatchNorm3d(4), (9, 4, 2, 3, 5)),
        (nn.SyncBatchNorm(4), (9, 4, 3, 5)),
        (FrozenBatchNorm2d(4), (9, 4, 3, 5)),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else "x".join(map(str, one)),
)
def test_drift_against_numpy(norm: Any, shape: tuple[int, ...]) -> None:
    values = inputs(*shape)
    mean, variance = [1.0, 2, 3, 4], np.array([1.0, 4, 9, 0.25])
    norm.running_mean.copy_(torch.tensor(mean))
    norm.running_var.copy_(torch.from_numpy(variance))
    accumulator = BatchNormAccumulator.of(norm)
    for batch in values.split([2, 7]):
        accumulator.update(batch)
    drift = accumulator.drift("bn1")
    stored = values.double().numpy().swapaxes(0, 1).reshape(4, -1)
    np.testing.assert_allclose(drift.shift, (stored.mean(1) - mean) / np.sqrt(variance + norm.eps), rtol=1e-9)
    np.testing.assert_allclose(drift.ratio, (stored.var(1) + norm.eps) / (variance + norm.eps), rtol=1e-9)
    assert (drift.layer, drift.items, drift.updated) == ("bn1", stored.shape[1], True)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # torch warns once in a process
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.quint8])
def test_inputs_of_other_types(dtype: torch.dtype) -> None:
    values = inputs(6, 3, 4, 4)
    values = torch.quantize_per_tensor(values, 0.1, 3, dtype) if dtype == torch.quint8 else values.to(dtype)
    accumulator = BatchNormAccumulator.of(nn.BatchNorm2d(3))
    accumulator.update(values.permute(0, 1, 3, 2).detach())
    stored = values.dequantize() if values.is_quantized else values
    np.testing.assert_allclose(accumulator.moments.mean, stored.double().mean((0, 2, 3)), rtol=1e-12)


def test_no_values_and_nan() -> None:
    accumulator = BatchNormAccumulator.of(nn.BatchNorm2d(3))
    accumulator.update(torch.zeros(0, 3, 2, 2))
    assert accumulator.drift("bn").items == 0
    values = inputs(2, 3, 2, 2)
    values[0, 1] = torch.nan
    accumulator.update(values)
    assert accumulator.moments.nan.tolist() == [0, 4, 0] and np.isfinite(accumulator.drift("bn").shift).all()


def test_the_running_statistics_are_those_of_the_beginning() -> None:
    norm = nn.BatchNorm2d(3).double()
    accumulator = BatchNormAccumulator.of(norm)
    norm(inputs(4, 3, 5, 5).double())
    assert accumulator.running_mean.tolist() == [0, 0, 0] and norm.running_mean is not None and norm.running_mean.all()


def test_whether_statistics_were_ever_updated() -> None:
    fresh = nn.BatchNorm2d(3)
    assert not was_updated(fresh) and not was_updated(FrozenBatchNorm2d(3))
    fresh.train()(inputs(2, 3, 4, 4))
    assert was_updated(fresh)
    uncounted: Any = nn.BatchNorm2d(3)
    uncounted.num_batches_tracked = None
    assert not was_updated(uncounted)
    uncounted.running_var[1] = 2
    assert was_updated(uncounted)
    frozen: Any = FrozenBatchNorm2d(3)
    frozen.running_mean[0] = 0.1
    assert was_updated(frozen)


def counted(values: Tensor, *keys: str) -> RunningStatistics:
    """Running statistics of ``values`` as the output of each layer; ``name#1`` is a second call."""
    totals = RunningStatistics(len(values))
    for key in keys:
        name, _, number = key.partition("#")
        layer = LayerAccumulator(Call(name, "Conv2d", int(number or 0), None), values.shape[1])
        add(layer, values, names(len(values)))
        totals.layers[key] = layer
    norm = BatchNormAccumulator.of(nn.BatchNorm2d(values.shape[1]))
    norm.update(values)
    totals.batch_norms["bn"] = norm
    return totals


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (["stem", "rpn"], ["stem", "roi", "mask", "rpn"], ["stem", "roi", "mask", "rpn"]),
        (["stem", "roi", "rpn"], ["stem", "rpn"], ["stem", "roi", "rpn"]),
        (["b"], ["a", "b", "c"], ["a", "b", "c"]),
        (["a", "c"], ["a", "b"], ["a", "b", "c"]),
        ([], ["a", "b"], ["a", "b"]),
        (["a"], [], ["a"]),
    ],
)
def test_a_layer_that_ran_in_one_half_keeps_its_place(first: list[str], second: list[str], both: list[str]) -> None:
    values = random(2, 3, 4, 4)
    joined = counted(values, *first)
    joined.merge(counted(values, *second))
    assert [layer.key for layer in joined.statistics()] == both
    assert [layer.items for layer in joined.statistics()] == [2 * ((k in first) + (k in second)) for k in both]


def test_merging_shares_nothing_that_changes() -> None:
    values = random(4, 3, 4, 4)
    joined, other = RunningStatistics(), counted(values, "a")
    joined.merge(other)
    joined.merge(counted(values, "a"))
    add(joined.layers["a"], values, ["w", "x", "y", "z"])
    assert (other.images, other.statistics()[0].items, other.drifts()[0].items) == (4, 4, 64)


@pytest.mark.parametrize("name", ["::cat", "block::cat", ""])
def test_channels_of_an_operation_whose_number_changes_become_one(name: str) -> None:
    parts = [random(2, 3, 4, 4), 5 + random(3, 7, 4, 4, seed=6), random(1, 1, 4, 4, seed=7)]
    totals = RunningStatistics()
    for part in parts:
        layer = LayerAccumulator(Call(name, "cat", 0, None), part.shape[1], (-1.0, 1.0), with_rank=True)
        add(layer, part, names(len(part)))
        totals.merge(RunningStatistics(len(part), {layer.key: layer}))
    (found,) = RunningStatistics.from_state(totals.state_dict()).statistics()
    values = torch.cat([part.flatten() for part in parts]).double().numpy()
    numbers = (values.size, values.min(), values.max(), values.mean(), values.std())
    assert (found.values, found.min, found.max, found.mean, found.std) == pytest.approx(numbers, rel=1e-12)
    assert (found.shape, found.channels, found.items, found.rank) == ((None, 4, 4), 1, 6, None)
    assert found.saturated == pytest.approx((abs(values) >= 0.99).mean(), abs=0.01)


def test_what_only_moves_values_may_have_the_batch_as_its_second_axis() -> None:
    totals, last = counted(random(3, 16, 4), "a"), counted(random(3, 8, 4), "a")
    for each in (totals, last):
        [layer] = each.layers.values()
        layer.call = replace(layer.call, type="Reshape+Transpose")
        each.batch_norms.clear()
    totals.merge(last)
    assert totals.statistics()[0].values == 3 * 24 * 4


def test_other_layers_are_refused_before_anything_is_added() -> None:
    totals = counted(random(2, 3, 4, 4), "a", "b")
    wider, norms = counted(random(2, 3, 4, 4), "a"), counted(random(2, 3, 4, 4), "a", "b")
    wider.layers |= counted(random(2, 5, 4, 4), "b").layers
    norms.batch_norms = counted(random(2, 5, 4, 4)).batch_norms
    with pytest.raises(InputError, match="b has 3 channels of Conv2d and 5 of Conv2d; merge statistics of one model"):
        totals.merge(wider)
    with pytest.raises(InputError, match="bn has 3 channels and 5; merge statistics of one model"):
        totals.merge(norms)
    assert totals.images == 2 and [layer.items for layer in totals.statistics()] == [2, 2]
