"""Maps over photographs: colours by arithmetic, places against torch's interpolation, words that fit."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from hookscope.drawing import colours, heat as heats
from hookscope.drawing.heat import DARK, LIGHT, PALE, Heading, Heat, HeatPanel, HeatRow, draw_heat_page
from hookscope.errors import UsageError

NAMES = ["B", "layer4.1.conv2", "$x^2$ is no mathematics", "evil\x1b]0;x\n\u202ename", "Cavalier King Charles " * 9]
GREY = (128, 128, 128)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def panel_pixels(photograph: Image.Image, heat: Heat | None, **more: Any) -> Any:
    """The panel without the page around it."""
    size = more.pop("size", photograph.size)
    return np.asarray(heats._picture(photograph, heat, size, more.pop("cmap", "inferno"), more.pop("ground", PALE)))


def paled(pixels: Any) -> Any:
    """0.3 of the colours, the rest grey; grey stays as it is."""
    pixels = np.asarray(pixels, float)
    grey = (pixels @ (0.299, 0.587, 0.114)).round()[..., None]
    return np.floor(pixels * 0.3 + grey * 0.7)


def mixed(pixel: Any, share: float, cmap: str = "inferno", strongest: float = 0.72) -> Any:
    """The colour of a value of ``share`` of the top over ``pixel``, from palette and opacity."""
    colour = colours.palette(cmap)[round(share * (colours.LEVELS - 1))].astype(float)
    alpha = strongest * share**0.7
    return np.asarray(pixel, float) * (1 - alpha) + colour * alpha


@pytest.mark.parametrize("cmap", ["inferno", "viridis"])
@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((7, 5), (0, 0, 340, 330)),
        ((7, 7), (20, 10, 220, 310)),
        ((1, 1), (20, 10, 220, 310)),
        ((56, 56), (100, 50, 300, 250)),
        ((8, 8), (-170, -85, 510, 425)),  # a padded image reaches beyond the photograph
    ],
)
def test_every_pixel_has_the_colour_of_torchs_interpolation(
    shape: tuple[int, int], box: tuple[int, int, int, int], cmap: str
) -> None:
    photograph, values = noise(340, 330), np.random.default_rng(1).random(shape, np.float32)
    left, top, right, bottom = box
    panel = panel_pixels(photograph, Heat(values, box, float(values.max())), cmap=cmap)
    resized = torch.nn.functional.interpolate(
        torch.tensor(values / values.max())[None, None], (bottom - top, right - left), mode="bilinear"
    )[0, 0].numpy()
    inside = np.s_[max(top, 0) : min(bottom, 330), max(left, 0) : min(right, 340)]
    share = resized[max(-top, 0) :, max(-left, 0) :][: panel[inside].shape[0], : panel[inside].shape[1]]
    expected = 0.45 * paled(photograph)  # outside the network's input
    alpha = 0.72 * share[..., None] ** 0.7
    colour = colours.palette(cmap)[(share * (colours.LEVELS - 1)).round().astype(int)]
    expected[inside] = paled(photograph)[inside] * (1 - alpha) + colour * alpha
    # a level of the palette more or less where the share is at the edge of two
    assert np.abs(panel - expected).max() < 4
    assert np.abs(panel - expected).mean() < 0.6


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
    panel = panel_pixels(photograph, Heat(values.astype(np.float32), (0, 0, 330, 200), top))
    assert np.abs(panel - paled(photograph)).max() <= 1.5
    assert np.abs(panel - np.asarray(photograph, float)).max() > 50


def test_a_vivid_photograph_is_nearly_grey_under_heat() -> None:
    # yellow and red, which inferno has too, are nearly grey; grey is as light as before
    vivid = Image.fromarray(np.array([[[255, 210, 0]] * 200 + [[220, 30, 30]] * 200], np.uint8).repeat(20, 0))
    panel = panel_pixels(vivid, Heat(np.zeros((1, 1), np.float32), (0, 0, 400, 20), 1.0)).astype(int)
    assert np.ptp(panel, -1).max() < 0.31 * 255 < np.ptp(np.asarray(vivid).astype(int), -1).min()
    lightness = np.asarray(Image.fromarray(panel.astype(np.uint8)).convert("L"), int)
    assert np.abs(lightness - np.asarray(vivid.convert("L"), int)).max() <= 1


@pytest.mark.parametrize(("ground", "grey"), [(DARK, 38), (LIGHT, 174)])  # half of 76, the grey of red; 0.45 of it
def test_a_fine_map_lies_over_a_grey_photograph(ground: Any, grey: int) -> None:
    photograph = Image.new("RGB", (330, 20), (255, 0, 0))
    heat = Heat(np.array([[0, 1]], np.float32), (0, 0, 330, 20), 1.0)
    panel = panel_pixels(photograph, heat, ground=ground)
    assert panel[0, 0].tolist() == [grey] * 3
    assert panel[0, 329] == pytest.approx(mixed((grey,) * 3, 1.0, strongest=0.95), abs=1)


def test_a_signed_map_has_two_colours_about_a_transparent_zero() -> None:
    photograph, palette = Image.new("RGB", (330, 20), GREY), colours.palette("RdBu_r").astype(float)
    [ground] = np.unique(
        panel_pixels(photograph, Heat(np.zeros((1, 1), np.float32), (0, 0, 330, 20), 2.0), ground=LIGHT)
    )
    for value, level in ((2.0, -1), (-2.0, 0), (9.0, -1), (1.0, 0.75), (-1.0, 0.25), (0.0, 0.5)):
        heat = Heat(np.full((1, 1), value, np.float32), (0, 0, 330, 20), 2.0, signed=True)
        at = level if isinstance(level, int) else round(level * (colours.LEVELS - 1))
        alpha = 0.95 * min(1.0, abs(value) / 2) ** 0.7
        expected = ground * (1 - alpha) + palette[: colours.LEVELS][at] * alpha
        pixel = panel_pixels(photograph, heat, cmap="RdBu_r", ground=LIGHT)[5, 5].astype(float)
        assert pixel == pytest.approx(expected, abs=3), value


@pytest.mark.parametrize(("factor", "size"), [(1.0, (400, 300)), (4.0, (100, 75))])
def test_the_mark_is_where_the_peak_is(factor: float, size: tuple[int, int]) -> None:
    photograph = Image.new("RGB", size, GREY)
    shown = (round(size[0] * factor), round(size[1] * factor))
    values = np.full((1, 1), 1e-9, np.float32)
    peak = (0.7 * size[0], 0.2 * size[1])
    box = (0.0, 0.0, float(size[0]), float(size[1]))
    panel = panel_pixels(photograph, Heat(values, box, 0.0, peak), size=shown)
    changed = np.argwhere((panel != 128).any(-1))
    middle = (changed.min(0) + changed.max(0)) / 2
    assert middle == pytest.approx((peak[1] * factor, peak[0] * factor), abs=1)
    colours_used = {tuple(panel[y, x]) for y, x in changed}
    assert {(0, 0, 0), (255, 255, 255)} <= colours_used
    assert tuple(panel[round(peak[1] * factor), round(peak[0] * factor)]) == GREY  # what is there is seen


@pytest.mark.parametrize(
    ("size", "zoom"), [((90, 40), 4), ((320, 200), 1), ((451, 300), 1), ((1280, 40), 1), ((330, 3000), 1)]
)
def test_only_a_small_photograph_is_magnified_by_a_whole_number(size: tuple[int, int], zoom: int) -> None:
    photograph = noise(*size)
    page = np.asarray(draw_heat_page(photograph, Heading([]), [HeatRow([HeatPanel(None, [])])]))
    letters = max(1.0, size[0] / 640)
    margin, top = round(14 * letters), round(14 * letters) + round(12 * letters)
    width, height = size[0] * zoom, size[1] * zoom
    expected = np.asarray(photograph).repeat(zoom, 0).repeat(zoom, 1)
    assert np.array_equal(page[top : top + height, margin : margin + width], expected)
    assert page.shape[1] == width + 2 * margin


@pytest.mark.parametrize(("highest", "marked"), [(0.0, False), (0.09, False), (0.11, True), (1.0, True)])
@pytest.mark.parametrize("lowest", [0, -1])
def test_a_map_that_is_blank_on_its_scale_has_no_mark(highest: float, marked: bool, lowest: float) -> None:
    values = np.array([[lowest, highest]], np.float32)
    assert (Heat(values, (0, 0, 2, 1), 1.0, (1.5, 0.5), lowest < 0).mark is not None) == marked


class Texts(list[tuple[str, float, float, float, float]]):
    """Every line of a page and the box it fills."""


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Texts:
    lines = Texts()
    write = ImageDraw.ImageDraw.text

    def record(pen: Any, place: tuple[float, float], text: str, **more: Any) -> None:
        lines.append((text, *pen.textbbox(place, text, font=more["font"])))
        write(pen, place, text, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", record)
    return lines


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(320, 30), (20, 60), (1000, 100)])
def test_words_fit_their_panel(texts: Texts, name: str, size: tuple[int, int]) -> None:
    heat = Heat(np.ones((2, 2), np.float32), (0, 0, *size), 0.000123)
    panel = HeatPanel(heat, [name, name], f"alarm {name}", "value of the map")
    page = draw_heat_page(Image.new("RGB", size), Heading([name, name]), [HeatRow([panel, panel]), HeatRow([panel])])
    assert all(text.isprintable() for text, *_ in texts)
    for _, left, top, right, bottom in texts:
        assert 0 <= left and right <= page.width and 0 <= top and bottom <= page.height
    assert not overlapping(texts)
    everything = "".join(text for text, *_ in texts).replace(" ", "")
    plain = name.replace("\x1b", "\\x1b").replace("\n", "\\n").replace("\u202e", "\\u202e").replace(" ", "")
    assert everything.count(plain) == 2 + 3 * 3


def overlapping(texts: Texts) -> list[tuple[str, str]]:
    """Pairs of lines whose letters run into each other."""
    return [
        (one[0], other[0])
        for one, other in itertools.combinations(texts, 2)
        if one[1] < other[3] and other[1] < one[3] and one[2] < other[4] and other[2] < one[4]
    ]


@pytest.mark.parametrize("width", [330, 40])
def test_a_warning_stands_under_the_heading_in_the_colour_of_alarms(texts: Texts, width: int) -> None:
    photograph, words = noise(width, 60), "the weights are random: " + "and nothing means anything " * 4
    page = np.asarray(
        draw_heat_page(photograph, Heading(["heading", "origin"], words), [HeatRow([HeatPanel(None, [])])])
    )
    _, origin, *lines = texts
    assert " ".join(text for text, *_ in lines).split() == words.split() and len(lines) > 1
    assert origin[0] == "origin" and not overlapping(texts)
    rows = np.flatnonzero((page == heats.ALARM).all(-1).any(1))
    assert min(top for _, _, top, *_ in lines) <= rows.min() and rows.max() <= max(line[4] for line in lines)
    plain = np.asarray(draw_heat_page(photograph, Heading(["heading", "origin"]), [HeatRow([HeatPanel(None, [])])]))
    assert not (plain == heats.ALARM).all(-1).any()
    assert np.array_equal(page[rows.max() + 12 :][-60:], plain[-60:]) and len(plain) < len(page)


def test_letters_grow_with_the_photograph(texts: Texts) -> None:
    for width in (640, 3000):
        draw_heat_page(Image.new("RGB", (width, 10)), Heading(["heading"]), [HeatRow([HeatPanel(None, ["word"])])])
    small, _, large, _ = [bottom - top for _, _, top, _, bottom in texts]
    assert large / small == pytest.approx(3000 / 640, rel=0.1)


def test_the_bar_has_its_ends_and_its_colours(texts: Texts) -> None:
    heat = Heat(np.ones((2, 2), np.float32), (0, 0, 330, 40), 0.02468)
    page = np.asarray(
        draw_heat_page(Image.new("RGB", (330, 40)), Heading([]), [HeatRow([HeatPanel(heat, ["word"], scale="value")])])
    )
    assert [text for text, *_ in texts] == ["0", "0.0247  value", "word"]
    strongest = mixed(GREY, 1.0)
    [row, *_] = np.argwhere(np.abs(page - strongest).max(-1) < 2)[:1]
    before = page[row[0], row[1] - 179 : row[1] + 1].astype(int)
    assert before[0] == pytest.approx(GREY, abs=1)
    assert len(np.unique(before, axis=0)) > 100


def test_panels_stand_in_rows_and_columns() -> None:
    photograph, empty = noise(320, 50), HeatPanel(None, [])
    page = np.asarray(
        draw_heat_page(photograph, Heading([]), [HeatRow([HeatPanel(None, [])] * 3), HeatRow([HeatPanel(None, [])])])
    )
    pixels = np.asarray(photograph)
    columns = [
        x
        for y in range(page.shape[0] - 49)
        for x in (14, 346, 678)
        if np.array_equal(page[y : y + 50, x : x + 320], pixels)
    ]
    assert columns == [14, 346, 678, 14]
    assert page.shape[1] == 3 * 320 + 2 * 12 + 28
    assert draw_heat_page(noise(1000, 500), Heading([]), [HeatRow([empty] * 2)], width=300).width == 2 * 300 + 12 + 28


def test_the_photograph_and_one_bar_stand_in_the_heading_and_words_above_a_row(texts: Texts) -> None:
    photograph = noise(320, 100)
    heading = Heading(["title", "model " * 40], photograph=True, scale="share of the highest value")
    page = np.asarray(
        draw_heat_page(photograph, heading, [HeatRow([HeatPanel(None, ["below"])], ["layer", "its shape"])])
    )
    assert np.array_equal(page[14:114, 14:334], np.asarray(photograph))
    words = {text: (left, top) for text, left, top, *_ in texts}
    assert words["title"][0] >= 14 + 320 + 12 and words["0"][0] >= 14 + 320 + 12
    assert "1  share of the highest value" in words
    assert 114 < words["layer"][1] < words["its shape"][1] < words["below"][1] and words["layer"][0] == 14
    assert not overlapping(texts) and all(right <= page.shape[1] for *_, right, _ in texts)


def test_an_unknown_colour_map_is_refused() -> None:
    heat = Heat(np.ones((1, 1), np.float32), (0, 0, 9, 9), 1.0)
    with pytest.raises(UsageError, match="no colour map 'infern'; nearest: inferno"):
        draw_heat_page(noise(9, 9), Heading([]), [HeatRow([HeatPanel(heat, [])])], "infern")


def test_a_page_without_end_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a page of 4000 panels is too large; it would have .* pixels; choose fewer"):
        draw_heat_page(noise(400, 300), Heading([]), [HeatRow([HeatPanel(None, [])] * 4000)])


@pytest.mark.parametrize("frame", [(50.2, 20, 150, 60), (-20, 10, 700, 90), (330, 99, 340, 110)])
def test_a_frame_is_white_between_black_edges_and_lies_inside(frame: tuple[float, float, float, float]) -> None:
    photograph, values = Image.new("RGB", (330, 100), (128, 128, 128)), np.zeros((2, 2), np.float32)
    plain = panel_pixels(photograph, Heat(values, (0, 0, 330, 100), 1.0))
    framed = panel_pixels(photograph, Heat(values, (0, 0, 330, 100), 1.0, frame=frame))
    white = np.argwhere((framed == 255).all(-1))
    (top, left), (bottom, right) = white.min(0), white.max(0)
    expected = [min(max(round(side), 2), end) for side, end in zip(frame, (327, 97, 327, 97), strict=True)]
    assert [left + 1, top + 1, right - 1, bottom - 1] == expected
    for y in (top, bottom):
        assert (framed[y, left : right + 1] == 255).all()
    changed = np.argwhere((framed != plain).any(-1))
    assert changed.min(0).tolist() == [top - 1, left - 1] and changed.max(0).tolist() == [bottom + 1, right + 1]
    assert (framed[top - 1, left - 1 : right + 2] == 0).all() and (framed[top - 1 : bottom + 2, right + 1] == 0).all()
