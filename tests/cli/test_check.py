"""The command check: a gate whose status is its result."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from hookscope.cli.commands.check import FIELDS
from tests.cli.helpers import Run

NETS = """
import math
import torch
from torch import nn

class Net(nn.Sequential):
    pass

def net():
    torch.manual_seed(0)
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

def sick():
    broken = net()
    broken.head.weight.data[3, 2] = math.nan
    return broken

def hot():
    broken = net()
    broken.conv.bias.data[0] = math.inf
    return broken

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module('a<b>&"\\x1b]0;x\\x07\\n', nn.Conv2d(3, 2, 1))
    def forward(self, x):
        return next(self.children())(x)

def odd():
    odd = Odd()
    next(odd.children()).weight.data[0] = math.nan
    return odd
"""


@pytest.fixture
def here(here: Path) -> Path:
    (here / "pics").mkdir()
    for number in range(4):
        Image.effect_noise((20, 16), 60 + 9 * number).convert("RGB").save(here / "pics" / f"{number}.png")
    (here / "bad.jpg").write_text("no picture")
    return here


def command_line(*words: str, model: str = "nets.py:net") -> list[str]:
    return ["check", model, "pics", "--preprocess", "none", *words]


def broken(out: str) -> list[tuple[str, str, float | None]]:
    return [(row["limit"], row["layer"], row["value"]) for row in json.loads(out, parse_constant=pytest.fail)]


HEADER = "\t".join(FIELDS) + "\n"


def test_all_is_well(run: Run) -> None:
    words = ["--max-dead", "10%", "--max-saturated", "5%", "--no-nan", "--max-abs", "1e4", "--min-rank", "1"]
    assert run(*words) == (0, HEADER, "")
    assert run(*words, "--format", "json")[:2] == (0, "[]\n")
    assert run(*words, "--format", "ndjson")[:2] == (0, "")
    _, out, _ = run(*words, "--format", "table")
    assert out.endswith(
        "\n\nnets.py:net on 4 images: all 5 calls are within (max-dead, max-saturated, no-nan, max-abs, min-rank)\n"
    )


@pytest.mark.parametrize(
    ("words", "limit", "layers"),
    [
        (["--max-dead", "9.9%"], "max-dead", ["relu"]),
        (["--max-dead", "0"], "max-dead", ["relu"]),
        (["--max-saturated", "4.9%"], "max-saturated", ["relu"]),
        (["--max-abs", "50"], "max-abs", ["conv"]),
        (["--min-rank", "21"], "min-rank", ["conv", "relu", "head", "twice", "twice#1"]),
        (["--min-rank", "99%"], "min-rank", ["conv", "relu", "head", "twice", "twice#1"]),
    ],
)
def test_each_limit(run: Run, words: list[str], limit: str, layers: list[str]) -> None:
    status, out, errors = run(*words, "--format", "json")
    assert (status, errors) == (3, "")
    assert [one[:2] for one in broken(out)] == [(limit, layer) for layer in layers]


def test_just_met_and_just_broken(run: Run) -> None:
    """2 of 20 channels are dead; the values are read back from the rows."""
    assert run("--max-dead", "10%")[0] == 0
    for words in (["--max-abs", "1"], ["--max-saturated", "0"], ["--min-rank", "99"]):
        _, out, _ = run(*words, "--format", "json")
        for _, layer, value in broken(out)[:1]:
            assert value is not None
            more, less = (value * (1 + 1e-9), value * (1 - 1e-9))
            met, missed = (less, more) if words[0] == "--min-rank" else (more, less)
            only = ["--layer", layer, "--format", "json"]
            assert run(words[0], repr(met), *only)[0] == 0
            assert run(words[0], repr(missed), *only)[0] == 3


def test_a_row_says_what_was_measured(run: Run) -> None:
    _, out, _ = run("--max-dead", "5%", "--format", "json")
    assert json.loads(out) == [
        {
            "limit": "max-dead",
            "index": None,
            "layer": "relu",
            "value": 0.1,
            "allowed": 0.05,
            "evidence": "2 of 20 channels are dead: 4, 5",
            "weights": "from factory (seed 0)",
            "channels": [4, 5],
        }
    ]
    _, out, _ = run("--max-dead", "5%")
    assert out == HEADER + "max-dead\t\trelu\t0.1\t0.05\t2 of 20 channels are dead: 4, 5\tfrom factory (seed 0)\n"
    status, out, _ = run("--max-dead", "5%", "--format", "table")
    assert (status, out.splitlines()[-1]) == (3, "nets.py:net on 4 images: 1 of 5 calls break a limit (max-dead)")


def test_several_limits(run: Run) -> None:
    status, out, _ = run("--max-dead", "5%", "--no-nan", "--max-abs", "50", "--format", "json")
    assert (status, [one[:2] for one in broken(out)]) == (3, [("max-abs", "conv"), ("max-dead", "relu")])


def test_nan(run: Run) -> None:
    status, out, errors = run("--no-nan", "--format", "json", model="nets.py:sick")
    assert (status, [one[1] for one in broken(out)], errors) == (3, ["head", "twice", "twice#1"], "")
    status, out, errors = run("--max-abs", "1e4", model="nets.py:sick")
    assert (status, out) == (0, HEADER)
    assert errors == "Note: NaN or Inf in head, twice, twice#1; --no-nan forbids them\n"


def test_inf_is_beyond_any_limit(run: Run) -> None:
    status, out, _ = run("--max-abs", "1e30", "--format", "json", model="nets.py:hot")
    assert (status, broken(out)[0]) == (3, ("max-abs", "conv", None))


@pytest.mark.parametrize(
    ("allow", "left"),
    [
        (["head"], ["twice", "twice#1"]),
        (["twice"], ["head"]),
        (["twice#1"], ["head", "twice"]),
        (["tw*", "1"], []),
        (["re:^h", "fc"], ["twice", "twice#1"]),
        (["head,twice#0"], ["twice#1"]),
    ],
)
def test_layers_that_are_allowed(run: Run, allow: list[str], left: list[str]) -> None:
    words = [word for selection in allow for word in ("--allow", selection)]
    status, out, _ = run("--no-nan", *words, "--format", "json", model="nets.py:sick")
    assert (status, [one[1] for one in broken(out)]) == (3 if left else 0, left)


def test_where_all_is_allowed_the_table_says_so(run: Run) -> None:
    status, out, _ = run("--no-nan", "--allow", "*", "--format", "table", model="nets.py:sick")
    assert (status, out.splitlines()[-1]) == (
        0,
        "nets.py:sick on 4 images: there is no call to check (no-nan)",
    )


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "no limit was given; give --max-dead"),
        *[(["--max-dead", text], 2, f"'{text}' is not a share") for text in ("x", "nan", "-1", "150%", "")],
        (["--max-dead", "1"], 2, "write 1% or 100%"),
        *[
            (["--max-abs", text], 2, f"'{text}' is not a number of at least 0")
            for text in ("x", "nan", "-1", "inf", "")
        ],
        *[(["--min-rank", text], 2, f"'{text}' is not a rank") for text in ("x", "nan", "-1", "inf", "")],
        (["--max-saturated", "101%"], 2, "'101%' is not a share"),
        (["--no-nan", "--allow", "conf"], 1, "no layer 'conf' in nets.py:net; nearest: conv"),
        (["--no-nan", "--allow", "re:("], 2, "bad regular expression"),
        (["--no-nan", "--allow", ""], 2, "empty layer selection"),
        (["--no-nan", "--junit", "no/x.xml"], 1, "its folder does not exist"),
        (["--no-nan", "--junit", "pics/0.png"], 1, "it is the image pics/0.png itself"),
        (["--no-nan", "bad.jpg", "--strict"], 1, "'bad.jpg' is not a picture"),
    ],
)
def test_what_is_refused_is_one_error(run: Run, here: Path, words: list[str], status: int, message: str) -> None:
    before = sorted(here.rglob("*.*"))
    found, out, errors = run(*words)
    assert (found, out) == (status, "")
    assert message in errors
    assert errors.count("Error: ") == 1
    assert [path for path in sorted(here.rglob("*.*")) if path.suffix != ".pyc"] == before


def test_a_lost_image_is_a_failure_but_a_broken_limit_is_the_graver(run: Run) -> None:
    assert run("bad.jpg", "--no-nan")[:2] == (1, HEADER)
    assert run("bad.jpg", "--max-dead", "0")[0] == 3


def test_junit(run: Run, here: Path) -> None:
    words = ["--max-dead", "5%", "--no-nan", "--allow", "head", "--junit", "x.xml"]
    assert run(*words)[0] == 3
    suite = ElementTree.parse(here / "x.xml").getroot()[0]
    assert suite.attrib == {
        "name": "hookscope check nets.py:net",
        "tests": "8",
        "failures": "1",
        "errors": "0",
        "skipped": "0",
    }
    assert [case.get("name") for case in suite] == ["conv", "relu", "twice", "twice#1"] * 2
    (failed,) = [case for case in suite if len(case)]
    assert (failed.get("classname"), failed.get("name")) == ("max-dead", "relu")
    assert failed[0].text == "2 of 20 channels are dead: 4, 5 (measured 0.1, allowed 0.05)"
    assert run("--no-nan", "--junit", "x.xml")[0] == 0
    assert not list(ElementTree.parse(here / "x.xml").getroot().iter("failure"))


def test_names_that_would_harm(run: Run, here: Path) -> None:
    status, out, _ = run("--no-nan", "--junit", "x.xml", model="nets.py:odd")
    assert status == 3
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2
    (case,) = ElementTree.parse(here / "x.xml").getroot()[0]
    assert case.get("name") == 'a<b>&"\\x1b]0;x\\x07\\n'


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device")
def test_a_report_that_cannot_be_written_costs_no_rows(run: Run) -> None:
    status, out, errors = run("--max-dead", "0", "--junit", "/dev/full")
    assert (status, len(out.splitlines())) == (1, 2)
    assert errors.startswith("Error: cannot write /dev/full: No space left on device")
