"""Scales: what they are called, their limits, and a new one that is known everywhere once it is registered."""

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from hookscope.drawing import scale as scales
from hookscope.drawing.files import read_provenance, read_sheet, write_png
from hookscope.drawing.scale import (
    LEVELS,
    ChannelScale,
    LayerScale,
    PercentileScale,
    RangeScale,
    Scale,
    SymmetricScale,
)
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
