"""Interventions computed from the values themselves, or with values from elsewhere: an image, a mean, a direction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hookscope.errors import LayerError, UsageError
from hookscope.hooks import tensors_in
from hookscope.interventions.base import Intervention, Site, check_number, laid_out_like, position_axes, replaced


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
            return laid_out_like(part, _mixed(part, site.axis if self.axis == "channels" else 0))
        batch = part.movedim(site.axis, 1) if site.axis else part[None]
        flat = batch.flatten(2) if batch.dim() > 2 else batch[..., None]
        mixed = _mixed(flat, 2).reshape(batch.shape)
        return laid_out_like(part, mixed.movedim(1, site.axis) if site.axis else mixed[0])


def _mixed(values: Tensor, axis: int) -> Tensor:
    return values.index_select(axis, torch.randperm(values.shape[axis], device=values.device))


@dataclass(frozen=True)
class Patch(Intervention):
    """Replace an activation by the activation of another image at the same call: activation patching.

    Shows which layer carries the difference between two images (Vig et al. 2020, arXiv:2004.12265; Zhang and Nanda
    2023, arXiv:2309.16042).

    Args:
        source: Activations by call, such as `capture` yields, or one tensor for every call. An activation of one
            image is used for each image of the batch.

    Raises:
        LayerError: for a call without an activation in ``source``.
        UsageError: for an activation of another shape.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> patch = Patch({"fc": torch.tensor([[5.0, 6.0]])}, channels=0)
        >>> patch(Call("fc", "Linear", 0, None), torch.zeros(1, 2)).tolist()
        [[5.0, 0.0]]
    """

    source: Any = field(repr=False, metadata={"example": "other.jpg", "from_file": "image"})

    word = "patch"
    summary = "replace by the activation of another image"

    def change(self, site: Site, part: Tensor) -> Tensor:
        return replaced(part, _fitted(_of_call(self.source, site, "patch with"), site, "the patch"))


@dataclass(frozen=True)
class Mean(Intervention):
    """Replace each image's activation by the mean over images: mean ablation.

    Args:
        source: Activations ``(N, ...)`` of other images by call, or one tensor; None for the batch itself.
        over: ``images``, or ``positions`` for the mean of each map of the image itself, which needs no source.

    Raises:
        LayerError: for a call without an activation in ``source``.
        UsageError: for an activation of another shape.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> Mean()(Call("fc", "Linear", 0, None), torch.tensor([[1.0], [3.0]])).tolist()
        [[2.0], [2.0]]
    """

    source: Any = field(default=None, repr=False, metadata={"example": "folder", "from_file": "images"})
    over: str = field(default="images", metadata={"choices": ("images", "positions")})

    word = "mean"
    summary = "replace by the mean over images of a folder, or over positions of the map"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over == "positions" and self.source is not None:
            raise UsageError("a mean over positions takes no source", do="leave the source out")

    def check_one_image(self) -> None:
        if self.source is None and self.over == "images":
            asked = "the mean over one image is the image itself"
            raise UsageError(asked, do="give mean:from=FOLDER, or mean:over=positions")

    def change(self, site: Site, part: Tensor) -> Tensor:
        if self.over == "positions":
            axes = position_axes(part.dim(), site.axis)
            return laid_out_like(part, part.mean(axes, keepdim=True)) if axes else part
        if self.source is None:
            if site.axis == 0:
                raise UsageError(f"no images to average at '{site.call.key}'", "its tensor has no batch axis")
            return laid_out_like(part, part.mean(0, keepdim=True))
        source = _of_call(self.source, site, "average")
        if site.axis != 0:
            source = source.mean(0, keepdim=True)
        return replaced(part, _fitted(source, site, "the mean"))


@dataclass(frozen=True)
class Steer(Intervention):
    """Add a direction at every position: steering.

    Adding the difference of two mean activations moves the network's answer along it (Turner et al. 2023,
    arXiv:2308.10248).

    Args:
        direction: One value per channel ``(C,)``, or a tensor of the activation's shape without the batch axis.
        scale: Factor of the direction.

    Raises:
        UsageError: for a direction of another shape.

    Example:
        >>> import torch
        >>> from hookscope.hooks import Call
        >>> Steer(torch.tensor([1.0, 0.0]), scale=3)(Call("fc", "Linear", 0, None), torch.ones(1, 2)).tolist()
        [[4.0, 1.0]]
    """

    direction: Any = field(repr=False, metadata={"example": "direction.npy", "from_file": "tensor"})
    scale: float = field(default=1.0, metadata={"finite": True})

    word = "steer"
    summary = "add a direction (.npy, .pt, .safetensors) at every position"
    neutral = ("scale", 0)

    def change(self, site: Site, part: Tensor) -> Tensor:
        direction: Tensor = self.direction.detach().to(part)
        if direction.shape == (site.shape[site.axis],):
            shape = [1] * len(site.shape)
            shape[site.axis] = -1
            whole = direction.reshape(shape).expand(site.shape)
            return part + self.scale * (whole if site.where is None else whole[site.where])
        return part + self.scale * _fitted(direction if site.axis == 0 else direction[None], site, "the direction")


def _of_call(source: Any, site: Site, purpose: str) -> Tensor:
    """The same part of the activation of the site's call."""
    key = site.call.key
    if isinstance(source, Mapping):
        if key not in source:
            names = ", ".join(map(str, list(source)[:5])) or "nothing"
            raise LayerError(f"no activation of '{key}' to {purpose}", f"there is {names}")
        source = source[key]
    tensors = tensors_in(source)
    if site.part not in tensors and "" not in tensors:
        parts = ", ".join(tensors) or "no tensor"
        raise LayerError(f"no part '{site.part}' of '{key}' to {purpose}", f"there is {parts}")
    tensor = tensors[site.part if site.part in tensors else ""].detach()
    return tensor.dequantize() if tensor.is_quantized else tensor


def _fitted(tensor: Tensor, site: Site, what: str) -> Tensor:
    if tensor.shape != site.shape:
        if site.axis == 0 or tensor.shape[1:] != site.shape[1:] or len(tensor) != 1:
            shapes = ["x".join(map(str, shape)) or "a single number" for shape in (tensor.shape, site.shape)]
            asked, exists = f"{what} for '{site.call.key}' is {shapes[0]}", f"its activation is {shapes[1]}"
            raise UsageError(asked, exists, f"take {what} from the same layer and input size")
        tensor = tensor.expand(site.shape)
    return tensor if site.where is None else tensor[site.where]
