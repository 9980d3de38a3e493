"""Text in pictures: its font and width, how it wraps, and its pixels as palette indices.

DejaVu Sans, a part of matplotlib, is the font of all pictures. Each script that it lacks is drawn with one font of the
system. Emoji, and what no font has, become boxes.
"""

from __future__ import annotations

import contextlib
import math
import os
import unicodedata
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from hookscope.drawing import colours
from hookscope.system import cache as stored

Pixels = NDArray[np.uint8]

LABEL_HEIGHT = 14
_LABEL_SIZE = 11
_BOX = 0.5  # matplotlib's box for a character that no font has is wider than Pillow's, in letter heights
_HINTED = 1.06  # matplotlib draws small letters at whole pixels: lines are up to 5 % wider than their outlines
_EAST_ASIAN = "Chinese, Japanese or Korean"


class FontWarning(UserWarning):
    """No installed font has some characters of a picture."""


@dataclass(frozen=True)
class FallbackFont:
    path: str
    family: str
    style: str
    characters: frozenset[int]

    @property
    def order(self) -> tuple[bool, bool, int]:
        """Fonts without serifs that are neither bold nor italic come first, then those with many characters."""
        other = any(word in self.family for word in ("Serif", "Mono", "Ming", "Unifont"))
        return other, self.style not in ("Regular", "Book", "Roman", "Normal"), -len(self.characters)


def font_parts(text: str) -> list[tuple[str, FallbackFont | None]]:
    """``text`` cut where the font changes, with the font of each part; None is DejaVu Sans."""
    if text.isascii():
        return [(text, None)]
    parts: list[tuple[str, FallbackFont | None]] = []
    for character in text:
        face = parts[-1][1] if parts and _joins(character) else _font_of(character)
        if parts and parts[-1][1] == face:
            parts[-1] = (parts[-1][0] + character, face)
        else:
            parts.append((character, face))
    return parts


def font_families(text: str) -> list[str]:
    """The families with which matplotlib draws ``text``: DejaVu Sans, then those for the characters that it lacks."""
    faces = {face.path: face for _, face in font_parts(text) if face is not None}
    known = {entry.fname for entry in font_manager.fontManager.ttflist} if faces else set()
    for path in faces.keys() - known:
        font_manager.fontManager.addfont(path)
    return ["DejaVu Sans", *dict.fromkeys(face.family for face in faces.values())]


def _joins(character: str) -> bool:
    """Whether ``character`` changes the one before it, such as an accent."""
    return unicodedata.category(character) in ("Mn", "Me", "Cf")


@lru_cache(maxsize=4096)
def _font_of(character: str) -> FallbackFont | None:
    """The font of the script of a character; None if DejaVu Sans has it, if the font lacks it, and for emoji."""
    if ord(character) in _dejavu_characters() or unicodedata.category(character) in ("So", "Sk"):
        return None
    wide = unicodedata.east_asian_width(character) in "WF"
    script = _EAST_ASIAN if wide else unicodedata.name(character, "unknown").split()[0].capitalize()
    face = _font_of_script(script, character)
    if face is None or ord(character) not in face.characters:
        _warn(script)
        return None
    return face


_FONTS: dict[str, FallbackFont | None] = {}  # of each script that was met


def _font_of_script(script: str, character: str) -> FallbackFont | None:
    """The font of a script: the preferred one that has ``character``. Reading all fonts takes up to a second."""
    if script not in _FONTS:
        kept = stored.load("font", {"script": script})
        faces = _read([kept]) if isinstance(kept, str) else iter(())
        face = next((face for face in faces if ord(character) in face.characters), None)
        if face is None:
            having = (face for face in _installed() if ord(character) in face.characters)
            face = min(having, key=lambda face: face.order, default=None)
            if face is not None:
                stored.store("font", {"script": script}, face.path)
        _FONTS[script] = face
    return _FONTS[script]


@cache
def _warn(script: str) -> None:
    advice = "Noto Sans CJK" if script == _EAST_ASIAN else f"Noto Sans {script}"
    words = f"no installed font has some {script} characters: pictures show boxes instead"
    warnings.warn(f"{words}; install a font that has them, such as {advice}", FontWarning, stacklevel=2)


