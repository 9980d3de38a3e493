"""What the tests of several commands call."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hookscope

ROOT = Path(hookscope.__file__).parents[1]
POSIX = pytest.mark.skipif(os.name != "posix", reason="pipes, signals and terminals of POSIX")
GIVEN = ("nets.py", "cat.jpg", "dog.png", "names.txt")

Run = Callable[..., tuple[int, str, str]]
"""The fixture ``run``: words of a command -> status, output, errors."""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def rows(text: str) -> list[dict[str, Any]]:
    """The rows of NDJSON without NaN and Infinity."""
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def as_json(run: Run, *words: str, **more: Any) -> Any:
    """What a command that succeeds prints as JSON without NaN and Infinity."""
    status, out, errors = run(*words, "--format", "json", **more)
    assert status == 0, errors
    return json.loads(out, parse_constant=pytest.fail)


def files(folder: Path) -> list[str]:
    """The files in a folder and below it that a command wrote."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if "__pycache__" not in name and name not in GIVEN)


def one_error(outcome: tuple[int, str, str], status: int, message: str) -> None:
    """Check that a command failed with one line, in which the parts of ``message`` (``...`` between them) stand."""
    ended, out, errors = outcome
    assert (ended, out, errors.count("\n")) == (status, "", 1), errors
    assert errors.startswith("Error: ") and all(part in errors for part in message.split("..."))


def start(*words: str, code: str = "", **more: Any) -> subprocess.Popen[Any]:
    """Start hookscope, or a program with ``code``, as a process."""
    program = ["-c", code] if code else ["-m", "hookscope"]
    return subprocess.Popen([sys.executable, *program, *words], env={**os.environ, "PYTHONPATH": str(ROOT)}, **more)
