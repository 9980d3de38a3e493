"""The command predict: rows for each picture and class, the models' scores, and its errors."""

from pathlib import Path

import numpy as np
import pytest
import torch

import hookscope
from hookscope.cli.main import main
from tests.cli.helpers import Run, rows

NETS = """

class Mask(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return {"aux": x, "out": self.conv(x)}


class Bare(Mask):
    def forward(self, x):
        return self.conv(x)


class Named(Mask):
    def forward(self, x):
        return {"masks": self.conv(x)}


class Sizes(Mask):
    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        return {"width": x[:, 0], "height": x[:, 1]}
"""
PICTURES = {"cat.png": (60, 40), "dog.png": (60, 40)}


def command_line(*words: str, model: str = "nets.py:Small") -> list[str]:
    return ["predict", model, *words]


def own_scores(factory: str, path: str) -> torch.Tensor:
    """The scores of a pass without the command."""
    net = hookscope.load_model(f"nets.py:{factory}", device="cpu")
    with torch.no_grad():
        output = net.model(net.preprocess(hookscope.open_image(path))[None])
    return output["out"][0] if isinstance(output, dict) else output[0]


def test_scores_are_the_models_own_best_first_also_of_a_segmentation_and_of_nan(run: Run) -> None:
    status, out, _ = run("cat.png", "dog.png", "--format", "ndjson")
    assert (status, [row["image"] for row in rows(out)]) == (0, ["cat.png"] * 4 + ["dog.png"] * 4)
    for path in PICTURES:
        own, printed = own_scores("Small", path), [row for row in rows(out) if row["image"] == path]
        order = own.argsort(descending=True)
        assert [row["class"] for row in printed] == order.tolist()
        assert torch.equal(torch.tensor([row["score"] for row in printed]), own[order])
        assert [row["probability"] for row in printed] == torch.softmax(own.double(), 0)[order].tolist()
    best = own_scores("Mask", "cat.png").numpy().argmax(0).ravel()
    shares = np.bincount(best) / best.size
    for model in ("nets.py:Mask", "nets.py:Bare", "nets.py:Named"):
        status, out, err = run("cat.png", "--format", "ndjson", model=model)
        printed = rows(out)
        assert "gives classes of pixels: the score of a class is its share of the pixels" in err
        expected = [(at, shares[at]) for at in np.argsort(-shares) if shares[at]]
        assert [(row["class"], row["score"]) for row in printed] == expected
        assert {row["probability"] for row in printed} == {None}
    status, out, _ = run("cat.png", "--top", "1", "--format", "ndjson", model="nets.py:Broken")
    assert status == 0 and rows(out)[0]["score"] is None
    assert run("cat.png", "--top", "1", "--format", "csv", model="nets.py:Broken")[1].splitlines()[1].count("nan") == 2


def test_a_model_without_classes_has_a_row_for_each_number(run: Run) -> None:
    status, out, _ = run("cat.png", "--format", "ndjson", model="nets.py:Sizes")
    assert [(row["class"], row["label"], row["probability"]) for row in rows(out)] == [
        (None, "width", None),
        (None, "height", None),
    ]
    with torch.no_grad():
        net = hookscope.load_model("nets.py:Sizes", device="cpu")
        own = net.model(net.preprocess(hookscope.open_image("cat.png"))[None])
    assert (status, [row["score"] for row in rows(out)]) == (0, [own["width"].item(), own["height"].item()])
    assert run("cat.png", "--target", "0", model="nets.py:Sizes")[0] == 1


def test_random_weights_of_a_factory_are_told_first_unless_they_were_asked_for(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, told in (([], True), (["--weights", "none"], False), (["--quiet"], False)):
        for command in ("predict", "cam", "saliency"):
            with pytest.raises(SystemExit):
                main([command, "nets.py:Small", "cat.png", "--input-size", "32", *words])
            first = capfd.readouterr().err.partition("\n")[0]
            text = "Note: nets.py:Small loads no trained weights (random (seed 0)); its answers mean nothing"
            assert (first == text) == told
