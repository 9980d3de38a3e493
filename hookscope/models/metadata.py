"""What a safetensors file says of itself before any value: its tensors' sizes, and how its model is to be used.

The description is a JSON object under the key ``hookscope`` of the file's metadata; every part of it may be left out::

    {"model": "squeezenet1_1", "categories": ["circle", "star"], "resize_size": 128, "crop_size": 128,
     "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "accuracy": 0.98, "held_out": 2000}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hookscope.errors import WeightsError

_LONGEST_HEADER = 100_000_000  # bytes; safetensors itself reads no longer one
_LARGEST_SIDE = 16384
_TRANSFORMS = ("resize_size", "crop_size", "mean", "std")


@dataclass(frozen=True, slots=True)
class Description:
    """How a model with these weights is to be used; None, or nothing, for what the file does not say.

    Attributes:
        model: Name of the torchvision model that the weights are of.
        categories: Names of the classes, in order of the model's outputs.
        resize_size: Pixels of the picture's shorter side when it is resized.
        crop_size: Pixels of each side of the square that is cut out of its centre.
        mean: Subtracted from red, green and blue in [0, 1].
        std: What they are then divided by.
        accuracy: Share in [0, 1] of held-out pictures whose class has the highest score.
        held_out: How many pictures that were.
    """

    model: str = ""
    categories: tuple[str, ...] = ()
    resize_size: int | None = None
    crop_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    accuracy: float | None = None
    held_out: int | None = None


def read_header(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The header of a safetensors file: ``shape`` and more of each tensor, ``__metadata__``; empty for another file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:  # the first bytes of something else
                return {}
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def count_parameters(header: Mapping[str, Any]) -> int | None:
    """How many values the tensors of a header have, without the running statistics; None for a header of nonsense.

    Example:
        >>> count_parameters({"weight": {"shape": [8, 3]}, "bias": {"shape": [8]}, "__metadata__": {"by": "me"}})
        32
    """
    tensors = [key for key in header if key != "__metadata__" and "running_" not in key and "num_batches" not in key]
    try:
        return sum(math.prod(map(int, header[key]["shape"])) for key in tensors) if tensors else None
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


def read_description(path: str | os.PathLike[str]) -> Description | None:
    """What the file ``path`` says of the use of its weights, None where it says nothing.

    Raises:
        WeightsError: the description is damaged or makes no sense; then none of it is to be believed.
    """
    metadata = read_header(path).get("__metadata__")
    if not isinstance(metadata, dict) or "hookscope" not in metadata:
        return None
    try:
        said = json.loads(metadata["hookscope"])
    except (TypeError, ValueError, RecursionError):
        said = None
    reason = _nonsense(said)
    if reason:
        raise WeightsError(f"{path} describes its model in a way that makes no sense: {reason}")
    known: dict[str, Any] = {name: said[name] for name in _PARTS if name in said}
    for name in known.keys() & {"categories", "mean", "std"}:
        known[name] = tuple(known[name])
    return Description(**known)


def _nonsense(said: Any) -> str:
    """Why a description cannot be used; empty for one that can."""
    if not isinstance(said, dict):
        return "it is no JSON object"
    for name, (words, makes_sense) in _PARTS.items():
        if name in said and not makes_sense(said[name]):
            return f"{name} is not {words}"
    missing = [name for name in _TRANSFORMS if name not in said]
    if missing and len(missing) < len(_TRANSFORMS):
        return f"{', '.join(_TRANSFORMS)} go together and it lacks {', '.join(missing)}"
    return ""


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e6 <= value <= 1e6  # no NaN either


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_side(value: Any) -> bool:
    return _is_count(value) and value <= _LARGEST_SIDE


def _are(makes_sense: Callable[[Any], bool], values: Any) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(map(makes_sense, values))


_PARTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
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
