"""Maps over photographs: colours by arithmetic, places against torch's interpolation, words that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from hookscope.drawing import colours, overlay as overlays
from hookscope.drawing.overlay import Heat, Panel, draw_page
from hookscope.errors import UsageError

NAMES = ["B", "layer4.1.conv2", "$x^2$ is no mathematics", "evil\x1b]0;x\n\u202ename", "Cavalier King Charles " * 9]


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def panel_pixels(photograph: Image.Image, heat: Heat | None, **more: Any) -> Any:
    """What `draw_page` pastes, without the page around it."""
    size = more.pop("size", photograph.size)
    return np.asarray(overlays._picture(photograph, heat, size, more.pop("cmap", "inferno"), more.pop("faded", False)))


def paled(pixels: Any) -> Any:
    """What lies under heat: 0.3 of the colours, the rest grey; grey stays as it is."""
    pixels = np.asarray(pixels, float)
    grey = (pixels @ (0.299, 0.587, 0.114)).round()[..., None]
    return np.floor(pixels * 0.3 + grey * 0.7)


def mixed(pixel: Any, share: float, cmap: str = "inferno", strongest: float = 0.72) -> Any:
    """The colour of a value of ``share`` of the top over ``pixel``, from palette and opacity."""
    colour = colours.palette(cmap)[round(share * (colours.LEVELS - 1))].astype(float)
    alpha = strongest * share**0.7
    return np.asarray(pixel, float) * (1 - alpha) + colour * alpha


def resized(values: Any, height: int, width: int) -> Any:
    tensor = torch.as_tensor(values, dtype=torch.float32)[None, None]
    found = torch.nn.functional.interpolate(tensor, (height, width), mode="bilinear", align_corners=False)
    return found[0, 0].numpy()


@pytest.mark.parametrize("cmap", ["inferno", "viridis"])
def test_every_pixel_has_the_colour_of_torchs_interpolation(cmap: str) -> None:
    photograph = noise(340, 330)
    values = np.random.default_rng(1).random((7, 5), np.float32)
    found = panel_pixels(photograph, Heat(values, (0, 0, 340, 330), float(values.max())), cmap=cmap)
    share = resized(values / values.max(), 330, 340)
    before = paled(photograph)
    levels = (share * (colours.LEVELS - 1)).round().astype(int)
    alpha = 0.72 * share[..., None] ** 0.7
    expected = before * (1 - alpha) + colours.palette(cmap)[levels] * alpha
    # a level of the palette more or less where the share is at the edge of two
    assert np.abs(found - expected).max() < 3
    assert np.abs(found - expected).mean() < 0.3


def test_the_map_is_torchs_to_one_level_of_grey() -> None:
    for shape in ((7, 7), (1, 1), (13, 3), (56, 56)):
        values = np.random.default_rng(2).random(shape, np.float32)
        strength, seen = overlays._spread(Heat(values, (20, 10, 220, 310), 1.0), (400, 320), (1.0, 1.0))
        assert np.abs(strength[10:310, 20:220] - resized(values, 300, 200)).max() < 1 / 255
        assert seen.sum() == 300 * 200 and seen[10, 20] and seen[309, 219] and not seen[310, 219]
        assert strength[~seen].max() == 0


def test_the_pixel_under_the_highest_value_and_what_nobody_saw() -> None:
    photograph = Image.new("RGB", (400, 300), (10, 120, 230))
    values = np.zeros((10, 10), np.float32)
    values[3, 6] = 5
    found = panel_pixels(photograph, Heat(values, (100, 50, 300, 250), 5.0))
    assert found[50 + 70, 100 + 130] == pytest.approx(
        mixed(paled((10, 120, 230)), 0.975**2), abs=2
    )  # half a pixel from the middle of the cell, both ways
    assert found[240, 110] == pytest.approx(paled((10, 120, 230)), abs=1)  # nothing is there: nothing is hidden
    assert found[20, 20] == pytest.approx(0.45 * paled((10, 120, 230)), abs=1)
    assert found[299, 399] == pytest.approx(0.45 * paled((10, 120, 230)), abs=1)


def test_one_value_is_one_colour_and_above_the_top_nothing_changes() -> None:
    photograph = Image.new("RGB", (330, 20), (200, 100, 0))
    at_top = panel_pixels(photograph, Heat(np.full((1, 1), 2, np.float32), (0, 0, 330, 20), 2.0))
    above = panel_pixels(photograph, Heat(np.full((1, 1), 9, np.float32), (0, 0, 330, 20), 2.0))
    half = panel_pixels(photograph, Heat(np.full((1, 1), 1, np.float32), (0, 0, 330, 20), 2.0))
    assert np.array_equal(at_top, above)
    assert at_top[5, 5] == pytest.approx(mixed(paled((200, 100, 0)), 1.0), abs=1)
    assert half[5, 5] == pytest.approx(mixed(paled((200, 100, 0)), 0.5), abs=2)
    assert len(np.unique(half.reshape(-1, 3), axis=0)) == 1


@pytest.mark.parametrize("values", [np.zeros((7, 7)), np.full((7, 7), -3.0)])
@pytest.mark.parametrize("top", [0.0, 1.0])
def test_a_map_without_anything_above_zero_leaves_the_photograph_pale(values: Any, top: float) -> None:
    photograph = noise(330, 200)
    found = panel_pixels(photograph, Heat(values.astype(np.float32), (0, 0, 330, 200), top))
    assert np.abs(found - paled(photograph)).max() <= 1.5
    assert np.abs(found - np.asarray(photograph, float)).max() > 50


def test_the_colours_of_a_photograph_are_none_of_the_palettes_under_heat() -> None:
    # yellow and red, which inferno has too, are nearly grey; grey is as light as before
    vivid = Image.fromarray(np.array([[[255, 210, 0]] * 200 + [[220, 30, 30]] * 200], np.uint8).repeat(20, 0))
    found = panel_pixels(vivid, Heat(np.zeros((1, 1), np.float32), (0, 0, 400, 20), 1.0)).astype(int)
    assert np.ptp(found, -1).max() < 0.31 * 255 < np.ptp(np.asarray(vivid).astype(int), -1).min()
    lightness = np.asarray(Image.fromarray(found.astype(np.uint8)).convert("L"), int)
    assert np.abs(lightness - np.asarray(vivid.convert("L"), int)).max() <= 1


def test_a_photograph_alone_is_as_it_is() -> None:
    photograph = noise(350, 60)
    assert np.array_equal(panel_pixels(photograph, None), np.asarray(photograph))


def test_faded_is_grey_and_dark_under_the_heat() -> None:
    photograph = Image.new("RGB", (330, 20), (255, 0, 0))
    heat = Heat(np.array([[0, 1]], np.float32), (0, 0, 330, 20), 1.0)
    found = panel_pixels(photograph, heat, faded=True)
    assert found[0, 0].tolist() == [30, 30, 30]  # 0.4 of the grey of red, 76
    assert found[0, 329] == pytest.approx(mixed((30, 30, 30), 1.0, strongest=0.95), abs=1)


def test_a_padded_picture_reaches_beyond_the_photograph() -> None:
    photograph = Image.new("RGB", (340, 340), (128, 128, 128))
    values = np.random.default_rng(3).random((8, 8), np.float32)
    heat = Heat(values, (-170, -85, 510, 425), float(values.max()), (-100.0, 500.0))
    found = panel_pixels(photograph, heat)
    whole = resized(values / values.max(), 510, 680)[85:425, 170:510]
    expected = np.array([[mixed((128, 128, 128), share) for share in row[::40]] for row in whole[::40]])
    assert np.abs(found[::40, ::40] - expected).max() < 4


@pytest.mark.parametrize(("factor", "size"), [(1.0, (400, 300)), (4.0, (100, 75))])
def test_the_mark_is_where_the_peak_is(factor: float, size: tuple[int, int]) -> None:
    photograph = Image.new("RGB", size, (128, 128, 128))
    shown = (round(size[0] * factor), round(size[1] * factor))
    values = np.zeros((1, 1), np.float32)
    peak = (0.7 * size[0], 0.2 * size[1])
    box = (0.0, 0.0, float(size[0]), float(size[1]))
    found = panel_pixels(photograph, Heat(values, box, 0.0, peak), size=shown)
    changed = np.argwhere((found != 128).any(-1))
    middle = (changed.min(0) + changed.max(0)) / 2
    assert middle == pytest.approx((peak[1] * factor, peak[0] * factor), abs=1)
    colours_used = {tuple(found[y, x]) for y, x in changed}
    assert {(0, 0, 0), (255, 255, 255)} <= colours_used
    assert tuple(found[round(peak[1] * factor), round(peak[0] * factor)]) == (128, 128, 128)  # what is there is seen


def test_a_small_photograph_is_magnified_by_whole_numbers() -> None:
    photograph = noise(90, 40)
    page = draw_page(photograph, ["heading"], [[Panel(None, [])]])
    inner = np.asarray(page)
    expected = np.asarray(photograph).repeat(4, 0).repeat(4, 1)
    assert page.width == 360 + 28
    top = 14 + 21 + 12
    assert np.array_equal(inner[top : top + 160, 14 : 14 + 360], expected)


@pytest.mark.parametrize("size", [(320, 200), (451, 300), (1280, 40), (330, 3000)])
def test_a_larger_photograph_has_its_own_size(size: tuple[int, int]) -> None:
    photograph = noise(*size)
    page = np.asarray(draw_page(photograph, [], [[Panel(None, [])]]))
    margin = round(14 * max(1.0, size[0] / 640))
    assert np.array_equal(
        page[margin:][: size[1] + 60, margin : margin + size[0]][_top(page, photograph) :][: size[1]], photograph
    )
    assert page.shape[1] == size[0] + 2 * margin


def _top(page: Any, photograph: Image.Image) -> int:
    """How far below the margin the photograph begins: a gap."""
    return round(12 * max(1.0, photograph.width / 640))


class Texts(list[tuple[str, float, float, float, float]]):
    """Every line of a page and the box it fills."""


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Texts:
    found = Texts()
    write = ImageDraw.ImageDraw.text

    def record(pen: Any, place: tuple[float, float], text: str, **more: Any) -> None:
        found.append((text, *pen.textbbox(place, text, font=more["font"])))
        write(pen, place, text, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", record)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(320, 30), (20, 60), (1000, 100)])
def test_words_fit_their_panel_whatever_they_are(texts: Texts, name: str, size: tuple[int, int]) -> None:
    heat = Heat(np.ones((2, 2), np.float32), (0, 0, *size), 0.000123)
    panel = Panel(heat, [name, name], f"alarm {name}", "value of the map")
    page = draw_page(Image.new("RGB", size), [name, name], [[panel, panel], [panel]])
    assert all(text.isprintable() for text, *_ in texts)
    for _, left, top, right, bottom in texts:
        assert 0 <= left and right <= page.width and 0 <= top and bottom <= page.height
    assert not overlapping(texts)
    everything = "".join(text for text, *_ in texts).replace(" ", "")
    plain = name.replace("\x1b", "\\x1b").replace("\n", "\\n").replace("\u202e", "\\u202e").replace(" ", "")
    assert everything.count(plain) == 2 + 3 * 3


def overlapping(texts: Texts) -> list[tuple[str, str]]:
    """Pairs of lines whose letters run into each other."""
    found = []
    for at, (text, left, top, right, bottom) in enumerate(texts):
        for other, other_left, other_top, other_right, other_bottom in texts[at + 1 :]:
            if left < other_right and other_left < right and top < other_bottom and other_top < bottom:
                found.append((text, other))
    return found


@pytest.mark.parametrize("width", [330, 40])
def test_a_warning_stands_under_the_heading_in_the_colour_of_alarms(texts: Texts, width: int) -> None:
    photograph, words = noise(width, 60), "the weights are random: " + "and nothing means anything " * 4
    page = draw_page(photograph, ["heading", "origin"], [[Panel(None, [])]], warning=words)
    plain = draw_page(photograph, ["heading", "origin"], [[Panel(None, [])]])
    lines = [line for line in texts if line[0] in words and line[0] not in ("heading", "origin")]
    assert " ".join(text for text, *_ in lines).split() == words.split() and len(lines) > 1
    assert texts[1][0] == "origin" and texts[2] == lines[0] and not overlapping(Texts(texts[:-2]))
    assert plain.height < page.height
    grown = page.height - plain.height
    alarm = (np.asarray(page) == overlays._ALARM).all(-1)
    rows = np.flatnonzero(alarm.any(1))
    assert min(top for _, _, top, *_ in lines) <= rows.min() and rows.max() <= max(line[4] for line in lines)
    assert not (np.asarray(plain) == overlays._ALARM).all(-1).any()
    # and all that is below has only moved down
    assert np.array_equal(np.asarray(page)[rows.max() + 12 :][-60:], np.asarray(plain)[-60:]) and grown > 0


def test_letters_grow_with_the_photograph(texts: Texts) -> None:
    for width in (640, 3000):
        draw_page(Image.new("RGB", (width, 10)), ["heading"], [[Panel(None, ["word"])]])
    small, _, large, _ = [bottom - top for _, _, top, _, bottom in texts]
    assert large / small == pytest.approx(3000 / 640, rel=0.1)


def test_the_bar_has_its_ends_and_its_colours(texts: Texts) -> None:
    heat = Heat(np.ones((2, 2), np.float32), (0, 0, 330, 40), 0.02468)
    page = np.asarray(draw_page(Image.new("RGB", (330, 40)), [], [[Panel(heat, ["word"], scale="value")]]))
    assert [text for text, *_ in texts] == ["0", "0.0247  value", "word"]
    strongest = mixed((128, 128, 128), 1.0)
    [row, *_] = np.argwhere(np.abs(page - strongest).max(-1) < 2)[:1]
    before = page[row[0], row[1] - 179 : row[1] + 1].astype(int)
    assert before[0] == pytest.approx((128, 128, 128), abs=1)
    assert len(np.unique(before, axis=0)) > 100


def test_panels_stand_in_rows_and_columns() -> None:
    photograph = noise(320, 50)
    page = np.asarray(draw_page(photograph, [], [[Panel(None, [])] * 3, [Panel(None, [])]]))
    pixels = np.asarray(photograph)
    places = [
        (y, x)
        for y in range(page.shape[0] - 49)
        for x in (14, 346, 678)
        if np.array_equal(page[y : y + 50, x : x + 320], pixels)
    ]
    assert len(places) == 4
    assert [x for _, x in places] == [14, 346, 678, 14]
    assert page.shape[1] == 3 * 320 + 2 * 12 + 28


def test_a_width_of_panels_is_kept() -> None:
    page = draw_page(noise(1000, 500), [], [[Panel(None, []), Panel(None, [])]], width=300)
    assert page.width == 2 * 300 + 12 + 28


def test_an_unknown_colour_map_is_refused() -> None:
    heat = Heat(np.ones((1, 1), np.float32), (0, 0, 9, 9), 1.0)
    with pytest.raises(UsageError, match="no colour map 'infern'; nearest: inferno"):
        draw_page(noise(9, 9), [], [[Panel(heat, [])]], "infern")


def test_a_page_without_end_is_refused() -> None:
    row: Sequence[Panel] = [Panel(None, [])] * 4000
    with pytest.raises(UsageError, match=r"a page of 4000 panels is too large; it would have .* pixels; choose fewer"):
        draw_page(noise(400, 300), [], [row])
