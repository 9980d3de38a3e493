"""The sources of models, in the order in which they are asked. A new source is one file and one entry here."""

from __future__ import annotations

import os
from itertools import chain

from hookscope.errors import ModelError, nearest
from hookscope.models.from_efficientnet_lite import EfficientNetLiteSource
from hookscope.models.from_file import ExportedSource, OnnxSource
from hookscope.models.from_python import PythonSource
from hookscope.models.from_timm import TimmSource
from hookscope.models.from_torchvision import BundledSource, QuantizedSource, TorchvisionSource
from hookscope.models.from_transformers import TransformersSource
from hookscope.models.from_ultralytics import UltralyticsSource
from hookscope.models.model_source import ModelSource

SOURCES: list[ModelSource] = [
    BundledSource(),
    EfficientNetLiteSource(),
    TimmSource(),
    UltralyticsSource(),
    QuantizedSource(),
    OnnxSource(),
    ExportedSource(),
    PythonSource(),
    TorchvisionSource(),
    TransformersSource(),
]


def find_source(model: str) -> ModelSource:
    """The source of the model that the text ``model`` names, without importing torch.

    Raises:
        ModelError: no source knows the name; the error gives the nearest names.
    """
    for source in SOURCES:
        if source.matches(model):
            return source
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
    source = next((source for source in SOURCES if source.matches(model)), None)
    return source.class_names(model) if source else ()
