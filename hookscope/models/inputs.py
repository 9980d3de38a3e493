"""The inputs of each family of models: one picture, a list of pictures, a clip, two pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError

# MViT takes exactly 16 frames; all other video models of torchvision take 16 too.
CLIP_FRAMES = 16

_FAMILIES = {
    "torchvision.models.detection": "detection",
    "torchvision.models.segmentation": "segmentation",
    "torchvision.models.video": "video",
    "torchvision.models.optical_flow": "optical_flow",
}


def family_of(model: nn.Module) -> str:
    """``classification``, ``segmentation``, ``detection``, ``video`` or ``optical_flow``.

    Example:
        >>> family_of(torch.nn.Conv2d(3, 8, 3))
        'classification'
    """
    for package, family in _FAMILIES.items():
        if any(cls.__module__.startswith(package) for cls in type(model).__mro__):
            return family
    return "classification"


def native_size(model: nn.Module) -> tuple[int, int] | None:
    """``(H, W)`` that the model requires (ViT), None if it does not state it."""
    side = getattr(model, "image_size", None)
    return (side, side) if isinstance(side, int) else None


def in_channels(model: nn.Module) -> int:
    """The colour channels of the input: 3, or 1 if the first convolution takes grey pictures."""
    for module in model.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
            return module.in_channels if module.in_channels in (1, 3) else 3
    return 3


def as_inputs(family: str, pictures: Sequence[Tensor]) -> tuple[Any, ...]:
    """The positional inputs of one forward pass.

    Args:
        family: The model's family, see `family_of`.
        pictures: Prepared pictures ``(C, H, W)``, or clips ``(C, T, H, W)`` for video. Optical flow takes two, or one
            twice; the other families take one.
    """
    if family == "detection":
        return (list(pictures[:1]),)
    if family == "optical_flow":
        return pictures[0][None], pictures[-1][None]
    return (pictures[0][None],)


def example_inputs(model: nn.Module, input_size: Sequence[int]) -> tuple[Any, ...]:
    """Zeros in the shape that the family of ``model`` takes, with the model's dtype and device.

    Args:
        model: Any module.
        input_size: ``(H, W)`` of the picture, or a full shape with batch and channels.

    Raises:
        UsageError: the size is empty or not positive.

    Example:
        >>> tuple(example_inputs(torch.nn.Conv2d(3, 8, 3), (32, 48))[0].shape)
        (1, 3, 32, 48)
    """
    size = [int(n) for n in ((input_size, input_size) if isinstance(input_size, int) else input_size)]
    if not size or min(size) < 1:
        raise UsageError(f"bad input size {tuple(input_size)}", do="give (H, W) or a full shape")
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(0))
    zeros = partial(torch.zeros, dtype=first.dtype, device="cpu" if first.is_meta else first.device)
    family = family_of(model)
    if len(size) == 2:
        size = [3, CLIP_FRAMES, *size] if family == "video" else [in_channels(model), *size]
        return as_inputs(family, [zeros(size)])
    full = zeros(size)
    return (full, full) if family == "optical_flow" else (full,)
