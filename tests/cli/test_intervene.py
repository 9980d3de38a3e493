"""The command intervene, in process on a small model, and as a person calls it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import hookscope
from hookscope.cli.commands.intervene import command
from hookscope.cli.main import COMMANDS
from hookscope.cli.output.effect_rows import CHANNEL_FIELDS, CLASS_FIELDS, FIELDS
from hookscope.drawing.png import read_provenance
from hookscope.interventions import WORDS
from tests.cli.helpers import Run

NETS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2)
        self.fc = nn.Linear(8, 7)

    def forward(self, x):
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.fc(x.mean((2, 3)))

def small():
    torch.manual_seed(0)
    return Small()

class Flow(Small):
    def forward(self, x):
        return self.conv2(self.conv1(x))

def flow():
    return Flow()
"""


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 32, 3), np.uint8))


@pytest.fixture
def here(here: Path) -> Path:
    (here / "names.txt").write_text("cat\ndog\nfox\nowl\nbee\nant\nelk\n")
    (here / "others").mkdir()
    for seed, name in enumerate(("cat.png", "others/a.png", "others/b.png")):
        picture(seed).save(here / name)
    return here


def command_line(*words: str, model: str = "nets.py:small", images: tuple[str, ...] = ("cat.png",)) -> list[str]:
    return ["intervene", model, *images, "--input-size", "32", "--device", "cpu", *words]


def as_json(run: Run, *words: str, **more: Any) -> dict[str, Any]:
    status, out, errors = run(*words, "--format", "json", **more)
    assert status == 0, errors
    return json.loads(out, parse_constant=pytest.fail)


def error(run: Run, *words: str, status: int = 2, **more: Any) -> str:
    found, out, errors = run(*words, **more)
    assert (found, out) == (status, "") and errors.startswith("Error: ") and errors.count("\n") == 1
    return errors[7:-1]


@pytest.fixture
def net(here: Path) -> hookscope.LoadedModel:
    return hookscope.load_model("nets.py:small", device="cpu", input_size=(32, 32))


def scores(net: hookscope.LoadedModel, name: str = "cat.png") -> torch.Tensor:
    with torch.no_grad():
        return net.model(net.preprocess(hookscope.open_image(name))[None])[0].double()


def test_the_scores_are_those_of_a_net_with_zeroed_weights(run: Run, net: hookscope.LoadedModel) -> None:
    told = as_json(run, "--at", "conv2", "zero:channels=1-2,5", "--categories", "names.txt")
    before = scores(net)
    with torch.no_grad():
        for parameter in net.model.conv2.parameters():
            parameter[[1, 2, 5]] = 0
    after = scores(net)
    rows = {row["index"]: row for row in told["classes"]}
    for index, row in rows.items():
        assert row["score"] == pytest.approx(float(before[index]), abs=1e-6)
        assert row["score_after"] == pytest.approx(float(after[index]), abs=1e-6)
        assert row["change"] == pytest.approx(row["score_after"] - row["score"])
        assert row["probability_after"] == pytest.approx(float(after.softmax(0)[index]), abs=1e-6)
        assert row["rank_after"] == 1 + int((after > after[index]).sum())
    assert set(rows) >= {*before.topk(5).indices.tolist(), *after.topk(5).indices.tolist()}
    assert [row["index"] for row in told["classes"][:5]] == before.topk(5).indices.tolist()
    assert [row["target"] for row in told["classes"]] == [True] + [False] * (len(rows) - 1)
    assert told["classes"][0]["label"] == ("cat", "dog", "fox", "owl", "bee", "ant", "elk")[told["classes"][0]["index"]]
    assert [(row["name"], row["index"], row["changed"]) for row in told["layers"]] == [
        ("conv2", 1, True),
        ("fc", None, False),
    ]
    assert told["changed"] == {"conv2": 1} and told["interventions"] == [{"at": "conv2", "word": "zero:channels=1-2,5"}]


