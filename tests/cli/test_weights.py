"""The command weights on a small model: rows, findings, pictures and refusals."""

import json
from pathlib import Path

import pytest
import torch

import hookscope
from hookscope.drawing.files import read_provenance
from tests.cli.helpers import Run

NETS = """

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 12, 3)
        self.fc = nn.Linear(12, 2)
        self.bn1.running_mean.fill_(0.5)

def flat():
    return nn.Sequential(nn.Linear(2, 2))
"""
NAMES = ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"]
NAMES += ["conv2.weight", "conv2.bias", "fc.weight", "fc.bias"]
FINDINGS = {
    "fc.weight": "non-finite",
    "conv1.weight": "dead-filters",
    "conv2.weight": "duplicate-filters",
    "bn1.running_var": "collapsed-variance",
}


def command_line(*words: str, model: str = "nets.py:Normed") -> list[str]:
    return ["weights", model, *words]


@pytest.fixture
def broken(here: Path) -> str:
    """A checkpoint with one fault of each kind."""
    state = hookscope.load_model("nets.py:Normed").model.state_dict()
    state["conv1.weight"][2] = 0
    state["conv2.weight"][7] = 3 * state["conv2.weight"][1]
    state["fc.weight"][1, 3] = torch.nan
    state["bn1.running_var"][4] = 0
    torch.save(state, here / "broken.pth")
    return "broken.pth"


def test_json_holds_rows_and_findings(run: Run, broken: str) -> None:
    status, out, errors = run("--weights", broken, "--format", "json")
    assert (status, errors) == (0, "Note: broken.pth holds 1 value that is NaN or infinite\n")
    report = json.loads(out)
    assert (report["model"], report["weights"]) == ("nets.py:Normed", "broken.pth")
    rows = {row["name"]: row for row in report["parameters"]}
    first, second, variance = rows["conv1.weight"], rows["conv2.weight"], rows["bn1.running_var"]
    assert list(rows) == NAMES
    assert (first["shape"], first["filters"], first["dead"], first["dead_filters"]) == ([6, 3, 5, 5], 6, 1, [2])
    assert first["zeros"] == pytest.approx(1 / 6)
    assert (second["duplicate"], second["duplicate_filters"]) == (1, [[1, 7]])
    assert (variance["collapsed"], variance["collapsed_channels"], variance["updated"]) == (1, [4], True)
    assert (rows["fc.weight"]["nan"], rows["fc.weight"]["first_nonfinite"]) == (1, [1, 3])
    assert {finding["layer"]: finding["finding"] for finding in report["findings"]} == FINDINGS
    assert {name: row["findings"] for name, row in rows.items() if row["findings"]} == {
        name: [finding] for name, finding in FINDINGS.items()
    }
    assert {row["weights"] for row in rows.values()} == {"broken.pth"}


def test_options_reach_the_kernels_beside_a_plot(run: Run, here: Path) -> None:
    options = ["--channels", "1,3", "--columns", "1", "--cell", "30", "--cmap", "gray", "--layer", "conv2"]
    assert run("--plot", "w.pdf", "--kernels", "k.png", *options)[0] == 0
    provenance = read_provenance(here / "k.png")
    [part] = provenance["kernels"]
    assert (part["layer"], part["filters"], part["columns"], part["zoom"]) == ("conv2", [1, 3], 1, 10)
    assert (provenance["cmap"], provenance["model"]) == ("gray", "nets.py:Normed")
    assert (here / "w.pdf").read_bytes().startswith(b"%PDF")
    assert run("--plot", "w.png", model="nets.py:flat")[0] == 0
    assert "the model has no convolution" in run("--kernels", "k.png", model="nets.py:flat")[2]
