"""The models that have names as a table of facts: task, size, cost, and how good the default weights are.

Everything comes from the metadata that torchvision keeps beside its weights, and from the files of the weights that
ship; nothing is downloaded and no model built.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hookscope.errors import ModelError, SelectionError, WeightsError, nearest
from hookscope.models.bundled import BUNDLED, BundledModel, weights_path
from hookscope.models.metadata import Description, count_parameters, read_description, read_header
from hookscope.models.names import package_versions
from hookscope.system import cache

# By the folder of torchvision.models that a builder stands in; the models of the folder itself classify pictures.
_TASKS = {
    "detection": "detection",
    "segmentation": "segmentation",
    "video": "video",
    "optical_flow": "optical_flow",
    "quantization": "quantized",
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What torchvision says about one of its models with its default weights, or the file of a model that ships.

    Args:
        name: The registered name, as ``MODEL`` of a command takes it.
        task: ``classification``, ``detection``, ``segmentation``, ``video``, ``optical_flow`` or ``quantized``
            (classification in 8-bit integers).
        params: Number of parameters with the default weights, those of auxiliary classifiers included. A quantized
            model counts those of the float model it was made from. Three vision transformers have more for weights
            made for larger pictures: ``vit_h_14`` without weights has 632,045,800, not 633,470,440.
        file_size: Size of the file of the default weights, in MB of 2**20 bytes.
        gflops: Billions of multiply-adds of one pass, at the size that the default weights are made for.
        accuracy: The headline number of the default weights: the first metric of the first data set that
            torchvision states. For optical flow it is an end-point error in pixels, where less is better. Of a
            model that ships, percent of the held-out pictures that its training wrote into the file.
        metric: What ``accuracy`` measures: data set and metric, such as ``"ImageNet-1K acc@1"``.
        weights: Names of the weights, the default first. A quantized model's are for its 8-bit form.
        float_weights: Names of the float weights that the quantized ones were made from, in the same order, each once;
            empty for a model that is not quantized.

    A fact that nobody states is ``None``, or an empty text.

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
    """Every model that torchvision registers itself, and those that ship, sorted by name.

    The first call imports torchvision (seconds). Later ones, in other processes too, read its table from the cache as
    long as the versions are the same; the files that ship are read each time.

    Raises:
        ImportError: torchvision is not installed, or does not fit the installed torch.

    Example:
        >>> resnet34 = next(model for model in catalogue() if model.name == "resnet34")
        >>> resnet34.params, resnet34.gflops, resnet34.accuracy, resnet34.metric
        (21797672, 3.664, 73.314, 'ImageNet-1K acc@1')
    """
    models = [*_cached(), *map(_describe_shipped, BUNDLED.values())]
    return tuple(sorted(models, key=lambda model: model.name))


def _cached() -> tuple[ModelInfo, ...]:
    key = {**package_versions(), "fields": [field.name for field in dataclasses.fields(ModelInfo)]}
    kept = _from_rows(cache.load("catalogue", key))
    if kept is not None:
        return kept
    models = _from_torchvision()
    cache.store("catalogue", key, [dataclasses.asdict(model) for model in models])
    return models


def find_models(pattern: str | None = None) -> tuple[ModelInfo, ...]:
    """The models of the :func:`catalogue` whose names match ``pattern``; all of them without one.

    Args:
        pattern: A glob that fits the whole name (``resnet*``), a regular expression found anywhere in it
            (``re:^vit_[bl]``), or a part of it (``mobilenet``). Case does not count.

    Raises:
        SelectionError: The regular expression cannot be read.
        ModelError: No name matches.

    Example:
        >>> [model.name for model in find_models("resnet1*")]
        ['resnet101', 'resnet152', 'resnet18']
    """
    if pattern is None:
        return catalogue()
    matches = _matcher(pattern)  # first, because a bad pattern can be told in no time
    models = catalogue()
    found = tuple(model for model in models if matches(model.name))
    if not found:
        word = re.sub(r"^re:|\[.*?\]|[^\w]", "", pattern)
        exists = nearest(word, [model.name for model in models]) or f"there are {len(models)} models"
        raise ModelError(f"no model matches '{pattern}'", exists, "see `hookscope list-models`")
    return found


def _matcher(pattern: str) -> Callable[[str], object]:
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:], re.IGNORECASE).search
        except (re.error, OverflowError, RecursionError) as error:
            raise SelectionError(f"'{pattern}' is no regular expression: {error}") from error
    lower = pattern.lower()
    if re.search(r"[*?\[]", lower):
        return lambda name: fnmatch.fnmatchcase(name.lower(), lower)
    return lambda name: lower in name.lower()


def _from_rows(rows: Any) -> tuple[ModelInfo, ...] | None:
    """The models that were stored, or ``None`` where a row is not what was stored."""
    try:
        return tuple(ModelInfo(**{name: _hashable(value) for name, value in row.items()}) for row in rows) or None
    except (TypeError, AttributeError):
        return None


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _from_torchvision() -> tuple[ModelInfo, ...]:
    from torchvision import models

    return tuple(_describe(name, models) for name in models.list_models() if _is_torchvisions(name, models))


def _is_torchvisions(name: str, models: Any) -> bool:
    # A program may register models of its own; what it does in its process must not get into everybody's cache.
    return str(models.get_model_builder(name).__module__).startswith("torchvision.")


def _describe(name: str, models: Any) -> ModelInfo:
    task = _task(models.get_model_builder(name).__module__)
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
        weights=tuple(each.name for each in weights),
        float_weights=_float_weights(each.meta.get("unquantized") for each in weights),
    )


def _describe_shipped(shipped: BundledModel) -> ModelInfo:
    """What the file of the weights says; a file that is not there, or is damaged, states nothing."""
    try:
        path = weights_path(shipped)
        size = os.path.getsize(path)
        said = read_description(path) or Description()
    except (WeightsError, OSError):
        return ModelInfo(shipped.name, "classification")
    return ModelInfo(
        name=shipped.name,
        task="classification",
        params=count_parameters(read_header(path)),
        file_size=round(size / 2**20, 3),
        accuracy=None if said.accuracy is None else round(100 * said.accuracy, 3),
        metric="" if said.accuracy is None else f"{shipped.name} acc@1",
        weights=(shipped.file,),
    )


def _task(module: str) -> str:
    return next((task for folder, task in _TASKS.items() if f".models.{folder}." in f"{module}."), "classification")


def _weights(name: str, models: Any) -> list[Any]:
    """The members of the model's weights enum, the default first; none where it has no weights."""
    try:
        members = list(models.get_model_weights(name))
    except ValueError:  # the builder has no weights, or does not say of which kind
        return []
    default = getattr(models.get_model_weights(name), "DEFAULT", None)
    return sorted(members, key=lambda each: each is not default)


def _headline(metrics: Mapping[str, Mapping[str, Any]] | None) -> tuple[float | None, str]:
    """The first metric of the first data set that is a number: ``{"ImageNet-1K": {"acc@1": 73.3, "acc@5": …}}``."""
    for data_set, values in (metrics or {}).items():
        for metric, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value), f"{data_set} {metric}"
    return None, ""


def _float_weights(members: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(member.name for member in members if member is not None))
