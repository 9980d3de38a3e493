"""Maps over the greyed photograph, on the sheet on which they are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import colours
from hookscope.drawing.grid import Grid, Layout
from hookscope.drawing.scale import Scale
from hookscope.drawing.tiles import Tiles

_DIMMED, _MIDDLE = 0.8, 128  # brightness of the grey photograph under maps; grey under their colour bar
_PALEST = 0.45  # a map over the photograph has no pale colours: pale is transparent


def lay_maps_over(
    whole: Image.Image,
    image: Image.Image,
    grid: Grid,
    place: tuple[int, int],
    frames: Sequence[Image.Image],
    cmap: str,
    alpha: float,
) -> None:
    """Draw the maps of ``grid``, at ``place`` of ``image``, over the greyed ``frames`` into ``whole``.

    The strongest value has the opacity ``alpha``; NaN and Inf are opaque.
    """
    layout, tiles = grid.layout, grid.tiles
    backdrop = _backdrop(layout, frames)
    for at in range(len(tiles.channels) - grid.left_out):
        row, column = divmod(at, layout.columns)
        x, y = place[0] + column * layout.step_x, place[1] + row * layout.step_y + layout.label
        box = (x, y, x + layout.map_width, y + layout.map_height)
        _blend(whole, image, box, backdrop, _overlay_colours(tiles, at, cmap), _opacity(tiles, at, alpha))


def lay_bar_over(
    whole: Image.Image, image: Image.Image, tiles: Tiles, top: int, height: int, cmap: str, alpha: float
) -> None:
    """Draw the colour bar of ``tiles``, which share a scale, over grey."""
    grey = np.float32(_DIMMED * _MIDDLE)
    box = (0, top, image.width, top + height)
    _blend(whole, image, box, grey, _overlay_colours(tiles, 0, cmap), _opacity(tiles, 0, alpha))


def _blend(
    whole: Image.Image,
    image: Image.Image,
    box: tuple[int, int, int, int],
    backdrop: Any,
    palette: NDArray[np.float32],
    opacity: NDArray[np.float32],
) -> None:
    """Mix the palette colours of ``image`` with ``backdrop``, and paste them into ``whole``."""
    levels = np.asarray(image.crop(box))
    share = opacity[levels][..., None]
    mixed = backdrop * (1 - share) + palette[levels] * share
    whole.paste(Image.fromarray(mixed.round().astype(np.uint8)), box[:2])


def _overlay_colours(tiles: Tiles, at: int, cmap: str) -> NDArray[np.float32]:
    """The palette; on a scale that is symmetric about 0 without the pale colours around it."""
    palette = colours.palette(cmap).astype(np.float32)
    if tiles.low[at] == -tiles.high[at]:
        distance = np.linspace(-1, 1, colours.LEVELS)
        away = np.sign(distance) * (_PALEST + (1 - _PALEST) * np.abs(distance))
        palette[: colours.LEVELS] = palette[np.rint((away + 1) / 2 * (colours.LEVELS - 1)).astype(int)]
    return palette


def _opacity(tiles: Tiles, at: int, alpha: float) -> NDArray[np.float32]:
    """The opacity of each palette index: of a level by its absolute value, of other colours 1."""
    low, high = float(tiles.low[at]), float(tiles.high[at])
    table, top = np.ones(256, np.float32), max(abs(low), abs(high))
    if math.isfinite(top):
        values = Scale.parse(tiles.scale).from_levels(np.arange(colours.LEVELS), low, high)
        table[: colours.LEVELS] = alpha * (np.abs(values) / top) ** 0.7 if top else 0
    return table


def _backdrop(layout: Layout, frames: Sequence[Image.Image]) -> NDArray[np.float32]:
    """The dimmed grey photograph in the place of a map; a layer may merge frames: take the middle one of them."""
    picture = Image.new("L", (layout.map_width, layout.map_height))
    for at, place in enumerate(layout.frame_places):
        frame = frames[(2 * at + 1) * len(frames) // (2 * layout.frames)]
        small = frame.convert("L").resize((layout.frame_width, layout.map_height), Image.Resampling.BILINEAR)
        picture.paste(small, (place.start, 0))
    return np.asarray(picture, np.float32)[..., None] * np.float32(_DIMMED)
