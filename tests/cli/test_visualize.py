"""The command visualize, in process on a small model, and as a process on pipes and terminals."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import hookscope
from hookscope.cli.commands.visualize import FIELDS, command
from hookscope.drawing.png import read_provenance
from tests.cli.helpers import POSIX, ROOT, Run, files, one_error, rows, start

SAMPLES = ROOT / "samples"

NETS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 7, stride=16)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 12, 3, stride=2)
        self.fc = nn.Linear(12, 2)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(self.conv2(x).mean((2, 3)))

def small():
    torch.manual_seed(0)
    return Small()
"""


PICTURES = {"cat.jpg": (60, 40), "dog.png": (40, 60)}


def command_line(*words: str, model: str = "nets.py:small") -> list[str]:
    return ["visualize", model, *words]


def test_one_sheet_goes_to_the_current_folder(run: Run, here: Path) -> None:
    status, out, errors = run("cat.jpg", "--layer", "1", "--format", "ndjson")
    assert (status, errors) == (0, "")
    (row,) = rows(out)
    assert tuple(row) == FIELDS
    name = "cat-nets.py-small-001-conv2.png"
    assert (row["index"], row["name"], row["type"], row["call"]) == (1, "conv2", "Conv2d", 0)
    assert (row["shape"], row["dead"], row["nonfinite"], row["file"]) == ([1, 12, 6, 6], 0, 0, name)
    assert row["min"] < row["mean"] < row["max"]
    assert files(here) == [name]
    told = read_provenance(here / name)
    assert (told["image"], told["layer"], told["weights"]) == ("cat.jpg", "conv2", row["weights"])
    _, values = hookscope.read_sheet(here / name)[""]
    assert (values.min(), values.max()) == pytest.approx((row["min"], row["max"]), rel=1e-6)


def test_several_sheets_go_to_a_folder_in_layer_order(run: Run, here: Path) -> None:
    status, out, _ = run("cat.jpg", "--layer", "all,bn1")
    assert status == 0
    made = files(here)
    folder = "cat-nets.py-small"
    words = ["000-conv1", "000a-bn1", "001-conv2"]
    assert made == [f"{folder}/{folder}-{word}.png" for word in words]
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0] == list(FIELDS)
    assert [line[-1] for line in lines[1:]] == made


def test_a_table(run: Run) -> None:
    _, out, _ = run("cat.jpg", "--layer", "0", "--format", "table")
    assert out.splitlines()[0].split() == list(FIELDS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-o", "x.png", "--layer", "0"], ["x.png"]),
        (["-o", "out", "--layer", "0"], ["out/cat-nets.py-small-000-conv1.png"]),
        (["-o", "a/b/", "--layer", "-1"], ["a/b/cat-nets.py-small-001-conv2.png"]),
        (["--layer=-2", "-o", "x.png"], ["x.png"]),
    ],
)
def test_where_sheets_go(run: Run, here: Path, words: list[str], expected: list[str]) -> None:
    assert run("cat.jpg", *words)[0] == 0
    assert files(here) == expected


def test_two_images_of_one_name_do_not_overwrite_one_another(run: Run, here: Path) -> None:
    for folder, name in (("a", "cat.jpg"), ("b", "dog.png")):
        (here / folder).mkdir()
        (here / name).rename(here / folder / "cat.jpg")
    status, out, _ = run("a/cat.jpg", "b/cat.jpg", "-o", "out", "--layer", "0", "--format", "ndjson")
    assert status == 0
    first, second = (row["file"] for row in rows(out))
    assert first != second
    assert read_provenance(first)["sha256"] != read_provenance(second)["sha256"]


def test_a_sheet_never_overwrites_an_image_of_the_run(run: Run, here: Path) -> None:
    name = "cat-nets.py-small-000-conv1.png"
    (here / "dog.png").rename(here / name)
    before = (here / name).read_bytes()
    status, _, errors = run("cat.jpg", name, "-o", ".", "--layer", "0")
    assert status == 1
    assert "it is the image" in errors
    assert (here / name).read_bytes() == before


def bad_images(here: Path) -> dict[str, str]:
    (here / "empty.jpg").write_bytes(b"")
    whole = (SAMPLES / "cat.jpg").read_bytes()
    (here / "cut.jpg").write_bytes(whole[:2000])
    (here / "text.png").write_text("no picture")
    (here / "folder").mkdir()
    (here / "evil\x1b]0;x\n.jpg").write_bytes(b"")
    Image.new("1", (20_000, 20_000)).save(here / "bomb.png")
    return {
        "missing.jpg": "no picture 'missing.jpg'",
        "empty.jpg": "'empty.jpg' is empty",
        "cut.jpg": "'cut.jpg' cannot be decoded",
        "text.png": "'text.png' is not a picture",
        "folder": "'folder' is a folder",
        "evil\x1b]0;x\n.jpg": "'evil\\x1b]0;x\\n.jpg' is empty",
        "bomb.png": "'bomb.png' is too large",
    }


