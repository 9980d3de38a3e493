"""What a user's file says about the input of its model: ``input_size``, ``preprocess`` and ``model_inputs``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from PIL import Image
from torch import nn
from torchvision.transforms import _presets as presets

from hookscope.errors import ModelError, UsageError
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.preprocess_choice import PreprocessChoice, words_of_mapping
from hookscope.models.published_transforms import of_processor
from hookscope.models.transforms import OwnTransforms, Transforms


def declared(factory: Any, module: Any) -> dict[str, Any]:
    """The names that the factory has as attributes, or else the module of the factory."""
    values = {}
    for name in ("input_size", "preprocess", "model_inputs"):
        value = getattr(factory, name, None)
        # a method of a model is for the model itself
        if value is None or (inspect.isroutine(value) and not inspect.isfunction(factory)):
            value = getattr(module, name, None)
        if value is not None:
            values[name] = value
    return values


def with_declared_input(
    metadata: WeightsMetadata, declarations: Mapping[str, Any], spec: str
) -> tuple[WeightsMetadata, PreprocessChoice]:
    """``metadata`` with what the file of ``spec`` declares of its input, and what it chooses in words."""
    where, choice = spec.rpartition(":")[0], PreprocessChoice()
    transforms, size = metadata.transforms, declarations.get("input_size")
    if (preprocess := declarations.get("preprocess")) is not None:
        made = preprocess_of(preprocess, f"preprocess of {where}")
        transforms, choice = (transforms, made) if isinstance(made, PreprocessChoice) else (made, choice)
    if size is not None:
        size = _checked_size(size, where)
    elif isinstance(transforms, OwnTransforms):
        size = tuple(transforms(Image.new("RGB", (256, 256))).shape)
    return replace(metadata, transforms=transforms, input_size=size or metadata.input_size), choice


def preprocess_of(value: Any, name: str) -> Transforms | OwnTransforms | PreprocessChoice:
    """What somebody's ``preprocess`` means: a function, torchvision's or transformers' own, words or a dictionary.

    ``name`` says where it stands.
    """
    try:
        if isinstance(value, str | Mapping):
            choice = words_of_mapping(value) if isinstance(value, Mapping) else PreprocessChoice.parse(value)
            if ":" in choice.base:
                raise UsageError(f"'{choice.base}' names a function", do="import the function and name it itself")
            return choice
    except UsageError as error:
        raise ModelError(f"{name}: {error.asked}", error.exists, error.do) from None
    if type(value).__module__ == presets.__name__:
        return Transforms.of(value)
    if (processor := of_processor(value, name)) is not None:
        return processor
    if not callable(value):
        do = "make it a function of a picture (a PIL image), or a word for preprocessing"
        raise ModelError(f"{name} is not a function but {type(value).__name__}", do=do)
    return OwnTransforms(value, name)


def _checked_size(size: Any, where: str) -> tuple[int, ...]:
    sizes = (size, size) if isinstance(size, int) else size
    if not isinstance(sizes, tuple | list) or not 2 <= len(sizes) <= 4:
        do = "set it to (H, W), (C, H, W) or (C, D, H, W)"
    elif any(type(side) is not int or side < 1 for side in sizes):
        do = "give numbers above 0"
    else:
        return tuple(sizes)
    raise ModelError(f"input_size in {where} is {size!r}", do=do)


def _check_callable(name: str, value: Any, of: str, where: str) -> None:
    if not callable(value):
        raise ModelError(
            f"{name} in {where} is not a function but {type(value).__name__}", do=f"make it a function of {of}"
        )


def take_pictures(model: nn.Module, model_inputs: Callable[..., Any], where: str) -> None:
    """Make ``model``, called with a batch of pictures, run on what ``model_inputs`` returns for them.

    A mapping is keyword inputs, a tuple positional inputs, anything else the only input.
    """
    _check_callable("model_inputs", model_inputs, "a batch of pictures (N, C, H, W)", where)
    own: Any = type(model)

    # a class, because a function in the attributes of the model would run this model in copies of it too
    def forward(self: Any, pictures: Any) -> Any:
        inputs = model_inputs(pictures)
        if isinstance(inputs, Mapping):
            return own.forward(self, **inputs)
        return own.forward(self, *(inputs if isinstance(inputs, tuple) else (inputs,)))

    names = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
    model.__class__ = type(own.__name__, (own,), names)
