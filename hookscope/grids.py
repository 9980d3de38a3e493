"""Feature maps to a channel grid: which channels, which scale, which level each value gets, where each map lies."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hookscope import colours
from hookscope.errors import LayerError, NoMapError, SelectionError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image
    from torch import Tensor

    Pixels = NDArray[np.uint8]

__all__ = ["ChannelChoice", "Grid", "Layout", "Scale", "Tiles", "channel_grid", "reduce_maps"]

# Without --cell a map has at least this side, and more where the whole sheet stays below the area for a screen.
LEAST_CELL = 56
_SCREEN = 1_200 * 800
# A sheet above this many pixels is cut off, with a word; 100 million take some seconds and 100 MB to draw.
MOST_PIXELS = 100_000_000


@dataclass(frozen=True, slots=True)
class Scale:
    """How values become colours: ``channel`` (each map its own range), else one range for all.

    Attributes:
        kind: ``channel``, ``layer``, ``symmetric``, ``percentile`` or ``range``.
        low: Lower percentile or bound.
        high: Upper percentile or bound.
    """

    kind: str = "channel"
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Scale:
        """``channel``, ``layer``, ``symmetric``, ``percentile:1,99`` or ``LO:HI``.

        Raises:
            UsageError: for anything else.

        Example:
            >>> Scale.parse("percentile:1,99")
            Scale(kind='percentile', low=1.0, high=99.0)
        """
        if text in ("channel", "layer", "symmetric"):
            return cls(text)
        head, _, rest = text.rpartition(":")
        pair = rest.split(",") if head == "percentile" else [head, rest]
        try:
            low, high = (float(number) for number in pair)
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ValueError
            if head == "percentile" and not 0 <= low < high <= 100:
                raise ValueError
        except ValueError:
            known = "there are channel, layer, symmetric, percentile:LO,HI and LO:HI"
            raise UsageError(f"no scale '{text}'", known, "such as percentile:1,99 or -1:1") from None
        return cls("percentile" if head == "percentile" else "range", low, high)

    def __str__(self) -> str:
        if self.kind == "percentile":
            return f"percentile:{self.low:g},{self.high:g}"
        return f"{self.low:g}:{self.high:g}" if self.kind == "range" else self.kind


@dataclass(frozen=True, slots=True)
class ChannelChoice:
    """Which channels to draw: numbers and ranges, or the strongest ``top`` of them by ``measure``."""

    numbers: tuple[tuple[int, int], ...] = ()
    top: int = 0
    measure: str = "abs"

    @classmethod
    def parse(cls, text: str) -> ChannelChoice:
        """``0-63,100``, ``top:16`` (by mean absolute value) or ``top:16:max|std|mean``.

        Raises:
            SelectionError: for anything else.

        Example:
            >>> ChannelChoice.parse("0-3,8").numbers
            ((0, 3), (8, 8))
        """
        found = re.fullmatch(r"top:(\d+)(?::(abs|max|std|mean))?", text.strip())
        if found is not None and int(found[1]):
            return cls(top=int(found[1]), measure=found[2] or "abs")
        pairs = []
        for part in text.split(","):
            span = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            if span is None or int(span[2] or span[1]) < int(span[1]):
                raise SelectionError(f"bad channels '{text}'", do="write 0-63,100 or top:16 or top:16:max|std|mean")
            pairs.append((int(span[1]), int(span[2] or span[1])))
        return cls(numbers=tuple(pairs))

    def of(self, values: Tensor) -> list[int]:
        """The chosen channels of ``values`` ``(C, H, W)``, in the order in which to draw them.

        Raises:
            LayerError: when none of them exists.
        """
        count = values.shape[0]
        if self.top:
            strength = self._strength(values)
            return [int(at) for at in strength.argsort(descending=True, stable=True)[: self.top]]
        if not self.numbers:
            return list(range(count))
        chosen = [at for first, last in self.numbers for at in range(first, min(last, count - 1) + 1)]
        if not chosen:
            asked = ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in self.numbers)
            raise LayerError(f"no channel {asked}", f"there are {count}: 0 to {count - 1}")
        return list(dict.fromkeys(chosen))

    def _strength(self, values: Tensor) -> Tensor:
        flat = values.flatten(1).nan_to_num(0.0, 0.0, 0.0)
        if self.measure == "max":
            return flat.amax(1)
        if self.measure == "std":
            return flat.std(1, correction=0)
        return flat.mean(1) if self.measure == "mean" else flat.abs().mean(1)


@dataclass(frozen=True)
class Tiles:
    """Feature maps reduced to what a picture needs, one byte a value.

    Attributes:
        channels: Their numbers, in drawing order.
        levels: ``(C, H, W)`` palette indices: below ``LEVELS`` values, above it NaN, Inf and constant maps.
        low: ``(C,)`` value of level 0, per channel.
        high: ``(C,)`` value of the top level.
        strength: ``(C,)`` range of each map, highest minus lowest finite value; of 1 × 1 maps the absolute value.
        constant: ``(C,)`` whether a map of more than one position has one value throughout.
        nonfinite: ``(C,)`` count of NaN and Inf.
        shared: Whether one scale holds for all channels.
        scale: Its name.
    """

    channels: list[int]
    levels: Pixels
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    strength: NDArray[np.float64]
    constant: NDArray[np.bool_]
    nonfinite: NDArray[np.int64]
    shared: bool
    scale: str


def reduce_maps(values: Tensor, choice: ChannelChoice | None = None, scale: Scale | None = None) -> Tiles:
    """Choose channels of ``values`` ``(C, H, W)`` and give every value its level.

    A single position has no range of its own: 1 × 1 maps take the scale of the layer where ``channel`` was asked.

    Raises:
        LayerError: when no chosen channel exists.
        NoMapError: when there is nothing to draw.
    """
    if not values.numel():
        raise NoMapError(f"an output of {'x'.join(map(str, values.shape))} has no values")
    choice, scale = choice or ChannelChoice(), scale or Scale()
    channels = choice.of(values)
    single = values.shape[1] * values.shape[2] == 1
    if scale.kind == "channel" and single:
        scale = Scale("layer")
    chosen = values if channels == list(range(values.shape[0])) else values[channels]
    lowest, highest, nonfinite = finite_extremes(chosen)
    low, high = _bounds(values, lowest, highest, scale)
    constant = (lowest == highest) & (nonfinite == 0) & (not single)
    levels = _levels(chosen, low, high)
    if scale.kind == "channel":
        levels[constant] = colours.CONSTANT
    return Tiles(
        channels=channels,
        levels=levels.cpu().numpy(),
        low=low.cpu().numpy(),
        high=high.cpu().numpy(),
        strength=(lowest.abs() if single else highest - lowest).nan_to_num(0.0, 0.0, 0.0).cpu().numpy(),
        constant=constant.cpu().numpy(),
        nonfinite=nonfinite.cpu().numpy(),
        shared=scale.kind != "channel",
        scale=str(scale),
    )


def finite_extremes(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lowest and highest finite value and the count of NaN and Inf of each channel: three ``(C,)`` tensors.

    A channel without a finite value has lowest +inf and highest -inf.
    """
    import torch

    flat = values.flatten(1)
    low, high = flat.aminmax(dim=1)
    # one pass for the usual case: a NaN or an Inf anywhere shows in the extremes
    if bool(torch.isfinite(low).all()) and bool(torch.isfinite(high).all()):
        return low.double(), high.double(), torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    finite = torch.isfinite(flat)
    low = flat.masked_fill(~finite, math.inf).amin(1)
    high = flat.masked_fill(~finite, -math.inf).amax(1)
    return low.double(), high.double(), (~finite).sum(1)


