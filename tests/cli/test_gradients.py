"""The command gradients, in process on small models."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hookscope.cli.commands.gradients import command
from hookscope.cli.output.gradient_rows import FIELDS, PARAMETER_FIELDS
from hookscope.drawing.png import read_provenance
from tests.cli.helpers import Run, one_error

NETS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.block = nn.Identity()
        self.conv2 = nn.Conv2d(6, 8, 3, stride=4)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.block(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.conv2(x).mean((2, 3)))

def small():
    torch.manual_seed(0)
    print("made")
    return Small()

class Root(nn.Module):
    def forward(self, x):
        return (x - x).sqrt() * 0 + x

def nan():
    net = small()
    net.block = Root()
    return net

class Cut(Small):
    def forward(self, x):
        x = self.conv1(x).detach()
        return self.fc(self.conv2(self.bn1(x)).mean((2, 3)))

def cut():
    return Cut()

class Blind(Small):
    def forward(self, x):
        return super().forward(x).detach()

def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.Tanh(), nn.Linear(8, 4))

def deep():
    torch.manual_seed(0)
    body = [part for at in range(20) for part in (nn.Conv2d(8 if at else 3, 8, 3, padding=1), nn.Sigmoid())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

def blind():
    return Blind()

class Flow(Small):
    def forward(self, x):
        return self.bn1(self.conv1(x))

def flow():
    return Flow()
"""
OWN = ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias", "conv2.weight", "conv2.bias", "fc.weight", "fc.bias"]


@pytest.fixture
def here(here: Path) -> Path:
    (here / "names.txt").write_text("cat\ndog\nfox\nowl\n")
    return here


PICTURES = {"cat.png": (40, 32)}
PRINTED = "made\n"


def command_line(
    *words: str, model: str = "nets.py:small", images: tuple[str, ...] = ("cat.png",), size: str = "32"
) -> list[str]:
    return ["gradients", model, *images, *(["--input-size", size] if size else []), "--device", "cpu", *words]


def as_json(run: Run, *words: str, **more: str) -> dict:
    status, out, _ = run(*words, "--format", "json", **more)
    assert status == 0
    return json.loads(out)


def test_json_is_one_object(run: Run) -> None:
    told = as_json(run, "--categories", "names.txt", "--target", "fox")
    assert told["model"] == "nets.py:small"
    assert (told["loss"]["name"], told["targets"][0]["index"], told["targets"][0]["label"]) == ("score", 2, "fox")
    assert told["loss"]["value"] == pytest.approx(told["targets"][0]["score"])
    assert [(row["name"], row["index"]) for row in told["layers"]] == [("conv1", 0), ("conv2", 1), ("fc", None)]
    assert [row["name"] for row in told["parameters"]] == OWN
    assert list(told["layers"][0]) == list(FIELDS) and list(told["parameters"][0]) == list(PARAMETER_FIELDS)
    assert told["layers"][0]["grad_output"] == [1, 6, 30, 30] and told["layers"][0]["grad_input"] == [1, 3, 32, 32]
    assert told["findings"] == []
    # the score of class 2 is a sum with its bias: gradient 1 there, 0 in the others
    bias = told["parameters"][-1]
    assert (bias["norm"], bias["max_abs"], bias["zeros"], bias["norm_after"]) == (1.0, 1.0, 0.75, None)
    squares = sum(row["norm"] ** 2 for row in told["parameters"])
    assert told["total_norm"] == pytest.approx(squares**0.5) and told["total_norm_after"] is None


@pytest.mark.parametrize(("format", "between"), [("tsv", "\t"), ("csv", ",")])
def test_lines_are_layers_or_parameters(run: Run, format: str, between: str) -> None:
    _, out, _ = run("--format", format)
    head, *lines = csv.reader(io.StringIO(out), delimiter=between)
    assert (head, [line[1] for line in lines]) == (list(FIELDS), ["conv1", "conv2", "fc"])
    _, out, _ = run("--format", format, "--parameters")
    head, *lines = csv.reader(io.StringIO(out), delimiter=between)
    assert (head, [line[0] for line in lines]) == (list(PARAMETER_FIELDS), OWN)
    assert {len(line) for line in lines} == {len(PARAMETER_FIELDS)}


def test_ndjson_says_what_a_row_is(run: Run) -> None:
    rows = [json.loads(line) for line in run("--format", "ndjson", model="nets.py:cut")[1].splitlines()]
    kinds = [row.pop("row") for row in rows]
    assert kinds == ["layer"] * 3 + ["parameter"] * 8 + ["finding"]
    assert rows[-1]["numbers"]["reason"] == "detached"


