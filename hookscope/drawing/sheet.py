"""The sheet of a call: a header, the channel grids, and the provenance."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import nn

from hookscope.drawing import colours
from hookscope.drawing.grid import FRAME_GAP, MOST_PIXELS, Grid, draw_grid, strongest, to_image
from hookscope.drawing.page import LEAST_WIDTH, MARGIN, Page, colour_bar
from hookscope.drawing.reduce import ActivationSummary, Part
from hookscope.hooks import Call, Shape
from hookscope.images import InputImage
from hookscope.models import LoadedModel, package_versions

_HEAD = 15


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sheet comes from; ``second`` is the name and SHA-256 of the other image of optical flow."""

    model: str
    weights: str
    image: str
    sha256: str
    preprocess: str
    second: tuple[str, str] | None = None

    @classmethod
    def of(cls, net: LoadedModel | nn.Module | None, *pictures: InputImage | Image.Image) -> Origin:
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


@dataclass(frozen=True, slots=True)
class Style:
    """Layout of a sheet: maps in a row, smallest side of a map in pixels, colour map, grid without text."""

    columns: int | None = None
    cell: int | None = None
    cmap: str = "viridis"
    plain: bool = False


@dataclass(frozen=True)
class Sheet:
    """An image and its provenance; ``left_out`` channels exceeded the limit on pixels."""

    image: Image.Image
    provenance: dict[str, Any]
    left_out: int


def draw_sheet(
    summary: ActivationSummary,
    call: Call,
    origin: Origin,
    style: Style | None = None,
    overlay: Sequence[Sequence[Image.Image]] | None = None,
) -> Sheet:
    """Draw the sheet of one call, over ``overlay`` if given: the frames of each item of the batch.

    Maps of other items (a head's proposals) and of a single position have no place in a frame and are not laid over.
    """
    style = style or Style()
    margin = 0 if style.plain else MARGIN
    most = MOST_PIXELS // len(summary.parts)
    grids = [draw_grid(part.tiles, style.columns, style.cell, style.plain, part.frames, most) for part in summary.parts]
    page = Page()
    if not style.plain:
        _add_header(page, summary, call, origin, max([LEAST_WIDTH, *(grid.layout.width for grid in grids)]))
    tops = []
    for part, grid in zip(summary.parts, grids, strict=True):
        if not style.plain:
            _add_part_header(page, part, grid, len(summary.parts) > 1)
        tops.append(page.add(grid.pixels, 6 if page.height else 0))
    image = to_image(page.pixels(margin), style.cmap)
    if overlay is not None:
        places = [(margin, margin + top) for top in tops]
        image = _laid_over(image, summary.parts, grids, places, overlay)
    provenance = _provenance(summary, call, origin, style, overlay is not None)
    provenance["size"] = list(image.size)
    provenance["parts"] = [
        placed(part.name, part.axes, grid, margin, margin + top)
        for part, grid, top in zip(summary.parts, grids, tops, strict=True)
    ]
    return Sheet(image, provenance, sum(grid.left_out for grid in grids))


def _add_header(page: Page, summary: ActivationSummary, call: Call, origin: Origin, width: int) -> None:
    index = "" if call.index is None else f"   index {call.index}"
    title = f"{call.key or call.type}   {call.type}   {shape_text(summary.shape)}{index}"
    page.add_text(title, width, size=_HEAD, bold=True)
    image = origin.image + (f" and {origin.second[0]}" if origin.second else "")
    page.add_text(f"{origin.model}   weights: {origin.weights}   {image}   {origin.preprocess}", width, 2)
    if summary.low is None or summary.mean is None or summary.high is None:
        words = "no finite value"
    else:
        words = f"values {summary.low:.4g} to {summary.high:.4g}, mean {summary.mean:.4g}"
    words += f"   constant channels: {summary.dead}" if summary.dead else ""
    words += f"   NaN or Inf: {summary.nonfinite} values" if summary.nonfinite else ""
    page.add_text(words, width, 2)


