"""Pages of heat maps over a photograph, with words and a colour bar under each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from hookscope.drawing import colours
from hookscope.drawing.text import font, wrapped
from hookscope.errors import UsageError, printable

Box = tuple[float, float, float, float]

# A panel narrower than the first is magnified by a whole number; on one wider than the second the letters grow.
_LEAST_WIDTH, _LETTERING_WIDTH = 320, 640
_TEXT, _HEAD = 12, 15
_PALER = 0.7  # share of grey in the photograph under heat
_STRONGEST, _STRONGEST_FADED = 0.72, 0.95  # opacity of the highest value
_DARKER, _OUTSIDE = 0.6, 0.45  # share of black in a faded photograph; brightness outside the network's input
_MOST_PIXELS = 200_000_000  # twice the largest photograph that is read
_STRIP = 256  # rows blended at a time: floating point takes sixteen times the memory
_INK, _FAINT, _ALARM = (20, 20, 20), (110, 110, 110), (200, 56, 10)


@dataclass(frozen=True)
class Heat:
    """A map of finite values ``(h, w)`` over the part ``box`` (left, top, right, bottom) of a photograph.

    0 and below is transparent, ``top`` has full strength, ``peak`` ``(x, y)`` is marked; positions are in pixels.
    """

    values: NDArray[np.float32]
    box: Box
    top: float
    peak: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """A photograph with or without heat over it, words under it, and a colour bar in the unit ``scale``, if any.

    The first of ``words`` is bold; ``alarm`` is a last line in the alarm colour, such as for a map of zeros.
    """

    heat: Heat | None
    words: Sequence[str]
    alarm: str = ""
    scale: str = ""


def draw_page(
    photograph: Image.Image,
    heading: Sequence[str],
    rows: Sequence[Sequence[Panel]],
    cmap: str = "inferno",
    width: int | None = None,
    faded: bool = False,
    warning: str = "",
) -> Image.Image:
    """Draw rows of panels of one RGB photograph under the lines of ``heading``; the first is bold.

    Args:
        photograph: An RGB image.
        heading: Lines; the first is bold.
        rows: Rows of panels, from top to bottom.
        cmap: Colour map of the heat.
        width: Width of a panel in pixels; None magnifies a small photograph by a whole number.
        faded: Draw the photograph grey and dark under the heat, for maps as fine as the photograph; else pale.
        warning: A line below the heading in the alarm colour, such as for random weights.

    Raises:
        UsageError: for an unknown colour map, or a page of more than 200 million pixels.
    """
    plan = _Plan.of(photograph, max(map(len, rows)), width)
    head = plan.lines(heading, plan.width - 2 * plan.margin, _HEAD, warning)
    row_heights = [plan.panel[1] + max(map(plan.height_under, row)) + plan.gap for row in rows]
    height = 2 * plan.margin + plan.height(head) + sum(row_heights)
    if plan.width * height > _MOST_PIXELS:
        size = f"it would have {plan.width:,}x{height:,} pixels"
        raise UsageError(f"a page of {sum(map(len, rows))} panels is too large", size, "choose fewer")
    page = Image.new("RGB", (plan.width, height), "white")
    pen = ImageDraw.Draw(page)
    y = _write(pen, plan, plan.margin, plan.margin, head) + plan.gap
    for row, row_height in zip(rows, row_heights, strict=True):
        for column, panel in enumerate(row):
            x = plan.margin + column * (plan.panel[0] + plan.gap)
            page.paste(_picture(photograph, panel.heat, plan.panel, cmap, faded), (x, y))
            below = y + plan.panel[1] + plan.space
            if panel.scale and panel.heat is not None:
                below = _bar(page, pen, plan, panel, (cmap, faded), x, below)
            _write(pen, plan, x, below, plan.lines_under(panel))
        y += row_height
    return page


@dataclass(frozen=True)
class _Line:
    text: str
    size: int
    bold: bool
    colour: tuple[int, int, int]


@dataclass(frozen=True)
class _Plan:
    """Sizes of a page in pixels."""

    panel: tuple[int, int]
    zoom: float
    margin: int
    gap: int
    width: int

    @classmethod
    def of(cls, photograph: Image.Image, columns: int, width: int | None) -> _Plan:
        own = photograph.width
        if width is not None:
            factor = width / own
        else:
            factor = float(math.ceil(_LEAST_WIDTH / own)) if own < _LEAST_WIDTH else 1.0
        panel = (max(1, round(own * factor)), max(1, round(photograph.height * factor)))
        zoom = max(1.0, panel[0] / _LETTERING_WIDTH)  # small letters on a large photograph are not readable
        margin, gap = round(14 * zoom), round(12 * zoom)
        return cls(panel, zoom, margin, gap, 2 * margin + columns * panel[0] + (columns - 1) * gap)

    @property
    def space(self) -> int:
        """Distance of a picture, its bar and its words."""
        return round(4 * self.zoom)

    def font(self, size: int, bold: bool = False) -> Any:
        return font(round(size * self.zoom), bold)

    def line_height(self, size: int) -> int:
        return round(size * self.zoom * 1.4)

    def lines(self, texts: Sequence[str], width: int, first_size: int, alarm: str = "") -> list[_Line]:
        """``texts`` broken to ``width``, the first bold and of its own size; then ``alarm`` if it is not empty."""
        styles = [(first_size, True, _INK), *[(_TEXT, False, _FAINT)] * len(texts)]
        styled = [*zip(texts, styles, strict=False), *([(alarm, (_TEXT, False, _ALARM))] if alarm else [])]
        return [
            _Line(part, size, bold, colour)
            for text, (size, bold, colour) in styled
            for part in wrapped(printable(text), width, self.font(size, bold).getlength)
        ]

    def height(self, lines: Sequence[_Line]) -> int:
        return sum(self.line_height(line.size) for line in lines)

    def lines_under(self, panel: Panel) -> list[_Line]:
        return self.lines(panel.words, self.panel[0], _TEXT, panel.alarm)

    def height_under(self, panel: Panel) -> int:
        """Height of the bar and the words under a panel."""
        bar = self.line_height(_TEXT) + self.space if panel.scale else 0
        return self.height(self.lines_under(panel)) + bar + self.space


def _write(pen: ImageDraw.ImageDraw, plan: _Plan, x: int, y: int, lines: Sequence[_Line]) -> int:
    """Write lines; returns the y below them."""
    for line in lines:
        pen.text((x, y), line.text, fill=line.colour, font=plan.font(line.size, line.bold))
        y += plan.line_height(line.size)
    return y


def _bar(
    page: Image.Image, pen: ImageDraw.ImageDraw, plan: _Plan, panel: Panel, colour: tuple[str, bool], x: int, y: int
) -> int:
    """Draw ``0 ▒▒▓▓██ 0.0254 unit`` in the colours of heat over middle grey; returns the y below it."""
    assert panel.heat is not None
    letters, space = plan.font(_TEXT), plan.space
    high = f"{panel.heat.top:.3g}  {panel.scale}"
    begin = round(letters.getlength("0 ")) + space
    left = plan.panel[0] - begin - round(letters.getlength(high)) - 3 * space
    length = max(20, min(round(180 * plan.zoom), left))
    ramp = np.linspace(0, 1, length, dtype=np.float32)[None].repeat(plan.line_height(_TEXT) - space, 0)
    grey = np.full((*ramp.shape, 3), 128.0 * (1 - _DARKER if colour[1] else 1), np.float32)
    pen.text((x, y), "0", fill=_INK, font=letters)
    page.paste(Image.fromarray(_laid_over(grey, ramp, *colour)), (x + begin, y + space // 2))
    pen.text((x + begin + length + 2 * space, y), high, fill=_INK, font=letters)
    return y + plan.line_height(_TEXT) + space


def _picture(photograph: Image.Image, heat: Heat | None, size: tuple[int, int], cmap: str, faded: bool) -> Image.Image:
    """The photograph in the size of a panel, with the heat over the network's input and the rest dimmed."""
    magnified = size[0] > photograph.width and size[0] % photograph.width == 0
    resample = Image.Resampling.NEAREST if magnified else Image.Resampling.BILINEAR
    picture = photograph if size == photograph.size else photograph.resize(size, resample)
    if heat is None:
        return picture
    grey = picture.convert("L").convert("RGB")
    # the photograph's own colours must not look like heat
    picture = Image.blend(grey, Image.new("RGB", size), _DARKER) if faded else Image.blend(picture, grey, _PALER)
    factor = (size[0] / photograph.width, size[1] / photograph.height)
    strength, covered = _spread(heat, size, factor)
    pixels = np.array(picture)
    for strip in (slice(begin, begin + _STRIP) for begin in range(0, size[1], _STRIP)):
        clear = np.where(covered[strip, :, None], np.float32(1), np.float32(_OUTSIDE)) * pixels[strip]
        pixels[strip] = _laid_over(clear, strength[strip], cmap, faded)
    shown = Image.fromarray(pixels)
    if heat.peak is not None:
        _mark(ImageDraw.Draw(shown), heat.peak[0] * factor[0], heat.peak[1] * factor[1], max(5.0, size[0] / 64))
    return shown


