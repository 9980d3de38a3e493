"""The options that say how pictures become inputs: what they do, and what tables, pictures and notes say of it."""

import csv
import io
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision import transforms as T

from hookscope.drawing.files import read_provenance
from tests.cli.helpers import Run, one_error

NETS = """
del preprocess  # these models say nothing of their input


class Bright(nn.Module):
    # the score is the mean of the brightness above 0.5 in 0..1, whatever the normalisation did to the rest
    def __init__(self, channels=3, low=0.0, span=1.0):
        super().__init__()
        self.look, self.low, self.span = nn.Conv2d(channels, 1, 1, bias=False), low, span
        nn.init.constant_(self.look.weight, 1 / channels)

    def forward(self, x):
        seen = self.look((x - self.low) / self.span) - 0.5
        return seen.relu().mean((2, 3)).expand(-1, 2) * torch.tensor([1.0, 2.0])


def bright():
    return Bright()


def grey():
    return Bright(1)


def four():
    return Bright(4)


def half():
    model = Bright()
    model.default_cfg = {"input_size": (3, 48, 48), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0}
    return model


def sized():
    return Bright()


sized.input_size = 48


def drifting():
    return nn.Sequential(batch_norm(), nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def batch_norm():
    norm = nn.BatchNorm2d(3)
    norm.running_mean[:], norm.running_var[:], norm.num_batches_tracked[...] = 127, 60.0**2, 9
    return norm


def to_four(picture):
    from torchvision.transforms import functional as F
    return F.to_tensor(picture.resize((20, 24)))[[0, 1, 2, 0]]


words = {"preprocess": "half", "resize": "pad"}
"""
PICTURES = {"cat.jpg": (80, 60), "dog.png": (40, 30)}


def command_line(*words: str) -> list[str]:
    return [*words, "--device", "cpu"]


NOTES = {
    "bright": "nets.py:bright does not state its preprocessing: assumed resize 256, crop 224, ImageNet mean and std;"
    " change it with --preprocess, --mean, --std, --size",
    "sized": "nets.py:sized does not state its mean and std: assumed ImageNet mean and std; change it with --mean,"
    " --std, --range",
    "grey": "nets.py:grey does not state its preprocessing: assumed resize 256, crop 224, mean 0.449, std 0.226;"
    " change it with --preprocess, --mean, --std, --size",
    "bright --mean 0.5 --std 0.5": "nets.py:bright does not state its input size: assumed resize 256, crop 224; change"
    " it with --size, --resize",
    "bright --preprocess imagenet": "",
    "bright --preprocess half --size 64": "",
    "bright --resize pad --range 0..1": "",
    "sized --range=-1..1": "",
    "half": "",
}


@pytest.mark.parametrize(("words", "note"), NOTES.items(), ids=NOTES)
def test_one_note_says_what_was_assumed(run: Run, words: str, note: str) -> None:
    model, *options = words.split()
    status, _, errors = run("predict", f"nets.py:{model}", "cat.jpg", *options)
    assert (status, errors) == (0, f"Note: {note}\n" if note else "")


USED = {
    "bright": "assumed resize 256, crop 224, ImageNet mean and std",
    "sized": "resize 55, crop 48, assumed ImageNet mean and std",
    "half": "resize 48 bicubic, crop 48, mean 0.5, std 0.25",
    "half --mean 0.1,0.2,0.30000000000000004 --std 1": "resize 48 bicubic, crop 48, mean 0.1 0.2 0.30000000000000004,"
    " std 1",
    "bright --preprocess nets.py:words --size 40": "pad to 40x40, mean 0.5, std 0.5",
}


@pytest.mark.parametrize(("words", "used"), USED.items(), ids=USED)
def test_what_was_used_stands_in_the_caption_and_in_the_picture(run: Run, here: Path, words: str, used: str) -> None:
    model, *options = words.split()
    for command in ("visualize", "cam", "saliency"):
        layer = [] if command == "saliency" else ["--layer", "look"]
        status, out, _ = run(
            command, f"nets.py:{model}", "cat.jpg", *layer, *options, "-o", "a.png", "--format", "table"
        )
        assert status == 0 and f"preprocess: {used}" in " ".join(out.split())
        assert read_provenance("a.png")["preprocess"] == used


