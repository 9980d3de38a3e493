"""The named models as a table: task, size, cost, and accuracy of the default weights.

The facts come from torchvision's metadata of weights and from the bundled weights files; nothing is downloaded and no
model is built.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hookscope.errors import ModelError, SelectionError, WeightsError, nearest
from hookscope.models.metadata import Description, count_parameters, read_description, read_header
from hookscope.models.names import BUNDLED, BundledModel, package_versions, weights_path
from hookscope.models.sources import LITE_PARAMETERS, EfficientNetLiteSource
from hookscope.system import cache

# By the folder of a builder in torchvision.models; the builders in that folder itself are for classification.
_TASKS = {
    "detection": "detection",
    "segmentation": "segmentation",
    "video": "video",
    "optical_flow": "optical_flow",
    "quantization": "quantized",
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
    extra = [ModelInfo(name, "classification", LITE_PARAMETERS) for name in EfficientNetLiteSource.names()]
    key = {**package_versions(), "fields": [field.name for field in dataclasses.fields(ModelInfo)]}
    models = _from_rows(cache.load("catalogue", key))
    if models is None:
        models = _from_torchvision()
        cache.store("catalogue", key, [dataclasses.asdict(model) for model in models])
    models = (*models, *map(_describe_bundled, BUNDLED.values()), *extra)
    return tuple(sorted(models, key=lambda model: model.name))


def find_models(pattern: str | None = None) -> tuple[ModelInfo, ...]:
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
        return catalogue()
    matches = _matcher(pattern)  # first: a bad pattern fails at once
    models = catalogue()
    matching = tuple(model for model in models if matches(model.name))
    if not matching:
        name = re.sub(r"^re:|\[.*?\]|[^\w]", "", pattern)
        exists = nearest(name, [model.name for model in models]) or f"there are {len(models)} models"
        raise ModelError(f"no model matches '{pattern}'", exists, "see `hookscope list-models`")
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
    module = f"{models.get_model_builder(name).__module__}."
    task = next((task for folder, task in _TASKS.items() if f".models.{folder}." in module), "classification")
    weights = _weights(name, models)
    if not weights:
        return ModelInfo(name, task)
    meta = weights[0].meta
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
        accuracy = (read_description(path) or Description()).accuracy
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
