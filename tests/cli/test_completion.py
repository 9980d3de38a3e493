"""The script is the shell's own kind; the golden files of listing/completion hold the text of each."""

import shutil
import subprocess

import pytest

from hookscope.cli.commands.completion import SHELLS
from tests.cli.helpers import Run, one_error


def command_line(*words: str) -> list[str]:
    return ["completion", *words]


@pytest.mark.parametrize("shell", SHELLS)
def test_without_a_name_it_is_the_shell_in_use(run: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    status, script, errors = run()
    assert (status, script, errors) == run(shell) == (0, script, "")
    assert f"_HOOKSCOPE_COMPLETE={shell}_complete" in script


@pytest.mark.parametrize("value", ["/bin/csh", ""])
def test_an_unknown_shell_in_use_is_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SHELL", value)
    one_error(run(), 2, "name one of bash, zsh, fish")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_can_read_its_script(run: Run) -> None:
    script = run("bash")[1] + "\ncomplete -p hookscope"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert "_hookscope_completion" in done.stdout