def test_options_go_before_the_weights_and_a_drift_names_what_is_assumed(run: Run) -> None:
    words = ("squeezenet1_1", "cat.jpg", "--weights", "none", "--top", "1", "--format", "table")
    assert "preprocess: resize 256, crop 224, ImageNet mean and std" in " ".join(run("predict", *words)[1].split())
    _, out, _ = run("predict", *words, "--mean", "0.5", "--std", "0.5", "--resize", "stretch", "--size", "64")
    assert "preprocess: stretch 64x64, mean 0.5, std 0.5" in " ".join(out.split())
    for words in (["weights", "nets.py:bright"], ["verify", "nets.py:bright"], ["list-layers", "nets.py:bright"]):
        assert "says nothing" not in run(*words)[2]
    words = ("stats", "nets.py:drifting", "cat.jpg", "--format", "table")
    out = " ".join(run(*words)[1].split())
    assert "they were assumed. First give the preprocessing of training: --preprocess" in out
    out = " ".join(run(*words, "--preprocess", "imagenet")[1].split())
    assert "batchnorm-drift" in out and "assumed" not in out
    assert "batchnorm-drift" not in run(*words, "--range", "0..255")[1]


def test_a_function_of_a_file_makes_four_channels_and_they_are_normalised(run: Run, here: Path) -> None:
    four = T.functional.to_tensor(Image.open("cat.jpg").resize((20, 24)))[[0, 1, 2, 0]]
    shift, divide = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, 2.0, 4.0, 8.0])
    for tensor, options in [
        (four, []),
        ((four - shift[:, None, None]) / divide[:, None, None], ["--mean", "0.1,0.2,0.3,0.4", "--std", "1,2,4,8"]),
    ]:
        _, out, errors = run(
            "predict", "nets.py:four", "cat.jpg", "--preprocess", "nets.py:to_four", *options, "--format", "csv"
        )
        assert errors == ""
        score = (tensor.mean(0) - 0.5).relu().mean()
        assert float(next(csv.DictReader(io.StringIO(out)))["score"]) == pytest.approx(float(score * 2), rel=1e-5)


REFUSED = [
    ("grey --mean 1,2,3 --std 1", 2, "--mean has 3 numbers, and the input has 1 channel"),
    ("four --preprocess half", 1, "takes 4 channels and got 3...give --preprocess file.py:function"),
    ("four --preprocess nets.py:to_four --resize pad", 2, "nets.py:to_four makes the whole input, so --resize cannot"),
]


@pytest.mark.parametrize(("words", "status", "message"), REFUSED)
def test_what_is_refused_is_one_line(run: Run, words: str, status: int, message: str) -> None:
    model, *options = words.split()
    one_error(run("predict", f"nets.py:{model}", "cat.jpg", *options), status, message)


SQUARE = {"wide": ((200, 90), (120, 30, 150, 60)), "high": ((90, 200), (30, 120, 60, 150))}


@pytest.mark.parametrize("options", ["shorter", "stretch", "pad", "shorter:80"])
@pytest.mark.parametrize(("size", "square"), SQUARE.values(), ids=SQUARE)
def test_a_map_lies_on_what_the_network_saw(
    run: Run, here: Path, size: tuple[int, int], square: tuple[int, int, int, int], options: str
) -> None:
    """A bright square in the dark is all that the network sees, and all that a class activation map marks."""
    picture = Image.new("RGB", size)
    picture.paste((255, 255, 255), square)
    picture.save("square.png")
    words = ("--resize", options, "--size", "64", "--range", "0..1", "--layer", "look", "--format", "csv")
    status, out, _ = run("cam", "nets.py:bright", "square.png", *words, "-o", "a.png")
    row = next(csv.DictReader(io.StringIO(out)))
    assert status == 0
    left, top, right, bottom = square
    assert left <= float(row["peak_x"]) <= right and top <= float(row["peak_y"]) <= bottom
    _, out, _ = run("saliency", "nets.py:bright", "square.png", *words[:6], "--format", "csv", "-o", "s.png")
    row = next(csv.DictReader(io.StringIO(out)))
    assert left - 2 <= float(row["peak_x"]) <= right + 2 and top - 2 <= float(row["peak_y"]) <= bottom + 2
