"""Mean, standard deviation and other statistics of all values of a tensor, computed in pieces and merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookscope.hooks.finite import FiniteValues, finite_values

# Values in double precision at a time: the first fully connected layer of VGG has 10⁸. Larger pieces take longer, as
# their memory is fetched anew from the system for each.
_PIECE = 1 << 17
_CANCELLED = 1e-3  # a sum of squared distances below this share of the sum of squares has lost too many digits

Moments = tuple[Any, Any, Any]


def value_numbers(values: Tensor) -> dict[str, Any]:
    """Mean, population standard deviation, extremes, L2 norm and share of zeros of ``values``; NaN and Inf counted.

    The values are float32 or float64, of any shape.
    """
    parts = [finite_values(piece) for piece in values.reshape(-1).split(_PIECE)]
    finite = [part for part in parts if part.values.numel()]
    mean, std, norm = _moments(finite) if finite else (None, None, None)
    return {
        "mean": mean,
        "std": std,
        "min": min((part.min for part in parts if part.min is not None), default=None),
        "max": max((part.max for part in parts if part.max is not None), default=None),
        "norm": norm,
        "zeros": sum(part.zeros for part in finite) / values.numel() if values.numel() else None,
        "nan": sum(part.nan for part in parts),
        "inf": sum(part.inf for part in parts),
        "first_nonfinite": _first_nonfinite(values) if any(part.nonfinite for part in parts) else None,
    }


def _first_nonfinite(values: Tensor) -> tuple[int, ...]:
    position = (~torch.isfinite(values)).reshape(-1).byte().argmax()
    return tuple(int(index) for index in np.unravel_index(int(position), values.shape))


def _moments(parts: Sequence[FiniteValues]) -> tuple[float, float, float]:
    """Mean, population standard deviation and norm; those of float64 in units of the largest absolute value."""
    # no square of a float32 overflows float64
    unit = 1.0 if parts[0].values.dtype == torch.float32 else max(part.largest for part in parts) or 1.0
    moments: Moments = (0, 0.0, 0.0)
    squares = 0.0
    for part in parts:
        scaled = part.values.double() if unit == 1 else part.values / unit
        square, mean = float(torch.dot(scaled, scaled)), float(scaled.mean())
        about_mean = square - len(scaled) * mean * mean
        if about_mean < _CANCELLED * square:
            away = scaled - mean
            about_mean = float(torch.dot(away, away))
        squares += square
        moments = merge_moments(moments, (len(scaled), mean, about_mean))
    count, mean, about_mean = moments
    return mean * unit, math.sqrt(about_mean / count) * unit, math.sqrt(squares) * unit


def merge_moments(moments: Moments, others: Moments, outer: bool = False) -> Moments:
    """Count, mean and squared distances from the mean of two sets of values together (Chan, Golub, LeVeque 1979).

    ``M2 = M2a + M2b + d² na nb / n`` with ``d`` the difference of the means: no difference of large sums is taken, so
    the variance stays exact where the mean is large. The three are numbers, NumPy arrays or tensors; ``outer`` makes
    the squares products of every two channels, ``(C, C)`` for a mean ``(C,)``.

    Example:
        >>> merge_moments((2, 1.0, 2.0), (1, 4.0, 0.0))
        (3, 2.0, 8.0)
    """
    (count, mean, squares), (other_count, other_mean, other_squares) = moments, others
    total = count + other_count
    share = other_count / (total + (total == 0))
    apart = other_mean - mean
    weighted = apart * (count * share)
    return total, mean + apart * share, squares + other_squares + (apart[:, None] if outer else apart) * weighted