@cache
def _dejavu_characters() -> frozenset[int]:
    return frozenset(FT2Font(_dejavu("DejaVuSans.ttf")).get_charmap())


@cache
def _installed() -> list[FallbackFont]:
    """All fonts of the system and those that somebody added to matplotlib."""
    added = (entry.fname for entry in font_manager.fontManager.ttflist)
    return list(_read(sorted({*font_manager.findSystemFonts(), *added})))


def _read(paths: Iterable[str]) -> Iterator[FallbackFont]:
    """The fonts with outlines, which matplotlib draws too; not a font that has a box for every character."""
    for path in paths:
        with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError):  # not a font that FreeType can read
            font = FT2Font(path)
            if font.scalable and "LastResort" not in font.family_name.replace(" ", ""):
                yield FallbackFont(path, font.family_name, font.style_name, frozenset(font.get_charmap()))


class _Letters(ImageFont.FreeTypeFont):
    """DejaVu Sans with the fonts of other scripts.

    Pillow shapes Arabic and turns right-to-left text within a part of one font; the parts stand from left to right.
    """

    def getlength(self, text: Any, *more: Any, **named: Any) -> float:
        parts = font_parts(text)
        if len(parts) == 1 and parts[0][1] is None:
            return super().getlength(text, *more, **named)
        return sum(self._font(face).getlength(part) for part, face in parts)

    def getmask2(self, text: Any, *more: Any, **named: Any) -> Any:
        parts = font_parts(text)
        if len(parts) == 1 and parts[0][1] is None:
            return super().getmask2(text, *more, **named)
        ascent, descent = self.getmetrics()
        line = Image.new("L", (math.ceil(self.getlength(text)), ascent + descent))
        x = 0.0
        for part, face in parts:
            letters = self._font(face)
            # else a part of right-to-left letters would turn the whole part round, with its spaces and brackets
            direction = "ltr" if letters.layout_engine == ImageFont.Layout.RAQM else None
            ImageDraw.Draw(line).text((x, ascent), part, 255, letters, "ls", direction=direction)
            x += letters.getlength(part)
        return line.im, (0, 0)

    def _font(self, face: FallbackFont | None) -> ImageFont.FreeTypeFont:
        return _sized(face.path if face else str(self.path), self.size)


@cache
def _sized(path: str, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


@cache
def font(size: int, bold: bool = False) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """The letters of a size in pixels; Pillow's own if it was built without FreeType."""
    try:
        return _Letters(_dejavu("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"), size)
    except (OSError, ImportError):
        return ImageFont.load_default()


def _dejavu(name: str) -> str:
    return os.path.join(matplotlib.get_data_path(), "fonts", "ttf", name)


def inches(text: str, points: float, bold: bool = False) -> float:
    """The largest width of a line as matplotlib draws it."""
    foreign = [letter for letter in text if ord(letter) not in _dejavu_characters() and not _joins(letter)]
    boxes = sum(_font_of(letter) is None for letter in foreign)
    return (float(font(100, bold).getlength(text)) / 100 + _BOX * boxes) * points / 72 * _HINTED


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
    steps = (np.asarray(mask).astype(np.uint16) * (colours.TEXT - colours.BACKGROUND) + 127) // 255
    return (colours.BACKGROUND + steps).astype(np.uint8)


@lru_cache(maxsize=4096)  # the sheets of a model have the same numbers
def number_pixels(text: str, bold: bool = False) -> Pixels:
    """A label composed of its letters, which are drawn once each."""
    return np.concatenate([text_pixels(letter, bold=bold)[:LABEL_HEIGHT] for letter in text], axis=1)


def stamp(pixels: Pixels, text: Pixels, x: int, y: int) -> None:
    """Copy ``text`` into ``pixels`` at ``x``, ``y``, cut off at the edges."""
    target = pixels[y : y + text.shape[0], x : x + text.shape[1]]
    target[:] = text[: target.shape[0], : target.shape[1]]
