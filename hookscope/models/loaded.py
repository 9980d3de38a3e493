"""A model that is ready to run: what it says of its pictures and classes, and the inputs of its family."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from hookscope.display import Cells, Shown
from hookscope.errors import InputError, UsageError, kind_of
from hookscope.hooks import AnyModel, module_of
from hookscope.images import AnyImage, InputImage, as_picture, is_picture
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.preprocess import Preprocess
from hookscope.models.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normalisation,
    OwnTransforms,
    Resize,
    Transforms,
    usual_transforms,
)

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
        raise InputError("a batch needs at least one picture")
    if family == "detection":
        return (list(pictures),)
    if len(shapes) > 1:
        raise InputError("pictures of different shapes do not stack", ", ".join(shapes), "make batches of one shape")
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
        height, width = self.preprocess.default_size
        frames = (self.preprocess.frames,) if self.preprocess.frames > 1 else ()
        return {
            "model": self.name,
            "class": type(self.model).__name__,
            "weights": self.weights,
            "family": self.family,
            "classes": len(self.categories) if self.categories else None,
            "input": (self.preprocess.channels, *frames, height, width),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "device": self.device,
            "notes": "; ".join(self.notes),
        }

    def __call__(self, *inputs: Any) -> Any:
        """What the module returns for tensors, or for an image or its path."""
        return self.model(*(self.inputs_of(*inputs) if len(inputs) == 1 and is_picture(*inputs) else inputs))

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
        if not isinstance(picture, InputImage):
            picture = as_picture(picture)
        tensor = self.preprocess(picture.frames if len(picture.frames) > 1 else picture.image)
        kind = next((weight.dtype for weight in self.model.parameters()), tensor.dtype)
        halves_or_doubles = kind in (torch.float16, torch.bfloat16, torch.float64) and tensor.is_floating_point()
        return tensor.to(kind) if halves_or_doubles else tensor

    def inputs_of(self, image: AnyImage) -> tuple[Any, ...]:
        """The positional inputs of one forward pass for an image or its path."""
        return self.inputs(self.prepare(as_picture(image, self.preprocess.frames)))

    def inputs(self, *pictures: Tensor) -> tuple[Any, ...]:
        """The positional inputs of one forward pass for a prepared picture ``(3, H, W)``; optical flow may take two."""
        if self.family == "optical_flow" and len(pictures) == 2:
            return pictures[0][None], pictures[1][None]
        return as_batch(self.family, pictures[:1])


def as_loaded(net: AnyModel) -> LoadedModel:
    """``net`` itself, or the record of a module on its device with the usual preprocessing of its family."""
    if isinstance(net, LoadedModel):
        return net
    module = module_of(net)
    loaded = LoadedModel.of(module, type(module).__name__, "as given", WeightsMetadata())
    device = next((str(parameter.device) for parameter in module.parameters()), "cpu")
    return replace(loaded, device=device, preprocess=replace(loaded.preprocess, device=device))


_PROCESSORS = ("image_processor", "processor", "feature_extractor")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's numbers
_UNDERSTOOD = {
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize",
    "image_mean", "image_std", "image_processor_type", "feature_extractor_type", "do_convert_rgb", "do_reduce_labels",
    "ensure_multiple_of", "processor_class", "_processor_class", "return_tensors", "data_format",
    "_valid_processor_keys", "input_data_format", "default_to_square", "resample_filter", "format",
    "do_convert_annotations",
}  # fmt: skip
_WITH_RULES_OF_THEIR_OWN = ("ConvNext", "Levit", "PoolFormer", "Yolos")


def published_transforms(model: nn.Module, files: Sequence[str] = ()) -> Transforms | OwnTransforms | None:
    """The transforms that ``model`` states, or that stand beside one of the checkpoint ``files``; None without any.

    Of a model around one of timm only the mean and the standard deviation are its own.
    """
    for owner in [model, getattr(model, "config", None)]:
        for name in _PROCESSORS:
            if (result := of_processor(getattr(owner, name, None), f"{name} of the model")) is not None:
                return result
    for file in map(Path, files):
        if (result := _in_folder(file if file.is_dir() else file.parent)) is not None:
            return result
    if loaded_from := getattr(getattr(model, "config", None), "_name_or_path", None):
        # a folder, or a name whose files lie in the cache of transformers
        result = _in_folder(Path(loaded_from)) or (None if Path(loaded_from).is_dir() else _of_installed(loaded_from))
        if result is not None:
            return result
    if type(model).__module__.startswith("ultralytics."):
        return _of_ultralytics(model)
    if (config := _timm_config(model)) is not None:
        return of_timm(config)
    configs = [config for module in model.modules() if (config := _timm_config(module)) is not None]
    if configs and all(config == configs[0] for config in configs):
        inner = of_timm(configs[0])
        return replace(usual_transforms(family_of(model)), values=inner.values, assumed=("size",))
    return None


def published_class_names(model: nn.Module) -> tuple[str, ...] | None:
    """The class names that a model of transformers or ultralytics has, None where it has only numbers."""
    names = getattr(getattr(model, "config", None), "id2label", getattr(model, "names", None))
    if not isinstance(names, dict) or names.keys() != set(range(len(names))):
        return None
    labels = tuple(str(names[index]) for index in range(len(names)))
    return None if all(label in (f"LABEL_{index}", str(index)) for index, label in enumerate(labels)) else labels


def _timm_config(module: nn.Module) -> Mapping[str, Any] | None:
    for name in ("pretrained_cfg", "default_cfg"):
        config = getattr(module, name, None)
        if isinstance(config, Mapping) and config.get("input_size"):
            return config
    return None


def of_timm(config: Mapping[str, Any]) -> Transforms:
    """What timm's ``create_transform`` makes of a ``pretrained_cfg``."""
    high, wide = crop = tuple(config["input_size"][-2:])
    mean, std = (tuple(config.get(name) or usual) for name, usual in (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)))
    mode, share = config.get("crop_mode") or "center", config.get("crop_pct") or 0.875
    size: tuple[int, ...] = tuple(math.floor(side / share) for side in crop)
    size = size[:1] if mode == "center" and high == wide else size
    fill = tuple(round(255 * value) for value in mean) if mode == "border" else ()
    resize = Resize(
        {"squash": "stretch", "border": "pad"}.get(mode, "shorter"),
        size,
        (high, wide),
        config.get("interpolation") or "bicubic",
        fill=fill,
    )
    return Transforms(resize, Normalisation(mean=mean, std=std))


