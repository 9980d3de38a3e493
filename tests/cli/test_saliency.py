"""The command saliency, in process on a small model, and as a person calls it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from hookscope.cli.commands.saliency import FIELDS, command
from hookscope.drawing.png import read_provenance
from hookscope.explain.saliency import saliency_maps
from hookscope.explain.saliency_methods import SALIENCY_METHODS, SaliencyMethod, vanilla
from hookscope.explain.saliency_settings import Settings
from hookscope.models.load import load_model
from tests.cli.helpers import ROOT, Run, files, one_error, rows

SAMPLES = ROOT / "samples"

NETS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 4, 3, stride=2)

    def forward(self, x):
        return self.conv2(self.relu(self.conv1(x))).mean((2, 3))

def small():
    torch.manual_seed(0)
    return Small()

class Detached(Small):
    def forward(self, x):
        return super().forward(x.detach())

class Functions(Small):
    def __init__(self):
        super().__init__()
        self.relu = nn.Identity()

class Steep(Small):
    def forward(self, x):
        return torch.sigmoid(20 * super().forward(x))

def steep():
    torch.manual_seed(0)
    return Steep()

class Half(Small):
    functions = 1

    def forward(self, x):
        x = self.relu(self.conv1(x))
        for _ in range(self.functions):
            x = torch.relu(x - 0.01)
        return self.conv2(x).mean((2, 3))

def half():
    torch.manual_seed(0)
    return Half()

def both():
    net = half()
    net.functions = 2
    return net

def dull():
    net = small()
    with torch.no_grad():
        net.conv2.weight.zero_()
    return net

def overflows():
    net = small()
    with torch.no_grad():
        net.conv1.weight.fill_(3e38)
        net.conv2.weight.fill_(3e38)
    return net

class Boxes(Small):
    def forward(self, x):
        return [{"boxes": super().forward(x)}]
"""


PICTURES = {"cat.jpg": (160, 120), "dog.png": (120, 160)}


def command_line(*words: str, model: str = "nets.py:small", size: str = "32") -> list[str]:
    return ["saliency", model, *words, *(["--input-size", size] if size else [])]


def library(target: str | int, method: str, settings: Settings | None = None) -> Any:
    net = load_model("nets.py:small", "none", input_size=(32, 32))
    with Image.open("cat.jpg") as image:
        [inputs] = net.inputs(net.preprocess(image.convert("RGB")))
    return saliency_maps(net.model, inputs, target, method, settings=settings)


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_every_method(run: Run, here: Path, method: str) -> None:
    words = ("--samples", "3", "--steps", "4", "--batch-size", "2", "--noise", "0.1", "--seed", "5")
    status, out, errors = run("cat.jpg", "--method", method, *words, "--raw", "x.npy", "--format", "ndjson")
    assert status == 0
    (row,) = rows(out)
    assert tuple(row) == FIELDS
    assert errors == "" or (method == "integrated-gradients" and row["expected"] and "raise --steps" in errors)
    values = np.load("x.npy")
    [expected] = library("top:1", method, Settings(samples=3, steps=4, batch_size=2, noise=0.1, seed=5))
    assert np.allclose(values, expected.values.numpy(), atol=1e-7)
    assert (row["shape"], row["method"], row["class"]) == ([3, 32, 32], method, expected.prediction.index)
    assert row["sum"] == pytest.approx(float(values.astype(float).sum()), abs=1e-6)
    shown = expected.map.numpy()
    assert row["max"] == pytest.approx(float(shown.max()))
    y, x = np.unravel_index(shown.argmax(), shown.shape)
    side = 120 * 32 / 37  # resize 37 (32 * 256 / 224), crop 32
    assert (row["peak_x"], row["peak_y"]) == pytest.approx(
        ((160 - side) / 2 + (x + 0.5) / 32 * side, (120 - side) / 2 + (y + 0.5) / 32 * side), abs=2
    )
    assert files(here) == [f"cat-nets.py-small-{method}-{row['class']}.png", "x.npy"]
    assert read_provenance(here / row["file"])["high"] == pytest.approx(row["max"])


def test_several_classes_and_images(run: Run, here: Path) -> None:
    status, out, _ = run("cat.jpg", "dog.png", "--target", "top:2", "-o", "out", "--raw", "x.npz", "--format", "ndjson")
    found = rows(out)
    assert (status, len(found)) == (0, 4)
    assert sorted(row["file"] for row in found) == [name for name in files(here) if name.startswith("out/")]
    with np.load("x.npz") as kept:
        assert set(kept) == {f"{row['image'][:3]}/{row['class']}" for row in found}
        for one in library("top:2", "gradient"):
            assert np.array_equal(kept[f"cat/{one.prediction.index}"], one.values.numpy())


def test_all_zero_is_drawn_and_said(run: Run, here: Path) -> None:
    status, out, errors = run("cat.jpg", "--target", "1", "--format", "ndjson", model="nets.py:dull")
    (row,) = rows(out)
    assert (status, row["max"], row["peak_x"], row["peak_y"]) == (0, 0, None, None)
    assert errors == "Note: cat.jpg: class 1 does not depend on any pixel: the map is all zero\n"
    assert files(here) == [row["file"]]


