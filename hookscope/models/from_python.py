"""Models that a function in somebody's package or file builds."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
        from hookscope.models.loaded import LoadedModel

        weights.refuse_names(model)
        built, label, notes = _call_factory(model), f"from factory (seed {seed})", list[str]()
        if weights.kind is WeightsKind.FILE:
            label, notes = load_checkpoint(built, weights.text, model)
        return LoadedModel.of(built, model, label, WeightsMetadata(notes=tuple(notes)))


def _call_factory(spec: str) -> nn.Module:
    from torch import nn

    source, _, name = spec.rpartition(":")
    with _importable(source):
        module = _import_source(spec, source)
        factory = getattr(module, name, None)
        if factory is None:
            names = [other for other in vars(module) if not other.startswith("_")]
            raise ModelError(f"no '{name}' in {source}", nearest(name, names))
        try:
            model = factory if isinstance(factory, nn.Module) else factory()
        except (Exception, SystemExit) as error:
            raise ModelError(f"{spec} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} returned {type(model).__name__}", do="return an nn.Module")
    return model


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


def _import_source(spec: str, source: str) -> Any:
    if source.endswith(".py") and not Path(source).is_file():
        files = [path.name for path in Path(source).parent.glob("*.py")] if Path(source).parent.is_dir() else []
        raise ModelError(f"no file '{source}' for {spec}", nearest(Path(source).name, files))
    try:
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
    except (Exception, SystemExit) as error:
        raise ModelError(f"cannot import {source} for {spec}: {type(error).__name__}: {error}") from error
    return module
