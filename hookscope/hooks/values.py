"""Many values in a few numbers: moments of the finite ones in double precision, counts of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Values in double precision at a time: the first fully connected layer of VGG has 10⁸. Larger pieces take longer, as
# their memory is fetched anew from the system for each.
_PIECE = 1 << 18


def value_numbers(values: Tensor) -> dict[str, Any]:
    """Mean, population standard deviation, extremes, L2 norm and share of zeros of ``values``; NaN and Inf counted.

    Args:
        values: Of any shape, float32 or float64.

    Example:
        >>> import torch
        >>> found = value_numbers(torch.tensor([[3.0, 4.0], [math.nan, 0.0]]))
        >>> found["norm"], found["max"], found["nan"], found["first_nonfinite"], found["zeros"]
        (5.0, 4.0, 1, (1, 0), 0.25)
    """
    nan, inf, zeros, first = 0, 0, 0, None
    low, high = math.inf, -math.inf
    flat = values.reshape(-1)
    for start, piece in enumerate(flat.split(_PIECE) if len(flat) else ()):
        zeros += int((piece == 0).sum())
        least, most = (float(extreme) for extreme in piece.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):  # a NaN or an Inf anywhere shows in the extremes
            finite = torch.isfinite(piece)
            bad = int(torch.isnan(piece).sum())
            nan, inf = nan + bad, inf + int((~finite).sum()) - bad
            if first is None:
                first = start * _PIECE + int((~finite).nonzero()[0, 0])
            piece = piece[finite]
            least, most = (float(one) for one in piece.aminmax()) if len(piece) else (math.inf, -math.inf)
        low, high = min(low, least), max(high, most)
    mean, std, norm = _moments(flat, max(abs(low), abs(high))) if low <= high else (None, None, None)
    return {
        "mean": mean,
        "std": std,
        "min": low if low <= high else None,
        "max": high if low <= high else None,
        "norm": norm,
        "zeros": zeros / len(flat) if len(flat) else None,
        "nan": nan,
        "inf": inf,
        "first_nonfinite": None if first is None else _position(first, tuple(values.shape)),
    }


def _moments(flat: Tensor, largest: float) -> tuple[float, float, float]:
    """Mean, population standard deviation and norm of the finite values, in units of the ``largest`` of them."""
    unit = largest or 1.0
    count, mean, squares, about_mean = 0, 0.0, 0.0, 0.0
    for piece in flat.split(_PIECE):
        part = piece.double()
        part = part[torch.isfinite(part)] / unit
        if not len(part):
            continue
        new, here = count + len(part), float(part.mean())
        squares += float(part.square().sum())
        # Chan, Golub and LeVeque (1979): no difference of large sums
        about_mean += float((part - here).square().sum()) + (here - mean) ** 2 * count * len(part) / new
        mean += (here - mean) * len(part) / new
        count = new
    return mean * unit, math.sqrt(about_mean / count) * unit, math.sqrt(squares) * unit


def _position(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The position of value number ``at`` in a tensor of this shape."""
    found = []
    for length in reversed(shape):
        at, here = divmod(at, length)
        found.append(here)
    return tuple(reversed(found))
