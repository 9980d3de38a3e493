"""The command saliency on a small model: its rows, files, notes and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import hookscope
from hookscope.drawing.files import read_provenance
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.explain.saliency_settings import SaliencySettings
from tests.cli.helpers import Run, files, one_error, rows

NETS = """

class Functions(Small):
    def __init__(self):
        super().__init__()
        self.relu = nn.Identity()

class Steep(Small):
    def forward(self, x):
        return 1 * torch.sigmoid(20 * self.conv2(self.relu(self.conv1(x))).mean((2, 3)))

def overflows():
    net = Small()
    net.conv1.weight.data.fill_(3e38)
    net.conv2.weight.data.fill_(3e38)
    return net
"""
PICTURES = {"cat.jpg": (160, 120), "dog.png": (120, 160)}


def command_line(*words: str, model: str = "nets.py:Small") -> list[str]:
    return ["saliency", model, *words, "--input-size", "32", "--format", "ndjson"]


def library(target: str, method: str, settings: SaliencySettings | None = None) -> Any:
    net = hookscope.load_model("nets.py:Small", "none", input_size=(32, 32), seed=5)
    [inputs] = net.inputs(net.preprocess(hookscope.open_image("cat.jpg")))
    return hookscope.saliency_maps(net.model, inputs, target, method, settings=settings)


@pytest.mark.parametrize("method", SALIENCY_METHODS)
def test_a_row_and_raw_values_are_the_librarys(run: Run, here: Path, method: str) -> None:
    options = "--samples 3 --steps 4 --most-steps 4 --batch-size 2 --noise 0.1 --seed 5"
    status, out, _ = run("cat.jpg", "--method", method, *options.split(), "--raw", "x.npy")
    [row], values = rows(out), np.load("x.npy")
    [expected] = library(
        "top:1", method, SaliencySettings(samples=3, steps=4, most_steps=4, batch_size=2, noise=0.1, seed=5)
    )
    assert np.allclose(values, expected.values.numpy(), atol=1e-7)
    assert (status, row["method"], row["class"]) == (0, method, expected.prediction.index)
    assert row["sum"] == pytest.approx(float(values.astype(float).sum()), abs=1e-6)
    assert (row["expected"] is None) == (method not in ("integrated-gradients", "lrp"))
    shown = expected.still
    assert row["max"] == pytest.approx(float(shown.max()))
    y, x = np.unravel_index(shown.argmax(), shown.shape)
    side = 120 * 32 / 37  # the picture is resized to 37 (32 * 256 / 224), and the middle 32 of 37 are cropped
    assert (row["peak_x"], row["peak_y"]) == pytest.approx(
        ((160 - side) / 2 + (x + 0.5) / 32 * side, (120 - side) / 2 + (y + 0.5) / 32 * side), abs=2
    )
    assert files(here) == [f"cat-nets.py-Small-{method}-{row['class']}.png", "x.npy"]
    drawn = read_provenance(here / row["file"])
    assert drawn["high"] == pytest.approx(row["max"])


def test_raw_values_are_named_and_relus_that_are_not_guided_noted(run: Run) -> None:
    out = run("cat.jpg", "dog.png", "--target", "top:2", "--raw", "x.npz", "--seed", "5")[1]
    with np.load("x.npz") as arrays:
        assert set(arrays) == {f"{row['image'][:3]}/{row['class']}" for row in rows(out)}
        for each in library("top:2", "gradient"):
            assert np.array_equal(arrays[f"cat/{each.prediction.index}"], each.values.numpy())
    status, _, errors = run("cat.jpg", "--method", "guided-backprop")
    assert (status, errors) == (0, "Note: cat.jpg: 1 functional ReLU call not guided: hooks act on modules only\n")


def test_a_map_that_is_all_zero_is_drawn_with_a_note(run: Run, here: Path) -> None:
    status, out, errors = run("cat.jpg", "--target", "1", model="nets.py:Dull")
    [row] = rows(out)
    assert (status, row["max"], row["peak_x"], row["peak_y"]) == (0, 0, None, None)
    assert errors == "Note: cat.jpg: class 1 does not depend on any pixel: the map is all zero\n"
    assert files(here) == [row["file"]]


@pytest.mark.parametrize(("steps", "most", "taken"), [(1, 1, 1), (1, 800, 64), (400, 1, 400)])
def test_shares_that_do_not_make_up_the_score_have_a_note(run: Run, steps: int, most: int, taken: int) -> None:
    words = ("--method", "integrated-gradients", "--steps", str(steps), "--most-steps", str(most))
    status, out, errors = run("cat.jpg", *words, model="nets.py:Steep")
    [row] = rows(out)
    off = abs(row["sum"] - row["expected"]) / abs(row["expected"])
    assert (status, off > 0.05, row["steps"]) == (0, taken == 1, taken)
    note = ""
    if taken == 1:
        shares = f"the shares of class {row['class']} add up to {row['sum']:.4g} with 1 steps"
        note = f"{shares}, but the score minus the score of zeros is {row['expected']:.4g}; raise --most-steps"
    elif steps == 1:
        note = (
            f"with 1 steps the shares of class {row['class']} miss the score by more than 5 %; {taken} steps were taken"
        )
    assert errors == (f"Note: cat.jpg: {note}\n" if note else "")


@pytest.mark.parametrize(
    ("model", "shape"), [("nets.py:Clip", [3, 16, 32, 32]), ("lraspp_mobilenet_v3_large", [3, 32, 32])]
)
def test_a_clip_and_a_segmentation_model(run: Run, model: str, shape: list[int]) -> None:
    status, out, _ = run("cat.jpg", "--weights", "none", model=model)
    assert (status, rows(out)[0]["shape"]) == (0, shape)


@pytest.mark.parametrize(
    ("model", "words", "status", "message"),
    [
        ("Functions", ["--method", "guided-backprop"], 1, "has no ReLU layer to guide; use another method: gradient, "),
        ("Boxes", [], 1, "no score for each class"),
        ("Blind", [], 1, "no gradient leads from the score of"),
        ("overflows", [], 1, "finite"),
    ],
)
def test_what_is_refused_leaves_nothing(
    run: Run, here: Path, model: str, words: list[str], status: int, message: str
) -> None:
    one_error(run("cat.jpg", *words, model=f"nets.py:{model}"), status, message)
    assert files(here) == []


def test_a_clip_is_drawn_frame_by_frame_without_smoothing(run: Run, here: Path) -> None:
    words = ("cat.jpg", "--target", "1", "-o", "out.gif")
    assert run(*words, model="nets.py:Clip")[0] == 0
    with Image.open("out.gif") as picture:
        assert picture.n_frames == 16
    status, _, errors = run(*words, "--blur", "2", model="nets.py:Clip")
    assert status == 2 and "Error: --blur has no effect on a clip; its maps are drawn frame by frame" in errors
