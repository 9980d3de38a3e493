"""Engines on Ray and under torchrun: the result of this process, whatever dies meanwhile; errors in one line."""

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hookscope import extract, find_exemplars, load_model
from hookscope.errors import HookscopeError, InstallationError, LayerError, ModelError, UsageError
from hookscope.jobs import LocalEngine, RayEngine, TorchrunEngine, ray_engine
from hookscope.jobs.engines import unpacked
from hookscope.models import package_versions
from hookscope.statistics import SavedStatistics, StatisticsJob, load_statistics, measure_images
from tests.helpers import ignore, settings

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
        if "SECONDS_OF_A_PASS" in os.environ:
            with open(f"{os.getpid()}.pid", "w"):
                time.sleep(float(os.environ["SECONDS_OF_A_PASS"]))
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
    return noisy(40, (24, 20))


def noisy(count: int, size: tuple[int, int]) -> list[str]:
    found = [f"{number:02}.png" for number in range(count)]
    for number, name in enumerate(found):
        Image.effect_noise(size, 20 + number).convert("RGB").save(name)
    Path(found[5]).write_text("no image")
    return found


@pytest.fixture
def forget_files() -> Iterator[None]:
    yield
    sys.modules.pop("parts", None)


def measure(names: list[str], engine: Any = None, **options: Any) -> SavedStatistics:
    net = load_model("nets.py:net", preprocess="none")
    skipped: list[int] = []
    calls = options.pop("calls", {})
    saved = measure_images(
        net, names, run=settings(2, 0, engine, skipped=lambda at, *rest: skipped.append(at), **calls), **options
    )
    assert saved.progress is not None and (saved.progress.skipped, skipped) == (1, [5])
    return saved


def assert_equal(saved: SavedStatistics, other: SavedStatistics) -> None:
    assert saved.totals.pictures == other.totals.pictures
    assert saved.progress == other.progress
    for layer, same in zip(saved.totals.statistics(), other.totals.statistics(), strict=True):
        assert layer.key == same.key
        exact = ("items", "values", "zeros", "nan", "inf", "min", "max")
        assert [getattr(layer, name) for name in exact] == [getattr(same, name) for name in exact]
        assert (layer.mean, layer.std) == pytest.approx((same.mean, same.std), rel=1e-9)


def test_workers_measure_what_this_process_measures(
    names: list[str], monkeypatch: pytest.MonkeyPatch, forget_files: None
) -> None:
    pytest.importorskip("ray.cloudpickle")

    def rows(engine: Any, ray: Any, job: Any, packed: bytes, blocks: list[bytes]) -> Iterator[bytes]:
        workers = [ray_engine.ray_worker(packed, package_versions(), os.getcwd(), "cpu") for _ in range(2)]
        return (workers[number % 2](block) for number, block in enumerate(blocks))

    monkeypatch.setattr(RayEngine, "_rows", rows)
    monkeypatch.setattr(ray_engine, "_connected", lambda *arguments: contextlib.nullcontext())
    assert_equal(measure(names, RayEngine(block=16)), measure(names))


@pytest.mark.slow  # Ray takes 12 s of processor time to start and to end
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray in its own code
def test_ray_measures_what_this_process_measures(names: list[str], forget_files: None) -> None:
    pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)
    assert_equal(measure(names, RayEngine(workers=1, block=16)), measure(names))
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.skipif(os.name != "posix", reason="signals of a thread")
def test_a_process_of_ray_that_was_killed_is_one_line_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_SECONDS_TO_LOOK", 0.01)
    words = "Ray ended on this machine: its process raylet was killed or crashed; try again, or use"
    with pytest.raises(HookscopeError, match=words), ray_engine._interrupted_if(lambda: [("raylet", None)]):
        time.sleep(30)
    with pytest.raises(KeyboardInterrupt), ray_engine._interrupted_if(list):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("code", "status"), [(signal.SIGTERM, 143), (1, 1)])
def test_a_signal_while_ray_starts_has_our_status(monkeypatch: pytest.MonkeyPatch, code: int, status: int) -> None:
    def init(*where: Any, **more: Any) -> None:
        raise SystemExit(code)  # what Ray's own handler does

    ray = types.SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: ended.append(True))
    ended: list[bool] = []
    logging = types.SimpleNamespace(stdout_deduplicator=types.SimpleNamespace(skip_re=None))
    monkeypatch.setattr(ray_engine.importlib, "import_module", lambda name: logging)
    with pytest.raises(SystemExit) as error, ray_engine._connected(ray, None):
        pass
    assert (error.value.code, ended) == (status, [True])


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


