"""``compare-maps`` on a small model: rows, pages, maps from files and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import hookscope
from hookscope.drawing.files import read_provenance
from hookscope.faithfulness import BASELINES
from tests.cli.helpers import Run, files, one_error, rows

PICTURES = {"cat.jpg": (160, 120), "dog.png": (120, 160)}
SLOW = pytest.mark.slow
TWO = ("--methods", "gradcam,eigencam")
ONE = ("--methods", "gradcam")


def command_line(*words: str, format: str = "ndjson", command: str = "compare-maps") -> list[str]:
    return [command, "nets.py:Small", *words, "--input-size", "32", "--target", "1", "--format", format]


def test_rows_are_those_of_the_library(run: Run, here: Path) -> None:
    status, out, _ = run("cat.jpg", *TWO)
    verdict, *found = rows(out)
    net = hookscope.load_model("nets.py:Small", "none", input_size=(32, 32))
    inputs = net.inputs(net.preprocess(hookscope.open_image("cat.jpg")))
    expected = hookscope.cam_faithfulness(net.model, inputs, None, 1, ["gradcam", "eigencam"])
    means = hookscope.compare_maps([expected])
    assert status == 0 and verdict["row"] == "verdict" and verdict["sentences"] == list(means.verdict)
    of_image = [row for row in found if row["row"] == "measured_map"]
    assert {row["map"] for row in of_image} == {"gradcam", "eigencam", *BASELINES}
    for row in of_image:
        [same] = [each for each in expected if each.name == row["map"]]
        assert row["road"] == pytest.approx(same.road, abs=1e-6)
        assert (row["class"], row["passes"], row["randomized"]) == (1, same.passes, same.randomized)
        assert row["file"] == "cat-nets.py-Small-compare-1.png"
    assert [row["map"] for row in found if row["row"] == "map"] == [each.name for each in means.maps]
    assert files(here) == ["cat-nets.py-Small-compare-1.png"]
    facts = read_provenance(here / "cat-nets.py-Small-compare-1.png")
    assert facts["verdict"] == list(means.verdict) and len(facts["maps"]) == 4


def test_of_several_images_the_means_stand_in_the_table_and_missing_methods_are_one_note(run: Run, here: Path) -> None:
    status, out, _ = run("cat.jpg", "dog.png", *TWO, format="table")
    assert status == 0 and "2 images do not show which map suits the model: give 10" in " ".join(out.split())
    assert " low " in out and "file" not in out.splitlines()[3]
    assert out.endswith("2 images, 4 maps: 520 passes to measure them\n")
    assert len(files(here)) == 2
    model = (here / "nets.py").read_text()
    (here / "nets.py").write_text(f"import torch\n{model}\nSmall.forward = torch.no_grad()(Small.forward)\n")
    status, _, errors = run("cat.jpg")
    assert status == 0 and errors.count("without gradcam") == 1, errors
    assert "without gradcam, gradcam++, hirescam, layercam, xgradcam: no layer of Small has a map" in errors


@SLOW
def test_every_method_that_the_model_has_is_drawn(run: Run) -> None:
    found = json.loads(run("cat.jpg", "--layer", "conv1", "-o", "x.png", format="json")[1])
    assert [row["map"] for row in found["measured_maps"]][-1] in found["maps"][-1]["map"]
    names = {row["map"] for row in found["maps"]}
    assert names == {*hookscope.explain.CAM_METHODS, *BASELINES}  # no attention, no rollout


@pytest.mark.parametrize("name", ["mine.npy", *(pytest.param(name, marks=SLOW) for name in ("mine.png", "mine.npz"))])
def test_a_map_from_a_file_is_measured_beside_one_method(run: Run, name: str) -> None:
    values = np.random.default_rng(0).integers(0, 255, (7, 7)).astype(np.uint8)
    if name == "mine.png":
        Image.fromarray(values).save(name)
    else:
        (np.save if name == "mine.npy" else np.savez)(name, values)
    status, out, errors = run("cat.jpg", *ONE, "--map", name, "--raw", "x.npz", format="csv")
    assert status == 0 and errors.startswith("Note: ")  # the verdict
    assert {line.split(",")[1] for line in out.splitlines()[1:]} == {"mine", "gradcam", *BASELINES}
    with np.load("x.npz") as arrays:
        assert np.array_equal(arrays["cat/mine/1"], values)


def test_a_map_of_the_photograph_is_cut_to_what_the_network_saw(run: Run) -> None:
    # the photograph is resized to 37 pixels, of which the network sees the middle 32
    photograph = np.zeros((120, 160), np.float32)
    photograph[:, 80:] = 1
    np.save("whole.npy", photograph)
    run("cat.jpg", *ONE, "--map", "whole.npy", "--raw", "x.npz")
    with np.load("x.npz") as arrays:
        cut = arrays["cat/whole/1"]
    assert cut.shape == (32, 32) and cut[:, :15].max() == 0 and cut[:, 17:].min() == 1


@SLOW
def test_maps_of_several_images_come_from_raw_files_and_folders(run: Run, here: Path) -> None:
    run("cat.jpg", "dog.png", "--method", "layercam", "--raw", "maps.npz", command="cam")
    (here / "maps").mkdir()
    for name in ("cat", "dog"):
        np.save(here / "maps" / name, np.eye(5))
    status, out, _ = run("cat.jpg", "dog.png", *ONE, "--map", "maps.npz", "--map", "maps")
    found = [row["map"] for row in rows(out) if row["row"] == "map"]
    assert status == 0 and sorted(found) == sorted(["maps", "maps of maps", "gradcam", *BASELINES])


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--map", "bad.npy"), 1, "the map bad.npy cannot be read"),
        (("--map", "other.npz"), 1, "other.npz has no map of cat...it has maps of dog"),
        (("--map", "deep.npy"), 2, "deep has the shape 2x3x4"),
        (("--map", "deep.npy", "dog.png"), 2, "is the map of one image...2 images"),
        (("--boxes", "dog.json"), 1, "--boxes has no box of cat.jpg...dog.png"),
    ],
)
def test_what_does_not_go_is_one_line(run: Run, here: Path, words: tuple[str, ...], status: int, message: str) -> None:
    (here / "bad.npy").write_text("no array")
    np.savez("other.npz", **{"dog/conv2/1": np.eye(3)})
    np.save("deep.npy", np.zeros((2, 3, 4)))
    (here / "dog.json").write_text('{"dog.png": [1, 2, 3, 4]}')
    before: Any = files(here)
    one_error(run("cat.jpg", *words), status, message)
    assert files(here) == before


def test_boxes_are_in_pixels_of_the_photograph(run: Run, here: Path) -> None:
    values = np.zeros((32, 32))
    values[4, 20] = 1
    np.save("dot.npy", values)
    side = 120 * 32 / 37
    x, y = (160 - side) / 2 + 20.5 / 32 * side, (120 - side) / 2 + 4.5 / 32 * side
    near, far = [x - 2, y - 2, x + 2, y + 2], [0, 0, 5, 5]
    for boxes, points in [({"cat.jpg": {"box": far}}, False), ({"cat.jpg": [far, near]}, True)]:
        (here / "boxes.json").write_text(json.dumps(boxes))
        out = run("cat.jpg", "--map", "dot.npy", "--methods", "hirescam", "--boxes", "boxes.json")[1]
        [row] = [row for row in rows(out) if row["row"] == "measured_map" and row["map"] == "dot"]
        assert row["points"] is points and row["in_box"] == pytest.approx(float(points), abs=0.1)
