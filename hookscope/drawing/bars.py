"""Bars of single values: each with the number and name of its channel, and the value in digits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hookscope.drawing import colours
from hookscope.drawing.text import Pixels, stamp, text_pixels
from hookscope.drawing.tiles import Tiles
from hookscope.errors import printable

_ROW, _BAR, _LENGTH, _GAP = 17, 11, 240, 8  # height of a row and of a bar, length of the longest bar
_LONGEST_NAME = 220
_BETWEEN = 24


def draw_bars(tiles: Tiles, names: Sequence[str] = ()) -> Pixels:
    """A bar from 0 to the value of each channel of ``tiles``, whose maps are 1 × 1; from top to bottom, then right."""
    finite = [value for value in tiles.values if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    labels = [_label(channel, names) for channel in tiles.channels]
    digits = [text_pixels(f"{value:.4g}") for value in tiles.values]
    left = max(label.shape[1] for label in labels) + _GAP
    width = left + _LENGTH + _GAP + max(text.shape[1] for text in digits)
    columns = max(1, round(math.sqrt(1.25 * len(labels) * _ROW / (width + _BETWEEN))))
    rows = math.ceil(len(labels) / columns)
    columns = math.ceil(len(labels) / rows)
    pixels = np.full((rows * _ROW, columns * (width + _BETWEEN) - _BETWEEN), colours.BACKGROUND, np.uint8)
    for at, (label, text, value) in enumerate(zip(labels, digits, tiles.values, strict=True)):
        x, y = at // rows * (width + _BETWEEN), at % rows * _ROW
        stamp(pixels, label, x + left - _GAP - label.shape[1], y)
        bar = pixels[y + 2 : y + 2 + _BAR, x + left : x + left + _LENGTH]
        bar[:] = colours.TRACK
        if math.isfinite(value) and low < high:  # in units of the larger end: high - low may overflow
            unit = max(-low, high)
            ends = sorted((end / unit - low / unit) / (high / unit - low / unit) for end in (0.0, value))
            bar[:, math.floor(ends[0] * _LENGTH) : math.ceil(ends[1] * _LENGTH)] = colours.BAR
        stamp(pixels, text, x + left + _LENGTH + _GAP, y)
    return pixels


def _label(channel: int, names: Sequence[str]) -> Pixels:
    name = printable(names[channel]) if names else ""
    text = f"{channel}  {name}".rstrip()
    while text_pixels(text).shape[1] > _LONGEST_NAME:
        name = name[:-1]
        text = f"{channel}  {name}…"
    return text_pixels(text)
