"""The command predict: rows for each picture and class, notes, lost pictures, its errors."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import hookscope
from hookscope.cli.commands.predict import FIELDS
from tests.cli.helpers import Run, rows

NETS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, classes=7):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 7, stride=16)
        self.fc = nn.Linear(4, classes)

    def forward(self, x):
        print("a word of the model")
        return self.fc(self.conv(x).mean((2, 3)))

def small():
    torch.manual_seed(0)
    return Small()

class Mask(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return {"aux": x, "out": self.conv(x)}

def mask():
    torch.manual_seed(0)
    return Mask()

def features():
    return nn.Conv2d(3, 4, 1)

def bad():
    made = Small()
    nn.init.constant_(made.fc.bias, float("nan"))
    return made
"""
NAMES = ["ant", "bee", "cow", "dog", "emu", "red fox", "gnu"]


@pytest.fixture
def here(here: Path) -> Path:
    (here / "names.txt").write_text("\n".join(NAMES) + "\n\n")
    (here / "names.json").write_text(json.dumps({str(at): [f"n{at}", name] for at, name in enumerate(NAMES)}))
    for name, colour in (("cat.png", "red"), ("dog.png", "blue")):
        Image.new("RGB", (60, 40), colour).save(here / name)
    return here


def command_line(*words: str, model: str = "nets.py:small") -> list[str]:
    return ["predict", model, *words]


def own_scores(factory: str, path: str) -> torch.Tensor:
    """What the model itself gives, by the plain way."""
    net = hookscope.load_model(f"nets.py:{factory}", device="cpu")
    with torch.no_grad():
        output = net.model(net.preprocess(hookscope.open_image(path))[None])
    return output["out"].mean((2, 3))[0] if isinstance(output, dict) else output[0]


def test_five_classes_of_each_picture_the_models_own_to_the_bit(run: Run) -> None:
    status, out, errors = run("cat.png", "dog.png", "--format", "ndjson")
    assert status == 0 and "a word of the model" in errors
    found = rows(out)
    assert [row["image"] for row in found] == ["cat.png"] * 5 + ["dog.png"] * 5
    for path in ("cat.png", "dog.png"):
        own, mine = own_scores("small", path), [row for row in found if row["image"] == path]
        order = own.argsort(descending=True)[:5]
        assert [row["index"] for row in mine] == order.tolist()
        assert torch.equal(torch.tensor([row["score"] for row in mine]), own[order])
        assert [row["probability"] for row in mine] == torch.softmax(own.double(), 0)[order].tolist()
        assert {row["label"] for row in mine} == {None}
    assert tuple(found[0]) == FIELDS


def test_the_help_has_the_fields(run: Run) -> None:
    text = run("--help")[1]
    assert all(f"\n    {name} " in text for name in FIELDS)


def test_json_is_an_array_of_objects(run: Run) -> None:
    status, out, _ = run("cat.png", "--top", "2", "--format", "json", "--categories", "names.txt")
    assert status == 0
    found = json.loads(out)
    assert isinstance(found, list) and len(found) == 2
    assert {"index", "label", "score", "probability"} <= set(found[0])
    assert found[0]["label"] == NAMES[found[0]["index"]]
    assert found[0]["score"] > found[1]["score"] and found[0]["probability"] > found[1]["probability"]


def test_a_table_and_a_pipe(run: Run) -> None:
    _, out, _ = run("cat.png", "--top", "1", "--categories", "names.json", "--format", "table")
    head, line = out.splitlines()
    assert head.split() == list(FIELDS) and line.split()[0] == "cat.png"
    _, out, _ = run("cat.png", "--top", "3")
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0] == list(FIELDS) and len(lines) == 4
    assert [line[2] for line in lines[1:]] == ["", "", ""]


@pytest.mark.parametrize("names", ["names.txt", "names.json"])
@pytest.mark.parametrize(
    ("target", "indices"), [("fox", [5]), ("BEE", [1]), ("0", [0]), ("6", [6]), ("top:2", None), ("top:99", None)]
)
def test_targets(run: Run, names: str, target: str, indices: list[int] | None) -> None:
    found = rows(run("cat.png", "--target", target, "--categories", names, "--format", "ndjson")[1])
    order = own_scores("small", "cat.png").argsort(descending=True).tolist()
    assert [row["index"] for row in found] == (indices or order[: int(target[4:]) if target[:4] == "top:" else 0])
    assert [row["label"] for row in found] == [NAMES[row["index"]] for row in found]


def test_a_segmentation_has_the_mean_of_its_logits(run: Run) -> None:
    status, out, _ = run("cat.png", "--format", "ndjson", model="nets.py:mask")
    own = own_scores("mask", "cat.png")
    found = rows(out)
    assert status == 0 and len(found) == 3
    assert torch.equal(torch.tensor([row["score"] for row in found]), own[own.argsort(descending=True)])
    assert "mean of its logits over all positions" in " ".join(run("--help")[1].split())


