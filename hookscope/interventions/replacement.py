"""Interventions with values from elsewhere: another image's activation, a mean, a direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hookscope.errors import LayerError, UsageError
from hookscope.hooks import tensors_in
from hookscope.interventions.base import (
    Intervention,
    Site,
    laid_out_like,
    position_axes,
    replaced,
)


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
            raise UsageError(
                "the mean over one image is the image itself", do="give mean:from=FOLDER, or mean:over=positions"
            )

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
