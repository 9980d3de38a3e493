"""Pages of palette indices; the tests of sheets prove their text and the bar of a shared scale."""

from __future__ import annotations

import numpy as np

from hookscope.drawing import colours
from hookscope.drawing.page import Page


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
