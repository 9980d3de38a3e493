"""The command list-models on a table of three; its facts are judged in tests/models/test_catalogue.py."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from hookscope.cli.commands.list_models import COLUMNS
from hookscope.models import catalogue
from hookscope.models.bundled import BUNDLED
from hookscope.models.catalogue import ModelInfo
from hookscope.system import cache
from tests.cli.helpers import Run

MODELS = (
    ModelInfo("alexnet", "classification"),
    ModelInfo(
        *("quantized_resnet18", "quantized", 11689512, 11.238, 1.814, 69.494, "ImageNet-1K acc@1"),
        *(("IMAGENET1K_FBGEMM_V1", "B"), ("IMAGENET1K_V1",)),
    ),
    ModelInfo("resnet18", "classification", 11689512, 44.661, 1.814, 69.758, "ImageNet-1K acc@1", ("IMAGENET1K_V1",)),
)


@pytest.fixture(autouse=True)
def three_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: str(tmp_path))
    monkeypatch.setattr(catalogue, "_from_torchvision", lambda: MODELS)
    monkeypatch.setattr(catalogue, "BUNDLED", {})
    monkeypatch.setattr(catalogue.EfficientNetLiteSource, "names", lambda: ())


def command_line(*words: str, format: str = "json") -> list[str]:
    return ["list-models", "--format", format, *words]


TABLE = """\
name                task                params  file_size  gflops  accuracy  metric
alexnet             classification           -          -       -         -
quantized_resnet18  quantized       11,689,512      11.24   1.814     69.49  ImageNet-1K acc@1
resnet18            classification  11,689,512      44.66   1.814     69.76  ImageNet-1K acc@1

left out: weights, float_weights; --format tsv has all
3 models
"""


def test_each_format_has_what_is_known(run: Run) -> None:
    assert run(format="table") == (0, TABLE, "")
    assert run("alex", format="table")[1].splitlines()[-1] == "1 model"
    rows = list(csv.DictReader(io.StringIO(run(format="csv")[1])))
    assert [(row["name"], row["params"]) for row in rows][::2] == [("alexnet", ""), ("resnet18", "11689512")]
    [row] = json.loads(run("quantized")[1])
    assert list(row) == list(COLUMNS.flat)
    assert (row["params"], row["weights"]) == (11689512, ["IMAGENET1K_FBGEMM_V1", "B"])
    lines = run("--help")[1].splitlines()
    assert [field for field in COLUMNS.flat if not any(line.startswith(f"    {field}  ") for line in lines)] == []


def test_the_model_that_ships_has_a_row(run: Run, shapes_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "BUNDLED", BUNDLED)
    [row] = json.loads(run("shapes")[1])
    size = round(shapes_file.stat().st_size / 2**20, 3)
    values = ["shapes", "classification", 727626, size, None, 93.75, "shapes acc@1", ["shapes.safetensors"], []]
    assert list(row.items()) == list(zip(COLUMNS.flat, values, strict=True))