def _add_part_header(page: Page, part: Part, grid: Grid, several: bool) -> None:
    width = max(LEAST_WIDTH, grid.layout.width)
    tiles = part.tiles
    if several:
        size = "x".join(map(str, tiles.levels.shape))
        page.add_text(f"{part.name or 'maps'}   {size} of {part.axes}", width, 10, bold=True)
    if tiles.shared:
        page.add(colour_bar(f"scale: {tiles.scale}, one for all", tiles.low[0], tiles.high[0]), 6)
    else:
        page.add_text(f"scale: {tiles.scale}, each map from its lowest (first colour) to its highest value", width, 4)
    first = ", ".join(str(tiles.channels[at]) for at in strongest(tiles))
    what = "widest range" if grid.layout.bar else "largest |value|"
    hints = f"{what} (bold): {first}" if first else "every value is the same"
    hints += "   bar: range of the map against the widest" if grid.layout.bar else ""
    hints += f"   {part.frames} frames a channel, left to right" if part.frames > 1 else ""
    if bool(tiles.nonfinite.any()):
        bad = [str(tiles.channels[at]) for at in tiles.nonfinite.nonzero()[0][:8]]
        hints += f"   NaN magenta, +Inf red, -Inf light blue (!): {', '.join(bad)}"
    if bool(tiles.constant.any()):
        still = [str(tiles.channels[at]) for at in tiles.constant.nonzero()[0][:8]]
        hints += f"   constant: {', '.join(still)}" + (", ..." if int(tiles.constant.sum()) > 8 else "")
    if grid.left_out:
        hints += f"   {grid.left_out} channels left out: too many pixels, choose with --channels"
    page.add_text(hints, width, 2)


def _laid_over(
    image: Image.Image,
    parts: Sequence[Part],
    grids: Sequence[Grid],
    places: Sequence[tuple[int, int]],
    pictures: Sequence[Sequence[Image.Image]],
) -> Image.Image:
    """Draw the maps half transparent over the network's input; NaN and Inf stay opaque."""
    colour = image.convert("RGB")
    for part, grid, (left, top) in zip(parts, grids, places, strict=True):
        layout = grid.layout
        if part.items > len(pictures) or part.tiles.levels[0].size == 1:
            continue
        frames = pictures[part.item]
        backdrop = Image.new("RGB", (layout.map_width, layout.map_height))
        for at, place in enumerate(layout.frame_places):  # a layer may merge frames: take the middle one of them
            frame = frames[(2 * at + 1) * len(frames) // (2 * part.frames)]
            small = frame.resize((layout.frame_width, layout.map_height), Image.Resampling.BILINEAR)
            backdrop.paste(small, (place.start, 0))
        for at in range(len(part.tiles.channels) - grid.left_out):
            row, column = divmod(at, layout.columns)
            x, y = left + column * layout.step_x, top + row * layout.step_y + layout.label
            box = (x, y, x + layout.map_width, y + layout.map_height)
            values = image.crop(box).point([96 if level < colours.LEVELS else 0 for level in range(256)], "L")
            colour.paste(backdrop, box, values)
    return colour


def _provenance(summary: ActivationSummary, call: Call, origin: Origin, style: Style, overlay: bool) -> dict[str, Any]:
    return {
        **origin.facts(),
        "layer": call.name,
        "call": call.call,
        "index": call.index,
        "type": call.type,
        "shape": summary.shape,
        "scale": summary.parts[0].tiles.scale,
        "cmap": style.cmap,
        "levels": colours.LEVELS,
        "overlay": overlay,
    }


def placed(name: str, axes: str, grid: Grid, x: int, y: int) -> dict[str, Any]:
    """Positions and scales of the maps of ``grid`` drawn at ``x``, ``y``, for `read_sheet`."""
    layout, tiles = grid.layout, grid.tiles
    count = len(tiles.channels) - grid.left_out
    return {
        "part": name,
        "axes": axes,
        "frames": layout.frames,
        "scale": tiles.scale,
        "x": x,
        "y": y + layout.label,
        "columns": layout.columns,
        "step_x": layout.step_x,
        "step_y": layout.step_y,
        "frame_step": layout.frame_width + FRAME_GAP,
        "zoom": layout.zoom,
        "height": tiles.levels.shape[1],
        "width": tiles.levels.shape[2],
        "channels": tiles.channels[:count],
        "low": finite_or_none(tiles.low[:count]),
        "high": finite_or_none(tiles.high[:count]),
    }


def finite_or_none(values: Iterable[float]) -> list[float | None]:
    """Numbers for JSON: None for NaN and Inf."""
    return [float(value) if math.isfinite(value) else None for value in values]


def shape_text(shape: Shape) -> str:
    """``1x64x112x112``, or the shape of each part with its name."""
    if isinstance(shape, dict):
        return "  ".join(f"{part}: {shape_text(part_shape)}" for part, part_shape in shape.items())
    return "x".join(map(str, shape)) if shape else "-"
