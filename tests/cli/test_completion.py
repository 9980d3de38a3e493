"""The script is the shell's own kind and names hookscope."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from hookscope.cli.commands.completion import SHELLS
from hookscope.cli.main import main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["completion", *words])
    return caught.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "complete -o nosort -F _hookscope_completion hookscope"),
        ("zsh", "#compdef hookscope"),
        ("fish", "complete --no-files --command hookscope"),
    ],
)
def test_the_script_of_each_shell(capsys: pytest.CaptureFixture[str], shell: str, line: str) -> None:
    status, output, errors = printed(capsys, shell)
    assert (status, errors) == (0, "")
    assert line in output
    assert f"_HOOKSCOPE_COMPLETE={shell}_complete" in output


@pytest.mark.parametrize("shell", SHELLS)
def test_without_a_name_it_is_the_shell_in_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert printed(capsys)[1] == printed(capsys, shell)[1]


@pytest.mark.parametrize("value", ["/bin/csh", ""])
def test_an_unknown_shell_in_use_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SHELL", value)
    status, output, errors = printed(capsys)
    assert (status, output) == (2, "")
    assert "no shell given; name one of bash, zsh, fish;" in errors


def test_an_unknown_name_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "tcsh")[0] == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_can_read_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(capsys, "bash")[1] + "\ncomplete -p hookscope"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert "_hookscope_completion" in done.stdout
