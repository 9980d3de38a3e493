"""Pictures of a comparison: what is drawn, against the facts."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hookscope.comparison import Answer, Comparison, draw_compared_maps, matrix_plot
from hookscope.comparison.figure import differences_plot
from hookscope.drawing import Colour, RowPlot, colours, draw_rows, read_provenance, read_sheet, write_png
from hookscope.errors import NoMapError
from hookscope.report import draw_comparison_page
from tests.comparison.example import SIDE, example, maps, matrix, pair
from tests.drawing.rows import ends, spans


def compared(*pairs: Any, **more: Any) -> Comparison:
    return replace(example(), calls=pairs, answer=Answer("layer", "", "", 0, ""), **more)


def marks(plot: RowPlot, kind: str) -> list[float]:
    return [at for at, *_ in spans(plot, "relative", kind)]


def test_points_are_the_differences_of_the_pairs() -> None:
    comparison = example(8)
    plot = differences_plot(comparison)
    distances = [each.difference and each.difference.relative_l2 for each in comparison.calls]
    assert ends(plot, "relative", "path") == {at: value for at, value in enumerate(distances) if value}
    alone = [each.isolated_l2 for each in comparison.calls]
    assert ends(plot, "relative", "dot") == {at: value for at, value in enumerate(alone) if value}
    cka = {at: each.cka for at, each in enumerate(comparison.calls) if each.cka is not None}
    assert ends(plot, "linear CKA", "dot") == cka
    assert marks(plot, "left") == [0, 1, 2]  # the same to the bit
    assert plot.panels[0].scale == "log" and plot.panels[0].labels[-1] == "1"


def test_cka_below_0_is_drawn() -> None:
    plot = differences_plot(compared(pair("a", 0, 0.1, cka=-0.3), pair("b", 1, 0.1, cka=0.5)))
    assert ends(plot, "linear CKA", "dot") == {0: -0.3, 1: 0.5}
    low, high = plot.panels[1].limits
    assert low < -0.3 and high > 1


def test_a_grey_bar_ends_at_ten_times_the_noise() -> None:
    plot = differences_plot(compared(pair("a", 0, 0.5, noise=0.01), pair("b", 1, 0.001)))
    assert ends(plot, "relative", "bar") == {0: pytest.approx(0.1)}


def test_what_no_logarithm_has_is_marked() -> None:
    nan = pair("nan", 1, 0.1)
    assert nan.difference is not None
    nan = replace(nan, difference=replace(nan.difference, nonfinite_b=3))
    plot = differences_plot(compared(pair("same", 0), nan, pair("shapes", 2, None), pair("inf", 3, math.inf)))
    assert (marks(plot, "left"), marks(plot, "right"), marks(plot, "path")) == ([0, 2], [1, 3], [1])
    assert plot.legend[-1] == "◂ the same to the bit   ▸ NaN or Inf on one side   × other shapes"


def test_two_sides_that_are_the_same_have_a_picture() -> None:
    plot = differences_plot(compared(pair("a", 0), pair("b", 1)))
    assert len(plot.panels) == 1 and not marks(plot, "path")


def test_long_networks_are_folded_but_the_answer_has_its_rows() -> None:
    comparison = example(200)
    plot = differences_plot(comparison)
    names = list(plot.labels)
    assert len(names) <= 100 and "layer1.0  4 calls" in names and comparison.answer.first in names
    row = names.index("layer7.0  4 calls")
    inside = [each for each in comparison.calls if each.a.name.startswith("layer7.0.")]
    assert inside[-1].difference is not None
    assert ends(plot, "relative", "path")[row] == inside[-1].difference.relative_l2
    assert ends(plot, "relative", "dot")[row] == max(each.isolated_l2 or 0 for each in inside)


def test_a_long_network_without_modules_is_folded_into_runs() -> None:
    names = differences_plot(compared(*(pair(str(at), at, 0.1) for at in range(300)))).labels
    assert names[0] == "0 … 39  40 calls" and len(names) == 8


def test_the_answer_stands_beside_its_rows_and_random_weights_are_red() -> None:
    comparison = replace(example(8), b=replace(SIDE, weights="random (seed 0)"))
    plot = differences_plot(comparison)
    assert list(plot.marked.values()) == ["first difference", "adds most"]
    [red] = [line for line, colour in plot.lines if colour == Colour.ALARM]
    assert red.startswith("B: resnet18, weights: random")
    assert comparison.answer.sentence in [line for line, _ in plot.lines]
    assert plot.title == "resnet18 (A) and resnet18 (B), 4 images"


def test_the_pixels_of_maps_are_a_b_and_their_difference(tmp_path: Path) -> None:
    kept = maps("layer", channels=(7, 2, 5))
    comparison = replace(example(), maps=(kept, maps("head", size=1)))
    write_png(draw_compared_maps(comparison), tmp_path / "maps.png")
    found = read_sheet(tmp_path / "maps.png")
    assert list(found) == [f"{key} {name}" for key in ("layer", "head") for name in ("A", "B", "difference")]
    both = float(np.nanmax(np.abs([kept.a, kept.b])))
    for name, values, top in (("A", kept.a, both), ("B", kept.b, both), ("difference", kept.b - kept.a, 0.5)):
        channels, decoded = found[f"layer {name}"]
        assert channels == [7, 2, 5]
        np.testing.assert_allclose(decoded, values, atol=top / (colours.LEVELS - 1) * 1.001)  # NaN where NaN is
    provenance = read_provenance(tmp_path / "maps.png")
    assert provenance["command"] and provenance["bands"][0]["nonfinite"] == {"A": 0, "B": 1, "difference": 1}


def test_maps_of_several_images_have_names_of_their_own() -> None:
    image = draw_compared_maps(replace(example(), maps=(maps("layer"), maps("layer", image=1))))
    parts = [part["part"] for part in json.loads(image.info["hookscope"])["parts"]]
    assert parts[:2] == ["layer, image 0 A", "layer, image 0 B"] and len(set(parts)) == 6


def test_maps_that_are_equal_or_missing_are_said() -> None:
    kept = maps("layer")
    image = draw_compared_maps(replace(example(), maps=(replace(kept, b=kept.a),)))
    assert json.loads(image.info["hookscope"])["parts"] == []
    with pytest.raises(NoMapError, match="the comparison has no feature maps"):
        draw_compared_maps(replace(example(), maps=()))


def test_the_matrix_has_every_value_and_a_dot_at_the_best_of_each_row() -> None:
    cka = replace(
        matrix(["a", "b", "c"]), names_b=("x", "y"), values=np.array([[0.9, 0.1], [0.2, 0.3], [math.nan] * 2])
    )
    plot = matrix_plot(cka, "resnet18", "resnet34")
    [panel] = plot.panels
    shown = np.stack(panel.cells)
    assert shown.shape == (3, 2, 3) and len({tuple(cell) for cell in shown[2]}) == 1  # grey
    assert list(shown[..., 1][:2].ravel().argsort()) == list(cka.values[:2].ravel().argsort())  # brighter is greener
    assert ends(plot, "", "dot") == {0: 0, 1: 1}
    assert (plot.labels, panel.labels) == (["a", "b", "c"], ["x", "y"])
    assert "resnet18 (A, rows)" in plot.title and plot.lines[-1][0].startswith("Grey: 2 pairs")


def test_a_large_matrix_names_some_of_its_layers() -> None:
    figure = draw_rows(matrix_plot(matrix([f"layer{at}" for at in range(120)])))
    assert 40 < len(figure.axes[0].get_xticklabels()) < 80 and figure.get_size_inches()[0] < 12


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ("resnet18", "quantized:resnet18", ("resnet18", "quantized:resnet18")),
        ("/home/me/nets.py:mine", "old/net.onnx", ("nets.py:mine", "net.onnx")),
        ("/home/me/nets.py:mine", "/home/me/nets.py:mine", ("nets.py:mine", "nets.py:mine")),
        ("/home/me/v1/nets.py:mine", "/home/me/v2/nets.py:mine", ("v1/nets.py:mine", "v2/nets.py:mine")),
    ],
)
def test_titles_name_the_models_without_the_folders_of_a_machine(a: str, b: str, names: tuple[str, str]) -> None:
    comparison = replace(compared(pair("a", 0)), a=replace(SIDE, model=a), b=replace(SIDE, model=b))
    assert comparison.models == names
    assert differences_plot(comparison).title == f"{names[0]} (A) and {names[1]} (B), 4 images"
    assert f"<title>{names[0]} and {names[1]}: Comparison</title>" in draw_comparison_page(comparison)
