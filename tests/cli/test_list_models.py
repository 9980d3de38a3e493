"""The command list-models; its facts are judged in tests/test_catalogue.py."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from hookscope.cli.commands.list_models import FIELDS, command
from hookscope.errors import ModelError, SelectionError
from hookscope.models import catalogue
from hookscope.models.bundled import BUNDLED
from hookscope.models.catalogue import ModelInfo
from hookscope.system import cache

ROOT = Path(__file__).parents[2]
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


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result


TABLE = """\
name                task                params  file_size  gflops  accuracy  metric             weights                 float_weights
alexnet             classification           -          -       -         -
quantized_resnet18  quantized       11,689,512      11.24   1.814     69.49  ImageNet-1K acc@1  IMAGENET1K_FBGEMM_V1,B  IMAGENET1K_V1
resnet18            classification  11,689,512      44.66   1.814     69.76  ImageNet-1K acc@1  IMAGENET1K_V1

3 models
"""  # noqa: E501


def test_table() -> None:
    assert run("--format", "table").stdout == TABLE


def test_the_model_that_ships_has_a_row(shapes_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "BUNDLED", BUNDLED)
    (row,) = json.loads(run("shapes", "--format", "json").stdout)
    assert row == {
        "name": "shapes",
        "task": "classification",
        "params": 727626,
        "file_size": round(shapes_file.stat().st_size / 2**20, 3),
        "gflops": None,
        "accuracy": 93.75,
        "metric": "shapes acc@1",
        "weights": ["shapes.safetensors"],
        "float_weights": [],
    }


def test_one_model_is_no_models() -> None:
    assert run("alex", "--format", "table").stdout.splitlines()[-1] == "1 model"


def test_tsv_is_the_default_in_a_pipe() -> None:
    lines = run("resnet*").stdout.splitlines()
    assert lines[0].split("\t") == FIELDS
    expected = "resnet18 classification 11689512 44.661 1.814 69.758 ImageNet-1K_acc@1 IMAGENET1K_V1"
    assert [field.replace(" ", "_") for field in lines[1].split("\t")] == [*expected.split(), ""]
    assert len(lines) == 2


def test_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(run("--format", "csv").stdout)))
    assert [row["name"] for row in rows] == ["alexnet", "quantized_resnet18", "resnet18"]
    assert (rows[0]["params"], rows[2]["params"]) == ("", "11689512")


@pytest.mark.parametrize("format", ["json", "ndjson"])
def test_json_has_numbers_and_lists(format: str) -> None:
    text = run("quantized", "--format", format).stdout
    (row,) = json.loads(text) if format == "json" else map(json.loads, text.splitlines())
    assert list(row) == FIELDS
    assert row["params"] == 11689512
    assert row["weights"] == ["IMAGENET1K_FBGEMM_V1", "B"]
    assert row["float_weights"] == ["IMAGENET1K_V1"]


def test_fields_are_the_documented_ones() -> None:
    assert " ".join(FIELDS) == "name task params file_size gflops accuracy metric weights float_weights"
    help_lines = run("--help").stdout.splitlines()
    for field in FIELDS:
        assert any(line.startswith(f"  {field}  ") for line in help_lines), field


def test_no_match_is_a_model_error_with_status_one() -> None:
    with pytest.raises(ModelError, match="no model matches 'resnet19'; nearest: resnet18") as caught:
        run("resnet19")
    assert caught.value.exit_code == 1


def test_a_bad_regular_expression_is_a_usage_error() -> None:
    with pytest.raises(SelectionError) as caught:
        run("re:(")
    assert caught.value.exit_code == 2


def test_an_unknown_format_is_a_usage_error() -> None:
    with pytest.raises(click.BadParameter):
        command.main(["--format", "xml"], standalone_mode=False)


def hookscope(*arguments: str, cache_home: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from hookscope.cli.commands.list_models import command\n"
        "try: command.main(sys.argv[1:], standalone_mode=False)\n"
        "finally: print('torch' in sys.modules, 'torchvision' in sys.modules, file=sys.stderr)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_home)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=environment, capture_output=True, check=True, text=True
    )


@pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME names the cache folder on Linux")
def test_the_second_time_it_answers_without_torch(tmp_path: Path) -> None:
    first = hookscope("--format", "json", cache_home=tmp_path)
    second = hookscope("--format", "json", cache_home=tmp_path)
    assert (first.stderr, second.stderr) == ("True True\n", "False False\n")
    assert first.stdout == second.stdout
    assert {"name": "resnet34", "params": 21797672}.items() <= {row["name"]: row for row in json.loads(second.stdout)}[
        "resnet34"
    ].items()
