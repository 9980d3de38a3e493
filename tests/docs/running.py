"""Run the examples of a page in one folder, in this process: ``hookscope`` by its `main`, other programs by bash."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hookscope.cli.main import main
from tests.docs.pages import ROOT
from tests.golden.recording import surroundings

WIDTH = "102"
_STATUS = re.compile(r"\s+# status (\d+)$")


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


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
            os.environ["COLUMNS"] = WIDTH
            os.environ["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
            try:
                yield folder
            finally:
                for name in sys.modules.keys() - modules:  # the modules of this folder
                    if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                        del sys.modules[name]


def run_line(line: str, terminal: bool = False, own_process: bool = False) -> str:
    """What a shell line prints. Fails unless it ends with 0, or with N where the line ends with ``# status N``.

    With `own_process` bash runs all of it. With `terminal` hookscope prints as on a terminal, standard error too.
    """
    expected = _STATUS.search(line)
    line = line[: expected.start()] if expected else line
    printed = ""
    for part in [line] if own_process else _split(line, "&&"):
        status, data = 0, b""
        stages = [f"set -o pipefail; {part}"] if own_process else _split(part, "|")
        for number, stage in enumerate(stages):
            status, data = _run_stage(stage.strip(), data, terminal and number == len(stages) - 1)
        printed += data.decode(errors="replace")
        wanted = int(expected[1]) if expected else 0
        assert status == wanted, f"{line!r} ended with {status}:\n{printed}"
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
    program, _, rest = stage.partition(" ")
    if program != "hookscope":
        done = subprocess.run(["bash", "-c", stage], input=data, capture_output=True, check=False)
        return done.returncode, done.stdout
    target = re.search(r"\s>\s*([\w.-]+)$", rest)
    if target:
        rest, terminal = rest[: target.start()], False
    expanded = subprocess.run(["bash", "-c", f"printf '%s\\0' {rest}"], capture_output=True, check=True).stdout
    status, printed = _run_hookscope([word.decode() for word in expanded.split(b"\0")[:-1]], data, terminal)
    if target:
        Path(target[1]).write_bytes(printed)
        printed = b""
    return status, printed


def _run_hookscope(words: list[str], stdin: bytes, terminal: bool) -> tuple[int, bytes]:
    out = io.BytesIO()
    stdout = (_Terminal if terminal else io.TextIOWrapper)(out, encoding="utf-8", write_through=True)
    stderr = io.TextIOWrapper(out if terminal else io.BytesIO(), encoding="utf-8", write_through=True)
    before = sys.stdin, list(sys.path), list(sys.argv)
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), _exit_handlers_run():
            try:
                main(words)
            except SystemExit as end:
                status = end.code
    finally:
        sys.stdin, sys.path[:], sys.argv[:] = before
    stdout.flush()
    stderr.flush()
    if status and not terminal:
        sys.stderr.write(stderr.buffer.getvalue().decode())
    assert isinstance(status, int)
    return status, out.getvalue()


@contextlib.contextmanager
def _exit_handlers_run() -> Iterator[None]:
    """Run the exit handlers that are registered in the block at its end, as those of a process."""
    handlers: list[Callable[[], None]] = []
    with unittest.mock.patch("atexit.register", handlers.append):
        yield
    for handler in reversed(handlers):
        handler()


def _split(line: str, operator: str) -> list[str]:
    """`line` cut at `operator`, but not inside quotes or ``$( )``."""
    parts, quote, depth, start, place = [], "", 0, 0, 0
    while place < len(line):
        letter = line[place]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif not depth and line.startswith(operator, place):
            parts.append(line[start:place])
            start = place = place + len(operator)
            continue
        place += 1
    return [*parts, line[start:]]
