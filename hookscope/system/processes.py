"""A script run as Python itself would, signals that wait, and calls in each process that multiprocessing starts."""

from __future__ import annotations

import _thread
import builtins
import contextlib
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import runpy
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any, Literal

from hookscope.errors import HookscopeError, InstallationError, UsageError, first_line, nearest
from hookscope.findings import listed


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


def import_extra(module: str, extra: str) -> Any:
    """A module of a package that ``pip install 'hookscope[EXTRA]'`` brings; an InstallationError without it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or module, extra) from error
    except Exception as error:  # TypeError or AttributeError of many lines if it does not fit other packages
        asked, do = f"cannot import {extra}: {first_line(error)}", f"pip install 'hookscope[{extra}]'"
        raise InstallationError(asked, do=do) from error


def missing_extra(module: str, extra: str) -> InstallationError:
    asked = f"the package {module.partition('.')[0]} is not installed"
    return InstallationError(asked, do=f"pip install 'hookscope[{extra}]'")


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
        function: Callable[[Any], None] = getattr(importlib.import_module(self._module), self._name)
        function(self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_ARRIVES, {"module": self._module, "name": self._name, "settings": self._settings})


def _this_process() -> Any:
    return sys.modules["multiprocessing.process"].current_process()


_LAUNCHERS = ("torchrun", "accelerate")  # they start a Python of their own, which nobody watches
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


@dataclass(frozen=True)
class Script:
    """A script that `find_script` found."""

    words: tuple[str, ...]  # the command line: the file, or ``-m`` and the module, then the arguments
    kind: Literal["file", "folder", "module"]  # a folder or zip file has a ``__main__.py``
    name: str  # the file or folder as typed, or the name of the module
    path: str = ""  # absolute path of a file or folder; empty for a module
    source: bytes = field(default=b"", repr=False)  # read once: it may be a pipe

    def run(self) -> None:
        """Run it in this process, for good: ``sys.argv``, ``sys.path[0]`` and ``__main__`` are not put back.

        `runpy.run_path` would put them back at the end of the script, before its threads and exit handlers run.
        Exceptions propagate; `sys.excepthook` then shows them without the frames above the script and without frames
        of hookscope.
        """
        is_module = self.kind == "module"
        sys.argv = ["-m" if is_module else self.name, *self.words[2 if is_module else 1 :]]
        if self.kind == "folder":
            sys.path[0 : 0 if sys.flags.safe_path else 1] = [self.path]
        elif not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(self.path))
        main = sys.modules["__main__"] = ModuleType("__main__")
        if sys.version_info < (3, 14):  # the interpreter's own order of names
            main.__dict__.update(__annotations__={})
        main.__dict__.update(__builtins__=builtins)
        try:
            if self.kind == "file":
                self._run_file(main)
            else:  # `python -m` and `python FOLDER` call this too; it runs the code in the present `__main__`
                runpy._run_module_as_main(self.name if is_module else "__main__", is_module)  # type: ignore[attr-defined]
        except BaseException:
            sys.excepthook = _clean_excepthook(sys.excepthook)
            raise

    def _run_file(self, main: ModuleType) -> None:
        compiled = self.path.endswith(".pyc")
        loaders = importlib.machinery
        loader: Any = (loaders.SourcelessFileLoader if compiled else loaders.SourceFileLoader)("__main__", self.path)
        main.__dict__.update(__loader__=loader, __file__=self.path, __cached__=None)
        # dont_inherit: the `from __future__` imports of this file must not reach the script
        code = loader.get_code("__main__") if compiled else compile(self.source, self.path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def find_script(words: Iterable[str]) -> Script:
    """Find what ``python WORDS`` would run, without running or importing any of it.

    Example:
        >>> find_script(["-m", "json.tool", "--help"]).name
        'json.tool'
        >>> find_script(["/nowhere/train.py"])
        Traceback (most recent call last):
        hookscope.errors.UsageError: cannot open the script /nowhere/train.py: No such file or directory
    """
    words = tuple(words)
    if not words:
        raise UsageError("there is no script", do="name a file, or -m and a module")
    name = words[0]
    if name == "-m":
        if len(words) < 2 or not words[1]:
            raise UsageError("-m needs the name of a module")
        _check_module(words[1])
        return Script(words, "module", words[1])
    _check_no_launcher(words)
    path = name if os.path.isabs(name) else os.path.join(os.getcwd(), name)
    importer: Any = None if "\0" in path else pkgutil.get_importer(path)
    if importer is None:
        return Script(words, "file", name, path, _read(name, path))
    if importer.find_spec("__main__") is None:
        scripts = sorted(module.name + ".py" for module in pkgutil.iter_modules([path]) if not module.ispkg)
        exists = f"in it: {listed(scripts, 5)}" if scripts else ""
        raise UsageError(f"{name} has no __main__.py to run", exists, "name a script in it")
    return Script(words, "folder", name, path)


def _check_no_launcher(words: tuple[str, ...]) -> None:
    program = os.path.basename(words[0])
    is_python = program.rstrip("0123456789.") == "python"
    if not (is_python or program in _LAUNCHERS) or (words[0] == program and os.path.exists(program)):
        return
    start = next((n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words))
    launcher, script = words[:start], words[start:] or ("train.py",)
    do = f"hookscope watch -- {shlex.join(script)}"
    if not is_python or len(launcher) > 1:
        do = f"put hookscope inside: {shlex.join(launcher)} -m {do}"
    raise UsageError(f"{program} would run the script unwatched", do=do)


def _read(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        near = ""
        if os.path.isdir(folder := os.path.dirname(path)):
            near = nearest(os.path.basename(name), sorted(file for file in os.listdir(folder) if file.endswith(".py")))
        raise UsageError(f"cannot open the script {name}: {getattr(error, 'strerror', None) or error}", near) from error


def _check_module(name: str) -> None:
    """Raise an error if nothing has the first part of the name; Python itself says what is missing inside."""
    first, before = name.partition(".")[0], list(sys.path)
    if not sys.flags.safe_path:
        sys.path[:1] = [os.getcwd()]  # as ``python -m`` has it
    try:
        is_there = importlib.util.find_spec(first) is not None
    except (ImportError, ValueError):
        is_there = False
    finally:
        sys.path[:] = before
    if os.path.isfile(name):
        raise HookscopeError(f"no module named {name}", do="leave -m out: it is a file")
    if not is_there:
        here = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
        raise HookscopeError(f"no module named {name}", nearest(first, here))


def _clean_excepthook(hook: Callable[..., Any]) -> Callable[..., None]:
    """``hook`` without the frames down to `Script.run` and without all frames of hookscope."""

    def clean(error: BaseException | None, done: set[int]) -> None:
        if error is None or id(error) in done:
            return
        done.add(id(error))
        frames, trace = list[TracebackType](), error.__traceback__
        while trace is not None:
            frames, trace = [*frames, trace], trace.tb_next
        codes = [frame.tb_frame.f_code for frame in frames]
        start = 1 + max((n for n, code in enumerate(codes) if code is Script.run.__code__), default=-1)
        error.__traceback__ = None
        for frame in reversed(frames[start:]):
            if not frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
                frame.tb_next, error.__traceback__ = error.__traceback__, frame
        for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
            clean(other, done)

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        clean(error, set())
        hook(kind, error, error.__traceback__)

    return excepthook
