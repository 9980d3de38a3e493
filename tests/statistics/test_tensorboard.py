"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookscope.errors import InstallationError, WriteError
from hookscope.hooks import Call
from hookscope.statistics import LayerStatistics, check_installed, write_events
from hookscope.statistics.figure import buckets
from hookscope.statistics.moments import ValueHistogram
from tests.helpers import seeded
from tests.statistics import judge

SCALARS = ("mean", "std", "min", "max", "rms", "zeros", "nan", "inf", "saturated", "rank")


def layer_of(values: Any, name: str = "conv") -> LayerStatistics:
    return judge.layer_of(values, call=Call(name, "Conv2d", 0, 0))


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader's, not ours
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
        events.Reload()
    return events


def measured() -> list[LayerStatistics]:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 1), nn.Sigmoid()))
    net[0].bias.data[1] = -9
    return judge.measured(net, judge.random(3, 3, 12, 12), rank=True).statistics()


def test_events_are_the_statistics(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    layers, threads, folder = measured(), threading.active_count(), tmp_path / "new" / "folder"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_events(folder, layers, 7, {"model": "__init__:make", "weights": "random\n# (seed 0)"})
    assert capfd.readouterr() == ("", "") and threading.active_count() == threads
    assert len(os.listdir(folder)) == 1
    events = read(folder)
    points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    expected = {}
    for layer in layers:
        expected |= {f"{layer.key}/{name}": getattr(layer, name) for name in SCALARS}
        expected[f"{layer.key}/dead"] = len(layer.dead_channels)
    assert set(points) == {tag for tag, value in expected.items() if value is not None}
    assert {"1/saturated", "3/saturated", "1/dead", "1/rank"} & set(points) == {"3/saturated", "1/dead", "1/rank"}
    for tag, ((point),) in points.items():
        assert (point.step, point.value) == (7, pytest.approx(expected[tag], rel=1e-6))
    assert points["1/dead"][0].value == 1
    assert events.Tags()["histograms"] == [f"{layer.key}/values" for layer in layers]
    for layer in layers:
        (point,) = events.Histograms(f"{layer.key}/values")
        histogram, count = point.histogram_value, layer.values
        assert (point.step, histogram.num, histogram.min, histogram.max) == (7, count, layer.min, layer.max)
        assert histogram.sum == pytest.approx(layer.mean * count)
        assert histogram.sum_squares == pytest.approx(layer.rms**2 * count)
        assert sum(histogram.bucket) == count
        assert len(histogram.bucket) == len(histogram.bucket_limit) <= 100
        assert list(histogram.bucket_limit) == sorted(set(histogram.bucket_limit))
        assert histogram.bucket_limit[-1] == layer.max
    (point,) = events.Tensors("about/text_summary")
    text = point.tensor_proto.string_val[0].decode()
    assert text == "    model: __init__:make\n    weights: random\\n# (seed 0)", "verbatim in Markdown"


def histogram_of(values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    histogram = ValueHistogram()
    histogram.update(values.float())
    return buckets(histogram.bins(), float(values.min()), float(values.max()))


NORMAL = judge.random(20_000)
BUCKETS = {
    "normal": NORMAL,
    "relu": NORMAL.relu(),
    "small": NORMAL.exp() * 1e-6,
    "outlier": torch.cat([NORMAL, torch.tensor([1e4])]),
    "far": torch.cat([NORMAL, torch.tensor([-1e30])]),
    "offset": 100 + NORMAL.sigmoid(),
    "negative": -NORMAL[:100].sigmoid(),
    "few": torch.tensor([-2.0, 0.0, 0.0, 5.0]),
    "zero": torch.zeros(3),
    "constant": torch.full((3,), -7.0),
    "huge": torch.tensor([3e38, -3e38]),
}


@pytest.mark.parametrize("values", BUCKETS.values(), ids=BUCKETS)
def test_buckets_hold_what_lies_in_them(values: torch.Tensor) -> None:
    limits, counts = histogram_of(values)
    assert counts.sum() == len(values) and counts.min() >= 0 and len(limits) <= 100
    assert (np.diff(limits) > 0).all() and limits[-1] == values.max()
    exact = np.sort(values.double().numpy())
    # an end is that of a bin, whose upper bound belongs to the next one
    least, most = (np.searchsorted(exact, limits, side) for side in ("left", "right"))
    assert (least <= counts.cumsum()).all() and (counts.cumsum() <= most).all()


def test_an_outlier_leaves_the_other_values_their_buckets() -> None:
    values = BUCKETS["outlier"]
    limits, counts = histogram_of(values)
    assert (abs(limits) < 3).sum() > 40
    assert counts.max() < 20_000 / 20
    middle = np.interp(0.5, counts.cumsum() / counts.sum(), limits)
    assert middle == pytest.approx(float(values.median()), abs=0.02)


def test_tags_keep_names_and_escape_what_cannot_be_shown(tmp_path: Path) -> None:
    names = ["layer1.0.conv1", "a b/c#$", "漢字", "x\n\x1b[2J", "\udcff", ""]
    write_events(tmp_path, [layer_of([0.0, 1.0], name) for name in names])
    tags = [tag.removesuffix("/mean") for tag in read(tmp_path).Tags()["scalars"] if tag.endswith("/mean")]
    assert tags == ["layer1.0.conv1", "a b/c#$", "漢字", "x\\n\\x1b[2J", "\\udcff", "(model)"]


def test_nan_inf_and_layers_without_values(tmp_path: Path) -> None:
    write_events(tmp_path, [layer_of([1.0, math.nan, math.inf, 3.0], "a"), layer_of([math.nan], "b")])
    events = read(tmp_path)
    assert events.Tags()["histograms"] == ["a/values"]
    assert {"b/nan", "b/inf", "b/zeros", "b/dead"} == {tag for tag in events.Tags()["scalars"] if tag.startswith("b/")}
    assert [events.Scalars(tag)[0].value for tag in ("a/nan", "a/inf", "b/nan", "a/mean")] == [1, 1, 1, 2]
    histogram = events.Histograms("a/values")[0].histogram_value
    assert (histogram.num, sum(histogram.bucket)) == (2, 2)
    assert (histogram.sum, histogram.sum_squares) == pytest.approx((4, 10))


def test_runs_in_one_folder_add_up(tmp_path: Path) -> None:
    for step in range(3):
        write_events(tmp_path, [layer_of([float(step)])], step)
    assert len(os.listdir(tmp_path)) == 3
    points = read(tmp_path).Scalars("conv/mean")
    assert [(point.step, point.value) for point in points] == [(step, step) for step in range(3)]


def test_files_stay_small(tmp_path: Path) -> None:
    layers = [layer_of(torch.randn(1, 2, 4000), f"layer{at}") for at in range(50)]
    write_events(tmp_path, layers)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 50 * 2600


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing", "a\0b"):
        with pytest.raises(WriteError, match="cannot write") as raised:
            write_events(folder, [layer_of([1.0])])
        assert "\n" not in str(raised.value)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(WriteError, match="free some space"):
        write_events(tmp_path, [layer_of([1.0])])
    assert os.listdir(tmp_path) == []


def test_without_tensorboard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    for call in (check_installed, lambda: write_events(tmp_path / "new", [])):
        with pytest.raises(InstallationError, match="package tensorboard is not installed") as raised:
            call()
        assert str(raised.value).endswith("; pip install 'hookscope[tensorboard]'")
    assert os.listdir(tmp_path) == []


def test_a_tensorboard_that_cannot_be_imported_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tensorboard"
    package.mkdir()
    text = "raise TypeError('Descriptors cannot be created directly.\\nIf this call came from')"
    (package / "__init__.py").write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InstallationError) as raised:
        check_installed()
    expected = (
        "cannot import tensorboard: Descriptors cannot be created directly.; pip install 'hookscope[tensorboard]'"
    )
    assert str(raised.value) == expected
