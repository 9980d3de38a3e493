"""The page of statistics: where its bands are, what it says, and that it holds up with oddities."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hookscope.drawing import figure_bytes
from hookscope.findings import Finding
from hookscope.hooks import Call
from hookscope.statistics import LayerStatistics, plot_statistics
from tests.statistics import judge


def layer_of(values: Any, name: str = "conv", kind: str = "Conv2d", bounds: Any = (None, None)) -> LayerStatistics:
    return judge.layer_of(values, call=Call(name, kind, 0, 0), bounds=bounds)


def finding(name: str, layer: str, **more: Any) -> Finding:
    return Finding(name, layer, f"evidence of {name} in {layer}", "what to do", **more)


def dead(layer: str, count: int, channels: int) -> Finding:
    return finding("dead-channels", layer, channels=tuple(range(count)), numbers={"dead": count, "channels": channels})


def panels(figure: Any) -> dict[str, Any]:
    return {axes.texts[0].get_text(): axes for axes in figure.axes}


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts[1:]]


def words(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.texts]


def segments(collection: Any) -> list[list[float]]:
    return [[float(x) for x, _ in segment] for segment in collection.get_segments()]


def pixels(figure: Any) -> np.ndarray:
    with Image.open(io.BytesIO(figure_bytes(figure, ".png"))) as image:
        return np.asarray(image.convert("RGB")).astype(int)


RAMP = [layer_of(torch.linspace(-1, 3, 401), "a"), layer_of(torch.linspace(0, 2, 101), "b", "ReLU")]


def test_bands_are_the_statistics() -> None:
    axes = panels(plot_statistics(RAMP, [], "a net"))["values"]
    thin, *bands = axes.collections
    assert segments(thin) == [[-1, 3], [0, 2]]
    for band, (low, high) in zip(bands, [(0.01, 0.99), (0.05, 0.95), (0.25, 0.75)], strict=True):
        assert segments(band) == [[layer.quantiles[low], layer.quantiles[high]] for layer in RAMP]
        assert [segment[0][1] for segment in band.get_segments()] == [0, 1]
    assert segments(bands[0])[0] == pytest.approx([-0.96, 2.96], rel=1e-2)
    widths = [band.get_linewidth()[0] for band in (thin, *bands)]
    assert widths[0] < widths[1] == widths[2] == widths[3]
    medians, means = axes.lines[:2]
    assert list(medians.get_xdata()) == [layer.quantiles[0.5] for layer in RAMP]
    assert list(means.get_xdata()) == [layer.mean for layer in RAMP]
    assert list(means.get_ydata()) == [0, 1]


def test_layers_of_very_different_size_are_drawn_in_units_of_their_own() -> None:
    layers = [layer_of(torch.linspace(-1, 3, 401), "a"), layer_of(torch.linspace(-1e-7, 3e-7, 401), "b")]
    shown = panels(plot_statistics([*layers, layer_of([0.0, 0.0], "c")], [], "a net"))
    assert list(shown) == ["values / rms", "root mean square (rms)", "zeros (%)", "dead channels (%)"]
    first, second, nothing = segments(shown["values / rms"].collections[3])
    assert first == [layers[0].quantiles[0.25] / layers[0].rms, layers[0].quantiles[0.75] / layers[0].rms]
    assert second == pytest.approx(first, abs=1e-2)
    assert nothing == [0, 0]
    sizes = shown["root mean square (rms)"]
    assert sizes.get_xscale() == "log"
    assert list(sizes.lines[0].get_xdata()) == [layers[0].rms, layers[1].rms]
    assert segments(sizes.collections[0]) == [[layer.rms, layer.max] for layer in layers]
    (half_precision,) = (line.get_xdata()[0] for line in sizes.lines[1:])
    assert half_precision == 2.0**-14
    low, high = shown["values / rms"].get_xlim()
    assert low < second[0] < second[1] < high


def test_shares_are_bars() -> None:
    values = torch.zeros(2, 4, 1, 5)
    values[:, 0] = torch.linspace(-9, 9, 5)
    values[:, 1, :, 0] = torch.tensor([[1.0], [0.5]])
    layers = [layer_of(values, "a", "Sigmoid", (0.0, 1.0)), layer_of(values, "b")]
    shown = panels(plot_statistics(layers, [], "a net"))
    assert segments(shown["zeros (%)"].collections[0]) == [[0, 100 * layers[0].zeros]] * 2
    assert segments(shown["dead channels (%)"].collections[0]) == [[0, 50]] * 2
    assert texts(shown["dead channels (%)"]) == ["2 of 4"] * 2
    (bar,) = segments(shown["saturated (%)"].collections[0])
    assert bar == [0, 100 * (layers[0].saturated or 0)] and bar[1] > 50
    assert list(shown["saturated (%)"].lines[0].get_ydata()) == [0]
    assert "saturated (%)" not in panels(plot_statistics(RAMP, [], "a net"))


def test_an_empty_panel_leaves_and_the_legend_names_only_what_is_drawn() -> None:
    layers = [layer_of(torch.linspace(1, 2, 9), "6", "Sigmoid", (0.0, 9.0))]
    figure = plot_statistics(layers, [dead("6", 1, 9)], "a net", weights="random (seed 3)")
    assert list(panels(figure)) == ["values"]
    name, weights, finding_line, *bands, absent = words(figure)
    assert (name, weights, figure.texts[1].get_color()) == ("a net", "weights: random (seed 3)", "#c8380a")
    assert finding_line.startswith("dead-channels:  6  Sigmoid: ")
    assert bands[-1].endswith("orange dot mean")
    assert absent == "no zeros or dead channels or saturated values"
    assert "no findings" in words(plot_statistics(layers, [])) and "no findings" not in words(plot_statistics(layers))


def test_lines_that_leave_the_panel_are_marked_and_explained() -> None:
    wide = torch.cat([torch.linspace(-1, 1, 5000), torch.tensor([-60.0])])
    layers = [layer_of(wide, "a"), layer_of(torch.linspace(-1e-7, 1e-7, 5000), "b")]
    figure = plot_statistics(layers, [], "a net")
    axes = panels(figure)["values / rms"]
    marks = {line.get_marker(): line for line in axes.lines if line.get_marker() in ("<", ">")}
    assert list(marks["<"].get_ydata()) == [0] and list(marks["<"].get_xdata()) == [axes.get_xlim()[0]]
    assert not len(marks[">"].get_ydata())
    assert any(line.endswith("arrowhead at the edge: the thin line goes on") for line in words(figure))
    assert not any("arrowhead" in line for line in words(plot_statistics(layers[1:], [])))


def test_nan_and_inf_are_counted_and_a_layer_without_values_says_so() -> None:
    layers = [
        layer_of([1.0, 2.0, math.nan, math.inf, math.nan], "a"),
        layer_of([math.nan, math.nan], "b"),
        layer_of(torch.zeros(1, 3, 0), "c"),
        layer_of([1.0, 2.0], "d"),
    ]
    figure = plot_statistics(layers, [], "a net")
    shown = panels(figure)
    assert texts(shown["NaN, Inf"]) == ["2 NaN, 1 Inf", "2 NaN"]
    assert [text.get_position()[1] for text in shown["NaN, Inf"].texts[1:]] == [0, 1]
    texts_of_rows = {text.get_text(): text.get_position()[1] for text in shown["values"].texts}
    assert (texts_of_rows["no finite value"], texts_of_rows["no value"]) == (1, 2)
    assert segments(shown["values"].collections[0]) == [[1, 2], [1, 2]]
    assert pixels(figure).std() > 5


def test_findings_stand_above_and_beside_their_rows() -> None:
    layers = [layer_of([0.0, 1.0], name) for name in "abcd"]
    findings = [
        finding("non-finite", "c"),
        dead("b", 1, 9),
        dead("c", 5, 9),
        dead("d", 2, 9),
        finding("few-images", ""),
    ]
    figure = plot_statistics(layers, findings, "a net")
    assert words(figure)[1:4] == [
        "non-finite:  c: evidence of non-finite in c",
        "dead-channels:  3 times, the worst c: evidence of dead-channels in c",
        "few-images:  evidence of few-images in",
    ]
    beside = {text.get_position()[1]: text.get_text() for text in figure.axes[-1].texts[1:]}
    assert beside == {1: "dead-channels", 2: "◄ look here first: non-finite, dead-channels", 3: "dead-channels"}


def test_the_row_with_the_worst_share_comes_first_else_the_first_row() -> None:
    layers = [layer_of([0.0, 1.0], name) for name in "abc"]

    def first(*findings: Finding) -> list[str]:
        texts_beside = texts(plot_statistics(layers, findings, "a net").axes[-1])
        return [chr(97 + at) for at, text in enumerate(texts_beside) if "look here first" in text]

    assert first(dead("a", 1, 9), dead("b", 5, 9), dead("c", 2, 9)) == ["b"]
    assert first(finding("vanishing-activations", "a"), finding("vanishing-activations", "b")) == ["a"]
    shares = {"a": 0.6, "b": 0.7, "c": 0.9}
    assert first(*[finding("saturated", name, numbers={"saturated": share}) for name, share in shares.items()]) == ["c"]
    assert first(dead("b", 1, 9)) == [], "there is nothing to choose from"


def test_findings_without_a_row_stand_above() -> None:
    figure = plot_statistics(RAMP, [finding("batchnorm-drift", "bn1"), finding("few-images", "")], "a net")
    assert words(figure)[1] == "batchnorm-drift:  bn1: evidence of batchnorm-drift in bn1"
    assert texts(figure.axes[-1]) == []
    nameless = plot_statistics([layer_of([0.0, 1.0], "")], [finding("few-images", "")], "a net")
    assert texts(nameless.axes[-1]) == []


def test_more_than_ten_kinds_are_counted() -> None:
    lines = words(plot_statistics(RAMP, [finding(f"kind{at}", "a") for at in range(13)], "a net"))
    assert lines[10].startswith("kind9:") and lines[11] == "... and 3 more kinds of findings, beside the rows"
    assert words(plot_statistics(RAMP, [], "a net"))[1] == "no findings"


def test_the_first_row_to_look_at_stands_out() -> None:
    layers = [layer_of([0.0, 1.0], name) for name in "abcd"]
    strong = np.array([0xF9, 0xC4, 0xA4]) == pixels(plot_statistics(layers, [dead("b", 1, 2), dead("c", 2, 2)], "x"))
    rows = np.flatnonzero(strong.all(axis=2).sum(axis=1) > 200)
    assert 5 < len(rows) < 25
    assert not (np.array([0xF9, 0xC4, 0xA4]) == pixels(plot_statistics(layers, [], "x"))).all(axis=2).any()


@pytest.mark.parametrize("count", [0, 40])
def test_any_number_of_rows(count: int) -> None:
    layers = [layer_of(torch.linspace(-1, 1 + at % 5, 50), f"features.{at}.conv") for at in range(count)]
    figure = plot_statistics(layers, [dead(layer.key, 1, 2) for layer in layers[::3]], "a net")
    assert pixels(figure).std() > 5
    assert sum("Conv2d" in text.get_text() for text in figure.axes[0].texts) == count


def test_extreme_numbers() -> None:
    huge = replace(layer_of([1.0, -1.0], "huge"), min=-1e300, max=1e200, rms=math.inf)  # as of float64
    layers = [huge, layer_of([1e-44, -1e-44], "tiny"), layer_of([3e38, 3e38], "flat")]
    assert pixels(plot_statistics(layers, [], "a net")).std() > 5
    assert pixels(plot_statistics([huge], [], "a net")).std() > 5