@pytest.mark.parametrize(
    ("model", "words", "status", "message"),
    [
        (
            "nets.py:Functions",
            ["--method", "guided-backprop"],
            1,
            "has no ReLU layer to guide; use another method: gradient, ",
        ),
        ("nets.py:Boxes", [], 1, "no score for each class"),
        ("nets.py:Detached", [], 1, "no gradient leads from the score of"),
        ("nets.py:overflows", [], 1, "finite"),
        ("nets.py:small", ["--method", "gradien"], 2, "'gradien' is not one of 'gradient'"),
        ("nets.py:small", ["--samples", "0"], 2, "samples"),
        ("nets.py:small", ["--noise", "-0.1"], 2, "noise"),
        ("nets.py:small", ["--target", "1,2", "-o", "x.png"], 2, "--target 1,2 makes several pictures"),
        ("nets.py:small", ["--raw", "x.npy", "--target", "top:2"], 2, "takes one map"),
    ],
)
def test_what_is_refused_leaves_nothing(
    run: Run, here: Path, model: str, words: list[str], status: int, message: str
) -> None:
    one_error(run("cat.jpg", *words, "--format", "ndjson", model=model), status, message)
    assert files(here) == []


def test_without_noise_smoothgrad_is_the_gradient(run: Run) -> None:
    words = ("--method", "smoothgrad", "--noise", "0", "--samples", "2", "--raw", "x.npy")
    assert run("cat.jpg", *words)[0] == 0
    [expected] = library("top:1", "gradient")
    assert np.allclose(np.load("x.npy"), expected.values.numpy(), atol=1e-6)


@pytest.mark.parametrize("steps", [1, 400])
def test_shares_that_do_not_make_up_the_score_are_told(run: Run, steps: int) -> None:
    words = ("--method", "integrated-gradients", "--steps", str(steps), "--format", "ndjson")
    status, out, errors = run("cat.jpg", *words, model="nets.py:steep")
    (row,) = rows(out)
    off = abs(row["sum"] - row["expected"]) / abs(row["expected"])
    assert (status, off > 0.05) == (0, steps == 1)
    what = f"the shares of class {row['class']} add up to {row['sum']:.4g}"
    said = f"Note: cat.jpg: {what}, but the score minus that of zeros is {row['expected']:.4g}; raise --steps\n"
    assert errors == (said if steps == 1 else "")


def test_only_integrated_gradients_say_what_they_should_make_up(run: Run) -> None:
    _, out, errors = run("cat.jpg", "--method", "gradient-input", "--format", "ndjson")
    assert (rows(out)[0]["expected"], errors) == (None, "")


@pytest.mark.parametrize(
    ("model", "said"), [("half", "1 functional ReLU call not guided"), ("both", "2 functional ReLU calls not guided")]
)
def test_relus_that_are_not_guided_are_told(run: Run, model: str, said: str) -> None:
    status, _, errors = run("cat.jpg", "--method", "guided-backprop", model=f"nets.py:{model}")
    assert (status, errors) == (0, f"Note: cat.jpg: {said}: hooks do not see functions\n")


def test_several_targets_are_a_union(run: Run, here: Path) -> None:
    status, out, _ = run("cat.jpg", "--target", "3,1", "--target", "0", "--target", "3", "--format", "ndjson")
    assert (status, [row["class"] for row in rows(out)]) == (0, [3, 1, 0])
    assert len(files(here)) == 3


def test_a_clip_and_a_segmentation_model(run: Run) -> None:
    words = ("--weights", "none", "--format", "ndjson")
    status, out, errors = run("cat.jpg", *words, model="mc3_18")
    assert (status, rows(out)[0]["shape"]) == (0, [3, 16, 32, 32])
    assert "repeated 16 times" in errors
    status, out, _ = run("cat.jpg", *words, model="lraspp_mobilenet_v3_large")
    assert (status, rows(out)[0]["shape"]) == (0, [3, 32, 32])


def test_a_method_of_the_registry_is_in_the_help_and_runs(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = SaliencyMethod(vanilla, "a toy method", "a toy caption")
    monkeypatch.setitem(SALIENCY_METHODS, "toy", toy)
    text = CliRunner().invoke(command, ["--help"]).output
    assert re.search(r"^    toy +a toy method$", text, re.MULTILINE) and "|toy]" in text
    status, out, _ = run("dog.png", "--method", "toy", "--format", "ndjson")
    assert (status, rows(out)[0]["method"]) == (0, "toy")


def test_the_manual_lists_every_method() -> None:
    text = CliRunner().invoke(command, ["--help"]).output
    for method in SALIENCY_METHODS:
        assert re.search(rf"^    {method} +\S", text, re.MULTILINE), method
    assert "hookscope saliency resnet34 cat.jpg --method smoothgrad" in text


@pytest.mark.slow
def test_the_words_of_the_issue(run: Run, here: Path) -> None:
    (here / "cat.jpg").write_bytes((SAMPLES / "cat.jpg").read_bytes())
    status, out, _ = run("cat.jpg", "--method", "smoothgrad", "--format", "ndjson", model="resnet34", size="")
    (row,) = rows(out)
    assert (status, row["method"], row["shape"]) == (0, "smoothgrad", [3, 224, 224])
    assert files(here) == [row["file"]]
