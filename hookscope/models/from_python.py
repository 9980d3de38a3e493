"""Models that are not torchvision's: a function in a package or a file, and timm's models by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookscope.errors import ModelError, UsageError, nearest
from hookscope.models.checkpoints import fitting_error, is_weights_file, load_into, mismatches, read_state_dict
from hookscope.models.preprocess import imagenet_transforms


@dataclass
class BuiltModel:
    """A model while it is made: the module, the words for its weights, what transforms a picture for it."""

    model: nn.Module
    weights: str
    transforms: Any = None
    categories: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)


def load_from_elsewhere(spec: str, weights: str, seed: int) -> BuiltModel:
    """The model that ``package.module:factory``, ``path/to/file.py:factory`` or ``timm:NAME`` means.

    Raises:
        ModelError: nothing there, or it fails, or it gives no model.
        WeightsError: a checkpoint that cannot be read or does not fit.
        UsageError: for a weights name; only torchvision's models have those.
    """
    source, _, name = spec.rpartition(":")
    if weights not in ("auto", "none") and not is_weights_file(weights):
        raise UsageError(f"{spec} has no torchvision weights '{weights}'", do="use auto, none or a checkpoint file")
    if source == "timm":
        made = _from_timm(name, weights, seed)
    else:
        made = BuiltModel(_call_factory(spec, source, name), f"from factory (seed {seed})")
    if is_weights_file(weights):
        state = read_state_dict(weights)
        if mismatches(made.model, state):
            raise fitting_error(weights, spec, made.model, state, None)
        made.notes = load_into(made.model, state, weights)
        made.weights = Path(weights).name
    return made


def _from_timm(name: str, weights: str, seed: int) -> BuiltModel:
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        raise ModelError(f"timm:{name} needs the package timm", do="pip install timm") from None
    if not timm.is_model(name):
        raise ModelError(f"no timm model '{name}'", nearest(name, timm.list_models()))
    notes: list[str] = []
    model = None
    if weights == "auto":
        try:
            model = timm.create_model(name, pretrained=True)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            notes.append(f"weights of timm:{name} are random (seed {seed}): {reason}")
    words = "timm pretrained"
    if model is None:
        torch.default_generator.manual_seed(seed)  # the attempt may have drawn numbers before it failed
        model, words = timm.create_model(name, pretrained=False), f"random (seed {seed})"
    made = BuiltModel(model, words, notes=notes)
    data = timm.data.resolve_model_data_config(made.model)
    crop = data["input_size"][-1]
    resize = round(crop / data.get("crop_pct", 0.875))
    made.transforms = imagenet_transforms(crop, resize, mean=data["mean"], std=data["std"])
    return made


def _call_factory(spec: str, source: str, name: str) -> nn.Module:
    with _importable(source):
        module = _import_source(spec, source)
        factory = getattr(module, name, None)
        if factory is None:
            names = [other for other in vars(module) if not other.startswith("_")]
            raise ModelError(f"no '{name}' in {source}", nearest(name, names))
        try:
            model = factory if isinstance(factory, torch.nn.Module) else factory()
        except (Exception, SystemExit) as error:
            raise ModelError(f"{spec} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"{spec} gave a {type(model).__name__}", do="a factory returns an nn.Module")
    return model


@contextmanager
def _importable(source: str) -> Iterator[None]:
    """What lies beside a file, or in the current folder, can be imported meanwhile, as for ``python FILE``."""
    folder = str(Path(source).resolve().parent) if source.endswith(".py") else str(Path.cwd())
    before = list(sys.path)
    sys.path.append(folder)  # last, so that a file named as a module in use does not take its place
    try:
        yield
    finally:
        sys.path[:] = before


def _import_source(spec: str, source: str) -> Any:
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source).resolve()
        # a name of its own: two files named net.py are two modules, and none is taken for an installed one
        unique = f"_hookscope_{path.stem}_{zlib.crc32(bytes(path)):08x}"
        found = importlib.util.spec_from_file_location(unique, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[unique] = module  # dataclasses look their module up there
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[unique]
            raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"cannot import {source} for {spec}: {type(error).__name__}: {error}") from error
    return module
