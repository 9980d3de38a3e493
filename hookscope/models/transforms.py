"""The steps from a photograph to the input of a model: resize, crop or pad, range, mean and standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, _presets as presets, functional as F

from hookscope.errors import InputError
from hookscope.models.run import describe_error, is_not_of_users, quiet_and_seeded

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_LARGEST_FLOW = 1024


@dataclass(frozen=True)
class Resize:
    """Resize, then crop the centre; a picture that is smaller than the crop gets a border.

    Attributes:
        mode: ``shorter``: keep the proportions, one number of ``size`` is the shorter side, two are covered;
            ``pad``: keep the proportions, fit into ``size``; ``stretch``: to ``size``; ``none``: the picture's own
            size; ``flow``: its own size in multiples of 8.
        size: The shorter side, or ``(H, W)``.
        crop: ``(H, W)`` of the crop, None without one.
        interpolation: Name of a filter of Pillow, such as ``bilinear``.
        antialias: Whether clips are smoothed before they shrink; single pictures always are.
        fill: Red, green and blue of a border in 0..255; black without them.
        floor: Whether a crop that leaves an odd number of pixels begins at the lower one, as in transformers.
            Torchvision rounds half to even.
        longest: Of ``shorter`` with one number: what the longer side must not exceed; 0 for no limit.
    """

    mode: str = "none"
    size: tuple[int, ...] = ()
    crop: tuple[int, int] | None = None
    interpolation: str = "bilinear"
    antialias: bool = True
    fill: tuple[int, ...] = ()
    floor: bool = False
    longest: int = 0

    def __call__(self, picture: Any) -> Any:
        """Resize a PIL image, or bytes ``(..., H, W)``."""
        width, height = picture.size if isinstance(picture, Image.Image) else picture.shape[:-3:-1]
        size = self.resized(height, width)
        if size != (height, width):
            picture = F.resize(picture, list(size), InterpolationMode(self.interpolation), antialias=self.antialias)
        if self.crop is None:
            return picture
        (top, bottom), (left, right) = self._crop_ranges(*size)
        edges = [max(0, side) for side in (-left, -top, right - size[1], bottom - size[0])]
        if any(edges):
            picture = F.pad(picture, edges, list(self.fill) or 0)
        return F.crop(picture, max(0, top), max(0, left), *self.crop)

    def _crop_ranges(self, *sides: int) -> Iterator[tuple[int, int]]:
        """Begin and end of a centre crop along each side; it pads outside, the smaller half first."""
        for side, crop in zip(sides, self.crop or sides, strict=True):
            half = (side - crop) // 2 if self.floor else round((side - crop) / 2)
            begin = -((crop - side) // 2) if crop > side else half
            yield begin, begin + crop

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """``(H, W)`` after the resize of a picture, before the crop."""
        if self.mode == "none":
            return height, width
        if self.mode == "flow":  # multiples of 8 from 128, which RAFT takes, few enough to compare all pairs of pixels
            scale = min(1.0, _LARGEST_FLOW / max(height, width))
            height, width = (max(128, 8 * round(side * scale / 8)) for side in (height, width))
            return height, width
        if self.mode == "stretch":
            return self.size[0], self.size[1]
        if len(self.size) == 1:  # torchvision's rule: the longer side is rounded down
            short, long = sorted((height, width))
            shorter, longer = self.size[0], int(self.size[0] * long / short)
            if 0 < self.longest < long / short * self.size[0]:  # the rule of transformers
                exact = self.longest * short / long
                shorter, longer = round(exact), int(exact * long / short)
            return (longer, shorter) if height > width else (shorter, longer)
        ratios = height / self.size[0], width / self.size[1]
        ratio = min(ratios) if self.mode == "shorter" else max(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def visible_box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """See `Preprocess.visible_box`."""
        high, wide = self.resized(height, width)
        (top, bottom), (left, right) = self._crop_ranges(high, wide)
        across, down = width / wide, height / high
        return left * across, top * down, right * across, bottom * down

    @property
    def made(self) -> tuple[int, int] | None:
        """``(H, W)`` of every result; None if it depends on the picture."""
        return self.crop or ((self.size[0], self.size[1]) if self.mode == "stretch" else None)

    @property
    def made_for(self) -> tuple[int, int]:
        """``(H, W)`` of results of a square picture, 224 by 224 if pictures keep their own size."""
        return self.made or ((self.size[0], self.size[-1]) if self.size else (224, 224))

    def sized(self, size: tuple[int, int]) -> Resize:
        """The same with results of another size: a crop cuts off the same share. Without a crop, a stretch."""
        if self.crop is None or self.mode == "none":
            return replace(self, mode="stretch", size=size, crop=None)
        if len(self.size) == 1 and size[0] == size[1]:
            return replace(self, size=(round(size[0] * self.size[0] / min(self.crop)),), crop=size)
        before = self.size if len(self.size) == 2 else self.size * 2
        crop = self.crop if len(self.size) == 2 else (min(self.crop),) * 2
        high, wide = (round(want * old / cut) for want, old, cut in zip(size, before, crop, strict=True))
        return replace(self, size=(high, wide), crop=size)

    def describe(self) -> str:
        """Such as ``resize 256, crop 224``."""
        own = {"none": "own size", "flow": "own size in multiples of 8"}
        whole = self.crop is None or (self.crop == self.size and self.mode != "shorter")
        resize = "resize to cover" if len(self.size) == 2 else "resize"
        verb = own | {"shorter": resize, "stretch": "stretch", "pad": "pad to" if whole else "fit into"}
        words = f"{verb[self.mode]} {'x'.join(map(str, self.size))}".strip()
        words += f" up to {self.longest}" if self.longest else ""
        words += f" {self.interpolation}" if self.interpolation != "bilinear" else ""
        if self.crop is None or whole:
            return words
        high, wide = self.crop
        return f"{words}, {'pad to' if self.mode == 'pad' else 'crop'} {high if high == wide else f'{high}x{wide}'}"


@dataclass(frozen=True)
class Normalisation:
    """Black and white become ``range``, of which ``mean`` is subtracted, and which is then divided by ``std``.

    ``mean`` and ``std`` have one number for each channel, or one for all.
    """

    range: tuple[float, float] = (0.0, 1.0)
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Of colours in 0..1, ``(..., C, H, W)``."""
        low, high = self.range
        ranged = tensor if self.range == (0.0, 1.0) else tensor * (high - low) + low
        mean, std = self._as_tensors(tensor)
        return (ranged - mean) / std

    def inverse(self, tensor: Tensor) -> Tensor:
        """The colours in 0..1."""
        low, high = self.range
        mean, std = self._as_tensors(tensor)
        return (tensor * std + mean - low) / (high - low)

    def _as_tensors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (like.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return mean, std

    def averaged(self) -> Normalisation:
        """The same for grey pictures: the mean over the colours."""
        if len(self.mean) == len(self.std) == 1:
            return self
        mean, std = (round(sum(values) / len(values), 6) for values in (self.mean, self.std))
        return replace(self, mean=(mean,), std=(std,))

    def describe(self) -> str:
        """Such as ``ImageNet mean and std``, or ``range 0..1``; numbers are exact."""
        ranged = f"range {_number(self.range[0])}..{_number(self.range[1])}"
        if set(self.mean) == {0.0} and set(self.std) == {1.0}:
            return ranged
        words = f"mean {_numbers(self.mean)}, std {_numbers(self.std)}"
        if (self.mean, self.std) == (IMAGENET_MEAN, IMAGENET_STD):
            words = "ImageNet mean and std"
        return words if self.range == (0.0, 1.0) else f"{ranged}, {words}"


@dataclass(frozen=True)
class Transforms:
    """From a photograph to an input; ``assumed`` says which of ``size`` and ``values`` nobody has said."""

    resize: Resize = Resize()
    values: Normalisation = Normalisation()
    assumed: tuple[str, ...] = ()

    shapes: ClassVar[tuple[tuple[int, ...], ...]] = ()  # measured of a function of the user alone

    @classmethod
    def of(cls, preset: Any) -> Transforms:
        """The steps of torchvision's transforms of weights."""
        if isinstance(preset, presets.OpticalFlow):
            return cls(Resize("flow"), Normalisation(mean=(0.5,) * 3, std=(0.5,) * 3))
        if not (size := getattr(preset, "resize_size", None)):
            mean, std = getattr(preset, "mean", (0.0,)), getattr(preset, "std", (1.0,))
            return cls(values=Normalisation(mean=tuple(mean), std=tuple(std)))
        crop = getattr(preset, "crop_size", None)
        mode, part = "shorter" if len(size) == 1 else "stretch", (crop[0], crop[-1]) if crop else None
        antialias = not isinstance(preset, presets.VideoClassification)  # torchvision does so
        resize = Resize(mode, tuple(size), part, preset.interpolation.value, antialias)
        return cls(resize, Normalisation(mean=tuple(preset.mean), std=tuple(preset.std)))

    def describe(self) -> str:
        """Such as ``resize 256, crop 224, ImageNet mean and std``; ``assumed`` precedes what nobody has said."""
        said = ", ".join(words for part, words in self._parts.items() if part not in self.assumed)
        return ", ".join(filter(None, [said, self.assumption and f"assumed {self.assumption}"]))

    @property
    def assumption(self) -> str:
        """The words of what nobody has said."""
        return ", ".join(words for part, words in self._parts.items() if part in self.assumed)

    @property
    def _parts(self) -> dict[str, str]:
        return {"size": self.resize.describe(), "values": self.values.describe()}


@dataclass(frozen=True)
class OwnTransforms:
    """A function of the user from a photograph to the input ``(C, H, W)``, or ``(C, T, H, W)``; ``name`` says whose.

    ``values`` normalise what the function returns.
    """

    function: Callable[[Image.Image], Any]
    name: str
    values: Normalisation | None = None

    resize: ClassVar[Resize] = Resize()  # the function is not asked: the parts of its input are the picture's own
    assumed: ClassVar[tuple[str, ...]] = ()
    assumption: ClassVar[str] = ""

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """What a square, a wide and a high grey image become, each shape once; empty if the function fails on them."""
        images = (Image.new("RGB", size, "grey") for size in ((480, 480), (640, 480), (480, 640)))
        try:
            with quiet_and_seeded(0):
                return tuple(dict.fromkeys(tuple(self(image).shape) for image in images))
        except InputError:  # which an image of the user shows too
            return ()

    def __call__(self, image: Image.Image) -> Tensor:
        try:
            tensor = self.function(image)
        except (Exception, SystemExit) as error:
            if is_not_of_users(error):
                raise
            raise InputError(f"{self.name} failed on an image: {describe_error(error)}") from error
        if not isinstance(tensor, Tensor) or tensor.dim() not in (3, 4):
            shape = "x".join(map(str, getattr(tensor, "shape", ())))
            made = type(tensor).__name__ + (f" of {shape}" if shape else "")
            raise InputError(f"{self.name} returned {made}", do="return a tensor (C, H, W) of one image")
        tensor = tensor.as_subclass(Tensor)  # torchvision's v2 returns tensors of a class of its own
        return tensor if self.values is None else self.values(tensor.float())

    def denormalise(self, picture: Tensor) -> Tensor:
        """The colours in 0..1 that ``picture`` ``(C, H, W)`` was made from.

        The inverse of the last step with a mean and a standard deviation; of other functions the range is not known,
        and the lowest value is black, the highest white.
        """
        if (values := self.normalisation) is not None:
            picture = values.inverse(picture)
        if picture.min() < -0.01 or picture.max() > 1.01:
            picture = (picture - picture.min()) / (picture.max() - picture.min()).clamp(min=1e-12)
        return picture

    @property
    def normalisation(self) -> Normalisation | None:
        """The last step: ``values``, or the normalisation of transforms that torchvision has; None if unknown."""
        if self.values is not None:
            return self.values
        steps: Any = getattr(self.function, "transforms", None)
        if isinstance(steps, Transforms):  # of another model's preprocessing
            return steps.values
        if not isinstance(steps, list | tuple | torch.nn.ModuleList):
            steps = self.function if isinstance(self.function, torch.nn.Sequential) else [self.function]
        for step in reversed(list(steps)):
            mean, std = getattr(step, "mean", None), getattr(step, "std", None)
            if mean is not None and std is not None:
                mean, std = (tuple(torch.as_tensor(numbers).double().reshape(-1).tolist()) for numbers in (mean, std))
                return Normalisation(mean=tuple(_short(n) for n in mean), std=tuple(_short(n) for n in std))
        return None

    def describe(self) -> str:
        """The name, and the normalisation if it is known."""
        values = self.normalisation
        return f"{self.name}, {values.describe()}" if values else self.name


def _short(number: float) -> float:
    """The shortest number that is the same in 32 bits: 0.485 is 0.48500001430511475 as a tensor."""
    return float(f"{number:.7g}") if torch.tensor(float(f"{number:.7g}")) == torch.tensor(number) else number


def _number(number: float) -> str:
    return repr(int(number)) if number == int(number) else repr(float(number))


def _numbers(numbers: Sequence[float]) -> str:
    same = len(set(numbers)) == 1
    return " ".join(map(_number, numbers[:1] if same else numbers))


def usual_transforms(family: str) -> Transforms:
    """Torchvision's usual transforms for a family, for models without transforms of their own."""
    usual = imagenet_transforms()
    others = {
        "detection": Transforms(),
        "optical_flow": Transforms.of(presets.OpticalFlow()),
        "batched_detection": Transforms(Resize("stretch", (640, 640)), usual.values),
        "segmentation": Transforms.of(presets.SemanticSegmentation(resize_size=520)),
        "video": Transforms.of(presets.VideoClassification(crop_size=(112, 112), resize_size=(128, 171))),
    }
    return others.get(family, usual)


def imagenet_transforms(crop: int = 224, resize: int = 256, **normalisation: Sequence[float]) -> Transforms:
    """Resize, centre crop and normalisation, by default as for ImageNet."""
    mean, std = normalisation.get("mean", IMAGENET_MEAN), normalisation.get("std", IMAGENET_STD)
    return Transforms(Resize("shorter", (resize,), (crop, crop)), Normalisation(mean=tuple(mean), std=tuple(std)))
