"""Models that a function in somebody's package or file builds."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hookscope.errors import ModelError, nearest
from hookscope.findings import listed
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.model_source import FactoryText, MadeSource, is_module_name

if TYPE_CHECKING:
    from torch import nn

    from hookscope.models.loaded import LoadedModel


class PythonSource(MadeSource):
    """``package.module:factory`` and ``path/to/file.py:factory``; a factory is a function, a class or a module.

    Its arguments are literals, ``file.py:factory(width=2)``. Where there is one factory, it need not be named.
    """

    @classmethod
    def matches(cls, text: str) -> bool:
        return ":" in text or text.endswith(".py") or is_module_name(text)

    def make(self, pretrained: bool) -> nn.Module:
        from hookscope.models.factories import call_factory, declared, named, only_factory

        text = FactoryText.parse(self.text)
        with _importable(text.source):
            module = _import_source(text.source, self.text)
            if not text.name:
                text = replace(text, name=only_factory(module, text.source))
                taken = f"{text.source}:{text.name}"
                self.notes.append(f"{self.text} has one factory: {taken} is taken")
                self.text = taken
            factory = named(module, text)
            net = call_factory(factory, text, self.text)
        self._factory, self._declared = text, declared(factory, module)
        self.label = f"from factory (seed {self.seed}): untrained unless it loads its own"
        if "_orig_mod" in net._modules:
            self.notes.append(f"{self.text} is compiled by torch.compile: this is the eager model inside")
            return net.get_submodule("_orig_mod")
        return net

    def record(self, net: nn.Module, metadata: WeightsMetadata) -> LoadedModel:
        from hookscope.models.factories import take_pictures, with_declared_input

        source = self._factory.source
        if "model_inputs" in self._declared:
            take_pictures(net, self._declared["model_inputs"], source)
        metadata, choice = with_declared_input(metadata, self._declared, f"{source}:{self._factory.name}")
        loaded = super().record(net, metadata)
        return replace(loaded, preprocess=loaded.preprocess.changed(choice))


def find_in_source(spec: str) -> Any:
    """What ``package.module:name`` or ``path/to/file.py:name`` names."""
    source, _, name = spec.rpartition(":")
    with _importable(source):
        module = _import_source(source, spec)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if isfunction(value) and not key.startswith("_")]
        raise ModelError(f"no '{name}' in {source}", f"it has {listed(functions)}" if functions else "")
    return getattr(module, name)


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


def _import_source(source: str, spec: str) -> ModuleType:
    """The module ``source``, a file or a dotted name, for the MODEL text ``spec``."""
    from hookscope.models.run import build_errors_as_model_errors

    if source.endswith(".py") and not Path(source).is_file():
        files = [path.name for path in Path(source).parent.glob("*.py")] if Path(source).parent.is_dir() else []
        asked = f"no file '{source}'" + (f" for {spec}" if spec != source else "")
        raise ModelError(asked, nearest(Path(source).name, files))
    try:
        with build_errors_as_model_errors(f"cannot import {source}" + (f" for {spec}" if spec != source else "")):
            return _import_file(source) if source.endswith(".py") else importlib.import_module(source)
    except ModelError as error:
        package, _, name = source.rpartition(".")
        if spec == source and isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == source:
            raise ModelError(error.asked, do=f"write {package}:{name}") from error.__cause__
        raise


def _import_file(source: str) -> ModuleType:
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
