"""Do something as soon as a module has been imported, whoever imports it, and not import it oneself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call ``then()`` once, when the module ``name`` is there: now, or right after the import that brings it.

    An import that fails does not count; the next one may succeed.

    Args:
        name: Of a module that is in no package.
        then: Called within the ``import`` statement, in its thread; what it raises comes out of that statement.

    Example:
        >>> after_import("sys", lambda: print("sys is there"))
        sys is there
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder:
    """Finds what the finders after it find, and has the loader tell when it is done.

    Only the method of that one loader is replaced, and put back before it loads: to whoever asks a module for its
    loader, or asks of which class that is, nothing has changed.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._tell_after(spec.loader)
        return spec

    def _tell_after(self, loader: Any) -> None:
        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = exec_module
