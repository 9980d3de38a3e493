"""Channel grids: the layout of feature maps, with the channel number above each map and a bar below it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from hookscope.drawing import colours
from hookscope.drawing.text import LABEL_HEIGHT, Pixels, number_pixels, stamp, text_pixels
from hookscope.drawing.tiles import Tiles
from hookscope.errors import printable

# Least side of a map where none is given; maps are larger while the grid stays below the area of a screen.
LEAST_CELL = 56
_SCREEN = 1_200 * 800
# Limit of a sheet, which takes some seconds and 80 MB to draw, and which Pillow opens without a warning. Further
# channels are left out and the sheet says so.
MOST_PIXELS = 80_000_000
FRAME_GAP = 2
_LONGEST_NAME = 120


@dataclass(frozen=True, slots=True)
class GridLayout:
    """Sizes of a grid in pixels. A cell has a label, the map magnified by ``zoom``, a bar and a gap.

    ``cell_width`` is the larger width of map and label. ``map_width`` includes all ``frames`` of a clip, which are
    side by side with `FRAME_GAP` between them.
    """

    columns: int
    rows: int
    zoom: int
    map_height: int
    map_width: int
    cell_width: int
    label: int
    bar: int
    gap: int
    frames: int = 1

    @property
    def frame_width(self) -> int:
        return (self.map_width + FRAME_GAP) // self.frames - FRAME_GAP

    @property
    def frame_places(self) -> list[slice]:
        starts = range(0, self.map_width, self.frame_width + FRAME_GAP)
        return [slice(start, start + self.frame_width) for start in starts]

    @property
    def step_x(self) -> int:
        return self.cell_width + self.gap

    @property
    def step_y(self) -> int:
        return self.label + self.map_height + self.bar + self.gap

    def corner(self, at: int, left: int, top: int) -> tuple[int, int]:
        """The x and y of map number ``at``, of a grid at ``left`` and ``top``."""
        row, column = divmod(at, self.columns)
        return left + column * self.step_x, top + row * self.step_y + self.label

    @property
    def width(self) -> int:
        return self.columns * self.step_x - self.gap

    @property
    def height(self) -> int:
        return self.rows * self.step_y - self.gap


def lay_out(
    count: int,
    height: int,
    width: int,
    columns: int | None = None,
    cell: int | None = None,
    plain: bool = False,
    label_width: int = 0,
    frames: int = 1,
) -> GridLayout:
    """The layout of ``count`` maps of ``height`` × ``width``: in ``columns``, or a grid of about 3:2."""
    zoom = math.ceil(cell / min(height, width // frames)) if cell else _fitting_zoom(count, height, width)
    zoom = max(1, min(zoom, math.isqrt(MOST_PIXELS // (height * width))))  # keep one map below the limit
    label, bar, gap = (0, 0, 2) if plain else (LABEL_HEIGHT, 4 if height * width > 1 else 0, 6)
    map_width = width * zoom + (frames - 1) * FRAME_GAP
    cell_width = max(map_width, 0 if plain else label_width)
    cell_height = height * zoom + label + bar
    if columns is None:
        columns = _fitting_columns(count, (cell_width + gap) / (cell_height + gap))
    columns = max(1, min(columns, count))
    rows = math.ceil(count / columns)
    return GridLayout(columns, rows, zoom, height * zoom, map_width, cell_width, label, bar, gap, frames)


def _fitting_columns(count: int, proportions: float) -> int:
    """The columns of a grid of about 3:2 whose last row is full, or nearly; a cell is ``proportions`` times as wide."""

    def cost(columns: int) -> float:
        rows = math.ceil(count / columns)
        empty = columns * rows - count
        alone = rows > 1 and empty == columns - 1
        shape = abs(math.log(columns * proportions / rows / 1.4))
        return shape + 5 * empty / (columns * rows) + 0.5 * bool(empty) + alone

    about = math.sqrt(1.4 * count / proportions)
    return min(range(max(1, int(about / 2.5)), min(count, math.ceil(about * 2.5)) + 1), key=cost, default=1)


def _fitting_zoom(count: int, height: int, width: int) -> int:
    """The magnification at which maps are readable and the grid fills a screen, as far as possible."""
    if height * width == 1:
        return LEAST_CELL // 2
    readable = math.ceil(LEAST_CELL / min(height, width))
    filling = int(math.sqrt(_SCREEN / (count * height * width)))
    # limits for long strips, and for maps of a few positions
    return max(1, min(max(readable, min(filling, 4 * readable)), 8 * LEAST_CELL // max(height, width)))


@dataclass(frozen=True)
class Grid:
    """A grid as palette indices ``(height, width)``, its layout and tiles, and how many channels were left out."""

    pixels: Pixels
    layout: GridLayout
    tiles: Tiles
    left_out: int = 0


def draw_grid(
    tiles: Tiles,
    columns: int | None = None,
    cell: int | None = None,
    plain: bool = False,
    frames: int = 1,
    most: int = MOST_PIXELS,
    names: Sequence[str] = (),
) -> Grid:
    """Draw the maps, magnified by nearest neighbour, with channel numbers and bars unless ``plain``.

    The length of the bar under a map is the map's range, relative to the widest range: if each channel has its own
    scale, the bar tells strong channels from magnified noise. Channels beyond ``most`` pixels are left out. ``names``
    has one for each channel of the layer.
    """
    return draw_alike([tiles], strongest(tiles), columns, cell, plain, frames, most, names)[0]


def draw_alike(
    several: Sequence[Tiles],
    bold: Sequence[int],
    columns: int | None = None,
    cell: int | None = None,
    plain: bool = False,
    frames: int = 1,
    most: int = MOST_PIXELS,
    names: Sequence[str] = (),
) -> list[Grid]:
    """Grids to compare: each channel has the same place in all grids, and all bars have one unit.

    ``several`` have the same shape and channels; maps at the positions ``bold`` have a bold number.
    """
    count, height, width = several[0].levels.shape
    label_width = max(_widest_label(tiles, names) for tiles in several)
    layout = lay_out(count, height, width, columns, cell, plain, label_width, frames)
    fitting = max(1, most // (layout.step_x * layout.step_y))
    if layout.width * layout.height > most and fitting < count:
        count = fitting
        layout = lay_out(count, height, width, columns, cell, plain, label_width, frames)
    longest, grids = max(float(tiles.strength.max(initial=0.0)) for tiles in several), []
    for tiles in several:
        pixels = np.full((layout.rows, layout.step_y, layout.columns, layout.step_x), colours.BACKGROUND, np.uint8)
        _place_maps(pixels, layout, tiles.levels[:count])
        for at in range(0 if plain else count):
            row, column = divmod(at, layout.columns)
            stamp(pixels[row, :, column], _label(tiles, at, at in bold, names, layout.cell_width), 0, 0)
            if layout.bar:
                top = layout.label + layout.map_height + 1
                bar = pixels[row, top : top + layout.bar - 1, column, : layout.map_width]
                bar[:] = colours.TRACK
                length = math.ceil(layout.map_width * (float(tiles.strength[at]) / longest)) if longest else 0
                bar[:, :length] = colours.BAR
        whole = pixels.reshape(layout.rows * layout.step_y, layout.columns * layout.step_x)
        grids.append(Grid(whole[: layout.height, : layout.width], layout, tiles, len(tiles.channels) - count))
    return grids


def _place_maps(pixels: Pixels, layout: GridLayout, levels: Pixels) -> None:
    full_rows, rest = divmod(levels.shape[0], layout.columns)
    ys, width = slice(layout.label, layout.label + layout.map_height), layout.frame_width
    for first, last, maps in ((0, full_rows, layout.columns), (full_rows, full_rows + bool(rest), rest)):
        if first == last:
            continue
        start = first * layout.columns
        block = levels[start : start + (last - first) * maps]
        block = block.reshape(last - first, maps, *levels.shape[1:]).transpose(0, 2, 1, 3)
        if layout.zoom > 1:
            block = np.repeat(np.repeat(block, layout.zoom, axis=3), layout.zoom, axis=1)
        for frame, xs in enumerate(layout.frame_places):
            pixels[first:last, ys, :maps, xs] = block[..., frame * width : (frame + 1) * width]


def strongest(tiles: Tiles, most: int = 8) -> list[int]:
    """Positions of the maps with the widest ranges, a quarter at most; none where another measure orders the maps."""
    if tiles.order:
        return []
    order = (-tiles.strength).argsort(kind="stable")[: min(most, len(tiles.channels) // 4)]
    return [int(at) for at in order if tiles.strength[at] > 0]


def _widest_label(tiles: Tiles, names: Sequence[str]) -> int:
    """Width of the longest channel number, all digits of which have the same width, and of a name that is not long."""
    mark = " !" if bool(tiles.nonfinite.any()) else ""
    number = int(number_pixels(f"{max(tiles.channels)}{mark}", bold=True).shape[1])
    longest: int = max([0, *(_name_pixels(names[channel]).shape[1] for channel in tiles.channels if names)])
    return number + min(longest, _LONGEST_NAME)


def _name_pixels(name: str, bold: bool = False) -> Pixels:
    return text_pixels(f"  {printable(name)}", bold=bold)[:LABEL_HEIGHT]


def _label(tiles: Tiles, at: int, is_bold: bool, names: Sequence[str], width: int) -> Pixels:
    """The number of a channel, and its name or its only value as far as ``width`` has room."""
    number = f"{tiles.channels[at]}{' !' if tiles.nonfinite[at] else ''}"
    label = number_pixels(number, is_bold)
    if tiles.constant[at]:
        word = number_pixels(f"{number} const" if tiles.shared else f"{number} ={tiles.low[at]:.3g}")
        return word if word.shape[1] <= width else label  # a value that is cut off would be another value
    if names:
        return np.concatenate([label, _name_pixels(names[tiles.channels[at]], is_bold)], axis=1)[:, :width]
    return label


def to_image(pixels: Pixels, cmap: str, photograph: Pixels | None = None) -> Image.Image:
    """Palette indices as an image of mode ``P``; ``photograph`` are the colours ``(n, 3)`` from `PHOTOGRAPH` on."""
    image, palette = Image.fromarray(pixels), colours.palette(cmap)
    if photograph is not None:
        palette = np.concatenate([palette[: colours.PHOTOGRAPH], photograph])
    image.putpalette(palette.tobytes())
    return image
