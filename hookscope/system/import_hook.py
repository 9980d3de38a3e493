"""Call a function right after a module has been imported, whoever imports it, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call ``then()`` once: now if the top-level module ``name`` is imported, else right after its first import.

    It is called inside the ``import`` statement, which raises what it raises. A failed import does not count.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Finds what later finders find, and wraps ``exec_module`` of that one loader until it is called.

    So the loader of the module is the one that Python itself would have used.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                loader.exec_module(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            loader.exec_module = exec_module
        return spec
