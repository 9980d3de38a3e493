"""The page of statistics, where its bands are and what it says; event files, read with TensorBoard's own reader."""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookscope.drawing import Colour, draw_rows, figure_bytes
from hookscope.errors import InstallationError, WriteError
from hookscope.findings import Finding
from hookscope.hooks import Call
from hookscope.statistics import LayerStatistics, check_installed, write_events
from hookscope.statistics.figure import buckets, statistics_plot
from hookscope.statistics.moments import ValueHistogram
from tests.drawing.rows import ends, panel_of, spans, texts, titles
from tests.helpers import refused, seeded
from tests.statistics import judge


def layer_of(values: Any, name: str = "conv", kind: str = "Conv2d", bounds: Any = (None, None)) -> LayerStatistics:
    return judge.layer_of(values, call=Call(name, kind, 0, 0), bounds=bounds)


def finding(name: str, layer: str, **more: Any) -> Finding:
    return Finding(name, layer, f"evidence of {name} in {layer}", "what to do", **more)


def dead(layer: str, count: int, channels: int) -> Finding:
    return finding("dead-channels", layer, channels=tuple(range(count)), numbers={"dead": count, "channels": channels})


RAMP = [layer_of(torch.linspace(-1, 3, 401), "a"), layer_of(torch.linspace(0, 2, 101), "b", "ReLU")]


def test_bands_are_the_statistics() -> None:
    plot = statistics_plot(RAMP, [])
    thin, *bands = [drawn for mark, drawn in panel_of(plot, "values").marks if mark.kind == "line"]
    assert thin == [(0, -1, 3), (1, 0, 2)]
    for band, (low, high) in zip(bands, [(0.01, 0.99), (0.05, 0.95), (0.25, 0.75)], strict=True):
        assert band == [(at, layer.quantiles[low], layer.quantiles[high]) for at, layer in enumerate(RAMP)]
    assert bands[0][0][1:] == pytest.approx([-0.96, 2.96], rel=1e-2)
    assert list(ends(plot, "values", "tick").values()) == [layer.quantiles[0.5] for layer in RAMP]
    assert list(ends(plot, "values", "dot").values()) == [layer.mean for layer in RAMP]


def test_layers_of_very_different_size_are_drawn_in_units_of_their_own() -> None:
    layers = [layer_of(torch.linspace(-1, 3, 401), "a"), layer_of(torch.linspace(-1e-7, 3e-7, 401), "b")]
    plot = statistics_plot([*layers, layer_of([0.0, 0.0], "c")], [])
    assert titles(plot) == ["values / rms", "root mean square (rms)", "zeros (%)", "dead channels (%)"]
    first, second, nothing = (span[1:] for span in spans(plot, "values", "line", Colour.BLUE))
    assert first == (layers[0].quantiles[0.25] / layers[0].rms, layers[0].quantiles[0.75] / layers[0].rms)
    assert second == pytest.approx(first, abs=1e-2)
    assert nothing == (0, 0)
    assert panel_of(plot, "root").scale == "log"
    assert spans(plot, "root", "line") == [(at, layer.rms, layer.max) for at, layer in enumerate(layers)]
    assert [x for _, x, _ in spans(plot, "root", "dot")] == [layer.rms for layer in layers]
    assert set(ends(plot, "root", "tick").values()) == {2.0**-14}  # of half precision
    low, high = panel_of(plot, "values").limits
    assert low < second[0] < second[1] < high


def test_shares_are_bars() -> None:
    values = torch.zeros(2, 4, 1, 5)
    values[:, 0] = torch.linspace(-9, 9, 5)
    values[:, 1, :, 0] = torch.tensor([[1.0], [0.5]])
    layers = [layer_of(values, "a", "Sigmoid", (0.0, 1.0)), layer_of(values, "b")]
    plot = statistics_plot(layers, [])
    assert ends(plot, "zeros", "bar") == dict.fromkeys((0, 1), 100 * layers[0].zeros)
    assert ends(plot, "dead", "bar") == {0: 50, 1: 50} and texts(plot, "dead") == {0: "2 of 4", 1: "2 of 4"}
    assert ends(plot, "saturated", "bar") == {0: 100 * (layers[0].saturated or 0)} and layers[0].saturated > 0.5
    assert ends(plot, "saturated", "tick") == {0: 0}
    assert "saturated (%)" not in titles(statistics_plot(RAMP, []))


def test_an_empty_panel_leaves_and_the_legend_names_only_what_is_drawn() -> None:
    layers = [layer_of(torch.linspace(1, 2, 9), "6", "Sigmoid", (0.0, 9.0))]
    plot = statistics_plot(layers, [dead("6", 1, 9)])
    assert titles(plot) == ["values"]
    [(line, colour)] = plot.lines
    assert line.startswith("dead-channels:  6  Sigmoid: ") and colour == Colour.ALARM
    assert plot.legend[0].endswith("orange dot mean")
    assert plot.legend[1:] == ["no zeros or dead channels or saturated values"]
    assert statistics_plot(layers, []).lines[0][0] == "no findings" and not statistics_plot(layers, None).lines


