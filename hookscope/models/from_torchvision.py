"""Models by name: built as torchvision builds them, with its weights or a checkpoint; the one that knows its models."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import InstallationError, ModelError, WeightsError
from hookscope.models.bundled import BUNDLED, BundledModel, weights_path
from hookscope.models.checkpoints import (
    fitting_error,
    fitting_kwargs,
    is_weights_file,
    load_file,
    load_into,
    mismatches,
    read_state_dict,
)
from hookscope.models.directions import WeightsMetadata, directions_in
from hookscope.models.download import Progress, fetch
from hookscope.models.from_python import BuiltModel
from hookscope.models.inputs import family_of, native_size
from hookscope.models.installation import broken_pair
from hookscope.models.meta_device import build_on_meta
from hookscope.models.metadata import read_description
from hookscope.models.names import check_model_name, torchvision_names
from hookscope.models.preprocess import imagenet_transforms, made_for, usual_transforms


@contextmanager
def quiet_and_seeded(seed: int) -> Iterator[None]:
    """Run the block with random numbers from ``seed`` and no warning of a builder; the random state is put back."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        yield


def torchvision_models() -> Any:
    """``torchvision.models``, or one line that says how the installation is broken."""
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:
        broken = broken_pair(error)
        raise broken or InstallationError(f"cannot import torchvision: {error}") from error


def build_kwargs(name: str, quantize: bool = False) -> dict[str, Any]:
    """What a builder must be told: the classes of a model that ships; to download no backbone and warn of nothing."""
    if name in BUNDLED:
        return {"num_classes": BUNDLED[name].classes}
    builder = torchvision_models().get_model_builder(name)
    kwargs: dict[str, Any] = {}
    if "weights_backbone" in inspect.signature(builder).parameters:
        kwargs["weights_backbone"] = None
    if name in ("googlenet", "inception_v3", "quantized_googlenet", "quantized_inception_v3"):
        kwargs["init_weights"] = True
    if quantize:
        kwargs["quantize"] = True
    return kwargs


def _build(name: str, **kwargs: Any) -> nn.Module:
    architecture = BUNDLED[name].architecture if name in BUNDLED else name
    try:
        model: nn.Module = torchvision_models().get_model(architecture, weights=None, **(build_kwargs(name) | kwargs))
    except (RuntimeError, ImportError, ValueError, TypeError) as error:
        raise ModelError(f"cannot build {name}: {error}") from error
    return model


def build_listed(name: str) -> nn.Module:
    """The model ``name`` without values, on the meta device; with values where its builder needs them.

    Raises:
        ModelError: no such model.
    """
    check_model_name(name)
    with quiet_and_seeded(0):
        return _skeleton(name).eval()


def _skeleton(name: str, **kwargs: Any) -> nn.Module:
    try:
        return build_on_meta(lambda: _build(name, **kwargs))
    except Exception:  # a builder that computes with its tensors
        return _build(name, **kwargs)


def build_real(name: str) -> nn.Module:
    """The model ``name`` with seeded random weights, for the pass that needs values."""
    with quiet_and_seeded(0):
        return _build(name).eval()


def listing_size(name: str, model: nn.Module) -> tuple[int, int]:
    """``(H, W)`` of the input that the model ``name`` is made for."""
    if name in BUNDLED:
        return BUNDLED[name].side, BUNDLED[name].side
    if native := native_size(model):
        return native
    family = family_of(model)
    if family in ("detection", "optical_flow"):
        return (320, 320) if family == "detection" else (224, 224)
    entry = _default_entry(name)
    return made_for(_transforms_of(entry) or usual_transforms(family))


def _transforms_of(entry: Any) -> Any:
    return entry.transforms() if entry is not None else None


def _float_entries(name: str) -> dict[str, Any]:
    """The weights of ``name`` by name; those of a quantized model beside the float weights they were made from."""
    entries = {entry.name: entry for entry in torchvision_models().get_model_weights(name)}
    unquantized = (entry.meta.get("unquantized") for entry in list(entries.values()))
    return entries | {entry.name: entry for entry in unquantized if entry is not None}


def _default_entry(name: str) -> Any:
    """The entry of the weights ``default`` means: of a quantized model, the float weights for its float twin."""
    found = torchvision_models().get_model_weights(name)
    default = getattr(found, "DEFAULT", None)
    return default.meta.get("unquantized", default) if default is not None else None


def load_from_torchvision(name: str, weights: str, seed: int, progress: Progress | None) -> BuiltModel:
    """The model ``name`` with the weights asked for; ``auto`` goes on with random ones where there are none to have.

    Raises:
        ModelError: no such model, or it cannot be built.
        WeightsError: no such weights, or they cannot be had, trusted or fitted.
    """
    check_model_name(name)
    if name in BUNDLED:
        return _load_shipped(BUNDLED[name], weights, seed)
    default = _default_entry(name)
    if weights == "none":
        return _random(name, seed, _directions_of(default))
    if is_weights_file(weights):
        return _from_file(name, weights, _directions_of(default))
    entry = default if weights in ("auto", "default") else _named_entry(name, weights)
    if entry is None:
        if weights == "default":
            raise WeightsError(f"torchvision has no weights for {name}", do="use --weights none, or a checkpoint file")
        return _random(name, seed, WeightsMetadata(), "torchvision has no weights for this model")
    try:
        model = _build_with(name, entry, progress)
    except WeightsError as error:
        if weights != "auto":
            raise WeightsError(f"no weights {entry.name} for {name}: {error.asked}", error.exists, error.do) from error
        note = f"weights of {name} are random (seed {seed}): {error.asked}"
        return _random(name, seed, _directions_of(default), note)
    return BuiltModel(model, entry.name, _transforms_of(entry), _categories(entry))