def test_several_are_done_in_the_order_given(run: Run) -> None:
    words = [["--at", "fc", "scale:factor=2"], ["--at", "fc", "clamp:min=-0.01,max=0.01"]]
    clamped = as_json(run, *words[0], *words[1])["classes"]
    scaled = as_json(run, *words[1], *words[0])["classes"]
    assert max(row["score_after"] for row in clamped) == pytest.approx(0.01)
    assert max(row["score_after"] for row in scaled) == pytest.approx(0.02)


def test_a_patch_brings_the_other_answer(run: Run, net: hookscope.LoadedModel) -> None:
    told = as_json(run, "--at", "conv2", "patch:from=others/a.png")
    other = scores(net, "others/a.png")
    for row in told["classes"]:
        assert row["score_after"] == pytest.approx(float(other[row["index"]]), abs=1e-6)
    itself = as_json(run, "--at", "conv2", "patch:from=cat.png", "--at", "relu#1", "patch:from=cat.png,on=input")
    assert all(row["change"] == 0 for row in itself["classes"])
    assert all((row["relative_l2"], row["cosine"]) == (0, 1) for row in itself["layers"])


def test_a_mean_is_that_of_the_pictures_in_a_folder(run: Run, net: hookscope.LoadedModel) -> None:
    told = as_json(run, "--at", "fc", "mean:from=others")
    expected = (scores(net, "others/a.png") + scores(net, "others/b.png")) / 2
    for row in told["classes"]:
        assert row["score_after"] == pytest.approx(float(expected[row["index"]]), abs=1e-6)
    assert "the mean over one image is the image itself; give mean:from=FOLDER" in error(run, "--at", "fc", "mean")
    assert as_json(run, "--at", "conv1", "mean:over=positions")["layers"][0]["changed"]


def test_a_direction_is_added(run: Run, net: hookscope.LoadedModel, here: Path) -> None:
    direction = np.arange(7, dtype=np.float32)
    np.save(here / "direction.npy", direction)
    torch.save(torch.from_numpy(direction), here / "direction.pt")
    before = scores(net)
    for name in ("direction.npy", "direction.pt"):
        for row in as_json(run, "--at", "fc", f"steer:from={name},scale=0.5")["classes"]:
            assert row["change"] == pytest.approx(0.5 * row["index"], abs=1e-5)
            assert row["score"] == pytest.approx(float(before[row["index"]]), abs=1e-6)
    assert "the direction for 'conv2' is 1x7" in error(run, "--at", "conv2", "steer:from=direction.npy")
    assert error(run, "--at", "fc", "steer:from=gone.npy", status=1).startswith("cannot read gone.npy: No such file")
    assert "cat.png" in error(run, "--at", "fc", "steer:from=cat.png", status=1)


def test_parameters_are_changed_too(run: Run) -> None:
    told = as_json(run, "--at", "fc.weight", "zero", "--at", "fc.bias", "zero")
    assert all(row["score_after"] == 0 for row in told["classes"]) and told["changed"] == {"fc.weight": 1, "fc.bias": 1}
    assert [(row["name"], row["changed"], row["relative_l2"]) for row in told["layers"]] == [("fc", True, 1)]
    pruned = as_json(run, "--at", "conv*", "prune:amount=1,dim=0")
    assert pruned["changed"] == {"conv1.weight": 1, "conv2.weight": 1}
    told = "patch needs a layer, and fc.weight is a parameter; name its layer: fc"
    assert error(run, "--at", "fc.weight", "patch:from=cat.png") == told


def test_seeds_repeat_and_differ(run: Run) -> None:
    words = ["--at", "conv1", "dropblock:p=0.3,block_size=3"]
    one, same, other = (as_json(run, *words, "--seed", seed)["classes"] for seed in ("1", "1", "2"))
    assert one == same and one != other


def test_dropping_acts_in_eval_mode_unless_it_shall_not(run: Run) -> None:
    assert as_json(run, "--at", "conv1", "dropout:p=0.5")["changed"] == {"conv1": 1}
    status, out, errors = run("--at", "conv1", "dropout:p=0.5,when=train", "--format", "ndjson")
    assert (status, errors) == (0, "Note: nothing was changed\n")
    assert {json.loads(line)["row"] for line in out.splitlines()} == {"class"}


