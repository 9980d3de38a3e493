"""The engine on Ray: the same result as in this process, whatever dies meanwhile; errors in one line."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hookscope import load_model
from hookscope.errors import HookscopeError, InstallationError, ModelError, UsageError
from hookscope.jobs import RayEngine, ray_engine, ray_worker
from hookscope.models import package_versions
from hookscope.statistics import SavedStatistics, measure_images

NETS = """
import os
import time

import torch
from torch import nn

from parts import Double


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.twice = nn.Conv2d(3, 4, 3, bias=False), Double()

    def forward(self, x):
        time.sleep(float(os.environ.get("SECONDS_OF_A_PASS", "0")))
        return self.twice(self.conv(x)).relu()


def net():
    torch.manual_seed(0)
    return Net()
"""
PARTS = """
from torch import nn


class Double(nn.Module):
    def forward(self, x):
        return x * 2
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The relative names of 40 images, of which number 5 cannot be read; nets.py and the file that it imports."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "parts.py").write_text(PARTS)
    found = [f"{number:02}.png" for number in range(40)]
    for number, name in enumerate(found):
        Image.effect_noise((24, 20), 20 + number).convert("RGB").save(name)
    Path(found[5]).write_text("no image")
    return found


@pytest.fixture
def forget_files() -> Iterator[None]:
    yield
    sys.modules.pop("parts", None)


def measure(names: list[str], engine: Any = None, **options: Any) -> SavedStatistics:
    net = load_model("nets.py:net", preprocess="none")
    lost: list[int] = []
    saved = measure_images(
        net, names, batch_size=2, engine=engine, on_lost=lambda position, *rest: lost.append(position), **options
    )
    assert saved.progress is not None and (saved.progress.lost, lost) == (1, [5])
    return saved


def assert_equal(saved: SavedStatistics, other: SavedStatistics) -> None:
    assert saved.totals.pictures == other.totals.pictures
    assert saved.progress == other.progress
    for layer, same in zip(saved.totals.statistics(), other.totals.statistics(), strict=True):
        assert layer.key == same.key
        exact = ("items", "values", "zeros", "nan", "inf", "min", "max")
        assert [getattr(layer, name) for name in exact] == [getattr(same, name) for name in exact]
        assert (layer.mean, layer.std) == pytest.approx((same.mean, same.std), rel=1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray in its own code
def test_ray_measures_what_this_process_measures(names: list[str], forget_files: None) -> None:
    pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)
    assert_equal(measure(names, RayEngine(workers=1, block=16)), measure(names))
    assert signal.getsignal(signal.SIGTERM) is handler


def test_ray_is_an_extra(names: list[str], monkeypatch: pytest.MonkeyPatch, forget_files: None) -> None:
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InstallationError, match=r"Ray is not installed; pip install 'hookscope\[ray\]'"):
        measure(names, RayEngine())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379"])
def test_a_cluster_that_does_not_answer_is_one_line_soon(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(HookscopeError, match=f"no Ray cluster answers at {address}: "):
        ray_engine._check_answer(address)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("address", "words"), [("head", "'head' is not an address; give auto, or HOST:PORT"), ("ray://h:1", "Ray client")]
)
def test_an_address_that_ray_data_cannot_use_is_refused(address: str, words: str) -> None:
    def connect() -> None:
        RayEngine(address)
        ray_engine._check_answer(address)

    with pytest.raises(UsageError, match=words):
        connect()


@pytest.mark.parametrize("gpus", [-1, 1.5, float("nan"), float("inf")])
def test_gpus_are_a_share_or_whole(gpus: float) -> None:
    with pytest.raises(UsageError, match="a share of one GPU, or whole GPUs"):
        RayEngine(gpus_per_worker=gpus)


@pytest.mark.parametrize(
    ("has", "processors", "gpus", "workers"),
    [
        ({"CPU": 8.0}, 1, 0, 8),
        ({"CPU": 8.0}, 3, 0, 2),
        ({"CPU": 8.0, "GPU": 2.0}, 1, 0.5, 4),
        ({"CPU": 2.0, "GPU": 4.0}, 1, 0.5, 2),
    ],
)
def test_workers_are_as_many_as_the_cluster_has_room_for(
    has: dict[str, float], processors: int, gpus: float, workers: int
) -> None:
    assert ray_engine._most_workers(has, processors, gpus) == workers


@pytest.mark.parametrize(("has", "gpus", "words"), [({"CPU": 8.0}, 0.5, "has 0"), ({"CPU": 1.0}, 0, "needs 2 proc")])
def test_a_cluster_without_room_for_a_worker_is_refused(has: dict[str, float], gpus: float, words: str) -> None:
    with pytest.raises(HookscopeError, match=words):
        ray_engine._most_workers(has, 2, gpus)


def test_other_versions_on_a_worker_are_refused() -> None:
    here = package_versions()
    ray_worker.check_versions(here | {"torch": here["torch"].partition("+")[0] + "+cpu"})
    with pytest.raises(InstallationError, match=f"a worker has hookscope {here['hookscope']}, and this process 0.0.1"):
        ray_worker.check_versions(here | {"hookscope": "0.0.1"})


def test_a_model_that_cannot_be_sent_is_one_line(names: list[str], forget_files: None) -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    net = load_model("nets.py:net", preprocess="none")
    net.model.lock = (each for each in names)  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"nets.py:net cannot be sent to other processes: TypeError.*generator"):
        ray_engine._packed(None, net, cloudpickle)  # type: ignore[arg-type]
