"""Text as palette indices: drawn, broken into lines, stamped into a picture."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.drawing import colours

Pixels = NDArray[np.uint8]


LABEL_HEIGHT = 14
_TEXT_SIZE = 11


@lru_cache(maxsize=512)
def text_pixels(text: str, size: int = _TEXT_SIZE, bold: bool = False) -> Pixels:
    """``text`` as palette indices, dark on background, antialiased in four steps."""
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


def number_pixels(text: str, bold: bool = False) -> Pixels:
    """A label put together from its letters, each drawn once."""
    return np.concatenate([text_pixels(letter, bold=bold)[:LABEL_HEIGHT] for letter in text], axis=1)


def wrapped(text: str, width: int, size: int = _TEXT_SIZE, bold: bool = False) -> list[str]:
    """``text`` in lines of at most ``width`` pixels, broken between words, and within one that is longer than a line.

    Example:
        >>> wrapped("one two", 30)
        ['one', 'two']
    """
    length = colours.font(size, bold).getlength
    if length(text) <= width:  # the usual case, told by one measurement
        return [text.rstrip()]
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if line and length(joined) > width:
            lines.append(line.rstrip())
            joined = word
        line = joined
        while len(line) > 1 and length(line) > width:
            fitting = next(at for at in range(len(line) - 1, 0, -1) if at == 1 or length(line[:at]) <= width)
            lines.append(line[:fitting])
            line = line[fitting:]
    return [*lines, line.rstrip()] if line.strip() or not lines else lines