def test_a_cluster_that_is_silent_is_one_line_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_engine._SECONDS_TO_ANSWER < 15
    monkeypatch.setattr(ray_engine, "_SECONDS_TO_ANSWER", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(HookscopeError, match=f"no Ray cluster answers at {address}: it is silent for 0.5 s"):
            ray_engine._check_answer(address)


@pytest.mark.parametrize(
    ("address", "words"),
    [("head", "'head' is not an address; give auto, or HOST:PORT"), ("h:99999", "not an"), ("ray://h:1", "Ray client")],
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
    for too_few, share, words in (({"CPU": 8.0}, 0.5, "has 0"), ({"CPU": 1.0}, 0, "needs 2 proc")):
        with pytest.raises(HookscopeError, match=words):
            ray_engine._most_workers(too_few, 2, share)


def test_other_versions_on_a_worker_are_refused() -> None:
    here = package_versions()
    ray_engine.check_versions(here | {"torch": here["torch"].partition("+")[0] + "+cpu"})
    with pytest.raises(InstallationError, match=f"a worker has hookscope {here['hookscope']}, and this process 0.0.1"):
        ray_engine.check_versions(here | {"hookscope": "0.0.1"})


def test_a_model_that_cannot_be_sent_is_one_line(names: list[str], forget_files: None) -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    net = load_model("nets.py:net", preprocess="none")
    net.model.lock = (each for each in names)  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"nets.py:net cannot be sent to other processes: TypeError.*generator"):
        ray_engine._packed(None, net, cloudpickle)  # type: ignore[arg-type]


class OnlyHere:
    def __reduce__(self) -> Any:
        return importlib.import_module, ("onlyhere",)


def test_a_model_that_a_worker_cannot_load_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a worker goes; the test comes back
    worker = ray_engine.ray_worker(pickle.dumps(OnlyHere()), package_versions(), str(tmp_path), "cpu")
    words = "a worker cannot load the model: ModuleNotFoundError: No module named 'onlyhere'; install what it imports"
    with pytest.raises(ModelError, match=words):
        unpacked(worker(b""))


ENDING = """
import os

import torch
from torch import nn


class Net(nn.Conv2d):
    def forward(self, x):
        ends = os.getpid() != DRIVER if RANK is None else os.environ["RANK"] == RANK
        if ends and HOW == "killed":
            os.kill(os.getpid(), 9)
        kept = [torch.ones(12_500_000) for _ in range(80 * ends)]
        return super().forward(x)


def net():
    return Net(3, 4, 3)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("how", "words"),
    [("killed", "a worker ended 4 times: it was killed"), ("full", "the memory of its machine was full")],
)
def test_a_worker_that_ends_again_and_again_is_one_line_soon(
    names: list[str], monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    pytest.importorskip("ray")
    if how == "full":
        memory = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
        most = memory["MemTotal"] - memory["MemAvailable"] + 2_500_000
        monkeypatch.setenv("RAY_memory_usage_threshold", f"{most / memory['MemTotal']:.3f}")
        monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    Path("ending.py").write_text(f"DRIVER, HOW, RANK = {os.getpid()}, {how!r}, None\n{ENDING}")
    net = load_model("ending.py:net", preprocess="none")
    began = time.monotonic()
    with pytest.raises(HookscopeError, match=words):
        measure_images(net, names[6:], run=settings(2, 0, RayEngine(workers=1)))
    assert time.monotonic() - began < 120, "a minute on a machine that does nothing else"


@pytest.fixture
def cluster(names: list[str], monkeypatch: pytest.MonkeyPatch, forget_files: None) -> Iterator[Any]:
    """A cluster of two raylets with a worker each, which are slow."""
    utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("SECONDS_OF_A_PASS", "0.1")
    started = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    started.second = started.add_node(num_cpus=1)
    yield started
    started.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("lost", ["worker", "node", "nothing"])
def test_nothing_is_lost_or_counted_twice_when_a_part_of_the_cluster_dies(
    names: list[str], cluster: Any, lost: str
) -> None:
    names = names * 4  # the same images again count as images
    hit: list[int] = []

    def on_progress(count: int) -> None:
        if not hit and lost == "worker":
            hit.append(int(next(Path().glob("*.pid")).stem))
            os.kill(hit[0], signal.SIGKILL)
        if not hit and lost == "node":
            cluster.remove_node(cluster.second, allow_graceful=False)
            hit.append(2)

    net = load_model("nets.py:net", preprocess="none")
    calls: dict[str, Any] = {"skipped": ignore, "note": ignore}
    saved = measure_images(net, names, run=settings(2, 0, RayEngine(cluster.address), progress=on_progress, **calls))
    assert hit or lost == "nothing"
    assert saved.progress is not None and saved.progress.skipped == 4
    os.environ.pop("SECONDS_OF_A_PASS")
    assert_equal(saved, measure_images(net, names, run=settings(2, **calls)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_run_goes_on_with_another_engine_after_an_interrupt(names: list[str], cluster: Any) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    engine = RayEngine(cluster.address)
    with pytest.raises(KeyboardInterrupt):
        measure(names, engine, save="a.json", calls={"progress": interrupt})
    done = load_statistics("a.json").progress
    assert done is not None and 0 < done.done < 40
    os.environ.pop("SECONDS_OF_A_PASS")
    whole = measure(names)
    net = load_model("nets.py:net", preprocess="none")
    resumed = measure_images(net, names, save="a.json", resume=True, run=settings(2, skipped=ignore))
    assert_equal(resumed, whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_features_and_exemplars_are_those_of_this_process(names: list[str], cluster: Any) -> None:
    os.environ.pop("SECONDS_OF_A_PASS")
    net = load_model("nets.py:net", preprocess="none")
    options: dict[str, Any] = {"layers": ["conv"], "pool": "mean"}
    here = list(extract(net, names, **options, run=settings(2, skipped=ignore)))
    there = list(extract(net, names, **options, run=settings(2, 0, RayEngine(cluster.address), skipped=ignore)))
    for field in ("positions", "names", "sha256", "labels"):
        assert [e for b in here for e in getattr(b, field)] == [e for b in there for e in getattr(b, field)]
    assert torch.equal(*(torch.cat([batch.features["conv"] for batch in each]) for each in (here, there)))
    found = [
        find_exemplars(net, names, layers=["conv"], top=3, run=settings(2, 0, engine, skipped=ignore))
        for engine in (None, RayEngine(cluster.address))
    ]
    for channel, same in zip(found[0][0].channels, found[1][0].channels, strict=True):
        assert (channel.most, channel.least) == (same.most, same.least)
        assert np.array_equal(channel.counts, same.counts) and np.array_equal(channel.edges, same.edges)


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return noisy(21, (64, 64))


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
    return StatisticsJob(layers, None, {}, 2, 0)


def test_one_rank_measures_all(few: list[str], port: str) -> None:
    net = load_model("shapes")
    parts = list(TorchrunEngine(0, 1, block=4).run(a_job(), net, few, 3))
    assert [position for part in parts for position in part.positions] == [3, 4, *range(6, 21)]
    assert [part.done for part in parts] == [4, 8, 12, 16, 20, 21]
    assert not torch.distributed.is_initialized()
    local = list(LocalEngine().run(a_job(), net, few, 3))
    images = [sum(part.value.totals.images for part in each if part.value) for each in (parts, local)]
    assert images == [17, 17]


def test_the_group_ends_with_an_error(few: list[str], port: str) -> None:
    with pytest.raises(LayerError, match="no layer 'nowhere'"):
        list(TorchrunEngine(0, 1).run(a_job("nowhere"), load_model("shapes"), few))
    assert not torch.distributed.is_initialized()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def torchrun(port: str, few: list[str]) -> Run:
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
def test_torchrun_saves_what_one_process_saves(torchrun: Run, few: list[str]) -> None:
    done = torchrun("stats", "shapes", *few, "--batch-size", "2", "--save", "all.json", "--format", "csv", expected=1)
    assert done.stdout.count("index,name,") == 1, "rank 0 alone prints"
    assert done.stderr.count("05.png") == 1
    saved = load_statistics("all.json")
    here = measure_images(load_model("shapes"), few, save="here.json", run=settings(2, skipped=ignore))
    assert saved.source == here.source
    assert_equal(saved, here)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_dies_ends_all(torchrun: Run, few: list[str], rank: str) -> None:
    Path("ending.py").write_text(f"HOW, RANK = 'killed', {rank!r}\n{ENDING}")
    done = torchrun("stats", "ending.py:net", *few[6:], "--batch-size", "1", "--save", "all.json", expected=1)
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) <= 1, "the agent of torchrun may end the other rank first"
    words = "of torchrun has ended, or cannot be reached", "ended by SIGTERM"  # of a communication, or by the agent
    assert all(line.endswith(words[1]) or words[0] in line for line in errors)
    assert "hookscope/jobs" not in done.stderr, "no traceback but that of torchrun's agent"


@pytest.mark.slow
def test_commands_without_passes_end_in_all_ranks(torchrun: Run, few: list[str]) -> None:
    assert "Usage" in torchrun("stats", "--help").stdout
    torchrun("stats", "shapes", expected=1)


def test_a_rank_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    with pytest.raises(HookscopeError) as caught:
        TorchrunEngine(1, 4).serve(load_model("shapes"))
    assert str(caught.value) == "rank 0 of torchrun has ended, or cannot be reached; this is rank 1 of 4; see its error"
