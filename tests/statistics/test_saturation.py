"""Where every activation function of torch.nn saturates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookscope.hooks.calls import ACTIVATION_FUNCTIONS
from hookscope.statistics.saturation import Bounds, bounds_of, margins


class Gate(nn.Sigmoid):
    pass


BOUNDS = [
    (nn.Sigmoid(), (0.0, 1.0)),
    (nn.Hardsigmoid(), (0.0, 1.0)),
    (nn.Tanh(), (-1.0, 1.0)),
    (nn.Softsign(), (-1.0, 1.0)),
    (nn.ReLU6(), (None, 6.0)),
    (nn.Hardtanh(), (-1.0, 1.0)),
    (nn.Hardtanh(-3, 7), (-3.0, 7.0)),
    (nn.Hardtanh(0, 4), (None, 4.0)),
    (nn.Hardtanh(-2, 0), (-2.0, None)),
    (nn.ELU(), (-1.0, None)),
    (nn.ELU(alpha=0.0), (None, None)),
    (nn.CELU(alpha=2.5), (-2.5, None)),
    (nn.SELU(), (-1.7580993408473766, None)),
    (Gate(), (0.0, 1.0)),
    (nn.ReLU(), (None, None)),
    (nn.Conv2d(1, 1, 1), (None, None)),
    (torch.ao.nn.quantized.ReLU6(), (None, 6.0)),
    (torch.ao.nn.quantized.Sigmoid(1 / 256, 0), (0.0, 1.0)),
]


@pytest.mark.parametrize(("module", "bounds"), BOUNDS, ids=[repr(module) for module, _ in BOUNDS])
def test_bounds(module: nn.Module, bounds: Bounds) -> None:
    assert bounds_of(module) == pytest.approx(bounds)


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
def test_a_function_has_no_limits_but_its_bounds_and_zero(name: str) -> None:
    cls = getattr(nn, name)
    module = cls(0.5, 0.0) if name == "Threshold" else cls()
    far = 1e6  # softsign comes near only slowly
    low, high = (float(value) for value in module(torch.tensor([[-far, far]] * 2)).detach()[0, [0, -1]])
    if name == "GLU":
        assert bounds_of(module) == (None, None)
        return
    for at, value in zip(bounds_of(module), (low, high), strict=True):
        if at is None:
            assert abs(value) > 1e3 or abs(value) < 1e-5
        else:
            assert value == pytest.approx(at, abs=1e-5)


def test_margins_are_a_hundredth_of_the_distance() -> None:
    assert margins((0.0, 1.0)) == pytest.approx((0.01, 0.99))
    assert margins((-1.0, 1.0)) == pytest.approx((-0.98, 0.98))
    assert margins((None, 6.0)) == (-math.inf, pytest.approx(5.94))
    assert margins((-2.0, None)) == (pytest.approx(-1.98), math.inf)
    assert margins((None, None)) == (-math.inf, math.inf)