def test_what_did_nothing_is_told(run: Run) -> None:
    words = ["--at", "conv1", "clamp:min=-1e9", "--at", "conv1", "freeze", "--format", "tsv"]
    status, _, errors = run(*words)
    assert status == 0 and errors.splitlines() == [
        "Note: unchanged output: conv1",
        "Note: freeze has no effect on a forward pass: it acts in training",
    ]


def test_formats_tell_the_same(run: Run) -> None:
    words = ["--at", "1", "noise:std=0.1"]
    told = as_json(run, *words)
    lines = [json.loads(line) for line in run(*words, "--format", "ndjson")[1].splitlines()]
    assert [{"row": "class", **row} for row in told["classes"]] == [row for row in lines if row["row"] == "class"]
    assert [{"row": "layer", **row} for row in told["layers"]] == [row for row in lines if row["row"] == "layer"]
    for more, fields, key in (([], FIELDS, "layers"), (["--classes"], CLASS_FIELDS, "classes")):
        rows = list(csv.DictReader(io.StringIO(run(*words, *more, "--format", "csv")[1])))
        assert tuple(rows[0]) == fields and len(rows) == len(told[key])
    table = run(*words, "--format", "table", "--target", "3")[1]
    assert "score of 3: " in table and "changed: conv2" in table
    lines = table.splitlines()
    assert set(lines[0].split()) <= set(CLASS_FIELDS) and max(map(len, lines)) <= 100  # as wide as it may be
    alone = run(*words, "--format", "table", "--classes")[1]
    assert "relative_l2" in table and "relative_l2" not in alone and "changed: conv2" in alone


def test_chosen_layers_are_compared(run: Run) -> None:
    told = as_json(run, "--at", "conv1", "scale:factor=-1", "--layer", "relu", "--layer", "-1")
    assert [(row["name"], row["call"]) for row in told["layers"]] == [("relu", 0), ("conv2", 0), ("relu", 1)]
    assert told["layers"][0]["relative_l2"] > 1


def test_an_index_from_the_end(run: Run) -> None:
    assert as_json(run, "--at", "-1", "zero")["changed"] == {"conv2": 1}
    status, out, errors = run("--at", "conv1", "zero", "--layer", "-1:", "--grid", "grid.png", "--format", "tsv")
    assert (status, errors) == (0, "") and [line.split("\t")[1] for line in out.splitlines()[1:]] == ["conv2"]
    assert [band["layer"] for band in read_provenance("grid.png")["bands"]] == ["conv2"]


def test_a_model_without_classes_has_layers(run: Run) -> None:
    words = ["--at", "conv1", "zero", "--format", "json"]
    status, out, errors = run(*words, model="nets.py:flow")
    told = json.loads(out)
    assert (status, told["classes"]) == (0, []) and [row["name"] for row in told["layers"]] == ["conv1", "conv2"]
    assert errors == "Note: nets.py:flow gives 1x8x14x14 values, no score for each class: layers alone\n"
    assert "no score for each class" in error(run, *words, "--target", "1", model="nets.py:flow", status=1)


def test_each_channel_is_ranked_by_what_it_is_worth(run: Run, net: hookscope.LoadedModel) -> None:
    status, out, errors = run("--ablate-each", "conv2", "--top", "5", "--format", "json", "--target", "2")
    rows = json.loads(out)
    assert (status, errors, len(rows)) == (0, "", 5) and tuple(rows[0]) == CHANNEL_FIELDS
    before, worth = float(scores(net)[2]), {}
    for channel in range(8):
        own = hookscope.load_model("nets.py:small", device="cpu", input_size=(32, 32))
        with torch.no_grad():
            for parameter in own.model.conv2.parameters():
                parameter[channel] = 0
        worth[channel] = before - float(scores(own)[2])
    expected = sorted(worth, key=lambda channel: -worth[channel])[:5]
    assert [row["channel"] for row in rows] == expected
    for place, row in enumerate(rows, 1):
        assert row["place"] == place and row["score"] == pytest.approx(before, abs=1e-6)
        assert row["worth"] == pytest.approx(worth[row["channel"]], abs=1e-6)
    table = run("--ablate-each", "conv*", "--format", "table")[1]
    assert "14 of 14 channels, by what each is worth to the score of " in table


