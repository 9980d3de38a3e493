"""The command extract on a small model: what is printed and written, interrupted runs, and all that can be wrong."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hookscope
from hookscope.cli.main import main
from tests.cli.helpers import Run, files, one_error, rows

NETS = """

class Odd(Small):
    def __init__(self):
        super().__init__()
        self.none, self.empty, self.first, self.idle, self.logits = Takes(), Takes(), Takes(), Takes(), nn.Identity()

    def forward(self, x):
        self.none(x, lambda x: None)
        self.empty(x, lambda x: x[:, :0])
        self.first(x, lambda x: x[0])
        return self.logits(super().forward(x))

class Takes(nn.Module):
    def forward(self, x, function):
        return function(x)
"""
NAMES = ["pics/0.png", "pics/1.png", "pics/ant/2.png", "pics/ant/3.png", "pics/bee/4.png", "pics/bee/5.png"]
PICTURES = {**dict.fromkeys(NAMES, (32, 32)), "bad.jpg": 0}


def command_line(*words: str, model: str = "nets.py:Small", format: str = "ndjson") -> list[str]:
    return ["extract", model, "--preprocess", "none", "--batch-size", "2", "--format", format, *words]


def written(folder: Path) -> list[str]:
    """The files of a run, without what was there before."""
    return [name for name in files(folder) if not name.startswith(("pics/", "bad"))]


def arrays(path: str) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file if name != "metadata"}


def same(path: str, other: str) -> bool:
    here, there = arrays(path), arrays(other)
    return list(here) == list(there) and all(np.array_equal(here[name], there[name]) for name in here)


def test_each_column_has_a_row_and_each_image_its_values(run: Run, here: Path) -> None:
    words = ["--layer", "conv1,relu#0", "--logits", "--target", "1", "--pool", "max", "-o", "x.npz"]
    status, out, errors = run("pics", *words, "--batch-size", "1")
    assert (status, errors) == (0, "")
    weights = "random (seed 0)"
    about = {"dtype": "float32", "images": 6, "weights": weights}
    shapes = {"conv1": [6], "relu": [6], "logits": [4], "probability 1": []}
    assert rows(out) == [{"layer": layer, "shape": shape, **about} for layer, shape in shapes.items()]
    table = arrays("x.npz")
    assert table["path"].tolist() == NAMES
    assert table["label"].tolist() == ["", "", "ant", "ant", "bee", "bee"]
    net = hookscope.load_model("nets.py:Small", preprocess="none")
    for at, name in enumerate(NAMES):
        with hookscope.capture(net.model, layers="conv1,relu") as activations, torch.no_grad():
            scores = net.model(net.preprocess(hookscope.open_image(name))[None])
        for layer in ("conv1", "relu"):
            assert np.array_equal(table[layer][at], activations[layer].amax((2, 3))[0].numpy())
        assert np.array_equal(table["logits"][at], scores[0].numpy())
        assert table["probability 1"][at] == pytest.approx(float(scores.softmax(1)[0, 1]))


def test_a_lost_image_is_a_line_and_no_shift_of_rows(run: Run, here: Path) -> None:
    words = ["--layer", "conv1", "-o", "x.npz"]
    status, out, errors = run("pics/0.png", "bad.jpg", "none.png", "pics/1.png", *words)
    assert (status, rows(out)[0]["images"]) == (1, 2)
    lines = errors.splitlines()
    assert [line.split(";")[0] for line in lines[:2]] == [
        "Error: 'bad.jpg' is not an image that can be read",
        "Error: no image 'none.png'",
    ]
    assert lines[2:] == ["Note: 2 of 4 images skipped: x.npz.lost.tsv names them"]
    assert (arrays("x.npz")["position"].tolist(), arrays("x.npz")["path"].tolist()) == ([0, 3], NAMES[:2])
    lost = (here / "x.npz.lost.tsv").read_text().splitlines()
    assert [line.split("\t")[:2] for line in lost] == [["position", "path"], ["1", "bad.jpg"], ["2", "none.png"]]


@pytest.mark.parametrize("target", ["x.npy", "x.npz", "x.safetensors", "x.parquet", "x.zarr", "out/"])
def test_every_format_is_written(run: Run, here: Path, target: str) -> None:
    pytest.importorskip({"x.zarr": "zarr", "x.parquet": "pyarrow", "out/": "pyarrow"}.get(target, "numpy"))
    shard = ["--shard", "4"] if target == "out/" else []
    status, out, errors = run("pics", "--layer", "fc", "--dtype", "float16", "-o", target, *shard)
    assert (status, errors, rows(out)[0]["dtype"]) == (0, "", "float16")
    names = {
        "x.npy": ["x.npy", "x.npy.json", "x.npy.rows.tsv"],
        "x.safetensors": ["x.safetensors", "x.safetensors.rows.tsv"],
    }
    if target == "out/":
        assert written(here) == ["out/part-00000.parquet", "out/part-00001.parquet"]
    elif target != "x.zarr":
        assert written(here) == names.get(target, [target])
    assert run("pics", "--layer", "fc", "-o", target, *shard)[0] == 1
    assert run("pics", "--layer", "fc", "-o", target, *shard, "--overwrite")[0] == 0


def test_what_was_written_is_told(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for target, beside in (("x.npz", ""), ("out/", ""), ("x.npy", ", x.npy.rows.tsv, x.npy.json")):
        with pytest.raises(SystemExit):
            main(command_line("pics", "--layer", "fc", "-o", target))
        assert capfd.readouterr().err == f"wrote {target}{beside}\n"


def test_a_full_disk_keeps_what_was_written(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.jobs.run._SAVE_EVERY", 0.0)
    monkeypatch.setattr("hookscope.jobs.run._SAVE_SHARE", 0.0)
    words = ["pics", "--layer", "conv1", "-o"]
    assert run(*words, "whole.npz")[0] == run("pics", "--layer", "fc", "-o", "x.npz")[0] == 0
    before = (here / "x.npz").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * 14 * 14 * 4 * 3, limits[1]))  # a batch of two, but not six images
    try:
        outcome = run(*words, "x.npz", "--overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    status, out, errors = outcome
    assert (status, out) == (1, "")
    assert errors == (
        "Note: x.npz holds 6 of 6 images; add --resume to continue\n"
        "Error: cannot write x.npz: File too large; raise the limit (`ulimit -f`) or write elsewhere\n"
    )
    assert (here / "x.npz").read_bytes() == before
    assert run(*words, "x.npz", "--resume")[0] == 0
    assert same("x.npz", "whole.npz")


WRONG = {
    "no tensor": (["pics", "--layer", "none"], 1, "none returned no tensor; choose another layer"),
    "no values": (["pics", "--layer", "empty"], 1, "empty has no values"),
    "no run": (["pics", "--layer", "idle"], 1, "idle did not run"),
    "no rows": (
        ["pics", "--layer", "first"],
        1,
        "first has no row for each image; its output is 3x32x32 for 2 images",
    ),
    "one name": (["pics", "--layer", "logits", "--logits"], 2, "two columns are called 'logits'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line_and_leaves_nothing(run: Run, here: Path, name: str) -> None:
    words, status, message = WRONG[name]
    one_error(run(*words, "-o", "x.npz", model="nets.py:Odd"), status, message)
    assert written(here) == []


def test_layers_of_one_name_are_one_column_and_of_several_sizes_need_a_pool(run: Run, here: Path) -> None:
    _, out, _ = run("pics", "--layer", "conv1,0,conv1#0,conv[1]", "-o", "one.npz")
    assert [row["layer"] for row in rows(out)] == ["conv1"]
    Image.effect_noise((40, 30), 80).convert("RGB").save(here / "wide.png")
    status, out, errors = run("pics/0.png", "wide.png", "--layer", "conv1", "-o", "x.npz")
    assert (status, out) == (1, "")
    message = "conv1 has rows of different shapes; it has 6x13x18 for wide.png after 6x14x14; pool it by mean"
    assert message in errors and "x.npz holds 1 of 2 images; change the options" in errors
    assert "start again with --overwrite" in errors and "--resume" not in errors
    assert run("pics/0.png", "wide.png", "--layer", "conv1", "--pool", "mean", "-o", "y.npz")[0] == 0
