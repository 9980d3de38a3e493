"""The command verify: rows, the status that says whether hookscope tells the truth, and its errors."""

from __future__ import annotations

import pytest

import hookscope.hooks.activations
from hookscope.cli.commands.verify import FIELDS
from tests.cli.helpers import Run, rows

NETS = """
import torch
from torch import nn

class Talking(nn.Conv2d):
    def forward(self, x):
        print("a word of the model")
        return super().forward(x)

def small():
    torch.manual_seed(0)
    return nn.Sequential(Talking(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x

def counting():
    return nn.Sequential(nn.Conv2d(3, 4, 3), Counting())
"""
NAMES = ["feature-extractor", "re-computation", "model-output", "inputs", "untouched", "shapes"]

PICTURES = {"cat.png": (60, 40), "dog.png": (60, 40)}


def command_line(*words: str, model: str = "nets.py:small") -> list[str]:
    return ["verify", model, *words]


@pytest.mark.parametrize("words", [[], ["cat.png"], ["--input-size", "32x48"], ["--seed", "3", "--weights", "none"]])
def test_all_holds(run: Run, words: list[str]) -> None:
    status, out, errors = run(*words, "--format", "ndjson")
    assert status == 0
    assert "Difference" not in errors
    found = rows(out)
    assert [row["check"] for row in found] == NAMES
    assert {row["holds"] for row in found} == {True}
    assert {row["largest_difference"] for row in found} == {0.0}
    assert [row["compared"] for row in found][:4] == [3, 3, 1, 2]
    assert all(tuple(row) == FIELDS for row in found)


def test_what_the_model_prints_is_no_row(run: Run) -> None:
    _, out, errors = run("--format", "tsv")
    assert [line.split("\t")[0] for line in out.splitlines()] == ["check", *NAMES]
    assert "a word of the model" in errors


def test_every_leaf_is_the_default_and_a_type_narrows_it(run: Run) -> None:
    found = rows(run("--type", "Conv2d", "--layer", "-1", "--format", "ndjson")[1])
    assert [row["compared"] for row in found][:2] == [1, 1]
    assert (found[3]["holds"], found[3]["note"]) == (None, "no wanted call feeds another")


def test_the_first_difference_ends_it_with_status_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hookscope.hooks.activations, "keep_and_hand_on", lambda module, args, kwargs, output: (output, None)
    )
    status, out, errors = run("--format", "ndjson")
    assert status == 3
    (row,) = rows(out)
    assert (row["check"], row["holds"], row["layer"]) == ("feature-extractor", False, "0")
    (line,) = [line for line in errors.splitlines() if line.startswith("Difference")]
    assert line.startswith("Difference: feature-extractor fails at '0' by ")
    assert line.endswith(": 1 of 3 differ")


def test_the_rows_before_the_difference_are_printed(run: Run) -> None:
    status, out, errors = run("--format", "table", model="nets.py:counting")
    assert status == 3
    assert [line.split()[0] for line in out.splitlines()] == ["check", *NAMES[:5]]
    assert "Difference: untouched fails at '1' by 1: " in errors
    assert "buffer 'count' changed, without hooks too" in errors


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--input-size", "2"], 1, "nets.py:small refuses a picture of 3x2x2"),
        (["cat.png", "dog.png"], 2, "nets.py:small takes one image"),
        (["cat.png", "dog.png", "cat.png"], 2, "expected one image, or two for optical flow"),
    ],
)
def test_errors_are_one_line(run: Run, words: list[str], status: int, said: str) -> None:
    found, out, errors = run(*words)
    assert (found, out) == (status, "")
    assert f"Error: {said}" in errors
    assert "Traceback" not in errors


def test_optical_flow_takes_two_images(run: Run) -> None:
    words = ["cat.png", "dog.png", "--input-size", "128", "--weights", "none", "--layer", "0:3", "--format", "ndjson"]
    status, out, _ = run(*words, model="raft_small")
    assert status == 0
    assert [row["holds"] for row in rows(out)] == [None, True, True, None, True, True]