def test_a_table_has_both_and_fits_a_terminal(run: Run) -> None:
    _, out, _ = run("--format", "table", "--target", "1", "--clip-norm", "0.5")
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["index", "name", "grad_output"] and lines[5].split()[0] == "name"
    assert "norm_after" in lines[5] and "frozen" not in lines[5]
    assert not any("findings" in line.split() for line in (lines[0], lines[5]))
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("score of class 1: ") for line in lines)
    assert any(line.endswith("; after clipping the norm to 0.5: 0.5") for line in lines)
    assert lines[-1] == "no findings"


def test_layers_are_chosen_and_their_parameters_with_them(run: Run) -> None:
    told = as_json(run, "--layer", "fc,bn1")
    assert [row["name"] for row in told["layers"]] == ["bn1", "fc"]
    assert [row["name"] for row in told["parameters"]] == OWN[2:4] + OWN[6:]
    assert [row["name"] for row in as_json(run, "--layer", "-1")["parameters"]] == OWN[4:6]
    assert "total norm of the gradients of 8 parameters: " in run("--layer", "fc", "--format", "table")[1]
    types = as_json(run, "--type", "all")["layers"]
    assert [row["name"] for row in types] == ["conv1", "bn1", "relu", "block", "conv2", "fc"]


def test_changes_go_together_freeze_value_norm(run: Run) -> None:
    told = as_json(run, "--freeze", "conv2,fc.bias", "--clip-value", "0.01", "--clip-norm", "0.02")
    rows = {row["name"]: row for row in told["parameters"]}
    assert [name for name in OWN if rows[name]["norm_after"] == 0] == ["conv2.weight", "conv2.bias", "fc.bias"]
    assert told["total_norm_after"] == pytest.approx(0.02, rel=1e-4) and told["total_norm"] > 1
    assert rows["conv1.weight"]["norm"] > rows["conv1.weight"]["norm_after"] > 0
    lines = run("--freeze", "conv2", "--clip-value", "1", "--clip-norm", "2", "--format", "table")[1]
    assert "after freezing conv2, then clipping values to ±1, then clipping the norm to 2: " in lines


@pytest.mark.parametrize("loss", ["score", "cross-entropy", "mse"])
def test_losses(run: Run, loss: str) -> None:
    told = as_json(run, "--loss", loss)
    assert told["loss"]["name"] == loss and len(told["targets"]) == (loss != "mse")
    assert all(row["norm"] > 0 for row in told["parameters"])


def test_findings_are_told_and_are_no_failure(run: Run) -> None:
    status, out, _ = run("--format", "table", model="nets.py:cut")
    assert status == 0
    assert "1 finding no-gradient conv1: detached between 'conv1' and 'bn1' by detach at nets.py:" in " ".join(
        out.split()
    )
    row = as_json(run, model="nets.py:cut")["layers"][0]
    assert (row["grad_output_norm"], row["ratio"], row["findings"]) == (None, None, ["no-gradient"])


def test_layers_with_weights_are_shown_without_layer_and_type(run: Run) -> None:
    rows = as_json(run, model="nets.py:mlp")["layers"]
    assert [(row["name"], row["index"]) for row in rows] == [("1", None), ("3", None)]
    head = run("--format", "table", model="nets.py:mlp")[1].splitlines()[0].split()
    assert head[0] == "name" and "index" not in head and "mean_abs" in head
    assert [row["name"] for row in as_json(run, "--type", "Conv2d")["layers"]] == ["conv1", "conv2"]
    assert [row["name"] for row in as_json(run, "--layer", "all")["layers"]] == ["conv1", "conv2"]


def test_every_link_of_a_chain_is_marked_and_told_once(run: Run) -> None:
    told = as_json(run, model="nets.py:deep")
    (found,) = told["findings"]
    marked = [row["name"] for row in told["layers"] if row["findings"] == ["vanishing-gradient"]]
    assert len(marked) == found["numbers"]["weights"] > 5 and marked[-1] == found["layer"] and marked[0] == "0"
    weights = [row["name"] for row in told["parameters"] if row["findings"] == ["vanishing-gradient"]]
    assert weights == [f"{name}.weight" for name in marked]
    limited = as_json(run, "--vanishing", "1e-13", model="nets.py:deep")["layers"]
    assert 0 < len([row for row in limited if row["findings"]]) < len(marked)


def test_a_table_does_without_columns_that_do_not_fit(run: Run) -> None:
    out = run("--format", "table", model="nets.py:deep")[1]
    assert max(map(len, out.splitlines())) <= 100
    layers, parameters = (block.splitlines()[0].split() for block in out.split("\n\n")[:2])
    assert layers[-1] == parameters[-1] == "findings" and "mean_abs" not in layers
    assert {"index", "name", "grad_output_norm", "ratio"} <= set(layers)
    assert {"name", "norm", "ratio"} <= set(parameters)


