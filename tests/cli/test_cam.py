"""The command cam, in process on a small model, and as a process on pipes and terminals."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from hookscope.cli.commands.cam import FIELDS, command
from hookscope.drawing.png import read_provenance
from hookscope.explain.cam import class_activation_maps, fused
from hookscope.explain.cam_methods import CAM_METHODS, CamMethod, gradcam
from hookscope.models.load import load_model
from tests.cli.helpers import POSIX, ROOT, Run, files, one_error, rows, start

SAMPLES = ROOT / "samples"

NETS = """
import sys, time
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, channels=3, pause=0):
        super().__init__()
        self.pause = pause
        self.conv1 = nn.Conv2d(channels, 6, 7, stride=8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 12, 3)
        self.unused = nn.Conv2d(6, 12, 3)
        self.fc = nn.Linear(12, 4)

    def forward(self, x):
        if self.pause:
            print("a pass", flush=True)
            time.sleep(self.pause)
        x = self.relu(self.conv1(x))
        return self.fc(self.conv2(x).relu().mean((2, 3)))

def small():
    torch.manual_seed(0)
    return Small()

def grey():
    torch.manual_seed(0)
    return Small(1)

def slow():
    torch.manual_seed(0)
    return Small(pause=0.5)

def deep():
    torch.manual_seed(0)
    net = nn.Sequential()
    for at in range(40):
        net.add_module(f"layer_of_the_deep_net_{at}", nn.Conv2d(3, 3, 1))
    net.add_module("mean", nn.AdaptiveAvgPool2d(1))
    return net.append(nn.Flatten())

class Detached(Small):
    def forward(self, x):
        x = self.relu(self.conv1(x)).detach()
        return self.fc(self.conv2(x).relu().mean((2, 3)))

def detached():
    torch.manual_seed(0)
    return Detached()

def dull():
    net = small()
    with torch.no_grad():
        net.fc.weight.zero_()
    return net

def broken():
    net = small()
    with torch.no_grad():
        net.conv2.weight[0, 0, 0, 0] = float("nan")
    return net

class Hidden(Small):
    def forward(self, x):
        x = self.relu(self.conv1(x))
        return self.fc(self.conv2(x).relu().nan_to_num(0).mean((2, 3)))

def hidden():
    net = Hidden()
    with torch.no_grad():
        net.conv2.weight[0, 0, 0, 0] = float("nan")
    return net

class Boxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return [{"boxes": self.conv(x)[:, :, 0, 0], "labels": torch.zeros(1)}]
"""


@pytest.fixture
def here(here: Path) -> Path:
    (here / "names.txt").write_text("red fox\nowl\ncrane\nCrane\n")
    return here


PICTURES = {"cat.jpg": (160, 120), "dog.png": (120, 160)}


def command_line(*words: str, model: str = "nets.py:small", size: str = "64") -> list[str]:
    return ["cam", model, *words, *(["--input-size", size] if size else [])]


def picture(name: str) -> Image.Image:
    with Image.open(name) as image:
        return image.convert("RGB")


def library(target: str | int = "top:1", layers: Any = None, method: str = "gradcam", image: str = "cat.jpg") -> Any:
    net = load_model("nets.py:small", "none", input_size=(64, 64))
    tensor = net.preprocess(picture(image))
    return class_activation_maps(net.model, net.inputs(tensor), layers, target, method)


def test_an_overlay_goes_to_the_current_folder(run: Run, here: Path) -> None:
    status, out, errors = run("cat.jpg", "--format", "ndjson")
    assert (status, errors) == (0, "")
    (row,) = rows(out)
    [expected] = library()
    assert tuple(row) == FIELDS
    assert (row["image"], row["layer"], row["type"], row["call"]) == ("cat.jpg", "conv2", "Conv2d", 0)
    assert (row["class"], row["label"]) == (expected.prediction.index, None)
    assert row["score"] == pytest.approx(expected.prediction.score)
    assert row["probability"] == pytest.approx(expected.prediction.probability)
    assert (row["method"], row["shape"], row["weights"]) == ("gradcam", [6, 6], "from factory (seed 0)")
    assert row["max"] == pytest.approx(float(expected.values.max()))
    assert row["file"] == f"cat-nets.py-small-gradcam-{row['class']}.png"
    assert files(here) == [row["file"]]
    told = read_provenance(here / row["file"])
    assert (told["image"], told["weights"], told["maps"][0]["layer"]) == ("cat.jpg", row["weights"], "conv2")
    assert told["maps"][0]["score"] == row["score"]


@pytest.mark.parametrize("format", ["table", "tsv", "csv", "json"])
def test_every_format_has_the_fields(run: Run, format: str) -> None:
    status, out, _ = run("cat.jpg", "--layer", "0,1", "--format", format)
    assert status == 0
    if format == "json":
        found = json.loads(out)
        assert [tuple(row) for row in found] == [FIELDS, FIELDS]
        assert [row["layer"] for row in found] == ["conv1", "conv2"]
    else:
        between = {"table": None, "tsv": "\t", "csv": ","}[format]
        lines = [line.split(between) for line in out.splitlines()]
        assert (lines[0], [line[1] for line in lines[1:]]) == (list(FIELDS), ["conv1", "conv2"])


@pytest.mark.parametrize("image", ["cat.jpg", "dog.png"])
def test_the_peak_is_in_pixels_of_the_photograph(run: Run, here: Path, image: str) -> None:
    _, out, _ = run(image, "--layer", "conv1", "--raw", "x.npy", "--format", "ndjson")
    (row,) = rows(out)
    values = np.load("x.npy")
    y, x = np.unravel_index(values.argmax(), values.shape)
    # resize 73 (64 * 256 / 224), crop 64: what is seen of the shorter side of 120 is 120 * 64 / 73, in the middle
    side, (wide, high) = 120 * 64 / 73, picture(image).size
    expected = ((wide - side) / 2 + (x + 0.5) / 8 * side, (high - side) / 2 + (y + 0.5) / 8 * side)
    assert values.shape == (8, 8)
    assert (row["peak_x"], row["peak_y"]) == pytest.approx(expected, abs=1)


def test_stretching_sees_it_all(run: Run) -> None:
    _, out, _ = run("cat.jpg", "--preprocess", "stretch", "--raw", "x.npy", "--format", "ndjson", size="96x160")
    values, (row,) = np.load("x.npy"), rows(out)
    assert values.shape == (10, 18)
    y, x = np.unravel_index(values.argmax(), values.shape)
    assert (row["peak_x"], row["peak_y"]) == pytest.approx(((x + 0.5) / 18 * 160, (y + 0.5) / 10 * 120), abs=0.06)


def test_without_preparation_the_picture_is_what_it_is(run: Run) -> None:
    status, out, _ = run("cat.jpg", "--preprocess", "none", "--format", "ndjson", size="")
    assert (status, rows(out)[0]["shape"]) == (0, [13, 18])


def test_raw_is_the_librarys_map(run: Run) -> None:
    run("cat.jpg", "--layer", "conv1", "--target", "2", "--method", "hirescam", "--raw", "x.npy")
    [expected] = library(2, "conv1", "hirescam")
    assert np.load("x.npy").dtype == np.float32
    assert np.array_equal(np.load("x.npy"), expected.values)
    status, out, _ = run("cat.jpg", "dog.png", "--layer", "conv1,conv2", "--target", "top:2", "--raw", "x.npz")
    assert status == 0
    with np.load("x.npz") as found:
        assert len(found) == 8 == len(out.splitlines()) - 1
        for image in ("cat.jpg", "dog.png"):
            for one in library("top:2", "conv1,conv2", image=image):
                assert np.array_equal(found[f"{image[:3]}/{one.call.key}/{one.prediction.index}"], one.values)


def test_fused_maps_are_one_row_and_one_map(run: Run, here: Path) -> None:
    status, out, _ = run("cat.jpg", "--layer", "0,1", "--fuse", "--raw", "x.npy", "--format", "ndjson")
    assert status == 0
    (row,) = rows(out)
    assert (row["layer"], row["shape"], row["type"], row["call"]) == ("conv1 + conv2", [8, 8], "Conv2d", None)
    assert row["file"] == f"cat-nets.py-small-gradcam-fused-conv1+conv2-{row['class']}.png"
    told = read_provenance(here / row["file"])
    assert (told["fused"], told["maps"][0]["layer"]) == (True, "conv1 + conv2")
    assert np.array_equal(np.load("x.npy"), fused(library(layers="conv1,conv2")).values)
    assert 0.5 <= row["max"] <= 1


def test_several_layers_stand_side_by_side_in_one_picture(run: Run, here: Path) -> None:
    _, out, _ = run("cat.jpg", "--layer", "0,1", "--format", "ndjson")
    first, second = rows(out)
    assert first["file"] == second["file"]
    told = read_provenance(here / first["file"])
    assert first["file"] == f"cat-nets.py-small-gradcam-conv1+conv2-{first['class']}.png"
    assert (told["fused"], first["call"], second["call"]) == (False, 0, 0)
    assert [one["layer"] for one in told["maps"]] == ["conv1", "conv2"]
    assert told["size"][0] == 2 * 320 + 12 + 28


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "x.png"], ["x.png"]),
        (["-o", "out"], ["out/cat-nets.py-small-gradcam-1.png"]),
        (["-o", "a/b/"], ["a/b/cat-nets.py-small-gradcam-1.png"]),
        (["dog.png"], [f"{image}-nets.py-small/{image}-nets.py-small-gradcam-1.png" for image in ("cat", "dog")]),
        (["-o", "x.png", "--sheet", "y.png"], ["x.png", "y.png"]),
    ],
)
def test_where_pictures_go(run: Run, here: Path, words: list[str], expected: list[str]) -> None:
    assert run("cat.jpg", *words, "--target", "1")[0] == 0
    assert files(here) == expected


def test_maps_of_other_layers_have_other_names(run: Run, here: Path) -> None:
    asked = (["conv1"], ["conv2"], ["conv1,conv2"], ["conv1,conv2", "--fuse"], ["relu"])
    for words in asked:
        assert run("cat.jpg", "--target", "1", "--layer", *words)[0] == 0
    assert files(here) == sorted(
        f"cat-nets.py-small-gradcam-{what}-1.png"
        for what in ("conv1", "conv2", "conv1+conv2", "fused-conv1+conv2", "relu")
    )


def test_long_names_are_cut_and_still_differ(run: Run, here: Path) -> None:
    for layers in ("0:39", "0:40", "1:40"):
        assert run("cat.jpg", "--target", "1", "--layer", layers, model="nets.py:deep")[0] == 0
    found = files(here)
    assert len(found) == 3 and all(len(name) < 200 for name in found)
    for name in found:
        assert re.fullmatch(r"cat-nets\.py-deep-gradcam-layer.*~[0-9a-f]{8}-1\.png", name), name
    for layers in ("0:39", "0:40", "1:40"):
        assert run("cat.jpg", "--target", "1", "--layer", layers, model="nets.py:deep")[0] == 0
    assert files(here) == found  # the same again


def test_calls_without_a_map_are_left_out_and_named(run: Run) -> None:
    status, out, errors = run("cat.jpg", "--layer", "re:^(conv|fc)", "--format", "ndjson")
    assert (status, [row["layer"] for row in rows(out)]) == (0, ["conv1", "conv2"])
    assert errors == "Note: cat.jpg: 1 call without a map left out: fc\n"
    status, out, errors = run("cat.jpg", "--layer", "all", "--type", "all", "--format", "ndjson")
    assert (status, [row["layer"] for row in rows(out)]) == (0, ["conv1", "relu", "conv2"])
    assert re.fullmatch(r"Note: cat.jpg: \d calls? without a map left out: fc.*\n", errors)


@pytest.mark.parametrize("words", [["--target", "3,0", "--target", "1"], ["--target", "3,owl,red", "--target", "3"]])
def test_several_targets_are_a_union(run: Run, here: Path, words: list[str]) -> None:
    status, out, _ = run("cat.jpg", *words, "--categories", "names.txt", "--format", "ndjson")
    assert status == 0
    assert {row["class"] for row in rows(out)} == {0, 1, 3} and len(files(here)) == 3
    assert rows(out)[0]["class"] == 3


def test_several_classes_go_to_a_folder(run: Run, here: Path) -> None:
    _, out, _ = run("cat.jpg", "--target", "top:2", "--format", "ndjson")
    found = [f"cat-nets.py-small/cat-nets.py-small-gradcam-{row['class']}.png" for row in rows(out)]
    assert len(found) == 2
    assert files(here) == sorted(found)


def test_a_sheet_of_three_classes_and_the_landmarks(run: Run, here: Path) -> None:
    assert run("cat.jpg", "--sheet", "y.png")[0] == 0
    told = read_provenance(here / "y.png")
    layers = list(dict.fromkeys(one["layer"] for one in told["maps"]))
    assert len({one["class"] for one in told["maps"]}) == 3
    assert layers[-1] == "conv2" and len(layers) == 2
    assert told["size"][0] == 4 * 300 + 3 * 12 + 28


def test_a_sheet_of_what_was_chosen(run: Run, here: Path) -> None:
    assert run("cat.jpg", "--sheet", "y.png", "--layer", "conv1", "--target", "2")[0] == 0
    assert [(one["layer"], one["class"]) for one in read_provenance(here / "y.png")["maps"]] == [("conv1", 2)]
    run("cat.jpg", "--sheet", "y.png", "--layer", "conv1")
    assert {one["layer"] for one in read_provenance(here / "y.png")["maps"]} == {"conv1"}
    assert len(read_provenance(here / "y.png")["maps"]) == 3
    run("cat.jpg", "--sheet", "y.png", "--target", "top:1")
    assert len({one["class"] for one in read_provenance(here / "y.png")["maps"]}) == 1


@pytest.mark.parametrize("method", CAM_METHODS)
def test_every_method(run: Run, method: str) -> None:
    status, out, errors = run(
        "cat.jpg", "--method", method, "--raw", "x.npy", "--format", "ndjson", "--batch-size", "5"
    )
    assert status == 0
    (row,) = rows(out)
    assert (row["method"], row["file"]) == (method, f"cat-nets.py-small-{method}-{row['class']}.png")
    assert np.allclose(np.load("x.npy"), library(method=method)[0].values, atol=1e-5)
    assert errors == "" or errors.startswith("Note: cat.jpg: the map of conv2")  # no bar off a terminal


@pytest.mark.parametrize(
    ("target", "index", "label"),
    [("1", 1, "owl"), ("fox", 0, "red fox"), ("Crane", 3, "Crane"), ("crane", 2, "crane")],
)
def test_targets_by_index_and_name(run: Run, target: str, index: int, label: str) -> None:
    status, out, _ = run("cat.jpg", "--target", target, "--categories", "names.txt", "--format", "ndjson")
    assert status == 0
    assert [(row["class"], row["label"]) for row in rows(out)] == [(index, label)]


def test_the_best_classes_come_best_first(run: Run) -> None:
    _, out, _ = run("cat.jpg", "--target", "top:3", "--format", "ndjson")
    scores = [row["score"] for row in rows(out)]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert len({row["file"] for row in rows(out)}) == 3


def test_a_map_that_is_all_zero_is_drawn_and_said(run: Run, here: Path) -> None:
    status, out, errors = run("cat.jpg", "--format", "ndjson", "--raw", "x.npy", model="nets.py:dull")
    assert status == 0
    (row,) = rows(out)
    assert (row["max"], row["peak_x"], row["peak_y"]) == (0, None, None)
    what = f"the map of {row['layer']} for class {row['class']}: all zero: the score does not depend on any place"
    assert errors == f"Note: cat.jpg: {what} of this map\n"
    assert not np.load("x.npy").any()
    assert read_provenance(here / row["file"])["maps"][0]["high"] == 0


def test_grey_models_and_grey_pictures(run: Run, here: Path) -> None:
    picture("cat.jpg").convert("L").save("grey.png")
    for words, model in (
        (["cat.jpg"], "nets.py:grey"),
        (["grey.png"], "nets.py:small"),
        (["grey.png"], "nets.py:grey"),
    ):
        status, out, _ = run(*words, "--format", "ndjson", model=model)
        assert (status, rows(out)[0]["shape"]) == (0, [6, 6])


def test_a_photograph_smaller_than_the_crop(run: Run, here: Path) -> None:
    picture("cat.jpg").resize((20, 15)).save("tiny.png")
    status, out, _ = run("tiny.png", "--format", "ndjson", "-o", "x.png")
    (row,) = rows(out)
    assert status == 0
    assert 0 <= row["peak_x"] <= 20 and 0 <= row["peak_y"] <= 15
    assert read_provenance(here / "x.png")["size"][0] == 20 * 16 + 28


def test_one_of_several_images_is_broken(run: Run, here: Path) -> None:
    (here / "bad.jpg").write_text("no picture")
    status, out, errors = run(
        "cat.jpg", "bad.jpg", "no.jpg", "dog.png", "-o", "out", "--raw", "x.npz", "--format", "ndjson"
    )
    assert status == 1
    assert [row["image"] for row in rows(out)] == ["cat.jpg", "dog.png"]
    assert [line.split(";")[0] for line in errors.splitlines()] == [
        "Error: 'bad.jpg' is not a picture that can be read", "Error: no picture 'no.jpg'",
    ]  # fmt: skip
    assert [row["file"] for row in rows(out)] == [name for name in files(here) if name.startswith("out/")]
    with np.load("x.npz") as found:
        assert [name.split("/")[0] for name in found] == ["cat", "dog"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--layer", "fc"], 1, "the output of fc is no feature map"),
        (["--layer", "unused"], 1, "unused did not run"),
        (["--fuse"], 2, "--fuse needs several layers; no layer is chosen; choose layers with --layer"),
        (["--layer", "conv1", "--fuse"], 2, "the selection has one: conv1; choose several with --layer"),
        (["--target", "fox"], 1, "no class 'fox'; the class names are unknown; give an index, or the names"),
        (["--target", "top:1,"], 2, "the target is empty"),
        (["--target", "1,3", "-o", "x.png"], 2, "--target 1,3 makes several pictures; give -o a folder"),
        (["--target", "1", "--target", "3", "-o", "-"], 2, "--target 1,3 makes several pictures"),
        (["--sheet", "x.png", "--target", "top:20,1"], 2, "--sheet has room for 20 classes; --target is top:20,1"),
        (["--layer", "re:fc"], 1, "the output of fc is no feature map"),
        (["--layer", "fc,re:conv"], 1, "the output of fc is no feature map"),
        (["--target", "foy", "--categories", "names.txt"], 1, "no class 'foy'; "),
        (["--target", "r", "--categories", "names.txt"], 1, "'r' is in the names of 3 classes; 0 red fox, 2 crane"),
        (["--target", ""], 2, "the target is empty"),
        (["--target", "top:2", "-o", "x.png"], 2, "--target top:2 makes several pictures; give -o a folder"),
        (["--target", "top:2", "-o", "-"], 2, "--target top:2 makes several pictures"),
        (["--target", "top:2", "--raw", "x.npy"], 2, "--raw x.npy takes one map; there are several; name it .npz"),
        (["--layer", "0,1", "--raw", "x.npy"], 2, "--raw x.npy takes one map; there are several; name it .npz"),
        (["--raw", "x.txt"], 2, "cannot write x.txt; --raw writes NumPy files"),
        (["--raw", "no/x.npy"], 1, "its folder does not exist"),
        (["--method", "gradcm"], 2, "'gradcm' is not one of 'gradcam'"),
        (["--sheet", "x.jpg"], 2, "cannot write x.jpg"),
        (["--sheet", "-"], 2, "--sheet - is not a file name; give a name that ends in .png"),
        (["--sheet", "x.png", "-o", "./x.png"], 2, "-o and --sheet both write x.png"),
        (["--sheet", "x.png", "--target", "top:21"], 2, "--sheet has room for 20 classes; --target is top:21"),
        (["--sheet", "x.png", "dog.png"], 2, "--sheet x.png takes one image; there are 2"),
        (["dog.png", "--raw", "x.npy"], 2, "--raw x.npy takes one map"),
        (["--categories", "cat.jpg"], 1, "cat.jpg"),
        (["--batch-size", "0"], 2, "batch-size"),
    ],
)  # fmt: skip
def test_what_is_refused_leaves_nothing(run: Run, here: Path, words: list[str], status: int, message: str) -> None:
    one_error(run("cat.jpg", *words, "--format", "ndjson"), status, message)
    assert files(here) == []


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        (
            "nets.py:detached",
            ["--layer", "conv1"],
            "the score does not depend on conv1; no gradient reaches its output",
        ),
        ("nets.py:broken", [], "the score of class 0 is not finite; see gradients --detect-anomaly"),
        ("nets.py:hidden", [], "the map of conv2 is not finite; its activation holds NaN or Inf"),
        ("nets.py:Boxes", [], "Boxes gives boxes and labels, no score for each class; visualize, stats and"),
    ],
)
def test_models_that_cannot_be_explained(run: Run, here: Path, model: str, words: list[str], message: str) -> None:
    one_error(run("cat.jpg", *words, model=model), 1, message)
    assert files(here) == []


def test_segmentation(run: Run) -> None:
    words = ("--weights", "none", "--format", "ndjson")
    status, out, _ = run("cat.jpg", *words, model="lraspp_mobilenet_v3_large")
    assert (status, rows(out)[0]["shape"]) == (0, [8, 8])


def test_a_still_is_a_clip(run: Run) -> None:
    words = ("--weights", "none", "--format", "ndjson", "--raw", "x.npy")
    status, out, errors = run("cat.jpg", *words, model="mc3_18", size="32")
    (row,) = rows(out)
    values = np.load("x.npy")
    assert (status, row["shape"], list(values.shape)) == (0, [16, 2, 2], [16, 2, 2])
    assert row["max"] == pytest.approx(float(values.mean(0).max()))
    assert "repeated 16 times" in errors


def test_extreme_shapes_are_refused(run: Run, here: Path) -> None:
    Image.new("RGB", (1, 5000)).save("thin.png")
    status, _, errors = run("thin.png")
    assert (status, "'thin.png' is too narrow" in errors) == (1, True)
    (here / "thin.png").unlink()
    assert files(here) == []


def test_nothing_is_written_over_an_input(run: Run, here: Path) -> None:
    before = (here / "dog.png").read_bytes()
    (here / "map.npz").write_bytes(before)
    for words in (["dog.png", "-o", "dog.png"], ["dog.png", "--sheet", "dog.png"], ["map.npz", "--raw", "map.npz"]):
        status, out, errors = run(*words, model="no_such_model_is_looked_for")
        assert (status, out) == (1, "")
        assert "it is the image" in errors
    name = "cat-nets.py-small-gradcam-1.png"
    (here / name).write_bytes(before)
    status, _, errors = run("cat.jpg", name, "--target", "1", "-o", ".")
    assert (status, "it is the image" in errors) == (1, True)
    assert (here / name).read_bytes() == before == (here / "dog.png").read_bytes() == (here / "map.npz").read_bytes()


@POSIX
def test_devices(run: Run, here: Path) -> None:
    assert run("cat.jpg", "-o", "/dev/null", "--raw", "/dev/null", "--sheet", "/dev/null")[0] == 0
    assert files(here) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("option", ["-o", "--raw", "--sheet"])
def test_a_full_disk(run: Run, here: Path, option: str) -> None:
    status, _, errors = run("cat.jpg", option, "/dev/full")
    assert status == 1
    assert errors == "Error: cannot write /dev/full: No space left on device; free some space or write elsewhere\n"
    assert len(files(here)) == (option == "--raw")  # the overlay is done by then


def test_standard_input_and_output_in_process(here: Path) -> None:
    picture = (here / "cat.jpg").read_bytes()
    words = ["nets.py:small", "-", "--input-size", "64", "--raw", "x.npy"]
    result = CliRunner().invoke(command, [*words, "-o", "-"], input=picture)
    assert result.exit_code == 0, result.output
    assert read_provenance(result.stdout_bytes)["image"] == "-"
    assert files(here) == ["x.npy"]
    result = CliRunner().invoke(command, words, input=picture)
    assert [name.split("-")[0] for name in files(here)] == ["stdin", "x.npy"]
    assert np.array_equal(np.load("x.npy"), library()[0].values)


def test_a_method_of_the_registry_is_in_the_help_and_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAM_METHODS, "toy", CamMethod(gradcam, "a toy method"))
    text = CliRunner().invoke(command, ["--help"]).output
    assert re.search(r"^    toy +a toy method$", text, re.MULTILINE) and "|toy]" in text.replace("\n", "")
    status, out, _ = run("cat.jpg", "--method", "toy", "--format", "ndjson")
    assert (status, rows(out)[0]["method"]) == (0, "toy")


def test_the_words_of_the_issue(run: Run, here: Path) -> None:
    (here / "cat.jpg").write_bytes((SAMPLES / "cat.jpg").read_bytes())
    status, out, errors = run("cat.jpg", "--format", "ndjson", model="resnet34", size="")
    (row,) = rows(out)
    assert (status, row["layer"], row["shape"]) == (0, "layer4", [7, 7])
    assert row["weights"] == "random (seed 0)"
    assert errors.startswith("Note: weights of resnet34 are random (seed 0)") and errors.count("\n") == 1
    assert files(here) == [row["file"]]


def test_the_model_that_ships(run: Run, here: Path, shapes_file: Path) -> None:
    status, out, _ = run("cat.jpg", "--target", "shape 3", "--format", "ndjson", model="shapes", size="")
    (row,) = rows(out)
    assert (status, row["class"], row["label"]) == (0, 3, "shape 3")
    assert row["file"] == "cat-shapes-gradcam-3.png"


@pytest.mark.slow
def test_the_slow_words_of_the_issue(run: Run, here: Path) -> None:
    (here / "cat.jpg").write_bytes((SAMPLES / "cat.jpg").read_bytes())
    line = "cat.jpg --method layercam --layer features.28 --target 281 -o cam.png --format ndjson"
    status, out, _ = run(*line.split(), model="vgg16", size="")
    (row,) = rows(out)
    assert (status, row["layer"], row["label"], row["shape"]) == (0, "features.28", "tabby", [14, 14])
    assert read_provenance(here / "cam.png")["maps"][0]["class"] == 281


@pytest.mark.slow
def test_a_vision_transformers_zero_head(run: Run, here: Path) -> None:
    status, out, errors = run("cat.jpg", "--weights", "none", "--format", "ndjson", model="vit_b_16", size="")
    (row,) = rows(out)
    assert (status, row["max"], row["shape"]) == (0, 0, [14, 14])
    assert "all zero: the score does not depend on any place of this map" in errors


@POSIX
def test_a_reader_that_has_seen_enough_rows_still_gets_every_file(here: Path) -> None:
    words = "nets.py:small cat.jpg dog.png --input-size 64 -o out --raw x.npz"
    line = f"{shlex.quote(sys.executable)} -m hookscope cam {words} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == list(FIELDS)
    assert len(files(here)) == 3
    with np.load("x.npz") as found:
        assert len(found) == 2


@POSIX
def test_an_interrupt_leaves_nothing_half_written(here: Path) -> None:
    words = ["nets.py:slow", "cat.jpg", "--input-size", "64", "--method", "scorecam", "--batch-size", "1"]
    more = ["-o", "x.png", "--raw", "x.npy", "--sheet", "y.png"]
    started = start("cam", *words, *more, stdout=-1, stderr=-1)
    assert started.stdout is not None and started.stderr is not None
    for _ in range(3):  # the pass of the gradients, and two of the channels
        assert started.stderr.readline() == b"a pass\n"
    started.send_signal(signal.SIGINT)
    out, _ = started.communicate(timeout=60)
    assert (started.returncode, out) == (130, b"")
    assert files(here) == []


@POSIX
def test_a_terminal_has_a_bar_of_passes_and_no_picture(here: Path) -> None:
    import pty

    leader, terminal = pty.openpty()
    words = ["nets.py:small", "cat.jpg", "--input-size", "64", "--method", "ablationcam", "-o", "x.png"]
    started = start("cam", *words, stdout=-1, stderr=terminal)
    os.close(terminal)
    shown = read_until_closed(leader)
    out, _ = started.communicate(timeout=60)
    assert started.returncode == 0
    assert b"passes" in shown and b"12/12" in shown
    assert b"passes" not in out and len(out.splitlines()) == 2


def read_until_closed(leader: int) -> bytes:
    shown, end = b"", time.monotonic() + 60
    try:
        while time.monotonic() < end:
            if select.select([leader], [], [], 1)[0]:
                shown += os.read(leader, 4096)
    except OSError:  # the other side is closed
        pass
    finally:
        os.close(leader)
    return shown


def test_the_models_state_is_not_needed(run: Run) -> None:
    """Gradients are on whatever surrounds the command."""
    with torch.inference_mode(False), torch.no_grad():
        assert run("cat.jpg")[0] == 0