def _spread(
    heat: Heat, size: tuple[int, int], factor: tuple[float, float]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The strength of the heat at each pixel, 0 to 1, and which pixels the map covers."""
    left, top, right, bottom = (round(side * factor[at % 2]) for at, side in enumerate(heat.box))
    scaled = np.clip(heat.values / heat.top, 0, 1) if heat.top > 0 else np.zeros_like(heat.values)
    whole = (max(1, right - left), max(1, bottom - top))
    # bilinear between the centres of the cells, as torch's interpolate with align_corners=False
    part = np.asarray(Image.fromarray(scaled.astype(np.float32)).resize(whole, Image.Resampling.BILINEAR))
    strength = np.zeros((size[1], size[0]), np.float32)
    covered = np.zeros((size[1], size[0]), bool)
    x, y = max(left, 0), max(top, 0)  # a padded picture's map reaches beyond the photograph
    x_end, y_end = min(right, size[0]), min(bottom, size[1])
    strength[y:y_end, x:x_end] = part[y - top : y_end - top, x - left : x_end - left]
    covered[y:y_end, x:x_end] = True
    return strength, covered


def _laid_over(pixels: NDArray[np.float32], strength: NDArray[np.float32], cmap: str, faded: bool) -> NDArray[np.uint8]:
    """Blend the colour map over ``pixels`` with opacity proportional to ``strength ** 0.7``."""
    levels = (strength * (colours.LEVELS - 1)).round().astype(np.uint8)
    colour = colours.palette(cmap)[levels].astype(np.float32)
    alpha = ((_STRONGEST_FADED if faded else _STRONGEST) * strength**0.7)[..., None]
    mixed: NDArray[np.uint8] = (pixels * (1 - alpha) + colour * alpha).round().clip(0, 255).astype(np.uint8)
    return mixed


def _mark(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float) -> None:
    """Draw a cross in a ring, white with a black edge, visible on any colour."""
    for colour, width in (((0, 0, 0), 3), ((255, 255, 255), 1)):
        wide = max(width, round(width * radius / 8))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=wide)
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            pen.line((x + dx * radius, y + dy * radius, x + dx * radius * 1.7, y + dy * radius * 1.7), colour, wide)
