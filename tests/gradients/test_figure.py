"""The page of gradients: which rows and marks there are, read back from the figure itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookscope.drawing.plot import figure_bytes
from hookscope.findings.finding import Finding
from hookscope.gradients.backward_pass import layer_gradients
from hookscope.gradients.figure import gradient_figure
from hookscope.gradients.findings import GradientThresholds, diagnose_gradients
from hookscope.gradients.modify import GradientChanges
from hookscope.gradients.report import GradientReport
from hookscope.scores.losses import Loss


class Net(nn.Module):
    """Runs in another order than it is registered in; one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 4, 1, bias=False)
        self.first = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.last(self.last(self.bn(self.first(x)))).mean((2, 3)))


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def report(model: nn.Module | None = None, changes: GradientChanges | None = None) -> GradientReport:
    model = model or net()
    x = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
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


def test_rows_are_in_order_of_execution_with_other_layers_after_theirs() -> None:
    figure = gradient_figure(report(), [], "a net", ["one line"])
    labels = texts(figure.axes[0])[1:]
    assert labels == ["first", "bn", "last", "last#1", "fc"]
    heads = [text.get_text() for text in figure.texts]
    assert heads[:3] == ["a net", "one line", "no findings"]
    assert heads[3] == "absolute values on a log scale: dot mean, line to the largest; coloured rows have a finding"
    assert heads[4:8] == ["0 everywhere", "no gradient arrives", "frozen", "NaN or Inf"]
    assert heads[8].startswith("blank: no such parameter, the layer did not run")
    width = figure.get_size_inches()[0] * figure.dpi
    assert all(text.get_window_extent().x1 < width for text in figure.texts)


def test_dots_are_means_and_ticks_the_largest() -> None:
    found = report()
    activations, weights, biases = gradient_figure(found, [], "a net").axes
    means, largest = points(activations, "o"), points(activations, "|")
    for row, layer in zip((0, 2, 3, 4), found.layers, strict=True):
        assert layer.grad_output
        assert (means[row], largest[row]) == pytest.approx((layer.grad_output.mean_abs, layer.grad_output.max_abs))
    own = {p.name: p.gradient for p in found.parameters}
    for axes, row, name in ((weights, 0, "first.weight"), (weights, 1, "bn.weight"), (biases, 4, "fc.bias")):
        size = own[name]
        assert size and points(axes, "o")[row] == pytest.approx(size.mean_abs)
    assert 3 not in points(weights, "o")  # the second call has the parameters of the first
    assert set(points(biases, "o")) == {0, 1, 4}
    for axes in (activations, weights, biases):
        assert axes.get_xscale() == "log"
        # no dot touches the frame
        ends = [axes.transData.transform((x, 0))[0] for mark in "o|" for x in points(axes, mark).values()]
        frame = axes.get_window_extent()
        assert frame.x0 + 4 < min(ends) and max(ends) < frame.x1 - 4


def test_what_was_changed_stands_below() -> None:
    found = report(changes=GradientChanges(freeze=("fc",), clip_norm=0.01))
    figure = gradient_figure(found, [], "a net")
    weights = points(figure.axes[1], "o")
    own = {p.name: p for p in found.parameters}["first.weight"]
    assert own.gradient and own.after
    assert weights[-0.18] == pytest.approx(own.gradient.mean_abs)
    assert weights[0.22] == pytest.approx(own.after.mean_abs)
    assert 4.22 not in weights and 4 - 0.18 in weights  # frozen: no dot after it, but the mark of 0
    for axes in figure.axes[1:]:
        zeroed = points(axes, "<")
        assert list(zeroed) == [4.22] and zeroed[4.22] == axes.get_xlim()[0]
    told = [text.get_text() for text in figure.texts]
    assert "; blue before, orange after the change; " in told[2] and "0 after the change" in told


def test_marks_for_nothing_zero_and_nan() -> None:
    model = net()
    model.first.requires_grad_(False)
    model.fc.weight.data.zero_()
    found = report(model)
    activations, weights, _ = gradient_figure(found, [], "a net").axes
    assert set(points(weights, "s")) == {0} and not points(weights, "x")
    assert set(points(activations, "<")) == {0, 2, 3}
    model.fc.weight.data.fill_(float("nan"))
    activations, _, _ = gradient_figure(report(model), [], "a net").axes
    assert set(points(activations, ">")) == {0, 2, 3}
    left, right = activations.get_xlim()
    assert 0 < left < right


def test_findings_stand_above_and_beside_their_row() -> None:
    told = [Finding("no-gradient", "bn", "it is frozen", "...", numbers={"reason": "frozen"})]
    told += [Finding("vanishing-gradient", "last#1", "all 0", "...") for _ in range(9)]
    figure = gradient_figure(report(), told, "a net")
    heads = [text.get_text() for text in figure.texts]
    assert heads[1] == "no-gradient  bn: it is frozen"
    assert heads[9] == "... and 2 more findings, beside the rows"
    beside = texts(figure.axes[-1])
    assert "no-gradient: frozen" in beside and beside.count("vanishing-gradient") == 1
    bold = {text.get_text() for text in figure.axes[0].texts if text.get_fontweight() == "bold"}
    assert {"bn", "last#1"} <= bold and "fc" not in bold


class Cut(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.last(self.bn(self.first(x)).detach()).mean((2, 3)))


def test_frozen_and_unreached_parameters_have_marks_of_their_own() -> None:
    model = Cut()
    model.first.weight.requires_grad_(False)
    model.last.requires_grad_(False)
    activations, weights, biases = gradient_figure(report(model), [], "a net").axes
    assert set(points(activations, "x")) == {0, 2}
    assert (set(points(weights, "s")), set(points(weights, "x"))) == ({0, 2}, {1})
    assert (set(points(biases, "s")), set(points(biases, "x"))) == (set(), {0, 1})
    beside = texts(biases)[1:]
    assert beside == ["no-gradient: frozen and cut off", "no-gradient", "no-gradient: frozen and cut off"]


def test_every_row_beyond_a_threshold_is_marked() -> None:
    found = report()
    limits = GradientThresholds(exploding=1e9, vanishing=1e6)
    told = diagnose_gradients(found, thresholds=limits)
    assert len(told) == 1
    figure = gradient_figure(found, told, "a net", thresholds=limits)
    assert texts(figure.axes[-1])[1:] == ["vanishing-gradient"] * 4  # all but the batch norm, both calls of last
    bold = {text.get_text() for text in figure.axes[0].texts[1:] if text.get_fontweight() == "bold"}
    assert bold == {"first", "last", "last#1", "fc"}
    assert gradient_figure(found, [], "a net").axes[-1].texts[1:] == []


def test_ticks_do_not_crowd_over_thirty_decades() -> None:
    model = net()
    model.last.weight.data *= 1e-15
    for axes in gradient_figure(report(model), [], "a net").axes:
        labels = {label.get_text() for label in axes.get_xticklabels()}  # below the rows and above
        assert 2 <= len(labels) <= 6
        left, right = axes.get_xlim()
        assert all(left <= float(label) <= right for label in labels)
        ends = [axes.transData.transform((x, 0))[0] for mark in "o|" for x in points(axes, mark).values()]
        frame = axes.get_window_extent()
        assert frame.x0 + 4 < min(ends) and max(ends) < frame.x1 - 4


def test_a_page_is_made_of_anything() -> None:
    bare = nn.Sequential(nn.Conv2d(3, 2, 4), nn.Flatten()).requires_grad_(False)
    figure = gradient_figure(report(bare), [], "a $net$")
    for suffix in (".png", ".svg", ".pdf"):
        assert figure_bytes(figure, suffix)
