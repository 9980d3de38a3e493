"""The page of gradients: which rows and marks there are, read back from the figure itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.drawing import figure_bytes
from hookscope.findings.finding import Finding
from hookscope.gradients.backward_pass import GradientChanges, layer_gradients
from hookscope.gradients.figure import plot_gradients
from hookscope.gradients.findings import GradientThresholds, diagnose_gradients
from hookscope.gradients.report import GradientReport
from hookscope.scores.losses import Loss


class Net(nn.Module):
    """Runs in another order than it is registered in; one layer twice."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 4, 1, bias=False)
        self.first = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.first(x))
        x = self.last(x.detach()) if self.cut else self.last(self.last(x))
        return self.fc(x.mean((2, 3)))


def report_of(model: nn.Module | None = None, changes: GradientChanges | None = None) -> GradientReport:
    model = model or Net()
    x = torch.rand(1, 3, 4, 4)
    return layer_gradients(model, x, Loss("score", "0"), change=changes.of(model) if changes else None)


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def points(axes: Any, marker: str) -> dict[float, float]:
    """Row to value of every point with this marker."""
    return {
        float(y): float(x)
        for line in axes.lines
        if line.get_marker() == marker
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }


def assert_no_dot_touches_the_frame(axes: Any) -> None:
    ends = [axes.transData.transform((x, 0))[0] for mark in "o|" for x in points(axes, mark).values()]
    frame = axes.get_window_extent()
    assert frame.x0 + 4 < min(ends) and max(ends) < frame.x1 - 4


def test_rows_are_in_order_of_execution_with_other_layers_after_theirs() -> None:
    figure = plot_gradients(report_of(), [], "a net", lines=["one line"])
    assert texts(figure.axes[0])[1:] == ["first", "bn", "last", "last#1", "fc"]
    heads = texts(figure)
    assert heads[:3] == ["a net", "one line", "no findings"]
    assert heads[3:] == [
        "absolute values on a log scale: dot mean, line to the largest",
        "blank: no such parameter, the layer did not run, or its first call shows it",
    ]
    width = figure.get_size_inches()[0] * figure.dpi
    assert all(text.get_window_extent().x1 < width for text in figure.texts)


def test_dots_are_means_and_ticks_the_largest() -> None:
    report = report_of()
    activations, weights, biases = plot_gradients(report, [], "a net").axes
    means, largest = points(activations, "o"), points(activations, "|")
    for row, layer in zip((0, 2, 3, 4), report.layers, strict=True):
        assert layer.grad_output
        assert (means[row], largest[row]) == pytest.approx((layer.grad_output.mean_abs, layer.grad_output.max_abs))
    own = {p.name: p.gradient for p in report.parameters}
    for axes, row, name in ((weights, 0, "first.weight"), (weights, 1, "bn.weight"), (biases, 4, "fc.bias")):
        size = own[name]
        assert size and points(axes, "o")[row] == pytest.approx(size.mean_abs)
    assert 3 not in points(weights, "o")  # the second call has the parameters of the first
    assert set(points(biases, "o")) == {0, 1, 4}
    for axes in (activations, weights, biases):
        assert axes.get_xscale() == "log"
        assert_no_dot_touches_the_frame(axes)


def test_changed_gradients_stand_below_the_original_ones() -> None:
    report = report_of(changes=GradientChanges(freeze=("fc",), clip_norm=0.01))
    figure = plot_gradients(report, [], "a net")
    weights = points(figure.axes[1], "o")
    own = {p.name: p for p in report.parameters}["first.weight"]
    assert own.gradient and own.after
    assert weights[-0.18] == pytest.approx(own.gradient.mean_abs)
    assert weights[0.22] == pytest.approx(own.after.mean_abs)
    assert 4.22 not in weights and 4 - 0.18 in weights  # frozen: no dot after it, but the mark of 0
    for axes in figure.axes[1:]:
        assert points(axes, "<") == {4.22: axes.get_xlim()[0]}
    *_, words, keys = texts(figure)
    assert words.endswith("; blue before, orange after the change")
    assert keys.startswith("◂ orange: 0 after the change   blank: ")


def test_marks_of_frozen_zero_and_nan() -> None:
    model = Net()
    model.first.requires_grad_(False)
    model.fc.weight.data.zero_()
    activations, weights, _ = plot_gradients(report_of(model), [], "a net").axes
    assert set(points(weights, "s")) == {0} and not points(weights, "x")
    assert set(points(activations, "<")) == {0, 2, 3}
    model.fc.weight.data.fill_(float("nan"))
    activations = plot_gradients(report_of(model), [], "a net").axes[0]
    assert set(points(activations, ">")) == {0, 2, 3}
    left, right = activations.get_xlim()
    assert 0 < left < right


def test_findings_stand_above_and_beside_their_row() -> None:
    findings = [Finding("no-gradient", "bn", "it is frozen", "...", numbers={"reason": "frozen"})]
    findings += [Finding("vanishing-gradient", "last#1", "all 0", "...") for _ in range(9)]
    figure = plot_gradients(report_of(), findings, "a net")
    heads = texts(figure)
    assert heads[1] == "no-gradient  bn: it is frozen"
    assert heads[9] == "... and 2 more findings, beside the rows"
    beside = texts(figure.axes[-1])
    assert "no-gradient: frozen" in beside and beside.count("vanishing-gradient") == 1
    bold = {text.get_text() for text in figure.axes[0].texts if text.get_fontweight() == "bold"}
    assert {"bn", "last#1"} <= bold and "fc" not in bold


def test_frozen_and_unreached_parameters_have_different_marks() -> None:
    model = Net(cut=True)
    model.first.weight.requires_grad_(False)
    model.last.requires_grad_(False)
    activations, weights, biases = plot_gradients(report_of(model), [], "a net").axes
    assert set(points(activations, "x")) == {0, 2}
    assert (set(points(weights, "s")), set(points(weights, "x"))) == ({0, 2}, {1})
    assert (set(points(biases, "s")), set(points(biases, "x"))) == (set(), {0, 1})
    beside = texts(biases)[1:]
    assert beside == ["no-gradient: frozen and cut off", "no-gradient", "no-gradient: frozen and cut off"]


def test_every_row_beyond_a_threshold_is_marked() -> None:
    report, limits = report_of(), GradientThresholds(exploding=1e9, vanishing=1e6)
    findings = diagnose_gradients(report, thresholds=limits)
    assert len(findings) == 1
    figure = plot_gradients(report, findings, "a net", thresholds=limits)
    assert texts(figure.axes[-1])[1:] == ["vanishing-gradient"] * 4  # all but the batch norm, both calls of last
    bold = {text.get_text() for text in figure.axes[0].texts[1:] if text.get_fontweight() == "bold"}
    assert bold == {"first", "last", "last#1", "fc"}
    assert plot_gradients(report, [], "a net").axes[-1].texts[1:] == []


def test_ticks_do_not_crowd_over_thirty_decades() -> None:
    model = Net()
    model.last.weight.data *= 1e-15
    for axes in plot_gradients(report_of(model), [], "a net").axes:
        labels = {label.get_text() for label in axes.get_xticklabels()}  # below the rows and above
        assert 2 <= len(labels) <= 6
        left, right = axes.get_xlim()
        assert all(left <= float(label) <= right for label in labels)
        assert_no_dot_touches_the_frame(axes)


def test_a_page_without_any_gradient_can_be_drawn() -> None:
    bare = nn.Sequential(nn.Conv2d(3, 2, 4), nn.Flatten()).requires_grad_(False)
    assert figure_bytes(plot_gradients(report_of(bare), [], "a $net$"), ".png")
