"""Feature maps in two states and their difference, which has a scale of its own: the channels that moved most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hookscope.drawing import colours
from hookscope.drawing.files import (
    LEAST_WIDTH,
    MARGIN,
    SheetPage,
    colour_bar,
    finite_or_none,
    page_facts,
    placed,
    with_provenance,
)
from hookscope.drawing.grid import MOST_PIXELS, Grid, draw_grids, photograph_cells, to_image
from hookscope.drawing.scale import SymmetricScale
from hookscope.drawing.text import Pixels, stamp, text_pixels
from hookscope.drawing.tiles import Tiles, finite_extremes, reduce_maps
from hookscope.errors import UsageError
from hookscope.findings import counted, percent
from hookscope.hooks import Maps

_AT_ONCE = 1 << 22  # values
_GRID = 480  # approximate side of each of the three grids, unless its maps are larger
_LARGEST_MAP = 240
_BETWEEN = 30
_LEAST_GRID = 260  # half the width of the longer colour bar
BOLD = 4  # channels with a bold number: those to look at first
Extremes = tuple[float, float]


@dataclass(frozen=True)
class MapDifference:
    """A part of an output in two states, and the second minus the first.

    Attributes:
        names: What the three are called, such as ``before``, ``after`` and ``difference``.
        axes: The axes of the tensor, such as ``N C H W``.
        total: Number of channels.
        moved: Number of channels with a changed value.
        channels: The drawn channels: those that moved most, in that order.
        distances: Root mean square of the difference for each drawn channel; inf where NaN or Inf appeared or vanished.
        nonfinite: Number of NaN and Inf in all channels of the three.
        largest: Largest finite absolute difference of the drawn channels.
        ranges: Lowest and highest finite value of each drawn channel of the three.
        tiles: Both states on one symmetric scale, and the difference on its own; None if nothing moved.
    """

    names: tuple[str, str, str]
    part: str
    axes: str
    frames: int
    total: int
    moved: int
    channels: tuple[int, ...]
    distances: tuple[float, ...]
    nonfinite: tuple[int, int, int]
    largest: float
    ranges: tuple[tuple[Extremes, ...], ...]
    tiles: tuple[Tiles, ...] | None

    def facts(self, drawn: int) -> dict[str, Any]:
        """The facts of the first ``drawn`` channels for a text chunk."""
        return {
            "part": self.part,
            "channels": list(self.channels[:drawn]),
            "distances": finite_or_none(self.distances[:drawn]),
            "total": self.total,
            "moved": self.moved,
            "nonfinite": dict(zip(self.names, self.nonfinite, strict=True)),
            "ranges": {
                name: [finite_or_none(pair) for pair in pairs[:drawn]]
                for name, pairs in zip(self.names, self.ranges, strict=False)
            },
        }


def compare_maps(before: Maps, after: Maps, names: tuple[str, str, str], most_channels: int) -> MapDifference:
    """The difference of two parts of one shape, of the channels that moved most."""
    distances, nonfinite = _distances(before.values, after.values)
    moved = int((distances > 0).sum())
    channels = [int(at) for at in distances.argsort(descending=True, stable=True)[: min(moved, most_channels)]]
    # double precision: equal values get equal levels in all three, and differences of floats do not overflow
    old, new = before.values[channels].double(), after.values[channels].double()
    three = [old, new, new - old]
    extremes = [finite_extremes(values) for values in three] if channels else []
    ranges = tuple(tuple(zip(low.tolist(), high.tolist(), strict=True)) for low, high, _ in extremes)
    largest = max(map(_magnitude, ranges[2:]), default=0.0)
    side_scale = SymmetricScale(max(map(_magnitude, ranges[:2]), default=0.0) or 1.0)
    scales = [side_scale, side_scale, SymmetricScale(largest or 1.0)]
    tiles = (
        replace(reduce_maps(values, scale=scale), channels=channels, strength=_root_mean_square(values).cpu().numpy())
        for values, scale in zip(three, scales, strict=True)
    )
    about = names, before.label, before.axes, before.frames, len(distances), moved
    far, bad = tuple(distances[channels].tolist()), (_nonfinite(before.values), _nonfinite(after.values), nonfinite)
    return MapDifference(*about, tuple(channels), far, bad, largest, ranges, tuple(tiles) if channels else None)


def _magnitude(ranges: tuple[Extremes, ...]) -> float:
    """The largest absolute value, 0 where nothing is finite."""
    return max((abs(end) for pair in ranges for end in pair if math.isfinite(end)), default=0.0)


def _distances(before: Tensor, after: Tensor) -> tuple[Tensor, int]:
    """``(C,)``: the distance of each channel, inf where NaN or Inf appeared or vanished; and the number of NaN and Inf.

    Works on some channels at a time: large maps in double precision take much memory.
    """
    many = max(1, _AT_ONCE // before[0].numel())
    distances, nonfinite = [], 0
    for old, new in zip(before.split(many), after.split(many), strict=True):
        difference = new.double() - old.double()
        same = (old == new) | (old.isnan() & new.isnan())
        broken = (~same & ~difference.isfinite()).flatten(1).any(1)
        distances.append(torch.where(broken, math.inf, _root_mean_square(torch.where(same, 0.0, difference))))
        nonfinite += _nonfinite(difference)
    return torch.cat(distances), nonfinite


def _root_mean_square(values: Tensor) -> Tensor:
    """``(C,)``, of the finite values of each channel of ``(C, H, W)``."""
    finite = values.isfinite()
    flat = torch.where(finite, values, 0.0).flatten(1)
    largest = flat.abs().amax(1, keepdim=True)
    shares = torch.where(largest > 0, flat / largest, 0.0)  # squares of the values themselves may overflow or underflow
    return largest[:, 0] * (shares.square().sum(1) / finite.flatten(1).sum(1).clamp(min=1)).sqrt()


def _nonfinite(values: Tensor) -> int:
    return int((~values.isfinite()).sum())


@dataclass(frozen=True)
class DrawnDifference:
    """The three grids of a difference; one if the second is constant, none if nothing moved."""

    maps: MapDifference
    grids: Sequence[Grid]

    @property
    def drawn(self) -> int:
        """Number of drawn channels."""
        return len(self.maps.channels) - (self.grids[0].left_out if self.grids else 0)


def draw_difference(maps: MapDifference, most: int) -> DrawnDifference:
    """Draw three grids of at most ``most`` pixels together, each about square, with maps as large as possible."""
    if maps.tiles is None:
        return DrawnDifference(maps, [])
    count, height, width = maps.tiles[0].levels.shape
    bold = range(min(BOLD, count)) if count > BOLD else ()
    if height * width == 1:
        return DrawnDifference(maps, draw_grids(maps.tiles, count, most=most // 3, bold=bold))
    tiles = maps.tiles[:1] if maps.tiles[1].constant.all() else maps.tiles
    side = min(_GRID, math.isqrt(most // 4))  # smaller maps before fewer maps; a quarter is for numbers and bars
    columns = max(1, min(count, math.ceil(math.sqrt(count * height / width))))
    zoom = max(1, min(side // columns, max(_LARGEST_MAP, width)) // width)
    cell = zoom * min(height, width // maps.frames)
    return DrawnDifference(maps, draw_grids(tiles, columns, cell, frames=maps.frames, most=most // 3, bold=bold))


class DifferencePage(SheetPage):
    """A page with the three grids of each difference, which stand ``step`` apart, the same for all."""

    def __init__(self, drawn: Sequence[DrawnDifference]) -> None:
        self.step = max([_LEAST_GRID, *(grid.layout.width for part in drawn for grid in part.grids)]) + _BETWEEN
        self.places: list[dict[str, Any]] = []  # of the maps, for `read_sheet`
        self.photograph: Pixels | None = None  # its colours
        super().__init__(max(LEAST_WIDTH, 3 * self.step - _BETWEEN))

    def add_input(self, frames: Sequence[Image.Image]) -> None:
        """Add what the network saw, once for the page."""
        cells, self.photograph = photograph_cells({0: (0, 0)}, [frames], None)
        self.add(cells[0], 8)

    def add_difference(self, drawn: DrawnDifference, name: str) -> None:
        """Add notes and grids at the bottom."""
        maps = drawn.maps
        if maps.tiles is None:
            return
        highs = [float(tiles.high[0]) for tiles in maps.tiles[1:]]
        for line in _notes(drawn, highs[0]):
            self.add_text(line, 2)
        block, lefts, down = _side_by_side(drawn, highs, self.step)
        top = self.add(block, 8)
        self.places += [
            placed(f"{name} {which}".strip(), maps.axes, grid, MARGIN + left, MARGIN + top + down)
            for which, grid, left in zip(maps.names, drawn.grids, lefts, strict=False)
        ]

    def image(self, layers: int, cmap: str, facts: Mapping[str, Any], bands: Sequence[Any]) -> Image.Image:
        """The image with the differences of ``layers``, and its provenance: ``facts``, and what each band shows."""
        if self.width * self.height > 2 * MOST_PIXELS:
            size = f"it would have {self.width:,}x{self.height:,} pixels"
            raise UsageError(f"a page of {counted(layers, 'layer')} is too large", size, "choose fewer")
        image = to_image(self.pixels(MARGIN), cmap, self.photograph)
        about = page_facts(image, "symmetric", cmap)
        return with_provenance(image, {**facts, **about, "bands": bands, "parts": self.places})


def _notes(drawn: DrawnDifference, high: float) -> list[str]:
    notes, maps = [], drawn.maps
    first, second, _ = maps.names
    if len(drawn.grids) == 1:
        values = {low for low, _ in maps.ranges[1]}
        constant = f"{values.pop():.3g}" if len(values) == 1 else "constant"
        notes.append(f"{second}: each drawn channel is {constant} everywhere")
    elif maps.largest or math.isfinite(maps.distances[0]):
        share = percent(maps.largest / high)
        notes.append(f"largest |difference| {maps.largest:.4g}, {share} of the scale of {first} and {second}")
    if any(maps.nonfinite):
        counts = ", ".join(f"{count:,} {name}" for name, count in zip(maps.names, maps.nonfinite, strict=True))
        notes.append(f"NaN magenta, +Inf red, -Inf light blue (!): {counts}")
    if maps.frames > 1:
        notes.append(f"{maps.frames} frames a channel, left to right")
    return notes


def _side_by_side(drawn: DrawnDifference, highs: Sequence[float], step: int) -> tuple[Pixels, list[int], int]:
    """The grids ``step`` apart with their captions and two bars, which end at ``highs``.

    Also the x of each grid, and the y of all.
    """
    grids, (first, second, third) = drawn.grids, drawn.maps.names
    captions = [text_pixels(words, 12, True) for words in (first, second, f"{third}: {second} - {first}")][: len(grids)]
    scales = (f"{first} and {second}:", "", f"{third}:") if len(grids) > 1 else (f"{first}:",)
    bars = {at: colour_bar(name, -highs[at // 2], highs[at // 2]) for at, name in enumerate(scales) if name}
    top = captions[0].shape[0] + 4
    down = top + bars[0].shape[0] + 4
    high, wide = grids[0].pixels.shape
    last = max(wide, captions[-1].shape[1], bars[len(grids) - 1].shape[1])
    block = np.full((down + high + 1, (len(grids) - 1) * step + last + 2), colours.BACKGROUND, np.uint8)
    lefts = [1 + at * step for at in range(len(grids))]
    for at, bar in bars.items():
        stamp(block, bar, lefts[at], top)
    for grid, caption, left in zip(grids, captions, lefts, strict=True):
        stamp(block, caption, left, 0)
        stamp(block, grid.pixels, left, down)
        _outline(block, grid, left, down)
    return block, lefts, down


def _outline(block: Pixels, grid: Grid, left: int, top: int) -> None:
    """Draw a line around each map: 0 has the colour of the background, and many changed values are 0."""
    layout = grid.layout
    for at in range(len(grid.tiles.channels) - grid.left_out):
        x, y = layout.corner(at, left, top)
        rows, columns = slice(y - 1, y + layout.map_height + 1), slice(x - 1, x + layout.map_width + 1)
        block[rows, [x - 1, x + layout.map_width]] = colours.TEXT_FAINT
        block[[y - 1, y + layout.map_height], columns] = colours.TEXT_FAINT