def test_broken_images_are_named_and_the_others_done(run: Run, here: Path) -> None:
    bad = bad_images(here)
    status, out, errors = run("cat.jpg", *bad, "dog.png", "--layer", "0", "-o", "out", "--format", "ndjson")
    assert status == 1
    lines = errors.splitlines()
    assert len(lines) == len(bad)
    for line, words in zip(lines, bad.values(), strict=True):
        assert line.startswith(f"Error: {words}")
        assert line.isprintable()
    assert [row["file"] for row in rows(out)] == [f"out/{n}-nets.py-small-000-conv1.png" for n in ("cat", "dog")]
    assert sorted(os.listdir(here / "out")) == sorted(os.path.basename(row["file"]) for row in rows(out))


def test_one_broken_image_is_the_error(run: Run, here: Path) -> None:
    for name, words in bad_images(here).items():
        before = files(here)
        status, out, errors = run(name, "--layer", "0", model="no_such_model_is_looked_for")
        assert (status, out) == (1, "")
        assert errors.startswith(f"Error: {words}")
        assert errors.count("\n") == 1
        assert files(here) == before


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--layer", "99"], 1, "no index 99; there are 2 Conv2d calls: 0 to 1"),
        (
            ["--layer", "fc"],
            1,
            "nothing to draw in fc (Linear): the output is 1x2: no feature map; layers with feature maps are",
        ),
        (["--layer", "0", "--channels", "9-12"], 1, "no channel 9-12 in conv1; there are 6: 0 to 5"),
        (["--channels", ""], 2, "bad channels ''"),
        (["--scale", "loud"], 2, "no scale 'loud'"),
        (["-o", "x.png"], 2, "-o x.png takes one picture; the selection has several"),
        (["-o", "-"], 2, "-o - takes one picture; the selection has several"),
        (["-o", "cat.jpg"], 2, "sheets are PNG files"),
        (["--input-size", "2x2"], 1, "refuses a picture of 3x2x2"),
        (["--columns", "0"], 2, "columns"),
        (["--cell", "-3"], 2, "cell"),
    ],
)
def test_what_is_refused_leaves_nothing(run: Run, here: Path, words: list[str], status: int, message: str) -> None:
    one_error(run("cat.jpg", *words, "--format", "ndjson"), status, message)
    assert files(here) == []


@pytest.mark.parametrize("words", [["--scale", "-1:1"], ["--scale=-1:1"], ["--scale", "symmetric"]])
def test_scales_that_begin_with_a_minus(run: Run, here: Path, words: list[str]) -> None:
    assert run("cat.jpg", "--layer", "0", "-o", "x.png", *words)[0] == 0
    told = read_provenance(here / "x.png")
    assert told["scale"] == words[-1].removeprefix("--scale=")
    assert told["cmap"] == ("RdBu_r" if words[-1] == "symmetric" else "viridis")


def test_options_reach_the_picture(run: Run, here: Path) -> None:
    options = ["--channels", "top:3", "--columns", "2", "--cell", "30", "--cmap", "magma", "--plain"]
    assert run("cat.jpg", "--layer", "0", "-o", "x.png", *options)[0] == 0
    told = read_provenance(here / "x.png")
    (part,) = told["parts"]
    side = part["zoom"] * part["height"]
    assert len(part["channels"]) == 3
    assert (part["columns"], part["zoom"], told["cmap"]) == (2, 3, "magma")
    assert told["size"] == [2 * side + 2, 2 * side + 2]


def test_an_overlay_is_another_picture(run: Run, here: Path) -> None:
    run("cat.jpg", "--layer", "0", "-o", "plain.png")
    assert run("cat.jpg", "--layer", "0", "-o", "over.png", "--overlay")[0] == 0
    with Image.open(here / "plain.png") as plain, Image.open(here / "over.png") as over:
        assert (plain.mode, over.mode, over.size) == ("P", "RGB", plain.size)
        assert not np.array_equal(np.asarray(plain.convert("RGB")), np.asarray(over))


def test_vectors_and_layers_that_did_not_run_are_notes(run: Run) -> None:
    status, out, errors = run("cat.jpg", "--type", "all", "--format", "ndjson", "-o", "out")
    assert status == 0
    assert [row["name"] for row in rows(out)] == ["conv1", "bn1", "relu", "conv2"]
    assert errors == "Note: fc is not drawn: the output is 1x2: no feature map\n"


FLOW = """
import torch
from torch import nn

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, stride=8)

    def forward(self, first, second):
        return self.conv(torch.cat([first, second]))

class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 2, 1)

    def forward(self, x):
        return self.conv(x)

Flow.__module__ = "torchvision.models.optical_flow.flow"
Clip.__module__ = "torchvision.models.video.clip"
"""