def test_the_operation_behind_the_first_nan(run: Run) -> None:
    told = as_json(run, "--detect-anomaly", model="nets.py:nan")
    (found,) = told["findings"]
    assert (found["finding"], found["layer"]) == ("exploding-gradient", "block")
    line = 1 + NETS[: NETS.index("return (x - x)")].count("\n")
    assert found["evidence"] == (f"SqrtBackward0 of sqrt at nets.py:{line} makes the first NaN of the backward pass")
    assert "--detect-anomaly" not in found["meaning"]
    assert "--detect-anomaly" in as_json(run, model="nets.py:nan")["findings"][0]["meaning"]
    text = " ".join(run("--detect-anomaly", "--format", "table", model="nets.py:nan")[1].split())
    assert f"exploding-gradient block: SqrtBackward0 of sqrt at nets.py:{line} makes the first NaN" in text
    status, out, errors = run("--detect-anomaly", "--format", "ndjson")
    assert (status, errors) == (0, "Note: no NaN in the forward pass and none in the backward pass\n")
    assert "finding" not in {json.loads(line)["row"] for line in out.splitlines()}


def test_thresholds(run: Run) -> None:
    (found,) = as_json(run, "--exploding", "1e-3", "--vanishing", "0")["findings"]
    assert found["finding"] == "exploding-gradient"
    assert as_json(run, "--vanishing", "100", "--exploding", "inf")["findings"][0]["finding"] == "vanishing-gradient"


@pytest.mark.parametrize("name", ["g.png", "g.svg", "g.pdf"])
def test_a_plot(run: Run, here: Path, name: str) -> None:
    status, out, errors = run("--plot", name, "--clip-value", "0.1", "--format", "ndjson", model="nets.py:cut")
    assert (status, errors, len(out.splitlines())) == (0, "", 12)
    data = (here / name).read_bytes()
    assert data.startswith({"g.png": b"\x89PNG", "g.svg": b"<?xml", "g.pdf": b"%PDF"}[name])
    if name == "g.png":
        told = read_provenance(here / name)
        assert (told["model"], told["images"], len(told["findings"])) == ("nets.py:cut", ["cat.png"], 1)


@pytest.mark.parametrize(
    ("words", "model", "status", "message"),
    [
        (["--target", "lynx"], "small", 1, "no class 'lynx'; the class names are unknown"),
        (["--target", "lynx", "--categories", "names.txt"], "small", 1, "no class 'lynx'"),
        (["--clip-norm", "0"], "small", 2, "clip norm 0"),
        (["--clip-norm", "nan"], "small", 2, "clip norm nan"),
        (["--clip-value", "-1"], "small", 2, "clip value -1"),
        (["--clip-value", "x"], "small", 2, "'x' is not a valid float"),
        (["--freeze", "conv3"], "small", 1, "no layer or parameter 'conv3'; nearest: conv"),
        (
            ["--freeze", "nix"],
            "small",
            1,
            "'nix'; there are conv1, bn1, conv2, fc; list them with `hookscope weights nets.py:small`",
        ),
        (["--freeze", "relu"], "small", 1, "cannot freeze 'relu'; it has no parameters"),
        (["--freeze", "conv1#1"], "small", 2, "freeze takes names, not calls"),
        (["--loss", "nll"], "small", 2, "'nll' is not one of"),
        (["--vanishing", "2", "--exploding", "1"], "small", 2, "the first must be smaller"),
        (["--plot", "g.jpg"], "small", 2, "cannot write g.jpg; plots are PNG, SVG or PDF files"),
        (["--plot", "no/g.png"], "small", 1, "its folder does not exist"),
        (["--plot", "cat.png"], "small", 1, "it is the image cat.png itself"),
        ([], "blind", 1, "the output of Blind has no gradient; detached after 'fc' by detach at nets.py:"),
        ([], "flow", 1, "no score for each class; visualize, stats and `gradients --loss mse` work on it"),
        (["--weights", "none.pth"], "small", 1, "none.pth"),
    ],
)
def test_what_is_refused_is_one_line(
    run: Run, here: Path, words: list[str], model: str, status: int, message: str
) -> None:
    before = sorted(here.iterdir())
    one_error(run(*words, model=f"nets.py:{model}"), status, message)
    assert [path for path in sorted(here.iterdir()) if path.name != "__pycache__"] == before


