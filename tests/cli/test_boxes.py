"""Detected boxes as what cam and saliency explain."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hookscope.drawing import read_provenance
from hookscope.explain import saliency_maps
from hookscope.scores import BoxTarget
from tests.cli.helpers import Run, files, one_error, rows
from tests.explain.nets import FindsCells, street

FINDS = "tests.explain.nets:FindsCells"
RAW = ("--preprocess", "none", "--range", "0..1", "--format", "ndjson")


def command_line(*words: str) -> list[str]:
    return list(words)


@pytest.fixture(autouse=True)
def photograph(here: Path) -> None:
    Image.fromarray((street().permute(1, 2, 0) * 255).round().byte().numpy()).save("street.png")


def test_cam_explains_several_boxes(run: Run) -> None:
    words = ("--target", "box:0,box:2", "--method", "layercam", "--layer", "relu", "-o", "out/")
    status, out, errors = run("cam", FINDS, "street.png", *RAW, *words)
    assert (status, errors.splitlines()[:-1]) == (0, [])
    left, right = rows(out)
    assert [(row["target"], row["class"], row["box"]) for row in (left, right)] == [
        ("box 0: class 1", 1, [0, 8, 8, 16]),
        ("box 2: class 1", 1, [24, 8, 32, 16]),
    ]
    assert right["peak_x"] > 24 and 8 < right["peak_y"] < 16
    assert [Path(path).name.split("-", 2)[2] for path in files(Path("out"))] == [
        f"FindsCells-layercam-relu-box-{index}-class-1.png" for index in (0, 2)
    ]
    assert read_provenance(right["file"])["maps"][0]["box"] == [24, 8, 32, 16]


def test_saliency_explains_a_box_and_a_map_highest_outside_has_a_note(run: Run) -> None:
    words = ("--target", "box:1:class", "--raw", "x.npy", "--method", "gradient-input")
    status, out, _ = run("saliency", FINDS, "street.png", *RAW, *words)
    [row] = rows(out)
    [expected] = saliency_maps(
        FindsCells(), (street()[None] * 255).round() / 255, BoxTarget(1, fit=False), "gradient-input"
    )
    assert (status, row["target"], row["box"]) == (0, "box 1: class 2", [24, 16, 32, 24])
    assert np.load("x.npy") == pytest.approx(expected.values.numpy(), abs=1e-6)
    _, _, errors = run("cam", FINDS, "street.png", *RAW, "--target", "box:2", "--layer", "relu")
    says = "the map of relu for box 2: class 1: the highest value lies outside the box; hirescam and layercam show only"
    assert says in errors


@pytest.mark.parametrize("command", ["cam", "saliency"])
def test_an_image_without_the_box_does_not_stop_the_others(run: Run, command: str) -> None:
    Image.new("RGB", (32, 24)).save("empty.png")
    words = ("--target", "box:0", *(("--layer", "relu") if command == "cam" else ()), *RAW)
    says = "no box 0; FindsCells finds no box in this image; give another image"
    one_error(run(command, FINDS, "empty.png", *words), 1, says)
    status, out, errors = run(command, FINDS, "empty.png", "street.png", "-o", "out/", *words)
    assert (status, [row["image"] for row in rows(out)]) == (1, ["street.png"])
    assert f"Error: empty.png: {says}" in errors


@pytest.mark.parametrize("command", ["cam", "saliency"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--target box:3", "no box 3; FindsCells finds 3 boxes: box:0 class 1 (0.98), box:1 class 2 (0.96)"),
        ("", "FindsCells gives boxes, labels and scores, no score for each class; inspect, visualize"),
    ],
)
def test_a_box_that_is_not_there_is_one_line(run: Run, command: str, words: str, says: str) -> None:
    one_error(run(command, FINDS, "street.png", *RAW, *words.split()), 1, says)
    assert files(Path()) == ["street.png"]
