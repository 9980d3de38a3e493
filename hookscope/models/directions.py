"""Directions for the use of weights: the transforms of pictures and the class names that go with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hookscope.errors import WeightsError
from hookscope.findings import counted
from hookscope.models.metadata import Description, read_description
from hookscope.models.preprocess import imagenet_transforms


@dataclass(frozen=True)
class WeightsMetadata:
    """How a model with certain weights is used.

    Attributes:
        transforms: What makes a picture into the model's input, None for the usual of its family.
        categories: Class names, None where none are known.
        notes: What the person should know of them.
    """

    transforms: Any = None
    categories: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


def directions_in(
    path: str, classes: int | None, usual: WeightsMetadata, family: str = "classification"
) -> WeightsMetadata:
    """What the weights file at ``path`` says of its use, and ``usual`` for what it leaves out.

    A description that is damaged, makes no sense, or is not of this model becomes a note, and none of it is believed.

    Args:
        path: Any weights file; only a safetensors file can describe itself, see `hookscope.models.metadata`.
        classes: How many classes the model has, None where that is not known.
        usual: The directions for a file that says nothing.
        family: What `family_of` says of the model.
    """
    try:
        said = read_description(path) or Description()
    except WeightsError as error:
        return _noted(usual, f"{error}; its description is left aside")
    if doubt := _doubt(said, classes, family):
        return _noted(usual, f"{path} {doubt}; its description is left aside")
    transforms = usual.transforms
    if said.crop_size and said.resize_size and said.mean and said.std:
        transforms = imagenet_transforms(said.crop_size, said.resize_size, mean=said.mean, std=said.std)
    return WeightsMetadata(transforms, said.categories or usual.categories, usual.notes)


def _noted(usual: WeightsMetadata, note: str) -> WeightsMetadata:
    return replace(usual, notes=(*usual.notes, note))


def _doubt(said: Description, classes: int | None, family: str) -> str:
    if (said.categories or said.crop_size) and family != "classification":
        return f"describes a model that classifies, and this one is for {family.replace('_', ' ')}"
    if said.categories and classes is not None and len(said.categories) != classes:
        return f"has {counted(len(said.categories), 'class name')} for {counted(classes, 'output')}"
    return ""
