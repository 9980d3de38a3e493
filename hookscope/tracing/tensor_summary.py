"""One tensor at one moment, as facts that hold no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks import as_plain, finite_values, tensors_in


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor at one moment.

    Attributes:
        shape: As it is.
        dtype: Such as ``float32``; of a quantized tensor the type it is stored in, ``quint8``.
        min: Lowest finite value, decoded from a quantized tensor, 0 or 1 for a truth value. None for complex and empty
            tensors, for those on the meta device, and where no value is finite.
        max: Highest finite value, or None as for ``min``.
        nonfinite: How many values are NaN or Inf.
        values: All values as nested lists, complex ones as ``[real, imaginary]``; None where they were not asked for
            or are too many.
    """

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    nonfinite: int
    values: Any = None


Facts = dict[str, TensorSummary]


def facts_of(value: Any, most: int = 0) -> Facts:
    """The summary of every tensor in ``value`` by part; tensors of at most ``most`` values hold their values."""
    return {part: _summary(tensor, most) for part, tensor in tensors_in(value).items()}


def _summary(tensor: Tensor, most: int) -> TensorSummary:
    shape, dtype = tuple(int(length) for length in tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        return TensorSummary(shape, dtype, None, None, 0)
    plain = as_plain(tensor)
    if plain.is_floating_point() and plain.element_size() < 4:  # not every small type has a lowest value
        plain = plain.float()
    elif plain.dtype in (torch.uint16, torch.uint32, torch.uint64):
        plain = plain.long()
    is_small = most > 0 and plain.numel() <= most
    if plain.is_complex():
        values = torch.view_as_real(plain.resolve_conj()).tolist() if is_small else None
        return TensorSummary(shape, dtype, None, None, int((~torch.isfinite(plain)).sum()), values)
    finite = finite_values(plain.to(torch.uint8) if plain.dtype is torch.bool else plain)
    values = plain.tolist() if is_small else None
    return TensorSummary(shape, dtype, finite.min, finite.max, finite.nonfinite, values)
