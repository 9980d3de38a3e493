"""The README against the program: its help blocks are the real help, its examples run.

``python tests/test_readme.py`` writes the help blocks anew.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
HELP = re.compile(r"<!-- help: hookscope (.*?) -->\n(?:```text\n.*?```\n)?", re.DOTALL)
FENCE = re.compile(r"(?:<!-- (?P<mark>[\w ]+) -->\n)?```(?P<language>sh|python)\n(?P<code>.*?)```", re.DOTALL)


def real_help(arguments):
    # a process of its own: click remembers how a command was asked for help first
    answer = subprocess.run(
        [sys.executable, "-m", "hookscope", *arguments.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "102"},
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout


def with_real_help(text):
    return HELP.sub(
        lambda found: f"{found[0].splitlines()[0]}\n```text\n$ hookscope {found[1]}\n{real_help(found[1])}```\n", text
    )


def examples(language):
    found = [match for match in FENCE.finditer(README.read_text()) if match["language"] == language]
    return [match["code"] for match in found if match["mark"] is None]


def test_help_blocks_are_the_real_help():
    text = README.read_text()
    assert len(HELP.findall(text)) == 16
    assert text == with_real_help(text), "run: python tests/test_readme.py"


def test_every_command_is_in_the_readme():
    from hookscope.cli.main import COMMANDS

    helped = {words.split()[0] for words in HELP.findall(README.read_text())}
    assert set(COMMANDS) <= helped


@pytest.fixture
def newcomer(tmp_path):
    """A folder with the samples and a shell environment in which ``hookscope`` is the code under test."""
    shutil.copytree(ROOT / "samples", tmp_path / "samples")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "hookscope").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hookscope "$@"\n')
    (programs / "hookscope").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return tmp_path, {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


LINES = [line for block in examples("sh") for line in block.splitlines()]


@pytest.mark.parametrize("line", LINES)
def test_shell_examples_run(line, newcomer):
    folder, environment = newcomer
    before = set(folder.rglob("*.png"))
    answer = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert answer.returncode == 0, answer.stderr
    if "visualize" in line:
        made = set(folder.rglob("*.png")) - before
        assert made
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)
    else:
        assert answer.stdout.strip()


@pytest.mark.parametrize("number", range(len(examples("python"))))
def test_python_examples_run(number, newcomer):
    folder, environment = newcomer
    code = examples("python")[number]
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert answer.returncode == 0, answer.stderr


def test_the_fields_are_those_of_the_commands():
    from hookscope.cli.main import COMMANDS

    text = README.read_text()
    for name, module in COMMANDS.items():
        fields = getattr(import_module(module), "FIELDS", None)
        if fields is not None:
            name = {"watch": "watch --show"}.get(name, name)
            assert f"| `{name}` | `{' '.join(fields)}` |" in text
    others = {
        ("stats", "per-channel"): "CHANNEL_FIELDS",
        ("gradients", "parameters"): "PARAMETER_FIELDS",
        ("intervene", "classes"): "CLASS_FIELDS",
        ("intervene", "ablate-each"): "CHANNEL_FIELDS",
        ("trace", "events"): "EVENT_FIELDS",
    }
    for (name, option), fields in others.items():
        words = " ".join(getattr(import_module(COMMANDS[name]), fields))
        assert f"| `{name} --{option}` | `{words}` |" in text


if __name__ == "__main__":
    README.write_text(with_real_help(README.read_text()))
