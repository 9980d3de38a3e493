"""Models that a function in somebody's package or file builds."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, nearest
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import ModelSource, Progress
from hookscope.models.weights_choice import WeightsChoice, WeightsKind

if TYPE_CHECKING:
    from torch import nn

    from hookscope.models.loaded import LoadedModel


class PythonSource(ModelSource):
    """``package.module:factory`` and ``path/to/file.py:factory``; a factory is a function, a class or a module."""

    def matches(self, model: str) -> bool:
        return ":" in model

    def build(self, model: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
        from hookscope.models.checkpoints import load_checkpoint
        from hookscope.models.declared import take_pictures, with_declared_input
        from hookscope.models.loaded import LoadedModel
        from hookscope.models.stated import stated_transforms

        weights.refuse_names(model)
        (built, said), label, notes = _call_factory(model), f"from factory (seed {seed})", list[str]()
        if weights.kind is WeightsKind.FILE:
            label, notes = load_checkpoint(built, weights.text, model)
        if "_orig_mod" in built._modules:
            built = built.get_submodule("_orig_mod")
            notes = [*notes, f"{model} is compiled by torch.compile: this is the eager model inside"]
        if "model_inputs" in said:
            take_pictures(built, said["model_inputs"], model.rpartition(":")[0])
        files = [weights.text] if weights.kind is WeightsKind.FILE else []
        metadata = WeightsMetadata(stated_transforms(built, files), notes=tuple(notes))
        metadata, choice = with_declared_input(metadata, said, model)
        loaded = LoadedModel.of(built, model, label, metadata)
        return replace(loaded, preprocess=loaded.preprocess.changed(choice))


def _call_factory(spec: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and what its file declares of its input."""
    from torch import nn

    from hookscope.models.declared import declared
    from hookscope.models.run import build_errors_as_model_errors

    with _importable(spec.rpartition(":")[0]):
        factory, module = find_in_source(spec)
        with build_errors_as_model_errors(f"{spec} failed"):
            model = factory if isinstance(factory, nn.Module) else factory()
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} returned {type(model).__name__}", do="return an nn.Module")
    return model, declared(factory, module)


def find_in_source(spec: str) -> tuple[Any, ModuleType]:
    """What ``package.module:name`` or ``path/to/file.py:name`` names, and its module."""
    from hookscope.models.run import build_errors_as_model_errors

    source, _, name = spec.rpartition(":")
    with _importable(source):
        if source.endswith(".py") and not Path(source).is_file():
            files = [path.name for path in Path(source).parent.glob("*.py")] if Path(source).parent.is_dir() else []
            raise ModelError(f"no file '{source}' for {spec}", nearest(Path(source).name, files))
        with build_errors_as_model_errors(f"cannot import {source} for {spec}"):
            module = _import_source(source)
    value = getattr(module, name, None)
    if value is None:
        raise ModelError(f"no '{name}' in {source}", nearest(name, _factories_of(module)))
    return value, module


def _factories_of(module: ModuleType) -> list[str]:
    """The names in ``module`` of modules, and of functions and classes of modules that need no arguments."""
    from torch import nn

    def is_factory(value: Any) -> bool:
        if isinstance(value, nn.Module):
            return True
        if not callable(value) or (isinstance(value, type) and not issubclass(value, nn.Module)):
            return False
        try:
            inspect.signature(value).bind()
        except (TypeError, ValueError):
            return False
        return True

    return [name for name, value in vars(module).items() if not name.startswith("_") and is_factory(value)]


@contextmanager
def _importable(source: str) -> Iterator[None]:
    """Make the folder of a file, or the current folder, importable in the block, as ``python FILE`` does."""
    folder = str(Path(source).resolve().parent) if source.endswith(".py") else str(Path.cwd())
    before = list(sys.path)
    sys.path.append(folder)  # last: a file in it must not shadow an installed module
    try:
        yield
    finally:
        sys.path[:] = before


def _import_source(source: str) -> ModuleType:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    # A unique name: two files net.py are two modules, and neither is mistaken for an installed module.
    unique = f"_hookscope_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    module_spec = importlib.util.spec_from_file_location(unique, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[unique] = module  # dataclasses look their module up there
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module
