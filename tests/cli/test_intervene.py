"""The command intervene on a small model: scores with and without changes, channels that are ablated, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hookscope
from hookscope.drawing import figure_bytes
from hookscope.drawing.files import read_provenance
from hookscope.images import read_picture
from hookscope.models import LoadedModel
from tests.cli.helpers import Run, as_json, one_error

NETS = """

class Flow(Small):
    def forward(self, x):
        return self.conv2(self.conv1(x))
"""
PICTURES = dict.fromkeys(("cat.png", "others/a.png", "others/b.png"), (40, 32))
ZERO = ["--at", "conv1", "zero"]


def command_line(*words: str, model: str = "nets.py:Small", command: str = "intervene") -> list[str]:
    return [command, model, "cat.png", "--input-size", "32", "--device", "cpu", *words]


@pytest.fixture
def net(here: Path) -> LoadedModel:
    return hookscope.load_model("nets.py:Small", device="cpu", input_size=(32, 32))


def scores(net: LoadedModel, name: str = "cat.png") -> torch.Tensor:
    with torch.no_grad():
        return net.model(net.preprocess(hookscope.open_image(name))[None])[0].double()


def scores_after(report: dict[str, Any]) -> torch.Tensor:
    rows = sorted(report["classes"], key=lambda row: row["class"])
    return torch.tensor([row["score_after"] for row in rows], dtype=torch.float64)


def test_the_scores_are_those_of_a_net_with_zeroed_weights(run: Run, net: LoadedModel, here: Path) -> None:
    (here / "names.txt").write_text("cat\ndog\nfox\nowl\n")
    report = as_json(run, "--at", "conv2", "zero:channels=0,2-3", "--categories", "names.txt")
    before = scores(net)
    with torch.no_grad():
        for parameter in net.model.conv2.parameters():
            parameter[[0, 2, 3]] = 0
    after = scores(net)
    assert torch.allclose(scores_after(report), after, atol=1e-6)
    for place, row in enumerate(report["classes"]):
        index = row["class"]
        assert row["score"] == pytest.approx(float(before[index]), abs=1e-6)
        assert row["change"] == pytest.approx(row["score_after"] - row["score"])
        assert row["probability_after"] == pytest.approx(float(after.softmax(0)[index]), abs=1e-6)
        assert (row["rank"], row["rank_after"]) == (place + 1, 1 + int((after > after[index]).sum()))
        assert (row["label"], row["target"]) == (("cat", "dog", "fox", "owl")[index], place == 0)
    layers = [(row["name"], row["index"], row["changed"]) for row in report["layers"]]
    assert layers == [("conv2", 1, True), ("fc", None, False)]
    assert report["changed"] == {"conv2": 1}
    assert report["interventions"] == [{"at": "conv2", "word": "zero:channels=0,2-3"}]


def test_interventions_are_done_in_order_and_bring_other_answers(run: Run, net: LoadedModel) -> None:
    scale, clamp = ["--at", "fc", "scale:factor=2"], ["--at", "fc", "clamp:min=-0.01,max=0.01"]
    assert scores_after(as_json(run, *scale, *clamp)).max() == pytest.approx(0.01)
    assert scores_after(as_json(run, *clamp, *scale)).max() == pytest.approx(0.02)
    report = as_json(run, "--at", "conv2", "patch:from=others/a.png")
    assert torch.allclose(scores_after(report), scores(net, "others/a.png"), atol=1e-6)
    itself = as_json(run, "--at", "conv2", "patch:from=cat.png", "--at", "relu", "patch:from=cat.png,on=input")
    assert all(row["change"] == 0 for row in itself["classes"])
    assert all((row["relative_l2"], row["cosine"]) == (0, 1) for row in itself["layers"])
    report = as_json(run, "--at", "fc", "mean:from=others")
    expected = (scores(net, "others/a.png") + scores(net, "others/b.png")) / 2
    assert torch.allclose(scores_after(report), expected, atol=1e-6)
    words = ["--at", "conv1", "dropblock:p=0.3,block_size=3"]
    first, again, other = (as_json(run, *words, "--seed", seed)["classes"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_chosen_layers_are_compared_also_without_classes(run: Run) -> None:
    words = ["--at", "conv1", "scale:factor=-1", "--layer", "relu", "--layer", "-1:", "--grid", "grid.png"]
    report = as_json(run, *words)
    assert [(row["name"], row["call"]) for row in report["layers"]] == [("relu", 0), ("conv2", 0)]
    assert report["layers"][0]["relative_l2"] > 1
    provenance = read_provenance("grid.png")
    assert [band["layer"] for band in provenance["bands"]] == ["relu", "conv2"]
    assert (provenance["model"], len(provenance["interventions"])) == ("nets.py:Small", 1)
    status, out, errors = run(*ZERO, "--format", "json", model="nets.py:Flow")
    report = json.loads(out)
    assert (status, report["classes"], [row["name"] for row in report["layers"]]) == (0, [], ["conv1", "conv2"])
    assert errors == "Note: nets.py:Flow gives 1x4x6x6 values, no score for each class: only layers are shown\n"
    one_error(run(*ZERO, "--target", "1", model="nets.py:Flow"), 1, "no score for each class")


def test_each_channel_is_ranked_by_what_it_is_worth(run: Run, net: LoadedModel) -> None:
    rows = as_json(run, "--layer", "conv2", "--top", "3", "--target", "2", command="ablate")
    before, worth = float(scores(net)[2]), {}
    for channel in range(4):
        own = hookscope.load_model("nets.py:Small", device="cpu", input_size=(32, 32))
        with torch.no_grad():
            for parameter in own.model.conv2.parameters():
                parameter[channel] = 0
        worth[channel] = before - float(scores(own)[2])
    assert [row["channel"] for row in rows] == sorted(worth, key=lambda channel: -worth[channel])[:3]
    assert [row["place"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["score"] == pytest.approx(before, abs=1e-6)
        assert row["score_drop"] == pytest.approx(worth[row["channel"]], abs=1e-6)
    errors = run("--layer", "fc", "--target", "2", command="ablate")[2]
    assert errors.startswith("Note: only channel 2 of fc, the class itself, changes the score; choose an earlier layer")


def test_channels_are_ablated_on_top_of_interventions_and_plotted(run: Run, net: LoadedModel, here: Path) -> None:
    words = ["--layer", "conv2", "--at", "conv2", "zero:channels=0-3"]
    rows = as_json(run, *words, command="ablate")
    assert len(rows) == 4 and all(row["score_drop"] == 0 for row in rows)
    assert (
        run(*words, command="ablate")[2] == "Note: none of these channels changes the score, with the changes of --at\n"
    )
    words = ["--layer", "conv2", "--at", "relu", "dropout", "--seed", "3"]
    assert as_json(run, *words, command="ablate") == as_json(run, *words, command="ablate")
    as_json(run, "--layer", "conv1,conv2", "--top", "3", "--plot", "worth.png", command="ablate")
    x = net.preprocess(hookscope.open_image("cat.png"))[None]
    ablation = hookscope.ablate_each(net.model, x, "conv1,conv2", keep=3)
    figure = hookscope.plot(ablation, photograph=read_picture("cat.png"), net=net, top=3)
    assert figure_bytes(figure, ".png", read_provenance("worth.png")) == Path("worth.png").read_bytes()
    assert read_provenance("worth.png")["image"] == "cat.png"
