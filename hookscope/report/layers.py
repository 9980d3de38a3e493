"""The view of each layer on a page: its maps and Grad-CAM for each image, and the numbers that make values of it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import Heat, Tiles, colours, draw_heat, finite_or_none, palette, to_image
from hookscope.errors import printable
from hookscope.inspection import ImageMaps, InspectedLayer, Inspection, Place
from hookscope.report.charts import jpeg_address, png_address

COLOUR_MAPS = ("viridis", "magma", "cividis", "gray", "RdBu_r", "PuOr")
GAP = 1  # transparent pixels between the maps of a picture
_WIDEST, _HIGHEST = 960, 72  # a picture may have this width on the screen, a map of it this height
_PIXEL, _CHANNEL, _PICTURE = 1.2, 140, 1200  # bytes of a page for each value of a map, channel and empty picture
_FAR = 2  # times the room: views of more bytes are not drawn whole
# zlib's strategy: the picture of noise is as small as with its search for repetitions, in half the time
_RUN_LENGTHS = 3


@dataclass(frozen=True)
class LayerView:
    """A layer as its part of the page shows it.

    Attributes:
        number: Its position in `Inspection.layers`.
        layer: The layer.
        channels: The channels that are on the page, in the order of their numbers.
    """

    number: int
    layer: InspectedLayer
    channels: tuple[int, ...]

    @property
    def key(self) -> str:
        return self.layer.key

    @property
    def total(self) -> int:
        return next((maps.tiles.total for maps in self.layer.images if maps), 0)

    @property
    def size(self) -> str:
        """``64 channels, 7×7``, of the first image."""
        maps = next((maps for maps in self.layer.images if maps), None)
        if maps is None:
            return "no maps"
        words = f"{self.total:,} channel{'s' if self.total > 1 else ''}"
        if maps.tiles.values:
            return f"{words} of one value"
        _, height, width = maps.tiles.levels.shape
        tokens = " tokens" if self.layer.axes == "N L C" else ""
        frames = f", {self.layer.frames} frames" if self.layer.frames > 1 else ""
        return f"{words}, {height}×{width // self.layer.frames}{tokens}{frames}"

    @cached_property
    def pictures(self) -> tuple[SimpleNamespace | None, ...]:
        """The maps for each image; None where there are none, and for maps of one position."""
        return tuple(
            None if maps is None or maps.tiles.values else _maps_picture(maps.tiles, self.channels)
            for maps in self.layer.images
        )

    @cached_property
    def filters(self) -> SimpleNamespace | None:
        """The filters of the channels: in colour about a middle grey, or blue below and red above 0."""
        filters = self.layer.filters
        return None if filters is None else _filters_picture(filters[list(self.channels)])

    @cached_property
    def data(self) -> Markup:
        images = zip(self.layer.images, self.pictures, strict=True)
        return _json(
            {
                "key": self.key,
                "frames": self.layer.frames,
                "total": self.total,
                "channels": self.channels,
                "names": [self.layer.names[channel] for channel in self.channels] if self.layer.names else [],
                "images": [None if maps is None else self._numbers(maps, picture) for maps, picture in images],
                "filters": self.filters and self.filters.about,
            }
        )

    def _numbers(self, maps: ImageMaps, picture: SimpleNamespace | None) -> dict[str, Any]:
        tiles, chosen = maps.tiles, list(self.channels)
        finite = np.isfinite(tiles.low)
        numbers = {
            "low": finite_or_none(tiles.low[chosen]),
            "high": finite_or_none(tiles.high[chosen]),
            "lowest": float(tiles.low[finite].min()) if finite.any() else None,
            "highest": float(tiles.high[finite].max()) if finite.any() else None,
            "mean": _rounded(maps.mean[chosen]),
            "zeros": _rounded(maps.zeros[chosen]),
            "answer": None if maps.answer is None else _rounded(maps.answer[chosen]),
            "answerTotal": None if maps.answer is None else float(np.nansum(np.abs(maps.answer))),
            "nonfinite": {at: int(tiles.nonfinite[c]) for at, c in enumerate(chosen) if tiles.nonfinite[c]},
        }
        if picture is None:
            values = [tiles.values[channel] for channel in chosen]
            return numbers | {"values": [value if math.isfinite(value) else str(value) for value in values]}
        return {**numbers, **picture.about}

    @cached_property
    def ranges(self) -> list[Markup]:
        return [Markup("") if maps is None else self._items(maps.tiles) for maps in self.layer.images]

    def _items(self, tiles: Tiles) -> Markup:
        numbered = self.channels == tuple(range(len(self.channels)))
        items, low, high, names = [], tiles.low.tolist(), tiles.high.tolist(), self.layer.names
        for channel in self.channels:
            name = f"{escape(printable(names[channel]))}: " if names else ""
            if tiles.values:
                words = f"{tiles.values[channel]:.4g}"
            else:
                words = f"{low[channel]:.3g} to {high[channel]:.3g}"
                words += ", NaN or Inf" if tiles.nonfinite[channel] else ""
            items.append(f"<li>{name}{words}" if numbered else f'<li value="{channel}">{name}{words}')
        return Markup("".join(items))

    @cached_property
    def weight(self) -> int:
        """Bytes of what grows with the number of channels."""
        addresses = sum(len(picture.address) for picture in (*self.pictures, self.filters) if picture)
        return addresses + len(self.data) + sum(map(len, self.ranges))

    @property
    def expected(self) -> float:
        """About ``weight``, and rarely less, without drawing anything."""
        shapes = (maps.tiles.levels.shape for maps in self.layer.images if maps)
        return len(self.channels) * float(sum(_PIXEL * (h + GAP) * (w + GAP) + _CHANNEL for _, h, w in shapes))

    def best(self, count: int) -> LayerView:
        """The view with at most ``count`` channels: those with NaN or Inf, then others.

        The best of these have the largest share in the answer, or without gradients the widest range.
        """
        images = [maps for maps in self.layer.images if maps]
        if not images or count >= len(self.channels):
            return self
        shares = [maps.tiles.strength if maps.answer is None else np.abs(maps.answer) for maps in images]
        is_finite = np.all([maps.tiles.nonfinite == 0 for maps in images], axis=0)
        order = np.lexsort((-np.nan_to_num(np.sum(shares, axis=0)), is_finite))
        return LayerView(self.number, self.layer, tuple(sorted(int(at) for at in order[:count])))


def layer_views(inspection: Inspection) -> list[LayerView]:
    views = [LayerView(number, layer, ()) for number, layer in enumerate(inspection.layers)]
    return [LayerView(view.number, view.layer, tuple(range(view.total))) for view in views]


def fewer_channels(views: Sequence[LayerView], most: float) -> Sequence[LayerView]:
    """The views with as many of their best channels as fit into about ``most`` bytes, and one at least.

    No layer has more bytes than another that is not whole. Views that are far too large are not drawn to know it.
    """
    weights = [view.expected for view in views]
    if sum(weights) <= _FAR * most:
        weights = [view.weight for view in views]
    else:
        most -= _PICTURE * sum(len(view.layer.images) for view in views)
    if sum(weights) <= most:
        return views
    costs = [weight / max(1, len(view.channels)) for view, weight in zip(views, weights, strict=True)]
    few, many = 0.0, float(max(weights))
    for _ in range(40):
        share = (few + many) / 2
        sizes = (cost * _count(view, cost, share) for view, cost in zip(views, costs, strict=True))
        few, many = (share, many) if sum(sizes) <= most else (few, share)
    return [view.best(_count(view, cost, few)) for view, cost in zip(views, costs, strict=True)]


def _count(view: LayerView, cost: float, share: float) -> int:
    return min(len(view.channels), max(1, int(share / cost)))


@cache
def colour_tables() -> Markup:
    """The colours of each palette index as JSON, and which indices are not levels."""
    tables = {name: base64.b64encode(palette(name)[: colours.PHOTOGRAPH].tobytes()).decode() for name in COLOUR_MAPS}
    fixed = {"constant": colours.CONSTANT, "nan": colours.NAN, "plus": colours.PLUS_INF, "minus": colours.MINUS_INF}
    return _json({"levels": colours.LEVELS, "gap": GAP, **fixed, "tables": tables})


def _json(facts: Any) -> Markup:
    text = json.dumps(facts, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))  # no text in a script ends it


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    """Nine digits, which is enough to tell any two floats of 32 bits apart."""
    return finite_or_none(float(f"{value:.9g}") for value in values.tolist())


def _maps_picture(tiles: Tiles, channels: Sequence[int]) -> SimpleNamespace:
    whole = len(channels) == len(tiles.levels)
    pixels, columns = _mosaic(tiles.levels if whole else tiles.levels[list(channels)], colours.BACKGROUND)
    image = Image.fromarray(pixels)
    image.putpalette(palette("viridis")[: colours.PHOTOGRAPH].tobytes())
    options = {"compress_level": 1, "compress_type": _RUN_LENGTHS, "transparency": colours.BACKGROUND}
    return _picture(image, columns, tiles.levels.shape, **options)


def _filters_picture(filters: NDArray[np.float32]) -> SimpleNamespace:
    filters = np.where(np.isfinite(filters), filters, 0)
    most = np.abs(filters).max(axis=tuple(range(1, filters.ndim)), keepdims=True)
    shares = filters / np.where(most > 0, most, 1) / 2 + 0.5
    if filters.ndim == 4:
        opaque = np.insert((shares * 255).round().astype(np.uint8), 3, 255, axis=3)
        pixels, columns = _mosaic(opaque, 0)
        image = Image.fromarray(pixels)
    else:
        pixels, columns = _mosaic((shares * (colours.LEVELS - 1)).round().astype(np.uint8), colours.BACKGROUND)
        image = Image.fromarray(pixels)
        image.putpalette(palette("RdBu_r")[: colours.PHOTOGRAPH].tobytes())
        image.info["transparency"] = colours.BACKGROUND
    return _picture(image, columns, filters.shape)


def _picture(image: Image.Image, columns: int, maps: tuple[int, ...], **options: Any) -> SimpleNamespace:
    """A picture of ``maps`` ``(C, h, w, ...)``, ``columns`` in a row; ``options`` go to Pillow.

    On a screen each pixel is ``zoom`` pixels wide; ``about`` is what the script knows of it.
    """
    zoom = max(1, min(_WIDEST // image.width, _HIGHEST // maps[1]))
    about = {"height": maps[1], "width": maps[2], "columns": columns}
    sizes = {"columns": columns, "width": image.width, "height": image.height, "zoom": zoom}
    return SimpleNamespace(address=png_address(image, **options), about=about, **sizes)


def _mosaic(maps: NDArray[np.uint8], background: int) -> tuple[NDArray[np.uint8], int]:
    """Maps ``(C, h, w, ...)`` in rows from left to right, each with a gap to its right and below, and their columns."""
    count, height, width, *colour = maps.shape
    columns = max(1, min(count, round(math.sqrt(2 * count * (height + GAP) / (width + GAP)))))
    rows = math.ceil(count / columns)
    cells = np.full((rows * columns, height + GAP, width + GAP, *colour), background, np.uint8)
    cells[:count, :height, :width] = maps
    pixels = cells.reshape(rows, columns, *cells.shape[1:]).swapaxes(1, 2)
    return pixels.reshape(rows * (height + GAP), columns * (width + GAP), *colour), columns


MAPS, HEAT = "viridis", "inferno"
"""Colour maps of feature maps, and of Grad-CAM over an image."""

_LEAST, _MOST, _SMALL = 224, 640, 56  # widths of images and of thumbnails, in pixels


def seen_image(seen: Image.Image) -> Image.Image:
    """What the network saw, in a size for the page: small ones magnified by a whole number, large ones reduced."""
    if seen.width > _MOST:
        return seen.resize((_MOST, max(1, round(seen.height * _MOST / seen.width))), Image.Resampling.LANCZOS)
    factor = -(-_LEAST // seen.width)
    return seen.resize((seen.width * factor, seen.height * factor), Image.Resampling.NEAREST)


def over_image(seen: Image.Image, cam: NDArray[np.float32], width: int) -> Image.Image:
    """A class activation map ``(h, w)`` over what the network saw."""
    height = max(1, round(seen.height * width / seen.width))
    ground = seen if width > seen.width else seen.resize((width, height), Image.Resampling.BILINEAR)
    heat = Heat(cam, (0, 0, ground.width, ground.height), max(0.0, float(cam.max())))
    return draw_heat(ground, heat, width, HEAT)


def layer_cam(inspection: Inspection, layer: int, image: int = 0, width: int = _SMALL) -> Image.Image | None:
    """The Grad-CAM of a layer over what the network saw; None if it has none."""
    maps = inspection.layers[layer].images[image]
    if maps is None or maps.cam is None:
        return None
    return over_image(inspection.images[image].seen, maps.cam, width)


def small_cam(inspection: Inspection, layer: int) -> str:
    """The address of a thumbnail of `layer_cam` for the first image that has one; empty if none has."""
    cam = next(filter(None, (layer_cam(inspection, layer, at) for at in range(len(inspection.images)))), None)
    return "" if cam is None else jpeg_address(cam, 80)


def map_or_cam(
    inspection: Inspection, layer: int, place: Place, image: int, width: int = _SMALL
) -> tuple[Image.Image | None, int | None]:
    """The map of the first channel of a place in its own size, and its number; else the Grad-CAM of the layer."""
    maps, channel = inspection.layers[layer].images[image], place.channels[0] if place.channels else None
    if maps is None or channel not in maps.tiles.channels or maps.tiles.values:
        return layer_cam(inspection, layer, image, width), None
    return to_image(maps.tiles.levels[maps.tiles.channels.index(channel)], MAPS), channel
