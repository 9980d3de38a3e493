"""The command trace, in process on small models."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.helpers import Run

NETS = """
class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.split, self.join = Split(), Join()
        self.idle = nn.Tanh()

    def forward(self, x):
        return self.join(**self.split(x))

class Split(nn.Module):
    def forward(self, x):
        return {"kept": x * 2, "counted": (x > 0.5).sum(), "cut": x.detach()}

class Join(nn.Module):
    def forward(self, kept, counted, cut):
        return kept / (cut - cut)

class Aside(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Tanh(), nn.Tanh()

    def forward(self, x):
        return self.main(x) + self.side(x).detach()

"""


@pytest.fixture
def here(here: Path) -> Path:
    (here / "names.txt").write_text("cat\ndog\n")
    picture = Image.new("RGB", (3, 3))  # red 1 in the upper row, green 1 in the middle of it
    picture.putdata([(255, 0, 0), (255, 255, 0), (255, 0, 0)] + [(0, 0, 0)] * 6)
    picture.save(here / "tiny.png")
    return here


PICTURES = {"cat.png": (40, 32)}


def command_line(*words: str, command: str = "trace") -> list[str]:
    return [command, *words, "--device", "cpu"]


def test_parts_that_are_not_finite_are_said_in_json_and_in_a_table(run: Run) -> None:
    status, out, errors = run("nets.py:Parts", "tiny.png", "--preprocess", "none", "--values", "--format", "ndjson")
    assert status == 0
    split, join = map(json.loads, out.splitlines())
    assert split["output_shape"] == {"kept": [1, 3, 3, 3], "counted": [], "cut": [1, 3, 3, 3]}
    assert split["output_dtype"] == {"kept": "float32", "counted": "int64", "cut": "float32"}
    assert split["output_max"] == {"kept": 2, "counted": 4, "cut": 1}
    assert split["output_values"]["counted"] == 4
    red, green, none = [[1, 1, 1], [0] * 3, [0] * 3], [[0, 1, 0], [0] * 3, [0] * 3], [[0] * 3] * 3
    assert split["input_values"] == [[red, green, none]]
    assert (split["input_min"], split["input_max"]) == (0, 1)
    assert join["input_shape"] == split["output_shape"]
    # 2 / 0 is Inf, 0 / 0 is NaN: nothing is finite
    assert (join["output_nonfinite"], join["output_min"], join["output_max"]) == (27, None, None)
    assert join["output_values"][0][2] == [[None] * 3] * 3
    assert errors == (
        "Note: not shown: 3 operations that are not modules (1 mul, 1 sub, 1 div); --ops shows them\n"
        "Note: 1 chosen layer did not run: idle\n"
    )
    _, out, _ = run("nets.py:Parts", "tiny.png", "--preprocess", "none", "--format", "table", "--events")
    lines = out.splitlines()
    assert lines[0].split()[-4:] == ["dtype", "min", "max", "nonfinite"]
    forward = next(line for line in lines if "forward" in line and "split" in line)
    assert forward.split()[3:] == ["Split", "kept:1x3x3x3", "+2", "more", "float32", "int64", "0", "4", "0"]
    join = next(line for line in lines if "forward" in line and "join" in line)
    assert join.split()[-3:] == ["-", "-", "27"]


def test_without_classes_or_gradients_the_rest_is_traced(run: Run) -> None:
    words = ("nets.py:Parts", "tiny.png", "--preprocess", "none", "--events", "--format", "table")
    _, out, errors = run(*words)
    assert "backward from mean square of the output: nan" in out
    assert errors.endswith("idle\n")
    status, _, errors = run(*words, "--target", "0")
    assert (status, "no score for each class" in errors) == (1, True)
    status, out, errors = run("nets.py:Aside", "tiny.png", "--preprocess", "none", "--events", "--format", "ndjson")
    events = [(row["event"], row["name"]) for row in map(json.loads, out.splitlines())]
    assert (status, events[-2:]) == (0, [("backward", "(model)"), ("backward", "main")])
    assert ("forward", "side") in events and ("backward", "side") not in events
    assert errors == (
        "Note: not shown: 1 operation that is not a module (1 add); --ops shows them\n"
        "Note: 1 call has no gradient and no backward event: side\n"
    )
    _, out, errors = run("nets.py:Blind", "cat.png", "--type", "Linear", "--events", "--format", "tsv")
    assert [line.split("\t")[1] for line in out.splitlines()[1:]] == ["pre-hook", "forward"]
    assert errors.endswith("\nNote: no backward pass: the output of Blind has no gradient\n")
