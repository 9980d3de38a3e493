"""What the network saw, drawn beside the maps, with a box around what the middle unit of the map sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from hookscope.drawing import colours
from hookscope.drawing.reduce import ActivationSummary
from hookscope.drawing.text import LABEL_HEIGHT, Pixels, stamp, text_pixels

_LEAST, _MOST = 144, 480  # longest side of the photograph, between them that of a map

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
