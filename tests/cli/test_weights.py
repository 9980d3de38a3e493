"""The command weights, in process on a small model."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookscope.cli.commands.weights import FIELDS
from hookscope.drawing.png import read_provenance
from tests.cli.helpers import Run, files, one_error

NETS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 12, 3)
        self.fc = nn.Linear(12, 2)

def small():
    torch.manual_seed(0)
    print("made")
    net = Small()
    net.bn1.running_mean.fill_(0.5)
    return net

def flat():
    return nn.Sequential(nn.Linear(2, 2))
"""
NAMES = ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"]
NAMES += ["conv2.weight", "conv2.bias", "fc.weight", "fc.bias"]


NOTE = "Note: broken.pth holds 1 values that are NaN or infinite\n"


PRINTED = "made\n"


def command_line(*words: str, model: str = "nets.py:small") -> list[str]:
    return ["weights", model, *words]


@pytest.fixture
def broken(here: Path) -> str:
    """A checkpoint with one fault of each kind."""
    scope: dict[str, Any] = {}
    exec(NETS.replace('print("made")', "pass"), scope)
    state = scope["small"]().state_dict()
    state["conv1.weight"][2] = 0
    state["conv2.weight"][7] = 3 * state["conv2.weight"][1]
    state["fc.weight"][1, 3] = torch.nan
    state["bn1.running_var"][4] = 0
    torch.save(state, here / "broken.pth")
    return "broken.pth"


def test_json_holds_rows_and_findings(run: Run, broken: str) -> None:
    status, out, errors = run("--weights", broken, "--format", "json")
    assert (status, errors) == (0, NOTE)
    told = json.loads(out)
    assert (told["model"], told["weights"]) == ("nets.py:small", "broken.pth")
    rows = {row["name"]: row for row in told["parameters"]}
    assert list(rows) == NAMES
    assert list(rows["conv1.weight"])[: len(FIELDS)] == list(FIELDS)
    first = rows["conv1.weight"]
    assert (first["shape"], first["filters"], first["dead"], first["dead_filters"]) == ([6, 3, 5, 5], 6, 1, [2])
    assert first["zeros"] == pytest.approx(1 / 6)
    assert (rows["conv2.weight"]["duplicate"], rows["conv2.weight"]["duplicate_filters"]) == (1, [[1, 7]])
    variance = rows["bn1.running_var"]
    assert (variance["collapsed"], variance["collapsed_channels"], variance["updated"]) == (1, [4], True)
    assert (rows["fc.weight"]["nan"], rows["fc.weight"]["first_nonfinite"]) == (1, [1, 3])
    assert [(found["finding"], found["layer"]) for found in told["findings"]] == [
        ("non-finite", "fc.weight"),
        ("dead-filters", "conv1.weight"),
        ("duplicate-filters", "conv2.weight"),
        ("collapsed-variance", "bn1.running_var"),
    ]
    names = {name: row["findings"] for name, row in rows.items() if row["findings"]}
    assert names == {
        "conv1.weight": ["dead-filters"],
        "bn1.running_var": ["collapsed-variance"],
        "conv2.weight": ["duplicate-filters"],
        "fc.weight": ["non-finite"],
    }
    assert {row["weights"] for row in rows.values()} == {"broken.pth"}


def test_a_sound_model_has_no_findings(run: Run) -> None:
    status, out, errors = run("--format", "ndjson")
    assert (status, errors) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["name"] for row in rows] == NAMES
    assert {row["row"] for row in rows} == {"parameter"}


@pytest.mark.parametrize(("format", "between"), [("tsv", "\t"), ("csv", ",")])
def test_lines_have_the_same_columns(run: Run, broken: str, format: str, between: str) -> None:
    _, out, _ = run("--weights", broken, "--format", format)
    head, *lines = csv.reader(io.StringIO(out), delimiter=between)
    assert head == list(FIELDS)
    assert [line[0] for line in lines] == NAMES
    assert {len(line) for line in lines} == {len(FIELDS)}
    assert lines[0][head.index("findings")] == "dead-filters"
    assert lines[1][head.index("dead")] == ""


def test_a_table_ends_with_totals_and_findings(run: Run, broken: str) -> None:
    _, out, _ = run("--weights", broken, "--format", "table")
    assert out.split()[: len(FIELDS)] == list(FIELDS)
    values = 6 * 75 + 6 + 12 + 12 * 54 + 12 + 26
    for line in (
        f"8 parameters of 4 layers, {values:,} values, {100 * (75 + 6) / values:.3g} % of them 0",
        "NaN or Inf: 1 value",
        "1 BatchNorm: statistics updated in 1",
        "4 findings",
        "  non-finite          fc.weight: 1 NaN among 24 values, the first at [1, 3]",
    ):
        assert line in out.splitlines(), line


def test_layers_are_chosen_by_name(run: Run) -> None:
    _, out, _ = run("--layer", "conv2,re:^f", "--format", "ndjson")
    assert [json.loads(line)["layer"] for line in out.splitlines()] == ["conv2", "conv2", "fc", "fc"]