def test_images(run: Run, here: Path) -> None:
    assert "expected one image, or two for optical flow, got 3" in run(images=("cat.png",) * 3)[2]
    assert "nets.py:small takes one image; there are 2" in run(images=("cat.png", "cat.png"))[2]
    assert "Missing argument 'IMAGE'" in run(images=())[2]
    assert run(images=("none.png",), model="no_such_model")[2].startswith("Error: no picture 'none.png'")


def test_a_plot_is_checked_before_the_model_is_looked_for(run: Run) -> None:
    assert "plots are" in run("--plot", "g.jpg", model="no_such_model")[2]
    assert "no model 'no_such_model'" in run("--plot", "g.png", model="no_such_model")[2]


def test_a_torchvision_model_with_random_weights(run: Run) -> None:
    told = as_json(run, "--weights", "none", "--seed", "1", model="squeezenet1_1")
    assert (told["weights"], told["findings"], len(told["parameters"])) == ("random (seed 1)", [], 52)
    assert {row["weights"] for row in told["layers"]} == {"random (seed 1)"}


def test_a_picture_that_is_too_small_is_one_line(run: Run) -> None:
    status, _, errors = run("--weights", "none", "--input-size", "3", model="squeezenet1_1")
    assert (status, errors.count("\n")) == (1, 1) and "refuses a picture of 3x3x3" in errors


def test_help_has_the_manual() -> None:
    text = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for line in (
        "hookscope gradients resnet34 cat.jpg --clip-norm 1.0 --plot flow.png",
        "They are applied in this order",
        "--detect-anomaly",
        "frozen, unused, detached, no graph",
        "in eval mode",
        "There are two ratios",
        "the epsilon of single precision",
        "2 is the layer called 2",
        "every layer with a weight of two or more dimensions",
    ):
        assert line in text


PARTLY = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.a, self.b, self.part = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3), part
    def forward(self, x):
        with torch.inference_mode():
            x = self.a(x)
            if not self.part:
                return self.b(x).mean((2, 3))
        return self.b(x).mean((2, 3))
def everywhere(): return Net(False)
def a_part(): return Net(True)
class Spreads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)
    def forward(self, x):
        y = self.a(x)
        return self.fc(((y - y).abs().sqrt() + y).mean((2, 3)))
"""


@pytest.mark.parametrize("name", ["everywhere", "a_part"])
def test_inference_mode_inside_the_model_is_one_line(run: Run, here: Path, name: str) -> None:
    (here / "nets.py").write_text(PARTLY)
    status, _, errors = run(model=f"nets.py:{name}")
    assert (status, errors.count("\n")) == (1, 1)
    assert "inference_mode" in errors or "under no_grad" in errors


def test_clipping_by_norm_that_spreads_nan_is_no_norm_of_zero(run: Run, here: Path) -> None:
    (here / "nets.py").write_text(PARTLY)
    report = as_json(run, "--clip-norm", "1", model="nets.py:Spreads")
    assert report["total_norm"] > 0 and report["total_norm_after"] is None
    assert [row["norm_after"] for row in report["parameters"]] == [None] * 4  # clip_grad_norm_ leaves NaN everywhere
    _, out, _ = run("--clip-norm", "1", "--format", "table", model="nets.py:Spreads")
    assert "spreads NaN or Inf to 4 parameters" in " ".join(out.split())


def test_a_target_for_the_mean_square_is_wrong_usage(run: Run) -> None:
    status, _, errors = run("--loss", "mse", "--target", "star", model="shapes", images=("none.png",))
    assert (status, "--loss mse takes no --target" in errors) == (2, True)


def test_a_plot_knows_its_inputs(run: Run) -> None:
    run("--target", "star", "--clip-norm", "0.5", "--plot", "flow.png", model="shapes", size="")
    about = read_provenance("flow.png")
    assert (about["model"], about["images"], about["target"], about["clip_norm"]) == (
        "shapes",
        ["cat.png"],
        "star",
        0.5,
    )
    assert len(about["sha256"][0]) == 64 and "resize 128" in about["preprocess"]


def test_gradients_are_scaled_and_clamped_to_a_sign(run: Run) -> None:
    words = {"model": "shapes", "size": ""}
    scaled = as_json(run, "--target", "star", "--scale", "-2", **words)
    assert scaled["total_norm_after"] == pytest.approx(2 * scaled["total_norm"], rel=1e-6)
    both = [
        as_json(run, "--target", "star", "--clamp-sign", sign, **words)["total_norm_after"]
        for sign in ("positive", "negative")
    ]
    assert both[0] ** 2 + both[1] ** 2 == pytest.approx(scaled["total_norm"] ** 2, rel=1e-6)
