"""What models of other packages say of their pictures and classes, such as timm and transformers do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hookscope.models.loaded import family_of
from hookscope.models.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normalisation,
    OwnTransforms,
    Resize,
    Transforms,
    usual_transforms,
)

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
    how, interpolation = {"squash": "stretch", "border": "pad"}.get(mode, "shorter"), config.get("interpolation")
    resize = Resize(how, size, (high, wide), interpolation or "bicubic", fill=fill)
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
