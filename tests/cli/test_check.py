"""The command check: a gate whose status is its result."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from hookscope import load_model
from hookscope.cli.commands.check import COLUMNS
from hookscope.statistics import measure_images
from tests.cli.helpers import Run, one_error

NETS = """

def net():
    net = nn.Sequential()
    net.add_module("conv", nn.Conv2d(3, 20, 5, stride=2))
    net.add_module("relu", nn.ReLU6())
    net.add_module("head", nn.Conv2d(20, 8, 1))
    net.add_module("twice", nn.ReLU())
    net.add_module("again", net.twice)
    net.add_module("fc", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)))
    net.conv.bias.data[:] = 2
    net.conv.bias.data[[4]] = -99.0
    net.conv.bias.data[[5]] = 99.0
    net.head.weight.data *= 0.1
    net.head.bias.data[:] = 2
    return net

def moved():
    moved = net()
    moved.head.weight.data *= 3
    return moved

def sick():
    broken = net()
    broken.head.weight.data[3, 2] = float("nan")
    return broken

def endless():
    broken = net()
    broken.head.bias.data[3] = float("inf")
    return broken

class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)
    def forward(self, x):
        return self.fc(torch.relu(self.conv(x) - torch.tensor([99.0, 99.0] + 6 * [0.0]).view(8, 1, 1)).mean((2, 3)))

def functional():
    return Functional()

class Rows(nn.Conv2d):
    def forward(self, x):  # the number of columns of a picture is that of channels of an operation
        rows = x.mean((1, 2))
        return super().forward(x) + (rows / 0).nan_to_num(0, 0, 0).sum()

def rows():
    return Rows(3, 4, 3)

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module('a<b>&"\\x1b]0;x\\x07\\n', nn.Conv2d(3, 2, 1))
    def forward(self, x):
        return next(self.children())(x)

def odd():
    odd = Odd()
    next(odd.children()).weight.data[0] = float("nan")
    return odd
