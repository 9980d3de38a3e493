"""What is known of weights without loading them: the description in a file, and the catalogue of the named models.

A safetensors file can carry transforms of pictures and class names as a JSON object under the key ``hookscope`` of its
metadata; each entry is optional::

    {"model": "squeezenet1_1", "categories": ["circle", "star"], "resize_size": 128, "crop_size": 128,
     "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "accuracy": 0.98, "held_out": 2000}
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hookscope.display import Rows
from hookscope.errors import ModelError, SelectionError, WeightsError, nearest
from hookscope.findings import counted
from hookscope.models.choices import LARGEST_SIDE
from hookscope.models.names import BUNDLED, LITE_PARAMETERS, BundledModel, lite_names, package_versions, weights_path
from hookscope.system import cache

_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors itself
_TRANSFORMS = ("resize_size", "crop_size", "mean", "std")
_TASKS = ("detection", "segmentation", "video", "optical_flow")  # folders of builders in torchvision.models


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
    labels, wrong = tuple(description.get("categories", ())), ""
    if (labels or "crop_size" in description) and family != "classification":
        wrong = f"describes a classification model, but the model is for {family.replace('_', ' ')}"
    elif labels and classes is not None and len(labels) != classes:
        wrong = f"has {counted(len(labels), 'class name')} for {counted(classes, 'output')}"
    if wrong:
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


def _is_number(value: Any, least: float = -1e6, most: float = 1e6) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most  # NaN is not


def _is_count(value: Any, most: float = math.inf) -> bool:
    return isinstance(value, int) and _is_number(value, 1, most)


def _are(is_valid: Callable[[Any], bool], values: Any, count: int = 0) -> bool:
    fits = isinstance(values, list) and (len(values) == count if count else len(values) > 0)
    return fits and all(map(is_valid, values))


_ENTRIES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a name", _is_name),
    "categories": ("a list of names", lambda value: _are(_is_name, value)),
    "resize_size": ("a number of pixels", lambda value: _is_count(value, LARGEST_SIDE)),
    "crop_size": ("a number of pixels", lambda value: _is_count(value, LARGEST_SIDE)),
    "mean": ("three numbers", lambda value: _are(_is_number, value, 3)),
    "std": ("three numbers above 0", lambda value: _are(_is_number, value, 3) and min(value) > 0),
    "accuracy": ("a share between 0 and 1", lambda value: _is_number(value, 0, 1)),
    "held_out": ("a number of images", _is_count),
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What torchvision states about a model with its default weights, or what a bundled weights file states.

    Args:
        name: The MODEL argument.
        task: ``classification``, ``detection``, ``segmentation``, ``video``, ``optical_flow`` or ``quantized``
            (classification with 8-bit integers).
        params: Number of parameters with the default weights, including auxiliary classifiers. For a quantized model,
            the float model's. Three vision transformers have more parameters with weights for larger pictures:
            ``vit_h_14`` without weights has 632,045,800, not 633,470,440.
        file_size: Size of the default weights file, in MB of 2**20 bytes.
        gflops: Billions of multiply-adds of one pass, at the input size of the default weights.
        accuracy: The first metric on the first data set that torchvision states for the default weights. For optical
            flow an end-point error in pixels, where less is better. For a bundled model, percent of held-out pictures.
        metric: Data set and metric of ``accuracy``, such as ``"ImageNet-1K acc@1"``.
        weights: Names of the weights, the default first. A quantized model has 8-bit weights.
        float_weights: Names of the float weights of a quantized model, in the same order, each once.

    A fact that is not stated is ``None`` or an empty text.

    Example:
        >>> ModelInfo("resnet34", "classification", params=21797672).gflops is None
        True
    """

    name: str
    task: str
    params: int | None = None
    file_size: float | None = None
    gflops: float | None = None
    accuracy: float | None = None
    metric: str = ""
    weights: tuple[str, ...] = ()
    float_weights: tuple[str, ...] = ()


def catalogue() -> tuple[ModelInfo, ...]:
    """Every model that torchvision registers itself, and the bundled models, sorted by name.

    The first call imports torchvision (seconds). Later calls, also in other processes, read torchvision's table from
    the cache while the versions are the same; the bundled files are read each time.
    """
    key = {**package_versions(), "fields": [field.name for field in dataclasses.fields(ModelInfo)]}
    models = _from_rows(cache.load("catalogue", key))
    if models is None:
        models = _from_torchvision()
        cache.store("catalogue", key, [dataclasses.asdict(model) for model in models])
    models += tuple(map(_describe_bundled, BUNDLED.values()))
    models += tuple(ModelInfo(name, "classification", LITE_PARAMETERS) for name in lite_names())
    return tuple(sorted(models, key=lambda model: model.name))


