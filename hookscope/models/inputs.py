"""The inputs of each family of models: one picture, a list of pictures, a clip, two pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import InputError, UsageError

# MViT takes exactly 16 frames; all other video models of torchvision take 16 too.
CLIP_FRAMES = 16

_FAMILIES = {
    "torchvision.models.detection": "detection",
    "torchvision.models.segmentation": "segmentation",
    "torchvision.models.video": "video",
    "torchvision.models.optical_flow": "optical_flow",
}
# Of other packages: the package, and how the name of the class ends.
_TASKS = {
    ("transformers.", "ForObjectDetection"): "batched_detection",
    ("transformers.", "ForSemanticSegmentation"): "segmentation",
    ("ultralytics.", "DetectionModel"): "batched_detection",
    ("ultralytics.", "SemanticSegmentationModel"): "segmentation",
}


def family_of(model: nn.Module) -> str:
    """``classification``, ``segmentation``, ``detection``, ``batched_detection``, ``video`` or ``optical_flow``.

    Detectors of torchvision take lists of pictures (``detection``), detectors of transformers and ultralytics batches.
    A model with convolutions of three dimensions alone takes clips or volumes, and counts as ``video``.
    """
    for package, family in _FAMILIES.items():
        if any(cls.__module__.startswith(package) for cls in type(model).__mro__):
            return family
    for (package, end), family in _TASKS.items():
        if any(cls.__module__.startswith(package) and cls.__name__.endswith(end) for cls in type(model).__mro__):
            return family
    dimensions = {len(module.kernel_size) for module in _convolutions(model)}
    return "video" if dimensions == {3} else "classification"


def _convolutions(model: nn.Module) -> Iterator[nn.Conv2d | nn.Conv3d]:
    return (module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d)))


def check_size(model: nn.Module, size: Sequence[int] | None, family: str = "") -> None:
    """Refuse ``(D, H, W)`` for a model that takes pictures."""
    if size is not None and len(size) == 3 and (family or family_of(model)) != "video":
        asked = f"an input of {'x'.join(map(str, size))} has a depth, and {type(model).__name__} takes pictures"
        raise UsageError(asked, do="give height x width, such as 224x224")


def native_size(model: nn.Module) -> tuple[int, int] | None:
    """``(H, W)`` that the model states, as torchvision, transformers or timm do; None if it does not."""
    timm: Any = getattr(model, "default_cfg", None)
    stated = [getattr(model, "image_size", None), getattr(getattr(model, "config", None), "image_size", None)]
    stated.append(timm.get("input_size") if isinstance(timm, Mapping) else None)
    for size in stated:
        if isinstance(size, int):
            return size, size
        if isinstance(size, tuple | list) and len(size) > 1 and all(isinstance(side, int) for side in size[-2:]):
            return size[-2], size[-1]
    return None


def in_channels(model: nn.Module) -> int:
    """The colour channels of the input: 3, or 1 if the first convolution takes grey pictures."""
    first = first_channels(model)
    return first if first in (1, 3) else 3


def first_channels(model: nn.Module) -> int:
    """The input channels of the first convolution, 3 without one."""
    return next((module.in_channels for module in _convolutions(model)), 3)


def outputs_of(model: nn.Module) -> int | None:
    """The channels or features that the last layer of ``model`` returns, by order of registration; None if unknown."""
    sizes = (getattr(module, "out_features", getattr(module, "out_channels", None)) for module in model.modules())
    return next(reversed([size for size in sizes if isinstance(size, int)]), None)


def as_batch(family: str, pictures: Sequence[Tensor]) -> tuple[Any, ...]:
    """The positional inputs of one forward pass of several pictures ``(C, H, W)``, or clips ``(C, T, H, W)``.

    Detection: a list of the pictures, whose shapes may differ. Optical flow: ``(N, C, H, W)`` twice, which compares
    each picture with itself. Other families: ``(N, C, H, W)`` or ``(N, C, T, H, W)``.

    Raises:
        InputError: there is no picture, or shapes differ that must be stacked.
    """
    shapes = list(dict.fromkeys("x".join(map(str, picture.shape)) for picture in pictures))
    if not shapes:
        raise InputError("a batch needs at least one picture")
    if family == "detection":
        return (list(pictures),)
    if len(shapes) > 1:
        raise InputError("pictures of different shapes do not stack", ", ".join(shapes), "make batches of one shape")
    # one picture keeps the memory layout of its transforms; a copy, because a layer may write to it
    stacked = pictures[0][None].clone() if len(pictures) == 1 else torch.stack(list(pictures))
    return (stacked, stacked) if family == "optical_flow" else (stacked,)


def example_inputs(model: nn.Module, input_size: Sequence[int], channels: int | None = None) -> tuple[Any, ...]:
    """Zeros in the shape that the family of ``model`` takes, with the model's dtype and device.

    ``input_size`` is ``(H, W)`` of the picture, ``(D, H, W)`` of a clip or volume, or a full shape with batch and
    channels. ``channels`` are a picture's, by default 1 or 3; a volume has as many as the first convolution
    takes.
    """
    size = [int(n) for n in ((input_size, input_size) if isinstance(input_size, int) else input_size)]
    if not size or min(size) < 1:
        raise UsageError(f"bad input size {tuple(input_size)}", do="give (H, W) or a full shape")
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(0))
    zeros = partial(torch.zeros, dtype=first.dtype, device="cpu" if first.is_meta else first.device)
    family = family_of(model)
    if family == "video" and len(size) in (2, 3):
        return as_batch(family, [zeros([first_channels(model), *[CLIP_FRAMES][len(size) - 2 :], *size])])
    if len(size) == 2:
        return as_batch(family, [zeros([channels or in_channels(model), *size])])
    full = zeros(size)
    return (full, full) if family == "optical_flow" else (full,)


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def is_quantized(model: nn.Module) -> bool:
    """Whether layers hold their weights in 8 bits."""
    return any(value.is_quantized for value in model.state_dict().values() if isinstance(value, Tensor))
