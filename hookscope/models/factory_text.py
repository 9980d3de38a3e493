"""The MODEL text of a factory as a type, parsed once: ``file.py:make(width=2)``."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import Any

from hookscope.errors import UsageError

_FACTORY = re.compile(r"(?P<source>.+?):(?P<name>[^:()/\\]+)(?P<arguments>\(.*\))?", re.DOTALL)
_MODULE = re.compile(r"\w+(\.\w+)+")


@dataclass(frozen=True)
class FactoryText:
    """A factory in ``source``, a Python file or the dotted name of a module; without ``name`` the only one in it."""

    source: str
    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> FactoryText:
        """Read ``SOURCE``, ``SOURCE:NAME`` or ``SOURCE:NAME(ARGUMENTS)``; arguments are literals, and no code runs."""
        if text.endswith(".py") or ":" not in text:
            return cls(text)
        found = _FACTORY.fullmatch(text)
        if found is None:
            raise UsageError(f"cannot read '{text}'", do="write file.py:factory or 'file.py:factory(width=2)'")
        args, kwargs = _literals(found["arguments"] or "()", text)
        return cls(found["source"], found["name"], args, kwargs)


def is_module_name(text: str) -> bool:
    """Whether ``text`` is a dotted name whose first part can be imported; nothing is imported."""
    if not _MODULE.fullmatch(text):
        return False
    spec = PathFinder.find_spec(text.partition(".")[0], [*sys.path, os.getcwd()])
    return spec is not None and spec.loader is not None


def _literals(arguments: str, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of ``(2, width=[3, 4])``."""
    try:
        call = ast.parse(f"factory{arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        args = tuple(ast.literal_eval(argument) for argument in call.args)
        kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in kwargs or len(kwargs) < len(call.keywords):  # **mapping, or a name that comes twice
            raise ValueError
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        do = "give literals: numbers, 'text', True, None, lists, tuples, dictionaries"
        raise UsageError(f"cannot read the arguments of '{text}'", do=do) from None
    return args, {str(name): value for name, value in kwargs.items()}
