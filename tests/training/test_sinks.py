"""What a watched run writes to other programs, read back with their own readers; and its histograms, by NumPy."""

import json
import math
import os
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope import Monitor
from hookscope.errors import HookscopeError, InstallationError, UsageError, WriteError
from hookscope.training import sinks
from hookscope.training.reductions import StepWeights, edges_and_counts, histogram_of
from hookscope.training.sinks import SinkChoice, SinkProcess, TensorBoard
from tests.nets import Function


def train(steps: int, **options: Any) -> tuple[Monitor, list[dict[str, Tensor]]]:
    """The monitor of a run, and what it should have counted in each step."""
    torch.manual_seed(0)
    net = Function(lambda net, x: net.fc(net.relu(net.fc(x))), fc=nn.Linear(5, 5), relu=nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    expected = []
    with Monitor(net, optimizer, types="all", **options) as monitor:
        for _ in range(steps):
            x = torch.randn(7, 5)
            values = {"weight": net.fc.weight.detach().clone(), "bias": net.fc.bias.detach().clone()}
            values["activation"] = nn.functional.linear(x, **values)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            values |= {f"{name}_gradient": p.grad.clone() for name, p in net.fc.named_parameters()}
            optimizer.step()
            expected.append(values)
    return monitor, expected


def test_histograms_count_activations_weights_and_gradients_as_numpy_does() -> None:
    monitor, expected = train(5, every=2, histograms=2)
    assert {row["step"] for row in monitor.rows} == {0, 1, 2, 4}
    assert {row["step"] for row in monitor.rows if "histograms" in row} == {0, 4}
    for row in (row for row in monitor.rows if (row["layer"], row["call"]) == ("fc", 0) and "histograms" in row):
        assert row["histograms"].keys() == expected[0].keys()
        for name, values in expected[row["step"]].items():
            edges, counts = row["histograms"][name]["edges"], row["histograms"][name]["counts"]
            # a 0 between other values is in the bucket that ends there, not in the one that begins there
            values = torch.where(values == 0, -1e-12, values.double()) if edges[0] < 0 else values
            assert counts == np.histogram(values.numpy(), edges)[0].tolist() and sum(counts) == values.numel()
            ends = [float(values.min()), float(values.max())]
            assert [edges[0], edges[-1]] == pytest.approx(ends, rel=2**-6) and len(counts) <= 100


def test_parameters_of_a_layer_that_runs_twice_count_once_and_passes_of_a_step_together() -> None:
    monitor, _ = train(1, every=1, histograms=1)
    counted = {(row["layer"], row["call"]): sorted(row["histograms"]) for row in monitor.rows}
    everything = ["activation", "bias", "bias_gradient", "weight", "weight_gradient"]
    assert counted == {("fc", 0): everything, ("relu", 0): ["activation"], ("fc", 1): ["activation"]}
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with Monitor(net, optimizer, every=1, histograms=1) as monitor:
        for _ in range(3):
            net(torch.rand(4, 3)).sum().backward()
        optimizer.step()
    assert sum(monitor.rows[0]["histograms"]["activation"]["counts"]) == 3 * 4 * 2


def test_buckets_of_constants_of_what_is_not_finite_and_without_the_scale_of_a_scaler() -> None:
    assert edges_and_counts(histogram_of([torch.zeros(3), torch.zeros(2)])) == {"edges": [0.0, 0.0], "counts": [5]}
    assert edges_and_counts(histogram_of([torch.tensor([math.nan, math.inf])])) is None
    some = edges_and_counts(histogram_of([torch.tensor([math.nan, 1.0, -2.0, math.inf])]))
    assert some is not None and sum(some["counts"]) == 2
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.tensor([1024.0, 2048.0, 4096.0, 8192.0])
    scaled = StepWeights([{"weight": parameter}], True, torch.tensor(1024.0), with_histograms=True)
    histogram = scaled.histograms({"weight": parameter})["weight_gradient"]
    assert histogram["edges"][0] == 1 and histogram["edges"][-1] == pytest.approx(8, rel=2**-6)


def test_tensorboard_gets_the_metrics_and_the_histograms(tmp_path: Path) -> None:
    from tests.statistics.test_figure import read

    monitor, _ = train(3, every=1, histograms=2, to=2 * [f"tensorboard:{tmp_path}"])  # the same twice is one
    assert monitor.written_to == [f"tensorboard: {tmp_path}"]
    events = read(tmp_path)
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    row = next(row for row in monitor.rows if (row["step"], row["layer"], row["call"]) == (2, "fc", 1))
    for tag, name in (("fc#1/activation_mean", "activation_mean"), ("loss", "loss")):
        assert math.isclose(scalars[tag][2], row[name], rel_tol=1e-6)
    assert scalars["learning_rate"].keys() == {0, 1, 2} and scalars["fc/frozen"][0] == 0
    assert "fc/running_mean_shift" not in scalars
    assert {"fc/weight", "fc/activation", "fc#1/activation", "fc/bias_gradient"} <= set(events.Tags()["histograms"])
    first, second = events.Histograms("fc/weight")
    assert (first.step, second.step) == (0, 2)
    histogram = monitor.rows[0]["histograms"]["weight"]
    assert [int(count) for count in first.histogram_value.bucket if count] == [n for n in histogram["counts"] if n]
    assert set(first.histogram_value.bucket_limit) >= {histogram["edges"][-1]} and first.histogram_value.num == 25


def test_a_sink_that_fails_is_left_out_and_the_log_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left\nmore")

    monkeypatch.setattr(TensorBoard, "write", fail)
    notes: list[str] = []
    monitor, _ = train(3, every=1, to=[f"tensorboard:{tmp_path}"], on_trouble=notes.append)
    assert notes == ["tensorboard gets no more lines, the log goes on: no space left"]
    assert {row["step"] for row in monitor.rows} == {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wan", "cannot write to 'wan'; nearest: wandb; give tensorboard:DIR, wandb or mlflow"),
        ("", "cannot write to ''; give tensorboard:DIR, wandb or mlflow"),
        ("tensorboard", "tensorboard needs a folder; write tensorboard:DIR"),
        (None, "cannot write to 'None'; give tensorboard:DIR, wandb or mlflow"),
        ([5], "cannot write to '5'; give tensorboard:DIR, wandb or mlflow"),
    ],
)
def test_a_sink_that_does_not_exist_is_refused(text: Any, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        Monitor(to=text)
    assert str(raised.value) == says


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line_although_a_folder_has_its_name(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / package).mkdir()  # as wandb makes one for its runs
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(InstallationError) as raised:
        SinkChoice(package).check()
    assert str(raised.value) == f"the package {package} is not installed; pip install 'hookscope[{package}]'"


FAKE = """
import json, os, sys, time
__file__ = "wandb.py"
class Settings(dict): pass
def Histogram(np_histogram): return list(np_histogram)
def note(*what):
    with open(os.environ["CALLS"], "a") as file: file.write(json.dumps(what) + "\\n")
class Run:
    offline, url, dir = False, "https://example.org/run", "x"
    class config:
        update = staticmethod(lambda header: note("config", header))
    def define_metric(self, *what, **how): note("axis", what, how)
    def log(self, values):
        if values["step"] == 99: raise RuntimeError("no network")
        if values["step"] == 98: time.sleep(60)
        note("log", values)
    def finish(self, exit_code): note("finish", exit_code)
def init(project, **options):
    print("chatter")
    if project == "no": raise RuntimeError("no key\\nsecond line")
    note("init", project, "torch" in sys.modules)
    return Run()
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a stand-in for wandb notes its calls."""
    (tmp_path / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def noted(calls: Path) -> list[Any]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_a_sink_in_its_own_process_gets_each_step_and_how_the_run_ended(calls: Path) -> None:
    sink = SinkProcess("wandb", "cats")
    assert sink.where == "https://example.org/run"
    sink.begin({"every": 5})
    sink.write(0, 0, {"loss": math.nan}, {"fc/weight": {"edges": [0.0, 0.0], "counts": [5]}})
    sink.write(5, 0, {"loss": 0.25}, {})
    sink.close(failed=False)
    steps = [{"step": 0, "loss": math.nan, "fc/weight": [[5], [-0.5, 0.5]]}, {"step": 5, "loss": 0.25}]
    assert str(noted(calls)) == str([
        ["init", "cats", False], ["axis", ["*"], {"step_metric": "step"}], ["config", {"every": 5}],
        ["log", steps[0]], ["log", steps[1]], ["finish", 0],
    ])  # fmt: skip


def test_a_sink_whose_script_was_killed_ends_its_run_as_failed_and_one_that_got_nothing_is_closed(calls: Path) -> None:
    sink = SinkProcess("wandb", "")
    sink.write(0, 0, {"loss": 1.0}, {})
    sink._process.communicate()
    assert noted(calls)[0] == ["init", None, False] and noted(calls)[-1] == ["finish", 1]
    SinkProcess("wandb", "").close(failed=False)
    assert noted(calls)[-1] == ["finish", 0]


def test_a_server_that_is_silent_does_not_hold_up_the_script(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = SinkProcess("wandb", "")
    monkeypatch.setattr(sinks, "_SECONDS_TO_ANSWER", 0.2)
    sink.write(98, 0, {}, {})
    with pytest.raises(WriteError, match=r"^wandb gave no answer for 0.2 s; check its server and the net"):
        sink.write(99, 0, {}, {})
    sink._end()


def test_errors_in_the_process_of_a_sink_arrive(calls: Path) -> None:
    with pytest.raises(WriteError) as raised:
        SinkProcess("wandb", "no")
    assert str(raised.value) == "cannot write to wandb: no key; run `wandb login`, or set WANDB_MODE=offline"
    sink = SinkProcess("wandb", "")
    sink.begin({})
    sink.write(99, 0, {}, {})
    with pytest.raises(HookscopeError, match=r"^no network$"):
        sink.write(100, 0, {}, {})
    sink.close(failed=True)
    assert noted(calls)[-1] == ["finish", 1]


def records_of_leveldb(content: bytes) -> list[bytes]:
    """The records of a log of LevelDB after a header of 7 bytes, which is what an offline run of wandb is."""
    records, at = [b""], 7
    while at < len(content):
        if 2**15 - at % 2**15 < 7:  # no record begins at the very end of a block
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        records[-1] += content[at + 7 : at + 7 + length]
        records += [b""] if kind in (1, 4) else []  # whole, or the last part
        at += 7 + length
    return records[:-1]


@pytest.mark.slow
def test_wandb_reads_back_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monitor, _ = train(3, every=1, histograms=2, to="wandb:cats")
    assert "which `wandb sync` uploads" in monitor.written_to[0]
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = [wandb_internal_pb2.Record.FromString(data) for data in records_of_leveldb(file.read_bytes())]
    assert next(record.run.project for record in records if record.HasField("run")) == "cats"
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [line["step"] for line in history] == [0, 1, 2]
    for line in history:
        rows = {(row["layer"], row["call"]): row for row in monitor.rows if row["step"] == line["step"]}
        assert line["loss"] == rows["fc", 0]["loss"]
        assert line["fc#1/activation_mean"] == rows["fc", 1]["activation_mean"]
        if "histograms" in rows["fc", 0]:
            histogram = rows["fc", 0]["histograms"]["weight"]
            assert line["fc/weight/_type"] == "histogram" and line["fc/weight/values"] == histogram["counts"]
            assert line["fc/weight/bins"] == histogram["edges"]


@pytest.mark.slow
def test_mlflow_reads_back_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/m.db")
    monitor, _ = train(3, every=1, histograms=2, to="mlflow:cats")
    database = sqlite3.connect(tmp_path / "m.db")
    [(status, artifacts)] = database.execute("select status, artifact_uri from runs").fetchall()
    metrics = database.execute("select key, step, value from metrics").fetchall()
    database.close()
    stored = {(key, step): value for key, step, value in metrics}
    assert status == "FINISHED"
    for row in monitor.rows:
        tag = f"{row['layer']}:{row['call']}" if row["call"] else row["layer"]
        assert stored[f"{tag}/activation_std", row["step"]] == row["activation_std"]
        assert stored["loss", row["step"]] == row["loss"]
    folder = Path(artifacts.removeprefix("file://")) / "histograms"
    assert sorted(os.listdir(folder)) == ["step-00000000.json", "step-00000002.json"]
    first = json.loads((folder / "step-00000000.json").read_text())
    assert first["fc/weight"] == monitor.rows[0]["histograms"]["weight"]