def _of_ultralytics(model: nn.Module) -> Transforms | None:
    """What its predictors do: RT-DETR stretches, other detectors and segmentation models pad with grey."""
    name = type(model).__name__
    if not name.endswith(("DetectionModel", "SegmentationModel", "PoseModel", "OBBModel")):
        return None
    mode, crop = ("stretch", None) if name.startswith("RTDETR") else ("pad", (640, 640))
    return Transforms(Resize(mode, (640, 640), crop, fill=() if crop is None else (114, 114, 114)))


def of_processor(processor: Any, name: str) -> Transforms | OwnTransforms | None:
    """The transforms of an image processor of transformers, or of a processor that has one; None for anything else."""
    processor = getattr(processor, "image_processor", processor)
    if not callable(getattr(processor, "to_dict", None)) or not hasattr(processor, "image_mean"):
        return None
    if (known := _of_config(processor.to_dict())) is not None:
        return known
    return OwnTransforms(_Processor(processor), name)


class _Processor:
    """An image processor as a function; ``mean`` and ``std`` are in its last step."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        normalises = getattr(processor, "do_normalize", False)
        self.mean = processor.image_mean if normalises else [0.0]
        self.std = processor.image_std if normalises else [1.0]

    def __call__(self, picture: Any) -> Any:
        return self.processor(picture, return_tensors="pt")["pixel_values"][0]


def _in_folder(folder: Path) -> Transforms | OwnTransforms | None:
    for file in (folder / name for name in _PROCESSOR_FILES):
        # a damaged file says nothing
        with suppress(OSError, ValueError, RecursionError, TypeError, AttributeError, LookupError):
            content = json.loads(file.read_text("utf-8"))
            content = content.get("image_processor", content)
            if {"image_mean", "do_resize"} & content.keys():
                return _of_config(content) or _of_installed(str(folder))
    return None


def _of_installed(name: str) -> Transforms | OwnTransforms | None:
    """The transforms of a processor that only transformers knows, in a folder or in its cache; nothing is fetched."""
    try:
        from transformers import AutoImageProcessor  # type: ignore[import-not-found,unused-ignore]

        processor = AutoImageProcessor.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception:  # not installed, or not a version that knows it
        return None
    return of_processor(processor, f"{type(processor).__name__} in {name}")


def _of_config(config: Mapping[str, Any]) -> Transforms | None:
    """The transforms that the entries of a configuration say; None if they do not say all."""
    # one picture of a detector needs no padding to the size of others
    known = _UNDERSTOOD | {"do_pad"} if config.get("format") and not config.get("pad_size") else _UNDERSTOOD
    more = [name for name, value in config.items() if value and name not in known and not name.startswith("_")]
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    if more or kind.startswith(_WITH_RULES_OF_THEIR_OWN) or config.get("ensure_multiple_of") not in (None, 1):
        return None
    resize: Resize | None = Resize()
    if config.get("do_resize"):
        filter_number = config.get("resample")
        resize = _resize_of(config.get("size"), _FILTERS[2 if filter_number is None else int(filter_number)])
    if resize is not None and config.get("do_center_crop"):
        crop = _sides(config.get("crop_size"))
        resize = None if crop is None else replace(resize, crop=crop, floor=True)
    if resize is None:
        return None
    scale = 255 * config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 255.0
    values = Normalisation(range=(0.0, round(scale, 9)))
    if config.get("do_normalize", True) and config.get("image_mean"):
        mean, std = (tuple(map(float, config[name])) for name in ("image_mean", "image_std"))
        values = Normalisation(values.range, mean, std)
    return Transforms(resize, values)


def _resize_of(size: Any, interpolation: str) -> Resize | None:
    if sides := _sides(size):
        return Resize("stretch", sides, None, interpolation)
    if isinstance(size, Mapping) and set(size) == {"shortest_edge"}:
        return Resize("shorter", (int(size["shortest_edge"]),), None, interpolation)
    if isinstance(size, Mapping) and set(size) == {"shortest_edge", "longest_edge"}:
        sides = int(size["shortest_edge"]), int(size["longest_edge"])
        return Resize("shorter", sides[:1], None, interpolation, longest=sides[1])
    return None


def _sides(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping) and {"height", "width"} <= size.keys():
        return int(size["height"]), int(size["width"])
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return None
