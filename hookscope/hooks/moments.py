"""Mean, standard deviation and other statistics of all values of a tensor, computed in pieces and merged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookscope.hooks.tensors import FiniteValues, as_float, finite_values


@dataclass(frozen=True, slots=True)
class GradientSize:
    """Euclidean norm, mean and maximum of the absolute finite values; share of zeros among all ``count`` values."""

    norm: float
    mean_abs: float
    max_abs: float
    zeros: float
    nan: int
    inf: int
    count: int


def size_of(gradients: Sequence[Tensor]) -> GradientSize | None:
    """The size of gradients together, None where they have no value at all."""
    parts = [finite_values(as_float(gradient)) for gradient in gradients if gradient.numel()]
    if not parts:
        return None
    count, finite = sum(part.count for part in parts), sum(part.values.numel() for part in parts)
    return GradientSize(
        norm=math.hypot(*(part.norm() for part in parts)),
        mean_abs=sum(part.norm(1) for part in parts) / finite if finite else 0.0,
        max_abs=max(part.largest for part in parts),
        zeros=sum(part.zeros for part in parts) / count,
        nan=sum(part.nan for part in parts),
        inf=sum(part.inf for part in parts),
        count=count,
    )


def norm_and_nonfinite(tensors: Iterable[Tensor]) -> tuple[float, int]:
    """The Euclidean norm of the finite values of all ``tensors`` together, and how many are NaN or Inf."""
    norms, nonfinite = [], 0
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        finite = FiniteValues(as_float(tensor), tensor.numel())
        norm = finite.norm()
        if not math.isfinite(norm):  # finite values, the usual case, need no further pass
            finite = finite_values(finite.values)
            norm = finite.norm()
        norms.append(norm)
        nonfinite += finite.nonfinite
    return math.hypot(*norms), nonfinite


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of the finite values of ``tensors`` together, in double precision; NaN if none is finite."""
    tensors = list(tensors)
    norm, nonfinite = norm_and_nonfinite(tensors)
    return math.nan if nonfinite and nonfinite == sum(tensor.numel() for tensor in tensors) else norm


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
    """Mean, population standard deviation and norm; float64 in units of the largest absolute value."""
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
