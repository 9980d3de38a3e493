"""How large a gradient is: norm, mean, largest value, zeros, NaN and Inf."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GradientSize:
    """The figures of a gradient, over all tensors of a container.

    Attributes:
        norm: Euclidean norm of the finite values.
        mean_abs: Mean absolute finite value.
        max_abs: Largest absolute finite value.
        zeros: Share of all values that are exactly 0, 0 to 1.
        nan: Count of NaN.
        inf: Count of Inf of either sign.
        count: Count of all values.
    """

    norm: float
    mean_abs: float
    max_abs: float
    zeros: float
    nan: int
    inf: int
    count: int


def size_of(gradients: Sequence[Tensor]) -> GradientSize | None:
    """The figures of gradients, None for no tensor at all.

    Example:
        >>> import torch
        >>> found = size_of([torch.tensor([3.0, -4.0, 0.0, float("nan")])])
        >>> found.norm, found.max_abs, found.zeros, found.nan
        (5.0, 4.0, 0.25, 1)
    """
    parts = [_size_of_one(gradient) for gradient in gradients if gradient.numel()]
    if not parts:
        return None
    count = sum(part.count for part in parts)
    finite = sum(part.count - part.nan - part.inf for part in parts)
    total = sum(part.mean_abs * (part.count - part.nan - part.inf) for part in parts)
    return GradientSize(
        norm=math.hypot(*(part.norm for part in parts)),
        mean_abs=total / finite if finite else 0.0,
        max_abs=max(part.max_abs for part in parts),
        zeros=sum(part.zeros * part.count for part in parts) / count,
        nan=sum(part.nan for part in parts),
        inf=sum(part.inf for part in parts),
        count=count,
    )


def _size_of_one(gradient: Tensor) -> GradientSize:
    values = _flat(gradient)
    count = values.numel()
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    nan = inf = 0
    if not math.isfinite(norm):
        good = values[torch.isfinite(values)]
        nan = int(torch.isnan(values).sum())
        inf = count - good.numel() - nan
        values, norm = good, float(torch.linalg.vector_norm(good, dtype=torch.float64))
    some = values.numel()
    return GradientSize(
        norm=norm,
        mean_abs=float(torch.linalg.vector_norm(values, 1, dtype=torch.float64)) / some if some else 0.0,
        max_abs=float(torch.linalg.vector_norm(values, math.inf)) if some else 0.0,
        zeros=(some - int(torch.count_nonzero(values))) / count,
        nan=nan,
        inf=inf,
        count=count,
    )


def _flat(tensor: Tensor) -> Tensor:
    """All values in a row; complex ones as their magnitudes, halves in single precision."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    flat = dense.flatten().abs() if dense.is_complex() else dense.flatten()
    return flat if flat.element_size() > 2 else flat.float()


def norm_and_nonfinite(tensors: Sequence[Tensor]) -> tuple[float, int]:
    """The norm of the finite values of all ``tensors`` together, and how many are NaN or Inf."""
    squares, bad = 0.0, 0
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = _flat(tensor)
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
        if not math.isfinite(norm):
            finite = values[torch.isfinite(values)]
            bad += values.numel() - finite.numel()
            norm = float(torch.linalg.vector_norm(finite, dtype=torch.float64))
        squares += norm * norm
    return math.sqrt(squares), bad


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of the finite values of ``tensors`` together, in double precision; NaN if none is finite."""
    held = list(tensors)
    norm, bad = norm_and_nonfinite(held)
    return math.nan if bad and bad == sum(tensor.numel() for tensor in held) else norm
