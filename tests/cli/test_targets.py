"""What cam and saliency explain beside a class: regions, differences, similarities, functions."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import hookscope
from hookscope.scores import DifferenceTarget, RegionTarget, SimilarityTarget
from tests.cli.helpers import Run, files, one_error, rows

NETS = """

class Segments(Small):
    def forward(self, x):
        return {"out": self.conv2(self.relu(self.conv1(x)))}

class Bare(Segments):
    def forward(self, x):
        return super().forward(x)["out"]

def margin(output):
    return output[:, 1] - output[:, 2]

def wrong(output):
    return output

def fails(output):
    return output[:, 9]

number = 3

class Embeds(Small):
    num_classes = 0
"""
PICTURES = {"cat.jpg": (160, 120), "dog.png": (120, 160)}


def command_line(
    *words: str, model: str = "nets.py:Small", command: str = "saliency", image: str = "cat.jpg"
) -> list[str]:
    return [command, model, image, "--input-size", "32", "--resize", "stretch", "--format", "ndjson", *words]


def net_and_inputs(model: str = "nets.py:Small", image: str = "cat.jpg") -> tuple[Any, Any]:
    net = hookscope.load_model(model, "none", input_size=(32, 32), resize="stretch")
    return net, net.inputs(net.prepare(hookscope.open_image(image)))


def expected(target: Any, model: str = "nets.py:Small") -> Any:
    net, inputs = net_and_inputs(model)
    return hookscope.saliency_maps(net.model, inputs, target)[0]


def check(outcome: tuple[int, str, str], name: str, target: Any, model: str = "nets.py:Small") -> None:
    """Check the row, the file and the numbers of ``x.npy`` against a call of the library."""
    status, out, errors = outcome
    [row], result = rows(out), expected(target, model)
    assert (status, errors, row["target"], result.prediction.name) == (0, "", name, name)
    assert row["score"] == pytest.approx(result.prediction.score)
    assert np.allclose(np.load("x.npy"), result.values, atol=1e-7) and result.values.any()
    assert Path(row["file"]).is_file() and f"-{result.prediction.key}.png" in row["file"]


def test_an_answer_is_a_class_against_another_a_similarity_or_a_region(run: Run) -> None:
    words = ("--target", "2", "--against", "1", "--raw", "x.npy")
    check(run(*words), "class 2 against class 1", DifferenceTarget(2, 1))
    net, inputs = net_and_inputs(image="dog.png")
    target = SimilarityTarget(net.model(*inputs), "dog.png")
    check(run("--similar-to", "dog.png", "--raw", "x.npy"), "similarity to dog.png", target)
    words = ("--region", "80,60", "--target", "top:2", "--method", "ablationcam")
    status, out, _ = run(*words, model="nets.py:Segments", command="cam")
    assert status == 0 and [row["target"].split()[2:] for row in rows(out)] == [["at", "80,60"]] * 2
    assert [Path(row["file"]).is_file() for row in rows(out)] == [True, True]


@pytest.mark.parametrize("where", ["nets.py:margin", "margins:margin"])
def test_a_function_of_the_output(run: Run, here: Path, where: str) -> None:
    (here / "margins.py").write_text("def margin(output):\n    return output[:, 1] - output[:, 2]\n")

    def margin(output: Any) -> Any:
        return output[:, 1] - output[:, 2]

    check(run("--target", where, "--raw", "x.npy"), "margin", margin)


def test_standard_input_is_one_of_both_images(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def similar(image: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("dog.png").read_bytes())))
        return run("--similar-to", "-", image=image)

    one_error(similar("-"), 2, "standard input is named more than once; it can be read once")
    [piped], [named] = (rows(out) for _, out, _ in (similar("cat.jpg"), run("--similar-to", "dog.png")))
    assert (piped["score"], piped["sum"]) == (named["score"], named["sum"]) and piped["target"] == "similarity to -"


@pytest.mark.parametrize("model", ["nets.py:Segments", "nets.py:Bare"])
def test_a_region_is_in_pixels_of_the_photograph(run: Run, model: str) -> None:
    mask = Image.new("L", (160, 120))  # a pixel of the input is 5 x 3.75 of them
    mask.paste(1, (50, 30, 80, 60))
    mask.save("mask.png")
    square, cell = torch.zeros(2, 32, 32)
    square[8:16, 10:16] = cell[8, 10] = 1
    words = ("--region", "mask.png", "--target", "1", "--raw", "x.npy")
    check(run(*words, model=model), "class 1 in mask.png", RegionTarget(square, 1, "in mask.png"), model)
    words = ("--region", "52,32", "--target", "1", "--against", "0", "--raw", "x.npy")
    name, target = "class 1 against class 0 at 52,32", RegionTarget(cell, DifferenceTarget(1, 0), "at 52,32")
    check(run(*words, model=model), name, target, model)


def test_an_embedding_has_no_class(run: Run, here: Path) -> None:
    says = "nets.py:Embeds gives an embedding, no score for each class; explain the similarity to another image"
    one_error(run("--target", "1", model="nets.py:Embeds"), 1, says)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("--target nets.py:wrong", 1, "wrong returns a tensor of torch.float32 with shape (1, 4)"),
        ("--target nets.py:fails", 1, "fails raised IndexError: index 9 is out of bounds"),
        (
            "--region 3,60 --resize shorter",
            1,
            "the network does not see the region at 3,60; the preprocessing cuts it off",
        ),
    ],
)
@pytest.mark.parametrize("command", ["cam", "saliency"])
def test_targets_that_do_not_exist_are_one_line(
    run: Run, here: Path, command: str, words: str, status: int, says: str
) -> None:
    one_error(run(*words.split(), command=command), status, says)
    assert files(here) == []
