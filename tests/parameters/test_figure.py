"""The page of weights: its rows, panels and words."""

from typing import Any

import pytest
import torch
from torch import nn

from hookscope.drawing import Colour, figure_bytes
from hookscope.parameters.figure import plot_weights
from hookscope.parameters.findings import parameter_findings
from hookscope.parameters.statistics import parameter_statistics


def figure_of(model: nn.Module) -> Any:
    rows = parameter_statistics(model)
    figure = plot_weights(rows, parameter_findings(rows), "a net", weights="random (seed 0)", lines=["totals"])
    assert figure_bytes(figure, ".png").startswith(b"\x89PNG")
    return figure


def words(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.texts]


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def sound() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)
    model = nn.Sequential(*layers).requires_grad_(False)
    for norm in (model[1], model[3]):
        norm.running_mean.fill_(0.5)
    return model


def test_a_row_for_each_layer_and_a_panel_for_each_fact() -> None:
    figure = figure_of(sound())
    assert words(figure)[:3] == ["a net", "weights: random (seed 0)", "totals"]
    assert figure.texts[1].get_color() == Colour.ALARM and figure.texts[0].get_color() == Colour.INK
    assert words(figure)[3:] == [
        "no findings",
        "weights: thin line lowest to highest, thick line mean ± standard deviation, dot mean",
        "norms of filters, running variance: line least to largest, dot mean",
    ]
    assert [texts(axes)[0] for axes in figure.axes] == ["weights", "norms of filters", "running variance"]
    kinds = ["Conv2d", "BatchNorm2d", "Conv2d", "BatchNorm2d", "Linear"]
    assert texts(figure.axes[0])[1:] == [f"{at}  {kind}" for at, kind in enumerate(kinds)]
    assert texts(figure.axes[-1])[1:] == []


def test_bands_and_bars_are_where_the_numbers_are() -> None:
    model = nn.Linear(5, 1, bias=False).requires_grad_(False)
    model.weight.copy_(torch.tensor([[-3.0, -1.0, 0.0, 1.0, 3.0]]))
    weights, zeros = figure_of(model).axes
    thin, thick = (collection.get_segments()[0] for collection in weights.collections)
    assert thin.tolist() == [[-3, 0], [3, 0]]
    assert thick.tolist() == [[-2, 0], [2, 0]]
    assert list(weights.lines[-1].get_xdata()) == [0]
    [bar] = zeros.collections[0].get_paths()
    assert (bar.vertices[:, 0].min(), bar.vertices[:, 0].max()) == (0, 20)


def test_findings_stand_beside_their_rows() -> None:
    model = sound()
    model[0].weight[2] = 0
    model[2].weight[7] = model[2].weight[1]
    model[2].bias[0] = torch.nan
    model[3].running_var[5] = 0
    figure = figure_of(model)
    assert texts(figure.axes[-1])[1:] == ["1 dead filter: 2", "duplicates: 1=7; 1 NaN or Inf in bias", "1 collapsed: 5"]
    kinds = [line.split("  ")[0] for line in words(figure)[3:-2]]
    assert kinds == ["non-finite", "dead-filters", "duplicate-filters", "collapsed-variance"]


def test_statistics_that_were_never_updated_are_marked_where_others_were() -> None:
    model = sound()
    for norm in (model[1], model[3]):
        norm.running_mean.zero_()
    figure = figure_of(model)
    assert texts(figure.axes[-1])[1:] == []
    assert words(figure)[3].startswith("never-updated: the running statistics of all 2")
    model[1].running_mean.fill_(1)
    assert texts(figure_of(model).axes[-1])[1:] == ["never updated"]


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
    assert words(figure_of(model))[0] == "a net"


def test_weights_of_zero_and_of_widely_different_sizes() -> None:
    model = sound()
    assert figure_of(model).axes[0].get_xscale() == "linear"
    model[4].weight[0, 0] = 1e6
    assert figure_of(model).axes[0].get_xscale() == "symlog"
    for value in model.state_dict().values():
        value.zero_()
    assert figure_of(model).axes[0].get_xscale() == "linear"


def test_a_panel_without_values_is_left_out_and_its_words_too() -> None:
    model = nn.Linear(3, 3, bias=False).requires_grad_(False)
    figure = plot_weights(parameter_statistics(model))
    assert [texts(axes)[0] for axes in figure.axes] == ["weights"]
    assert words(figure) == ["", "weights: thin line lowest to highest, thick line mean ± standard deviation, dot mean"]


def test_a_line_that_goes_on_is_marked_and_explained() -> None:
    model = sound()
    model[0].weight[3] = 0.0
    figure = figure_of(model)
    norms = next(axes for axes in figure.axes if texts(axes)[0] == "norms of filters")
    [mark] = [line for line in norms.lines if line.get_marker() == "<" and len(line.get_xdata())]
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([norms.get_xlim()[0]], [0])
    assert words(figure)[-1].endswith("dot mean; red arrowhead: the line goes on to 0 or below")
