"""The palette: 244 colours of any of matplotlib's maps, then colours that no value has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import hookscope
from hookscope.drawing import colours
from hookscope.drawing.colours import LEVELS, colour_map_names, palette
from hookscope.errors import UsageError

ROOT = Path(hookscope.__file__).parents[1]


@pytest.mark.parametrize("cmap", ["viridis", "RdBu_r", "tab10", "jet"])
def test_the_levels_are_those_of_the_colour_map(cmap: str) -> None:
    table = palette(cmap)
    assert (table.shape, table.dtype) == ((256, 3), np.uint8)
    for level in (0, 1, 100, LEVELS - 1):
        expected = matplotlib.colormaps[cmap](level / (LEVELS - 1), bytes=True)[:3]
        assert table[level].tolist() == [int(part) for part in expected]


def test_what_is_no_value_has_a_colour_of_its_own() -> None:
    fixed = {tuple(colour) for colour in palette("viridis")[LEVELS:].tolist()}
    assert len(fixed) == 256 - LEVELS
    assert not fixed & {tuple(colour) for colour in palette("viridis")[:LEVELS].tolist()}
    assert palette("gray")[[colours.NAN, colours.PLUS_INF, colours.BACKGROUND]].tolist() == [
        [255, 0, 255],
        [255, 0, 0],
        [255, 255, 255],
    ]


def test_every_name_of_matplotlib_is_known() -> None:
    assert set(colour_map_names()) == set(matplotlib.colormaps)


def test_an_unknown_name_has_near_misses() -> None:
    with pytest.raises(UsageError, match="no colour map 'virids'; nearest: viridis"):
        palette("virids")


def sheet(folder: Path, name: str, **environment: str) -> bytes:
    settings = {key: value for key, value in os.environ.items() if key not in ("MPLBACKEND", "MATPLOTLIBRC")}
    command = ["visualize", "shapes", str(ROOT / "samples/shapes/star.png"), "--layer", "1", "--cmap", "coolwarm"]
    subprocess.run(
        [sys.executable, "-m", "hookscope", *command, "-o", name],
        cwd=folder,
        env=settings | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        check=True,
    )
    return (folder / name).read_bytes()


def test_settings_around_a_command_change_nothing(tmp_path: Path) -> None:
    plain = sheet(tmp_path, "plain.png")
    # image.lut is read while matplotlib is imported; a backend that does not exist makes the import fail
    (tmp_path / "matplotlibrc").write_text("image.lut: 4\nfigure.dpi: 20\n")
    assert sheet(tmp_path, "settings.png", MPLBACKEND="module://no_such.backend") == plain
