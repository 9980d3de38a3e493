"""The page of weights: its rows, panels and words."""

import pytest
import torch
from torch import nn

from hookscope.drawing import RowPlot, draw_rows, figure_bytes
from hookscope.parameters import parameter_statistics, weights_plot
from hookscope.parameters.findings import parameter_findings
from tests.drawing.rows import ends, panel_of, spans, titles


def plot_of(model: nn.Module) -> RowPlot:
    rows = parameter_statistics(model)
    plot = weights_plot(rows, parameter_findings(rows))
    assert figure_bytes(draw_rows(plot), ".png").startswith(b"\x89PNG")
    return plot


def lines_of(plot: RowPlot) -> list[str]:
    return [line.split("  ")[0] for line, _ in plot.lines]


BANDS = "weights: thin line lowest to highest, thick line mean ± standard deviation, dot mean"


def sound() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)
    model = nn.Sequential(*layers).requires_grad_(False)
    for norm in (model[1], model[3]):
        norm.running_mean.fill_(0.5)
    return model


def test_a_row_for_each_layer_and_a_panel_for_each_fact() -> None:
    plot = plot_of(sound())
    assert lines_of(plot) == ["no findings"] and not plot.marked
    assert plot.legend == [BANDS, "norms of filters, running variance: line least to largest, dot mean"]
    assert titles(plot) == ["weights", "norms of filters", "running variance"]
    kinds = ["Conv2d", "BatchNorm2d", "Conv2d", "BatchNorm2d", "Linear"]
    assert plot.labels == [f"{at}  {kind}" for at, kind in enumerate(kinds)]


def test_bands_and_bars_are_where_the_numbers_are() -> None:
    model = nn.Linear(5, 1, bias=False).requires_grad_(False)
    model.weight.copy_(torch.tensor([[-3.0, -1.0, 0.0, 1.0, 3.0]]))
    plot = plot_of(model)
    assert spans(plot, "weights", "line") == [(0, -3, 3), (0, -2, 2)]
    assert ends(plot, "weights", "dot") == {0: 0} and ends(plot, "zeros", "bar") == {0: 20}


def test_findings_stand_beside_their_rows() -> None:
    model = sound()
    model[0].weight[2] = 0
    model[2].weight[7] = model[2].weight[1]
    model[2].bias[0] = torch.nan
    model[3].running_var[5] = 0
    plot = plot_of(model)
    marked = ["1 dead filter: 2", "duplicates: 1=7; 1 NaN or Inf in bias", "1 collapsed: 5"]
    assert list(plot.marked.values()) == marked
    assert lines_of(plot) == ["non-finite", "dead-filters", "duplicate-filters", "collapsed-variance"]


def test_statistics_that_were_never_updated_are_marked_where_others_were() -> None:
    model = sound()
    for norm in (model[1], model[3]):
        norm.running_mean.zero_()
    plot = plot_of(model)
    assert not plot.marked and lines_of(plot)[0].startswith("never-updated: the running statistics of all 2")
    model[1].running_mean.fill_(1)
    assert plot_of(model).marked == {3: "never updated"}


@pytest.mark.parametrize(
    "model",
    [
        nn.ReLU(),
        nn.Linear(2, 2),
        nn.BatchNorm2d(2, affine=False),
        nn.MultiheadAttention(4, 2),
        nn.Conv2d(1, 1, 1),
        nn.ParameterDict({"$token\n": nn.Parameter(torch.full((2,), torch.nan))}),
        nn.ParameterList([nn.Parameter(torch.zeros(0, 2))]),
    ],
    ids=lambda model: type(model).__name__,
)
def test_unusual_models_are_drawn(model: nn.Module) -> None:
    assert plot_of(model)


def test_weights_of_zero_and_of_widely_different_sizes() -> None:
    model = sound()
    assert plot_of(model).panels[0].scale == "linear"
    model[4].weight[0, 0] = 1e6
    assert plot_of(model).panels[0].scale == "symlog"
    for value in model.state_dict().values():
        value.zero_()
    assert plot_of(model).panels[0].scale == "linear"


def test_a_panel_without_values_is_left_out_and_its_words_too() -> None:
    plot = weights_plot(parameter_statistics(nn.Linear(3, 3, bias=False).requires_grad_(False)))
    assert titles(plot) == ["weights"] and plot.legend == [BANDS] and not plot.lines


def test_a_line_that_goes_on_is_marked_and_explained() -> None:
    model = sound()
    model[0].weight[3] = 0.0
    plot = plot_of(model)
    assert panel_of(plot, "norms").beyond == ([0], ())
    assert plot.legend[-1].endswith("dot mean; red arrowhead: the line goes on to 0 or below")
