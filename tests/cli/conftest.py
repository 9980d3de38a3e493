"""The folder in which a command is tested, and the command line in this process."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hookscope.cli.main import main
from tests.cli.helpers import Run

_SAID_ELSEWHERE = r"^(wrote |Note: nets\.py:\S+ loads no trained weights).*\n"  # `test_written.py`, `test_predict.py`
NETS = Path(__file__).with_name("nets.py").read_text()


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: nets.py ends with ``NETS`` of the test file; ``PICTURES`` are noise, of size 0 text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS + getattr(request.module, "NETS", ""))
    for name, size in getattr(request.module, "PICTURES", {}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if size:
            Image.effect_noise(size, 80).convert("RGB").save(tmp_path / name)
        else:
            (tmp_path / name).write_text("no picture")
    return tmp_path


@pytest.fixture
def run(request: pytest.FixtureRequest, here: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``command_line(*words)`` of the test file; other tests are of the lines that are cut off here."""

    def run(*words: str, **more: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(request.module.command_line(*words, **more))
        assert isinstance(caught.value.code, int)
        out, errors = capfd.readouterr()
        return caught.value.code, out, re.sub(_SAID_ELSEWHERE, "", errors, flags=re.MULTILINE)

    return run
