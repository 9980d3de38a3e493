"""The command gradients on small models: its rows, findings, changes and refusals."""

import pytest

from tests.cli.conftest import NETS as COMMON
from tests.cli.helpers import Run, as_json, one_error

NETS = """

class Root(nn.Module):
    def forward(self, x):
        return (x - x).sqrt() * 0 + x

def nan():
    net = Small()
    net.relu = Root()
    return net

class Spreads(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x):
        y = self.conv(x)
        return self.fc(((y - y).abs().sqrt() + y).mean((2, 3)))

class Inference(Small):
    def forward(self, x):
        with torch.inference_mode():
            x = self.conv1(x)
        return self.fc(self.conv2(x).mean((2, 3)))

def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.Tanh(), nn.Linear(8, 4))

def deep():
    body = [part for at in range(20) for part in (nn.Conv2d(8 if at else 3, 8, 3, padding=1), nn.Sigmoid())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
"""
PICTURES = {"cat.png": (40, 32)}
OWN = ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "fc.weight", "fc.bias"]


def command_line(*words: str, model: str = "Small", images: tuple[str, ...] = ("cat.png",)) -> list[str]:
    return ["gradients", f"nets.py:{model}", *images, "--input-size", "32", "--device", "cpu", *words]


def test_layers_are_chosen_and_changes_go_together(run: Run) -> None:
    report = as_json(run, "--layer", "fc,conv1")
    assert [row["name"] for row in report["layers"]] == ["conv1", "fc"]
    assert [row["name"] for row in report["parameters"]] == OWN[:2] + OWN[4:]
    assert [row["name"] for row in as_json(run, "--layer", "-1")["parameters"]] == OWN[2:4]
    assert "total norm of the gradients of 6 parameters: " in run("--layer", "fc", "--format", "table")[1]
    assert [row["name"] for row in as_json(run, "--type", "all")["layers"]] == ["conv1", "relu", "conv2", "fc"]
    assert [row["name"] for row in as_json(run, "--layer", "0:")["layers"]] == ["conv1", "conv2"]
    assert [row["name"] for row in as_json(run, "--layer", "all")["layers"]] == ["conv1", "relu", "conv2", "fc"]
    assert [(row["name"], row["index"]) for row in as_json(run, model="mlp")["layers"]] == [("1", None), ("3", None)]
    report = as_json(run, "--freeze", "conv2,fc.bias", "--clip-value", "0.01", "--clip-norm", "0.02")
    rows = {row["name"]: row for row in report["parameters"]}
    assert [name for name in OWN if rows[name]["norm_after"] == 0] == ["conv2.weight", "conv2.bias", "fc.bias"]
    assert report["total_norm_after"] == pytest.approx(0.02, rel=1e-4) and report["total_norm"] > 1
    assert rows["conv1.weight"]["norm"] > rows["conv1.weight"]["norm_after"] > 0
    lines = run("--freeze", "conv2", "--clip-value", "1", "--clip-norm", "2", "--format", "table")[1]
    assert "after freezing conv2, then clipping values to ±1, then clipping the norm to 2: " in " ".join(lines.split())


def test_every_link_of_a_chain_is_marked_and_the_first_nan_found(run: Run) -> None:
    report = as_json(run, model="deep")
    [finding] = report["findings"]
    marked = [row["name"] for row in report["layers"] if row["findings"] == ["vanishing-gradient"]]
    assert len(marked) == finding["numbers"]["weights"] > 5 and marked[-1] == finding["layer"] and marked[0] == "0"
    weights = [row["name"] for row in report["parameters"] if row["findings"] == ["vanishing-gradient"]]
    assert weights == [f"{name}.weight" for name in marked]
    limited = as_json(run, "--threshold", "vanishing=1e-13", model="deep")["layers"]
    assert 0 < len([row for row in limited if row["findings"]]) < len(marked)
    [finding] = as_json(run, "--detect-anomaly", model="nan")["findings"]
    line = 1 + (COMMON + NETS).partition("return (x - x)")[0].count("\n")
    assert finding["evidence"] == f"SqrtBackward0 of sqrt at nets.py:{line} makes the first NaN of the backward pass"
    assert "--detect-anomaly" not in finding["meaning"]
    assert "--detect-anomaly" in as_json(run, model="nan")["findings"][0]["meaning"]
    status, _, errors = run("--detect-anomaly", "--format", "ndjson")
    assert (status, errors) == (0, "Note: no NaN in the forward pass or in the backward pass\n")


def test_a_model_without_a_gradient_is_one_line(run: Run) -> None:
    says = "the output of Blind has no gradient; detached after 'fc' by detach at nets.py:"
    one_error(run(model="Blind"), 1, says)
    one_error(run(model="Inference"), 1, "inference")


def test_clipping_by_norm_that_spreads_nan_is_no_norm_of_zero(run: Run) -> None:
    report = as_json(run, "--clip-norm", "1", model="Spreads")
    assert report["total_norm"] > 0 and report["total_norm_after"] is None
    assert [row["norm_after"] for row in report["parameters"]] == [None] * 4  # clip_grad_norm_ leaves NaN everywhere
    _, out, _ = run("--clip-norm", "1", "--format", "table", model="Spreads")
    assert "spreads NaN or Inf to 4 parameters" in " ".join(out.split())
