"""Text in pixels: every letter on the page, no line wider than it may be."""

from __future__ import annotations

import numpy as np
import pytest

from hookscope.drawing import colours
from hookscope.drawing.text import LABEL_HEIGHT, font, inches, number_pixels, stamp, text_pixels, wrapped, wrapped_lines


def test_text_has_ink_and_only_the_colours_of_text() -> None:
    for text, bold in (("layer4.0.conv2", False), ("猫 é", True)):
        pixels = text_pixels(text, bold=bold)
        assert pixels.min() == colours.BACKGROUND
        assert pixels.max() == colours.TEXT
        assert pixels.dtype == np.uint8
    assert (text_pixels(" ") == colours.BACKGROUND).all()
    assert text_pixels("").shape[1] >= 1


def test_all_digits_are_equally_wide() -> None:
    for bold in (False, True):
        assert len({number_pixels(digit, bold).shape for digit in "0123456789"}) == 1
        assert number_pixels("1234", bold).shape == (LABEL_HEIGHT, 4 * number_pixels("0", bold).shape[1])


def test_a_stamp_is_cut_at_the_edge() -> None:
    page = np.zeros((4, 4), np.uint8)
    stamp(page, np.ones((3, 3), np.uint8), 2, 3)
    assert page.tolist() == [[0] * 4] * 3 + [[0, 0, 1, 1]]


@pytest.mark.parametrize("text", ["a b c", "one   two three", "x" * 60, "word " + "y" * 100 + " end", "", "é猫 " * 30])
@pytest.mark.parametrize("width", [1, 40, 200])
def test_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    lines = wrapped(text, width, font(12).getlength)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(len(line) <= 1 or font(12).getlength(line) <= width for line in lines)


def test_lines_break_between_words_where_they_can() -> None:
    assert wrapped("one   two", 1000, len) == ["one   two"]
    assert wrapped("first second", 6, len) == ["first", "second"]


def test_a_long_word_is_measured_in_parts_that_are_not_much_longer_than_a_line() -> None:
    measured = []

    def measure(text: str) -> int:
        measured.append(len(text))
        return len(text)

    assert wrapped("x" * 5000, 50, measure) == ["x" * 50] * 100
    assert sum(length > 128 for length in measured) <= 2 and len(measured) < 2000


def test_lines_beyond_the_last_are_cut_off() -> None:
    assert wrapped("1. one two three", 9, len, "   ") == ["1. one", "   two", "   three"]
    first, second = wrapped_lines("1. " + "word " * 60, 2.0, 8.5, 2, "   ")
    assert first.startswith("1. word word") and second.startswith("   word word") and second.endswith("…")
    assert max(inches(first, 8.5), inches(second, 8.5)) <= 2.0
