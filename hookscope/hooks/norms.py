"""The norms and sizes of gradients, over all tensors of a container."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hookscope.hooks.finite import FiniteValues, as_float, finite_values


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
