"""Pages of heat maps over a photograph, with words and a colour bar under each; classes of pixels, and boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import nn

from hookscope.drawing import colours
from hookscope.drawing.text import font, wrapped
from hookscope.errors import UsageError, printable
from hookscope.images import InputImage
from hookscope.models import LoadedModel

Box = tuple[float, float, float, float]

# A panel narrower than the first is magnified by a whole number; on one wider than the second the letters grow.
_LEAST_WIDTH, _LETTERING_WIDTH = 320, 640
_TEXT, _HEAD = 12, 15
_LEAST_TEXT = 300  # width of a heading beside the photograph
_OUTSIDE = 0.45  # brightness of the photograph outside the network's input
_VISIBLE = 0.1  # share of the scale: a lower peak would be a mark on a map without a colour
_MOST_PIXELS = 200_000_000  # twice the largest photograph that is read
_STRIP = 256  # rows blended at a time: floating point takes sixteen times the memory
INK, FAINT, ALARM = (20, 20, 20), (110, 110, 110), (200, 56, 10)


@dataclass(frozen=True)
class Ground:
    """How the photograph looks under heat.

    Attributes:
        grey: Share of grey in its colours, which must not look like heat.
        toward: Brightness that its grey is blended to, 0 to 255.
        share: Share of that brightness.
        strongest: Opacity of the strongest heat.
    """

    grey: float
    toward: int
    share: float
    strongest: float

    def under(self, picture: Image.Image) -> Image.Image:
        """The photograph ``picture`` as it is drawn under heat."""
        grey = picture.convert("L").convert("RGB")
        blended = grey if self.grey == 1 else Image.blend(picture, grey, self.grey)
        return Image.blend(blended, Image.new("RGB", picture.size, (self.toward,) * 3), self.share)


PALE = Ground(0.7, 128, 0.0, 0.72)
"""For maps coarser than the photograph."""
DARK = Ground(1.0, 0, 0.5, 0.95)
"""For maps as fine as the photograph, from 0."""
LIGHT = Ground(1.0, 255, 0.55, 0.95)
"""For maps as fine as the photograph, in two colours about 0."""


@dataclass(frozen=True)
class Heat:
    """A map of finite values ``(h, w)`` over the part ``box`` (left, top, right, bottom) of a photograph.

    0 is transparent, ``top`` has full strength. Values below 0 are transparent too, or if the map is ``signed``, have
    the colours of the other half of the colour map, down to ``-top``. ``peak`` ``(x, y)`` is marked, and ``frame`` is
    outlined; positions are in pixels of the photograph.
    """

    values: NDArray[np.float32]
    box: Box
    top: float
    peak: tuple[float, float] | None = None
    signed: bool = False
    frame: Box | None = None

    @property
    def mark(self) -> tuple[float, float] | None:
        """The peak, None where the map has hardly a colour."""
        highest = float(self.values.max())
        return self.peak if highest > 0 and highest >= _VISIBLE * self.top else None


@dataclass(frozen=True)
class HeatPanel:
    """A photograph with or without heat over it, words under it, and a colour bar in the unit ``scale``, if any.

    The first of ``words`` is bold; ``alarm`` is a last line in the alarm colour, such as for a map of zeros.
    ``photograph`` takes the place of the page's, as a frame of a clip does; it has the same size.
    """

    heat: Heat | None
    words: Sequence[str]
    alarm: str = ""
    scale: str = ""
    photograph: Image.Image | None = None


@dataclass(frozen=True)
class HeatRow:
    """Panels side by side, and the words above them, of which the first are bold."""

    panels: Sequence[HeatPanel]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Heading:
    """What stands above the rows of a page.

    Attributes:
        words: Lines; the first is bold.
        warning: A line in the alarm colour below the words.
        first: A line in the alarm colour above the words, such as for random weights.
        photograph: Whether the photograph stands at the left of the words.
        scale: The unit of a colour bar from 0 to 1 for the whole page, if any.
        signed: Whether that bar begins at -1.
    """

    words: Sequence[str]
    warning: str = ""
    first: str = ""
    photograph: bool = False
    scale: str = ""
    signed: bool = False


def draw_heat_page(
    photograph: Image.Image,
    heading: Heading,
    rows: Sequence[HeatRow],
    cmap: str = "inferno",
    width: int | None = None,
    ground: Ground = PALE,
) -> Image.Image:
    """Draw rows of panels of one RGB photograph under a heading.

    Args:
        photograph: An RGB image.
        heading: What stands above the rows.
        rows: The rows, from top to bottom.
        cmap: Colour map of the heat.
        width: Width of a panel in pixels; None magnifies a small photograph by a whole number.
        ground: How the photograph looks under the heat.

    Raises:
        UsageError: for an unknown colour map, or a page of more than 200 million pixels.
    """
    page = _HeatPage(photograph, max(len(row.panels) for row in rows), width, heading.photograph, cmap, ground)
    size = page.inner + 2 * page.margin, page.draw(heading, rows) + page.margin
    if size[0] * size[1] > _MOST_PIXELS:
        asked = f"a page of {sum(len(row.panels) for row in rows)} panels is too large"
        raise UsageError(asked, f"it would have {size[0]:,}x{size[1]:,} pixels", "choose fewer")
    page.image = Image.new("RGB", size, "white")
    page.draw(heading, rows)
    return page.image


def draw_heat(photograph: Image.Image, heat: Heat | None, width: int, cmap: str, ground: Ground = PALE) -> Image.Image:
    """The photograph ``width`` pixels wide with heat over it, without words."""
    size = (width, max(1, round(photograph.height * width / photograph.width)))
    return _picture(photograph, heat, size, cmap, ground)


def seen_part(picture: InputImage, net: LoadedModel | nn.Module | None) -> tuple[Image.Image, Box]:
    """The RGB photograph to draw maps on, and its part that the network saw: of a `LoadedModel`, else all of it."""
    photograph = picture.image
    if not isinstance(net, LoadedModel):
        return photograph, (0.0, 0.0, float(photograph.width), float(photograph.height))
    return net.preprocess.shown(photograph, net.prepare(picture))


class _HeatPage:
    """A page: its sizes in pixels, its image, and the colours of its heat; without an image, it is measured."""

    image: Image.Image | None = None

    def __init__(
        self, photograph: Image.Image, columns: int, width: int | None, inset: bool, cmap: str, ground: Ground
    ) -> None:
        self.photograph, self.cmap, self.ground = photograph, cmap, ground
        own = photograph.width
        factor = max(1, math.ceil(_LEAST_WIDTH / own)) if width is None else width / own
        self.panel = (max(1, round(own * factor)), max(1, round(photograph.height * factor)))
        self.zoom = max(1.0, self.panel[0] / _LETTERING_WIDTH)  # small letters on a large photograph are not readable
        self.margin, self.gap, self.space = (round(length * self.zoom) for length in (14, 12, 4))
        least = self.panel[0] + self.gap + round(_LEAST_TEXT * self.zoom) if inset else 0
        self.inner = max(columns * (self.panel[0] + self.gap) - self.gap, least)  # width without the margins

    def draw(self, heading: Heading, rows: Sequence[HeatRow]) -> int:
        """Draw or measure all; like the methods below, it returns the y below."""
        left, y = self.margin, self.margin
        if heading.photograph:
            y = self.add_picture(None, left, y)
            left += self.panel[0] + self.gap
        width = self.inner + self.margin - left
        below = self.write(left, self.margin, width, [], _TEXT, heading.first)
        below = self.write(left, below, width, heading.words, _HEAD, heading.warning)
        if heading.scale:
            below = self.add_bar(1.0, heading.signed, heading.scale, left, below, width)
        y = max(y, below)
        for row in rows:
            top = self.write(self.margin, y + self.gap, self.inner, row.words)
            for column, panel in enumerate(row.panels):
                x = self.margin + column * (self.panel[0] + self.gap)
                below = self.add_picture(panel.heat, x, top, panel.photograph)
                if panel.scale and panel.heat is not None:
                    below = self.add_bar(panel.heat.top, panel.heat.signed, panel.scale, x, below, self.panel[0])
                y = max(y, self.write(x, below, self.panel[0], panel.words, _TEXT, panel.alarm))
        return y

    def font(self, size: int, bold: bool = False) -> Any:
        return font(round(size * self.zoom), bold)

    def line_height(self, size: int) -> int:
        return round(size * self.zoom * 1.4)

    def write(self, x: int, y: int, width: int, texts: Sequence[str], first: int = _TEXT, alarm: str = "") -> int:
        """``texts`` broken to ``width``, the first bold and of its own size; then ``alarm`` if it is not empty."""
        styles = [(first, True, INK), *[(_TEXT, False, FAINT)] * len(texts)]
        styled = [*zip(texts, styles, strict=False), *([(alarm, (_TEXT, False, ALARM))] if alarm else [])]
        for text, (size, bold, colour) in styled:
            letters = self.font(size, bold)
            for part in wrapped(printable(text), width, letters.getlength):
                if self.image is not None:
                    ImageDraw.Draw(self.image).text((x, y), part, fill=colour, font=letters)
                y += self.line_height(size)
        return y

    def add_picture(self, heat: Heat | None, x: int, y: int, photograph: Image.Image | None = None) -> int:
        if self.image is not None:
            picture = _picture(photograph or self.photograph, heat, self.panel, self.cmap, self.ground)
            self.image.paste(picture, (x, y))
        return y + self.panel[1] + self.space

    def add_bar(self, top: float, signed: bool, scale: str, x: int, y: int, width: int) -> int:
        """``0 ▒▒▓▓██ 0.0254 unit`` over middle grey, in ``width``."""
        letters, space, bar_height = self.font(_TEXT), self.space, self.line_height(_TEXT)
        if self.image is None:
            return y + bar_height + space
        low, high = f"{-top:.3g}" if signed else "0", f"{top:.3g}  {scale}"
        begin = round(letters.getlength(f"{low} ")) + space
        left = width - begin - round(letters.getlength(high)) - 3 * space
        length = max(20, min(round(180 * self.zoom), left))
        ramp = np.linspace(-1 if signed else 0, 1, length, dtype=np.float32)[None]
        ramp = ramp.repeat(bar_height - space, 0)
        grey = np.asarray(self.ground.under(Image.new("RGB", ramp.shape[::-1], (128,) * 3))).astype(np.float32)
        drawn = Image.fromarray(_laid_over(grey, ramp, signed, self.cmap, self.ground))
        pen = ImageDraw.Draw(self.image)
        pen.text((x, y), low, fill=INK, font=letters)
        self.image.paste(drawn, (x + begin, y + space // 2))
        pen.text((x + begin + length + 2 * space, y), high, fill=INK, font=letters)
        return y + bar_height + space


def _picture(
    photograph: Image.Image, heat: Heat | None, size: tuple[int, int], cmap: str, ground: Ground
) -> Image.Image:
    """The photograph in the size of a panel, with the heat over the network's input and the rest dimmed."""
    magnified = size[0] > photograph.width and size[0] % photograph.width == 0
    resample = Image.Resampling.NEAREST if magnified else Image.Resampling.BILINEAR
    picture = photograph if size == photograph.size else photograph.resize(size, resample)
    if heat is None:
        return picture
    factor = (size[0] / photograph.width, size[1] / photograph.height)
    strength, covered = _spread(heat, size, factor)
    pixels = np.array(ground.under(picture))
    for strip in (slice(begin, begin + _STRIP) for begin in range(0, size[1], _STRIP)):
        clear = np.where(covered[strip, :, None], np.float32(1), np.float32(_OUTSIDE)) * pixels[strip]
        pixels[strip] = _laid_over(clear, strength[strip], heat.signed, cmap, ground)
    shown = Image.fromarray(pixels)
    if heat.frame is not None:
        _outline(shown, [side * factor[at % 2] for at, side in enumerate(heat.frame)])
    if (mark := heat.mark) is not None:
        _mark(ImageDraw.Draw(shown), mark[0] * factor[0], mark[1] * factor[1], max(5.0, size[0] / 64))
    return shown


