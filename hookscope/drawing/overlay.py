"""Maps laid over the photograph they are about, on a page that says what they show and how strong they are."""

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

# Of a panel: one that is smaller is magnified by a whole number, so that its words can be read.
_LEAST_WIDTH, _LETTERING_WIDTH = 320, 640
_TEXT, _HEAD = 12, 15
_PALER = 0.7  # how much of the photograph's colours goes under heat
_STRONGEST, _STRONGEST_FADED = 0.72, 0.95  # how much of the photograph the highest value covers
_DARKER, _UNSEEN = 0.6, 0.45  # how much darker a faded photograph is; what is left of the part nobody saw
_MOST_PIXELS = 200_000_000  # twice the largest photograph that is read
_STRIP = 256  # rows whose colours are mixed at a time: in floating point they take sixteen times the memory
_INK, _FAINT, _ALARM = (20, 20, 20), (110, 110, 110), (200, 56, 10)


@dataclass(frozen=True)
class Heat:
    """A map to lay over a photograph.

    Attributes:
        values: ``(h, w)``, finite; what is 0 or below is left clear.
        box: ``(left, top, right, bottom)`` in pixels of the photograph that the map covers.
        top: The value drawn strongest; those above it look the same.
        peak: ``(x, y)`` in pixels of the photograph to mark, None for no mark.
    """

    values: NDArray[np.float32]
    box: Box
    top: float
    peak: tuple[float, float] | None = None


@dataclass(frozen=True)
class Panel:
    """A photograph, perhaps with a map over it, and the words under it.

    Attributes:
        heat: None for the photograph alone.
        words: Lines under it; the first is bold.
        alarm: A line in a colour of its own, such as that the map is all zero.
        scale: What the colour bar counts, empty for no bar.
    """

    heat: Heat | None
    words: Sequence[str]
    alarm: str = ""
    scale: str = ""


Row = Sequence[Panel]


def draw_page(
    photograph: Image.Image,
    heading: Sequence[str],
    rows: Sequence[Row],
    cmap: str = "inferno",
    width: int | None = None,
    faded: bool = False,
    warning: str = "",
) -> Image.Image:
    """The page: a heading, and rows of panels of one photograph.

    Args:
        photograph: RGB, as it is.
        heading: Lines; the first is bold.
        rows: Panels beside and below each other.
        cmap: Colour map of the heat.
        width: Of a panel in pixels, None for the photograph's own; a small one is magnified by a whole number.
        faded: Draw the photograph grey and dark under heat, for maps as fine as itself; else it is pale under heat.
        warning: A line under the heading in a colour of its own, such as that the weights are random.

    Raises:
        UsageError: for a colour map that does not exist, or a page of more than 200 million pixels.

    Example:
        >>> import numpy as np
        >>> from PIL import Image
        >>> heat = Heat(np.eye(2, dtype=np.float32), (0, 0, 400, 300), 1.0)
        >>> draw_page(Image.new("RGB", (400, 300)), ["a page"], [[Panel(heat, ["conv1"], scale="value")]]).size
        (428, 403)
    """
    plan = _Plan.of(photograph, heading, rows, width, warning)
    if plan.width * plan.height > _MOST_PIXELS:
        size = f"it would have {plan.width:,}x{plan.height:,} pixels"
        raise UsageError(f"a page of {sum(map(len, rows))} panels is too large", size, "choose fewer")
    page = Image.new("RGB", (plan.width, plan.height), "white")
    pen = ImageDraw.Draw(page)
    across = plan.width - 2 * plan.margin
    y = _write(pen, plan, plan.margin, plan.margin, heading, across, _HEAD)
    y = _warn(pen, plan, plan.margin, y, warning, across) + plan.gap
    for row, words_height in zip(rows, plan.word_heights, strict=True):
        for at, panel in enumerate(row):
            x = plan.margin + at * (plan.panel[0] + plan.gap)
            page.paste(_picture(photograph, panel.heat, plan.panel, cmap, faded), (x, y))
            _under(page, pen, plan, panel, (cmap, faded), x, y + plan.panel[1])
        y += plan.panel[1] + words_height + plan.gap
    return page


