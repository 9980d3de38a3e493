"""The notebook of samples/, run cell by cell in IPython as Jupyter runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

SAMPLES = Path(__file__).parents[1] / "samples"
NOTEBOOK = json.loads((SAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_of_format_4_and_holds_no_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


def test_every_cell_of_the_notebook_shows_something_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.chdir(SAMPLES)
    shell = interactive.InteractiveShell(user_ns={})
    shell.history_manager.enabled = False
    for cell in CODE:
        source = "".join(cell["source"])
        ran = shell.run_cell(source)
        ran.raise_error()
        assert ran.result is not None, source
        data: dict[str, Any] = shell.display_formatter.format(ran.result)[0]
        shown = data.get("text/html") or data.get("image/png")
        assert shown and len(data["text/plain"].splitlines()) <= 16, source
        assert isinstance(ran.result, Image.Image) or len(shown) < 100_000, source