def _load_shipped(shipped: BundledModel, weights: str, seed: int) -> BuiltModel:
    """A model that ships: its weights lie beside the program, and nothing else is put in their place."""
    usual = WeightsMetadata(imagenet_transforms(shipped.side, shipped.side))
    if weights in ("auto", "default") or (weights == shipped.file and not Path(weights).exists()):
        return _from_file(shipped.name, weights_path(shipped), usual)
    try:
        usual = directions_in(weights_path(shipped), shipped.classes, usual)
    except WeightsError as error:
        usual = WeightsMetadata(usual.transforms, None, (f"{error.asked}, nor are its class names",))
    if weights == "none":
        return _random(shipped.name, seed, usual)
    if is_weights_file(weights):
        return _from_file(shipped.name, weights, usual)
    do = "or auto, default, none, a file"
    raise WeightsError(f"no weights '{weights}' for {shipped.name}", f"there is {shipped.file}", do)


def _random(name: str, seed: int, usual: WeightsMetadata, *notes: str) -> BuiltModel:
    return BuiltModel(_build(name), f"random (seed {seed})", usual.transforms, usual.categories, [*usual.notes, *notes])


def _directions_of(entry: Any) -> WeightsMetadata:
    return WeightsMetadata(_transforms_of(entry), _categories(entry))


def _categories(entry: Any) -> tuple[str, ...] | None:
    return tuple(entry.meta.get("categories") or ()) or None if entry is not None else None


def _named_entry(name: str, weights: str) -> Any:
    entries = _float_entries(name)
    enum, _, wanted = weights.rpartition(".")
    found = entries.get(wanted)
    if found is None or enum not in ("", type(found).__name__):
        have = ", ".join(entries) or "none"
        raise WeightsError(f"no weights '{weights}' for {name}", f"there are {have}", "or auto, default, none, a file")
    return found


def _build_with(name: str, entry: Any, progress: Progress | None) -> nn.Module:
    """The model with torchvision's weights: its own builder sets all that goes with them, we fetch and check.

    torchvision would load its cached file with unpickling allowed and its hash unchecked, so the one method that
    reads the file is replaced while the builder runs.
    """
    from unittest.mock import patch

    models = torchvision_models()
    state = load_file(fetch(entry.url, progress))
    quantize = "backend" in entry.meta
    with patch.object(models.WeightsEnum, "get_state_dict", lambda self, *args, **kwargs: state):
        try:
            model: nn.Module = models.get_model(name, weights=entry, **_with_weights(build_kwargs(name, quantize)))
        except (RuntimeError, ImportError, ValueError, TypeError) as error:
            raise ModelError(f"cannot build {name} with {entry.name}: {error}") from error
    return model


def _with_weights(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "init_weights"}


def _from_file(name: str, path: str, usual: WeightsMetadata) -> BuiltModel:
    state = read_state_dict(path)
    kwargs = fitting_kwargs(lambda **kwargs: _skeleton(name, **kwargs), _tries(name, state), state)
    if kwargs is None:
        raise fitting_error(path, name, _skeleton(name), state, _model_that_fits(path, state))
    no_values = {"init_weights": False} if "init_weights" in build_kwargs(name) else {}
    model = _build(name, **no_values, **kwargs)
    notes = load_into(model, state, path)
    classes = (build_kwargs(name) | kwargs).get("num_classes") or len(usual.categories or ()) or None
    known = None if "num_classes" in kwargs else usual.categories
    found = directions_in(path, classes, replace(usual, categories=known), family_of(model))
    return BuiltModel(model, Path(path).name, found.transforms, found.categories, [*notes, *found.notes])


def _tries(name: str, state: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """What a builder may be told about auxiliary heads, so that a checkpoint with or without them fits."""
    if any(key.startswith("aux_classifier.") for key in state):
        return [{"aux_loss": True}]
    aux_is_optional = name.removeprefix("quantized_") in ("googlenet", "inception_v3")
    return [{}, {"aux_logits": False}] if aux_is_optional else [{}]


def _model_that_fits(path: str, state: Mapping[str, Tensor]) -> str | None:
    """The torchvision model a state dict belongs to, by what its file says or by the number of its parameters."""
    count = sum(v.numel() for key, v in state.items() if "running_" not in key and "num_batches" not in key)
    with suppress(WeightsError):
        said = read_description(path)
        if said is not None and said.model in torchvision_names() and _fits(said.model, state):
            return said.model
    for name in torchvision_names():
        entry = _default_entry(name)
        if entry is not None and abs(entry.meta.get("num_params", 0) - count) <= 0.01 * count:
            with suppress(ModelError):
                if not mismatches(_skeleton(name), state):
                    return name
    return None


def _fits(name: str, state: Mapping[str, Tensor]) -> bool:
    return fitting_kwargs(lambda **kwargs: _skeleton(name, **kwargs), _tries(name, state), state) is not None