def _spread(
    heat: Heat, size: tuple[int, int], factor: tuple[float, float]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The strength of the heat at each pixel, 0 or if signed -1 to 1, and which pixels the map covers."""
    left, top, right, bottom = (round(side * factor[at % 2]) for at, side in enumerate(heat.box))
    low = -1 if heat.signed else 0
    scaled = np.clip(heat.values / heat.top, low, 1) if heat.top > 0 else np.zeros_like(heat.values)
    whole = (max(1, right - left), max(1, bottom - top))
    # bilinear between the centres of the cells, as torch's interpolate with align_corners=False
    part = np.asarray(Image.fromarray(scaled.astype(np.float32)).resize(whole, Image.Resampling.BILINEAR))
    strength, covered = np.zeros(size[::-1], np.float32), np.zeros(size[::-1], bool)
    x, y = max(left, 0), max(top, 0)  # a padded picture's map reaches beyond the photograph
    x_end, y_end = min(right, size[0]), min(bottom, size[1])
    strength[y:y_end, x:x_end] = part[y - top : y_end - top, x - left : x_end - left]
    covered[y:y_end, x:x_end] = True
    return strength, covered


def _laid_over(
    pixels: NDArray[np.float32], strength: NDArray[np.float32], signed: bool, cmap: str, ground: Ground
) -> NDArray[np.uint8]:
    """Blend the colour map over ``pixels`` with opacity proportional to ``|strength| ** 0.7``."""
    shares = (strength + 1) / 2 if signed else strength
    levels = (shares * (colours.LEVELS - 1)).round().astype(np.uint8)
    colour = colours.palette(cmap)[levels].astype(np.float32)
    alpha = (ground.strongest * np.abs(strength) ** 0.7)[..., None]
    return (pixels * (1 - alpha) + colour * alpha).round().clip(0, 255).astype(np.uint8)


def _outline(picture: Image.Image, sides: Sequence[float]) -> None:
    """Draw a rectangle on ``picture``, white between black edges, visible on any colour; all of it lies inside."""
    width = max(1, round(picture.width / 320))
    low, highs = 2 * width, [max(2 * width, side - 1 - 2 * width) for side in picture.size] * 2
    left, top, right, bottom = (min(max(round(side), low), high) for side, high in zip(sides, highs, strict=True))
    right, bottom = max(left, right), max(top, bottom)  # an untrained detector turns boxes over
    pen = ImageDraw.Draw(picture)
    for grow, colour, wide in ((2 * width, (0, 0, 0), 3 * width), (width, (255, 255, 255), width)):
        pen.rectangle((left - grow, top - grow, right + grow, bottom + grow), outline=colour, width=wide)


def _mark(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float) -> None:
    """Draw a cross in a ring, white with a black edge, visible on any colour."""
    for colour, width in (((0, 0, 0), 3), ((255, 255, 255), 1)):
        wide = max(width, round(width * radius / 8))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=wide)
        for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            pen.line((x + dx * radius, y + dy * radius, x + dx * radius * 1.7, y + dy * radius * 1.7), colour, wide)


_OPACITY = 0.6
_CLASSES = 20  # colours; further classes begin again

Colour = tuple[int, int, int]


def class_colour(index: int) -> Colour:
    """The colour of class ``index``: strong colours first, then the pale ones of matplotlib's tab20."""
    at = index % _CLASSES
    red, green, blue = colormaps["tab20"].colors[2 * (at % 10) + at // 10]  # type: ignore[attr-defined]
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_classes(image: Image.Image, mask: NDArray[np.int64]) -> Image.Image:
    """The image in grey under the colours of the classes ``(h, w)``; -1 stands for none."""
    table = np.array([class_colour(at) for at in range(int(mask.max(initial=0)) + 1)] + [(0, 0, 0)], np.float32)
    classes = np.asarray(Image.fromarray(mask.astype(np.int32)).resize(image.size, Image.Resampling.NEAREST))
    ground = np.asarray(PALE.under(image)).astype(np.float32)
    opacity = np.where(classes < 0, 0, _OPACITY)[..., None]
    return Image.fromarray((ground * (1 - opacity) + table[classes] * opacity).round().astype(np.uint8))


def draw_boxes(image: Image.Image, boxes: Sequence[Box], colours: Sequence[Colour], scale: float = 1.0) -> Image.Image:
    """The image with numbered boxes, the first on top; positions are multiplied by ``scale``."""
    drawn, letters = image.copy(), font(_TEXT, bold=True)
    pen = ImageDraw.Draw(drawn)
    for number, (box, colour) in reversed([*enumerate(zip(boxes, colours, strict=True))]):
        left, top, right, bottom = (side * scale for side in box)
        right, bottom = max(left, right), max(top, bottom)
        pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=(0, 0, 0), width=4)
        pen.rectangle((left, top, right, bottom), outline=colour, width=2)
        x, y = max(0, min(left, drawn.width - 14)), max(0, min(top, drawn.height - 16))
        pen.rectangle((x, y, x + letters.getlength(str(number)) + 6, y + 15), fill=colour)
        pen.text((x + 3, y), str(number), fill=(0, 0, 0) if sum(colour) > 380 else (255, 255, 255), font=letters)
    return drawn
