"""Statistics of all values of a tensor; NumPy in float64 is the judge."""

import math

import numpy as np
import pytest
import torch

from hookscope.hooks import tensors as moments
from hookscope.hooks.tensors import value_numbers


@pytest.mark.parametrize("piece", [7, 1 << 18])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_numbers_equal_those_of_numpy(monkeypatch: pytest.MonkeyPatch, piece: int, offset: float) -> None:
    monkeypatch.setattr(moments, "_PIECE", piece)
    raw = np.random.default_rng(0).normal(offset, 2, (6, 5, 3)).astype(np.float32)
    raw[1, 2, 0] = 0
    raw[3, 1] = [np.nan, np.inf, -np.inf]
    statistics = value_numbers(torch.from_numpy(raw))
    known = raw[np.isfinite(raw)].astype(np.float64)
    expected = {"mean": known.mean(), "std": known.std(), "norm": np.sqrt((known**2).sum())}
    for name, value in expected.items():
        assert statistics[name] == pytest.approx(value, rel=1e-12), name
    assert (statistics["min"], statistics["max"]) == (known.min(), known.max())
    assert (statistics["nan"], statistics["inf"], statistics["first_nonfinite"]) == (1, 2, (3, 1, 0))
    assert statistics["zeros"] == 1 / 90


@pytest.mark.parametrize("scale", [1e-300, 1e300, 5e-324])
def test_extremes_of_double_precision(scale: float) -> None:
    statistics = value_numbers(torch.tensor([scale, -scale, scale, -scale], dtype=torch.float64))
    assert (statistics["mean"], statistics["std"], statistics["norm"]) == (0, scale, 2 * scale)


def test_tensors_without_finite_values_or_without_values() -> None:
    for values, zeros, first in ((torch.full((2, 2), math.nan), 0.0, (0, 0)), (torch.zeros(0, 3), None, None)):
        statistics = value_numbers(values)
        assert [statistics[name] for name in ("mean", "std", "min", "max", "norm")] == [None] * 5
        assert (statistics["zeros"], statistics["first_nonfinite"]) == (zeros, first)
    assert value_numbers(torch.tensor(2.0))["mean"] == 2
    assert value_numbers(torch.tensor(math.inf))["first_nonfinite"] == ()
