"""The command trace, in process on small models."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hookscope.cli.output.trace_rows import FIELDS
from tests.cli.helpers import Run, one_error

NETS = """
import torch
from torch import nn

def ones():
    net = nn.Sequential(nn.Conv2d(3, 1, 2, bias=False), nn.ReLU(inplace=True), nn.Flatten(),
                        nn.Linear(4, 2, bias=False))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    print("made")
    return net

class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.split, self.join = Split(), Join()
        self.idle = nn.Tanh()

    def forward(self, x):
        return self.join(**self.split(x))

class Split(nn.Module):
    def forward(self, x):
        return {"kept": x * 2, "counted": (x > 0.5).sum(), "cut": x.detach()}

class Join(nn.Module):
    def forward(self, kept, counted, cut):
        return kept / (cut - cut)

class Aside(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Tanh(), nn.Tanh()

    def forward(self, x):
        return self.main(x) + self.side(x).detach()

def aside():
    return Aside()

class Blind(nn.Module):
    def forward(self, x):
        return x.detach()

def blind():
    return Blind()

def parts():
    return Parts()

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ReLU()

    def forward(self, x):
        self.inner(x)
        raise RuntimeError("no way on")

def broken():
    return Broken()
"""
ONES = ("nets.py:ones", "tiny.png", "--preprocess", "none")


@pytest.fixture
def here(here: Path) -> Path:
    (here / "names.txt").write_text("cat\ndog\n")
    picture = Image.new("RGB", (3, 3))  # red 1 in the upper row, green 1 in the middle of it
    picture.putdata([(255, 0, 0), (255, 255, 0), (255, 0, 0)] + [(0, 0, 0)] * 6)
    picture.save(here / "tiny.png")
    return here


PICTURES = {"cat.png": (40, 32)}
PRINTED = "made\n"


def command_line(*words: str) -> list[str]:
    return ["trace", *words, "--device", "cpu"]


def rows(run: Run, *words: str) -> list[dict[str, Any]]:
    status, out, _ = run(*words, "--format", "json")
    assert status == 0
    return json.loads(out)


# the windows of 2x2 on three channels of ones: 2 red and 1 green above, 0 below
CONVOLVED = [[[[3, 3], [0, 0]]]]


def test_the_numbers_are_those_one_gets_on_paper(run: Run) -> None:
    found = rows(run, *ONES, "--values")
    assert list(found[0]) == list(FIELDS)
    red, green, none = [[1, 1, 1], [0] * 3, [0] * 3], [[0, 1, 0], [0] * 3, [0] * 3], [[0] * 3] * 3
    assert found[0]["input_values"] == [[red, green, none]]
    assert [row["output_values"] for row in found] == [CONVOLVED, CONVOLVED, [[3, 3, 0, 0]], [[6, 6]]]
    assert [row["input_values"] for row in found[1:]] == [CONVOLVED, CONVOLVED, [[3, 3, 0, 0]]]
    conv = {name: found[0][name] for name in FIELDS[:13]}
    assert conv == {
        "index": 0, "name": "0", "type": "Conv2d", "call": 0,
        "input_shape": [1, 3, 3, 3], "input_dtype": "float32", "input_min": 0, "input_max": 1,
        "output_shape": [1, 1, 2, 2], "output_dtype": "float32", "output_min": 0, "output_max": 3,
        "output_nonfinite": 0,
    }  # fmt: skip


def test_events_and_gradients_on_paper(run: Run) -> None:
    found = rows(run, *ONES, "--values", "--events", "--target", "1")
    assert [(row["number"], row["event"], row["name"], row["depth"]) for row in found] == [
        (0, "pre-hook", "", 0),
        (1, "pre-hook", "0", 1), (2, "forward", "0", 1),
        (3, "pre-hook", "1", 1), (4, "forward", "1", 1),
        (5, "pre-hook", "2", 1), (6, "forward", "2", 1),
        (7, "pre-hook", "3", 1), (8, "forward", "3", 1),
        (9, "forward", "", 0),
        (10, "backward", "", 0),
        (11, "backward", "3", 1), (12, "backward", "2", 1), (13, "backward", "1", 1), (14, "backward", "0", 1),
    ]  # fmt: skip
    # the score of class 1 is the sum of four values; the ReLU lets through what is above 0
    gradients = [row["values"] for row in found[10:]]
    assert gradients == [[[0, 1]], [[0, 1]], [[1, 1, 1, 1]], [[[[1, 1], [1, 1]]]], [[[[1, 1], [0, 0]]]]]
    assert (found[14]["min"], found[14]["max"], found[14]["shape"]) == (0, 1, [1, 1, 2, 2])


def test_a_table_of_values(run: Run) -> None:
    status, out, errors = run(*ONES, "--values", "--most", "4", "--format", "table", "--layer", "0,3")
    assert status == 0
    assert out == (
        "index  name  type    input_shape  input_min  input_max  output_shape  output_min  output_max\n"
        "    0  0     Conv2d  1x3x3x3              0          1  1x1x2x2                0           3\n"
        "    3  3     Linear  1x4                  0          3  1x2                    6           6\n"
        "\n"
        "0 Conv2d output  1x1x2x2\n"
        "  [[[[3. 3.]\n"
        "     [0. 0.]]]]\n"
        "3 Linear input  1x4\n"
        "  [[3. 3. 0. 0.]]\n"
        "3 Linear output  1x2\n"
        "  [[6. 6.]]\n"
        "\n"
        "nets.py:ones, weights from factory (seed 0): 2 calls\n"
    )
    assert errors == "Note: 1 tensor of more than 4 values left out; --most shows larger tensors\n"


def test_a_table_of_events_shows_nesting(run: Run) -> None:
    _, out, _ = run(*ONES, "--events", "--format", "table", "--categories", "names.txt")
    lines = out.splitlines()
    assert lines[0].split() == ["number", "event", "name", "type", "shape", "min", "max"]
    assert lines[1] == "     0  pre-hook  (model)  Sequential  1x3x3x3    0    1"
    assert lines[2] == "     1  pre-hook    0      Conv2d      1x3x3x3    0    1"
    assert lines[-2:] == [
        "nets.py:ones, weights from factory (seed 0): 5 calls, 15 events",
        "backward from score of class 0 cat: 6",
    ]


@pytest.mark.parametrize("words", [(), ("--events",)])
def test_tables_fit_a_terminal(run: Run, words: tuple[str, ...]) -> None:
    _, out, _ = run("resnet18", "cat.png", "--weights", "none", "--input-size", "32", "--format", "table", *words)
    assert max(map(len, out.splitlines())) <= 100
    assert "layer1.0.relu#1" in out


@pytest.mark.parametrize(("format", "between"), [("tsv", "\t"), ("csv", ",")])
def test_lines_hold_values_as_json(run: Run, format: str, between: str) -> None:
    _, out, _ = run(*ONES, "--format", format)
    head, *lines = csv.reader(io.StringIO(out), delimiter=between)
    assert head == list(FIELDS[:14])
    assert lines[3][:6] == ["3", "3", "Linear", "0", "1x4", "float32"]
    _, out, _ = run(*ONES, "--format", format, "--values", "--most", "4")
    head, *lines = csv.reader(io.StringIO(out), delimiter=between)
    assert head == list(FIELDS)
    assert [line[-2:] for line in lines[::3]] == [["null", json.dumps([[[[3.0, 3.0], [0.0, 0.0]]]])],
        ["[[3.0, 3.0, 0.0, 0.0]]", "[[6.0, 6.0]]"]]  # fmt: skip


def test_parts_types_and_values_that_are_not_finite(run: Run) -> None:
    status, out, errors = run("nets.py:parts", "tiny.png", "--preprocess", "none", "--values", "--format", "ndjson")
    assert status == 0
    split, join = map(json.loads, out.splitlines())
    assert split["output_shape"] == {"kept": [1, 3, 3, 3], "counted": [], "cut": [1, 3, 3, 3]}
    assert split["output_dtype"] == {"kept": "float32", "counted": "int64", "cut": "float32"}
    assert split["output_max"] == {"kept": 2, "counted": 4, "cut": 1}
    assert split["output_values"]["counted"] == 4
    assert join["input_shape"] == split["output_shape"]
    # 2 / 0 is Inf, 0 / 0 is NaN: nothing is finite
    assert (join["output_nonfinite"], join["output_min"], join["output_max"]) == (27, None, None)
    assert join["output_values"][0][2] == [[None] * 3] * 3
    assert errors == "Note: 1 chosen layer did not run: idle\n"


def test_a_table_of_parts_is_short_and_says_what_is_unusual(run: Run) -> None:
    _, out, _ = run("nets.py:parts", "tiny.png", "--preprocess", "none", "--format", "table", "--events")
    lines = out.splitlines()
    assert lines[0].split()[-4:] == ["dtype", "min", "max", "nonfinite"]
    forward = next(line for line in lines if "forward" in line and "split" in line)
    assert forward.split()[3:] == ["Split", "kept:1x3x3x3", "+2", "more", "float32", "int64", "0", "4", "0"]
    join = next(line for line in lines if "forward" in line and "join" in line)
    assert join.split()[-3:] == ["-", "-", "27"]


def test_without_classes_the_mean_square_is_differentiated(run: Run) -> None:
    words = ("nets.py:parts", "tiny.png", "--preprocess", "none", "--events", "--format", "table")
    _, out, errors = run(*words)
    assert "backward from mean square of the output: nan" in out
    assert errors.endswith("idle\n")
    status, _, errors = run(*words, "--target", "0")
    assert (status, "no score for each class" in errors) == (1, True)


def test_calls_without_a_gradient_are_told(run: Run) -> None:
    status, out, errors = run("nets.py:aside", "tiny.png", "--preprocess", "none", "--events", "--format", "ndjson")
    told = [(row["event"], row["name"]) for row in map(json.loads, out.splitlines())]
    assert (status, told[-2:]) == (0, [("backward", ""), ("backward", "main")])
    assert ("forward", "side") in told and ("backward", "side") not in told
    assert errors == "Note: 1 call without a gradient and backward event: side\n"
    _, out, errors = run("nets.py:blind", "tiny.png", "--preprocess", "none", "--events", "--format", "tsv")
    assert [line.split("\t")[1] for line in out.splitlines()[1:]] == ["pre-hook", "forward"]
    assert errors == "Note: no backward pass: the output of Blind has no gradient\n"


def test_optical_flow_takes_two_pictures(run: Run) -> None:
    words = ("--weights", "none", "--input-size", "128", "--layer", "0")
    found = rows(run, "raft_small", "cat.png", "tiny.png", *words)
    assert found[0]["input_shape"] == [2, 3, 128, 128]
    status, _, errors = run("resnet18", "cat.png", "tiny.png", "--weights", "none")
    assert (status, errors) == (2, "Error: resnet18 takes one image; there are 2\n")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--target", "1"), 2, "--target needs --events; there is no backward pass; add --events"),
        (("--categories", "names.txt"), 2, "--categories needs --events; there is no backward pass; add --events"),
        (("--most", "3"), 2, "--most needs --values; add --values, which shows small tensors whole"),
        (("--type", "Conv3d", "--layer", "0"), 1, "no layer of type Conv3d"),
        (("--events", "--target", "9"), 1, "no class 9"),
        (("tiny.png", "tiny.png"), 2, "expected one image, or two for optical flow, got 3"),
    ],
)
def test_wrong_usage_is_one_line(run: Run, words: tuple[str, ...], status: int, message: str) -> None:
    one_error(run(*ONES, *words), status, message)


def test_a_model_that_raises_is_one_line(run: Run) -> None:
    status, out, errors = run("nets.py:broken", "tiny.png", "--preprocess", "none", "--events")
    assert (status, out) == (1, "")
    assert errors == "Error: nets.py:broken refuses a picture of 3x3x3: no way on\n"


def test_detectors_have_no_class_to_ask_for(run: Run) -> None:
    status, _, errors = run(
        "ssdlite320_mobilenet_v3_large", "cat.png", "--weights", "none", "--events", "--target", "1"
    )
    assert status == 1 and "gives boxes, labels and scores of objects" in errors


def test_the_picture_may_come_from_standard_input(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((here / "tiny.png").read_bytes())))
    _, out, errors = run("nets.py:ones", "-", "--preprocess", "none", "--layer", "3")
    assert out.splitlines()[1].split("\t")[:6] == ["3", "3", "Linear", "0", "1x4", "float32"]
    assert errors == ""
