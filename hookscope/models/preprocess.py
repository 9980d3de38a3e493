"""From a photograph to the input tensor of a model, and back to the picture that the network sees."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import _presets as presets, functional as F

from hookscope.errors import InputError, is_out_of_memory
from hookscope.models.run import describe_error

MODES = ("weights", "stretch", "none")

_LARGEST_FLOW = 1024
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclass(frozen=True)
class Preprocess:
    """Turns a photograph into an input tensor ``(3, H, W)``, and a clip into ``(3, T, H, W)``.

    Attributes:
        family: The model's family, see `family_of`.
        transforms: Torchvision's transforms of the weights, or the user's own; None for a model without.
        mode: ``weights`` (the transforms), ``stretch`` (resize to ``size``, range [0, 1]), or ``none`` (the picture's
            own size, range [0, 1]).
        size: ``(H, W)`` of the tensor; None for that of the transforms.
        default_size: ``(H, W)`` of ``stretch`` without ``size``.
        channels: Channels of the input: 3, or 1 for grey pictures. Only the user's own transforms make other numbers.
        device: Device of the tensor.
        frames: Number of frames in a clip of a video model, 1 for other models.
        dtype: Data type of the tensor, None for float32.

    Raises:
        InputError: on call, if the transforms cannot process the picture.
    """

    family: str
    transforms: Any = None
    mode: str = "weights"
    size: tuple[int, int] | None = None
    default_size: tuple[int, int] = (224, 224)
    channels: int = 3
    device: str = "cpu"
    frames: int = 1
    dtype: Any = None

    def __call__(self, image: Image.Image | Sequence[Image.Image]) -> Tensor:
        frames = list(image) if isinstance(image, Sequence) else [image]
        if self.is_own:
            return self._own(frames[0]).to(self.device, self.dtype)
        if self.channels not in (1, 3):
            asked = f"the model takes {self.channels} channels, and a picture has 3"
            raise InputError(asked, do="write preprocess(picture) next to the factory of the model")
        try:
            if self.family == "video":
                frames = frames if len(frames) == self.frames else frames[:1] * self.frames
                tensor = self._clip(torch.stack([F.pil_to_tensor(frame) for frame in frames]))
            else:
                tensor = self._still(frames[0])
        except (RuntimeError, ValueError, MemoryError) as error:
            why = "it does not fit into memory" if is_out_of_memory(error) else error
            raise InputError(f"cannot prepare a picture of {frames[0].size}: {why}") from error
        tensor = tensor.mean(0, keepdim=True) if self.channels == 1 else tensor
        return tensor.to(self.device, self.dtype)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """``(C, H, W)`` of an input, ``(C, T, H, W)`` of a clip, where the size does not depend on the picture."""
        frames = [self.frames] if self.family == "video" else []
        return (self.channels, *frames, *(self.size or self.default_size))

    @property
    def is_own(self) -> bool:
        """Whether the user's own transforms are used, of which only the result is known."""
        return self.mode == "weights" and isinstance(self.transforms, OwnTransforms)

    def _own(self, image: Image.Image) -> Tensor:
        tensor: Tensor = self.transforms(image)
        if self.size is not None and tuple(tensor.shape[-2:]) != self.size:
            made, want = ("x".join(map(str, size)) for size in (tensor.shape[-2:], self.size))
            asked = f"{self.transforms.name} makes an input of {made}, and the input size is {want}"
            raise InputError(asked, do="give both the same size, or use --preprocess stretch")
        return tensor

    def _still(self, image: Image.Image) -> Tensor:
        if self.mode == "none":
            return _as_floats(image)
        if self.mode == "stretch":
            return _as_floats(image.resize(_wide_high(self.size or self.default_size), resample=2))
        if self.family == "optical_flow":
            size = self.size or _flow_size(image.height, image.width)
            pair: Tensor = F.normalize(_as_floats(image.resize(_wide_high(size), resample=2)), [0.5] * 3, [0.5] * 3)
            return pair
        if self.family in ("detection", "segmentation") and self.size is not None:
            image = image.resize(_wide_high(self.size), resample=2)
        tensor: Tensor = self.transforms_for((image.height, image.width))(image)
        return tensor

    def transforms_for(self, picture: tuple[int, int]) -> Any:
        """The transforms of the weights, changed to give ``size``, for a picture of ``(H, W)`` pixels."""
        transforms = copy.copy(self.transforms)
        if self.size is None:
            return transforms
        if self.family == "segmentation":
            transforms.resize_size = [min(self.size)]
        elif self.family == "classification":
            transforms.resize_size = _covering(transforms, picture, self.size)
            transforms.crop_size = list(self.size)
        elif self.family == "video":
            transforms.resize_size = transforms.crop_size = list(self.size)
        return transforms

    def _clip(self, frames: Tensor) -> Tensor:
        """Bytes ``(T, 3, h, w)`` to ``(3, T, H, W)``."""
        if self.mode != "weights":
            size = list(self.size or self.default_size) if self.mode == "stretch" else list(frames.shape[-2:])
            resized: Tensor = F.resize(frames, size, antialias=True).div(255)
            return resized.movedim(0, 1)
        clip: Tensor = self.transforms_for((frames.shape[-2], frames.shape[-1]))(frames)
        return clip

    def denormalise(self, tensor: Tensor) -> Image.Image:
        """The RGB picture that the network sees: ``tensor`` without its normalisation; the first frame of a clip."""
        picture = (tensor[:, 0] if tensor.dim() == 4 else tensor).cpu().float()
        if self.is_own:
            shown = self.transforms.denormalise(picture)
        else:
            mean, std = self._normalisation()
            shown = picture * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
        image: Image.Image = F.to_pil_image(shown.clamp(0, 1))
        return image

    def shown(self, image: Image.Image, tensor: Tensor) -> tuple[Image.Image, tuple[float, float, float, float]]:
        """A picture to draw maps of the input ``tensor`` on, and its part that they cover, see `visible_box`.

        It is the photograph, or with the user's own transforms, which may crop it, the picture that the network sees.
        """
        if not self.is_own:
            return image, self.visible_box(image.width, image.height)
        picture = self.denormalise(tensor)
        return picture, (0.0, 0.0, float(picture.width), float(picture.height))

    def visible_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """The part of a photograph that the network sees: ``(left, top, right, bottom)`` in pixels, not rounded.

        Torchvision's classification transforms resize the shorter side and crop the centre. They pad a photograph that
        is smaller than the crop: the box then reaches beyond it. Other transforms only resize: the box is everything.

        Example:
            >>> Preprocess("classification", imagenet_transforms(224, 256)).visible_box(512, 256)
            (144.0, 16.0, 368.0, 240.0)
        """
        whole = (0.0, 0.0, float(width), float(height))
        if self.mode != "weights" or self.family not in ("classification", "video"):
            return whole
        transforms = self.transforms_for((height, width))
        crop, resize = getattr(transforms, "crop_size", None), getattr(transforms, "resize_size", None)
        if not crop or not resize:
            return whole
        high, wide = _resized(resize, height, width)
        top, bottom = _crop_range(high, crop[0])
        left, right = _crop_range(wide, crop[-1])
        across, down = width / wide, height / high
        return left * across, top * down, right * across, bottom * down

    def _normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        if self.mode != "weights" or self.family == "detection":
            return (0.0,) * 3, (1.0,) * 3
        if self.family == "optical_flow":
            return (0.5,) * 3, (0.5,) * 3
        return tuple(self.transforms.mean), tuple(self.transforms.std)

    def describe(self) -> str:
        """One line such as ``ImageClassification resize 256 crop 224``."""
        size = f" {self.size[0]}x{self.size[1]}" if self.size else ""
        if self.is_own:
            return f"{self.transforms.name}{size}"
        if self.mode == "none":
            return "none: own size, range [0, 1]"
        if self.mode == "stretch":
            high, wide = self.size or self.default_size
            return f"stretch {high}x{wide}, range [0, 1]"
        resize, crop = getattr(self.transforms, "resize_size", None), getattr(self.transforms, "crop_size", None)
        parts = [type(self.transforms).__name__ if self.transforms is not None else "OpticalFlow"]
        parts += [f"resize {'x'.join(map(str, resize))}"] if resize and not size else []
        parts += [f"crop {'x'.join(map(str, crop))}"] if crop and not size else []
        return " ".join(parts) + size


