"""The public names: each there, documented, from one home, and loaded when it is first used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import hookscope

NAMES = sorted(set(hookscope.__all__) - {"__version__"})


def test_the_lists_of_names_agree() -> None:
    assert hookscope.__all__ == sorted(hookscope.__all__) == dir(hookscope)
    assert sorted(hookscope._HOMES) == NAMES
    (for_checkers,) = [
        node for node in ast.parse(Path(hookscope.__file__).read_text()).body if isinstance(node, ast.If)
    ]
    homes = {
        alias.name: (node.module or "").removeprefix("hookscope.")
        for node in for_checkers.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == hookscope._HOMES | {"VERSION": "_version"}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_what_its_home_defines_and_says_what_it_is(name: str) -> None:
    value = getattr(hookscope, name)
    home = import_module(f"hookscope.{hookscope._HOMES[name]}")
    assert value is getattr(home, name) and name in home.__all__
    assert inspect.getdoc(value)
    assert not isinstance(value, types.ModuleType)


def test_no_name_is_that_of_a_file_too() -> None:
    # `import hookscope.cam` would put the module in the place of a function of that name
    files = {path.stem for path in Path(hookscope.__file__).parent.glob("*.py")}
    assert not files & set(NAMES)


def test_names_that_are_none() -> None:
    with pytest.raises(AttributeError, match="module 'hookscope' has no attribute 'captrue'"):
        hookscope.captrue  # noqa: B018


def test_a_star_import_gives_all_of_them() -> None:
    code = "from hookscope import *; import hookscope; print(set(hookscope.__all__) <= set(globals()))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert answer.stdout == "True\n"
