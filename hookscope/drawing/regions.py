"""Classes of pixels and boxes of objects over an image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.drawing.heat import PALE, Box
from hookscope.drawing.text import font

_OPACITY = 0.6
_CLASSES = 20  # colours; further classes begin again
_TEXT = 12

Colour = tuple[int, int, int]


def class_colour(index: int) -> Colour:
    """The colour of class ``index``: strong colours first, then the pale ones of matplotlib's tab20."""
    at = index % _CLASSES
    red, green, blue = colormaps["tab20"].colors[2 * (at % 10) + at // 10]  # type: ignore[attr-defined]
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_classes(image: Image.Image, mask: NDArray[np.int64]) -> Image.Image:
    """The image in grey under the colours of the classes ``(h, w)``; -1 stands for none."""
    highest = int(mask.max(initial=0))
    table = np.array([class_colour(at) for at in range(highest + 1)] + [(0, 0, 0)], np.float32)
    way = Image.Resampling.NEAREST
    classes = np.asarray(Image.fromarray(mask.astype(np.int32)).resize(image.size, way))
    ground = np.asarray(PALE.under(image)).astype(np.float32)
    opacity = np.where(classes < 0, 0, _OPACITY)[..., None]
    return Image.fromarray((ground * (1 - opacity) + table[classes] * opacity).round().astype(np.uint8))


def draw_boxes(image: Image.Image, boxes: Sequence[Box], colours: Sequence[Colour], scale: float = 1.0) -> Image.Image:
    """The image with numbered boxes, the first on top; positions are multiplied by ``scale``."""
    drawn, letters = image.copy(), font(_TEXT, bold=True)
    pen = ImageDraw.Draw(drawn)
    for number, (box, colour) in reversed([*enumerate(zip(boxes, colours, strict=True))]):
        left, top, right, bottom = (side * scale for side in box)
        right, bottom = max(left, right), max(top, bottom)
        pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=(0, 0, 0), width=4)
        pen.rectangle((left, top, right, bottom), outline=colour, width=2)
        x, y = max(0, min(left, drawn.width - 14)), max(0, min(top, drawn.height - 16))
        pen.rectangle((x, y, x + letters.getlength(str(number)) + 6, y + 15), fill=colour)
        pen.text((x + 3, y), str(number), fill=(0, 0, 0) if sum(colour) > 380 else (255, 255, 255), font=letters)
    return drawn
