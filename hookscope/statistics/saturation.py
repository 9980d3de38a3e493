"""Bounds of activation functions, and the values that are near a bound."""

from __future__ import annotations

import math
from typing import Any

from hookscope.hooks import Operation, activation_class, class_names

NEAR_A_BOUND = 0.01
"""A value is saturated within this share of the distance between the bounds, or between 0 and the only bound."""

Bounds = tuple[float | None, float | None]

_BOUNDS: dict[str, Bounds] = {
    "Hardsigmoid": (0.0, 1.0),
    "ReLU6": (None, 6.0),
    "SELU": (-1.0507009873554805 * 1.6732632423543772, None),  # scale times alpha
    "Sigmoid": (0.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "Tanh": (-1.0, 1.0),
}


def bounds_of(layer: Any) -> Bounds:
    """The bounds at which an activation function, a layer or an `Operation`, saturates; None on a side without one.

    A ReLU6 saturates at 6 only: the share of zeros describes the other side.
    """

    def given(name: str, position: int, default: float) -> float:
        if not isinstance(layer, Operation):
            return float(getattr(layer, name, default))
        return float(layer.kwargs.get(name, layer.args[position] if len(layer.args) > position else default))

    for name in [activation_class(layer.type)] if isinstance(layer, Operation) else class_names(layer):
        if name in _BOUNDS:
            return _BOUNDS[name]
        if name == "Hardtanh":
            return given("min_val", 1, -1.0) or None, given("max_val", 2, 1.0) or None
        if name in ("ELU", "CELU"):
            return -given("alpha", 1, 1.0) or None, None
    return None, None


def margins(bounds: Bounds) -> tuple[float, float]:
    """Values up to the first number and from the second number are saturated."""
    low, high = bounds
    margin = NEAR_A_BOUND * ((high or 0.0) - (low or 0.0))
    return -math.inf if low is None else low + margin, math.inf if high is None else high - margin
