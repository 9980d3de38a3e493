"""Text in pixels: its letters, its lines, and the fonts of scripts that DejaVu Sans lacks."""

import io
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from PIL import Image, ImageDraw

from hookscope.cli.process import warnings_as_notes
from hookscope.drawing import colours, text as texts
from hookscope.drawing.plot import figure_bytes, plain_settings
from hookscope.drawing.text import (
    LABEL_HEIGHT,
    FontWarning,
    font,
    font_families,
    font_parts,
    inches,
    number_pixels,
    stamp,
    text_pixels,
    wrapped,
    wrapped_lines,
)
from tests.drawing.rows import page_of

CAT, TREE, THUMB = "\u732b", "\u6a39", "\U0001f44d"


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


def test_a_long_word_is_measured_in_parts_that_are_not_much_longer_than_a_line() -> None:
    measured = []

    def measure(text: str) -> int:
        measured.append(len(text))
        return len(text)

    assert wrapped("x" * 5000, 50, measure) == ["x" * 50] * 100
    assert sum(length > 128 for length in measured) <= 2 and len(measured) < 2000


def test_lines_break_between_words_where_they_can_and_those_beyond_the_last_are_cut_off() -> None:
    assert wrapped("one   two", 1000, len) == ["one   two"]
    assert wrapped("first second", 6, len) == ["first", "second"]
    assert wrapped("1. one two three", 9, len, "   ") == ["1. one", "   two", "   three"]
    first, second = wrapped_lines("1. " + "word " * 60, 2.0, 8.5, 2, "   ")
    assert first.startswith("1. word word") and second.startswith("   word word") and second.endswith("…")
    assert max(inches(first, 8.5), inches(second, 8.5)) <= 2.0


