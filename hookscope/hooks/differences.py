"""How far apart two values of a layer are, whatever containers they come in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks.tensors import tensors_in


def largest_difference(one: Any, other: Any) -> float:
    """The largest absolute difference between the tensors of two values; NaN equals NaN, and Inf the Inf of its sign.

    Returns:
        0.0 for equal ones; ``inf`` where the containers, the shapes or the data types differ, or a number meets one
        that is not finite.

    Example:
        >>> import torch
        >>> largest_difference((torch.tensor([1.0, torch.nan]),), (torch.tensor([1.5, torch.nan]),))
        0.5
    """
    first, second = tensors_in(one), tensors_in(other)
    if list(first) != list(second):
        return math.inf
    return max((_difference(first[name], second[name]) for name in first), default=0.0)


def largest_value(value: Any) -> float:
    """The largest finite absolute value among the tensors of a value.

    Example:
        >>> import torch
        >>> largest_value([torch.tensor([1.0, -3.0]), torch.tensor(torch.inf)])
        3.0
    """
    sizes = [_magnitude(tensor) for tensor in tensors_in(value).values()]
    return max(sizes, default=0.0)


def same_bits(one: Any, other: Any) -> bool:
    """Whether the tensors of two values are the same to the bit: 0 and -0 differ, a NaN equals itself.

    Example:
        >>> import torch
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0)), same_bits([torch.tensor(torch.nan)] * 2, [])
        (False, False)
    """
    first, second = tensors_in(one), tensors_in(other)
    return list(first) == list(second) and all(_same_bits(first[name], second[name]) for name in first)


def _magnitude(tensor: Tensor) -> float:
    tensor = (tensor.dequantize() if tensor.is_quantized else tensor).detach()
    return float(tensor.abs().double().nan_to_num(0, 0, 0).max()) if tensor.numel() else 0.0


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if not _alike(one, other):
        return False
    if one.is_quantized:
        one, other = one.int_repr(), other.int_repr()
    return torch.equal(_as_bytes(one), _as_bytes(other))


def _as_bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _difference(one: Tensor, other: Tensor) -> float:
    if not _alike(one, other):
        return math.inf
    if torch.equal(one, other):
        return 0.0
    one, other = _as_doubles(one), _as_doubles(other)
    equal = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(equal, 0.0)
    return float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _as_doubles(tensor: Tensor) -> Tensor:
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    # not every device has doubles
    return tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
