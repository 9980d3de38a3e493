"""A page of palette indices: text, colour bars and grids, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hookscope.drawing import colours
from hookscope.drawing.text import Pixels, font, stamp, text_pixels, wrapped
from hookscope.errors import printable

MARGIN = 14
LEAST_WIDTH = 660
TEXT_SIZE = 12


@dataclass
class Page:
    """Blocks of palette indices, one below the other."""

    blocks: list[tuple[int, Pixels]] = field(default_factory=list)
    height: int = 0

    def add(self, pixels: Pixels, space: int = 0) -> int:
        """Add ``pixels`` at the bottom, after ``space`` rows; returns their y."""
        top = self.height + space
        self.blocks.append((top, pixels))
        self.height = top + pixels.shape[0]
        return top

    def add_text(
        self, text: str, width: int, space: int = 0, size: int = TEXT_SIZE, bold: bool = False, alarm: bool = False
    ) -> None:
        """Add ``text`` at the bottom, in lines of at most ``width`` pixels; red with ``alarm``."""
        for line in wrapped(printable(text), width, font(size, bold).getlength):
            pixels = text_pixels(line, size, bold)
            if alarm:
                pixels = np.where(pixels == colours.BACKGROUND, pixels, pixels + np.uint8(colours.ALARM - colours.TEXT))
            self.add(pixels, space)
            space = 0

    @property
    def width(self) -> int:
        return max(int(block.shape[1]) for _, block in self.blocks)

    def pixels(self, margin: int) -> Pixels:
        page = np.full((self.height + 2 * margin, self.width + 2 * margin), colours.BACKGROUND, np.uint8)
        for top, block in self.blocks:
            page[margin + top : margin + top + block.shape[0], margin : margin + block.shape[1]] = block
        return page


def colour_bar(name: str, lowest: float | str, highest: float | str, after: str = "") -> Pixels:
    """``name``, the lowest value, all levels as a ramp, the highest value, and words ``after`` it."""
    ends = [text if isinstance(text, str) else f"{text:.4g}" for text in (lowest, highest)]
    words, low, high, rest = (text_pixels(text, TEXT_SIZE) for text in (name, *ends, after))
    bar = np.repeat(np.arange(colours.LEVELS, dtype=np.uint8)[None], low.shape[0] - 3, axis=0)
    return beside([words, low, bar, high, rest] if after else [words, low, bar, high], 8)


def beside(pieces: Sequence[Pixels], gap: int) -> Pixels:
    """Blocks from left to right, ``gap`` pixels apart."""
    width = sum(piece.shape[1] for piece in pieces) + gap * (len(pieces) - 1)
    line = np.full((max(piece.shape[0] for piece in pieces), width), colours.BACKGROUND, np.uint8)
    x = 0
    for piece in pieces:
        stamp(line, piece, x, 0)
        x += piece.shape[1] + gap
    return line