@dataclass(frozen=True)
class _Plan:
    """Sizes in pixels."""

    panel: tuple[int, int]
    zoom: float
    margin: int
    gap: int
    width: int
    height: int
    word_heights: tuple[int, ...]

    @classmethod
    def of(
        cls, photograph: Image.Image, heading: Sequence[str], rows: Sequence[Row], width: int | None, warning: str
    ) -> _Plan:
        own = photograph.width
        if width is not None:
            factor = width / own
        else:
            factor = float(math.ceil(_LEAST_WIDTH / own)) if own < _LEAST_WIDTH else 1.0
        panel = (max(1, round(own * factor)), max(1, round(photograph.height * factor)))
        zoom = max(1.0, panel[0] / _LETTERING_WIDTH)  # on a large photograph small letters cannot be read
        margin, gap = round(14 * zoom), round(12 * zoom)
        columns = max(len(row) for row in rows)
        across = 2 * margin + columns * panel[0] + (columns - 1) * gap
        draft = cls(panel, zoom, margin, gap, across, 0, ())
        inside = across - 2 * margin
        head = draft.text_height(heading, inside, _HEAD) + draft.warning_height(warning, inside)
        under = tuple(max(draft.under_height(one) for one in row) for row in rows)
        height = 2 * margin + head + sum(panel[1] + gap + words for words in under)
        return cls(panel, zoom, margin, gap, across, height, under)

    @property
    def space(self) -> int:
        """Between a picture, its bar and its words."""
        return round(4 * self.zoom)

    def font(self, size: int, bold: bool = False) -> Any:
        """The font of a size at this zoom."""
        return font(round(size * self.zoom), bold)

    def line(self, size: int) -> int:
        """The height of a line of text."""
        return round(size * self.zoom * 1.4)

    def text_height(self, lines: Sequence[str], width: int, first: int) -> int:
        """The height of lines of text, the first bold and larger."""
        return sum(self.line(size) * len(parts) for parts, size, _ in self.broken(lines, width, first))

    def broken(self, lines: Sequence[str], width: int, first: int) -> list[tuple[list[str], int, bool]]:
        """Each line broken to ``width``, its size and whether it is bold."""
        found = []
        for at, line in enumerate(lines):
            size = first if at == 0 else _TEXT
            found.append((wrapped(printable(line), width, self.font(size, at == 0).getlength), size, at == 0))
        return found

    def warning_height(self, text: str, width: int) -> int:
        """The height of a warning, 0 for none."""
        return self.line(_TEXT) * len(self.warning_lines(text, width))

    def warning_lines(self, text: str, width: int) -> list[str]:
        """A warning broken to ``width``, nothing for none."""
        return wrapped(printable(text), width, self.font(_TEXT).getlength) if text else []

    def under_height(self, panel: Panel) -> int:
        """The height of what stands under a panel."""
        return (
            self.text_height(panel.words, self.panel[0], _TEXT)
            + self.warning_height(panel.alarm, self.panel[0])
            + (self.line(_TEXT) + self.space if panel.scale else 0)
            + self.space
        )


def _write(pen: ImageDraw.ImageDraw, plan: _Plan, x: int, y: int, lines: Sequence[str], width: int, first: int) -> int:
    """Write lines, the first bold; returns the y below them."""
    for parts, size, bold in plan.broken(lines, width, first):
        for part in parts:
            pen.text((x, y), part, fill=_INK if bold else _FAINT, font=plan.font(size, bold))
            y += plan.line(size)
    return y


def _under(
    page: Image.Image, pen: ImageDraw.ImageDraw, plan: _Plan, panel: Panel, colour: tuple[str, bool], x: int, y: int
) -> None:
    """The colour bar and the words under a panel."""
    y += plan.space
    if panel.scale and panel.heat is not None:
        y = _bar(page, pen, plan, panel, colour, x, y)
    y = _write(pen, plan, x, y, panel.words, plan.panel[0], _TEXT)
    _warn(pen, plan, x, y, panel.alarm, plan.panel[0])


def _warn(pen: ImageDraw.ImageDraw, plan: _Plan, x: int, y: int, text: str, width: int) -> int:
    """Write a warning; returns the y below it."""
    for part in plan.warning_lines(text, width):
        pen.text((x, y), part, fill=_ALARM, font=plan.font(_TEXT))
        y += plan.line(_TEXT)
    return y


