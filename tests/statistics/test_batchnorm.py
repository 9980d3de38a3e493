"""Drift of BatchNorms: NumPy on their inputs, running statistics set by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from hookscope.hooks import was_updated
from hookscope.statistics.batchnorm import BatchNormAccumulator


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
