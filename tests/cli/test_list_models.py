"""The command list-models: golden files hold its rows, and tests/models/test_catalogue.py judges its facts."""

import json
from pathlib import Path

import pytest

from hookscope.cli.commands.list_models import COLUMNS
from hookscope.models import catalogue
from tests.cli.helpers import Run


def command_line(*words: str) -> list[str]:
    return ["list-models", "--format", "json", *words]


def test_the_model_that_ships_has_a_row(run: Run, shapes_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_from_torchvision", lambda: ())
    [row] = json.loads(run("shapes")[1])
    size = round(shapes_file.stat().st_size / 2**20, 3)
    values = ["shapes", "classification", 727626, size, None, 93.75, "shapes acc@1", ["shapes.safetensors"], []]
    assert list(row.items()) == list(zip(COLUMNS.flat, values, strict=True))
