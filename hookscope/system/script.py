"""Run a script or a module as Python itself would: as ``__main__``, with its own words, path and traceback."""

from __future__ import annotations

import importlib.machinery
import os
import pkgutil
import runpy
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from types import CodeType, ModuleType, TracebackType
from typing import Any, Literal

from hookscope.errors import HookscopeError, UsageError, nearest
from hookscope.findings import listed

# What starts Python by itself: it would start one in which nobody looks.
_LAUNCHERS = ("torchrun", "accelerate")


@dataclass(frozen=True)
class Script:
    """What `find_script` has found, ready to run.

    Attributes:
        words: What stands on the command line: the file, or ``-m`` and the module, and the arguments.
        kind: ``file``, ``folder`` (a zip file too) with a ``__main__.py``, or ``module``.
        name: The file or folder as it was typed, or the name of the module.
        path: Absolute, of a file or folder; empty for a module.
        source: Of a file, as it was read; so that it may be a pipe.
    """

    words: tuple[str, ...]
    kind: Literal["file", "folder", "module"]
    name: str
    path: str = ""
    source: bytes = field(default=b"", repr=False)

    def run(self, hidden: Collection[str] = (), ends: Collection[str] = ()) -> None:
        """Run it in this process, which is its process from here on: nothing is put back afterwards.

        ``sys.argv``, ``sys.path[0]``, ``sys.modules["__main__"]`` and what is in it are as with ``python SCRIPT``.
        Whatever the script raises is raised, and `sys.excepthook` is made to show it without the frames above it.

        Args:
            hidden: Files of Python whose frames are left out of that traceback too, wherever they are in it.
            ends: Files at whose frames it ends, as if what they call were part of the line that led to them.
        """
        arguments = self.words[2 if self.kind == "module" else 1 :]
        sys.argv = ["-m" if self.kind == "module" else self.name, *arguments]
        self._set_path()
        main = sys.modules["__main__"] = _fresh_main()
        try:
            if self.kind == "file":
                self._run_file(main)
            else:
                # What `python -m` and `python FOLDER` call: it runs the code in the `__main__` that is there, and
                # tells what cannot be run as Python does.
                _run_as_main(self.name if self.kind == "module" else "__main__", self.kind == "module")
        except BaseException:
            sys.excepthook = _Shown(sys.excepthook, Script.run.__code__, frozenset(hidden), frozenset(ends))
            raise

    def _set_path(self) -> None:
        if self.kind == "folder":
            sys.path[0 : 0 if sys.flags.safe_path else 1] = [self.path]
        elif not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if self.kind == "module" else os.path.dirname(os.path.realpath(self.path))

    def _run_file(self, main: ModuleType) -> None:
        loader: Any = importlib.machinery.SourceFileLoader("__main__", self.path)
        if self.path.endswith(".pyc"):
            loader = importlib.machinery.SourcelessFileLoader("__main__", self.path)
        main.__dict__.update(__loader__=loader, __file__=self.path, __cached__=None)
        if self.path.endswith(".pyc"):
            code = loader.get_code("__main__")
        else:  # dont_inherit: what this file imports from __future__ is nothing to the script
            code = compile(self.source, self.path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def find_script(words: Sequence[str]) -> Script:
    """Find what ``python WORDS`` would run; nothing of it is run or imported.

    Args:
        words: A file, or a folder or zip file with a ``__main__.py``, or ``-m`` and the name of a module; then the
            arguments, which are the script's own, whatever they look like.

    Raises:
        UsageError: the file cannot be opened, there is no ``__main__.py``, or it is Python that would be run.
        HookscopeError: there is no module of that name.

    Example:
        >>> find_script(["-m", "json.tool", "--help"]).name
        'json.tool'
        >>> find_script(["/nowhere/train.py"])
        Traceback (most recent call last):
        hookscope.errors.UsageError: cannot open the script /nowhere/train.py: No such file or directory
    """
    if not words:
        raise UsageError("there is no script", do="name a file, or -m and a module")
    first = words[0]
    if first == "-m":
        if len(words) < 2 or not words[1]:
            raise UsageError("-m lacks the name of a module")
        _check_module(words[1])
        return Script(tuple(words), "module", words[1])
    _check_no_launcher(words)
    path = first if os.path.isabs(first) else os.path.join(os.getcwd(), first)
    if "\0" not in path and pkgutil.get_importer(path) is not None:
        _check_main(first, path)
        return Script(tuple(words), "folder", first, path)
    return Script(tuple(words), "file", first, path, _read(first, path))


def _check_no_launcher(words: Sequence[str]) -> None:
    first = os.path.basename(words[0])
    is_python = first.rstrip("0123456789.") == "python"
    if not (is_python or first in _LAUNCHERS) or (words[0] == first and os.path.exists(first)):
        return
    at = next((n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words))
    before, script = words[:at], words[at:] or ["train.py"]
    if is_python and len(before) == 1:
        raise UsageError(f"{first} would run the script unwatched", do=f"hookscope watch -- {shlex.join(script)}")
    do = f"{shlex.join(before)} -m hookscope watch -- {shlex.join(script)}"
    raise UsageError(f"{first} would run the script unwatched", do=f"put hookscope inside: {do}")


def _read(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot open the script {name}: {why}", _near(name, path)) from error


def _near(name: str, path: str) -> str:
    try:
        beside = os.listdir(os.path.dirname(path))
    except (OSError, ValueError):
        return ""
    return nearest(os.path.basename(name), sorted(entry for entry in beside if entry.endswith(".py")))


def _check_main(name: str, path: str) -> None:
    importer: Any = pkgutil.get_importer(path)
    if importer.find_spec("__main__") is None:
        scripts = sorted(module.name + ".py" for module in pkgutil.iter_modules([path]) if not module.ispkg)
        exists = f"in it: {listed(scripts, 5)}" if scripts else ""
        raise UsageError(f"{name} has no __main__.py to run", exists, "name a script in it")


def _check_module(name: str) -> None:
    """See to it that there is such a module, without importing the packages that it is in."""
    try:
        with _path_of_a_module():
            spec, search = _look_up(name)
            is_package = spec is not None and spec.submodule_search_locations is not None
            if is_package:
                spec = _find(f"{name}.__main__", spec.submodule_search_locations)
            there = [module.name for module in pkgutil.iter_modules(list(search))]
    except KeyError:  # a namespace package looks for its parent among what has been imported; Python will tell
        return
    except (ImportError, ValueError) as error:
        raise HookscopeError(f"no module named {name}: {error}") from error
    if spec is not None:
        return
    if is_package:
        raise HookscopeError(f"{name} is a package without a module __main__", do=f"name one: {name}.train")
    if os.path.isfile(name):
        raise HookscopeError(f"no module named {name}", do="leave -m out: it is a file")
    raise HookscopeError(f"no module named {name}", nearest(name.rpartition(".")[2], there))


def _look_up(name: str) -> tuple[Any, Iterable[str]]:
    """The spec of a module, None where there is none, and the folders where it or the missing one should be."""
    search: Iterable[str] | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:number]), search)
        if spec is None or number == len(parts):
            return spec, [os.getcwd()] if search is None else search
        if spec.submodule_search_locations is None:
            return None, ()
        search = spec.submodule_search_locations
    raise AssertionError("a name has at least one part")


