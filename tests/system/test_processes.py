"""Something is done right after an import, and the module knows nothing of it; signals are held during a block."""

import importlib
import inspect
import signal
import sys
from pathlib import Path

import pytest

from hookscope.system.processes import after_import, signals_held


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in ("late_one", "late_two"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def test_the_function_is_called_once_after_the_whole_module(folder: Path) -> None:
    (folder / "late_one.py").write_text("import sys\nstarted = True\nloader = __loader__\nfinished = True\n")
    calls: list[object] = []
    finders = list(sys.meta_path)
    after_import("late_one", lambda: calls.append(sys.modules["late_one"].finished))
    import json  # noqa: F401  (there already)

    assert calls == [] and len(sys.meta_path) == len(finders) + 1
    module = importlib.import_module("late_one")
    assert calls == [True] and sys.meta_path == finders
    importlib.reload(module)
    assert calls == [True]


def test_the_loader_is_the_modules_own(folder: Path) -> None:
    (folder / "late_one.py").write_text("x = 1\n")
    (folder / "late_two.py").write_text("x = 1\n")
    after_import("late_one", lambda: None)
    watched, plain = importlib.import_module("late_one"), importlib.import_module("late_two")
    assert type(watched.__loader__) is type(plain.__loader__) and watched.__spec__.loader is watched.__loader__
    assert vars(watched.__loader__).keys() == vars(plain.__loader__).keys()
    assert inspect.getsource(watched) == "x = 1\n"


def test_an_import_that_fails_does_not_count(folder: Path) -> None:
    calls: list[int] = []
    after_import("late_one", lambda: calls.append(1))
    with pytest.raises(ModuleNotFoundError, match="late_one"):
        importlib.import_module("late_one")
    (folder / "late_one.py").write_text("1 / 0")
    importlib.invalidate_caches()
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("late_one")
    assert calls == []
    (folder / "late_one.py").write_text("x = 'mended'")
    importlib.invalidate_caches()
    assert importlib.import_module("late_one").x == "mended" and calls == [1]


def test_an_imported_module_is_not_awaited_and_looking_for_one_is_not_importing_it(folder: Path) -> None:
    (folder / "late_one.py").write_text("x = 1")
    calls: list[str] = []
    finders = list(sys.meta_path)
    after_import("pytest", lambda: calls.append("pytest"))
    after_import("late_one", lambda: calls.append("cancelled"))()
    assert calls == ["pytest"] and sys.meta_path == finders
    after_import("late_one", lambda: calls.append("late_one"))
    assert importlib.util.find_spec("late_one") is not None and calls == ["pytest"]
    importlib.import_module("late_one")
    assert calls == ["pytest", "late_one"]


@pytest.mark.parametrize("theirs_is_first", [True, False])
def test_an_import_hook_of_somebody_else_is_called_too(folder: Path, theirs_is_first: bool) -> None:
    (folder / "late_one.py").write_text("x = 1")
    calls: list[str] = []

    class Theirs:
        """Wraps ``exec_module`` of the loader, as libraries do that trace or patch others."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            if name != "late_one":
                return None
            at = sys.meta_path.index(self) + 1
            spec = next(spec for f in sys.meta_path[at:] if (spec := f.find_spec(name, path, target)) is not None)
            original = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (original(module), calls.append("theirs"))
            return spec

    if theirs_is_first:
        after_import("late_one", lambda: calls.append("ours"))
        sys.meta_path.insert(0, Theirs())
    else:
        sys.meta_path.insert(0, Theirs())
        after_import("late_one", lambda: calls.append("ours"))
    assert importlib.import_module("late_one").x == 1 and sorted(calls) == ["ours", "theirs"]


def test_signals_held_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    with signals_held():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ValueError, match="own"), signals_held():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is before
