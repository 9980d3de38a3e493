"""The palette: 193 colours of any of matplotlib's maps, colours that no value has, and those of a photograph."""

import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from hookscope.cli.main import main
from hookscope.drawing import colours
from hookscope.drawing.colours import LEVELS, colour_map_names, palette
from hookscope.errors import UsageError


@pytest.mark.parametrize("cmap", ["viridis", "RdBu_r", "tab10", "jet"])
def test_the_levels_are_those_of_the_colour_map(cmap: str) -> None:
    table = palette(cmap)
    assert (table.shape, table.dtype) == ((256, 3), np.uint8)
    for level in (0, 1, 100, LEVELS - 1):
        expected = matplotlib.colormaps[cmap](level / (LEVELS - 1), bytes=True)[:3]
        assert table[level].tolist() == [int(part) for part in expected]


def test_nan_inf_and_text_have_colours_that_no_value_has() -> None:
    fixed = {tuple(colour) for colour in palette("viridis")[LEVELS : colours.PHOTOGRAPH].tolist()}
    assert len(fixed) == colours.PHOTOGRAPH - LEVELS
    assert not fixed & {tuple(colour) for colour in palette("viridis")[:LEVELS].tolist()}
    own = palette("gray")[[colours.NAN, colours.PLUS_INF, colours.BACKGROUND]]
    assert own.tolist() == [[255, 0, 255], [255, 0, 0], [255, 255, 255]]


def test_every_name_of_matplotlib_is_known_and_others_have_near_misses() -> None:
    assert set(colour_map_names()) == set(matplotlib.colormaps)
    with pytest.raises(UsageError, match="no colour map 'virids'; nearest: viridis"):
        palette("virids")


def test_a_photograph_in_few_colours_looks_like_itself() -> None:
    with Image.open(Path(__file__).parents[2] / "samples" / "coffee.jpg") as opened:
        picture = opened.convert("RGB").resize((200, 150))
    indices, table = colours.in_few_colours(picture)
    assert (indices.min() >= colours.PHOTOGRAPH, len(table)) == (True, 256 - colours.PHOTOGRAPH)
    few = Image.fromarray(table[indices - colours.PHOTOGRAPH])
    blurred = [np.asarray(image.resize((50, 37), Image.Resampling.BOX), float) for image in (few, picture)]
    assert abs(blurred[0] - blurred[1]).mean() < 3


DRAW = """
import sys
from hookscope.drawing.colours import palette
from hookscope.drawing import Mark, Panel, draw_rows, figure_bytes, row_plot
page = draw_rows(row_plot([1], [Panel("b", 1, [Mark("dot", float, "k")])], ["a"]), "c")
drawn = palette("coolwarm").tobytes() + figure_bytes(page, ".png")
"""


def test_settings_around_us_change_nothing(tmp_path: Path) -> None:
    # image.lut is read while matplotlib is imported
    (tmp_path / "matplotlibrc").write_text("image.lut: 4\nfigure.dpi: 20\naxes.facecolor: red\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(colours.__file__).parents[2]), "MPLBACKEND": "module://no_such"}
    output = "sys.stdout.buffer.write(drawn); assert 'matplotlib.pyplot' not in sys.modules"
    process = subprocess.run(
        [sys.executable, "-c", DRAW + output], cwd=tmp_path, env=environment, capture_output=True, check=True
    )
    names: dict[str, bytes] = {}
    exec(DRAW, names)
    assert process.stdout == names["drawn"]


def test_the_backend_of_a_notebook_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "no such backend")  # makes the import of matplotlib fail
    with pytest.raises(SystemExit):
        main(["--version"])
    assert "MPLBACKEND" not in os.environ
