"""Maps over the greyed photograph, on the sheet on which they are drawn."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import nn

from hookscope.drawing import colours
from hookscope.drawing.grid import Grid, GridLayout
from hookscope.drawing.scale import Scale
from hookscope.drawing.text import LABEL_HEIGHT, Pixels, stamp, text_pixels
from hookscope.drawing.tiles import ActivationSummary, Tiles
from hookscope.errors import printable
from hookscope.images import InputImage
from hookscope.models import LoadedModel, is_random, package_versions

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


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a picture comes from; ``second`` is the name and SHA-256 of the other image of optical flow."""

    model: str
    weights: str
    image: str
    sha256: str
    preprocess: str
    second: tuple[str, str] | None = None

    @classmethod
    def of(cls, net: LoadedModel | nn.Module | None, *pictures: InputImage | Image.Image | None) -> Origin:
        """The origin of a page on one picture, or on the two of optical flow; what is not known is empty."""
        named = [(picture.name, picture.sha256) for picture in pictures if isinstance(picture, InputImage)]
        first, *others = named or [("", "")]
        if isinstance(net, LoadedModel):
            about = net.name, net.weights, net.preprocess.describe()
        else:
            about = "" if net is None else type(net).__name__, "", ""
        return cls(*about[:2], *first, about[2], others[0] if others else None)

    def facts(self) -> dict[str, Any]:
        """The first entries of every provenance: versions, model, weights, image and preprocessing."""
        second = self.second and {"image": os.path.basename(self.second[0]), "sha256": self.second[1]}
        return {
            **package_versions(),
            "model": self.model,
            "weights": self.weights,
            "image": os.path.basename(self.image),
            "sha256": self.sha256,
            "preprocess": self.preprocess,
            **({"second": second} if second else {}),
        }

    @property
    def images(self) -> str:
        """The names of the images without their folders."""
        return " and ".join(os.path.basename(name) or name for name in (self.image, *(self.second or ())[:1]))

    @property
    def is_random(self) -> bool:
        """Whether the weights are random."""
        return is_random(self.weights)

    @property
    def alarm(self) -> str:
        """A line in red for random weights, empty for others."""
        return f"weights: {self.weights}, the network is not trained" if self.is_random else ""

    @property
    def words(self) -> list[str]:
        """Weights that are not random, image and preprocessing, as far as they are known."""
        weights = "" if self.is_random or not self.weights else f"weights: {self.weights}"
        preprocess = f"preprocessing: {self.preprocess}" if self.preprocess else ""
        return [word for word in (weights, self.images, preprocess) if word]


_LEAST, _MOST = 144, 480  # longest side of the photograph; between them it is as long as a map

Frames = Sequence[Sequence[Image.Image]]
Shares = tuple[float, float, float, float]
"""Left, top, right and bottom as shares of width and height."""


def photograph_cells(
    shown: Sequence[tuple[int, int] | None], frames: Frames, box: Shares | None
) -> tuple[list[Pixels | None], Pixels]:
    """A cell for each ``(item of the batch, longest side of a map)``, with words above it, and the colours of all.

    Of items without a photograph there is None. ``frames`` are what the network saw of each item.
    """
    seen = [None if each is None or each[0] >= len(frames) else _seen(frames[each[0]], each[1], box) for each in shown]
    pictures = [picture for picture, _ in filter(None, seen)]
    strip = Image.new("RGB", (max(picture.width for picture in pictures), sum(picture.height for picture in pictures)))
    starts = np.cumsum([0, *(picture.height for picture in pictures)])
    for picture, top in zip(pictures, starts, strict=False):
        strip.paste(picture, (0, int(top)))
    indices, table = colours.in_few_colours(strip)
    cells: list[Pixels | None] = []
    at = 0
    for each in seen:
        if each is None:
            cells.append(None)
            continue
        picture, words = each
        label = text_pixels(words)[:LABEL_HEIGHT]
        photograph = indices[starts[at] : starts[at + 1], : picture.width]
        at += 1
        shape = LABEL_HEIGHT + picture.height, max(picture.width, label.shape[1])
        cell = np.full(shape, colours.BACKGROUND, np.uint8)
        stamp(cell, label, 0, 0)
        stamp(cell, photograph, 0, LABEL_HEIGHT)
        cells.append(cell)
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
        left, top, right, bottom = (
            round(share * length) for share, length in zip(box, (*photograph.size, *photograph.size), strict=True)
        )
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
