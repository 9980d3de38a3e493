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
from hookscope.drawing.colours import LEVELS, colour_map_names, font, palette
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


def test_the_font_has_the_letters_of_file_names() -> None:
    letters = font(12)
    assert letters.getlength("é") > 0
    assert font(12, bold=True).getlength("a" * 20) > letters.getlength("a" * 20)


SCRIPT = """
import os
before = dict(os.environ)
from hookscope.drawing.colours import palette
import hashlib
print(hashlib.sha256(palette("coolwarm").tobytes()).hexdigest())
assert dict(os.environ) == before
import matplotlib
print(dict.__getitem__(matplotlib.rcParams, "backend"))
"""


def run(folder: Path, **environment: str) -> list[str]:
    settings = {k: v for k, v in os.environ.items() if k not in ("MPLBACKEND", "MATPLOTLIBRC")} | environment
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=folder, env=settings | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.stderr == b""
    assert done.returncode == 0
    return done.stdout.decode().split("\n")


def test_settings_around_us_do_not_matter(tmp_path: Path) -> None:
    plain = run(tmp_path)
    (tmp_path / "matplotlibrc").write_bytes(b"image.lut: 4\nno colon\nfigure.dpi: banana\n\xff\xfe\n")
    assert run(tmp_path, MPLBACKEND="module://matplotlib_inline.backend_inline")[0] == plain[0]
    # a notebook's backend is read when matplotlib is imported: it must not be lost
    assert run(tmp_path, MPLBACKEND="svg", MATPLOTLIBRC=str(tmp_path)) == [plain[0], "svg", ""]
