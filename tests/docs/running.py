"""Run the examples of a page in one folder, in this process: ``hookscope`` by its `main`, other programs by bash."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.docs.pages import ROOT
from tests.golden.recording import run_here, surroundings

WIDTH = "102"
_STATUS = re.compile(r"\s+# status (\d+)$")
_VARIABLES = re.compile(r"((?:HOOKSCOPE_\w+=\S+ )*)(?:python -m (?=hookscope))?(.*)", re.DOTALL)
_PIECES = re.compile(r"""'[^']*'|"[^"]*"|\$\([^)]*\)|&&|.""")


@contextlib.contextmanager
def newcomer() -> Iterator[Path]:
    """A new folder with the samples, without a network; ``hookscope`` and ``python`` are those under test."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve() / "work"
        shutil.copytree(ROOT / "samples", folder / "samples")
        programs = folder.parent / "bin"
        programs.mkdir()
        (programs / "hookscope").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hookscope "$@"\n')
        (programs / "hookscope").chmod(0o755)
        (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (programs / "python").chmod(0o755)
        modules = set(sys.modules)
        with surroundings(folder):
            os.environ |= {"COLUMNS": WIDTH, "NO_COLOR": "1"}
            os.environ["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
            try:
                yield folder
            finally:
                for name in sys.modules.keys() - modules:  # the modules of this folder
                    if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                        del sys.modules[name]


def run_line(line: str, terminal: bool = False) -> str:
    """What a shell line prints. Fails unless it ends with 0, or with N where the line ends with ``# status N``.

    With `terminal` hookscope prints as on a terminal, standard error too.
    """
    expected = _STATUS.search(line)
    line = line[: expected.start()] if expected else line
    printed = ""
    for part in _split(line, "&&"):
        status, data = 0, b""
        stages = _split(part, "|")
        for number, stage in enumerate(stages):
            status, data = _run_stage(stage.strip(), data, terminal and number == len(stages) - 1)
        printed += data.decode(errors="replace")
        assert status == (int(expected[1]) if expected else 0), f"{line!r} ended with {status}:\n{printed}"
    return printed


def run_python(code: str, name: str) -> str:
    """What a Python example prints."""
    torch.manual_seed(0)
    printed = io.StringIO()
    sys.path.insert(0, os.getcwd())
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
    finally:
        sys.path.remove(os.getcwd())
    return printed.getvalue()


def _run_stage(stage: str, data: bytes, terminal: bool) -> tuple[int, bytes]:
    if stage.startswith("python -c "):
        return 0, run_python(shlex.split(stage)[2], stage).encode()
    variables, stage = re.fullmatch(
        r"((?:HOOKSCOPE_\w+=\S+ )*)(?:python -m (?=hookscope))?(.*)", stage, re.DOTALL
    ).groups()
    program, _, rest = stage.partition(" ")
    if program != "hookscope":
        done = subprocess.run(["bash", "-c", stage], input=data, capture_output=True, check=False)
        return done.returncode, done.stdout
    target = re.search(r"\s>\s*([\w.-]+)$", rest)
    if target:
        rest, terminal = rest[: target.start()], False
    expanded = subprocess.run(["bash", "-c", f"printf '%s\\0' {rest}"], capture_output=True, check=True).stdout
    words = [word.decode() for word in expanded.split(b"\0")[:-1]] if rest else []  # printf prints one NUL for none
    values = dict(word.split("=", 1) for word in variables.split())
    with unittest.mock.patch.dict(os.environ, values):
        status, printed, errors = run_here(words, data, terminal, together=terminal)
    if status:
        sys.stderr.write(errors.decode())
    if target:
        Path(target[1]).write_bytes(printed)
        printed = b""
    return status, printed


def _split(line: str, operator: str) -> list[str]:
    """`line` cut at `operator`, but not inside quotes or ``$( )``."""
    parts = [""]
    for piece in _PIECES.findall(line):
        if piece == operator:
            parts.append("")
        else:
            parts[-1] += piece
    return parts
