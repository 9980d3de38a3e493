"""Channel grids: the layout of feature maps, with the channel number above each map and a bar below it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hookscope.drawing import colours
from hookscope.drawing.scale import RangeScale, Scale
from hookscope.drawing.text import LABEL_HEIGHT, Pixels, number_pixels, stamp
from hookscope.drawing.tiles import ChannelChoice, Tiles, reduce_maps
from hookscope.errors import NoMapError, UsageError
from hookscope.hooks import as_float

# Least side of a map without --cell; maps are larger while the grid stays below the area of a screen.
LEAST_CELL = 56
_SCREEN = 1_200 * 800
# Limit of a sheet, which takes some seconds and 80 MB to draw, and which Pillow opens without a warning. Further
# channels are left out and the sheet says so.
MOST_PIXELS = 80_000_000
FRAME_GAP = 2


@dataclass(frozen=True, slots=True)
class Layout:
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
        """Columns of each frame within a map, from left to right."""
        starts = range(0, self.map_width, self.frame_width + FRAME_GAP)
        return [slice(start, start + self.frame_width) for start in starts]

    @property
    def step_x(self) -> int:
        """Distance of two maps in a row."""
        return self.cell_width + self.gap

    @property
    def step_y(self) -> int:
        """Distance of two rows."""
        return self.label + self.map_height + self.bar + self.gap

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
) -> Layout:
    """The layout of ``count`` maps of ``height`` × ``width``: in ``columns``, or a grid of about 3:2."""
    zoom = math.ceil(cell / min(height, width // frames)) if cell else _fitting_zoom(count, height, width)
    zoom = max(1, min(zoom, math.isqrt(MOST_PIXELS // (height * width))))  # keep one map below the limit
    label, bar, gap = (0, 0, 2) if plain else (LABEL_HEIGHT, 4 if height * width > 1 else 0, 6)
    map_width = width * zoom + (frames - 1) * FRAME_GAP
    cell_width = max(map_width, 0 if plain else label_width)
    cell_height = height * zoom + label + bar
    if columns is None:
        columns = round(math.sqrt(1.5 * count * (cell_height + gap) / (cell_width + gap)))
    columns = max(1, min(columns, count))
    rows = math.ceil(count / columns)
    return Layout(columns, rows, zoom, height * zoom, map_width, cell_width, label, bar, gap, frames)


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
    layout: Layout
    tiles: Tiles
    left_out: int = 0


def draw_grid(
    tiles: Tiles,
    columns: int | None = None,
    cell: int | None = None,
    plain: bool = False,
    frames: int = 1,
    most: int = MOST_PIXELS,
) -> Grid:
    """Draw the maps, magnified by nearest neighbour, with channel numbers and bars unless ``plain``.

    The length of the bar under a map is the map's range, relative to the widest range: if each channel has its own
    scale, the bar tells strong channels from magnified noise. Channels beyond ``most`` pixels are left out.
    """
    return draw_alike([tiles], strongest(tiles), columns, cell, plain, frames, most)[0]


def draw_alike(
    several: Sequence[Tiles],
    bold: Sequence[int],
    columns: int | None = None,
    cell: int | None = None,
    plain: bool = False,
    frames: int = 1,
    most: int = MOST_PIXELS,
) -> list[Grid]:
    """Grids to compare: each channel has the same place in all grids, and all bars have one unit.

    ``several`` have the same shape and channels; maps at the positions ``bold`` have a bold number.
    """
    count, height, width = several[0].levels.shape
    label_width = max(map(_widest_label, several))
    layout = lay_out(count, height, width, columns, cell, plain, label_width, frames)
    fitting = max(1, most // (layout.step_x * layout.step_y))
    if layout.width * layout.height > most and fitting < count:
        count = fitting
        layout = lay_out(count, height, width, columns, cell, plain, label_width, frames)
    longest = max(float(tiles.strength.max(initial=0.0)) for tiles in several)
    return [_drawn(tiles, layout, count, plain, bold, longest) for tiles in several]


def _drawn(tiles: Tiles, layout: Layout, count: int, plain: bool, bold: Sequence[int], longest: float) -> Grid:
    pixels = np.full((layout.rows, layout.step_y, layout.columns, layout.step_x), colours.BACKGROUND, np.uint8)
    _place_maps(pixels, layout, tiles.levels[:count])
    if not plain:
        _place_labels(pixels, layout, tiles, count, bold)
        _place_bars(pixels, layout, tiles, count, longest)
    whole = pixels.reshape(layout.rows * layout.step_y, layout.columns * layout.step_x)
    return Grid(whole[: layout.height, : layout.width], layout, tiles, len(tiles.channels) - count)


def _place_maps(pixels: Pixels, layout: Layout, levels: Pixels) -> None:
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
    """Positions of the maps with the widest ranges; of 1 × 1 maps those with the largest absolute values."""
    order = (-tiles.strength).argsort(kind="stable")[:most]
    return [int(at) for at in order if tiles.strength[at] > 0]


def _widest_label(tiles: Tiles) -> int:
    """Width of the longest channel number; all digits have the same width."""
    mark = " !" if bool(tiles.nonfinite.any()) else ""
    return int(number_pixels(f"{max(tiles.channels)}{mark}", bold=True).shape[1])


def _place_labels(pixels: Pixels, layout: Layout, tiles: Tiles, count: int, bold: Sequence[int]) -> None:
    for at in range(count):
        row, column = divmod(at, layout.columns)
        number = str(tiles.channels[at])
        if tiles.nonfinite[at]:
            number += " !"
        label = number_pixels(number, at in bold)
        if tiles.constant[at]:
            word = number_pixels(f"{number} const" if tiles.shared else f"{number} ={tiles.low[at]:.3g}")
            # a value that is cut off would be another value
            label = word if word.shape[1] <= layout.cell_width else label
        stamp(pixels[row, :, column], label, 0, 0)


def _place_bars(pixels: Pixels, layout: Layout, tiles: Tiles, count: int, longest: float) -> None:
    if not layout.bar:
        return
    top = layout.label + layout.map_height + 1
    for at in range(count):
        row, column = divmod(at, layout.columns)
        length = math.ceil(layout.map_width * (float(tiles.strength[at]) / longest)) if longest else 0
        bar = pixels[row, top : top + layout.bar - 1, column]
        bar[:, : layout.map_width] = colours.TRACK
        bar[:, :length] = colours.BAR


def to_image(pixels: Pixels, cmap: str) -> Image.Image:
    """Palette indices as an image of mode ``P``."""
    image = Image.fromarray(pixels)
    image.putpalette(colours.palette(cmap).tobytes())
    return image


def channel_grid(
    activation: Tensor,
    columns: int | None = None,
    cmap: str = "viridis",
    scale: str | tuple[float, float] = "channel",
    channels: str | Sequence[int] | None = None,
    cell: int | None = None,
    plain: bool = False,
) -> Image.Image:
    """Draw the feature maps of one activation as a palette image: labelled, magnified by nearest neighbour.

    NaN is magenta, +Inf red, -Inf light blue. If each channel has its own scale, constant maps are grey, and their
    value is written above them.

    Args:
        activation: Feature maps ``(C, H, W)``, one map ``(H, W)``, or maps of a clip or volume ``(C, D, H, W)``, whose
            slices stand side by side; or a batch of one.
        columns: Maps in a row; None for a grid of about 3:2.
        cmap: A colour map of matplotlib.
        scale: ``channel``, ``layer``, ``symmetric``, ``percentile:LO,HI``, ``LO:HI`` or ``(low, high)``.
        channels: ``0-63,100``, ``top:16`` or numbers; None for all.
        cell: Smallest side of a map in pixels; the magnification is a whole number.
        plain: Maps only, without numbers and bars.

    Raises:
        NoMapError: for another shape.
        UsageError: for a scale, colour map or channels that cannot be parsed or do not exist.
        LayerError: the activation has none of the channels.

    Example:
        >>> import torch
        >>> channel_grid(torch.rand(6, 7, 7), columns=3).size
        (684, 490)
    """
    if columns is not None and columns < 1:
        raise UsageError(f"columns must be at least 1 or None, not {columns}")
    maps, slices = _one_activation(activation)
    if channels is None:
        choice = ChannelChoice()
    else:
        choice = ChannelChoice.parse(channels) if isinstance(channels, str) else ChannelChoice.numbered(channels)
    tiles = reduce_maps(maps, choice, Scale.parse(scale) if isinstance(scale, str) else RangeScale(*scale))
    return to_image(draw_grid(tiles, columns, cell, plain, slices).pixels, cmap)


def _one_activation(activation: Any) -> tuple[Tensor, int]:
    """The maps ``(C, H, W)``, and how many slices of a volume stand side by side in each."""
    activation = torch.as_tensor(activation)
    shape = tuple(activation.shape)
    if not activation.numel():
        raise NoMapError(f"an activation of {shape} has no values")
    tensor = as_float(activation)
    while tensor.dim() > 3 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.dim() == 4:
        return tensor.permute(0, 2, 1, 3).flatten(2), shape[-3]
    tensor = tensor[None] if tensor.dim() == 2 else tensor
    if tensor.dim() != 3:
        raise NoMapError(f"a channel grid takes (C, H, W), not {shape}", do="take one item of a batch: activation[0]")
    return tensor, 1
