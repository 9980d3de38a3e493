"""A model that is ready to run: what it says of its pictures and classes, and the inputs of its family."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from hookscope.display import Cells, Shown
from hookscope.errors import InputError, ModelError, UsageError, kind_of
from hookscope.hooks import AnyModel, module_of
from hookscope.images import AnyImage, ImageWarning, InputImage, as_picture, is_picture
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.preprocess import Preprocess
from hookscope.models.run import model_errors_as_input_errors
from hookscope.models.transforms import Transforms, usual_transforms

# MViT takes exactly 16 frames; all other video models of torchvision take 16 too.
CLIP_FRAMES = 16
_AS_GIVEN = "as given"  # the label of the weights of a plain module

# By the package, and how the name of the class ends.
_FAMILIES = {
    ("torchvision.models.detection", ""): "detection",
    ("torchvision.models.segmentation", ""): "segmentation",
    ("torchvision.models.video", ""): "video",
    ("torchvision.models.optical_flow", ""): "optical_flow",
    ("transformers.", "ForObjectDetection"): "batched_detection",
    ("transformers.", "ForSemanticSegmentation"): "segmentation",
    ("ultralytics.", "DetectionModel"): "batched_detection",
    ("ultralytics.", "SemanticSegmentationModel"): "segmentation",
}


@cache
def note_input(text: str) -> None:
    """Issue an `ImageWarning`, of each text once: the filters of Python forget at every ``catch_warnings``."""
    warnings.warn(text, ImageWarning, stacklevel=1)


def family_of(model: nn.Module) -> str:
    """``classification``, ``segmentation``, ``detection``, ``batched_detection``, ``video`` or ``optical_flow``.

    Detectors of torchvision take lists of pictures (``detection``), detectors of transformers and ultralytics batches.
    A model with convolutions of three dimensions alone takes clips or volumes, and counts as ``video``.
    """
    for (package, end), family in _FAMILIES.items():
        if any(cls.__module__.startswith(package) and cls.__name__.endswith(end) for cls in type(model).__mro__):
            return family
    dimensions = {len(module.kernel_size) for module in _convolutions(model)}
    return "video" if dimensions == {3} else "classification"


def _convolutions(model: nn.Module) -> Iterator[nn.Conv2d | nn.Conv3d]:
    return (module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d)))


def check_size(model: nn.Module, size: Sequence[int] | None, family: str = "") -> None:
    """Refuse ``(D, H, W)`` for a model that takes pictures."""
    if size is not None and len(size) == 3 and (family or family_of(model)) != "video":
        asked = f"an input of {'x'.join(map(str, size))} has a depth, and {type(model).__name__} takes images"
        raise UsageError(asked, "its channels are its own", f"give height x width, such as {size[1]}x{size[2]}")


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
        raise InputError("a batch needs at least one image")
    if family == "detection":
        return (list(pictures),)
    if len(shapes) > 1:
        raise InputError("images of different shapes do not stack", ", ".join(shapes), "make batches of one shape")
    # one picture keeps the memory layout of its transforms; a copy, because a layer may write to it
    stacked = pictures[0][None].clone() if len(pictures) == 1 else torch.stack(list(pictures))
    return (stacked, stacked) if family == "optical_flow" else (stacked,)


def as_size(size: Any) -> list[int]:
    """A size as whole numbers of at least 1; one number is a square."""
    sides = [size, size] if isinstance(size, int) else list(size) if isinstance(size, Sequence) else []
    sides = [operator.index(side) if hasattr(side, "__index__") else 0 for side in sides]  # NumPy's whole numbers too
    if not sides or min(sides) < 1:
        words = size if isinstance(size, str | int | tuple | list) else kind_of(size)
        raise UsageError(f"bad input size {words}", do="give (H, W) or a full shape, such as (224, 224)")
    return sides


def example_inputs(model: nn.Module, input_size: Sequence[int], channels: int | None = None) -> tuple[Any, ...]:
    """Zeros in the shape that the family of ``model`` takes, with the model's dtype and device.

    ``input_size`` is ``(H, W)`` of the picture, ``(D, H, W)`` of a clip or volume, or a full shape with batch and
    channels. ``channels`` are a picture's, by default 1 or 3; a volume has as many as the first convolution
    takes.
    """
    size = as_size(input_size)
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
    """Whether layers hold their weights in 8 bits, or an ONNX file rounds values to 8 bits."""
    return getattr(model, "rounds", False) or any(
        value.is_quantized for value in model.state_dict().values() if isinstance(value, Tensor)
    )


@dataclass(frozen=True, repr=False)
class LoadedModel(Shown):
    """A model ready to run, in eval mode, and what belongs to it.

    Attributes:
        model: The module, on ``device``.
        name: The MODEL argument.
        weights: Label of the weights, such as ``IMAGENET1K_V1``, ``random (seed 0)`` or a file name.
        preprocess: Photograph to tensor ``(3, H, W)``.
        categories: Class names, None if unknown.
        family: ``classification``, ``segmentation``, ``detection`` (takes a list of pictures), ``batched_detection``
            (takes a batch), ``video`` or ``optical_flow``.
        device: Device of the model.
        notes: What the user should know, such as why the weights are random.
        missing_weights: The one of ``notes`` that says why there are no trained weights, else empty.
        checkpoint: The file or folder of the weights, empty for random ones and where it is not known.
        seed: Seed of random weights, None if it is not known.
    """

    model: nn.Module
    name: str
    weights: str
    preprocess: Preprocess
    categories: tuple[str, ...] | None
    family: str
    device: str
    notes: tuple[str, ...] = ()
    missing_weights: str = ""
    checkpoint: str = ""
    seed: int | None = None

    def _cells(self) -> Cells:
        return {
            "model": self.name,
            "class": type(self.model).__name__,
            "weights": self.weights,
            "family": self.family,
            "classes": len(self.categories) if self.categories else None,
            "input": self.preprocess._cells()["input"],
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "device": self.device,
            "notes": "; ".join(self.notes),
        }

    def __call__(self, *inputs: Any) -> Any:
        """What the module returns for tensors, or for an image or its path."""
        inputs = self.inputs_of(*inputs) if len(inputs) == 1 and is_picture(*inputs) else inputs
        with model_errors_as_input_errors(self.name, inputs):
            return self.model(*inputs)

    def __getattr__(self, name: str) -> Any:
        found = name[:1] != "_" and hasattr(self.__dict__.get("model"), name)
        where = f"; the module has it: .model.{name}" if found else ""
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'{where}")

    @classmethod
    def of(
        cls, model: nn.Module, name: str, weights: str, metadata: WeightsMetadata, family: str | None = None
    ) -> LoadedModel:
        """The record of a model on the CPU, with the transforms of ``metadata`` or the usual ones of its family."""
        size = metadata.input_size or ()
        family = family or ("video" if len(size) == 4 else family_of(model))
        if family == "video" and len(size) == 3:  # the model's file says that it takes pictures
            family = "classification"
        transforms = metadata.transforms or usual_transforms(family)
        said_size = (size[-2], size[-1]) if size else native_size(model)
        default_size = said_size or transforms.resize.made_for
        if isinstance(transforms, Transforms):
            assumed = transforms.assumed
            if metadata.transforms is None and family not in ("detection", "optical_flow"):
                assumed = ("size", "values")
            assumed = tuple(part for part in assumed if part != "size" or not said_size)
            # A ViT without weights may be made for another size than its default weights (vit_h_14).
            resize = transforms.resize
            resize = resize if resize.made_for == default_size else resize.sized(default_size)
            transforms = replace(transforms, resize=resize, assumed=assumed)
        preprocess = Preprocess(
            family=family,
            transforms=transforms,
            default_size=default_size,
            channels=size[0] if len(size) > 2 else first_channels(model) if family == "video" else in_channels(model),
            frames=size[1] if len(size) == 4 else CLIP_FRAMES if family == "video" else 1,
            dtype=next((p.dtype for p in model.parameters() if p.is_floating_point()), None),
        )
        return cls(
            model, name, weights, preprocess, metadata.categories, family, "cpu", metadata.notes, metadata.missing
        )

    def prepare(self, picture: InputImage | Image.Image) -> Tensor:
        """The input tensor of a picture, ``(3, H, W)``, or of a clip, ``(3, T, H, W)``."""
        self.note_assumption()
        tensor = self.preprocess(picture)
        kind = next((weight.dtype for weight in self.model.parameters()), tensor.dtype)
        halves_or_doubles = kind in (torch.float16, torch.bfloat16, torch.float64) and tensor.is_floating_point()
        return tensor.to(kind) if halves_or_doubles else tensor

    def note_assumption(self) -> None:
        """Warn of what is assumed of images for a plain module: it does not say how they become its input."""
        if self.weights == _AS_GIVEN and self.preprocess.assumption:
            asked = f"{self.name} does not say how an image becomes its input: assumed {self.preprocess.assumption}"
            note_input(f"{asked}; hookscope.load_model(model, preprocess=function) says it")

    def inputs_of(self, image: AnyImage) -> tuple[Any, ...]:
        """The positional inputs of one forward pass for an image or its path."""
        return self.inputs(self.prepare(as_picture(image, self.preprocess.frames)))

    def inputs(self, *pictures: Tensor) -> tuple[Any, ...]:
        """The positional inputs of one forward pass for a prepared picture ``(3, H, W)``; optical flow may take two."""
        if self.family == "optical_flow" and len(pictures) == 2:
            return pictures[0][None], pictures[1][None]
        return as_batch(self.family, pictures[:1])


def as_loaded(net: AnyModel, on_meta: bool = False) -> LoadedModel:
    """``net`` itself, or the record of a module; a ModelError for one ``on_meta`` unless shapes are enough."""
    module = module_of(net)
    name = net.name if isinstance(net, LoadedModel) else type(module).__name__
    if not on_meta and any(parameter.is_meta for parameter in module.parameters()):
        raise ModelError(f"{name} is on the meta device: it has shapes and no values", do="build it on the cpu")
    if isinstance(net, LoadedModel):
        return net
    loaded = LoadedModel.of(module, name, _AS_GIVEN, WeightsMetadata())
    device = next((str(parameter.device) for parameter in module.parameters()), "cpu")
    return replace(loaded, device=device, preprocess=replace(loaded.preprocess, device=device))
