"""What each family of models takes: one picture, a list of pictures, a clip, two pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError

# MViT takes exactly 16 frames, every other video model of torchvision takes 16 too
CLIP_FRAMES = 16

_FAMILIES = {
    "torchvision.models.detection": "detection",
    "torchvision.models.segmentation": "segmentation",
    "torchvision.models.video": "video",
    "torchvision.models.optical_flow": "optical_flow",
}


def family_of(model: nn.Module) -> str:
    """``classification``, ``segmentation``, ``detection``, ``video`` or ``optical_flow``: what input the model takes.

    Example:
        >>> import torch
        >>> family_of(torch.nn.Conv2d(3, 8, 3))
        'classification'
    """
    for package, family in _FAMILIES.items():
        if any(cls.__module__.startswith(package) for cls in type(model).__mro__):
            return family
    return "classification"


def native_size(model: nn.Module) -> tuple[int, int] | None:
    """``(H, W)`` that the model itself insists on (ViT), None when it does not say."""
    side = getattr(model, "image_size", None)
    return (side, side) if isinstance(side, int) else None


def in_channels(model: nn.Module) -> int:
    """How many colour channels the first convolution takes: 3, or 1 for a model of grey pictures."""
    for module in model.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
            return module.in_channels if module.in_channels in (1, 3) else 3
    return 3


def as_inputs(family: str, pictures: Sequence[Tensor]) -> tuple[Any, ...]:
    """The positional inputs of one forward pass.

    Args:
        family: What `family_of` says.
        pictures: Prepared pictures ``(C, H, W)``, clips ``(C, T, H, W)`` for video; optical flow takes two (one is
            used twice), the others one.
    """
    if family == "detection":
        return (list(pictures[:1]),)
    if family == "optical_flow":
        return pictures[0][None], pictures[-1][None]
    return (pictures[0][None],)


def example_inputs(model: nn.Module, input_size: Sequence[int]) -> tuple[Any, ...]:
    """Zeros in the shape that the family of ``model`` takes.

    Args:
        model: Any module.
        input_size: ``(H, W)`` of the picture, or a whole shape with batch and channels.

    Raises:
        UsageError: for a size of no or negative numbers.

    Example:
        >>> import torch
        >>> tuple(example_inputs(torch.nn.Conv2d(3, 8, 3), (32, 48))[0].shape)
        (1, 3, 32, 48)
    """
    size = [int(n) for n in ((input_size, input_size) if isinstance(input_size, int) else input_size)]
    if not size or min(size) < 1:
        raise UsageError(f"bad input size {tuple(input_size)}", do="give (H, W) or a whole shape")
    family = family_of(model)
    if len(size) == 2:
        size = [3, CLIP_FRAMES, *size] if family == "video" else [in_channels(model), *size]
        return as_inputs(family, [torch.zeros(size, **_kind(model))])
    whole = torch.zeros(size, **_kind(model))
    return (whole, whole) if family == "optical_flow" else (whole,)


def _kind(model: nn.Module) -> dict[str, Any]:
    """The device and the type of number that ``model`` calculates with; the CPU for one without values."""
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    if first is None:
        return {}
    return {"dtype": first.dtype, "device": "cpu" if first.is_meta else first.device}
