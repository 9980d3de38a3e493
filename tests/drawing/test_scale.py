"""Scales and palettes: their names, limits and colours, and a new scale that is known once it is registered."""

import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from hookscope.cli.main import main
from hookscope.drawing import colours, scale as scales
from hookscope.drawing.colours import colour_map_names, palette
from hookscope.drawing.files import read_provenance, read_sheet, write_png
from hookscope.drawing.scale import LEVELS, ChannelScale, LayerScale, PercentileScale, RangeScale, Scale, SymmetricScale
from hookscope.drawing.sheet import Origin, draw_call
from hookscope.drawing.tiles import reduce_output
from hookscope.errors import ImageError, UsageError
from hookscope.hooks import Call

ORIGIN = Origin("net", "none", "cat.jpg", "", "none")
ROOT = Path(__file__).parents[2]
STAR = str(ROOT / "samples/shapes/star.png")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("channel", ChannelScale()),
        ("layer", LayerScale()),
        ("symmetric", SymmetricScale()),
        ("percentile:1,99", PercentileScale(1, 99)),
        ("percentile:0,100", PercentileScale(0, 100)),
        ("-1:1", RangeScale(-1, 1)),
        ("-1e-3:.5", RangeScale(-0.001, 0.5)),
    ],
)
def test_a_text_is_parsed_to_its_scale(text: str, expected: Scale) -> None:
    assert Scale.parse(text) == expected
    assert Scale.parse(str(expected)) == expected


NO_SCALES = (
    "auto|1|1:|:1|1:1|2:1|nan:1|0:inf|0:1:2|percentile|percentile:1|percentile:5,1|percentile:-1,5|percentile:1,101"
    "|percentile:1,2,3|Layer|"
)


@pytest.mark.parametrize("text", NO_SCALES.split("|"))
def test_texts_that_are_not_a_scale_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"no scale '.*'; there are channel, layer, symmetric, percentile:LO,HI and"):
        Scale.parse(text)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (0, float("inf"))])
def test_a_range_increases(low: float, high: float) -> None:
    with pytest.raises(UsageError, match="LO and HI are finite, and LO is below HI"):
        RangeScale(low, high)


def test_percentiles_are_those_of_numpy_over_finite_values() -> None:
    values = torch.randn(1, 1, 997)
    values[0, 0, :2] = torch.tensor([float("nan"), float("inf")])
    expected = np.percentile(values[values.isfinite()].numpy(), (2.5, 99))
    assert PercentileScale(2.5, 99).limits(values, values, values) == pytest.approx(tuple(expected), rel=1e-6)


@dataclass(frozen=True)
class LogScale(Scale):
    """Each step of a level multiplies the value; only for values above 0."""

    notation = "log"
    cmap = "magma"

    def limits(self, values, lowest, highest):
        return max(float(lowest.min()), 1e-4), float(highest.max())

    def to_levels(self, values, low, high):
        low, high = low[:, None, None], high[:, None, None]
        return (values.clamp(min=1e-4) / low).log() / (high / low).log() * (LEVELS - 1)

    def from_levels(self, levels, low, high):
        return low * (high / low) ** (levels / (LEVELS - 1))


@pytest.fixture
def log_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "SCALES", [*scales.SCALES, LogScale])


def fresh(file: str) -> dict[str, Any]:
    """The names in a file of the command line, imported anew."""
    return runpy.run_path(str(ROOT / "hookscope/cli" / file))


@pytest.mark.usefixtures("log_scale")
def test_a_new_scale_is_known_to_the_command_line(tmp_path: Path) -> None:
    complete = fresh("shared/options.py")["complete_scales"]
    assert [item.value for item in complete(None, None, "l")] == ["layer", "log"]
    with pytest.raises(UsageError, match="percentile:LO,HI, LO:HI and log"):
        Scale.parse("loog")
    command = fresh("commands/visualize.py")["Visualize"].made("visualize")
    [told] = [option.help for option in command.params if option.name == "scale"]
    assert "percentile:LO,HI, LO:HI or log." in told
    path = str(tmp_path / "log.png")
    done = CliRunner().invoke(command, ["shapes", STAR, "--type", "ReLU", "--layer", "0", "--scale", "log", "-o", path])
    assert done.exit_code == 0, done.output
    provenance = read_provenance(path)
    assert (provenance["scale"], provenance["cmap"]) == ("log", "magma")


@pytest.mark.usefixtures("log_scale")
def test_a_new_scale_is_read_back_by_its_own_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = 10 ** torch.linspace(-4, 3, 2 * 9 * 9).view(1, 2, 9, 9)
    path = tmp_path / "log.png"
    sheet = draw_call(reduce_output(values, scale=Scale.parse("log")), Call("a", "Conv2d", 0, 0), ORIGIN)
    write_png(sheet.image, path, sheet.provenance)
    _, read = read_sheet(path)[""]
    step = 10 ** (7 / (LEVELS - 1))
    assert (abs(np.log(read / values[0].numpy())) <= np.log(step) / 2 * 1.001).all()
    monkeypatch.undo()
    with pytest.raises(ImageError, match="drawn on an unknown scale: no scale 'log'; there are channel, layer"):
        read_sheet(path)


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
    indices, table = colours.in_few_colours(picture.tobytes(), picture.size)
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
