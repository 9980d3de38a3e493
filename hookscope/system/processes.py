"""Signals that wait until a piece of work is whole, and calls in each process that multiprocessing starts."""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Deliver SIGINT, SIGTERM and SIGHUP after the block, so that no sum is saved half added up."""
    held: list[int] = []
    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and callable(signal.getsignal(number)):
                old[number] = signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    for number in held[:1]:
        signal.raise_signal(number)


def before_termination(then: Callable[[], None]) -> None:
    """Call ``then()`` when SIGTERM is about to end this process, in a thread of its own; then the process ends by it.

    Nothing is done if a program has set a handler of its own, now or later. A handler in Python would be seen by such
    programs, and would wait as long as the main thread is in a library. So `faulthandler` handles the signal: it
    writes to a pipe, from which the thread reads.
    """
    number = getattr(signal, "SIGTERM", None)
    if number is None or not hasattr(faulthandler, "register") or signal.getsignal(number) is not signal.SIG_DFL:
        return
    reader, writer = os.pipe()

    def unregister() -> None:
        if signal.getsignal(number) is signal.SIG_DFL:  # else this would take the handler of the program away
            faulthandler.unregister(number)

    def wait() -> None:
        arrived = b""
        with contextlib.suppress(OSError):
            arrived = os.read(reader, 1)  # nothing: the program has closed the pipe
        try:
            if arrived:
                then()
        finally:
            unregister()
            if arrived:
                os.kill(os.getpid(), number)

    faulthandler.register(number, file=writer, all_threads=False)
    os.register_at_fork(after_in_child=unregister)
    _thread.start_new_thread(wait, ())


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


_NAME = "hookscope"
# In a new interpreter: an exception there would end the process.
_ARRIVES = """
try:
    from hookscope.system.processes import InChildren
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
