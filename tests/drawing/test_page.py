"""Pages of palette indices, and the bar of a shared scale."""

from __future__ import annotations

import numpy as np

from hookscope.drawing import colours
from hookscope.drawing.page import TEXT_SIZE, Page, colour_bar
from hookscope.drawing.text import text_pixels


def test_blocks_stand_one_below_the_other_within_the_margin() -> None:
    page = Page()
    assert page.add(np.full((2, 5), colours.BAR, np.uint8)) == 0
    assert page.add(np.full((3, 4), colours.NAN, np.uint8), space=4) == 6
    assert (page.width, page.height) == (5, 9)
    pixels = page.pixels(margin=1)
    assert pixels.shape == (11, 7)
    assert np.argwhere(pixels == colours.BAR).tolist() == [[y, x] for y in (1, 2) for x in range(1, 6)]
    assert np.argwhere(pixels == colours.NAN).tolist() == [[y, x] for y in (7, 8, 9) for x in range(1, 5)]
    assert set(np.unique(pixels)) == {colours.BAR, colours.NAN, colours.BACKGROUND}


def test_text_is_broken_and_made_printable() -> None:
    page = Page()
    page.add_text("one two \x1b", 40, space=3)
    tops, blocks = zip(*page.blocks, strict=True)
    for block, line in zip(blocks, ("one", "two", "\\x1b"), strict=False):
        np.testing.assert_array_equal(block, text_pixels(line, TEXT_SIZE))
    assert tops[0] == 3
    assert tops[1] == 3 + blocks[0].shape[0]


def test_the_bar_has_every_level_once_between_its_ends() -> None:
    bar = colour_bar("scale", -2.5, 7.0)
    row = bar[0]
    assert row[row < colours.LEVELS].tolist() == list(range(colours.LEVELS))
    start = int(np.argmax(row < colours.LEVELS))
    low, high = text_pixels("-2.5", TEXT_SIZE), text_pixels("7", TEXT_SIZE)
    left = bar[:, start - 8 - low.shape[1] : start - 8]
    np.testing.assert_array_equal(left, low)
    right = start + colours.LEVELS + 8
    np.testing.assert_array_equal(bar[:, right : right + high.shape[1]], high)
