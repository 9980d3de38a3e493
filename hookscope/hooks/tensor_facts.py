"""What a tensor holds in a few facts: shape, type, range of the finite values, and of a small one the values too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks.tensors import tensors_in


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor as it was at one moment; holds nothing of it but numbers.

    Attributes:
        shape: As it is.
        dtype: Such as ``float32``; of a quantized tensor the type it is stored in, ``quint8``.
        min: Least finite value; a quantized tensor's as it stands for, a truth value as 0 or 1. None where there is
            none: complex, empty, on the meta device, all NaN.
        max: Greatest finite value, likewise.
        nonfinite: How many values are NaN or Inf.
        values: All of them as nested lists, a complex one as ``[real, imaginary]``; None where they were not asked
            for, or there are more than that.
    """

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    nonfinite: int
    values: Any = None


Facts = dict[str, TensorSummary]


def facts_of(value: Any, most: int = 0) -> Facts:
    """The facts of every tensor in ``value`` by its dotted part name; those of a bare tensor under ``""``.

    Args:
        value: Whatever a layer takes or returns.
        most: Tensors of at most so many values are told whole; 0 for none.

    Example:
        >>> import torch
        >>> facts_of({"out": torch.tensor([[1.0, -2.0]])}, most=4)["out"]
        TensorSummary(shape=(1, 2), dtype='float32', min=-2.0, max=1.0, nonfinite=0, values=[[1.0, -2.0]])
    """
    return {part: _facts(tensor, most) for part, tensor in tensors_in(value).items()}


def _facts(tensor: Tensor, most: int) -> TensorSummary:
    shape, dtype = tuple(int(length) for length in tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        return TensorSummary(shape, dtype, None, None, 0)
    plain = _plain(tensor)
    values = _listed(plain) if most and plain.numel() <= most else None
    return TensorSummary(shape, dtype, *_range(plain), values)


def _plain(tensor: Tensor) -> Tensor:
    """The values of ``tensor`` in a type and layout in which they can be compared."""
    plain = tensor.detach()
    if plain.is_quantized:
        plain = plain.dequantize()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    if plain.is_floating_point() and plain.element_size() < 4:  # not every small type has a least value
        return plain.float()
    if plain.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return plain.long()
    return plain


def _range(plain: Tensor) -> tuple[float | None, float | None, int]:
    """The least and the greatest finite value, and how many are not finite."""
    if plain.is_complex():
        return None, None, int((~torch.isfinite(plain)).sum())
    if not plain.numel():
        return None, None, 0
    if plain.dtype is torch.bool:
        plain = plain.to(torch.uint8)
    least, most = plain.aminmax()
    if bool(torch.isfinite(least) & torch.isfinite(most)):  # a NaN or an Inf anywhere shows in the extremes
        return least.item(), most.item(), 0
    finite = plain[torch.isfinite(plain)]
    nonfinite = plain.numel() - finite.numel()
    if not finite.numel():
        return None, None, nonfinite
    least, most = finite.aminmax()
    return least.item(), most.item(), nonfinite


def _listed(plain: Tensor) -> Any:
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).tolist()