def build(path: Path, family: str, characters: str, style: str = "Regular") -> None:
    """A font with a filled square, 800 of 1000 units wide, for each character."""
    builder = FontBuilder(1000, isTTF=True)
    names = {ord(character): f"u{ord(character):x}" for character in characters}
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    for corner in ((100, 800), (900, 800), (900, 0)):
        pen.lineTo(corner)
    pen.closePath()
    square = pen.glyph()
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), **dict.fromkeys(names.values(), square)})
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names.values()], (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": family, "styleName": style})
    builder.setupOS2(sTypoAscender=900, usWinAscent=900, usWinDescent=100)
    builder.setupPost()
    builder.save(path)


def forget() -> None:
    texts._FONTS.clear()
    for remembers in (texts._font_of, texts._installed, texts._warn, texts.text_pixels):
        remembers.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Build a font in the one folder of fonts that the system has; forget what was found before."""
    folder = tmp_path / "fonts"
    folder.mkdir()
    monkeypatch.setattr(font_manager, "findSystemFonts", partial(font_manager.findSystemFonts, [str(folder)]))
    own = [entry for entry in font_manager.fontManager.ttflist if "DejaVu" in entry.name]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def add(family: str, characters: str, style: str = "Regular") -> None:
        build(folder / f"{family}-{style}.ttf", family, characters, style)
        forget()

    forget()
    yield add
    forget()


def families(text: str) -> list[tuple[str, str]]:
    return [(part, face.family if face else "") for part, face in font_parts(text)]


def test_only_foreign_characters_change_the_font(install: Callable[..., None]) -> None:
    install("Han", CAT + TREE)
    assert families(f"a {CAT}{TREE} b é…×") == [("a ", ""), (CAT + TREE, "Han"), (" b é…×", "")]
    assert families("") == [("", "")]


def test_a_script_has_one_font_regular_without_serifs_and_with_the_most_characters(
    install: Callable[..., None],
) -> None:
    for family, style, characters in (
        ("A Serif", "Regular", CAT + TREE),
        ("B", "Bold", CAT + TREE),
        ("C", "Regular", CAT),
        ("D", "Regular", CAT + TREE),
        ("E Mono", "Regular", CAT + TREE),
    ):
        install(family, characters, style)
    assert families(CAT + TREE) == [(CAT + TREE, "D")]


def test_marks_stay_with_their_character_and_emoji_are_boxes(install: Callable[..., None]) -> None:
    install("Han", CAT + THUMB)
    assert families(f"{CAT}\u0301{THUMB}!") == [(CAT + "\u0301", "Han"), (f"{THUMB}!", "")]
    assert inches(THUMB, 72) > inches("M", 72)


def test_one_warning_says_what_no_font_has(install: Callable[..., None]) -> None:
    with pytest.warns(FontWarning, match="no installed font has some Chinese, Japanese or Korean characters") as told:
        assert [font_parts(f"a{CAT}{TREE}") for _ in range(2)] == [[(f"a{CAT}{TREE}", None)]] * 2
    assert len(told) == 1
    with pytest.warns(FontWarning, match="some Thai characters: .* such as Noto Sans Thai"):
        font_parts("\u0e01")


def test_a_font_of_boxes_is_no_font(install: Callable[..., None]) -> None:
    install("Last Resort High-Efficiency", CAT)
    with pytest.warns(FontWarning):
        assert families(CAT) == [(CAT, "")]


def test_found_fonts_are_remembered_between_runs(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install("Han", CAT)
    font_parts(CAT)
    forget()
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: pytest.fail("all fonts were read"))
    assert families(CAT) == [(CAT, "Han")]
    (tmp_path / "fonts" / "Han-Regular.ttf").unlink()
    forget()
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    with pytest.warns(FontWarning):  # a remembered font that is gone is no error
        assert families(CAT) == [(CAT, "")]


def test_the_pixels_of_a_character_are_those_of_its_font(install: Callable[..., None]) -> None:
    install("Han", CAT)
    plain, foreign = text_pixels("a  b", 20), text_pixels(f"a{CAT}b", 20)
    assert foreign.shape[1] == pytest.approx(text_pixels("ab", 20).shape[1] + 20, abs=1)
    ink = foreign != plain.min()
    square = ink[:, foreign.shape[1] // 2]
    assert square.sum() == pytest.approx(16, abs=1)  # 800 of 1000 units at 20 pixels
    baseline = np.nonzero((text_pixels("H", 20) != plain.min()).any(1))[0][-1]
    assert np.nonzero(square)[0][-1] == pytest.approx(baseline, abs=1)
    assert font(20).getlength(f"a{CAT}b") == pytest.approx(font(20).getlength("a") + 20 + font(20).getlength("b"))


def test_text_in_colour_uses_the_fonts_too(install: Callable[..., None]) -> None:
    install("Han", CAT)
    page = Image.new("RGB", (60, 30), "white")
    ImageDraw.Draw(page).text((10, 2), CAT, fill=(255, 0, 0), font=font(20, bold=True))
    red = (np.asarray(page) == (255, 0, 0)).all(-1)
    assert red.sum() == pytest.approx(16 * 16, rel=0.1)


def test_right_to_left_text_keeps_its_place_between_other_fonts(install: Callable[..., None]) -> None:
    install("Han", CAT)
    alone, beside = text_pixels("\u05e9\u05dc", 20), text_pixels(f"{CAT}\u05e9\u05dc b{CAT}", 20)
    assert (beside[:, 20 : 20 + alone.shape[1] - 1] == alone[:, :-1]).mean() > 0.95


def test_a_plot_draws_foreign_characters(install: Callable[..., None]) -> None:
    install("Han", CAT)
    assert font_families("conv1") == ["DejaVu Sans"]
    assert font_families(f"conv {CAT}") == ["DejaVu Sans", "Han"]
    figure = page_of([f"layer {CAT}"], {"values": 2.0}, CAT * 3, [(CAT, "k")], marked={0: CAT})
    with plain_settings(), warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's `Glyph 29483 missing from font(s) DejaVu Sans`
        figure.savefig(io.BytesIO(), format="png")
    with Image.open(io.BytesIO(figure_bytes(figure, ".png"))) as image:
        title = np.asarray(image.convert("L"))[:45, 20:80] < 128
    assert title.sum() == pytest.approx(3 * (0.8 * 11 * 110 / 72) ** 2, rel=0.15)  # three squares
    assert inches(CAT, 11) == pytest.approx(11 / 72 * 1.06)


def test_the_command_line_says_once_what_no_font_has(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings_as_notes():
        warnings.simplefilter("default")
        for text in (CAT, f"{CAT}.png", TREE):
            text_pixels(text)
    note = (
        "Warning: no installed font has some Chinese, Japanese or Korean characters: pictures show boxes instead;"
        " install a font that has them, such as Noto Sans CJK\n"
    )
    assert capsys.readouterr().err == note


def test_boxes_leave_no_page(install: Callable[..., None]) -> None:
    figure = page_of([CAT * 9], {"values": 2.0}, TREE * 30, [(CAT * 60, "k")], marked={0: TREE * 9})
    figure_bytes(figure, ".png")
    for text in [*figure.texts, *figure.axes[0].texts]:
        box = text.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= figure.bbox.width, text
