"""The command stats on a small model: rows and findings, lists of images, saved, resumed and merged runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hookscope.statistics.run import load_statistics
from hookscope.system.atomic_files import check_folder
from tests.cli.helpers import Run, one_error, rows

NETS = """

class Faulty(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv1 = nn.Conv2d(3, 6, 7, stride=3)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 12, 1)
        self.conv3 = nn.Conv2d(12, 5, 1)
        self.act = nn.Hardsigmoid()
        self.conv1.bias.data[2] = -99.0
        self.conv2.bias.data += 2
        self.conv2.weight.data[7] = self.conv2.weight.data[5]
        self.conv2.bias.data[7] = self.conv2.bias.data[5]

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.act(self.conv3(self.relu(self.conv2(x))))

def other():
    return Faulty(1)

def drifting():
    net = Faulty()
    net.bn1.running_mean += 50
    return net
"""
NAMES = ["pics/0.png", "pics/1.png", "pics/2.png", "pics/3.png", "pics/4.png", "pics/b/5.png", "pics/b/6.png"]
PICTURES = {**dict.fromkeys(NAMES, (40, 34)), "bad.jpg": 0}


def command_line(*words: str, model: str = "nets.py:Faulty", format: str = "ndjson") -> list[str]:
    command = [] if words[0] == "merge" else ["stats", model, "--preprocess", "none", "--batch-size", "2"]
    return [*command, *words, "--format", format]


def same(result: Any, other: Any) -> bool:
    """Whether two results agree: counts exactly, sums of float64 to their last digits, float32 extremes nearly."""
    if isinstance(result, dict):
        near = {name for name in result if re.fullmatch(r"p\d+", name) and result[name] is not None}
        return list(result) == list(other) and all(
            result[name] == pytest.approx(other[name], rel=2**-7, abs=1e-7)  # a bin of the histogram
            if name in near
            else same(result[name], other[name])
            for name in result
        )
    if isinstance(result, list):
        return len(result) == len(other) and all(map(same, result, other))
    if isinstance(result, float) and isinstance(other, float):
        return result == pytest.approx(other, rel=1e-5, abs=1e-7)
    return bool(result == other)


def images_in(out: str) -> int:
    return int(rows(out)[0]["images"])


@pytest.mark.parametrize(("layer", "is_said"), [("*", True), ("0", False), ("all", False)])
def test_a_type_that_chooses_no_layers_is_told(run: Run, layer: str, is_said: bool) -> None:
    status, _, errors = run("pics", "--layer", layer, "--type", "Conv2d")
    assert (status, "--type chooses no layers here" in errors) == (0, is_said)


def test_channels_have_rows_of_their_own(run: Run) -> None:
    channels = [row for row in rows(run("pics", "--per-channel")[1]) if row["row"] == "channel"]
    assert len(channels) == 6 + 6 + 12 + 12 + 5 + 5
    assert [(row["name"], row["call"], row["channel"]) for row in channels if row["dead"] > 0] == [("relu", 0, 2)]
    duplicates = [(row["name"], row["call"], row["channel"]) for row in channels if row["duplicate_of"] == 5]
    assert duplicates == [("conv2", 0, 7), ("relu", 1, 7)]
    parts = json.loads(run("pics", "--per-channel", format="json")[1])
    assert list(parts) == ["layers", "channels", "findings", "verdict"]


@pytest.mark.parametrize("words", [["--batch-size", "7"], ["--workers", "2"]])
def test_batches_and_workers_change_no_number(run: Run, words: list[str]) -> None:
    assert same(rows(run("pics", *words)[1]), rows(run("pics")[1]))


def test_shapes_that_vary_have_question_marks(run: Run, here: Path) -> None:
    Image.effect_noise((50, 34), 80).convert("RGB").save(here / "wide.png")
    assert rows(run("pics/0.png", "wide.png")[1])[0]["shape"] == [6, 10, None]
    assert "6x10x?" in run("pics/0.png", "wide.png", format="tsv")[1]


def test_a_strict_run_keeps_what_came_before_and_is_resumed(run: Run, here: Path) -> None:
    words = ["pics/0.png", "pics/1.png", "bad.jpg", "pics/2.png", "--save", "s.json", "--strict", "--resume"]
    assert run(*words)[:2] == (1, "")
    assert load_statistics("s.json").totals.images == 2
    Image.open(here / NAMES[3]).save(here / "bad.jpg", "PNG")
    status, out, _ = run(*words)
    assert (status, images_in(out)) == (0, 4)
    before = (here / "s.json").read_bytes()
    assert run(*words) == (0, out, "Note: s.json holds 4 of 4 images\n")
    assert (here / "s.json").read_bytes() == before


def test_a_run_over_other_images_is_not_resumed(run: Run, here: Path) -> None:
    assert run("pics", "--save", "s.json")[0] == 0
    message = "'s.json' was measured on other images; 5 of the first 7 are not of this run"
    one_error(run("pics/b", "--save", "s.json", "--resume"), 1, message)


def test_a_damaged_file_is_refused_and_left_as_it_is(run: Run, here: Path) -> None:
    run("pics", "--save", "s.json")
    content = (here / "s.json").read_bytes()
    for damaged in (content[: len(content) // 2], content.replace(b'"images": 7', b'"images": 8'), b""):
        (here / "bad.json").write_bytes(damaged)
        one_error(run("pics", "--save", "bad.json", "--resume"), 1, "'bad.json'")
        one_error(run("merge", "s.json", "bad.json"), 1, "'bad.json'")
        assert (here / "bad.json").read_bytes() == damaged


def test_merged_shards_equal_the_whole_run(run: Run) -> None:
    whole = rows(run("pics", "--rank")[1])
    run(*NAMES[:3], "--save", "a.json", "--rank")
    run(*NAMES[3:], "--save", "b.json", "--rank")
    status, out, errors = run("merge", "a.json", "b.json", "--save", "c.json")
    assert (status, errors) == (0, "")
    assert same(rows(out), whole)
    assert run("merge", "c.json")[1] == out
    one_error(run("pics", "--save", "c.json", "--resume", "--rank"), 2, "'c.json' was merged from several runs")
    error = "'c.json' and 'b.json' hold the same images; 4 images would count twice, the first is number 1 of 'b.json'"
    one_error(run("merge", "c.json", "b.json"), 1, error)


def test_runs_of_different_models_are_not_merged(run: Run, here: Path) -> None:
    run("pics", "--save", "a.json")
    run("pics", "--save", "b.json", model="nets.py:other")
    for name, message in {
        "b.json": "'a.json' and 'b.json' do not match; the first has model nets.py:Faulty, not nets.py:other",
        "missing.json": "no saved statistics 'missing.json': No such file or directory",
        "./a.json": "'./a.json' is named twice",
    }.items():
        one_error(run("merge", "a.json", name, "--save", "d.json"), 1 + (name == "./a.json"), message)
        assert not (here / "d.json").exists()


def test_a_run_is_logged_and_a_merged_run_is_plotted(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setattr("hookscope.statistics.check_installed", lambda: check_folder("."))
    monkeypatch.setattr("hookscope.statistics.write_events", lambda *rest, **more: logged.append((rest, more)))
    assert run("pics", "--tensorboard", "log", "--save", "a.json")[0] == 0
    [((folder, layers), more)] = logged
    assert (folder, len(layers), more["step"]) == ("log", 6, 0)
    assert more["about"] == {
        "model": "nets.py:Faulty",
        "weights": "from factory: the same for every seed",
    }
    assert run("merge", "a.json", "--plot", "y.svg")[0] == 0
    assert (here / "y.svg").read_bytes().startswith(b"<?xml")
