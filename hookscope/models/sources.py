"""The sources of models, in the order in which they are asked. A new source is one file and one entry here."""

from __future__ import annotations

from itertools import chain

from hookscope.errors import ModelError, nearest
from hookscope.models.from_bundled import BundledSource
from hookscope.models.from_python import PythonSource
from hookscope.models.from_timm import TimmSource
from hookscope.models.from_torchvision import TorchvisionSource
from hookscope.models.model_source import ModelSource

SOURCES: list[ModelSource] = [BundledSource(), TimmSource(), PythonSource(), TorchvisionSource()]


def find_source(model: str) -> ModelSource:
    """The source of the model that the text ``model`` names; imports nothing heavy.

    Raises:
        ModelError: no source knows the name; the error gives the nearest names.

    Example:
        >>> type(find_source("timm:vit_tiny_patch16_224")).__name__
        'TimmSource'
    """
    for source in SOURCES:
        if source.matches(model):
            return source
    if model.endswith(".py") or "/" in model:
        raise ModelError(f"no model '{model}'", "a file needs a factory", "write path/to/file.py:factory")
    raise ModelError(f"no model '{model}'", nearest(model, model_names()), "see `hookscope list-models`")


def model_names() -> tuple[str, ...]:
    """The names that the sources can list, sorted.

    Raises:
        InstallationError: torchvision is not installed, or lacks its source files.

    Example:
        >>> {"resnet34", "shapes"} <= set(model_names())
        True
    """
    return tuple(sorted(set(chain.from_iterable(source.names() for source in SOURCES))))


def class_names_of(model: str) -> tuple[str, ...]:
    """The class names of the default weights of ``model``, for completion; empty if they are not known without torch.

    Example:
        >>> class_names_of("resnet34")[:2], class_names_of("raft_small")
        (('tench', 'goldfish'), ())
    """
    source = next((source for source in SOURCES if source.matches(model)), None)
    return source.class_names(model) if source else ()