def test_thresholds(run: Run, broken: str) -> None:
    words = ["--weights", broken, "--layer", "conv1", "--format", "json"]
    row = json.loads(run(*words, "--dead-norm", "0.999")[1])["parameters"][0]
    assert row["dead"] > 1
    row = json.loads(run(*words, "--duplicate-cosine", "0.01")[1])["parameters"][0]
    assert row["duplicate"] > 1


@pytest.mark.parametrize("name", ["w.png", "w.svg", "w.pdf"])
def test_a_plot(run: Run, here: Path, broken: str, name: str) -> None:
    status, out, errors = run("--weights", broken, "--plot", name)
    assert (status, errors, len(out.splitlines())) == (0, NOTE, 11)
    assert files(here) == ["broken.pth", name]
    data = (here / name).read_bytes()
    assert data.startswith({"w.png": b"\x89PNG", "w.svg": b"<?xml", "w.pdf": b"%PDF"}[name])
    if name == "w.png":
        told = read_provenance(here / name)
        assert (told["model"], told["weights"], len(told["findings"])) == ("nets.py:small", "broken.pth", 4)
        with Image.open(here / name) as image:
            assert image.width > 600


def test_kernels(run: Run, here: Path) -> None:
    status, out, errors = run("--kernels", "k.png", "--format", "ndjson")
    assert (status, errors, len(out.splitlines())) == (0, "", 10)
    told = read_provenance(here / "k.png")
    assert [(part["layer"], part["drawn"]) for part in told["kernels"]] == [("conv1", "rgb"), ("conv2", "slices")]
    options = ["--channels", "1,3", "--columns", "1", "--cell", "30", "--cmap", "gray", "--layer", "conv2"]
    assert run("--kernels", "k.png", *options)[0] == 0
    told = read_provenance(here / "k.png")
    (part,) = told["kernels"]
    assert (part["layer"], part["channels"], part["columns"], part["zoom"]) == ("conv2", [1, 3], 1, 10)
    assert (told["cmap"], told["model"]) == ("gray", "nets.py:small")


def test_both_pictures_at_once(run: Run, here: Path) -> None:
    assert run("--plot", "w.png", "--kernels", "k.png")[0] == 0
    assert files(here) == ["k.png", "w.png"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--plot", "w.jpg"], 2, "cannot write w.jpg; plots are PNG, SVG or PDF files"),
        (["--plot", "w"], 2, "plots are PNG, SVG or PDF files"),
        (["--kernels", "k.svg"], 2, "kernels are drawn as PNG files"),
        (["--plot", "no/w.png"], 1, "its folder does not exist"),
        (["--kernels", "no/k.png"], 1, "its folder does not exist"),
        (["--plot", "a.png", "--kernels", "./a.png"], 2, "--plot and --kernels are both a.png"),
        (["--plot", "same.png", "--weights", "same.png"], 1, "it is the input same.png itself"),
        (["--dead-norm", "-1"], 2, "'-1' is not a number of at least 0"),
        (["--dead-norm", "nan"], 2, "'nan' is not a number of at least 0"),
        (["--duplicate-cosine", "1.5"], 2, "'1.5' is not a number of 0 to 1"),
        (["--channels", "1"], 2, "add --kernels FILE.png"),
        (["--kernels", "k.png", "--channels", "x"], 2, "bad channels 'x'"),
        (["--kernels", "k.png", "--cmap", "virids"], 2, "no colour map 'virids'"),
        (["--kernels", "k.png", "--channels", "99"], 1, "no channel 99"),
        (["--layer", "3"], 2, "--layer of weights takes names; indices count calls of a pass"),
        (["--layer", "conv1#1"], 2, "a weight has no calls"),
        (["--layer", "conv3"], 1, "no layer 'conv3' in Small; nearest: conv"),
        (["--layer", "fc", "--kernels", "k.png"], 1, "no convolution among the chosen layers"),
        (["--weights", "none.pth"], 1, "none.pth"),
    ],
)
def test_what_is_refused_is_one_line(run: Run, here: Path, words: list[str], status: int, message: str) -> None:
    (here / "same.png").write_bytes(b"weights")
    one_error(run(*words, "--format", "ndjson"), status, message)
    assert files(here) == ["same.png"]
    assert (here / "same.png").read_bytes() == b"weights"


def test_a_path_is_checked_before_the_model_is_looked_for(run: Run) -> None:
    assert "plots are" in run("--plot", "w.jpg", model="no_such_model")[2]
    assert "no model 'no_such_model'" in run("--plot", "w.png", model="no_such_model")[2]


def test_a_model_without_convolutions(run: Run) -> None:
    assert run("--plot", "w.png", model="nets.py:flat")[0] == 0
    assert "the model has no convolution" in run("--kernels", "k.png", model="nets.py:flat")[2]


@pytest.mark.skipif(os.name != "posix", reason="a device of POSIX")
def test_devices(run: Run) -> None:
    assert run("--plot", "/dev/null", "--kernels", "/dev/null")[0] == 0


def test_a_torchvision_model_with_random_weights(run: Run) -> None:
    status, out, errors = run("--weights", "none", "--seed", "1", "--format", "json", model="squeezenet1_1")
    assert (status, errors) == (0, "")
    told = json.loads(out)
    assert (told["weights"], told["findings"]) == ("random (seed 1)", [])
    assert len(told["parameters"]) == 52