def test_random_weights_are_told_in_a_note_and_in_the_column(run: Run) -> None:
    words = ["cat.png", "--input-size", "32", "--seed", "4", "--top", "1", "--format", "ndjson"]
    status, out, errors = run(*words, model="squeezenet1_1")
    assert status == 0
    assert "weights of squeezenet1_1 are random (seed 4)" in errors
    (row,) = rows(out)
    assert row["weights"] == "random (seed 4)"
    assert isinstance(row["label"], str)  # the names are those of the weights that could not be had


def test_the_model_that_ships(run: Run, shapes_file: Path) -> None:
    status, out, errors = run("cat.png", "--target", "shape 3", "--format", "ndjson", model="shapes")
    assert (status, errors) == (0, "")
    (row,) = rows(out)
    assert (row["index"], row["label"], row["weights"]) == (3, "shape 3", "shapes.safetensors")


def test_a_lost_picture_keeps_none_of_the_others(run: Run, here: Path) -> None:
    (here / "bad.jpg").write_bytes(b"\xff\xd8\xff\xe0 and no more")
    status, out, errors = run("cat.png", "bad.jpg", "nope.png", "dog.png", "--top", "1", "--format", "ndjson")
    assert status == 1
    assert [row["image"] for row in rows(out)] == ["cat.png", "dog.png"]
    told = [line for line in errors.splitlines() if line.startswith("Error: ")]
    assert len(told) == 2 and "bad.jpg" in told[0] and "nope.png" in told[1]


def test_notes_of_pictures(run: Run, here: Path) -> None:
    Image.new("RGBA", (60, 40), (255, 0, 0, 128)).save(here / "clear.png")
    assert "Note: clear.png: " in run("clear.png", "--top", "1")[2]


def test_standard_input(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.TextIOWrapper(io.BytesIO((here / "cat.png").read_bytes()))
    monkeypatch.setattr(sys, "stdin", pipe)
    found = rows(run("-", "--top", "1", "--format", "ndjson")[1])
    assert [row["image"] for row in found] == ["-"]
    assert torch.tensor(found[0]["score"]) == own_scores("small", "cat.png").max()


def test_scores_that_are_no_numbers(run: Run) -> None:
    status, out, _ = run("cat.png", "--top", "1", "--format", "ndjson", model="nets.py:bad")
    assert status == 0 and rows(out)[0]["score"] is None
    assert run("cat.png", "--top", "1", "--format", "csv", model="nets.py:bad")[1].splitlines()[1].count("nan") == 2


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--top", "2", "--target", "3"], 2, "--top and --target both choose the classes; give one of them"),
        (["--top", "0"], 2, "Invalid value for '--top'"),
        (["--target", ""], 2, "the target is empty"),
        (
            ["--target", "ant"],
            1,
            "no class 'ant'; the class names are unknown; give an index, or the names of the classes (categories)",
        ),
        (["--target", "fax", "--categories", "names.txt"], 1, "no class 'fax'; "),
        (["--target", "e", "--categories", "names.txt"], 1, "'e' is in the names of 3 classes; 1 bee, 4 emu, 5 red"),
        (["--categories", "nope.txt"], 1, "no file 'nope.txt' with class names"),
        (["--categories", "cat.png"], 1, "cat.png is not UTF-8 text"),
        (["--categories", "two.txt"], 1, "2 class names for 7 classes of the model; give the class names of this"),
    ],
)
def test_errors_are_one_line(run: Run, here: Path, words: list[str], status: int, said: str) -> None:
    (here / "two.txt").write_text("ant\nbee\n")
    found, out, errors = run("cat.png", *words)
    assert (found, out) == (status, "")
    told = [line for line in errors.splitlines() if line != "a word of the model"]
    assert len(told) == 1 and told[0].startswith(f"Error: {said}")


def test_several_targets_are_a_union_in_the_order_asked_for(run: Run) -> None:
    words = ["--categories", "names.txt", "--format", "ndjson", "--target", "gnu,bee", "--target", "6,0"]
    status, out, _ = run("cat.png", *words)
    assert (status, [row["index"] for row in rows(out)]) == (0, [6, 1, 0])


def test_a_bad_file_of_names_is_told_before_the_model_is_loaded(run: Run) -> None:
    assert "no file 'nope.txt'" in run("cat.png", "--categories", "nope.txt", model="no_such_model")[2]


def test_another_number_of_names_than_the_weights_have(run: Run, shapes_file: Path) -> None:
    status, out, errors = run("cat.png", "--categories", "names.txt", model="shapes")
    assert (status, out) == (1, "")
    assert errors == "Error: 7 class names for 10 classes of shapes; give the class names of this model\n"


@pytest.mark.slow
def test_a_video_model(run: Run) -> None:
    words = ["cat.png", "--weights", "none", "--input-size", "32", "--top", "3", "--format", "ndjson"]
    status, out, _ = run(*words, model="r3d_18")
    assert status == 0
    assert all(isinstance(row["label"], str) for row in rows(out)) and len(rows(out)) == 3