def _bar(
    page: Image.Image, pen: ImageDraw.ImageDraw, plan: _Plan, panel: Panel, colour: tuple[str, bool], x: int, y: int
) -> int:
    """``0 ▒▒▓▓██ 0.0254 what it counts``, in the colours as they look over middle grey."""
    assert panel.heat is not None
    letters, space = plan.font(_TEXT), plan.space
    high = f"{panel.heat.top:.3g}  {panel.scale}"
    begin = round(letters.getlength("0 ")) + space
    left = plan.panel[0] - begin - round(letters.getlength(high)) - 3 * space
    length = max(20, min(round(180 * plan.zoom), left))
    ramp = np.linspace(0, 1, length, dtype=np.float32)[None].repeat(plan.line(_TEXT) - space, 0)
    grey = np.full((*ramp.shape, 3), 128.0 * (1 - _DARKER if colour[1] else 1), np.float32)
    pen.text((x, y), "0", fill=_INK, font=letters)
    page.paste(Image.fromarray(_laid_over(grey, ramp, *colour)), (x + begin, y + space // 2))
    pen.text((x + begin + length + 2 * space, y), high, fill=_INK, font=letters)
    return y + plan.line(_TEXT) + space


def _picture(photograph: Image.Image, heat: Heat | None, size: tuple[int, int], cmap: str, faded: bool) -> Image.Image:
    """The photograph in the size of a panel, with the heat over what the network saw, and the rest of it dimmed."""
    magnified = size[0] > photograph.width and size[0] % photograph.width == 0
    resample = Image.Resampling.NEAREST if magnified else Image.Resampling.BILINEAR
    picture = photograph if size == photograph.size else photograph.resize(size, resample)
    if heat is None:
        return picture
    grey = picture.convert("L").convert("RGB")
    # its own colours must not be taken for those of the heat
    picture = Image.blend(grey, Image.new("RGB", size), _DARKER) if faded else Image.blend(picture, grey, _PALER)
    factor = (size[0] / photograph.width, size[1] / photograph.height)
    strength, seen = _spread(heat, size, factor)
    pixels = np.array(picture)
    for strip in (slice(begin, begin + _STRIP) for begin in range(0, size[1], _STRIP)):
        clear = np.where(seen[strip, :, None], np.float32(1), np.float32(_UNSEEN)) * pixels[strip]
        pixels[strip] = _laid_over(clear, strength[strip], cmap, faded)
    shown = Image.fromarray(pixels)
    if heat.peak is not None:
        _mark(ImageDraw.Draw(shown), heat.peak[0] * factor[0], heat.peak[1] * factor[1], max(5.0, size[0] / 64))
    return shown


def _spread(
    heat: Heat, size: tuple[int, int], factor: tuple[float, float]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """How strong the heat is at each pixel, 0 to 1, and which pixels it covers."""
    left, top, right, bottom = (round(side * factor[at % 2]) for at, side in enumerate(heat.box))
    scaled = np.clip(heat.values / heat.top, 0, 1) if heat.top > 0 else np.zeros_like(heat.values)
    whole = (max(1, right - left), max(1, bottom - top))
    # bilinear between the middles of the cells, as torch's interpolate with align_corners=False
    part = np.asarray(Image.fromarray(scaled.astype(np.float32)).resize(whole, Image.Resampling.BILINEAR))
    strength = np.zeros((size[1], size[0]), np.float32)
    seen = np.zeros((size[1], size[0]), bool)
    x, y = max(left, 0), max(top, 0)  # a padded picture's map reaches beyond the photograph
    x_end, y_end = min(right, size[0]), min(bottom, size[1])
    strength[y:y_end, x:x_end] = part[y - top : y_end - top, x - left : x_end - left]
    seen[y:y_end, x:x_end] = True
    return strength, seen


def _laid_over(pixels: NDArray[np.float32], strength: NDArray[np.float32], cmap: str, faded: bool) -> NDArray[np.uint8]:
    """Colours of ``strength`` over ``pixels``, clearer the weaker: where nothing is, nothing is hidden."""
    levels = (strength * (colours.LEVELS - 1)).round().astype(np.uint8)
    colour = colours.palette(cmap)[levels].astype(np.float32)
    alpha = ((_STRONGEST_FADED if faded else _STRONGEST) * strength**0.7)[..., None]
    mixed: NDArray[np.uint8] = (pixels * (1 - alpha) + colour * alpha).round().clip(0, 255).astype(np.uint8)
    return mixed


def _mark(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float) -> None:
    """A cross in a ring, dark on light, so that it is seen on any colour."""
    for colour, width in (((0, 0, 0), 3), ((255, 255, 255), 1)):
        wide = max(width, round(width * radius / 8))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=wide)
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            pen.line((x + dx * radius, y + dy * radius, x + dx * radius * 1.7, y + dy * radius * 1.7), colour, wide)
