"""Something is done right after an import, and the imported module knows nothing of it."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from hookscope.system.import_hook import after_import


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


def test_an_imported_module_is_not_awaited() -> None:
    calls: list[int] = []
    finders = list(sys.meta_path)
    after_import("pytest", lambda: calls.append(1))
    assert calls == [1] and sys.meta_path == finders


def test_looking_for_the_module_is_not_importing_it(folder: Path) -> None:
    (folder / "late_one.py").write_text("x = 1")
    calls: list[int] = []
    after_import("late_one", lambda: calls.append(1))
    assert importlib.util.find_spec("late_one") is not None and calls == []
    importlib.import_module("late_one")
    assert calls == [1]
