"""The page of a run: its charts and cells against the log, and the figure of every unusual run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hookscope.drawing import Chart, Colour, figure_bytes, palette
from hookscope.drawing.colours import LEVELS
from hookscope.errors import InputError, UsageError
from hookscope.training.log.file import Run
from hookscope.training.log.findings import findings_over_time
from hookscope.training.log.series import series_of
from hookscope.training.log.summary import TimedFinding
from hookscope.training.plot import COLUMNS, MOST_CELLS, RunPlot, cell_colours, grid_of, plot_training, run_plot
from tests.drawing.rows import ends, spans
from tests.training.watched import log

METRICS = {
    "activation_mean": 0.0,
    "zero_share": 0.5,
    "channels": 8,
    "running_mean_shift": 0.1,
    "running_var_ratio": 1.0,
}


def run(steps: int = 10, layers: int = 3, change: Any = lambda step, layer: {}, **more: Any) -> Run:
    """A sound run of ``layer0``, ``layer1``, ... whose loss falls."""

    def changed(step: int, layer: str) -> dict[str, Any]:
        return {"loss": 2.0 - step / 1000} | more | change(step, int(layer.removeprefix("layer")))

    return log(changed, [f"layer{at}" for at in range(layers)], range(0, 50 * steps, 50), **METRICS)


def drawn(of: Run, heading: str = "run.ndjson") -> Any:
    return plot_training(of, findings_over_time(of), heading)


@pytest.fixture(scope="module")
def sound() -> Any:
    return drawn(run())


def plotted(of: Run, findings: Any = None) -> RunPlot:
    return run_plot(of, findings_over_time(of) if findings is None else findings)


def titles(of: Run) -> list[str]:
    plot = plotted(of)
    assert [panel.title for panel in plot.cells.panels] == [chart.title for chart in plot.metrics]
    return [chart.title for chart in plot.metrics]


def metric(plot: RunPlot, title: str) -> Chart:
    return next(chart for chart in plot.metrics if chart.title.startswith(title))


def words(part: Any) -> list[str]:
    return [text.get_text() for text in part.texts]


def finding(name: str, layer: str = "", evidence: str = "", step: int = 0) -> TimedFinding:
    return TimedFinding(name, layer, evidence, "", step=step, last_step=step, time=None, lasts=True)


def test_a_column_is_drawn_for_each_metric_that_has_values() -> None:
    assert titles(run()) == [column.title for column in COLUMNS[1:]]
    few = run(running_mean_shift=None, running_var_ratio=None, update_to_weight=None)
    assert titles(few) == [column.title for column in COLUMNS[1:4]] and titles(Run({})) == []


def test_a_finding_is_numbered_in_its_line_above_the_loss_and_beside_its_row() -> None:
    plot = plotted(run(change=lambda step, layer: {"dead_channels": 4 if layer == 1 and step >= 200 else 0}))
    line, colour = plot.cells.lines[0]
    assert line.startswith("1  warning dead-channels  layer1: from step 200 (20 s) to the end:")
    assert colour == Colour.ALARM and plot.loss.flags == [(200, "1")]
    assert ends(plot.cells, "dead channels", "dot", Colour.ALARM) == {1: 200}
    assert plot.cells.marked == {1: "1 dead-channels"}
    assert not any(spans(plot.cells, column.title, "dot") for column in COLUMNS[1:])
    assert [curve.name for curve in metric(plot, "dead channels").named] == ["layer1"]


def test_a_sound_run_says_so(sound: Any) -> None:
    total = "451 steps, 10 sampled, of 3 layers in 45 s; loss 2 -> 1.55; not ended: it still runs, or was killed"
    assert words(sound)[:5] == [
        "run.ndjson",
        total,
        "no findings",
        "curves: band from the lowest to the highest of all layers, grey line their median, dashed red threshold",
        "each layer, in order of execution: grey no value (no weights, frozen, did not run)",
    ]
    assert words(sound.axes[0])[1:] == ["layer0", "layer1", "layer2"] and not plotted(run()).cells.marked
    heads = [axes.get_title(loc="left") for axes in sound.axes]
    assert [head for head in heads if head] == ["loss", "learning rate", *(column.title for column in COLUMNS[1:])]


def test_cells_are_the_metric_of_each_layer_and_step() -> None:
    series = series_of(run(change=lambda step, layer: {"activation_std": 10.0**layer * (1 + step)}))
    grid = grid_of(COLUMNS[2], series)
    assert grid.cells.shape == (3, 10) and grid.edges == (-0.5, 450.5)
    assert grid.cells == pytest.approx(10.0 ** np.arange(3)[:, None] * (1 + np.arange(0, 500, 50)))
    assert (grid.low, grid.high) == pytest.approx((1, 45100))


def test_of_a_thousand_steps_none_is_lost() -> None:
    spike = {"dead_channels": 8}
    series = series_of(run(1000, 2, lambda step, layer: spike if (step, layer) == (33350, 1) else {}))
    dead = grid_of(COLUMNS[0], series)
    assert dead.cells.shape == (2, MOST_CELLS)
    assert dead.cells.max(axis=1).tolist() == [0, 1]
    assert np.flatnonzero(dead.cells[1]).tolist() == [int(33350.5 / 49951 * MOST_CELLS)]
    assert grid_of(COLUMNS[2], series).cells == pytest.approx(1.0)


def test_the_usual_update_is_in_the_middle_of_its_colours() -> None:
    grid = grid_of(COLUMNS[4], series_of(run(change=lambda step, layer: {"update_to_weight": 10.0 ** -(2 + layer)})))
    assert math.sqrt(grid.low * grid.high) == pytest.approx(1e-3)
    assert (1e-3, Colour.GREEN, "usual") in metric(plotted(run()), "update").lines_of_rules


def test_what_is_0_spoiled_or_missing_has_a_colour_that_no_value_has() -> None:
    def change(step: int, layer: int) -> dict[str, Any]:
        if layer == 0:
            return {"gradient_norm": 0.0 if step else 1e-3}
        return {"gradient_non_finite": 5} if layer == 1 else {"frozen": True}

    log = run(change=change)
    grid = grid_of(COLUMNS[3], series_of(log))
    assert grid.cells[0] == pytest.approx([1e-3] + [0.0] * 9)
    assert grid.spoiled.tolist() == [[False] * 10, [True] * 10, [False] * 10]
    assert np.isnan(grid.cells[1:]).all()
    looks = [tuple(colour) for colour in cell_colours(grid)[:, 1]]
    assert len({*looks}) == 3 and not {*looks} & {tuple(colour) for colour in palette("viridis")[:LEVELS]}
    assert tuple(cell_colours(grid)[0, 0]) in {tuple(colour) for colour in palette("viridis")[:LEVELS]}
    keys = "white exactly 0, pink NaN or Inf, grey no value (no weights, frozen, did not run)"
    assert plotted(log, []).cells.legend == [f"each layer, in order of execution: {keys}"]
    [panel] = [panel for panel in plotted(log).cells.panels if panel.title.startswith("gradient")]
    assert np.array_equal(np.stack(panel.cells), cell_colours(grid)) and panel.limits == (-0.5, 450.5)


def test_a_named_layer_whose_value_is_0_has_marks_at_the_foot_of_its_curves() -> None:
    chart = metric(plotted(run(change=lambda step, layer: {"gradient_norm": 0.0} if layer == 1 else {})), "gradient")
    assert [curve.name for curve in chart.named] == ["layer1"]
    assert [x for x, _ in chart.below] == list(range(0, 500, 50))
    assert "triangles at the foot exactly 0" in chart.notes


@pytest.mark.parametrize(
    ("steps", "limits", "text"), [(10, [1.0], "limit 1 from step 50"), (1, [], "limit 1 only from step 50 on")]
)
def test_the_limit_of_a_drift_begins_where_it_applies(steps: int, limits: list[float], text: str) -> None:
    chart = metric(plotted(run(steps)), "BatchNorm drift")
    assert [value for value, *_ in chart.lines_of_rules] == limits and chart.begin == 50
    assert chart.rules == [(1.0, Colour.ALARM, text)]


def test_a_smoothed_loss_begins_with_the_first_is_explained_and_bridges_no_gap() -> None:
    def losses(step: int, layer: int) -> dict[str, Any]:
        at = step // 50
        return {"loss": None if 20 <= at < 25 else 2.5 if at == 0 else 300.0 + at % 3}

    chart = plotted(run(60, change=losses)).loss
    words = "thin: each sampled step; thick: median of it and 2 before and after; ×: NaN, Inf or unknown"
    assert "; ".join(chart.notes) == words and chart.unknown == list(range(1000, 1250, 50))
    thin, thick = chart.curves
    assert (thick.ys[0], thick.ys[59], thick.is_read) == (2.5, 302.0, False)
    assert np.flatnonzero(np.isnan(thick.ys)).tolist() == list(range(20, 25)) and thin.width < 1
    few = plotted(run()).loss
    assert not few.notes and len(few.curves) == 1


def test_findings_have_flags_above_the_loss() -> None:
    frozen = [finding("frozen", f"layer{at}", "word " * 60 + "end", step=100) for at in range(5)]
    findings = [*frozen, finding("non-finite", step=500), finding("few-samples")]
    # after the last sampled step: at the edge; few samples: none
    assert plotted(run(), findings).loss.flags == [(100, "1-5"), (450.5, "6")]
    lines = words(plot_training(run(), findings))
    at = lines.index(next(line for line in lines if line.startswith("1  warning frozen  layer0: word")))
    assert lines[at + 1].startswith("    word") and lines[at + 1].endswith("end")


def test_names_are_thinned_out_but_never_those_of_findings() -> None:
    only = dict.fromkeys(("running_mean_shift", "running_var_ratio", "update_to_weight", "gradient_norm", "zero_share"))
    figure = drawn(run(4, 300, lambda step, layer: {**only, "dead_channels": 8 if layer == 151 else 0}))
    assert figure.get_size_inches()[1] < 18
    labels = [text for text in figure.axes[0].texts if text.get_text().startswith("layer")]
    assert 50 < len(labels) < 150 and "layer151" in {text.get_text() for text in labels}
    places = sorted(text.get_position()[1] for text in labels)
    assert min(np.diff(places)) * 9.0 / 300 * 72 >= 7.5  # points


def test_two_optimizers_have_names() -> None:
    plot = plotted(run(change=lambda step, layer: {"optimizer": layer % 2, "model": layer % 2}))
    assert [curve.name for curve in plot.loss.named] == ["optimizer 0", "optimizer 1"]
    assert plot.cells.lines[0][0] == "2 optimizers: each layer is at the steps of the one that changes it"


UNUSUAL = {
    "empty": Run({}),
    "one step": run(1),
    "one layer": run(1, 1),
    "no rate": run(2, 1, learning_rate=None),
    "no loss": run(loss=None),
    "falling by orders": run(change=lambda step, layer: {"loss": 10.0 ** -(step // 50)}),
    "negative": run(change=lambda step, layer: {"loss": -1.0 if step else 100.0}),
    "not finite": run(non_finite=3, gradient_non_finite=3, loss=None),
    "two of all": run(change=lambda step, layer: {"optimizer": layer % 2, "model": layer // 2}),
    "odd name": run(change=lambda step, layer: {"layer": "$x_1$\n\x1b[31m" * 9}),
    "all 0": run(activation_std=0.0, zero_share=1.0, dead_channels=8),
    "huge": run(activation_std=1e300),
    "far apart": Run({}, [{"step": 0, "layer": "a"}, {"step": 10**7, "layer": "a", "zero_share": 0.1}]),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_every_run_is_drawn_and_no_line_leaves_the_page(name: str) -> None:
    figure = drawn(UNUSUAL[name], "x" * 300)
    if name in ("odd name", "two of all"):
        assert len(figure_bytes(figure, ".svg" if name == "odd name" else ".png")) > 5000
    figure.draw_without_rendering()
    width = figure.get_size_inches()[0] * figure.dpi
    assert all(text.get_window_extent().x1 <= width for text in figure.texts)


def test_the_last_run_of_a_log_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"row": "run"}, *run().rows)))
    assert words(plot_training(str(path), findings_over_time(path)))[2] == "no findings"
    path.write_text("")
    with pytest.raises(InputError, match="holds no run yet"):
        plot_training(path)
    with pytest.raises(UsageError, match="expected the path of a file, got list"):
        findings_over_time([path])  # type: ignore[arg-type]