def test_lines_that_leave_the_panel_are_marked_and_explained() -> None:
    wide = torch.cat([torch.linspace(-1, 1, 5000), torch.tensor([-60.0])])
    layers = [layer_of(wide, "a"), layer_of(torch.linspace(-1e-7, 1e-7, 5000), "b")]
    plot = statistics_plot(layers, [])
    assert panel_of(plot, "values").beyond == ([0], [])
    assert any(line.endswith("arrowhead at the edge: the line goes on") for line in plot.legend)
    assert not any("arrowhead" in line for line in statistics_plot(layers[1:], []).legend)


def test_nan_and_inf_are_counted_and_a_layer_without_values_says_so() -> None:
    layers = [
        layer_of([1.0, 2.0, math.nan, math.inf, math.nan], "a"),
        layer_of([math.nan, math.nan], "b"),
        layer_of(torch.zeros(1, 3, 0), "c"),
        layer_of([1.0, 2.0], "d"),
    ]
    plot = statistics_plot(layers, [])
    assert texts(plot, "NaN, Inf") == {0: "2 NaN, 1 Inf", 1: "2 NaN"}
    assert texts(plot, "values") == {1: "no finite value", 2: "no value"}
    assert spans(plot, "values", "line", Colour.FAINT) == [(0, 1, 2), (3, 1, 2)]


def test_findings_stand_above_and_beside_their_rows() -> None:
    layers = [layer_of([0.0, 1.0], name) for name in "abcd"]
    findings = [
        finding("non-finite", "c"),
        dead("b", 1, 9),
        dead("c", 5, 9),
        dead("d", 2, 9),
        finding("few-images", ""),
    ]
    plot = statistics_plot(layers, findings)
    assert [line for line, _ in plot.lines] == [
        "non-finite:  c: evidence of non-finite in c",
        "dead-channels:  3 times, the worst c: evidence of dead-channels in c",
        "few-images:  evidence of few-images in ",
    ]
    assert plot.first == 2 and plot.marked == {
        1: "dead-channels",
        2: "◄ look here first: non-finite, dead-channels",
        3: "dead-channels",
    }


def test_the_row_with_the_worst_share_comes_first_else_the_first_row() -> None:
    layers = [layer_of([0.0, 1.0], name) for name in "abc"]

    def first(*findings: Finding) -> int | None:
        return statistics_plot(layers, findings).first

    assert first(dead("a", 1, 9), dead("b", 5, 9), dead("c", 2, 9)) == 1
    assert first(finding("vanishing-activations", "a"), finding("vanishing-activations", "b")) == 0
    shares = {"a": 0.6, "b": 0.7, "c": 0.9}
    assert first(*[finding("saturated", name, numbers={"saturated": share}) for name, share in shares.items()]) == 2
    assert first(dead("b", 1, 9)) is None, "there is nothing to choose from"


def test_findings_without_a_row_stand_above() -> None:
    plot = statistics_plot(RAMP, [finding("batchnorm-drift", "bn1"), finding("few-images", "")])
    assert plot.lines[0][0] == "batchnorm-drift:  bn1: evidence of batchnorm-drift in bn1" and not plot.marked
    assert not statistics_plot([layer_of([0.0, 1.0], "")], [finding("few-images", "")]).marked


def test_more_than_ten_kinds_are_counted() -> None:
    lines = [line for line, _ in statistics_plot(RAMP, [finding(f"kind{at}", "a") for at in range(13)]).lines]
    assert lines[9].startswith("kind9:") and lines[10] == "... and 3 more kinds of findings, beside the rows"


@pytest.mark.parametrize("count", [0, 40])
def test_any_number_of_rows(count: int) -> None:
    layers = [layer_of(torch.linspace(-1, 1 + at % 5, 50), f"features.{at}.conv") for at in range(count)]
    plot = statistics_plot(layers, [dead(layer.key, 1, 2) for layer in layers[::3]])
    figure = draw_rows(plot, "a net", weights="net.pt")
    assert [text.get_text() for text in figure.texts[:2]] == ["a net", "weights: net.pt"]
    assert figure_bytes(figure, ".png")
    assert sum("Conv2d" in text.get_text() for text in figure.axes[0].texts) == count


def test_extreme_numbers() -> None:
    huge = replace(layer_of([1.0, -1.0], "huge"), min=-1e300, max=1e200, rms=math.inf)  # as of float64
    layers = [huge, layer_of([1e-44, -1e-44], "tiny"), layer_of([3e38, 3e38], "flat")]
    assert figure_bytes(draw_rows(statistics_plot(layers)), ".png")
    assert figure_bytes(draw_rows(statistics_plot([huge])), ".png")


SCALARS = ("mean", "std", "min", "max", "rms", "zeros", "nan", "inf", "saturated", "rank")


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
        with refused(WriteError, "cannot write", part="begins"):
            write_events(folder, [layer_of([1.0])])


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
        text = "the package tensorboard is not installed; pip install 'hookscope[tensorboard]'"
        with refused(InstallationError, text):
            call()
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
    reason = "Descriptors cannot be created directly."
    with refused(InstallationError, f"cannot import tensorboard: {reason}; pip install 'hookscope[tensorboard]'"):
        check_installed()
