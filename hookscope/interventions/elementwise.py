"""Interventions computed from the values themselves: zero, scale, clamp, noise, quantize, permute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hookscope.errors import UsageError
from hookscope.interventions.base import (
    Intervention,
    Site,
    check_number,
    laid_out_like,
    replaced,
)


@dataclass(frozen=True)
class Zero(Intervention):
    """Set every value to 0, NaN included: ablation. The gradient of the activation is 0.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> Zero(channels=1)(Call("fc", "Linear", 0, None), torch.ones(1, 3)).tolist()
        [[1.0, 0.0, 1.0]]
    """

    word = "zero"
    summary = "set values to 0: ablation"

    def change(self, site: Site, part: Tensor) -> Tensor:
        return replaced(part, torch.zeros_like(part))


@dataclass(frozen=True)
class Scale(Intervention):
    """Multiply every value by ``factor``.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> Scale(2.0)(Call("fc", "Linear", 0, None), torch.tensor([[1.0, -3.0]])).tolist()
        [[2.0, -6.0]]
    """

    factor: float = field(metadata={"example": "0.5", "finite": True})

    word = "scale"
    summary = "multiply values by factor"
    neutral = ("factor", 1)

    def change(self, site: Site, part: Tensor) -> Tensor:
        return part * self.factor


@dataclass(frozen=True)
class Clamp(Intervention):
    """Clamp every value to ``[min, max]``; None for no bound.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> Clamp(0, 6)(Call("fc", "Linear", 0, None), torch.tensor([[-1.0, 3.0, 9.0]])).tolist()
        [[0.0, 3.0, 6.0]]
    """

    min: float | None = field(default=None, metadata={"example": "0"})
    max: float | None = field(default=None, metadata={"example": "6"})

    word = "clamp"
    summary = "clamp values; min or max may be left out"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min is None and self.max is None:
            raise UsageError("clamp needs a bound", do="give min, max or both")
        low, high = (-math.inf if self.min is None else self.min), (math.inf if self.max is None else self.max)
        check_number("min", low)
        check_number("max", high)
        if low > high:
            raise UsageError(f"a clamp from {low:g} to {high:g}", do="give a min of at most max")
        if math.inf in (low, -high):
            raise UsageError(f"a clamp from {low:g} to {high:g}", do="give finite bounds")

    def change(self, site: Site, part: Tensor) -> Tensor:
        return part.clamp(self.min, self.max)


@dataclass(frozen=True)
class Noise(Intervention):
    """Add Gaussian noise with mean 0 to every value.

    Args:
        std: Standard deviation of the noise.
        relative: Whether ``std`` is a multiple of the standard deviation of the changed values.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> noisy = Noise(std=0.1)(Call("fc", "Linear", 0, None), torch.zeros(1, 10_000))
        >>> 0.09 < float(noisy.std()) < 0.11
        True
    """

    std: float = field(default=0.1, metadata={"finite": True})
    relative: bool = False

    word = "noise"
    summary = "add Gaussian noise; relative: std in multiples of the values' own"
    neutral = ("std", 0)  # adding a noise of 0 would turn -0 into 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise UsageError(f"std={self.std:g}", do="give 0 or more")

    def change(self, site: Site, part: Tensor) -> Tensor:
        spread = part.detach().float().std(correction=0).to(part.dtype) if self.relative else 1.0
        return part + torch.randn_like(part) * (self.std * spread)


@dataclass(frozen=True)
class Quantize(Intervention):
    """Round values to ``2 ** bits`` levels between the lowest and the highest: fake quantisation.

    Rounds as post-training quantisation would (Jacob et al. 2017, arXiv:1712.05877), with 0 among the levels. The
    values stay floating point, and gradients pass straight through. Activations with NaN or Inf are refused.

    Args:
        bits: 1 to 16.
        symmetric: Whether the levels are symmetric about 0.
        per_channel: Whether each channel has its own levels.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> Quantize(bits=2)(Call("fc", "Linear", 0, None), torch.tensor([[0.0, 0.4, 1.4, 3.0]])).tolist()
        [[0.0, 0.0, 1.0, 3.0]]
    """

    bits: int = 8
    symmetric: bool = False
    per_channel: bool = False

    word = "quantize"
    summary = "round values to 2**bits levels"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.bits, int) or not 1 + self.symmetric <= self.bits <= 16:
            raise UsageError(f"bits={self.bits}", do=f"give {1 + self.symmetric} to 16")

    def change(self, site: Site, part: Tensor) -> Tensor:
        if not part.numel():
            return part
        values = part.detach().float()
        if not bool(values.isfinite().all()):
            raise UsageError(f"cannot quantize NaN or Inf at '{site.call.key}'", do="clamp them first")
        places = [axis for axis in range(part.dim()) if axis != site.axis]
        low, high = values.clamp(max=0), values.clamp(min=0)
        if not self.per_channel:
            low, high = low.min(), high.max()
        elif places:
            low, high = low.amin(places), high.amax(places)
        least, most = (1 - 2 ** (self.bits - 1), 2 ** (self.bits - 1) - 1) if self.symmetric else (0, 2**self.bits - 1)
        if self.symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / (most - least)).clamp(min=torch.finfo(torch.float32).tiny)
        zero = (least - low / scale).round().clamp(least, most).to(torch.int32)
        if self.per_channel:
            rounded = torch.fake_quantize_per_channel_affine(values, scale, zero, site.axis, least, most)
        else:
            rounded = torch.fake_quantize_per_tensor_affine(values, scale, zero, least, most)
        rounded = rounded.to(part.dtype)
        # no value is outside the levels, up to rounding: all gradients pass
        return rounded + (part - part.detach()) if part.requires_grad else rounded


@dataclass(frozen=True)
class Permute(Intervention):
    """Put values in random order, so that only their distribution stays.

    Args:
        axis: ``positions`` (one order for all channels and images), ``channels``, or ``images`` of the batch.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> shuffled = Permute("channels")(Call("fc", "Linear", 0, None), torch.arange(4.0)[None])
        >>> sorted(shuffled.flatten().tolist())
        [0.0, 1.0, 2.0, 3.0]
    """

    axis: str = field(default="positions", metadata={"choices": ("positions", "channels", "images")})

    word = "permute"
    summary = "put positions, channels or images in random order"

    def check_one_image(self) -> None:
        if self.axis == "images":
            raise UsageError("one image cannot be permuted", do="use axis=positions or axis=channels")

    def change(self, site: Site, part: Tensor) -> Tensor:
        if self.axis == "images" and site.axis == 0:
            raise UsageError(f"no images to permute at '{site.call.key}'", "its tensor has no batch axis")
        if self.axis != "positions":
            along = site.axis if self.axis == "channels" else 0
            return laid_out_like(part, _mixed(part, along))
        batch = part.movedim(site.axis, 1) if site.axis else part[None]
        flat = batch.flatten(2) if batch.dim() > 2 else batch[..., None]
        mixed = _mixed(flat, 2).reshape(batch.shape)
        return laid_out_like(part, mixed.movedim(1, site.axis) if site.axis else mixed[0])


def _mixed(values: Tensor, axis: int) -> Tensor:
    return values.index_select(axis, torch.randperm(values.shape[axis], device=values.device))
