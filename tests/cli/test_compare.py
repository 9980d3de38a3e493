"""The command compare: the options of both sides, the answer, the rows, the pictures and the gate."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from hookscope.comparison import PAIRS
from hookscope.drawing.files import read_provenance
from hookscope.models import as_loaded
from hookscope.statistics import SavedStatistics, StatisticsCollector
from tests.cli.helpers import Run, one_error, rows
from tests.cli.nets import Small
from tests.exports import deployed, to_onnx
from tests.helpers import seeded

PICTURES = {"a.png": (32, 32), "b.png": (32, 32), "c.png": (32, 32), "d.png": (32, 32), "wide.png": (48, 32)}
NETS = """

class Capped(Small):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU6()


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.pool = nn.LayerNorm(32), nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        return self.pool(self.norm(x)).flatten(1)


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        other = Small()
        self.stem, self.act, self.body, self.head = other.conv1, other.relu, other.conv2, other.fc

    def forward(self, x):
        return self.head(self.body(self.act(self.stem(x))).relu().mean((2, 3)))
"""


def command_line(*words: str, b: str = "nets.py:Small", a: str = "nets.py:Small", image: str = "a.png") -> list[str]:
    return ["compare", a, b, *image.split(), "--preprocess", "imagenet", "--input-size", "32", *words]


def answer(outcome: tuple[int, str, str]) -> dict[str, Any]:
    status, out, errors = outcome
    assert status == 0, errors
    found: dict[str, Any] = json.loads(out)["answers"][0]
    return found


CAUSES: list[tuple[list[str], dict[str, str], str, str, str]] = [
    (["--seed-b", "1"], {}, "parameters", "conv1", "A and B have different weights: the parameters of 3 of 3 layers"),
    (["--weights-b", "tuned.pth"], {}, "parameters", "conv2", "The parameters of 1 of 3 layers differ, first in conv2"),
    (["--mean-b", "0", "--std-b", "1", "--range-b", "0..255"], {}, "input", "(input)", "and has colours 0..255"),
    (["--input-size-b", "40"], {}, "input", "(input)", "different sizes: A gets 3x32x32 and B gets 3x40x40"),
    (["--at-a", "relu", "zero", "--at-b", "relu", "zero"], {}, "same", "", "the same to the bit"),
    (["--at", "relu", "zero", "--at-b", "conv2", "scale:factor=2"], {}, "layer", "conv2", "relu; Scale(factor=2) at"),
    ([], {"b": "nets.py:Capped"}, "same", "", "the same to the bit in all 6 pairs"),
    (["--dtype-b", "bfloat16"], {}, "precision", "(input)", "A computes in float32, B computes in bfloat16"),
    (["--dtype-b", "autocast"], {}, "precision", "conv1", "B computes in float32 (autocast bfloat16)"),
]


@pytest.mark.parametrize(("words", "models", "kind", "first", "sentence"), CAUSES)
def test_the_answer_names_the_cause(
    run: Run, here: Path, words: list[str], models: dict[str, str], kind: str, first: str, sentence: str
) -> None:
    if "tuned.pth" in words:
        state = seeded(Small).state_dict()
        state["conv2.weight"][0, 0] += 1
        torch.save(state, here / "tuned.pth")
    found = answer(run(*words, "--format", "json", **models))
    assert (found["kind"], found["first"]) == (kind, first)
    assert sentence in found["sentence"]


def test_a_row_has_every_field_and_the_right_numbers(run: Run, here: Path) -> None:
    status, out, errors = run(
        "--at-b", "conv1", "scale:factor=3", "--format", "ndjson", image="a.png b.png c.png d.png"
    )
    of_kind = {kind: [row for row in rows(out) if row["row"] == kind] for kind in ("answer", "call")}
    by_layer = {row["layer"]: row for row in of_kind["call"]}
    assert (status, errors, len(of_kind["answer"]), [*by_layer]) == (
        0,
        "",
        1,
        ["(input)", "conv1", "relu", "conv2", "fc", "(model)"],
    )
    assert all(set(row) == {"row", *PAIRS.flat} for row in of_kind["call"])
    conv1 = by_layer["conv1"]
    assert conv1["relative_l2"] == pytest.approx(2)
    assert (conv1["cosine"], conv1["cka"]) == (pytest.approx(1), pytest.approx(1))
    assert conv1["max_abs"] == pytest.approx(abs(conv1["value_b"] - conv1["value_a"]))
    assert conv1["value_b"] == pytest.approx(3 * conv1["value_a"])
    assert (conv1["image"] in PICTURES, len(conv1["place"]), conv1["differs"]) == (True, 3, True)
    assert (by_layer["(input)"]["equal"], by_layer["(input)"]["differs"]) == (4 * 3 * 32 * 32, False)
    assert conv1["isolated_l2"] == pytest.approx(2)  # the layer with what changes it


def test_the_layer_that_adds_most_comes_first_unless_none_runs_alone(run: Run) -> None:
    found = json.loads(run("--seed-b", "1", "--sort", "--format", "json")[1])
    alone = [row["isolated_l2"] for row in found["calls"] if row["isolated_l2"] is not None]
    assert alone == sorted(alone, reverse=True)
    assert found["calls"][0]["layer"] == found["answers"][0]["most"]
    found = json.loads(run("--seed-b", "1", "--no-alone", "--format", "json")[1])
    assert {row["isolated_l2"] for row in found["calls"]} == {None}


def test_a_map_pairs_layers_of_other_names(run: Run, here: Path) -> None:
    (here / "map.tsv").write_text("\ufeff# A\tB\nconv1\tstem\n\nrelu\tact\nconv2\tbody\nfc\thead\n")
    found = json.loads(run("--map", "map.tsv", "--format", "json", b="nets.py:Renamed")[1])
    pairs = [(row["layer"], row["layer_b"], row["paired_by"]) for row in found["calls"][1:-1]]
    assert pairs == [(a, b, "map") for a, b in [("conv1", "stem"), ("relu", "act"), ("conv2", "body"), ("fc", "head")]]
    (here / "twice.tsv").write_text("conv1\tconv1\nconv1\tconv2\n")
    one_error(run("--map", "twice.tsv"), 2, "twice.tsv has 'conv1' twice")


def test_pictures_and_the_page_are_written_but_no_grid_where_nothing_differs(run: Run, here: Path) -> None:
    status, _, errors = run("--grid", "g.png")
    assert (status, "Note: g.png was not written: no call with maps differs\n" in errors) == (0, True)
    assert not (here / "g.png").exists()
    words = ["--grid", "g.png", "--html", "p.html"]
    status, _, errors = run("--seed-b", "1", *words, image="a.png b.png c.png d.png")
    assert (status, errors.count("Note: ")) == (0, 1)
    assert read_provenance(here / "g.png")["command"].startswith("hookscope compare ")
    assert "A and B have different weights" in (here / "p.html").read_text()
    assert "CKA" in (here / "p.html").read_text()


GATES: list[tuple[list[str], list[tuple[str, str]]]] = [
    (["--max-relative", "10"], []),
    (["--max-relative", "0"], [("max-relative", "relu"), ("max-relative", "conv2")]),
    (["--min-cosine", "-1", "--max-relative", "10"], []),
    (["--min-agreement", "0%"], []),
]


@pytest.mark.parametrize(("limits", "broken"), GATES)
def test_the_gate_ends_with_3_where_a_pair_breaks_a_limit(
    run: Run, here: Path, limits: list[str], broken: list[tuple[str, str]]
) -> None:
    change = ["--at-b", "relu", "scale:factor=2", "--layer", "relu,conv2"]
    status, out, _ = run(*change, *limits, "--junit", "r.xml", "--format", "json")
    found = [(row["limit"], row["layer"]) for row in json.loads(out)["broken_limits"]]
    assert (status, [each for each in found if each[1] != "(model)"]) == (3 if broken else 0, broken)
    suite = ElementTree.parse(here / "r.xml").getroot()[0]
    assert int(suite.attrib["failures"]) == len(found)


def test_what_was_not_measured_has_not_passed_and_a_table_ends_with_the_verdict(run: Run, here: Path) -> None:
    status, out, _ = run("--input-size-b", "40", "--max-relative", "1e9", "--format", "json")
    reasons = {row["layer"]: row["evidence"] for row in json.loads(out)["broken_limits"]}
    assert (status, reasons["(input)"]) == (3, "the shapes differ: 3x32x32 in A and 3x40x40 in B")
    status, out, _ = run("--min-agreement", "0%", "--format", "json", a="nets.py:features", b="nets.py:features")
    assert (status, json.loads(out)["broken_limits"][0]["evidence"]) == (
        3,
        "the outputs are not scores of the same classes",
    )
    status, out, _ = run("--max-relative", "1", "--format", "table")
    assert (status, out.splitlines()[-1]) == (0, "limits: all 6 calls are within the limits")


def test_weights_are_for_the_side_that_takes_them(run: Run, here: Path) -> None:
    torch.save(deployed().state_dict(), here / "net.pth")
    to_onnx(deployed(), here / "net.onnx", size=(1, 3, 32, 32))
    words = ["--weights", "net.pth", "--format", "json"]
    assert answer(run(*words, a="tests.exports:Deployed", b="net.onnx"))["kind"] == "noise"
    one_error(run(*words, a="net.onnx", b="net.onnx"), 2, "net.onnx holds its own weights and takes no others")


def test_a_table_says_what_is_within_the_noise_before_the_first(run: Run, here: Path) -> None:
    to_onnx(deployed(), here / "net.onnx", size=(1, 3, 32, 32))
    _, out, _ = run("--at-b", "fc2", "zero", "--format", "table", a="tests.exports:deployed", b="net.onnx")
    assert "after 1 pair the same to the bit and 9 pairs within the noise; adds most: fc2" in " ".join(out.split())


def test_two_saved_files_are_compared_and_what_needs_images_is_refused(run: Run, here: Path) -> None:
    net = as_loaded(seeded(Small).eval())
    for name, seed in (("a.json", 0), ("b.json", 1)):
        with StatisticsCollector(net.model, ranges=True) as collector, torch.no_grad():
            net.model(torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed)))
        SavedStatistics.of(net, collector.totals).save(here / name)
    status, _, errors = run("--format", "tsv", a="a.json", b="b.json", image="")
    assert status == 0 and "in the range of the reference (8 images now, 8 in the reference)" in errors
    out = run("--format", "ndjson", a="a.json", b="b.json", image="")[1]
    assert [row["name"] for row in rows(out)] == [
        "(input)",
        "conv1",
        "relu",
        "conv2",
        "fc",
        "fc",
        "(model)",
    ]  # what fc reads
    for option in ("--html", "--max-relative"):
        words = run(option, "1" if option == "--max-relative" else "p.html", a="a.json", b="b.json", image="")
        one_error(words, 2, f"{option} needs models and images")
    assert not (here / "p.html").exists()
