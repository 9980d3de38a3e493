"""Every plot from Python in one call: a figure of its own without pyplot, no setting changed, no glyph missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import hookscope


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def statistics(folder: Path, **more: Any) -> Figure:
    model = net().eval()
    with hookscope.StatisticsCollector(model) as collector, torch.no_grad():
        model(torch.rand(4, 3, 8, 8))
    totals = collector.totals
    return hookscope.plot(totals, title="$a$ net_1", **more)


def weights(folder: Path, **more: Any) -> Figure:
    rows = hookscope.parameter_statistics(net())
    return hookscope.plot(rows, findings=hookscope.diagnose(rows), title="$a$ net_1", **more)


def gradients(folder: Path, **more: Any) -> Figure:
    report = hookscope.layer_gradients(net().eval(), torch.rand(1, 3, 8, 8))
    return hookscope.plot(report, findings=hookscope.diagnose(report), title="$a$ net_1", **more)


def training(folder: Path) -> Figure:
    model, log = net(), folder / "run.ndjson"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hookscope.Monitor(model, optimizer, every=1, log=str(log), types=("all",)):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.rand(4, 3, 8, 8)).square().mean().backward()
            optimizer.step()
    return hookscope.plot(log, findings=hookscope.diagnose(log), title="$a$ net_1")


PLOTS = [statistics, weights, gradients, training]


def texts(figure: Figure) -> list[Any]:
    return [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]


@pytest.mark.parametrize("plot", PLOTS)
def test_the_figure_is_of_the_caller_alone(plot: Callable[..., Figure], tmp_path: Path) -> None:
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        before = dict.copy(matplotlib.rcParams)
        figure = plot(tmp_path)
        assert dict.copy(matplotlib.rcParams) == before
    figure.savefig(tmp_path / "plot.png")  # a glyph that is missing would be a warning, which is an error here
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert figure.texts[0].get_text() == "$a$ net_1"
    assert figure.axes[0].get_facecolor() == (1, 1, 1, 1)


@pytest.mark.parametrize("plot", PLOTS)
def test_texts_of_the_page_keep_apart(plot: Callable[..., Figure], tmp_path: Path) -> None:
    figure = plot(tmp_path)
    figure.savefig(tmp_path / "plot.png")
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure) if text.get_text()]
    width, height = figure.bbox.size
    for name, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, name
    for at, (name, box) in enumerate(boxes):
        for other, beside in boxes[:at]:
            assert not (
                box.x0 < beside.x1 - 1 and beside.x0 < box.x1 - 1 and box.y0 < beside.y1 - 2 and beside.y0 < box.y1 - 2
            ), (name, other)


@pytest.mark.parametrize("plot", [statistics, weights, gradients])
@pytest.mark.parametrize(("label", "colour"), [("random (seed 0)", "#c8380a"), ("net.pt", "#1a1a1a")])
def test_random_weights_are_red(plot: Callable[..., Figure], tmp_path: Path, label: str, colour: str) -> None:
    [said] = [text for text in plot(tmp_path, weights=label).texts if text.get_text() == f"weights: {label}"]
    assert said.get_color() == colour


@pytest.mark.parametrize("plot", PLOTS)
def test_types_stand_beside_bare_numbers(plot: Callable[..., Figure], tmp_path: Path) -> None:
    assert "0  Conv2d" in {text.get_text() for text in texts(plot(tmp_path))}


def test_what_has_no_plot_is_refused(tmp_path: Path) -> None:
    for result in ([], net(), {"a": 1}):
        with pytest.raises(hookscope.HookscopeError, match=f"no plot of {type(result).__name__}; there is one"):
            hookscope.plot(result)
