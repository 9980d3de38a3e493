"""A page of palette indices: text, colour bars and grids, one below the other."""

from __future__ import annotations

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

    def add_text(self, text: str, width: int, space: int = 0, size: int = TEXT_SIZE, bold: bool = False) -> None:
        """Add ``text`` at the bottom, in lines of at most ``width`` pixels."""
        for line in wrapped(printable(text), width, font(size, bold).getlength):
            self.add(text_pixels(line, size, bold), space)
            space = 0

    @property
    def width(self) -> int:
        return max(int(block.shape[1]) for _, block in self.blocks)

    def pixels(self, margin: int) -> Pixels:
        page = np.full((self.height + 2 * margin, self.width + 2 * margin), colours.BACKGROUND, np.uint8)
        for top, block in self.blocks:
            page[margin + top : margin + top + block.shape[0], margin : margin + block.shape[1]] = block
        return page


def colour_bar(name: str, lowest: float, highest: float) -> Pixels:
    """``name``, the lowest value, all levels as a ramp, the highest value."""
    words, low, high = (text_pixels(text, TEXT_SIZE) for text in (name, f"{lowest:.4g}", f"{highest:.4g}"))
    bar = np.repeat(np.arange(colours.LEVELS, dtype=np.uint8)[None], low.shape[0] - 3, axis=0)
    gap = 8
    width = low.shape[1] + bar.shape[1] + high.shape[1] + words.shape[1] + 4 * gap
    line = np.full((low.shape[0], width), colours.BACKGROUND, np.uint8)
    x = 0
    for piece in (words, low, bar, high):
        stamp(line, piece, x, 0)
        x += piece.shape[1] + gap
    return line
