"""The command cam on a small model: its rows, files, notes and refusals."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import hookscope
from hookscope.drawing.files import read_provenance
from hookscope.explain.cam_maps import fuse_maps
from hookscope.explain.cam_methods import CAM_METHODS
from tests.cli.helpers import ROOT, Run, files, one_error, rows

NETS = """

def deep():
    layers = {f"layer_of_the_deep_net_{number}": nn.Conv2d(3, 3, 1) for number in range(12)}
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    return net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])

def volume():
    return nn.Sequential(nn.Conv3d(3, 4, (2, 3, 3), (2, 1, 1)), nn.AdaptiveAvgPool3d(1), nn.Flatten())
"""
PICTURES = {"cat.jpg": (160, 120), "dog.png": (120, 160)}


def command_line(*words: str, model: str = "nets.py:Small", size: str = "32") -> list[str]:
    return ["cam", model, *words, "--input-size", size, "--format", "ndjson"]


def library(target: str = "top:1", layers: Any = None, method: str = "gradcam", image: str = "cat.jpg") -> Any:
    net = hookscope.load_model("nets.py:Small", "none", input_size=(32, 32))
    tensor = net.preprocess(hookscope.open_image(image))
    return hookscope.class_activation_maps(net.model, net.inputs(tensor), layers, target, method)


@pytest.mark.parametrize("method", CAM_METHODS)
def test_a_row_and_a_raw_map_are_the_librarys(run: Run, here: Path, method: str) -> None:
    status, out, errors = run("cat.jpg", "--method", method, "--raw", "x.npy", "--batch-size", "5")
    [row], [expected] = rows(out), library(method=method)
    assert status == 0 and (errors == "" or errors.startswith("Note: cat.jpg: the map of conv2"))
    assert np.load("x.npy").dtype == np.float32
    assert np.allclose(np.load("x.npy"), expected.values, atol=1e-5)
    assert (row["method"], row["layer"], row["class"]) == (method, "conv2", expected.prediction.index)
    assert row["file"] == f"cat-nets.py-Small-{method}-{row['class']}.png"
    assert row["score"] == pytest.approx(expected.prediction.score)
    assert row["probability"] == pytest.approx(expected.prediction.probability)
    assert row["max"] == pytest.approx(float(expected.values.max()), abs=1e-5)
    assert files(here) == [row["file"], "x.npy"]
    assert read_provenance(here / row["file"])["maps"][0]["score"] == row["score"]


@pytest.mark.parametrize("image", PICTURES)
def test_the_peak_is_in_pixels_of_the_photograph(run: Run, here: Path, image: str) -> None:
    [row] = rows(run(image, "--layer", "conv1", "--raw", "x.npy")[1])
    values = np.load("x.npy")
    y, x = np.unravel_index(values.argmax(), values.shape)
    # the picture is resized to 37 (32 * 256 / 224), and the middle 32 of 37 are cropped
    side, (wide, high) = 120 * 32 / 37, PICTURES[image]
    expected = ((wide - side) / 2 + (x + 0.5) / 14 * side, (high - side) / 2 + (y + 0.5) / 14 * side)
    assert (row["peak_x"], row["peak_y"]) == pytest.approx(expected, abs=2)


def test_a_photograph_may_be_smaller_than_the_crop(run: Run, here: Path) -> None:
    with Image.open("cat.jpg") as image:
        image.resize((20, 15)).save("tiny.png")
    [row] = rows(run("tiny.png", "--layer", "conv1", "-o", "x.png")[1])
    assert 0 <= row["peak_x"] <= 20 and 0 <= row["peak_y"] <= 15
    assert read_provenance(here / "x.png")["size"][0] == 20 * 16 + 28


def test_raw_maps_are_named_by_picture_layer_and_class_and_fused_maps_are_one(run: Run, here: Path) -> None:
    words = ["--layer", "conv1,conv2", "--target", "top:2", "--raw", "x.npz"]
    assert len(rows(run("cat.jpg", "dog.png", *words)[1])) == 8
    with np.load("x.npz") as arrays:
        assert len(arrays) == 8
        for image in PICTURES:
            for each in library("top:2", "conv1,conv2", image=image):
                name = f"{image[:3]}/{each.call.key}/{each.prediction.index}"
                assert np.array_equal(arrays[name], each.values)
    [row] = rows(run("cat.jpg", "--layer", "0,1", "--fuse", "--raw", "x.npy")[1])
    assert (row["layer"], row["shape"], row["call"]) == ("conv1 + conv2", [14, 14], None)
    assert row["file"] == f"cat-nets.py-Small-gradcam-fused-conv1+conv2-{row['class']}.png"
    assert np.array_equal(np.load("x.npy"), fuse_maps(library(layers="conv1,conv2"))[0].values)


def test_maps_of_other_layers_have_other_names_and_long_ones_are_cut(run: Run, here: Path) -> None:
    for layers in ("conv1", "conv1,conv2"):
        run("cat.jpg", "--target", "1", "--layer", layers)
    for layers in ("0:11", "0:12", "1:12", "0:12"):
        run("cat.jpg", "--target", "1", "--layer", layers, model="nets.py:deep")
    *names, first, second = sorted(files(here), key=lambda name: "Small" in name)
    assert (first, second) == ("cat-nets.py-Small-gradcam-conv1+conv2-1.png", "cat-nets.py-Small-gradcam-conv1-1.png")
    assert len(names) == 3 and all(len(name) < 200 for name in names)
    assert all(re.fullmatch(r"cat-nets\.py-deep-gradcam-layer.*~[0-9a-f]{8}-1\.png", name) for name in names)


def test_calls_without_a_map_are_left_out_and_a_still_is_repeated_as_a_clip(run: Run) -> None:
    status, out, errors = run("cat.jpg", "--layer", "re:^(conv|fc)")
    assert (status, [row["layer"] for row in rows(out)]) == (0, ["conv1", "conv2"])
    assert errors == "Note: cat.jpg: left out 1 call without a map: fc\n"
    status, out, errors = run("cat.jpg", "--raw", "x.npy", model="nets.py:Clip")
    [row], values = rows(out), np.load("x.npy")
    assert (status, row["shape"], list(values.shape)) == (0, [16, 32, 32], [16, 32, 32])
    assert row["max"] == pytest.approx(float(values.mean(0).max()))
    assert "repeated 16 times" in errors


@pytest.mark.parametrize(
    ("words", "layers", "classes"),
    [
        ([], {"relu", "conv2"}, 3),
        (["--layer", "conv1", "--target", "2"], {"conv1"}, 1),
        (["--layer", "conv1"], {"conv1"}, 3),
        (["--target", "top:1"], {"relu", "conv2"}, 1),
    ],
)
def test_a_sheet_has_three_classes_and_the_landmarks_unless_chosen(
    run: Run, here: Path, words: list[str], layers: set[str], classes: int
) -> None:
    assert run("cat.jpg", "--sheet", "y.png", *words)[0] == 0
    maps = read_provenance(here / "y.png")["maps"]
    assert {each["layer"] for each in maps} == layers
    assert len({each["class"] for each in maps}) == classes and len(maps) == classes * len(layers)


def test_a_map_that_is_all_zero_is_drawn_with_a_note(run: Run, here: Path) -> None:
    status, out, errors = run("cat.jpg", "--raw", "x.npy", model="nets.py:Dull")
    [row] = rows(out)
    assert (status, row["max"], row["peak_x"], row["peak_y"]) == (0, 0, None, None)
    assert errors.startswith(f"Note: cat.jpg: the map of {row['layer']} for class {row['class']}: all zero: ")
    assert not np.load("x.npy").any()
    assert read_provenance(here / row["file"])["maps"][0]["high"] == 0


@pytest.mark.parametrize("words", [[], ["--layer", "features.10,features.12.expand3x3", "--fuse"]])
def test_an_unseen_class_alone_is_drawn_on_the_scale_of_the_best(run: Run, here: Path, words: list[str]) -> None:
    star = str(ROOT / "samples" / "shapes" / "star.png")
    for target in ("7", "9", "7,9"):
        folder = f"of{target}"
        (here / folder).mkdir()
        status, out, errors = run(star, "--target", target, "-o", folder, *words, model="shapes", size="128")
        found = {row["class"]: row for row in rows(out)}
        assert status == 0 and [row["low_probability"] for row in found.values()] == [number == 9 for number in found]
        says = "triangle: the model does not see this class: it has 0.57 %, the best class 95.4 %"
        assert errors == (f"Note: {star}: {says}\n" if 9 in found else "")
        for row in found.values():
            [drawn] = read_provenance(row["file"])["maps"]
            assert drawn["top"] == pytest.approx(0.9755 if words else 1.1638, abs=1e-4)
            assert (drawn["high"] < drawn["top"] / 5) == (row["class"] == 9)


@pytest.mark.parametrize(("option", "name"), [("--sheet", "dog.png"), ("--raw", "map.npz"), ("-o", ".")])
def test_nothing_is_written_over_an_input(run: Run, here: Path, option: str, name: str) -> None:
    image = "cat-nets.py-Small-gradcam-1.png" if name == "." else name
    before = (here / "dog.png").read_bytes()
    (here / image).write_bytes(before)
    status, _, errors = run(image, option, name, "--target", "1", *(["cat.jpg"] if name == "." else []))
    assert (status, "it is the image" in errors) == (1, True)
    assert (here / image).read_bytes() == before


def test_a_clip_is_drawn_frame_by_frame_and_only_a_clip_is_an_animation(run: Run, here: Path) -> None:
    frames = [Image.new("RGB", (32, 32), (8 * at, 0, 200)) for at in range(16)]
    frames[0].save("clip.webp", save_all=True, append_images=frames[1:], lossless=True)
    for name, pages in (("out.png", 1), ("out.gif", 16), ("out.webp", 16)):
        status, out, _ = run("clip.webp", "--target", "1", "-o", name, model="nets.py:volume", size="16x32x32")
        [row] = rows(out)
        assert (status, row["file"], row["shape"]) == (0, name, [8, 30, 30])
        with Image.open(name) as picture:
            assert getattr(picture, "n_frames", 1) == pages
            if name != "out.gif":
                picture.seek(pages - 1)
                assert (120, 0, 200) in {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    assert read_provenance(here / "out.png")["frames"] == 16
    status, out, _ = run("clip.webp", "--similar-to", "clip.webp", model="nets.py:volume", size="16x32x32")
    assert (status, rows(out)[0]["score"]) == (0, pytest.approx(1, abs=1e-6))  # all its frames are read
    one_error(run("cat.jpg", "-o", "cat.gif"), 2, "cannot write cat.gif; nets.py:Small takes an image: there are no")
    says = "cannot write cat.mp4; sheets are PNG files, of clips also .gif or .webp; name it .png, or give a folder"
    one_error(run("cat.jpg", "-o", "cat.mp4"), 2, says)
