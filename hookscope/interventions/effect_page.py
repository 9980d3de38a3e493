"""The page of an effect: the maps of each call before, after and their difference, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from hookscope.drawing import (
    LEAST_WIDTH,
    MARGIN,
    MOST_PIXELS,
    Grid,
    Origin,
    Page,
    Pixels,
    colour_bar,
    colours,
    draw_alike,
    input_size_of,
    placed,
    shape_text,
    stamp,
    text_pixels,
    to_image,
    with_provenance,
)
from hookscope.errors import HookscopeError, NoMapError, UsageError
from hookscope.findings import counted, percent
from hookscope.hooks import InputSize
from hookscope.images import InputImage
from hookscope.interventions.effect import Effect, MovedLayer
from hookscope.interventions.effect_maps import NAMES, MovedMaps, moved_maps
from hookscope.models import LoadedModel

_GRID = 480  # approximate side of each of the three grids, unless its maps are larger
_LARGEST_MAP = 240
_BETWEEN = 30
_LEAST_GRID = 260  # half the width of the longer colour bar
_BOLD = 4  # channels with a bold number: those to look at first
_CAPTIONS = ("before", "after", "difference: after - before")
_SCALES = ("before and after:", "difference:")


@dataclass(frozen=True)
class _Part:
    """A part of a call's output: its maps, and three grids if a channel moved."""

    maps: MovedMaps
    grids: Sequence[Grid]

    @property
    def drawn(self) -> int:
        return len(self.maps.channels) - (self.grids[0].left_out if self.grids else 0)


@dataclass(frozen=True)
class _Band:
    """A call: its parts, or the error that explains why it cannot be drawn."""

    layer: MovedLayer
    parts: Sequence[_Part]
    why: HookscopeError | None


def draw_effect(
    effect: Effect,
    photograph: Image.Image | InputImage | None = None,
    net: LoadedModel | nn.Module | None = None,
    *,
    interventions: Sequence[str] = (),
    seed: int | None = None,
    most_channels: int = 16,
    cmap: str = "RdBu_r",
) -> Image.Image:
    """Draw each kept call before and after the interventions, and the difference.

    The channels that moved most come first; channels that did not move are not drawn. The scales are symmetric about 0:
    one for before and after, and one for the difference. `read_sheet` gives the values of a file of such a picture. The
    image holds the facts of its maps as JSON in ``image.info["hookscope"]``.

    Args:
        effect: What `intervention_effect` returns, with the calls that it kept.
        photograph: The photograph that the input was made of.
        net: The model, which says where the channels of its layers are; a `LoadedModel` also names weights and
            preprocessing.
        interventions: What the heading says of them, such as ``layer3 zero:channels=0-31``; by default what changed.
        seed: Seed of the random numbers, for the heading.
        most_channels: Largest number of channels of a call that are drawn.
        cmap: A colour map of matplotlib.

    Raises:
        NoMapError: if no call was kept, or none has a map or a vector that can be compared.
        UsageError: for an unknown colour map, or a page of more than 160 million pixels.

    Example:
        >>> import hookscope, torch
        >>> from hookscope.interventions import Zero
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3))
        >>> changes = {0: Zero(channels=1)}
        >>> effect = hookscope.intervention_effect(net, (torch.ones(1, 3, 8, 8),), changes, keep="all")
        >>> draw_effect(effect, net=net).mode
        'P'
    """
    drawable = [layer for layer in effect.layers if layer.before is not None or layer.after is not None]
    model = net.model if isinstance(net, LoadedModel) else net
    modules = dict(model.named_modules(remove_duplicate=False)) if model is not None else {}
    origin, shown = Origin.of(net, photograph), None
    if photograph is not None and isinstance(net, LoadedModel):
        shown = input_size_of(net.prepare(photograph))
    most = MOST_PIXELS // max(1, len(drawable))
    bands = [_band(layer, modules.get(layer.call.name), shown, most_channels, most) for layer in drawable]
    if effect.layers and not drawable:
        raise NoMapError(
            "the effect holds no activations", do="intervention_effect keeps those of keep= and keep_changed="
        )
    _check_drawn(bands)
    widths = [grid.layout.width for band in bands for part in band.parts for grid in part.grids]
    step = max([_LEAST_GRID, *widths]) + _BETWEEN  # the same for all bands, so that they form three columns
    page, places = Page(), []
    _add_heading(page, origin, interventions or list(effect.changed), seed, _text_width(step))
    for band in bands:
        places += _add_band(page, band, step)
    if page.width * page.height > 2 * MOST_PIXELS:
        size = f"it would have {page.width:,}x{page.height:,} pixels"
        raise UsageError(f"a page of {counted(len(bands), 'layer')} is too large", size, "choose fewer")
    image = to_image(page.pixels(MARGIN), cmap)
    return with_provenance(
        image,
        {
            **origin.facts(),
            "interventions": list(interventions),
            "seed": seed,
            "scale": "symmetric",
            "cmap": cmap,
            "levels": colours.LEVELS,
            "overlay": False,
            "size": list(image.size),
            "bands": [_band_facts(band) for band in bands],
            "parts": places,
        },
    )


