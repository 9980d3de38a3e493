"""The command verify: rows, the status of a difference, and its errors."""

import pytest

import hookscope.hooks.activations
from tests.cli.helpers import Run, rows

NETS = """

def three():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x

def counting():
    return nn.Sequential(nn.Conv2d(3, 4, 3), Counting())
"""
NAMES = ["feature-extractor", "re-computation", "model-output", "inputs", "untouched", "shapes"]
PICTURES = {"cat.png": (60, 40), "dog.png": (60, 40)}


def command_line(*words: str, model: str = "nets.py:three") -> list[str]:
    return ["verify", model, *words]


def test_a_type_and_a_layer_narrow_what_is_compared_and_optical_flow_takes_two_images(run: Run) -> None:
    printed = rows(run("--type", "Conv2d", "--layer", "-1", "--format", "ndjson")[1])
    assert [row["compared"] for row in printed][:2] == [1, 1]
    assert (printed[3]["holds"], printed[3]["note"]) == (None, "no chosen call feeds another")
    status, out, _ = run("cat.png", "dog.png", "--input-size", "128", "--format", "ndjson", model="nets.py:Flow")
    assert (status, [row["holds"] for row in rows(out)][:3]) == (0, [True] * 3)


def test_the_rows_before_the_first_difference_are_printed_and_the_status_is_3(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, errors = run("--format", "table", model="nets.py:counting")
    assert (status, [line.split()[0] for line in out.split("\n\n")[0].splitlines()]) == (3, ["check", *NAMES[:5]])
    assert "Difference: untouched fails at '1' by 1: " in errors
    assert "buffer 'count' changed, without hooks too" in errors
    monkeypatch.setattr(
        hookscope.hooks.activations, "keep_and_hand_on", lambda module, args, kwargs, output, leaves: (output, None)
    )
    status, out, errors = run("--format", "ndjson")
    [row] = rows(out)
    assert (status, row["check"], row["holds"], row["layer"]) == (3, "feature-extractor", False, "0")
    assert errors.startswith("Difference: feature-extractor fails at '0' by ")
    assert errors.endswith(": 1 of 3 differ\n")
