"""Call a function in each process that `multiprocessing` starts, in whatever way it starts them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from hookscope.system.import_hook import after_import

_NAME = "hookscope"
# In a new interpreter: an exception there would end the process.
_ARRIVES = """
try:
    from hookscope.system.child_processes import InChildren
    InChildren(module, name, settings).arrive()
except Exception:
    pass
"""


class InChildren:
    """Calls ``module.name(settings)`` in each process that `multiprocessing` starts, and that these start.

    A process that is forked off inherits this object. The configuration that each process passes on to those that it
    starts is sent to a new interpreter; this object is part of it, and arrives before the process is known: there,
    ``multiprocessing.current_process()`` becomes right a little later, and the function may be called twice. Processes
    that load data for a ``DataLoader`` are left alone where they are known. The function must be importable by name,
    and the settings are pickled.
    """

    _here: InChildren | None = None  # kept alive: multiprocessing refers to it weakly

    def __init__(self, module: str, name: str, settings: Any) -> None:
        self._module, self._name, self._settings = module, name, settings

    def wait(self) -> None:
        """Call the function in processes that start from now on; once `multiprocessing` is imported."""
        InChildren._here = self
        after_import("multiprocessing.process", lambda: _this_process()._config.update({_NAME: self}))
        util = "multiprocessing.util"
        after_import(util, lambda: sys.modules[util].register_after_fork(self, InChildren._begin))

    def arrive(self) -> None:
        """This process has been started, as a new interpreter."""
        self.wait()
        self._call()

    def _begin(self) -> None:
        process = _this_process()
        process._config[_NAME] = self
        if getattr(getattr(process, "_target", None), "__module__", "") == "torch.utils.data._utils.worker":
            return
        self._call()

    def _call(self) -> None:
        function: Callable[[Any], None] = getattr(import_module(self._module), self._name)
        function(self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_ARRIVES, {"module": self._module, "name": self._name, "settings": self._settings})


def _this_process() -> Any:
    return sys.modules["multiprocessing.process"].current_process()
