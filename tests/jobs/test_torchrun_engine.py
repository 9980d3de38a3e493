"""The engine under torchrun: the blocks of all ranks, gathered in order by rank 0."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookscope import load_model
from hookscope.errors import HookscopeError, LayerError
from hookscope.jobs import LocalEngine, TorchrunEngine
from hookscope.statistics import StatisticsJob, load_statistics, measure_images
from tests.helpers import ignore, settings


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    found = [f"{number:02}.png" for number in range(21)]
    for number, name in enumerate(found):
        Image.effect_noise((64, 64), 20 + number).convert("RGB").save(name)
    Path(found[5]).write_text("no image")
    return found


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> str:
    """A free port, which the engine of this process takes too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = str(probe.getsockname()[1])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", free)
    return free


def a_job(layers: Any = "0:3") -> StatisticsJob:
    return StatisticsJob(layers, None, False, False, True, 2, 0)


def test_one_rank_measures_all(names: list[str], port: str) -> None:
    net = load_model("shapes")
    parts = list(TorchrunEngine(0, 1, block=4).run(a_job(), net, names, 3))
    assert [position for part in parts for position in part.positions] == [3, 4, *range(6, 21)]
    assert [part.done for part in parts] == [4, 8, 12, 16, 20, 21]
    assert not torch.distributed.is_initialized()
    local = list(LocalEngine().run(a_job(), net, names, 3))
    images = [sum(part.value.totals.images for part in each if part.value) for each in (parts, local)]
    assert images == [17, 17]


def test_the_group_ends_with_an_error(names: list[str], port: str) -> None:
    with pytest.raises(LayerError, match="no layer 'nowhere'"):
        list(TorchrunEngine(0, 1).run(a_job("nowhere"), load_model("shapes"), names))
    assert not torch.distributed.is_initialized()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def torchrun(port: str, names: list[str]) -> Run:
    """Runs a command of hookscope in two processes of torchrun."""
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}

    def run(*words: str, expected: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [*TORCHRUN, port, "-m", "hookscope", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment | variables, timeout=300)
        assert done.returncode == expected, done.stderr
        return done

    return run


@pytest.mark.slow
def test_torchrun_saves_what_one_process_saves(torchrun: Run, names: list[str]) -> None:
    done = torchrun("stats", "shapes", *names, "--batch-size", "2", "--save", "all.json", "--format", "csv", expected=1)
    assert done.stdout.count("index,name,") == 1, "rank 0 alone prints"
    assert done.stderr.count("05.png") == 1
    saved = load_statistics("all.json")
    here = measure_images(load_model("shapes"), names, save="here.json", run=settings(2, skipped=ignore))
    assert saved.totals.pictures == here.totals.pictures
    assert (saved.progress, saved.source) == (here.progress, here.source)
    for layer, same in zip(saved.totals.statistics(), here.totals.statistics(), strict=True):
        exact = ("items", "values", "zeros", "nan", "inf", "min", "max")
        assert [getattr(layer, name) for name in exact] == [getattr(same, name) for name in exact]
        assert (layer.mean, layer.std) == pytest.approx((same.mean, same.std), rel=1e-9)


DYING = """
import os

from torch import nn


class Net(nn.Conv2d):
    def forward(self, x):
        if os.environ.get("RANK") == os.environ.get("DIES"):
            os.kill(os.getpid(), 9)
        return super().forward(x)


def net():
    return Net(3, 4, 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_dies_ends_all(torchrun: Run, names: list[str], rank: str) -> None:
    Path("dying.py").write_text(DYING)
    done = torchrun(
        "stats", "dying.py:net", *names[6:], "--batch-size", "1", "--save", "all.json", expected=1, DIES=rank
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) <= 1, "the agent of torchrun may end the other rank first"
    assert all("of torchrun has ended, or cannot be reached" in line for line in errors)
    assert "hookscope/jobs" not in done.stderr, "no traceback but that of torchrun's agent"


@pytest.mark.slow
def test_commands_without_passes_end_in_all_ranks(torchrun: Run, names: list[str]) -> None:
    assert "Usage" in torchrun("stats", "--help").stdout
    measure_images(load_model("shapes"), names[:2], save="a.json")
    measure_images(load_model("shapes"), names[2:4], save="b.json")
    assert torchrun("stats", "--merge", "a.json", "b.json", "--format", "csv").stdout.count("index,name,") == 1
    torchrun("stats", "shapes", expected=1)


def test_a_rank_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    with pytest.raises(HookscopeError) as caught:
        TorchrunEngine(1, 4).serve(load_model("shapes"))
    assert str(caught.value) == "rank 0 of torchrun has ended, or cannot be reached; this is rank 1 of 4; see its error"
