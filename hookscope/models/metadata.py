"""What belongs to weights: the transforms of pictures and the class names, which a safetensors file can carry itself.

A safetensors file carries them as a JSON object under the key ``hookscope`` of its metadata; each entry is optional::

    {"model": "squeezenet1_1", "categories": ["circle", "star"], "resize_size": 128, "crop_size": 128,
     "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "accuracy": 0.98, "held_out": 2000}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hookscope.errors import WeightsError
from hookscope.findings import counted

_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors itself
_LARGEST_SIDE = 16384
_TRANSFORMS = ("resize_size", "crop_size", "mean", "std")


@dataclass(frozen=True)
class WeightsMetadata:
    """What belongs to the weights of a loaded model.

    Attributes:
        transforms: From picture to input, `Transforms` or `OwnTransforms`; None for the usual ones of the family.
        categories: Class names, None if unknown.
        notes: What the user should know.
        input_size: ``(H, W)``, ``(C, H, W)`` or ``(C, T, H, W)`` of one input, None if unknown.
        missing: The note that says why there are no trained weights; empty if there are, or if none were asked for.
    """

    transforms: Any = None
    categories: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    input_size: tuple[int, ...] | None = None
    missing: str = ""

    def noted(self, *notes: str) -> WeightsMetadata:
        """The same with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def without_weights(self, why: str) -> WeightsMetadata:
        """The same for random weights in place of trained ones."""
        return replace(self.noted(why), missing=why)


def read_header(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The header of a safetensors file: each tensor's ``shape``, and ``__metadata__``; empty for any other file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:
                return {}
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def count_parameters(header: Mapping[str, Any]) -> int | None:
    """Number of parameters in a header, without running statistics; None if the header makes no sense."""
    tensors = [key for key in header if key != "__metadata__" and "running_" not in key and "num_batches" not in key]
    try:
        return sum(math.prod(map(int, header[key]["shape"])) for key in tensors) if tensors else None
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


def read_description(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The entries of the description in the weights file ``path``; a damaged description raises a WeightsError."""
    metadata = read_header(path).get("__metadata__")
    if not isinstance(metadata, dict) or "hookscope" not in metadata:
        return {}
    try:
        content = json.loads(metadata["hookscope"])
    except (TypeError, ValueError, RecursionError):
        content = None
    if reason := _inconsistency(content):
        raise WeightsError(f"{path} has an invalid description of its model: {reason}")
    return {name: content[name] for name in _ENTRIES if name in content}


def read_metadata(
    path: str, classes: int | None, usual: WeightsMetadata, family: str = "classification"
) -> WeightsMetadata:
    """The metadata of a weights file; ``usual`` where its description is missing, incomplete or wrong.

    A description that is damaged, inconsistent or of another model is ignored, which a note says. ``classes`` is the
    number of classes of the model, None if unknown.
    """
    from hookscope.models.transforms import imagenet_transforms  # imports torch, which the rest of this file avoids

    try:
        description = read_description(path)
    except WeightsError as error:
        return usual.noted(f"{error}; the description is ignored")
    labels = tuple(description.get("categories", ()))
    if (labels or "crop_size" in description) and family != "classification":
        wrong = f"describes a classification model, but the model is for {family.replace('_', ' ')}"
        return usual.noted(f"{path} {wrong}; the description is ignored")
    if labels and classes is not None and len(labels) != classes:
        wrong = f"has {counted(len(labels), 'class name')} for {counted(classes, 'output')}"
        return usual.noted(f"{path} {wrong}; the description is ignored")
    transforms = usual.transforms
    if "crop_size" in description:  # and so are the others
        resize_size, crop_size, mean, std = (description[name] for name in _TRANSFORMS)
        transforms = imagenet_transforms(crop_size, resize_size, mean=mean, std=std)
    return replace(usual, transforms=transforms, categories=labels or usual.categories)


def _inconsistency(content: Any) -> str:
    """Why a description cannot be used; empty if it can."""
    if not isinstance(content, dict):
        return "it is not a JSON object"
    for name, (words, is_valid) in _ENTRIES.items():
        if name in content and not is_valid(content[name]):
            return f"{name} is not {words}"
    missing = [name for name in _TRANSFORMS if name not in content]
    if missing and len(missing) < len(_TRANSFORMS):
        return f"{', '.join(_TRANSFORMS)} go together, but {', '.join(missing)} is missing"
    return ""


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e6 <= value <= 1e6  # NaN is not


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_side(value: Any) -> bool:
    return _is_count(value) and value <= _LARGEST_SIDE


def _are(is_valid: Callable[[Any], bool], values: Any) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(map(is_valid, values))


_ENTRIES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a name", _is_name),
    "categories": ("a list of names", lambda value: _are(_is_name, value)),
    "resize_size": ("a number of pixels", _is_side),
    "crop_size": ("a number of pixels", _is_side),
    "mean": ("three numbers", lambda value: _are(_is_number, value) and len(value) == 3),
    "std": (
        "three numbers above 0",
        lambda value: _are(lambda each: _is_number(each) and each > 0, value) and len(value) == 3,
    ),
    "accuracy": ("a share between 0 and 1", lambda value: _is_number(value) and 0 <= value <= 1),
    "held_out": ("a number of pictures", _is_count),
}
