"""From a photograph to the input tensor of a model, and back to the picture that the network sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as F

from hookscope.display import Cells, Shown, words
from hookscope.errors import InputError, UsageError, is_out_of_memory
from hookscope.findings import counted
from hookscope.images import AnyImage, as_picture
from hookscope.models.choices import PreprocessChoice
from hookscope.models.transforms import Normalisation, OwnTransforms, Resize, Transforms, imagenet_transforms

_USUAL = {"imagenet": imagenet_transforms(), "half": imagenet_transforms(mean=(0.5,), std=(0.5,))}


@dataclass(frozen=True, repr=False)
class Preprocess(Shown):
    """Turns a photograph into an input tensor ``(3, H, W)``, and a clip into ``(3, T, H, W)``.

    Attributes:
        family: The model's family, see `family_of`.
        transforms: The steps: resize, crop or pad, range, mean and standard deviation; or the user's own function.
        size: ``(H, W)`` that the user's own function must make; None for any.
        default_size: ``(H, W)`` that the model is made for.
        channels: Channels of the input: 3, or 1 for grey pictures. Only the user's own function makes other numbers.
        device: Device of the tensor.
        frames: Number of frames in a clip of a video model, 1 for other models.
        dtype: Data type of the tensor, None for float32.
        stated: Range, mean and standard deviation that the model states, where others were chosen.

    Raises:
        InputError: on call, if the transforms cannot process the picture.
    """

    family: str
    transforms: Transforms | OwnTransforms = field(default_factory=Transforms)
    size: tuple[int, int] | None = None
    default_size: tuple[int, int] = (224, 224)
    channels: int = 3
    device: str = "cpu"
    frames: int = 1
    dtype: Any = None
    stated: Normalisation | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.channels == 1 and isinstance(self.transforms, Transforms):
            object.__setattr__(self, "transforms", replace(self.transforms, values=self.transforms.values.averaged()))

    def __call__(self, image: AnyImage | Sequence[Image.Image]) -> Tensor:
        frames = list(image) if isinstance(image, list | tuple) else list(as_picture(image, self.frames).frames)
        if isinstance(self.transforms, OwnTransforms):
            return self._own(self.transforms, frames[0]).to(self.device, self.dtype)
        if self.channels not in (1, 3):
            do = f"whose function makes {self.channels} channels of an image"
            do = f"give ‹preprocess=function|--preprocess file.py:function›, {do}"
            raise InputError(f"the model takes {self.channels} channels, and an image has 3", do=do)
        try:
            tensor = self._values(self.transforms, frames)
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            why = "it does not fit into memory" if is_out_of_memory(error) else error
            raise InputError(f"cannot prepare an image of {frames[0].size}: {why}") from error
        return tensor.to(self.device, self.dtype)

    def _values(self, transforms: Transforms, frames: list[Image.Image]) -> Tensor:
        if self.channels == 1:
            frames = [frame.convert("L") for frame in frames]
        if self.family != "video":
            return transforms.values(F.pil_to_tensor(transforms.resize(frames[0])).float().div(255))
        frames = frames if len(frames) == self.frames else frames[:1] * self.frames
        clip = transforms.resize(torch.stack([F.pil_to_tensor(frame) for frame in frames]))
        return transforms.values(clip.float().div(255)).movedim(0, 1)

    def _own(self, transforms: OwnTransforms, image: Image.Image) -> Tensor:
        tensor = transforms(image)
        if self.size is not None and tuple(tensor.shape[-2:]) != self.size:
            made, want = ("x".join(map(str, size)) for size in (tensor.shape[-2:], self.size))
            asked = f"{transforms.name} makes an input of {made}, and the input size is {want}"
            raise InputError(asked, do="give both the same size, or use ‹preprocess='stretch'|--preprocess stretch›")
        return tensor

    @property
    def input_shape(self) -> tuple[int, ...]:
        """``(C, H, W)`` of an input, ``(C, T, H, W)`` of a clip; of a square picture where the size depends on it."""
        frames = [self.frames] if self.family == "video" else []
        shape = next(iter(self.transforms.shapes), (self.channels, *frames, *(self._made or self.default_size)))
        return (*shape[:-2], *(self.size or shape[-2:]))

    @property
    def _made(self) -> tuple[int, int] | None:
        return self.transforms.resize.made

    @property
    def any_size(self) -> bool:
        """Whether inputs have the sizes of their pictures."""
        return len(self.transforms.shapes) > 1 or (isinstance(self.transforms, Transforms) and self._made is None)

    @property
    def of_seen(self) -> Preprocess:
        """The same for pictures that have the size of the input: they are normalised, not resized.

        Raises:
            UsageError: The normalisation of the user's own function is not known.
        """
        transforms = self.transforms
        values = transforms.values if isinstance(transforms, Transforms) else transforms.normalisation
        if values is None:
            do = "give ‹mean and std, or preprocess='imagenet'|--mean and --std, or --preprocess imagenet›"
            raise UsageError(f"the normalisation of {transforms.describe()} is not known", do=do)
        height, width = self.input_shape[-2:]
        return replace(self, transforms=Transforms(values=values), default_size=(height, width), size=None)

    def resized_like(self, other: Preprocess) -> Preprocess:
        """The same with the resize of ``other``, for inputs of the own size; functions of the user stay as they are."""
        own, steps = self.transforms, other.transforms
        if not isinstance(own, Transforms) or not isinstance(steps, Transforms):
            return self
        resize = steps.resize if self._made in (None, other._made) else steps.resize.sized(self._made)
        return replace(self, transforms=replace(own, resize=resize))

    def like(self, other: Preprocess) -> Preprocess:
        """The steps of ``other``, for inputs of the own size, where nobody has said the steps of this model."""
        own, steps = self.transforms, other.transforms
        if "values" not in own.assumed or "values" in steps.assumed:
            return self
        if isinstance(steps, Transforms) and "size" not in own.assumed and self._made not in (None, other._made):
            steps = replace(steps, resize=steps.resize.sized(self._made))
        return replace(self, transforms=steps, size=other.size if "size" in own.assumed else self.size)

    @property
    def assumes_values(self) -> bool:
        """Whether nobody has said the mean and the standard deviation."""
        return "values" in self.assumed

    @property
    def assumed(self) -> tuple[str, ...]:
        """Which of ``size`` and ``values`` nobody has said of a model of the user, so that ImageNet's are used."""
        return self.transforms.assumed

    @property
    def assumption(self) -> str:
        """What is assumed, such as ``resize 256, crop 224, ImageNet mean and std``; empty without any."""
        return self.transforms.assumption

    def changed(self, choice: PreprocessChoice, size: tuple[int, int] | None = None) -> Preprocess:
        """The same with what the user has chosen, for inputs of ``size`` if it is given.

        Raises:
            UsageError: a choice that does not fit the model, such as two means for three channels.
        """
        transforms, default_size = self.transforms, self.default_size
        if isinstance(choice.base, OwnTransforms):
            values = self._chosen_values(choice, None) if choice.mean else None
            transforms = replace(choice.base, values=values)
        elif isinstance(choice.base, Transforms):
            transforms = choice.base
        elif choice.base in ("stretch", "none"):
            resize = Resize("stretch", self._made or default_size) if choice.base == "stretch" else Resize()
            transforms = Transforms(resize)
        elif choice.base in _USUAL:
            transforms = _USUAL[choice.base]
            transforms = replace(transforms, resize=transforms.resize.sized(self._made or default_size))
        if isinstance(transforms, OwnTransforms):
            self._refuse_parts(choice, transforms)
            return replace(self, transforms=transforms, size=size)
        own = self.transforms
        stated = self.stated if isinstance(own, OwnTransforms) or "values" in own.assumed else own.values
        resize, values, assumed = transforms.resize, transforms.values, set(transforms.assumed)
        if choice.resize is not None:
            mode, shorter = choice.resize
            crop = size or resize.made or default_size
            want = (shorter,) if shorter else (crop[0],) if mode == "shorter" and crop[0] == crop[1] else crop
            resize = Resize(mode, want, None if mode == "stretch" else crop, resize.interpolation)
        elif size is not None and "size" in assumed and resize.crop:  # a picture of this size stays as it is
            resize = replace(resize, size=size[:1] if size[0] == size[1] else size, crop=size)
        elif size is not None:
            resize = resize.sized(size)
        if choice.resize is not None or size is not None:
            assumed -= {"size"}
        if choice.range is not None or choice.mean is not None:
            values, assumed = self._chosen_values(choice, self.channels), assumed - {"values"}
        transforms = Transforms(resize, values, tuple(sorted(assumed)))
        return replace(self, transforms=transforms, stated=stated if stated != values else None)

    def _chosen_values(self, choice: PreprocessChoice, channels: int | None) -> Normalisation:
        """The range, mean and standard deviation of ``choice``, for so many channels, None if they are not known."""
        chosen = {name: getattr(choice, name) for name in ("range", "mean", "std") if getattr(choice, name) is not None}
        for name in chosen.keys() & {"mean", "std"}:
            if channels and len(chosen[name]) not in (1, channels):
                count = counted(len(chosen[name]), "number")
                asked = f"‹{name}|--{name}› has {count}, and the input has {counted(channels, 'channel')}"
                raise UsageError(asked, do="give one number, or one for each channel")
        return Normalisation(**chosen)

    def _refuse_parts(self, choice: PreprocessChoice, own: OwnTransforms) -> None:
        parts: dict[str, Any] = {"range": choice.range, "resize": choice.resize}
        parts |= {"mean": choice.mean} if own is self.transforms else {}
        if given := [f"‹{name}|--{name}›" for name, value in parts.items() if value is not None]:
            asked = f"{own.name} makes the whole input, so {given[0]} cannot change it"
            raise UsageError(asked, do=f"leave {given[0]} out, or add ‹preprocess='imagenet'|--preprocess imagenet›")

    def as_stated(self, tensor: Tensor) -> Tensor:
        """An input with the range, mean and standard deviation that the model states."""
        if self.stated is None or isinstance(self.transforms, OwnTransforms):
            return tensor
        return self.stated(self.transforms.values.inverse(tensor))

    def denormalise(self, tensor: Tensor) -> Image.Image:
        """The RGB picture that the network sees: ``tensor`` without its normalisation; the first frame of a clip."""
        picture = (tensor[:, 0] if tensor.dim() == 4 else tensor).cpu().float()
        if isinstance(self.transforms, OwnTransforms):
            shown = self.transforms.denormalise(picture)
        else:
            shown = self.transforms.values.inverse(picture)
        shown = shown if len(shown) == 3 else shown.mean(0, keepdim=True).expand(3, -1, -1)
        image: Image.Image = F.to_pil_image(shown.nan_to_num(0).clamp(0, 1))
        return image

    def shown(self, image: Image.Image, tensor: Tensor) -> tuple[Image.Image, tuple[float, float, float, float]]:
        """A picture to draw maps of the input ``tensor`` on, and its part that they cover, see `visible_box`.

        It is the photograph, or with the user's own function, which may crop it, the picture that the network sees.
        """
        if isinstance(self.transforms, Transforms):
            return image, self.visible_box(image.width, image.height)
        picture = self.denormalise(tensor)
        return picture, (0.0, 0.0, float(picture.width), float(picture.height))

    def region(self, mask: Image.Image) -> Tensor:
        """How much of each pixel of the input lies in ``mask``, ``(H, W)`` in 0..1.

        The mask has the size of the photograph, of which it goes through resize and crop; with the user's own function
        it has the size of the input. Its pixels are in where they are not 0.

        Example:
            >>> from hookscope.models.transforms import imagenet_transforms
            >>> preprocess = Preprocess("segmentation", imagenet_transforms(224, 256))
            >>> region = preprocess.region(Image.new("L", (512, 512), 255))
            >>> region.shape, region.mean().item()
            (torch.Size([224, 224]), 1.0)
        """
        inside: Tensor = (F.pil_to_tensor(mask) != 0).any(0).float()
        resize = replace(self.transforms.resize, interpolation="box", fill=())
        shares: Tensor = F.pil_to_tensor(resize(Image.fromarray(inside.numpy())))
        return shares[0]

    def visible_box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """The part of a photograph that the network sees: ``(left, top, right, bottom)`` in pixels, not rounded.

        Torchvision's classification transforms resize the shorter side and crop the centre. They pad a photograph that
        is smaller than the crop, as padding does: the box then reaches beyond it. Where transforms only
        resize, the box is everything.

        Example:
            >>> from hookscope.models.transforms import imagenet_transforms
            >>> Preprocess("classification", imagenet_transforms(224, 256)).visible_box(512, 256)
            (144.0, 16.0, 368.0, 240.0)
        """
        return self.transforms.resize.visible_box(height, width)

    def _cells(self) -> Cells:
        of = " of a square image" if len(self.transforms.shapes) > 1 else ""
        return {"steps": self.describe(), "input": words(self.input_shape) + of}

    def describe(self) -> str:
        """One line such as ``resize 256, crop 224, ImageNet mean and std``; numbers are exact."""
        steps = self.transforms.describe()
        if isinstance(self.transforms, OwnTransforms):
            return steps + (f", {self.size[0]}x{self.size[1]}" if self.size else "")
        return f"grey, {steps}" if self.channels == 1 else steps
