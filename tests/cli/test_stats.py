"""The command stats, in process on a small model, and as a process on pipes and terminals."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import hookscope
from hookscope.cli.commands.stats import CHANNEL_FIELDS, FIELDS, TABLE_FIELDS
from hookscope.statistics.storage import load_statistics
from hookscope.system.atomic_files import check_folder
from tests.cli.helpers import POSIX, Run, rows, start

NETS = """
import os, time
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 7, stride=3)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 12, 1)
        self.conv3 = nn.Conv2d(12, 5, 1)
        self.act = nn.Hardsigmoid()

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.act(self.conv3(self.relu(self.conv2(x))))

def small(seed=0):
    torch.manual_seed(seed)
    net = Small()
    net.conv1.bias.data[2] = -99.0
    net.conv2.bias.data += 2
    net.conv2.weight.data[7] = net.conv2.weight.data[5]
    net.conv2.bias.data[7] = net.conv2.bias.data[5]
    return net

def other():
    return small(1)

def loud():
    print("made")
    net = small()
    net.register_forward_pre_hook(lambda *rest: print("runs"))
    return net

def drifting():
    net = small()
    net.bn1.running_mean += 50
    return net

class Slow(Small):
    def forward(self, x):
        time.sleep(0.2)
        return super().forward(x)

def slow():
    torch.manual_seed(0)
    return Slow()