def find_models(pattern: str | None = None) -> Rows[ModelInfo]:
    """The models of torchvision and the bundled models whose names match ``pattern``; all models without a pattern.

    Args:
        pattern: A glob for the whole name (``resnet*``), a regular expression for any part of it
            (``re:^vit_[bl]``), or a part of the name (``mobilenet``). Case does not matter.

    Raises:
        SelectionError: the regular expression is invalid.
        ModelError: no name matches.

    Example:
        >>> [model.name for model in find_models("resnet1*")]
        ['resnet101', 'resnet152', 'resnet18']
    """
    if pattern is None:
        return Rows(catalogue())
    matches = _matcher(pattern := str(pattern))  # first: a bad pattern fails at once
    models = catalogue()
    matching = Rows(model for model in models if matches(model.name))
    if not matching:
        name = re.sub(r"^re:|\[.*?\]|[^\w]", "", pattern)
        exists = nearest(name, [model.name for model in models]) or f"there are {len(models)} models"
        raise ModelError(f"no model matches '{pattern}'", exists, "see ‹find_models|`hookscope list-models`›")
    return matching


def _matcher(pattern: str) -> Callable[[str], object]:
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:], re.IGNORECASE).search
        except (re.error, OverflowError, RecursionError) as error:
            raise SelectionError(f"'{pattern}' is not a regular expression: {error}") from error
    lower = pattern.lower()
    if re.search(r"[*?\[]", lower):
        return lambda name: fnmatch.fnmatchcase(name.lower(), lower)
    return lambda name: lower in name.lower()


def _from_rows(rows: Any) -> tuple[ModelInfo, ...] | None:
    """The stored models, or ``None`` if a row is damaged."""
    try:
        values: list[dict[str, Any]] = [
            {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()} for row in rows
        ]
        return tuple(ModelInfo(**row) for row in values) or None
    except (TypeError, AttributeError):
        return None


def _from_torchvision() -> tuple[ModelInfo, ...]:
    from torchvision import models

    # A program may register models of its own, which must not get into the cache of all programs.
    names = (n for n in models.list_models() if models.get_model_builder(n).__module__.startswith("torchvision."))
    return tuple(_describe(name, models) for name in names)


def _describe(name: str, models: Any) -> ModelInfo:
    folder = models.get_model_builder(name).__module__.split(".")[-2]
    task = "quantized" if folder == "quantization" else folder if folder in _TASKS else "classification"
    weights = _weights(name, models)
    meta = weights[0].meta if weights else {}
    accuracy, metric = _headline(meta.get("_metrics"))
    return ModelInfo(
        name=name,
        task=task,
        params=meta.get("num_params"),
        file_size=meta.get("_file_size"),
        gflops=meta.get("_ops"),
        accuracy=accuracy,
        metric=metric,
        weights=tuple(entry.name for entry in weights),
        float_weights=tuple(dict.fromkeys(e.meta["unquantized"].name for e in weights if "unquantized" in e.meta)),
    )


def _describe_bundled(bundled: BundledModel) -> ModelInfo:
    """What the weights file states; nothing if the file is missing or damaged."""
    try:
        path = weights_path(bundled)
        size = os.path.getsize(path)
        accuracy = read_description(path).get("accuracy")
    except (WeightsError, OSError):
        return ModelInfo(bundled.name, "classification")
    return ModelInfo(
        name=bundled.name,
        task="classification",
        params=count_parameters(read_header(path)),
        file_size=round(size / 2**20, 3),
        accuracy=None if accuracy is None else round(100 * accuracy, 3),
        metric="" if accuracy is None else f"{bundled.name} acc@1",
        weights=(bundled.file,),
    )


def _weights(name: str, models: Any) -> list[Any]:
    """The members of the model's weights enum, the default first."""
    try:
        members = list(models.get_model_weights(name))
    except ValueError:  # the builder has no weights, or does not declare their enum
        return []
    default = getattr(models.get_model_weights(name), "DEFAULT", None)
    return sorted(members, key=lambda entry: entry is not default)


def _headline(metrics: Mapping[str, Mapping[str, Any]] | None) -> tuple[float | None, str]:
    """The first metric of the first data set that is a number: ``{"ImageNet-1K": {"acc@1": 73.3, "acc@5": …}}``."""
    for data_set, values in (metrics or {}).items():
        for metric, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value), f"{data_set} {metric}"
    return None, ""