def test_channels_are_ablated_on_top_of_interventions(run: Run) -> None:
    rows = json.loads(run("--ablate-each", "conv2", "--at", "conv2", "zero:channels=0-7", "--format", "json")[1])
    assert len(rows) == 8 and all(row["worth"] == 0 for row in rows)
    errors = run("--ablate-each", "conv2", "--at", "-1", "zero:channels=0-7")[2]
    assert errors == "Note: the score is the same without any of these channels, after what --at does\n"
    words = ["--ablate-each", "conv2", "--at", "relu", "dropout", "--seed", "3", "--format", "json"]
    assert run(*words)[1] == run(*words)[1]


def test_a_grid_is_drawn_with_where_it_comes_from(run: Run, here: Path) -> None:
    words = ["--at", "conv2", "zero:channels=3", "--at", "fc.bias", "zero"]
    status, _, errors = run(*words, "--grid", "effect.png")
    assert (status, errors) == (0, "")
    about = read_provenance("effect.png")
    assert about["model"] == "nets.py:small" and len(about["interventions"]) == 2
    with Image.open("effect.png") as page:
        assert page.size[0] > 300
    assert run(*words, "--grid", "again.png", "--layer", "conv1,conv2")[0] == 0
    assert error(run, *words, "--grid", "none/effect.png", status=1) and not os.path.exists("none")
    assert "is not a file name" in error(run, *words, "--grid", "-")
    assert "cat.png" in error(run, *words, "--grid", "cat.png", status=1)


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ([], 2, "intervene needs --at or --ablate-each; such as --at layer3 zero:channels=0-31"),
        (["--at", "conv1", "zeros"], 2, "no intervention 'zeros'; nearest: zero"),
        (["--at", "conv1", "dropblock:q=1"], 2, "no parameter 'q' of dropblock; dropblock has channels, positions, on"),
        (["--at", "conv1", "dropblock:p=x"], 2, "p='x' of dropblock is not a number"),
        (["--at", "conv1", "dropblock:p=2"], 2, "p=2.0 is not a share; give a number from 0 to 1"),
        (["--at", "conv1", "zero:channels=6"], 1, "no channel 6 at 'conv1'; there are 6: 0 to 5"),
        (["--at", "conv1", "patch"], 2, "patch needs from=FILE; such as patch:from=other.jpg"),
        (["--at", "conv1", "patch:from=gone.jpg"], 1, "gone.jpg"),
        (["--at", "conv9", "zero"], 1, "no layer or parameter 'conv9'; nearest: conv2, conv1"),
        (["--at", "9", "zero"], 1, "no index 9; there are 2 Conv2d calls: 0 to 1"),
        (["--at", "conv1#1", "zero"], 1, "no call 'conv1#1'; the layer ran once"),
        (["--at", "re:[", "zero"], 2, "bad regular expression"),
        (["--ablate-each", "conv1", "--grid", "a.png"], 2, "--ablate-each prints only channels"),
        (["--ablate-each", "conv1", "--target", "top:3"], 2, "--ablate-each needs one class"),
        (["--at", "conv1", "zero", "--top", "3"], 2, "--top needs --ablate-each"),
        (["--at", "zero", "conv1"], 2, "no intervention 'conv1'; the layer comes first: --at conv1 zero"),
        (["--at", "conv1", "permute:axis=images"], 2, "one image cannot be permuted"),
        (["--ablate-each", "conv7"], 1, "no layer 'conv7'"),
    ],
)
def test_bad_input_is_told_in_one_line(run: Run, words: list[str], status: int, told: str) -> None:
    assert told in error(run, *words, status=status)


def test_the_manual_names_every_intervention() -> None:
    manual = CliRunner().invoke(command, ["--help"]).output
    assert [word for word in WORDS if not re.search(rf"^    {word} +\S", manual, re.MULTILINE)] == []
    assert "intervene" in COMMANDS