def _band(layer: MovedLayer, module: nn.Module | None, shown: InputSize | None, most_channels: int, most: int) -> _Band:
    try:
        parts = moved_maps(layer, module, shown, most_channels)
    except NoMapError as error:
        return _Band(layer, (), error)
    return _Band(layer, [_Part(maps, _grids(maps, most // len(parts))) for maps in parts], None)


def _grids(maps: MovedMaps, most: int) -> list[Grid]:
    """The three grids of at most ``most`` pixels together, each about square, with maps as large as possible."""
    if maps.tiles is None:
        return []
    count, height, width = maps.tiles[0].levels.shape
    bold = range(min(_BOLD, count)) if count > _BOLD else ()
    if height * width == 1:
        return draw_alike(maps.tiles, bold, columns=count, most=most // 3)
    side = min(_GRID, math.isqrt(most // 4))  # smaller maps before fewer maps; a quarter is for numbers and bars
    columns = max(1, min(count, math.ceil(math.sqrt(count * height / width))))
    zoom = max(1, min(side // columns, max(_LARGEST_MAP, width)) // width)
    cell = zoom * min(height, width // maps.frames)
    return draw_alike(maps.tiles, bold, columns, cell, frames=maps.frames, most=most // 3)


def _check_drawn(bands: Sequence[_Band]) -> None:
    if not bands:
        raise NoMapError("no activation to draw", "no chosen call ran after the first that was changed", "choose it")
    call, why = bands[0].layer.call, bands[0].why
    if why is not None and all(band.why for band in bands):
        raise NoMapError(f"{call.key or 'the model'} ({call.type}) cannot be drawn: {why.asked}", why.exists, why.do)


def _text_width(step: int) -> int:
    return max(LEAST_WIDTH, 3 * step - _BETWEEN)


def _add_heading(page: Page, origin: Origin, interventions: Sequence[str], seed: int | None, width: int) -> None:
    words = "   then   ".join(interventions) or "interventions that changed nothing"
    page.add_text(f"{origin.model} without and with {words}".strip(), width, size=15, bold=True)
    if about := [*origin.words, *([] if seed is None else [f"seed {seed}"])]:
        page.add_text(", ".join(about), width, 2)
    if origin.alarm:
        page.add_text(origin.alarm, width, 2, alarm=True)
    hint = "The channels that moved most come first. Bar: root mean square of the map, one measure for all three."
    page.add_text(hint, width, 2)


def _add_band(page: Page, band: _Band, step: int) -> list[dict[str, Any]]:
    """Add the text and grids of a call; the places of the maps."""
    layer, width = band.layer, _text_width(step)
    title = f"{layer.call.key or layer.call.type}   {layer.call.type}   {shape_text(layer.shape)}"
    page.add_text(title + ("   changed here" if layer.changed else ""), width, 18, 13, bold=True)
    page.add_text(_distance_words(layer), width, 2)
    if band.why is not None:
        page.add_text(f"not drawn: {band.why}", width, 2)
    return [place for part in band.parts for place in _add_part(page, band, part, step)]


def _distance_words(layer: MovedLayer) -> str:
    measures = {"relative L2": layer.relative_l2, "cosine": layer.cosine}
    words = [f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value in measures.items()]
    return "   ".join([*words, *([f"NaN or Inf after: {layer.nonfinite:,}"] if layer.nonfinite else [])])


def _add_part(page: Page, band: _Band, part: _Part, step: int) -> list[dict[str, Any]]:
    maps, width = part.maps, _text_width(step)
    if len(band.parts) > 1:
        page.add_text(maps.part or "maps", width, 8, bold=True)
    page.add_text(_moved_words(maps, part.drawn), width, 2)
    if maps.tiles is None:
        return []
    highs = [float(tiles.high[0]) for tiles in maps.tiles[1:]]
    for line in _notes(maps, highs[0]):
        page.add_text(line, width, 2)
    block, lefts, down = _side_by_side(part.grids, highs, step)
    top = page.add(block, 8)
    name = ", ".join(filter(None, [band.layer.call.key, maps.part]))
    return [
        placed(f"{name} {which}".strip(), maps.axes, grid, MARGIN + left, MARGIN + top + down)
        for which, grid, left in zip(NAMES, part.grids, lefts, strict=True)
    ]


def _moved_words(maps: MovedMaps, drawn: int) -> str:
    if not maps.moved:
        return f"nothing moved: each of {counted(maps.total, 'channel')} is as before"
    first = ", ".join(
        f"{channel} ({'NaN or Inf' if math.isinf(distance) else f'{distance:.3g}'})"
        for channel, distance in zip(maps.channels[:_BOLD], maps.distances, strict=False)
    )
    words = f"{maps.moved:,} of {counted(maps.total, 'channel')} moved"
    words += f", {drawn} drawn" if drawn < maps.moved else ""
    return f"{words}; most (root mean square of the difference): {first}"


def _notes(maps: MovedMaps, high: float) -> list[str]:
    """Notes for reading the grids; the scale of before and after ends at ``high``."""
    notes = []
    if maps.largest or math.isfinite(maps.distances[0]):
        share = percent(maps.largest / high)
        notes.append(f"largest |difference| {maps.largest:.4g}, {share} of the scale of before and after")
    if any(maps.nonfinite):
        counts = ", ".join(f"{count:,} {name}" for name, count in zip(NAMES, maps.nonfinite, strict=True))
        notes.append(f"NaN magenta, +Inf red, -Inf light blue (!): {counts}")
    if maps.frames > 1:
        notes.append(f"{maps.frames} frames a channel, left to right")
    return notes


def _side_by_side(grids: Sequence[Grid], highs: Sequence[float], step: int) -> tuple[Pixels, list[int], int]:
    """The grids ``step`` apart with their captions and two bars, which end at ``highs``.

    Also the x of each grid, and the y of all.
    """
    captions = [text_pixels(caption, 12, True) for caption in _CAPTIONS]
    bars = [colour_bar(name, -high, high) for name, high in zip(_SCALES, highs, strict=True)]
    top = captions[0].shape[0] + 4
    down = top + bars[0].shape[0] + 4
    high, wide = grids[0].pixels.shape
    last = max(wide, captions[2].shape[1], bars[1].shape[1])
    block = np.full((down + high + 1, 2 * step + last + 2), colours.BACKGROUND, np.uint8)
    lefts = [1 + at * step for at in range(3)]
    for bar, left in zip(bars, (lefts[0], lefts[2]), strict=True):
        stamp(block, bar, left, top)
    for grid, caption, left in zip(grids, captions, lefts, strict=True):
        stamp(block, caption, left, 0)
        stamp(block, grid.pixels, left, down)
        _outline(block, grid, left, down)
    return block, lefts, down


def _outline(block: Pixels, grid: Grid, left: int, top: int) -> None:
    """Draw a line around each map: 0 has the colour of the background, and many changed values are 0."""
    layout = grid.layout
    for at in range(len(grid.tiles.channels) - grid.left_out):
        row, column = divmod(at, layout.columns)
        x, y = left + column * layout.step_x, top + row * layout.step_y + layout.label
        rows, columns = slice(y - 1, y + layout.map_height + 1), slice(x - 1, x + layout.map_width + 1)
        block[rows, [x - 1, x + layout.map_width]] = colours.TEXT_FAINT
        block[[y - 1, y + layout.map_height], columns] = colours.TEXT_FAINT


def _band_facts(band: _Band) -> dict[str, Any]:
    layer = band.layer
    return {
        "layer": layer.call.name,
        "call": layer.call.call,
        "index": layer.call.index,
        "order": layer.call.order,
        "type": layer.call.type,
        "shape": layer.shape,
        "changed": layer.changed,
        "relative_l2": layer.relative_l2 if math.isfinite(layer.relative_l2 or 0) else None,
        "cosine": layer.cosine,
        "nonfinite": layer.nonfinite,
        "why_not": str(band.why) if band.why else "",
        "parts": [part.maps.facts(part.drawn) for part in band.parts],
    }
