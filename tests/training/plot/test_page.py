"""The page of a run: what stands where, read back from the figure itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hookscope.drawing.plot import Colour, figure_bytes
from hookscope.errors import InputError, UsageError
from hookscope.training.log.file import Run
from hookscope.training.log.findings import findings_over_time
from hookscope.training.log.series import series_of
from hookscope.training.log.summary import TimedFinding
from hookscope.training.plot.columns import COLUMNS, MOST_CELLS, grid_of
from hookscope.training.plot.page import plot_training
from tests.training.logs import log

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


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


def panel(figure: Any, title: str) -> Any:
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


def heat_map(figure: Any, title: str) -> Any:
    """What is drawn below the curves of this title."""
    return figure.axes[figure.axes.index(panel(figure, title)) + 1]


def words(part: Any) -> list[str]:
    return [text.get_text() for text in part.texts]


def finding(name: str, layer: str = "", evidence: str = "", step: int = 0) -> TimedFinding:
    return TimedFinding(name, layer, evidence, "", step=step, last_step=step, time=None, lasts=True)


def test_a_column_is_drawn_for_each_metric_that_has_values(sound: Any) -> None:
    assert titles(sound) == ["loss", *(column.title for column in COLUMNS[1:])]
    few = run(running_mean_shift=None, running_var_ratio=None, update_to_weight=None)
    assert titles(drawn(few)) == ["loss", *(column.title for column in COLUMNS[1:4])]
    assert titles(drawn(Run({}))) == ["loss"]


def test_a_finding_is_numbered_in_its_line_above_the_loss_and_in_its_row() -> None:
    figure = drawn(run(change=lambda step, layer: {"dead_channels": 4 if layer == 1 and step >= 200 else 0}))
    [line] = [text for text in figure.texts if text.get_text().startswith("1  ")]
    assert line.get_text().startswith("1  warning dead-channels  layer1: from step 200 (20 s) to the end:")
    assert line.get_color() == Colour.ALARM
    [flag] = panel(figure, "loss").texts
    assert (flag.get_text(), flag.get_position()[0]) == ("1", 200)
    heat = heat_map(figure, "dead channels (share)")
    [badge] = [text for text in heat.texts if text.get_text() == "1"]
    assert badge.get_position() == (200, 1)
    assert all("1" not in words(heat_map(figure, column.title)) for column in COLUMNS[1:])
    bold = [text.get_text() for text in heat.texts if text.get_color() == Colour.ALARM and text is not badge]
    assert bold == ["layer1"] == words(panel(figure, "dead channels (share)"))


def test_a_sound_run_says_so(sound: Any) -> None:
    total = "451 steps, 10 sampled, of 3 layers in 45 s; loss 2 -> 1.55; not ended: it still runs, or was killed"
    assert words(sound)[:3] == ["run.ndjson", total, "no findings"]
    assert words(heat_map(sound, "std of activations")) == []
    assert words(heat_map(sound, "zeros (share)")) == ["layer0", "layer1", "layer2"]
    assert (
        words(sound)[-1]
        == "curves: band from the lowest to the highest of all layers, grey line their median, dashed red threshold"
    )


def test_cells_are_the_metric_of_each_layer_and_step() -> None:
    series = series_of(run(change=lambda step, layer: {"activation_std": 10.0**layer * (1 + step)}))
    grid = grid_of(COLUMNS[2], series)
    assert grid.cells.shape == (3, 10) and grid.edges == (-25, 475)
    assert grid.cells == pytest.approx(10.0 ** np.arange(3)[:, None] * (1 + np.arange(0, 500, 50)))
    assert (grid.low, grid.high) == pytest.approx((1, 45100))


def test_of_a_thousand_steps_none_is_lost() -> None:
    spike = {"dead_channels": 8}
    series = series_of(run(1000, 2, lambda step, layer: spike if (step, layer) == (33350, 1) else {}))
    dead = grid_of(COLUMNS[0], series)
    assert dead.cells.shape == (2, MOST_CELLS)
    assert dead.cells.max(axis=1).tolist() == [0, 1]
    assert np.flatnonzero(dead.cells[1]).tolist() == [int(33350 / 49950 * (MOST_CELLS - 1) + 0.5)]
    assert grid_of(COLUMNS[2], series).cells == pytest.approx(1.0)


def test_the_usual_update_is_in_the_middle_of_its_colours(sound: Any) -> None:
    grid = grid_of(COLUMNS[4], series_of(run(change=lambda step, layer: {"update_to_weight": 10.0 ** -(2 + layer)})))
    assert math.sqrt(grid.low * grid.high) == pytest.approx(1e-3)
    assert words(panel(sound, "update / weight (norms)")) == ["usual "]


def test_what_is_0_spoiled_or_missing_has_a_colour_that_no_value_has(sound: Any) -> None:
    def change(step: int, layer: int) -> dict[str, Any]:
        if layer == 0:
            return {"gradient_norm": 0.0 if step else 1e-3}
        return {"gradient_non_finite": 5} if layer == 1 else {"frozen": True}

    log = run(change=change)
    grid, figure = grid_of(COLUMNS[3], series_of(log)), drawn(log)
    assert grid.cells[0] == pytest.approx([1e-3] + [0.0] * 9)
    assert grid.spoiled.tolist() == [[False] * 10, [True] * 10, [False] * 10]
    assert np.isnan(grid.cells[1:]).all()
    heat = heat_map(figure, "gradient / weight (norms)")
    cells, spoiled = heat.get_images()
    missing = tuple(cells.to_rgba(cells.get_array())[2, 1])
    assert missing not in {tuple(cells.get_cmap()(value)) for value in np.linspace(0, 1, 256)}
    [zeros] = heat.collections
    assert zeros.get_hatch() and zeros.get_facecolor().tolist() == [[1, 1, 1, 1]] and zeros.get_zorder() > cells.zorder
    [stretch] = zeros.get_paths()
    assert stretch.get_extents().extents.tolist() == [25, -0.5, 475, 0.5]
    assert spoiled.get_array().mask.tolist() == (~grid.spoiled).tolist()
    assert {*words(figure)} >= {"exactly 0", "NaN or Inf", "no value: no weights, frozen, did not run"}
    assert not {*words(sound)} & {"exactly 0", "NaN or Inf"}


def test_a_named_layer_whose_value_is_0_has_marks_at_the_foot_of_its_curves() -> None:
    curves = panel(
        drawn(run(change=lambda step, layer: {"gradient_norm": 0.0} if layer == 1 else {})), "gradient / weight (norms)"
    )
    assert words(curves) == ["layer1"]
    [marks] = [line for line in curves.lines if line.get_marker() == "v"]
    assert marks.get_xdata().tolist() == list(range(0, 500, 50))


@pytest.mark.parametrize(
    ("steps", "limits", "text"), [(10, [[50, 475]], "limit 1 from step 50"), (1, [], "limit 1 only from step 50 on")]
)
def test_the_limit_of_a_drift_begins_where_it_applies(steps: int, limits: list[list[int]], text: str) -> None:
    axes = panel(drawn(run(steps)), "BatchNorm drift")
    assert [list(line.get_xdata()) for line in axes.lines if line.get_color() == Colour.ALARM] == limits
    assert words(axes) == [text]


def test_a_smoothed_loss_begins_with_the_first_is_explained_and_bridges_no_gap(sound: Any) -> None:
    def losses(step: int, layer: int) -> dict[str, Any]:
        at = step // 50
        return {"loss": None if 20 <= at < 25 else 2.5 if at == 0 else 300.0 + at % 3}

    axes = panel(drawn(run(60, change=losses)), "loss")
    text = "thin: each sampled step; thick: median of it and 2 before and after; ×: NaN, Inf or unknown"
    assert axes.get_title(loc="right") == text
    [thick] = [line for line in axes.lines if line.get_linewidth() == 1.6]
    values = thick.get_ydata()
    assert (values[0], values[59]) == (2.5, 302.0)
    assert np.flatnonzero(np.isnan(values)).tolist() == list(range(20, 25))
    few = panel(sound, "loss")
    assert few.get_title(loc="right") == "" and not [line for line in few.lines if line.get_linewidth() == 1.6]


def test_findings_have_flags_above_the_loss() -> None:
    frozen = [finding("frozen", f"layer{at}", "word " * 60 + "end", step=100) for at in range(5)]
    figure = plot_training(run(), [*frozen, finding("non-finite", step=500), finding("few-samples")])
    flags = [(flag.get_text(), flag.get_position()[0]) for flag in panel(figure, "loss").texts]
    assert flags == [("1-5", 100), ("6", 475)]  # after the last sampled step: at the edge; few samples: none
    lines = words(figure)
    at = lines.index(next(line for line in lines if line.startswith("1  warning frozen  layer0: word")))
    assert lines[at + 1].startswith("     word") and lines[at + 1].endswith("end")


def test_names_are_thinned_out_but_never_those_of_findings() -> None:
    figure = drawn(run(4, 300, lambda step, layer: {"dead_channels": 8 if layer == 151 else 0}))
    assert figure.get_size_inches()[1] < 18
    labels = [text for text in heat_map(figure, "dead channels (share)").texts if text.get_text().startswith("layer")]
    assert 50 < len(labels) < 150 and "layer151" in {text.get_text() for text in labels}
    places = sorted(text.get_position()[1] for text in labels)
    assert min(np.diff(places)) * 9.0 / 300 * 72 >= 7.5  # points


def test_two_optimizers_have_names() -> None:
    figure = drawn(run(change=lambda step, layer: {"optimizer": layer % 2, "model": layer % 2}))
    assert words(panel(figure, "loss"))[:2] == ["optimizer 0", "optimizer 1"]
    assert "2 optimizers: each layer is at the steps of the one that changes it" in words(figure)


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
    assert len(figure_bytes(figure, ".svg" if name == "odd name" else ".png")) > 5000
    width = figure.get_size_inches()[0] * figure.dpi
    assert all(text.get_window_extent().x1 <= width for text in figure.texts)


def test_the_last_run_of_a_log_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"row": "run"}, *run().rows)))
    assert titles(plot_training(str(path), findings_over_time(path)))
    path.write_text("")
    with pytest.raises(InputError, match="holds no run yet"):
        plot_training(path)
    with pytest.raises(UsageError, match="expected a Run or the path of its log, got list"):
        findings_over_time([path])  # type: ignore[arg-type]
