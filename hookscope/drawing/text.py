"""Text in pictures: its font and width, how it wraps, and its pixels as palette indices."""

from __future__ import annotations

import contextlib
import math
import os
from bisect import bisect_right
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from hookscope.drawing import colours
from hookscope.drawing.fonts import boxes, font_parts

Pixels = NDArray[np.uint8]

LABEL_HEIGHT = 14
_LABEL_SIZE = 11
_BOX = 0.5  # matplotlib's box for a character that no font has is wider than Pillow's, in letter heights
_EMOJI_SIZES = (109, 160)
_HINTED = 1.06  # matplotlib draws small letters at whole pixels: lines are up to 5 % wider than their outlines


class Letters(ImageFont.FreeTypeFont):
    """DejaVu Sans, a part of matplotlib, and fonts of the system for the characters that it lacks.

    Pillow shapes Arabic and turns right-to-left text within a part of one font; the parts stand from left to right.
    """

    def getlength(self, text: Any, *more: Any, **named: Any) -> float:
        parts = font_parts(text)
        if len(parts) == 1 and parts[0][1] is None:
            return super().getlength(text, *more, **named)
        return sum(_part_length(part, face.path if face else str(self.path), self.size) for part, face in parts)

    def getmask2(self, text: Any, *more: Any, **named: Any) -> Any:
        parts = font_parts(text)
        if len(parts) == 1 and parts[0][1] is None:
            return super().getmask2(text, *more, **named)
        ascent, descent = self.getmetrics()
        line = Image.new("L", (math.ceil(self.getlength(text)), ascent + descent))
        x = 0.0
        for part, face in parts:
            path = face.path if face else str(self.path)
            letters = _sized(path, self.size)
            if letters.size == self.size:
                # else a part of right-to-left letters would turn the whole part round, with its spaces and brackets
                direction = "ltr" if letters.layout_engine == ImageFont.Layout.RAQM else None
                ImageDraw.Draw(line).text((x, ascent), part, 255, letters, "ls", direction=direction)
            else:
                line.paste(_ink_of_colours(part, letters, self.size), (round(x), 0))
            x += _part_length(part, path, self.size)
        return line.im, (0, 0)


@cache
def font(size: int, bold: bool = False) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """The letters of a size in pixels; Pillow's own if it was built without FreeType."""
    try:
        return Letters(_dejavu("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"), size)
    except (OSError, ImportError):
        return ImageFont.load_default()


def _dejavu(name: str) -> str:
    return os.path.join(matplotlib.get_data_path(), "fonts", "ttf", name)


@cache
def _sized(path: str, size: float) -> ImageFont.FreeTypeFont:
    """A font in ``size``, or in the size of its pictures if it has colour emoji (Noto 109 pixels, Apple 160)."""
    for tried in (size, *_EMOJI_SIZES):
        with contextlib.suppress(OSError):
            return ImageFont.truetype(path, tried)
    return ImageFont.truetype(_dejavu("DejaVuSans.ttf"), size)


def _part_length(part: str, path: str, size: float) -> float:
    letters = _sized(path, size)
    return float(letters.getlength(part)) * size / letters.size


def _ink_of_colours(part: str, letters: ImageFont.FreeTypeFont, size: float) -> Image.Image:
    """Colour emoji in greys of ink, made smaller to ``size``."""
    large = Image.new("RGBA", (math.ceil(letters.getlength(part)), sum(letters.getmetrics())), "white")
    ImageDraw.Draw(large).text((0, 0), part, font=letters, embedded_color=True)
    ink = ImageOps.autocontrast(ImageOps.invert(large.convert("L")))
    return ink.resize([max(1, round(side * size / letters.size)) for side in large.size])


def inches(text: str, points: float, bold: bool = False) -> float:
    """The largest width of a line as matplotlib draws it."""
    return (float(font(100, bold).getlength(text)) / 100 + _BOX * boxes(text)) * points / 72 * _HINTED


def wrapped(text: str, width: float, measure: Callable[[str], float], indent: str = "") -> list[str]:
    """Break ``text`` between words into lines of at most ``width`` by ``measure``; longer words are broken too."""
    if measure(text) <= width:
        return [text.rstrip()]
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if measure(joined) > width:
            if line:
                lines.append(line.rstrip())
                joined = indent + word
            while (end := _letters_that_fit(joined, width, measure)) < len(joined):
                lines.append(joined[:end])
                joined = joined[end:]
        line = joined
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


def _letters_that_fit(line: str, width: float, measure: Callable[[str], float]) -> int:
    """How many letters of ``line`` fit, at least one; never measures much more of a long line than that."""
    most = 1
    while most < len(line) and measure(line[:most]) <= width:
        most = min(2 * most, len(line))
    return max(1, bisect_right(range(1, most + 1), width, key=lambda end: measure(line[:end])))


def wrapped_lines(text: str, width: float, points: float, most: int, indent: str = "") -> list[str]:
    """`wrapped` in inches of a plot, with at most ``most`` lines: the last line is cut off."""
    lines = wrapped(text, width, lambda line: inches(line, points), indent)
    if len(lines) > most:
        lines[most - 1 :] = [fitting(" ".join(lines[most - 1 :]), width, points)]
    return lines


def fitting(line: str, width: float, points: float, bold: bool = False) -> str:
    """``line`` cut off at ``width`` inches."""
    if inches(line, points, bold) <= width:
        return line
    while len(line) > 1 and inches(f"{line}…", points, bold) > width:
        line = line[: min(len(line) - 1, int(len(line) * width / inches(line, points, bold)))]
    return f"{line}…"


@lru_cache(maxsize=512)
def text_pixels(text: str, size: int = _LABEL_SIZE, bold: bool = False) -> Pixels:
    """``text`` as palette indices, dark on background, antialiased in four steps."""
    letters = font(size, bold)
    mask = Image.new("L", (max(1, round(letters.getlength(text))), round(size * 1.35)), 0)
    ImageDraw.Draw(mask).text((0, 0), text, fill=255, font=letters)
    steps = np.array(
        [colours.BACKGROUND, colours.TEXT_FAINT, colours.TEXT_HALF, colours.TEXT_STRONG, colours.TEXT], np.uint8
    )
    pixels: Pixels = steps[(np.asarray(mask).astype(np.uint16) * 4 + 127) // 255]
    return pixels


@lru_cache(maxsize=4096)  # the sheets of a model have the same numbers
def number_pixels(text: str, bold: bool = False) -> Pixels:
    """A label composed of its letters, which are drawn once each."""
    return np.concatenate([text_pixels(letter, bold=bold)[:LABEL_HEIGHT] for letter in text], axis=1)


def stamp(pixels: Pixels, text: Pixels, x: int, y: int) -> None:
    """Copy ``text`` into ``pixels`` at ``x``, ``y``, cut off at the edges."""
    target = pixels[y : y + text.shape[0], x : x + text.shape[1]]
    target[:] = text[: target.shape[0], : target.shape[1]]