@dataclass(frozen=True)
class OwnTransforms:
    """A function of the user from a photograph to the input ``(C, H, W)``, or ``(C, T, H, W)``; ``name`` says whose."""

    function: Callable[[Image.Image], Any]
    name: str

    def __call__(self, image: Image.Image) -> Tensor:
        try:
            tensor = self.function(image)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise InputError(f"{self.name} failed on a picture: {describe_error(error)}") from error
        if not isinstance(tensor, Tensor) or tensor.dim() not in (3, 4):
            shape = "x".join(map(str, getattr(tensor, "shape", ())))
            made = type(tensor).__name__ + (f" of {shape}" if shape else "")
            raise InputError(f"{self.name} returned {made}", do="return a tensor (C, H, W) of one picture")
        return tensor

    def denormalise(self, picture: Tensor) -> Tensor:
        """The colours in 0..1 that ``picture`` ``(C, H, W)`` was made from; grey unless it has three channels.

        The inverse of a ``Normalize`` at the end of the transforms; of other functions the range is not known, and the
        lowest value is black, the highest white.
        """
        last = (getattr(self.function, "transforms", None) or [None])[-1]
        mean, std = getattr(last, "mean", None), getattr(last, "std", None)
        if mean is not None and std is not None:
            picture = picture * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
        elif picture.min() < 0 or picture.max() > 1:
            picture = (picture - picture.min()) / (picture.max() - picture.min()).clamp(min=1e-12)
        return picture if len(picture) == 3 else picture.mean(0, keepdim=True).expand(3, -1, -1)


