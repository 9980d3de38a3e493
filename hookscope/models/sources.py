"""The sources of models, in the order in which they are asked. A new source is one file and one entry here."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

from hookscope.errors import ModelError, nearest
from hookscope.models.from_efficientnet_lite import EfficientNetLiteSource
from hookscope.models.from_file import ExportedSource, OnnxSource
from hookscope.models.from_python import PythonSource
from hookscope.models.from_timm import TimmSource
from hookscope.models.from_torchvision import BundledSource, QuantizedSource, TorchvisionSource
from hookscope.models.from_transformers import TransformersSource
from hookscope.models.from_ultralytics import UltralyticsSource
from hookscope.models.model_source import Detections, ModelSource

SOURCES: list[type[ModelSource]] = [
    BundledSource,
    EfficientNetLiteSource,
    TimmSource,
    UltralyticsSource,
    QuantizedSource,
    OnnxSource,
    ExportedSource,
    PythonSource,
    TorchvisionSource,
    TransformersSource,
]


def find_source(model: str | ModelSource) -> ModelSource:
    """The text ``model`` parsed, by the source whose text it is and without importing torch; or ``model`` itself.

    Raises:
        ModelError: no source knows the name; the error gives the nearest names.
    """
    if isinstance(model, ModelSource):
        return model
    for source in SOURCES:
        if source.matches(model):
            return source(model)
    if "/" in model:
        raise ModelError(f"no model '{model}'", "a file needs a factory", "write path/to/file.py:factory")
    if os.path.isfile(f"{model}.py"):
        raise ModelError(f"no model '{model}'", do=f"write {model}.py")
    raise ModelError(f"no model '{model}'", nearest(model, model_names()), "see `hookscope list-models`")


def model_names() -> tuple[str, ...]:
    """The names that the sources can list, sorted."""
    return tuple(sorted(set(chain.from_iterable(source.names() for source in SOURCES))))


def class_names_of(model: str) -> tuple[str, ...]:
    """The class names of the default weights of ``model``, for completion; empty if torch is needed to know them."""
    return next((source(model).class_names() for source in SOURCES if source.matches(model)), ())


def detections_in(output: Any) -> list[Detections] | None:
    """The detections in each image of a detector's output, None for other outputs."""
    return next((found for source in SOURCES if (found := source.detections(output)) is not None), None)
