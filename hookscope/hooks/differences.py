"""The differences between the tensors of two values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks.finite import as_float, as_plain, finite_values
from hookscope.hooks.tensors import tensors_in


def largest_difference(value: Any, other: Any) -> float:
    """The largest absolute difference between the tensors of two values; NaN equals NaN, and Inf the Inf of its sign.

    ``inf`` where the containers, the shapes or the data types differ, or a number meets NaN or Inf.
    """
    pairs = _pairs(value, other)
    return math.inf if pairs is None else max((_difference(*pair) for pair in pairs), default=0.0)


def same_bits(value: Any, other: Any) -> bool:
    """Whether the tensors of two values are the same to the bit: 0 and -0 differ, a NaN equals itself."""
    pairs = _pairs(value, other)
    return pairs is not None and all(torch.equal(_as_bytes(tensor), _as_bytes(twin)) for tensor, twin in pairs)


def largest_value(value: Any) -> float:
    """The largest finite absolute value among the tensors of a value."""
    return max((finite_values(as_float(tensor)).largest for tensor in tensors_in(value).values()), default=0.0)


def _pairs(value: Any, other: Any) -> list[tuple[Tensor, Tensor]] | None:
    """The tensors of both values side by side; None where containers, shapes or data types differ."""
    first, second = tensors_in(value), tensors_in(other)
    if list(first) != list(second):
        return None
    pairs = [(tensor, second[name]) for name, tensor in first.items()]
    return pairs if all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs) else None


def _as_bytes(tensor: Tensor) -> Tensor:
    plain = (tensor.int_repr() if tensor.is_quantized else tensor.detach()).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _difference(tensor: Tensor, other: Tensor) -> float:
    if torch.equal(tensor, other):
        return 0.0
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    a, b = (as_plain(side).cpu().to(wide) for side in (tensor, other))  # not every device has doubles
    equal = (a == b) | (a.isnan() & b.isnan())
    difference = (a - b).abs().masked_fill(equal, 0.0)
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())