def _find(name: str, search: Iterable[str] | None) -> Any:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, search)  # type: ignore[arg-type]
        if spec is not None:
            return spec
    return None


@contextmanager
def _path_of_a_module() -> Iterator[None]:
    """`sys.path` as ``python -m`` has it, in which the current folder is the first."""
    kept = list(sys.path)
    if not sys.flags.safe_path:
        sys.path[:1] = [os.getcwd()]
    try:
        yield
    finally:
        sys.path[:] = kept


def _fresh_main() -> ModuleType:
    """A ``__main__`` as the interpreter makes it before it runs anything, its names in the same order."""
    import builtins

    main = ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    main.__dict__.update(__builtins__=builtins)
    return main


def _run_as_main(name: str, is_module: bool) -> None:
    runpy._run_module_as_main(name, is_module)  # type: ignore[attr-defined]


class _Shown:
    """An excepthook that hands on to another what was raised, without frames that the script has nothing to do with."""

    def __init__(self, hook: Any, above: CodeType, hidden: frozenset[str], ends: frozenset[str]) -> None:
        self._hook = hook
        self._above = above
        self._hidden = hidden
        self._ends = ends

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._clean(error, set())
        self._hook(kind, error, error.__traceback__)

    def _clean(self, error: BaseException | None, seen: set[int]) -> None:
        if error is None or id(error) in seen:
            return
        seen.add(id(error))
        error.__traceback__ = self._cleaned(error.__traceback__)
        for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
            self._clean(other, seen)

    def _cleaned(self, trace: TracebackType | None) -> TracebackType | None:
        """``trace`` below the last frame of `Script.run`; of what is above it nothing is the script's."""
        steps = list(_steps(trace))
        first = 1 + max((n for n, step in enumerate(steps) if step.tb_frame.f_code is self._above), default=-1)
        below = takewhile(lambda step: _file(step) not in self._ends, steps[first:])
        hidden = self._hidden | {self._above.co_filename}
        cleaned = None
        for step in reversed([step for step in below if _file(step) not in hidden]):
            step.tb_next, cleaned = cleaned, step
        return cleaned


def _file(step: TracebackType) -> str:
    return step.tb_frame.f_code.co_filename


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