def test_optical_flow_takes_two_pictures(run: Run, here: Path) -> None:
    (here / "flow.py").write_text(FLOW)
    status, out, _ = run("cat.jpg", "dog.png", "-o", "x.png", "--overlay", "--format", "ndjson", model="flow.py:Flow")
    assert status == 0
    (row,) = rows(out)
    assert row["shape"][0] == 2
    told = read_provenance(here / "x.png")
    assert (told["image"], told["second"]["image"]) == ("cat.jpg", "dog.png")
    assert told["sha256"] != told["second"]["sha256"]
    status, _, errors = run("cat.jpg", "dog.png", "cat.jpg", model="flow.py:Flow")
    assert (status, "optical flow takes one or two images; there are 3" in errors) == (2, True)
    assert run("cat.jpg", "-o", "y.png", model="flow.py:Flow")[0] == 0


def test_video_takes_the_frames_of_an_animation_from_a_file_and_a_pipe(run: Run, here: Path) -> None:
    (here / "clip.py").write_text(FLOW)
    frames = [Image.new("RGB", (32, 32), (15 * n, 15 * n, 15 * n)) for n in range(16)]
    frames[0].save(here / "a.gif", save_all=True, append_images=frames[1:], duration=50)
    words = ["--type", "Conv3d", "--preprocess", "none", "-o", "x.png"]
    assert run("a.gif", *words, model="clip.py:Clip")[0] == 0
    _, values = hookscope.read_sheet(here / "x.png")[""]
    brightness = values[0].reshape(32, 16, 32)[5, :, 5]
    assert len(set(brightness.round(4))) > 10
    result = CliRunner().invoke(command, ["clip.py:Clip", "-", *words[:-1], "-"], input=(here / "a.gif").read_bytes())
    assert result.exit_code == 0, result.output
    (here / "y.png").write_bytes(result.stdout_bytes)
    assert np.array_equal(hookscope.read_sheet(here / "y.png")[""][1], values)
    assert run("cat.jpg", *words, model="clip.py:Clip")[0] == 0


def whole_run(*words: str, data: bytes = b"") -> bytes:
    """The standard output of a process with this standard input."""
    child = start("visualize", *words, stdin=-1, stdout=-1, stderr=-1)
    out, errors = child.communicate(data)
    assert child.returncode == 0, errors
    return out


@POSIX
def test_a_pipe_in_and_a_pipe_out(here: Path) -> None:
    picture = (SAMPLES / "cat.jpg").read_bytes()
    (here / "matplotlibrc").write_bytes(b"image.lut: 4\n")
    sheet = whole_run("nets.py:small", "-", "--layer", "conv1", "-o", "-", data=picture)
    with Image.open(io.BytesIO(sheet)) as image:
        assert image.mode == "P"
    assert read_provenance(sheet)["layer"] == "conv1"


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """A FIFO that nobody writes any more is waited for without end: fail after a minute."""

    def late(*rest: Any) -> None:
        raise TimeoutError("it waits for a FIFO")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@POSIX
@pytest.mark.usefixtures("no_waiting")
def test_devices_and_fifos(run: Run, here: Path) -> None:
    assert run("cat.jpg", "--layer", "0", "-o", "/dev/null")[0] == 0
    assert not Path("/dev/null").is_file()
    picture = (here / "cat.jpg").read_bytes()
    for name in ("in.fifo", "out.fifo"):
        os.mkfifo(here / name)
    writer = threading.Thread(target=lambda: (here / "in.fifo").write_bytes(picture))
    writer.start()
    assert run("in.fifo", "--layer", "0", "-o", "x.png")[0] == 0
    writer.join(10)
    assert read_provenance(here / "x.png")["image"] == "in.fifo"
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((here / "out.fifo").read_bytes()))
    reader.start()
    assert run("cat.jpg", "--layer", "0", "-o", "out.fifo")[0] == 0
    reader.join(10)
    assert read_provenance(found[0])["layer"] == "conv1"


@pytest.mark.slow
def test_the_words_of_the_manual(here: Path) -> None:
    for sample in SAMPLES.glob("*.jpg"):
        (here / sample.name).write_bytes(sample.read_bytes())
    out = whole_run("resnet34", "cat.jpg", "--layer", "30")
    assert b"30\tlayer4.0.conv2\tConv2d\t0\t1x512x7x7\t" in out
    assert (here / "cat-resnet34-030-layer4.0.conv2.png").exists()
    line = f"cat cat.jpg | {sys.executable} -m hookscope visualize vgg16 - --layer features.0 -o - > first.png"
    subprocess.run(["bash", "-o", "pipefail", "-c", line], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert read_provenance(here / "first.png")["shape"] == [1, 64, 224, 224]
    images = [str(path) for path in sorted(SAMPLES.glob("*.jpg"))]
    whole_run("mobilenet_v3_small", *images, "--layer", "0:5", "-o", "out/")
    assert len(list((here / "out").iterdir())) == 5 * len(images)
