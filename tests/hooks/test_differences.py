"""Differences of values and of bits, derived by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hookscope.hooks.differences import largest_difference, largest_value, same_bits


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0.5),
        (torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf]), 0.0),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 3.0]), 2.0),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), math.inf),
        (torch.tensor([math.nan]), torch.tensor([0.0]), math.inf),
        (torch.zeros(2), torch.zeros(3), math.inf),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), math.inf),
        ([torch.zeros(2)], torch.zeros(2), math.inf),
        ({"a": torch.tensor(1)}, {"a": torch.tensor(4)}, 3.0),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 5.0),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (None, None, 0.0),
    ],
)
def test_largest_difference(one: Any, other: Any, expected: float) -> None:
    assert largest_difference(one, other) == largest_difference(other, one) == expected


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_same_bits() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert same_bits({"a": nan}, {"a": nan.clone()})
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.tensor(True), torch.tensor(True))
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    assert same_bits(quantized, quantized.clone())


@pytest.mark.parametrize(
    ("value", "largest"),
    [([torch.tensor([1.0, -3.0]), torch.tensor(math.inf)], 3.0), (torch.tensor(3 + 4j), 5.0), (torch.zeros(0), 0.0)],
)
def test_largest_value(value: Any, largest: float) -> None:
    assert largest_value(value) == largest
