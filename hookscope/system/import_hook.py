"""Call a function right after a module has been imported, whoever imports it, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Call ``then()`` once: now if the module ``name`` is imported, else right after its first import.

    It is called inside the ``import`` statement, which raises what it raises. A failed import does not count.
    Returns a function after which nothing is called any more.
    """
    if name in sys.modules:
        then()
        return lambda: None
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder:
    """Finds what later finders find, and wraps ``exec_module`` of that one loader until it is called.

    So the loader of the module is the one that Python itself would have used. An ``exec_module`` that another import
    hook has put on the loader is called, and stays.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # those before it have been asked
        specs = (finder.find_spec(name, path, target) for finder in later)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None and hasattr(loader, "exec_module"):
            own, original = "exec_module" in vars(loader), loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if vars(loader).get("exec_module") is exec_module:  # else another hook was put on after this one
                    if own:
                        loader.exec_module = original
                    else:
                        del loader.exec_module
                original(module)
                if self in sys.meta_path:
                    self.remove()
                    self._then()

            loader.exec_module = exec_module
        return spec