"""
NAMES = ["pics/0.png", "pics/1.png", "pics/2.png", "pics/3.png", "pics/4.png", "pics/b/5.png", "pics/b/6.png"]
WORDS = ["--preprocess", "none", "--batch-size", "2"]


@pytest.fixture
def here(here: Path) -> Path:
    (here / "pics" / "b").mkdir(parents=True)
    for at, name in enumerate(NAMES):
        Image.effect_noise((40, 34), 60 + 9 * at).convert("RGB").save(here / name)
    (here / "bad.jpg").write_text("no picture")
    return here


def command_line(*words: str, model: str = "nets.py:small") -> list[str]:
    return ["stats", model, *([] if "--merge" in words else WORDS), *words]


def same(one: Any, other: Any) -> bool:
    """Whether two results agree: counts exactly, sums of float64 to their last digits, float32 extremes nearly."""
    if isinstance(one, dict):
        near = {name for name in one if re.fullmatch(r"p\d+", name)}
        return list(one) == list(other) and all(
            same_percentile(one[name], other[name]) if name in near else same(one[name], other[name]) for name in one
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-5, abs=1e-7)
    return bool(one == other)


def same_percentile(one: float | None, other: float | None) -> bool:
    """Whether two percentiles are within a bin: a value rounded across the edge of one moves them by a part of it."""
    return one == other if one is None or other is None else one == pytest.approx(other, rel=2**-7, abs=1e-7)


def test_a_table_has_some_of_the_fields() -> None:
    assert set(TABLE_FIELDS) < set(FIELDS)


def test_ndjson_says_of_every_line_what_it_is(run: Run) -> None:
    status, out, errors = run("pics", "--format", "ndjson")
    assert (status, errors) == (0, "")
    lines = rows(out)
    layers = [line for line in lines if line["row"] == "layer"]
    assert [(row["index"], row["name"], row["call"], row["calls"]) for row in layers] == [
        (0, "conv1", 0, 1),
        (None, "relu", 0, 2),
        (1, "conv2", 0, 1),
        (None, "relu", 1, 2),
        (2, "conv3", 0, 1),
        (None, "act", 0, 1),
    ]
    assert tuple(layers[0])[: len(FIELDS) + 1] == ("row", *FIELDS)
    assert [line["name"] for line in lines if (line.get("dead") or 0) > 0] == ["relu"]  # jq 'select(.dead > 0)'
    assert [(line["finding"], line["layer"], line.get("channels")) for line in lines if line["row"] == "finding"] == [
        ("dead-channels", "relu", [2]),
        ("duplicate-channels", "conv2", [5, 7]),
        ("few-images", "", None),
    ]
    assert (layers[1]["dead"], layers[1]["dead_channels"]) == (1, [2])
    assert (layers[2]["duplicate"], layers[2]["duplicate_channels"]) == (1, [[5, 7]])
    assert (layers[0]["shape"], layers[0]["images"], layers[0]["channels"]) == ([6, 10, 12], 7, 6)
    assert layers[0]["min_at"]["image"] in NAMES


def test_json_is_one_object(run: Run) -> None:
    _, out, _ = run("pics", "--format", "json")
    told = json.loads(out, parse_constant=pytest.fail)
    assert list(told) == ["layers", "findings"]
    _, lines, _ = run("pics", "--format", "ndjson")
    kinds = {"layer": told["layers"], "finding": told["findings"]}
    assert rows(lines) == [{"row": kind, **row} for kind, found in kinds.items() for row in found]


@pytest.mark.parametrize(("format", "between"), [("tsv", "\t"), ("csv", ",")])
def test_columns(run: Run, format: str, between: str) -> None:
    status, out, errors = run("pics", "--format", format)
    table = list(csv.reader(io.StringIO(out), delimiter=between))
    assert (status, tuple(table[0]), len(table)) == (0, FIELDS, 7)
    relu = dict(zip(FIELDS, table[2], strict=True))
    assert (relu["name"], relu["dead"], relu["findings"], relu["index"]) == ("relu", "1", "dead-channels", "")
    assert relu["min_at"].startswith("image:pics/0.png channel:")
    assert errors == "Note: not in TSV: few-images; see --format table or json\n"


def test_what_has_no_row_is_named(run: Run) -> None:
    _, _, errors = run("pics", model="nets.py:drifting")
    assert errors == "Note: not in TSV: batchnorm-drift bn1, few-images; see --format table or json\n"
    _, _, errors = run("pics", "--per-channel")
    assert errors.startswith("Note: not in TSV: dead-channels relu, duplicate-channels conv2, few-images;")


def test_a_table_ends_with_the_findings_in_words(run: Run) -> None:
    status, out, _ = run("pics", "--format", "table")
    lines = out.splitlines()
    assert (status, lines[0].split()) == (0, list(TABLE_FIELDS))
    assert lines[8:13] == [
        "nets.py:small on 7 images, weights from factory (seed 0)",
        "6 calls, 38,640 values; zeros and saturated are shares, dead and duplicate count channels",
        "",
        "3 findings",
        "  dead-channels       relu: 1 of 6 channels never leaves 0: 2",
    ]
    assert max(map(len, lines[9:])) <= 100
    assert run("pics/0.png", "--format", "table", "--layer", "conv1")[1].endswith("\nno findings\n")


def test_channels_have_rows_of_their_own(run: Run) -> None:
    status, out, _ = run("pics", "--per-channel", "--format", "ndjson")
    lines = rows(out)
    channels = [line for line in lines if line["row"] == "channel"]
    assert (status, len(channels)) == (0, 6 + 6 + 12 + 12 + 5 + 5)
    assert tuple(channels[0]) == ("row", *CHANNEL_FIELDS)
    assert [(c["name"], c["call"], c["channel"]) for c in channels if c["dead"] > 0] == [("relu", 0, 2)]
    assert [(c["name"], c["call"], c["channel"]) for c in channels if c["duplicate_of"] == 5] == [
        ("conv2", 0, 7),
        ("relu", 1, 7),
    ]
    _, out, _ = run("pics", "--per-channel", "--format", "json")
    assert list(json.loads(out)) == ["layers", "channels", "findings"]
    _, out, _ = run("pics", "--per-channel", "--format", "table")
    assert out.splitlines()[0].split() == list(CHANNEL_FIELDS)
    assert "nets.py:small on 7 images" in out


def test_the_numbers_are_those_of_numpy_on_captured_activations(run: Run) -> None:
    net = hookscope.load_model("nets.py:small", preprocess="none")
    inputs = torch.stack([net.preprocess(hookscope.open_image(name)) for name in NAMES])
    with hookscope.capture(net.model, ["all", "relu", "act"]) as kept, torch.no_grad():
        net.model(inputs)
    _, out, _ = run("pics", "--format", "ndjson")
    _, by_channel, _ = run("pics", "--format", "ndjson", "--per-channel")
    channel_rows = [row for row in rows(by_channel) if row["row"] == "channel"]
    layers = [row for row in rows(out) if row["row"] == "layer"]
    assert len(layers) == 6
    for row in layers:
        key = f"{row['name']}#{row['call']}" if row["call"] else row["name"]
        values = kept[key].double().numpy()
        check(row, values)
        ordered = np.sort(values, axis=None)
        for share in (1, 5, 25, 50, 75, 95, 99):
            expected = ordered[round(share / 100 * (ordered.size - 1))]
            assert row[f"p{share}"] == pytest.approx(expected, rel=2**-7, abs=1e-3)
        own = [c for c in channel_rows if (c["name"], c["call"]) == (row["name"], row["call"])]
        for channel in own:
            check(channel, values[:, channel["channel"]])
        for place, extreme in ((row["min_at"], values.min()), (row["max_at"], values.max())):
            at = (NAMES.index(place["image"]), place["channel"], *place["position"])
            assert values[at] == pytest.approx(extreme, rel=1e-5)


def check(row: dict[str, Any], values: np.ndarray[Any, Any]) -> None:
    expected = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    expected["zeros"] = (values == 0).mean()
    if "rms" in row:
        expected["rms"] = np.sqrt((values**2).mean())
    if row["name"] == "act":
        expected["saturated"] = ((values <= 0.01) | (values >= 0.99)).mean()
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (row["name"], name)
    assert (row["nan"], row["inf"]) == (0, 0)


@pytest.mark.parametrize("words", [["--batch-size", "1"], ["--batch-size", "7"], ["--workers", "2"], ["--rank"]])
def test_batches_and_workers_change_no_number(run: Run, words: list[str]) -> None:
    _, expected, _ = run("pics", "--format", "ndjson")
    found = rows(run("pics", *words, "--format", "ndjson")[1])
    for one, other in zip(rows(expected), found, strict=True):
        assert same(
            {**one, "rank": None} if "rank" in one else one, {**other, "rank": None} if "rank" in other else other
        )


def test_rank_and_its_threshold(run: Run) -> None:
    _, out, _ = run("pics", "--rank", "--low-rank", "90%", "--format", "ndjson")
    ranks = [row["rank"] for row in rows(out) if row["row"] == "layer"]
    assert all(1 <= rank <= 12 for rank in ranks)
    assert "low-rank" in {row["finding"] for row in rows(out) if row["row"] == "finding"}
    assert run("pics", "--low-rank", "5%")[0] == 2


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["--dead-share", "20%"], "dead-channels"),
        (["--duplicate-correlation", "1"], ""),
        (["--few-images", "7"], "few-images"),
    ],
)
def test_thresholds_reach_the_findings(run: Run, words: list[str], gone: str) -> None:
    _, out, _ = run("pics", "--format", "ndjson", *words)
    found = {row["finding"] for row in rows(out) if row["row"] == "finding"}
    assert gone not in found
    _, out, _ = run("pics", "--format", "ndjson", "--vanishing", "1e9", "--exploding", "1e-9", "--saturated-share", "0")
    found = {row["finding"] for row in rows(out) if row["row"] == "finding"}
    assert {"vanishing-activations", "exploding-activations"} <= found


def test_layers_and_types(run: Run) -> None:
    _, out, _ = run("pics", "--format", "ndjson", "--layer", "conv2,bn1")
    assert [row["name"] for row in rows(out) if row["row"] == "layer"] == ["bn1", "conv2"]
    _, out, _ = run("pics", "--format", "ndjson", "--type", "ReLU")
    assert [(row["index"], row["name"], row["call"]) for row in rows(out) if row["row"] == "layer"] == [
        (0, "relu", 0),
        (1, "relu", 1),
    ]


def images_in(out: str) -> int:
    return int(rows(out)[0]["images"])


def test_limit(run: Run) -> None:
    _, out, _ = run("pics", "--limit", "3", "--format", "ndjson")
    assert images_in(out) == 3


def test_lists_of_names(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "list").write_bytes(b"pics/0.png\0pics/b\0")
    assert images_in(run("--files0-from", "list", "--format", "ndjson")[1]) == 3
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"pics/0.png\0pics/1.png")))
    assert images_in(run("--files0-from", "-", "--format", "ndjson")[1]) == 2
    (here / "list").write_bytes(b"pics/0.png\0missing.png\0")
    status, out, errors = run("--files0-from", "list", "--format", "ndjson")
    assert (status, images_in(out)) == (1, 1)
    assert errors.startswith("Error: no picture 'missing.png'")


def test_standard_input(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((here / NAMES[0]).read_bytes())))
    status, out, _ = run("-", "--format", "ndjson")
    assert (status, rows(out)[0]["max_at"]["image"]) == (0, "-")


def test_lost_images_are_named_and_the_rows_still_come(run: Run, here: Path) -> None:
    (here / "evil\x1b]0;x\n.png").write_bytes(b"")
    status, out, errors = run("bad.jpg", "pics", "evil\x1b]0;x\n.png", "--format", "ndjson")
    assert (status, images_in(out)) == (1, 7)
    first, second, skipped = errors.splitlines()
    assert skipped == "Note: 2 of 9 images skipped"
    assert first.startswith("Error: 'bad.jpg' is not a picture")
    assert second.startswith("Error: 'evil\\x1b]0;x\\n.png' is empty")


def empty_folders(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "texts").mkdir()
    (here / "texts" / "a.txt").write_text("a")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "no image was given"),
        (["empty"], 1, "no pictures in 'empty': it is empty"),
        (["texts"], 1, "no pictures in 'texts'"),
        (["pics", "bad.jpg", "--strict"], 1, "'bad.jpg' is not a picture"),
        (["--files0-from", "missing"], 1, "the names in 'missing' cannot be read"),
        (["pics", "--resume"], 2, "--resume needs --save"),
        (["pics", "--plot", "x.jpg"], 2, "cannot write x.jpg; plots are PNG, SVG or PDF files"),
        (["pics", "--plot", "no/x.png"], 1, "its folder does not exist"),
        (["pics", "--plot", "pics/0.png"], 1, "it is the image pics/0.png itself"),
        (["pics", "--save", "no/x.json"], 1, "its folder does not exist"),
        (["pics", "--save", "pics"], 1, "Is a directory"),
        (["pics", "--save", ""], 1, "cannot write to an empty name"),
        (["pics", "--save", "pics/0.png"], 2, "would replace a file that holds no statistics"),
        (["pics", "--save", "nets.py"], 2, "would replace a file that holds no statistics"),
        (["pics", "--save", "x.png", "--plot", "./x.png"], 2, "--plot and --save name the same file"),
        (["pics", "--tensorboard", "nets.py"], 1, "cannot write nets.py"),
        (["pics", "--exploding", "nan"], 2, "'nan' is not a number of at least 0"),
        (["pics", "--dead-share", "150%"], 2, "'150%' is not a share"),
        (["pics", "--batch-size", "0"], 2, "--batch-size"),
        (["pics", "--input-size", "5x5", "--preprocess", "stretch"], 1, "refuses a picture of 2x3x5x5"),
    ],
)
def test_what_is_refused_is_one_error_and_leaves_nothing(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int, message: str
) -> None:
    monkeypatch.setattr("hookscope.statistics.check_installed", lambda: None)
    empty_folders(here)
    before = {path: path.read_bytes() for path in here.rglob("*.*") if path.is_file() and path.suffix != ".pyc"}
    found, out, errors = run(*words)
    assert (found, out) == (status, "")
    assert message in errors
    assert errors.count("Error: ") == 1
    after = {path: path.read_bytes() for path in here.rglob("*.*") if path.is_file() and path.suffix != ".pyc"}
    assert after == before


def test_targets_are_checked_before_the_model_is_made(run: Run) -> None:
    for words in (["--plot", "no/x.png"], ["--save", "no/x.json"], ["--plot", "x.gif"]):
        _, _, errors = run("pics", *words, model="no_such_model_is_looked_for")
        assert "no_such_model" not in errors


def test_what_a_model_prints_is_no_result(run: Run) -> None:
    status, out, errors = run("pics", "--format", "json", model="nets.py:loud")
    assert (status, list(json.loads(out))) == (0, ["layers", "findings"])
    assert errors.splitlines()[:2] == ["made", "runs"]


def test_a_run_cut_short_and_taken_up_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["pics/0.png", "bad.jpg", "pics", "--format", "ndjson"]
    status, whole, _ = run(*words)
    assert status == 1
    passes = iter(range(2))
    forward = torch.nn.Hardsigmoid.forward

    def interrupted(self: torch.nn.Hardsigmoid, inputs: torch.Tensor) -> torch.Tensor:
        if next(passes, None) is None:
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Hardsigmoid, "forward", interrupted)
        status, out, errors = run(*words, "--save", "s.json")
    assert (status, out) == (130, "")
    assert errors.splitlines()[-1] == "Note: s.json holds 5 of 9 images; add --resume to go on"
    assert load_statistics("s.json").totals.images == 4
    status, resumed, errors = run(*words, "--save", "s.json", "--resume")
    assert status == 1  # the image that was lost is lost still
    assert errors.splitlines()[0] == "Note: s.json holds 5 of 9 images"
    assert same(rows(resumed), rows(whole))


def test_strict_keeps_what_came_before(run: Run, here: Path) -> None:
    words = ["pics/0.png", "pics/1.png", "bad.jpg", "pics/2.png", "--save", "s.json", "--format", "ndjson"]
    assert run(*words, "--strict")[:2] == (1, "")
    assert load_statistics("s.json").totals.images == 2
    Image.open(here / NAMES[3]).save(here / "bad.jpg", "PNG")
    status, out, _ = run(*words, "--strict", "--resume")
    assert (status, images_in(out)) == (0, 4)


def test_a_finished_run_is_read_back(run: Run) -> None:
    _, first, _ = run("pics", "--save", "s.json", "--format", "ndjson")
    before = Path("s.json").read_bytes()
    status, second, errors = run("pics", "--save", "s.json", "--resume", "--format", "ndjson")
    assert (status, second, errors) == (0, first, "Note: s.json holds 7 of 7 images\n")
    assert Path("s.json").read_bytes() == before


def test_the_first_resume_begins(run: Run) -> None:
    status, out, errors = run("pics", "--save", "new.json", "--resume", "--format", "ndjson")
    assert (status, images_in(out), errors) == (0, 7, "")


@pytest.mark.parametrize(
    ("model", "words", "status", "message"),
    [
        (
            "nets.py:small",
            ["pics/b"],
            1,
            "'s.json' was measured on other images; its first 7 are not those of this run",
        ),
        ("nets.py:small", ["pics/1.png", "pics"], 1, "'s.json' was measured on other images"),
        ("nets.py:other", ["pics"], 1, "model nets.py:small and nets.py:other"),
        (
            "nets.py:small",
            ["pics", "--layer", "conv1"],
            1,
            "layers every convolution and activation function and conv1",
        ),
        ("nets.py:small", ["pics", "--rank"], 1, "rank False and True"),
        ("nets.py:small", ["pics", "--weights", "w.pth"], 1, "weights from factory (seed 0) and w.pth"),
        ("nets.py:small", ["pics", "--input-size", "40", "--preprocess", "stretch"], 1, "do not add up; preprocess"),
    ],
)
def test_what_does_not_add_up_is_not_resumed(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: list[str], status: int, message: str
) -> None:
    state = hookscope.load_model("nets.py:small").model.state_dict()
    torch.save(state, here / "w.pth")
    assert run("pics", "--save", "s.json")[0] == 0
    before = (here / "s.json").read_bytes()
    found, out, errors = run(*words, "--save", "s.json", "--resume", model=model)
    assert (found, out) == (status, "")
    assert message in errors
    assert errors.count("\n") == 1
    assert (here / "s.json").read_bytes() == before


def test_other_weights_of_the_same_name_do_not_add_up(run: Run, here: Path) -> None:
    state = hookscope.load_model("nets.py:small").model.state_dict()
    torch.save(state, here / "w.pth")
    assert run("pics", "--weights", "w.pth", "--save", "s.json")[0] == 0
    state["conv2.weight"][0, 0] += 1e-3
    torch.save(state, here / "w.pth")
    status, _, errors = run("pics", "--weights", "w.pth", "--save", "s.json", "--resume")
    assert (status, errors) == (
        1,
        "Error: 's.json' and 'this run' were measured on different weights of nets.py:small\n",
    )


def damaged(content: bytes) -> Iterator[bytes]:
    yield content[: len(content) // 2]
    yield content.replace(b'"images": 7', b'"images": 8')
    yield content.replace(b'"format": 1', b'"format": 99')
    yield b""
    yield b"{}"
    yield b"[" * 100_000
    yield b"\xff\xfe"


def test_a_damaged_file_is_refused_and_left_as_it_is(run: Run, here: Path) -> None:
    run("pics", "--save", "s.json")
    for content in damaged((here / "s.json").read_bytes()):
        (here / "bad.json").write_bytes(content)
        for words in (["pics", "--save", "bad.json", "--resume"],):
            status, out, errors = run(*words)
            assert (status, out, errors.count("\n")) == (1, "", 1)
            assert "'bad.json'" in errors
        status, out, errors = run("bad.json", "--merge", model="s.json")
        assert (status, out, errors.count("\n")) == (1, "", 1)
        assert (here / "bad.json").read_bytes() == content


def test_shards_joined_are_the_whole(run: Run, here: Path) -> None:
    whole = rows(run("pics", "--format", "ndjson", "--rank", "--save", "whole.json")[1])
    run(*NAMES[:3], "--save", "a.json", "--rank")
    run(*NAMES[3:], "--save", "b.json", "--rank")
    status, out, errors = run("b.json", "--merge", "--format", "ndjson", "--save", "c.json", model="a.json")
    assert (status, errors) == (0, "")
    assert same(rows(out), whole)
    _, again, _ = run("--merge", "--format", "ndjson", model="c.json")
    assert rows(again) == rows(out)
    status, out, errors = run("pics", "--save", "c.json", "--resume", "--rank")
    assert (status, out) == (2, "")
    assert "'c.json' was merged from several runs" in errors


def test_what_does_not_add_up_is_not_merged(run: Run, here: Path) -> None:
    run("pics", "--save", "a.json")
    run("pics", "--save", "b.json", model="nets.py:other")
    run("pics", "--save", "c.json", "--layer", "conv1")
    for name, message in {
        "b.json": "Error: 'a.json' and 'b.json' do not add up; model nets.py:small and nets.py:other\n",
        "c.json": "Error: 'a.json' and 'c.json' do not add up;"
        " layers every convolution and activation function and conv1\n",
        "missing.json": "Error: no saved statistics 'missing.json': No such file or directory\n",
    }.items():
        status, out, errors = run(name, "--merge", "--save", "d.json", model="a.json")
        assert (status, out, errors) == (1, "", message)
        assert not (here / "d.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.json"], "'a.json' is named twice"),
        (["./a.json"], "'./a.json' is named twice"),
        (["--layer", "conv1"], "--merge measures nothing, and --layer says what to measure"),
        (["--limit", "3"], "and --limit says"),
        (["--resume"], "and --resume says"),
        (["--files0-from", "-"], "and --files0-from says"),
    ],
)
def test_merge_takes_files_alone(run: Run, words: list[str], message: str) -> None:
    run("pics", "--save", "a.json")
    status, out, errors = run("--merge", *words, model="a.json")
    assert (status, out) == (2, "")
    assert message in errors


def test_a_plot_and_a_log(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setattr("hookscope.statistics.check_installed", lambda: check_folder("."))
    monkeypatch.setattr("hookscope.statistics.write_events", lambda *rest, **more: logged.append((rest, more)))
    status, out, _ = run("pics", "--plot", "x.png", "--tensorboard", "log", "--save", "a.json")
    assert (status, len(out.splitlines())) == (0, 7)
    with Image.open(here / "x.png") as image:
        assert image.width > 300
    (((folder, layers), more),) = logged
    assert (folder, len(layers), more["step"]) == ("log", 6, 0)
    assert more["about"] == {"model": "nets.py:small", "weights": "from factory (seed 0)"}
    assert run("--merge", "--plot", "y.svg", model="a.json")[0] == 0
    assert (here / "y.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device")
def test_a_plot_that_fails_costs_no_rows(run: Run) -> None:
    status, out, errors = run("pics", "--plot", "/dev/full")
    assert (status, len(out.splitlines())) == (1, 7)
    assert errors.splitlines()[-1].startswith("Error: cannot write /dev/full: No space left on device")


def test_shapes_that_vary_have_question_marks(run: Run, here: Path) -> None:
    Image.effect_noise((50, 34), 80).convert("RGB").save(here / "wide.png")
    _, out, _ = run("pics/0.png", "wide.png", "--format", "ndjson")
    assert rows(out)[0]["shape"] == [6, 10, None]
    assert "6x10x?" in run("pics/0.png", "wide.png")[1]


IMPATIENT = """
import hookscope.statistics.run as run
run._SAVE_EVERY = run._SAVE_SHARE = 0
from hookscope.cli.main import main
main()
"""


@POSIX
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_was_ended_loses_nothing_that_was_saved(run: Run, here: Path, number: int) -> None:
    words = ["pics", "--format", "ndjson", "--preprocess", "none", "--batch-size", "1", "--save", "s.json"]
    child = start("stats", "nets.py:slow", *words, code=IMPATIENT, stdout=-1, stderr=-1, text=True)
    try:
        until = time.monotonic() + 120
        while not (here / "s.json").exists() and time.monotonic() < until:
            time.sleep(0.01)
        child.send_signal(number)
        out, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert out == ""
    assert child.returncode == (-9 if number == signal.SIGKILL else 143), errors
    saved = load_statistics("s.json")
    assert saved.progress is not None
    assert 1 <= saved.totals.images == saved.progress.done < 7
    assert not list(here.glob(".hookscope*")) or number == signal.SIGKILL
    _, whole, _ = run("pics", "--format", "ndjson", model="nets.py:slow")
    status, resumed, _ = run("pics", "--format", "ndjson", "--save", "s.json", "--resume", model="nets.py:slow")
    assert status == 0
    assert same(rows(resumed), rows(whole))


@POSIX
def test_a_terminal_gets_a_bar_and_a_table(here: Path) -> None:
    import pty

    leader, terminal = pty.openpty()
    child = start("stats", "nets.py:small", "pics", "bad.jpg", stdout=terminal, stderr=terminal, stdin=terminal)
    os.close(terminal)
    seen = b""
    with open(leader, "rb", buffering=0) as stream:
        while True:
            try:
                part = stream.read(65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
    assert child.wait(60) == 1
    text = seen.decode()
    assert "images/s" in text
    assert "Error: 'bad.jpg' is not a picture" in text
    assert "index  name" in text
    assert "3 findings" in text
    assert "\x1b[?25h" in text or "\x1b[?25l" not in text  # the cursor is there again