"""


PICTURES = {**{f"pics/{number}.png": (20, 16) for number in range(4)}, "bad.jpg": 0}


def command_line(*words: str, model: str = "nets.py:net") -> list[str]:
    return ["check", model, "pics", "--preprocess", "none", *words]


def broken(out: str) -> list[tuple[str, str, float | None]]:
    return [(row["limit"], row["layer"], row["value"]) for row in json.loads(out, parse_constant=pytest.fail)]


HEADER = "\t".join(COLUMNS.flat) + "\n"


def test_nan_and_what_was_not_measured_have_not_passed(run: Run) -> None:
    status, out, errors = run("--no-nan", "--format", "json", model="nets.py:sick")
    after = ["head", "twice", "twice#1", "fc.0", "fc.1", "fc.2"]
    assert (status, [layer for _, layer, _ in broken(out)], errors) == (3, after, "")
    for model in ("nets.py:sick", "nets.py:endless"):
        status, out, errors = run("--max-dead", "50%", "--allow", "fc.*", "--format", "json", model=model)
        assert (status, out) == (0, "[]\n")
        assert errors == "Note: NaN or Inf in head, twice, twice#1; --no-nan forbids them\n"
    status, out, _ = run("--max-dead", "50%", "--format", "json", model="nets.py:sick")
    assert (status, broken(out)) == (3, [("max-dead", "fc.2", None)])
    assert json.loads(out)[0]["evidence"] == "2 of 2 channels have NaN or Inf and no two finite values"
    assert run("--max-dead", "50%", "--allow-unmeasured", model="nets.py:sick")[:2] == (0, HEADER)


@pytest.mark.parametrize(
    ("words", "status", "rows"),
    [
        (["--max-saturated", "5%", "--layer", "conv"], 3, [("max-saturated", "conv", None)]),
        (["--max-saturated", "5%", "--layer", "conv,relu", "--allow-unmeasured"], 0, []),
        (["--max-saturated", "5%", "--type", "ReLU6"], 0, []),
        (["--max-saturated", "5%", "--allow", "relu"], 3, [("max-saturated", "", None)]),
        (["--no-nan", "--layer", "(model)"], 0, []),
    ],
)
def test_a_chosen_layer_must_have_the_quantity(run: Run, words: list[str], status: int, rows: list[Any]) -> None:
    got, out, _ = run(*words, "--format", "json")
    assert (got, broken(out)) == (status, rows)


def test_functional_code_is_checked_unless_it_is_left_out(run: Run, here: Path) -> None:
    words = ["--max-dead", "5%", "--format", "json"]
    status, out, errors = run(*words, model="nets.py:functional")
    assert (status, [row["layer"] for row in json.loads(out)]) == (3, ["::relu"])
    assert "A channel that is constant on few images may be alive on others" in errors
    status, out, errors = run(*words, "--no-ops", model="nets.py:functional")
    assert (status, out) == (0, "[]\n")
    assert errors == (
        "Note: not measured: 3 operations that are not modules (1 sub, 1 relu, 1 mean); --ops measures them\n"
    )
    assert run(*words, "--layer", "::relu", "--ops", model="nets.py:functional")[0] == 3
    Image.effect_noise((24, 18), 70).convert("RGB").save(here / "pics" / "wide.png")
    status, out, _ = run("--no-nan", "--format", "json", model="nets.py:rows")
    assert (status, broken(out)) == (3, [("no-nan", "::div", 4 * 20 + 24)])
    status, out, _ = run("--max-dead", "0", "--ops", "--layer", "::mean", "--format", "json", model="nets.py:rows")
    assert (status, json.loads(out)[0]["evidence"]) == (3, "its number of channels changes")


def test_layers_may_be_allowed_but_not_all(run: Run) -> None:
    words = ["--no-nan", "--allow", "re:^h", "--allow", "twice#0,fc*", "--format", "json"]
    status, out, _ = run(*words, model="nets.py:sick")
    assert (status, [layer for _, layer, _ in broken(out)]) == (3, ["twice#1"])
    status, out, _ = run("--no-nan", "--allow", "*", "--format", "table", model="nets.py:sick")
    assert (status, out.splitlines()[-2:]) == (
        3,
        ["nets.py:sick on 4 images: of 0 calls, none was checked against no-nan", "  no-nan: 0 calls"],
    )


def test_a_lost_image_is_a_failure_and_names_that_would_harm_are_escaped(run: Run, here: Path) -> None:
    assert run("bad.jpg", "--no-nan")[:2] == (1, HEADER)
    assert run("bad.jpg", "--max-dead", "0")[0] == 3
    status, out, _ = run("--no-nan", "--junit", "x.xml", model="nets.py:odd")
    assert status == 3
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2
    (case,) = ElementTree.parse(here / "x.xml").getroot()[0]
    assert case.get("name") == 'a<b>&"\\x1b]0;x\\x07\\n'


def test_a_reference_names_the_first_layer_that_left_its_range(run: Run, here: Path) -> None:
    for folder, count in (("healthy", 12), ("pics", 4)):
        (here / folder).mkdir(exist_ok=True)
        for number in range(count):
            values = np.random.default_rng(number + 100 * count).integers(0, 200 + number, (16, 20, 3), np.uint8)
            Image.fromarray(values).save(here / folder / f"{number}.png")
    net = load_model("nets.py:net", preprocess="none", device="cpu")
    measure_images(net, [str(here / "healthy" / f"{number}.png") for number in range(12)], save=here / "healthy.json")
    words = ["--reference", "healthy.json", "--format", "json"]
    assert run(*words)[:2] == (0, "[]\n")
    status, out, _ = run(*words, model="nets.py:moved")
    assert (status, [row["layer"] for row in json.loads(out)]) == (3, ["head"])
    status, out, _ = run(
        *words, "--max-shift", "0.3", "--allow", "twice*,fc*", "--junit", "x.xml", model="nets.py:moved"
    )
    assert (status, [row["layer"] for row in json.loads(out)]) == (3, ["head"])
    assert {row["limit"] for row in json.loads(out)} == {"max-shift"}
    assert len(ElementTree.parse(here / "x.xml").getroot()[0].findall("testcase/failure")) == 1
    assert run(*words, "--max-shift", "1e9", model="nets.py:moved")[:2] == (0, "[]\n")
    status, out, _ = run(*words, "--mean", "0.5", "--std", "0.1")
    assert (status, [row["layer"] for row in json.loads(out)]) == (3, ["(input)"])
    one_error(run("--max-shift", "0.1"), 2, "--max-shift...--reference")
    one_error(run("--reference", "gone.json"), 1, "no saved statistics 'gone.json'")
    (here / "few.json").write_text("{}")
    one_error(run("--reference", "few.json"), 1, "'few.json' holds no saved statistics")
