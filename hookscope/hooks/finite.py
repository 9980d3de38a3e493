"""The finite values of a tensor of any type: the one summary that all other summaries of tensors start from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def as_plain(tensor: Tensor) -> Tensor:
    """``tensor`` detached, dense and decoded from its quantized form; otherwise in its own type."""
    tensor = tensor.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside torch.vmap
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.device.type == "mps":  # which has no double precision
        tensor = tensor.cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def as_float(tensor: Tensor) -> Tensor:
    """Values that can be compared and scaled, float32 or float64: quantized ones decoded, complex ones by magnitude."""
    tensor = as_plain(tensor)
    if tensor.is_complex():
        tensor = tensor.abs()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@dataclass(frozen=True, slots=True)
class FiniteValues:
    """The finite values ``(P,)`` of a tensor and their extremes, and counts over all its values."""

    values: Tensor
    count: int
    nan: int = 0
    inf: int = 0
    min: float | None = None
    max: float | None = None

    @property
    def nonfinite(self) -> int:
        return self.nan + self.inf

    @property
    def zeros(self) -> int:
        """How many values are exactly 0."""
        if self.min is None or float(self.values.abs().amin()) > 0:  # the fastest test, and usual
            return 0
        return self.values.numel() - int(torch.count_nonzero(self.values))

    @property
    def largest(self) -> float:
        """The largest absolute value, 0 where no value is finite."""
        return max(abs(self.min or 0.0), abs(self.max or 0.0))

    def norm(self, order: int = 2) -> float:
        """The norm, summed in double precision."""
        return float(torch.linalg.vector_norm(self.values, order, dtype=torch.float64))


def finite_values(tensor: Tensor) -> FiniteValues:
    """The finite values of a real tensor, from one pass over it unless some value is NaN or Inf."""
    flat, nan = tensor.reshape(-1), 0
    count = flat.numel()
    if not count:
        return FiniteValues(flat, 0)
    low, high = flat.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):  # a NaN or an Inf anywhere shows in the extremes
        nan, flat = int(torch.isnan(flat).sum()), flat.masked_select(torch.isfinite(flat))
        if not flat.numel():
            return FiniteValues(flat, count, nan, count - nan)
        low, high = flat.aminmax()
    return FiniteValues(flat, count, nan, count - nan - flat.numel(), low.item(), high.item())
