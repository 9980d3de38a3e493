"""The plot of gradients: its rows and marks."""

from typing import Any

import torch
from torch import Tensor, nn

from hookscope.drawing import Colour, RowPlot, draw_rows, figure_bytes
from hookscope.findings.finding import Finding
from hookscope.gradients import GradientChanges, GradientReport, layer_gradients
from hookscope.gradients.figure import gradients_plot
from hookscope.gradients.findings import GradientThresholds, diagnose_gradients
from hookscope.scores.objective import Loss
from tests.drawing.rows import ends, panel_of


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


def plot_of(model: nn.Module | None = None, changes: GradientChanges | None = None, findings: Any = ()) -> RowPlot:
    return gradients_plot(report_of(model, changes), findings)


def edges(plot: RowPlot, panel: str, marker: str) -> set[float]:
    """The rows with this mark at an edge of the gradients of ``panel``."""
    marks = panel_of(plot, f"gradient of the {panel}").marks
    return {at for mark, drawn in marks if mark.marker == marker for at, *_ in drawn}


def test_rows_are_in_order_of_execution_with_other_layers_after_theirs() -> None:
    plot = plot_of()
    assert plot.labels == ["first", "bn", "last", "last#1", "fc"]
    assert plot.lines == [("no findings", Colour.INK)] and plot.legend == [
        "absolute values on a log scale: dot mean, line to the largest",
        "blank: no such parameter, the layer did not run, or its first call shows it",
    ]


def test_dots_are_means_and_ticks_the_largest() -> None:
    report = report_of()
    plot = gradients_plot(report)
    means, largest = (ends(plot, "gradient of the activations", kind) for kind in ("dot", "tick"))
    for row, layer in zip((0, 2, 3, 4), report.layers, strict=True):
        assert layer.grad_output
        assert (means[row], largest[row]) == (layer.grad_output.mean_abs, layer.grad_output.max_abs)
    own = {p.name: p.gradient for p in report.parameters}
    weights, biases = (ends(plot, f"gradient of the {kind}", "dot") for kind in ("weights", "biases"))
    for drawn, row, name in ((weights, 0, "first.weight"), (weights, 1, "bn.weight"), (biases, 4, "fc.bias")):
        size = own[name]
        assert size and drawn[row] == size.mean_abs
    assert 3 not in weights  # the second call has the parameters of the first
    assert set(biases) == {0, 1, 4} and {panel.scale for panel in plot.panels} == {"log"}


def test_changed_gradients_stand_below_the_original_ones() -> None:
    report = report_of(changes=GradientChanges(freeze=("fc",), clip_norm=0.01))
    plot = gradients_plot(report)
    weights = ends(plot, "gradient of the weights", "dot")
    own = {p.name: p for p in report.parameters}["first.weight"]
    assert own.gradient and own.after
    assert (weights[-0.18], weights[0.22]) == (own.gradient.mean_abs, own.after.mean_abs)
    assert 4.22 not in weights and 4 - 0.18 in weights  # frozen: no dot after it, but the mark of 0
    assert edges(plot, "weights", "<") == edges(plot, "biases", "<") == {4.22}
    words, keys = plot.legend
    assert words.endswith("; blue before, orange after the change")
    assert keys.startswith("◂ orange: 0 after the change   blank: ")


def test_marks_of_frozen_zero_and_nan() -> None:
    model = Net()
    model.first.requires_grad_(False)
    model.fc.weight.data.zero_()
    plot = plot_of(model)
    assert edges(plot, "weights", "s") == {0} and not edges(plot, "weights", "x")
    assert edges(plot, "activations", "<") == {0, 2, 3}
    model.fc.weight.data.fill_(float("nan"))
    assert edges(plot_of(model), "activations", ">") == {0, 2, 3}


def test_findings_stand_above_and_beside_their_row() -> None:
    findings = [Finding("no-gradient", "bn", "it is frozen", "...", numbers={"reason": "frozen"})]
    findings += [Finding("vanishing-gradient", "last#1", "all 0", "...") for _ in range(9)]
    plot = plot_of(findings=findings)
    lines = [line for line, _ in plot.lines]
    assert (lines[0], lines[8]) == ("no-gradient  bn: it is frozen", "... and 2 more findings, beside the rows")
    assert plot.marked == {1: "no-gradient: frozen", 3: "vanishing-gradient"}


def test_frozen_and_unreached_parameters_have_different_marks() -> None:
    model = Net(cut=True)
    model.first.weight.requires_grad_(False)
    model.last.requires_grad_(False)
    plot = plot_of(model)
    assert edges(plot, "activations", "x") == {0, 2}
    assert (edges(plot, "weights", "s"), edges(plot, "weights", "x")) == ({0, 2}, {1})
    assert (edges(plot, "biases", "s"), edges(plot, "biases", "x")) == (set(), {0, 1})
    assert list(plot.marked.values()) == [
        "no-gradient: frozen and cut off",
        "no-gradient",
        "no-gradient: frozen and cut off",
    ]


def test_every_row_beyond_a_threshold_is_marked() -> None:
    report, limits = report_of(), GradientThresholds(exploding=1e9, vanishing=1e6)
    findings = diagnose_gradients(report, thresholds=limits)
    assert len(findings) == 1
    # all but the batch norm, both calls of last
    assert gradients_plot(report, findings, limits).marked == dict.fromkeys((0, 2, 3, 4), "vanishing-gradient")
    assert not gradients_plot(report).marked


def test_ticks_do_not_crowd_over_thirty_decades() -> None:
    model = Net()
    model.last.weight.data *= 1e-15
    for panel in plot_of(model).panels:
        left, right = panel.limits
        assert 2 <= len(panel.labels) <= 6 and all(left <= float(label) <= right for label in panel.labels)


def test_a_page_without_any_gradient_can_be_drawn() -> None:
    bare = nn.Sequential(nn.Conv2d(3, 2, 4), nn.Flatten()).requires_grad_(False)
    assert figure_bytes(draw_rows(plot_of(bare), "a $net$"), ".png")