def _bounds(values: Tensor, lowest: Tensor, highest: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    import torch

    if scale.kind == "channel":
        return lowest, highest
    if scale.kind == "range":
        low, high = scale.low, scale.high
    elif scale.kind == "percentile":
        import numpy as np

        finite = values[torch.isfinite(values)].cpu().numpy()
        low, high = map(float, np.percentile(finite, [scale.low, scale.high])) if finite.size else (0.0, 0.0)
    else:
        lows, highs, _ = finite_extremes(values)
        low, high = float(lows.min()), float(highs.max())
        if low > high:  # nothing finite at all
            low = high = 0.0
        if scale.kind == "symmetric":
            high = max(abs(low), abs(high))
            low = -high
    return torch.full_like(lowest, low), torch.full_like(lowest, high)


def _levels(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``round((value - low) / (high - low) * top)`` as bytes, outside values at the ends, NaN and Inf apart."""
    import torch

    top = colours.LEVELS - 1
    spread = high - low
    # float32 is exact enough unless the range is so small or so large that the arithmetic itself leaves its range
    safe = bool(((spread > 1e-30) & (spread < 1e30) & (low.abs() < 1e30) & (low.abs() < spread * 1e3)).all())
    work = values.clone() if safe else values.double()
    factor = torch.where(spread > 0, top / spread, 0.0)
    work.sub_(low.to(work.dtype)[:, None, None]).mul_(factor.to(work.dtype)[:, None, None]).round_().clamp_(0, top)
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return work.to(torch.uint8)
    levels = work.nan_to_num(0.0).to(torch.uint8)
    levels[torch.isnan(values)] = colours.NAN
    levels[values == math.inf] = colours.PLUS_INF
    levels[values == -math.inf] = colours.MINUS_INF
    return levels


@dataclass(frozen=True, slots=True)
class Layout:
    """Where maps lie in a grid, in pixels: a cell holds a label, the map ``zoom`` times its size, a bar and a gap."""

    columns: int
    rows: int
    zoom: int
    map_height: int
    map_width: int
    label: int
    bar: int
    gap: int

    @property
    def step_x(self) -> int:
        """From one map to the next in a row."""
        return self.map_width + self.gap

    @property
    def step_y(self) -> int:
        """From one row to the next."""
        return self.label + self.map_height + self.bar + self.gap

    @property
    def width(self) -> int:
        """Of the whole grid."""
        return self.columns * self.step_x - self.gap

    @property
    def height(self) -> int:
        """Of the whole grid."""
        return self.rows * self.step_y - self.gap


def lay_out(
    count: int, height: int, width: int, columns: int | None = None, cell: int | None = None, plain: bool = False
) -> Layout:
    """Where ``count`` maps of ``height`` × ``width`` go: about 3:2 in all, or in so many ``columns``."""
    zoom = math.ceil(cell / min(height, width)) if cell else _fitting_zoom(count, height, width)
    label, bar, gap = (0, 0, 2) if plain else (LABEL_HEIGHT, 4 if height * width > 1 else 0, 6)
    cell_width, cell_height = width * zoom + gap, height * zoom + label + bar + gap
    if columns is None:
        columns = round(math.sqrt(1.5 * count * cell_height / cell_width))
    columns = max(1, min(columns, count))
    return Layout(columns, math.ceil(count / columns), zoom, height * zoom, width * zoom, label, bar, gap)


def _fitting_zoom(count: int, height: int, width: int) -> int:
    """The magnification at which a map can be read and all together fill a screen, where both can be."""
    if height * width == 1:
        return LEAST_CELL // 2
    readable = math.ceil(LEAST_CELL / min(height, width))
    filling = int(math.sqrt(_SCREEN / (count * height * width)))
    # a long strip is not blown up by its short side, nor a map of a few positions to the size of a screen
    return max(1, min(max(readable, min(filling, 4 * readable)), 8 * LEAST_CELL // max(height, width)))


@dataclass(frozen=True)
class Grid:
    """A drawn grid: palette indices ``(height, width)``, the layout, the tiles in it, how many were left out."""

    pixels: Pixels
    layout: Layout
    tiles: Tiles
    left_out: int = 0


def draw_grid(tiles: Tiles, columns: int | None = None, cell: int | None = None, plain: bool = False) -> Grid:
    """Lay the maps out, magnified by nearest neighbour, with channel numbers and bars unless ``plain``.

    The bar under a map is as long as the map's range is, the widest range filling the cell: with a scale for each
    channel it tells the strong ones from magnified noise. At most `MOST_PIXELS` are drawn, the rest is left out.
    """
    import numpy as np

    count, height, width = tiles.levels.shape
    layout = lay_out(count, height, width, columns, cell, plain)
    fitting = max(1, MOST_PIXELS // (layout.step_x * layout.step_y))
    if layout.width * layout.height > MOST_PIXELS and fitting < count:
        count = fitting
        layout = lay_out(count, height, width, columns, cell, plain)
    pixels = np.full((layout.rows, layout.step_y, layout.columns, layout.step_x), colours.BACKGROUND, np.uint8)
    _place_maps(pixels, layout, tiles.levels[:count])
    if not plain:
        _place_labels(pixels, layout, tiles, count)
        _place_bars(pixels, layout, tiles, count)
    whole = pixels.reshape(layout.rows * layout.step_y, layout.columns * layout.step_x)
    return Grid(whole[: layout.height, : layout.width], layout, tiles, len(tiles.channels) - count)


def _place_maps(pixels: Pixels, layout: Layout, levels: Pixels) -> None:
    import numpy as np

    full, over = divmod(levels.shape[0], layout.columns)
    z = layout.zoom
    ys, xs = slice(layout.label, layout.label + layout.map_height), slice(0, layout.map_width)
    for first, last, many in ((0, full, layout.columns), (full, full + bool(over), over)):
        if first == last:
            continue
        start = first * layout.columns
        block = levels[start : start + (last - first) * many]
        block = block.reshape(last - first, many, *levels.shape[1:]).transpose(0, 2, 1, 3)
        if z > 1:
            block = np.repeat(np.repeat(block, z, axis=3), z, axis=1)
        pixels[first:last, ys, :many, xs] = block


LABEL_HEIGHT = 14
_TEXT_SIZE = 11


@cache
def text_pixels(text: str, size: int = _TEXT_SIZE, bold: bool = False) -> Pixels:
    """``text`` as palette indices, dark on background, antialiased in four steps."""
    import numpy as np
    from PIL import Image, ImageDraw

    letters = colours.font(size, bold)
    mask = Image.new("L", (max(1, round(letters.getlength(text))), round(size * 1.35)), 0)
    ImageDraw.Draw(mask).text((0, 0), text, fill=255, font=letters)
    steps = np.array(
        [colours.BACKGROUND, colours.TEXT_FAINT, colours.TEXT_HALF, colours.TEXT_STRONG, colours.TEXT], np.uint8
    )
    shown: Pixels = steps[(np.asarray(mask).astype(np.uint16) * 4 + 127) // 255]
    return shown


def stamp(pixels: Pixels, text: Pixels, x: int, y: int) -> None:
    """Write ``text`` into ``pixels`` at ``x``, ``y``; what does not fit is cut off."""
    target = pixels[y : y + text.shape[0], x : x + text.shape[1]]
    target[:] = text[: target.shape[0], : target.shape[1]]


def _number_pixels(text: str, bold: bool) -> Pixels:
    """A label put together from its letters, each drawn once."""
    import numpy as np

    return np.concatenate([text_pixels(letter, bold=bold)[:LABEL_HEIGHT] for letter in text], axis=1)


def strongest(tiles: Tiles, most: int = 8) -> list[int]:
    """Positions of the maps with the widest ranges (1 × 1: the largest absolute values), the first places to look."""
    order = (-tiles.strength).argsort(kind="stable")[:most]
    return [int(at) for at in order if tiles.strength[at] > 0]


def _place_labels(pixels: Pixels, layout: Layout, tiles: Tiles, count: int) -> None:
    bold = set(strongest(tiles))
    for at in range(count):
        row, column = divmod(at, layout.columns)
        label = str(tiles.channels[at])
        if tiles.constant[at]:
            label += f" ={tiles.low[at]:.3g}" if not tiles.shared else " const"
        elif tiles.nonfinite[at]:
            label += " !"
        stamp(pixels[row, :, column], _number_pixels(label, at in bold), 0, 0)


def _place_bars(pixels: Pixels, layout: Layout, tiles: Tiles, count: int) -> None:
    if not layout.bar:
        return
    widest = float(tiles.strength.max(initial=0.0))
    top = layout.label + layout.map_height + 1
    for at in range(count):
        row, column = divmod(at, layout.columns)
        length = math.ceil(layout.map_width * float(tiles.strength[at]) / widest) if 0 < widest < math.inf else 0
        bar = pixels[row, top : top + layout.bar - 1, column]
        bar[:, : layout.map_width] = colours.TRACK
        bar[:, :length] = colours.BAR


def to_image(pixels: Pixels, cmap: str) -> Image.Image:
    """Palette indices as a palette picture."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.putpalette(colours.palette(cmap).tobytes())
    return image


def channel_grid(
    activation: Tensor,
    columns: int | None = None,
    cmap: str = "viridis",
    scale: str = "channel",
    channels: str | Sequence[int] | None = None,
    cell: int | None = None,
    plain: bool = False,
) -> Image.Image:
    """The feature maps of one activation as a palette picture: labelled, magnified by nearest neighbour.

    NaN is magenta, +Inf red, -Inf light blue; with a scale for each channel, constant maps are grey with their value.

    Args:
        activation: ``(C, H, W)``; one map ``(H, W)`` or a batch of one are taken too.
        columns: Maps in a row; None for a grid of about 3:2.
        cmap: Any of matplotlib's colour maps.
        scale: ``channel``, ``layer``, ``symmetric``, ``percentile:LO,HI`` or ``LO:HI``.
        channels: ``0-63,100``, ``top:16`` or numbers; None for all.
        cell: Smallest side of a map in pixels; the magnification is a whole number.
        plain: Maps only, without numbers and bars.

    Raises:
        NoMapError: for another shape.
        UsageError: for a scale, a colour map or channels that do not exist.

    Example:
        >>> import torch
        >>> channel_grid(torch.rand(6, 7, 7), columns=3).size
        (684, 490)
    """
    maps = _one_activation(activation)
    if channels is not None and not isinstance(channels, str):
        channels = ",".join(map(str, channels))
    choice = ChannelChoice.parse(channels) if channels else ChannelChoice()
    tiles = reduce_maps(maps, choice, Scale.parse(scale))
    return to_image(draw_grid(tiles, columns, cell, plain).pixels, cmap)


def _one_activation(activation: Any) -> Tensor:
    from hookscope.maps import as_float

    shape = tuple(activation.shape)
    tensor = as_float(activation)
    while tensor.dim() > 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    tensor = tensor[None] if tensor.dim() == 2 else tensor
    if tensor.dim() != 3:
        raise NoMapError(f"a channel grid takes (C, H, W), not {shape}", do="take one item of a batch: activation[0]")
    return tensor
