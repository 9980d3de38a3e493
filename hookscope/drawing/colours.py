"""The palette of a page: the levels of a colour map, fixed colours for text, NaN, Inf and the like, a photograph's."""

from __future__ import annotations

from functools import cache, lru_cache

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing.scale import LEVELS as LEVELS
from hookscope.errors import UsageError, nearest

# fmt: off
(
    BACKGROUND, TEXT_FAINT, TEXT_HALF, TEXT_STRONG, TEXT, BAR, TRACK, CONSTANT, NAN, PLUS_INF, MINUS_INF,
    ALARM_FAINT, ALARM_HALF, ALARM_STRONG, ALARM, PHOTOGRAPH,
) = range(LEVELS, LEVELS + 16)
# fmt: on
_FIXED = {
    BACKGROUND: (255, 255, 255),
    TEXT_FAINT: (200, 200, 200),
    TEXT_HALF: (140, 140, 140),
    TEXT_STRONG: (80, 80, 80),
    TEXT: (20, 20, 20),
    BAR: (214, 93, 14),
    TRACK: (228, 228, 228),
    CONSTANT: (190, 190, 190),
    NAN: (255, 0, 255),
    PLUS_INF: (255, 0, 0),
    MINUS_INF: (0, 200, 255),
    ALARM_FAINT: (244, 205, 197),
    ALARM_HALF: (230, 146, 131),
    ALARM_STRONG: (216, 88, 66),
    ALARM: (200, 30, 10),
}


def colour_map_names() -> list[str]:
    """The colour maps of matplotlib."""
    return list(matplotlib.colormaps)


@cache
def palette(cmap: str) -> NDArray[np.uint8]:
    """256 colours ``(256, 3)``: ``LEVELS`` of the colour map, the fixed ones, and black in the place of a photograph's.

    UsageError for an unknown map.
    """
    if cmap not in matplotlib.colormaps:
        raise UsageError(f"no colour map '{cmap}'", nearest(cmap, colour_map_names()), "take one of matplotlib's names")
    colour_map = matplotlib.colormaps[cmap]
    if isinstance(colour_map, LinearSegmentedColormap):
        colour_map = colour_map.resampled(256)  # image.lut of a matplotlibrc may have made another size
    colours = np.zeros((256, 3), np.uint8)
    colours[:LEVELS] = colour_map(np.linspace(0, 1, LEVELS), bytes=True)[:, :3]
    colours[list(_FIXED)] = list(_FIXED.values())
    return colours


@lru_cache(maxsize=8)  # the sheets of a model have the same photograph in a few sizes
def in_few_colours(pixels: bytes, size: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """RGB ``pixels`` as palette indices from `PHOTOGRAPH` on ``(h, w)``, and their colours ``(n, 3)``."""
    picture = Image.frombytes("RGB", size, pixels)
    few = picture.quantize(256 - PHOTOGRAPH, Image.Quantize.FASTOCTREE)  # 2 ms; the others take 20 and more
    few = picture.quantize(palette=few, dither=Image.Dither.FLOYDSTEINBERG)
    table = np.array(few.getpalette(), np.uint8).reshape(-1, 3)[: 256 - PHOTOGRAPH]
    return np.asarray(few) + np.uint8(PHOTOGRAPH), table
