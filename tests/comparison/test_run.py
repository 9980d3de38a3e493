"""Comparing two sides, judged by NumPy on captured tensors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookscope import capture, compare


def net() -> nn.Sequential:
    """A convolution, BatchNorm and an in-place ReLU, and a classifier of six classes."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)
    return nn.Sequential(*layers, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6)).eval()


def scaled(model: nn.Module, name: str, factor: float) -> nn.Module:
    """A copy with one parameter multiplied by ``factor``."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_parameter(name).mul_(factor)
    return twin


@pytest.fixture
def batch() -> Any:
    return torch.randn(6, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def test_the_same_object_as_both_sides_is_the_same_to_the_bit(batch: Any) -> None:
    model = net()
    found = compare(model, model, batch)
    assert found.answer.kind == "same"
    assert [row.key for row in found.calls] == ["(input)", *map(str, range(8)), "(model)"]
    assert all(row.difference is not None and row.difference.is_same for row in found.calls)


def test_differences_are_those_of_captured_tensors(batch: Any) -> None:
    a = net()
    b = scaled(a, "3.weight", 1.1)
    with torch.no_grad(), capture(a, "all") as of_a, capture(b, "all") as of_b:
        a(batch), b(batch)
    rows = {row.key: row for row in compare(a, b, batch).calls}
    for key in of_a:
        one, two = of_a[key].double().numpy(), of_b[key].double().numpy()
        found = rows[key].difference
        assert found is not None
        assert found.values == one.size
        assert found.equal == np.count_nonzero(one == two)
        assert found.relative_l2 == pytest.approx(np.linalg.norm(two - one) / np.linalg.norm(one), rel=1e-6)
        expected = (one * two).sum() / np.linalg.norm(one) / np.linalg.norm(two)
        assert found.cosine == pytest.approx(expected, abs=1e-7)
        if found.largest is not None:
            at = found.largest.image, *found.largest.place
            assert abs(two - one)[at] == pytest.approx(abs(two - one).max(), rel=1e-6) == found.largest.value
            assert (found.largest.a, found.largest.b) == (one[at], two[at])


def test_the_changed_layer_is_the_only_one_that_differs_alone(batch: Any) -> None:
    found = compare(net(), scaled(net(), "3.weight", 1.1), batch)
    assert [row.key for row in found.calls if row.alone] == ["3"] == [found.answer.most]
    assert found.answer.first == "3"
