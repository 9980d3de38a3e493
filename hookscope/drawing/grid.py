"""The blocks of a sheet: grids of feature maps, bars of single values, and photographs beside and under the maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.drawing import colours
from hookscope.drawing.scale import Scale
from hookscope.drawing.text import LABEL_HEIGHT, Pixels, number_pixels, stamp, text_pixels
from hookscope.drawing.tiles import ActivationSummary, Tiles
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
    def frame_step(self) -> int:
        return self.frame_width + FRAME_GAP

    @property
    def frame_places(self) -> list[slice]:
        return [slice(start, start + self.frame_width) for start in range(0, self.map_width, self.frame_step)]

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


def draw_grids(
    several: Sequence[Tiles],
    columns: int | None = None,
    cell: int | None = None,
    plain: bool = False,
    frames: int = 1,
    most: int = MOST_PIXELS,
    names: Sequence[str] = (),
    bold: Sequence[int] | None = None,
) -> list[Grid]:
    """Draw the maps, magnified by nearest neighbour, with channel numbers and bars unless ``plain``.

    Grids to compare have the same shape and channels: each channel has the same place in all, and all bars have one
    unit. The length of the bar under a map is the map's range, relative to the widest range: if each channel has its
    own scale, the bar tells strong channels from magnified noise. Channels beyond ``most`` pixels are left out.
    ``names`` has one for each channel of the layer. Maps at the positions ``bold`` have a bold number, None for the
    strongest.
    """
    bold = strongest(several[0]) if bold is None else bold
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


_ROW, _BAR, _LENGTH, _GAP = 17, 11, 240, 8  # height of a row and of a bar, length of the longest bar
_LONGEST_BAR_NAME = 220
_BETWEEN = 24


def draw_bars(tiles: Tiles, names: Sequence[str] = ()) -> Pixels:
    """A bar from 0 to the value of each channel of ``tiles``, whose maps are 1 × 1; from top to bottom, then right."""
    finite = [value for value in tiles.values if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    labels = [_bar_label(channel, names) for channel in tiles.channels]
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


def _bar_label(channel: int, names: Sequence[str]) -> Pixels:
    name = printable(names[channel]) if names else ""
    text = f"{channel}  {name}".rstrip()
    while text_pixels(text).shape[1] > _LONGEST_BAR_NAME:
        name = name[:-1]
        text = f"{channel}  {name}…"
    return text_pixels(text)


_LEAST, _MOST = 144, 480  # longest side of the photograph; between them it is as long as a map

Frames = Sequence[Sequence[Image.Image]]
Shares = tuple[float, float, float, float]
"""Left, top, right and bottom as shares of width and height."""


def photograph_cells(
    shown: Mapping[int, tuple[int, int]], frames: Frames, box: Shares | None
) -> tuple[dict[int, Pixels], Pixels]:
    """A cell for each ``(item of the batch, longest side of a map)``, with words above it, and the colours of all.

    ``frames`` are what the network saw of each item.
    """
    cuts = [_seen(frames[item], side, box) for item, side in shown.values()]
    strip = Image.new("RGB", (max(picture.width for picture, _ in cuts), sum(picture.height for picture, _ in cuts)))
    starts = [0, *accumulate(picture.height for picture, _ in cuts)]
    for (picture, _), top in zip(cuts, starts, strict=False):
        strip.paste(picture, (0, top))
    indices, table = colours.in_few_colours(strip.tobytes(), strip.size)
    cells: dict[int, Pixels] = {}
    for at, (picture, words), top in zip(shown, cuts, starts, strict=False):
        label = text_pixels(words)[:LABEL_HEIGHT]
        shape = LABEL_HEIGHT + picture.height, max(picture.width, label.shape[1])
        cells[at] = np.full(shape, colours.BACKGROUND, np.uint8)
        stamp(cells[at], label, 0, 0)
        stamp(cells[at], indices[top : top + picture.height, : picture.width], 0, LABEL_HEIGHT)
    return cells, table


def _seen(frames: Sequence[Image.Image], side: int, box: Shares | None) -> tuple[Image.Image, str]:
    """The photograph of an item in the size of a map, or larger, with the receptive field; and the words above it."""
    middle = len(frames) // 2
    picture = frames[middle]
    words = f"input {picture.width}×{picture.height}"
    words += f", frame {middle + 1} of {len(frames)}" if len(frames) > 1 else ""
    factor = min(max(side, _LEAST), _MOST) / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    photograph = picture.resize(size, Image.Resampling.BILINEAR if factor < 1 else Image.Resampling.NEAREST)
    if box is not None:
        left, top, right, bottom = (round(share * photograph.size[at % 2]) for at, share in enumerate(box))
        draw = ImageDraw.Draw(photograph)
        draw.rectangle((left, top, right - 1, bottom - 1), outline="white")
        draw.rectangle((left - 1, top - 1, right, bottom), outline="black")
    return photograph, words


def middle_box(summary: ActivationSummary) -> Shares | None:
    """What the unit in the middle of the map sees, as shares of width and height; None for all, or where unknown."""
    field, size, part = summary.field, summary.input_size, summary.parts[0]
    if field is None or size is None or field.source == "whole" or part.tiles.values:
        return None
    _, height, width = part.tiles.levels.shape
    unit = height // 2, width // part.frames * (part.frames // 2) + width // part.frames // 2
    left, top, right, bottom = field.box(unit, (size.height, size.width))
    box = left / size.width, top / size.height, right / size.width, bottom / size.height
    return None if box == (0, 0, 1, 1) else box


def field_words(summary: ActivationSummary, on_photograph: bool) -> str:
    """``receptive field 99×99 pixels``, and that a box shows it."""
    field = summary.field
    if field is None:
        return ""
    if field.source == "whole":
        return "receptive field: the whole input"
    height, width = (f"{length:.6g}" for length in field.size)
    box = " (box: of the middle unit)" if on_photograph and middle_box(summary) else ""
    return f"receptive field {width}×{height}{box}"


_DIMMED, _MIDDLE = 0.8, 128  # brightness of the grey photograph under maps; grey under their colour bar
_PALEST = 0.45  # a map over the photograph has no pale colours: pale is transparent


@dataclass(frozen=True)
class Overlay:
    """A sheet ``image`` of palette indices, and ``whole``, where its maps lie over greyed photographs.

    The strongest value has the opacity ``alpha``; NaN and Inf are opaque.
    """

    image: Image.Image
    whole: Image.Image
    cmap: str
    alpha: float

    def add_maps(self, grid: Grid, place: tuple[int, int], frames: Sequence[Image.Image]) -> None:
        """Draw the maps of ``grid``, at ``place`` of the sheet, over ``frames``."""
        layout, backdrop = grid.layout, _backdrop(grid.layout, frames)
        for at in range(len(grid.tiles.channels) - grid.left_out):
            x, y = layout.corner(at, *place)
            self._blend((x, y, x + layout.map_width, y + layout.map_height), backdrop, grid.tiles, at)

    def add_bar(self, tiles: Tiles, top: int, height: int) -> None:
        """Draw the colour bar of ``tiles``, which share a scale, over grey."""
        self._blend((0, top, self.image.width, top + height), np.float32(_DIMMED * _MIDDLE), tiles, 0)

    def _blend(self, box: tuple[int, int, int, int], backdrop: Any, tiles: Tiles, at: int) -> None:
        levels = np.asarray(self.image.crop(box))
        share = _opacity(tiles, at, self.alpha)[levels][..., None]
        mixed = backdrop * (1 - share) + _overlay_colours(tiles, at, self.cmap)[levels] * share
        self.whole.paste(Image.fromarray(mixed.round().astype(np.uint8)), box[:2])


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


def _backdrop(layout: GridLayout, frames: Sequence[Image.Image]) -> NDArray[np.float32]:
    """The dimmed grey photograph in the place of a map; a layer may merge frames: take the middle one of them."""
    picture = Image.new("L", (layout.map_width, layout.map_height))
    for at, place in enumerate(layout.frame_places):
        frame = frames[(2 * at + 1) * len(frames) // (2 * layout.frames)]
        small = frame.convert("L").resize((layout.frame_width, layout.map_height), Image.Resampling.BILINEAR)
        picture.paste(small, (place.start, 0))
    return np.asarray(picture, np.float32)[..., None] * np.float32(_DIMMED)
