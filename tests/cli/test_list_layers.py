"""The command list-layers: whole outputs, every kind of model, one line of error."""

import json
import sys
from pathlib import Path

import pytest

from hookscope.system import cache
from tests.cli.helpers import Run

NETS = """

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

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return {"one": self.conv(x), "two": x}

def pair():
    return nn.Sequential(Pair())

def volumes():
    return nn.Sequential(nn.Conv3d(4, 2, 3), nn.ReLU())

def grey():
    return nn.Sequential(nn.Conv2d(1, 2, 3))
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(cache, "folder", lambda: str(folder))


def command_line(
    *words: str, model: str = "nets.py:Net", format: str = "json", command: str = "list-layers"
) -> list[str]:
    return [command, *([model] if model else []), *words, "--format", format]


def printed(run: Run, *words: str, **more: str) -> str:
    status, out, errors = run(*words, **more)
    assert (status, errors) == (0, "")
    return out


TABLE = """\
index  name  call  input_shape  output_shape  params  macs  receptive_field  note
    0  stem     0  1x3x8x10     1x4x8x10         108  8640  3x3              overwritten by relu
    1  head     0  1x4x8x10     1x4x8x10          20  1600  3x3              call 1 of 2
    2  head     1  1x4x8x10     1x4x8x10          20  1600  3x3              call 2 of 2
    -  aux      -  -            -                 10     0  -                did not run

type: Conv2d
left out: stride; --format tsv has all
not listed: 1 call of other layers; --type all lists them
3 Conv2d calls, 1 layer did not run
Conv2d: 138 parameters, 11,840 MACs
nets.py:Net at 8x10: 138 parameters, 11,840 MACs
"""


def test_every_call_is_in_a_table_with_totals_and_in_one_array(run: Run) -> None:
    assert printed(run, "--input-size", "8x10", format="table") == TABLE
    first, *_, last = json.loads(printed(run, "--input-size", "8x10"))
    assert first == {
        "index": 0, "name": "stem", "type": "Conv2d", "call": 0, "order": 0, "input_shape": [1, 3, 8, 10],
        "output_shape": [1, 4, 8, 10], "params": 108, "macs": 8640, "receptive_field": [3, 3], "stride": [1, 1],
        "note": "overwritten by relu",
    }  # fmt: skip
    assert last == {
        "index": None, "name": "aux", "type": "Conv2d", "call": None, "order": None, "input_shape": None,
        "output_shape": None, "params": 10, "macs": 0, "receptive_field": None, "stride": None, "note": "did not run",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "words", "field", "value"),
    [
        ("nets.py:pair", ["--type", "Pair"], "output_shape", {"one": [1, 2, 224, 224], "two": [1, 3, 224, 224]}),
        ("nets.py:Net", [], "input_shape", [1, 3, 224, 224]),
        ("nets.py:grey", ["--input-size", "9"], "input_shape", [1, 1, 9, 9]),
        ("nets.py:volumes", ["--input-size", "7x8x9"], "output_shape", [1, 2, 5, 6, 7]),
        ("r3d_18", ["--input-size", "5x64x72"], "input_shape", [1, 3, 5, 64, 72]),
        ("torchvision.models:squeezenet1_1", ["--input-size", "63"], "note", "overwritten by features.1"),
        ("r3d_18", [], "type", "Conv3DSimple"),
    ],
)  # fmt: skip
def test_every_kind_of_model(run: Run, model: str, words: list[str], field: str, value: object) -> None:
    assert value in [row[field] for row in json.loads(printed(run, *words, model=model))]


@pytest.mark.parametrize("command", ["list-layers", "graph"])
def test_the_model_that_ships_is_listed_without_its_weights_and_again_without_torch(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("hookscope.models.names.package_folder", lambda: "/nowhere/hookscope")
    first = printed(run, command=command, model="shapes", format="table")
    assert "shapes at 128x128: 727,626 parameters, 81,102,378 MACs" in first
    monkeypatch.setattr("hookscope.tracing.cached_summary._traced", lambda *words: pytest.fail("traced again"))
    assert printed(run, command=command, model="shapes", format="table") == first


def test_the_factory_that_was_taken_is_named_and_what_it_prints_is_no_row(run: Run, here: Path) -> None:
    Path("loud.py").write_text(
        "import os, torch\nprint('import')\n"
        "def make():\n    os.system('echo process')\n    return torch.nn.Conv2d(3, 1, 1)\n"
    )
    status, out, errors = run(model="loud.py:make")
    assert (status, len(json.loads(out))) == (0, 1)
    assert "import" in errors and "process" in errors
    (here / "one.py").write_text("from nets import grey\n\n\ndef only():\n    return grey()\n")
    status, out, errors = run(model="one.py")
    assert (status, errors) == (0, "Note: one.py has one factory: one.py:only is taken\n") and json.loads(out)
    assert run(model="one.py:only") == (0, out, "")
    sys.modules.pop("nets")  # another test's folder has a file of that name


def test_a_graph_is_drawn_beside_the_tree(run: Run, tmp_path: Path) -> None:
    rows = json.loads(printed(run, "-o", str(tmp_path / "net.svg"), "--depth", "1", model="shapes", command="graph"))
    assert len(rows) == 3
    picture = (tmp_path / "net.svg").read_text()
    assert "<title>shapes at 128x128</title>" in picture and ">features<" in picture and ">classifier<" in picture