def _resized(resize: list[int], height: int, width: int) -> tuple[int, int]:
    """``(H, W)`` after torchvision's resize: a single number is the shorter side; the longer one is rounded down."""
    if len(resize) > 1:
        return resize[0], resize[1]
    short, long = sorted((height, width))
    other = int(resize[0] * long / short)
    return (other, resize[0]) if height > width else (resize[0], other)


def _crop_range(side: int, crop: int) -> tuple[int, int]:
    """Begin and end of torchvision's centre crop along one side; it pads outside, the smaller half first."""
    begin = -((crop - side) // 2) if crop > side else round((side - crop) / 2.0)
    return begin, begin + crop


def _wide_high(size: Sequence[int]) -> tuple[int, int]:
    return size[1], size[0]


def _flow_size(high: int, wide: int) -> tuple[int, int]:
    """The picture's size, rounded to the multiple of 8 from 128 that RAFT takes, and limited to spare memory."""
    scale = min(1.0, _LARGEST_FLOW / max(high, wide))  # RAFT compares all pairs of every eighth pixel
    high, wide = (max(128, 8 * round(side * scale / 8)) for side in (high, wide))
    return high, wide


def _covering(transforms: Any, picture: tuple[int, int], size: tuple[int, int]) -> list[int]:
    """The resize before a crop of ``size`` that cuts off the same share as the weights' own transforms."""
    margin = transforms.resize_size[0] / transforms.crop_size[0]
    if size[0] == size[1]:
        return [round(size[0] * margin)]
    scale = max(size[0] / picture[0], size[1] / picture[1]) * margin
    return [max(math.ceil(side * scale), want) for side, want in zip(picture, size, strict=True)]


def _as_floats(image: Image.Image) -> Tensor:
    tensor: Tensor = F.pil_to_tensor(image).float().div(255)
    return tensor


def made_for(transforms: Any) -> tuple[int, int]:
    """``(H, W)`` of the output of ``transforms``, 224 by 224 if they keep the size."""
    size = getattr(transforms, "crop_size", None) or getattr(transforms, "resize_size", None) or [224]
    return (size[0], size[-1])


def usual_transforms(family: str) -> Any:
    """Torchvision's usual transforms for a family, for models without transforms of their own."""
    if family == "detection":
        return presets.ObjectDetection()
    if family == "segmentation":
        return presets.SemanticSegmentation(resize_size=520)
    if family == "video":
        return presets.VideoClassification(crop_size=(112, 112), resize_size=(128, 171))
    return imagenet_transforms()


def imagenet_transforms(crop: int = 224, resize: int = 256, **normalisation: Sequence[float]) -> Any:
    """Resize, centre crop and normalisation, by default that of ImageNet."""
    return presets.ImageClassification(crop_size=crop, resize_size=resize, **(normalisation or _IMAGENET))
