"""The command list-layers: whole outputs, every format, every kind of model, one line of error."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hookscope.cli.commands.list_layers import FIELDS, command
from hookscope.cli.main import main
from hookscope.errors import HookscopeError, InputError, LayerError
from hookscope.system import cache

ROOT = Path(__file__).parents[2]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(4, 4, 1)
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.aux = nn.Conv2d(4, 2, 1)
    def forward(self, x):
        x = self.relu(self.stem(x))
        return self.head(self.head(x))

def make():
    return Net()

def grey():
    return nn.Sequential(nn.Conv2d(1, 2, 3))

def pair():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)
        def forward(self, x):
            return {"one": self.conv(x), "two": x}
    return nn.Sequential(Pair())
"""

TABLE = """\
index  name  type    call  input_shape  output_shape  params  macs  note
    0  stem  Conv2d     0  1x3x8x10     1x4x8x10         108  8640  overwritten by relu
    1  head  Conv2d     0  1x4x8x10     1x4x8x10          20  1600  call 1 of 2
    2  head  Conv2d     1  1x4x8x10     1x4x8x10          20  1600  call 2 of 2
    -  aux   Conv2d     -  -            -                 10     0  did not run

3 Conv2d calls, 1 layer did not run
Conv2d: 138 parameters, 11,840 MACs
{model} at 8x10: 138 parameters, 11,840 MACs
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(cache, "folder", lambda: str(folder))


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return "net.py:make"


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result


def test_table(net: str) -> None:
    assert run(net, "--input-size", "8x10", "--format", "table").stdout == TABLE.format(model=net)


TSV = """\
index|name|type|call|input_shape|output_shape|params|macs|note
0|stem|Conv2d|0|1x3x8x10|1x4x8x10|108|8640|overwritten by relu
1|head|Conv2d|0|1x4x8x10|1x4x8x10|20|1600|call 1 of 2
2|head|Conv2d|1|1x4x8x10|1x4x8x10|20|1600|call 2 of 2
|aux|Conv2d||||10|0|did not run
""".replace("|", "\t")


def test_tsv_is_the_default_in_a_pipe(net: str) -> None:
    assert run(net, "--input-size", "8x10").stdout == TSV
    assert run(net, "--input-size", "8x10", "--format", "tsv").stdout == TSV


@pytest.mark.parametrize("format", ["json", "ndjson"])
def test_json_is_one_array_and_ndjson_a_row_a_line(net: str, format: str) -> None:
    text = run(net, "--input-size", "8x10", "--format", format).stdout
    rows = json.loads(text) if format == "json" else [json.loads(line) for line in text.splitlines()]
    assert [list(row) for row in rows] == [list(FIELDS)] * 4
    assert rows[0] == {
        "index": 0, "name": "stem", "type": "Conv2d", "call": 0, "input_shape": [1, 3, 8, 10],
        "output_shape": [1, 4, 8, 10], "params": 108, "macs": 8640, "note": "overwritten by relu",
    }  # fmt: skip
    assert rows[3] == {
        "index": None, "name": "aux", "type": "Conv2d", "call": None, "input_shape": None,
        "output_shape": None, "params": 10, "macs": 0, "note": "did not run",
    }  # fmt: skip


def test_csv(net: str) -> None:
    rows = list(csv.DictReader(io.StringIO(run(net, "--input-size", "8x10", "--format", "csv").stdout)))
    assert [(row["index"], row["output_shape"], row["note"]) for row in rows][2:] == [
        ("2", "1x4x8x10", "call 2 of 2"),
        ("", "", "did not run"),
    ]


def test_shapes_of_several_tensors(net: str) -> None:
    (row,) = json.loads(run("net.py:pair", "--type", "Pair", "--input-size", "4x5", "--format", "json").stdout)
    assert row["output_shape"] == {"one": [1, 2, 4, 5], "two": [1, 3, 4, 5]}


def test_the_model_that_ships_is_listed_without_its_weights_and_again_without_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hookscope.models.bundled.package_folder", lambda: "/nowhere/hookscope")
    first = run("shapes", "--format", "table").stdout
    lines = first.splitlines()
    assert lines[-3:] == [
        "26 Conv2d calls",
        "Conv2d: 727,626 parameters, 81,102,378 MACs",
        "shapes at 128x128: 727,626 parameters, 81,102,378 MACs",
    ]
    assert " ".join(lines[26].split()[:7]) == "25 classifier.1 Conv2d 0 1x512x7x7 1x10x7x7 5130"
    monkeypatch.setattr("hookscope.tracing.cached_summary._traced", lambda *words: pytest.fail("traced again"))
    assert run("shapes", "--format", "table").stdout == first


def test_types(net: str) -> None:
    def names(*words: str) -> list[str]:
        return [row["name"] for row in json.loads(run(net, "--format", "json", *words).stdout)]

    assert names("--type", "ReLU") == ["relu"]
    assert names("--type", "ReLU", "--type", "Conv2d") == ["stem", "relu", "head", "head", "aux"]
    assert names("--type", "all") == ["stem", "relu", "head", "head", "aux"]
    assert names("--type", "Net") == [""]


def test_a_factory_without_a_size_and_a_grey_one(net: str) -> None:
    assert json.loads(run(net, "--format", "json").stdout)[0]["input_shape"] == [1, 3, 224, 224]
    assert json.loads(run("net.py:grey", "--input-size", "9", "--format", "json").stdout)[0]["input_shape"] == [
        1,
        1,
        9,
        9,
    ]


def test_a_factory_in_a_package() -> None:
    rows = json.loads(run("torchvision.models:alexnet", "--input-size", "63", "--format", "json").stdout)
    assert [row["note"] for row in rows] == [f"overwritten by features.{at}" for at in (1, 4, 7, 9, 11)]


def test_resnet34_is_the_default() -> None:
    rows = [line.split("\t") for line in run("--format", "tsv").stdout.splitlines()]
    assert rows[0] == list(FIELDS)
    assert len(rows) == 37
    assert rows[31][:6] == ["30", "layer4.0.conv2", "Conv2d", "0", "1x512x7x7", "1x512x7x7"]
    table = run("--format", "table").stdout.splitlines()
    assert table[-3:] == [
        "36 Conv2d calls",
        "Conv2d: 21,267,648 parameters, 3,663,249,408 MACs",
        "resnet34 at 224x224: 21,797,672 parameters, 3,663,779,432 MACs",
    ]


def test_a_real_pass_is_told() -> None:
    table = run("ssdlite320_mobilenet_v3_large", "--format", "table").stdout
    assert table.splitlines()[-1].endswith(" MACs (by a real pass)")


def failure(kind: type[HookscopeError], *words: str) -> str:
    with pytest.raises(kind) as caught:
        CliRunner().invoke(command, words, catch_exceptions=False)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_errors(net: str) -> None:
    text = failure(LayerError, "squeezenet1_1", "--type", "BatchNorm2d")
    assert text.startswith("no layer of type BatchNorm2d; the model has ")
    assert "Conv2d (26)" in text and "ReLU (26)" in text
    assert failure(LayerError, "r3d_18", "--type", "Conv2d").startswith("no layer of type Conv2d; the model has ")
    assert failure(InputError, "alexnet", "--input-size", "20x20").startswith("AlexNet refuses an input of 1x3x20x20: ")


# --- whole processes --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("awk") is None or os.name != "posix", reason="a shell and awk")
def test_the_pipeline_of_the_manual(tmp_path: Path) -> None:
    program = tmp_path / "hookscope"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hookscope "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    pipeline = "hookscope list-layers googlenet --format tsv | awk -F'\\t' '$3==\"Conv2d\"{print $2}'"
    assert pipeline.replace("\\t", "\\\\t") in (ROOT / "hookscope/cli/commands/list_layers.py").read_text()
    done = subprocess.run(pipeline, shell=True, env=environment, capture_output=True, text=True, check=True)
    names = done.stdout.splitlines()
    assert names[:2] == ["conv1.conv", "conv2.conv"]
    assert names[-2:] == ["aux1.conv.conv", "aux2.conv.conv"]
    assert (len(names), done.stderr) == (59, "")


def test_the_second_call_imports_no_torch_and_says_the_same(tmp_path: Path) -> None:
    code = (
        "import sys, atexit; from hookscope.cli.main import main\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'torchvision' in sys.modules, file=sys.stderr))\n"
        "main(['list-layers', 'squeezenet1_1', '--type', 'all'])"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        for _ in range(2)
    )
    assert (first.returncode, first.stderr) == (0, "True True\n")
    assert (second.returncode, second.stderr) == (0, "False False\n")
    assert first.stdout == second.stdout != ""


def test_a_model_of_clips_is_listed_by_its_3d_convolutions() -> None:
    rows = json.loads(run("r3d_18", "--format", "json").output)
    assert len(rows) == 20 and all("Conv3d" in row["type"] or "Conv3D" in row["type"] for row in rows)


def test_what_a_factory_prints_does_not_reach_standard_output(
    net: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("loud.py").write_text(
        "import os, torch\nprint('import')\n"
        "def make():\n    print('build'); os.system('echo process')\n    return torch.nn.Conv2d(3, 1, 1)\n"
    )
    with pytest.raises(SystemExit) as caught:
        main(["list-layers", "loud.py:make", "--format", "json"])
    out, errors = capfd.readouterr()
    assert (caught.value.code, len(json.loads(out))) == (0, 1)
    assert all(word in errors for word in ("import", "build", "process"))
