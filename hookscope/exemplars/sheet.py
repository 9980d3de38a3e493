"""The sheet of a layer: a row for each channel, with its exemplars, what their units see, and its histogram."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

from hookscope.display import Pictures
from hookscope.drawing import ALARM, FAINT, INK, MARGIN, Origin, font, read_provenance, with_provenance, wrapped
from hookscope.errors import HookscopeError, ImageError, all_of, printable
from hookscope.exemplars.facts import ChannelExemplars, Exemplar, LayerExemplars, SynthesizedImage
from hookscope.findings import counted, listed
from hookscope.geometry import Box, ReceptiveField
from hookscope.hooks import AnyModel
from hookscope.images import read_picture
from hookscope.models import LoadedModel, as_loaded
from hookscope.system import StrPath

CELL = 96
"""The longer side of a whole input and of the largest crop of a layer: at most so many pixels, more than half of it."""

_WHOLE = 0.5  # share of the input that a unit sees, from which on the whole input is shown
_RING = 5  # radius of the mark on a whole input


@dataclass(frozen=True, slots=True, eq=False)
class Crop:
    """What a unit sees of an exemplar."""

    image: Image.Image | None  # in pixels of the input, or made smaller to `CELL`; None if ``missing`` says why
    zoom: int = 1  # how many times to magnify it; the same for all crops of a layer but whole inputs
    dot: tuple[float, float] | None = None  # in pixels of a whole input, the centre of what the unit sees
    missing: str = ""

    @property
    def size(self) -> tuple[int, int]:
        width, height = (CELL, CELL) if self.image is None else self.image.size
        return width * self.zoom, height * self.zoom

    def drawn(self) -> Image.Image | None:
        """The image magnified by nearest neighbour, with a ring around the place of a unit that sees most of it."""
        if self.image is None:
            return None
        drawn = self.image.resize(self.size, Image.Resampling.NEAREST)
        if self.dot is not None:
            pen, (x, y) = ImageDraw.Draw(drawn), (place * self.zoom for place in self.dot)
            for colour, width in (((0, 0, 0), 4), ((255, 255, 255), 2)):
                radius = _RING + width // 4
                pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=width)
        return drawn


Crops = dict[tuple[str, Exemplar], Crop]
"""The crop of each exemplar by the key of its layer and the exemplar."""


def cut_crops(
    net: LoadedModel,
    layers: Iterable[LayerExemplars],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Crops:
    """Read each image of the exemplars once, and cut out what the units see of the network's input.

    A crop is by the key of its layer and the exemplar. If the file is gone or has changed, a crop without image says so
    in ``missing``. Of a clip the first frame is shown. ``on_progress`` gets the numbers of images done and in all.
    """
    wanted: dict[tuple[str, str], list[tuple[LayerExemplars, Exemplar]]] = {}
    longest: dict[str, int] = {}
    for layer in layers:
        exemplars = dict.fromkeys(image for channel in layer.channels for image in (*channel.most, *channel.least))
        for exemplar in exemplars:
            wanted.setdefault((exemplar.name, exemplar.sha256), []).append((layer, exemplar))
        boxes = [image.box for image in exemplars if not _is_whole(layer.field, image)]
        sides = [side for left, top, right, bottom in boxes for side in (right - left, bottom - top)]
        longest[layer.key] = max([1, *sides])
    crops: Crops = {}
    for done, ((name, sha256), users) in enumerate(wanted.items()):
        picture = users[0][1].image or _seen(net, name, sha256)
        parts: dict[tuple[Box, int], Image.Image] = {}  # the whole input may be a crop of many channels
        for layer, exemplar in users:
            if isinstance(picture, str):
                crops[layer.key, exemplar] = Crop(None, missing=picture)
                continue
            box, dot = _part(layer.field, exemplar)
            side = max(exemplar.size) if _is_whole(layer.field, exemplar) else longest[layer.key]
            reduced = min(1.0, CELL / side)
            if (box, side) not in parts:
                parts[box, side] = _cut(picture, box, reduced)
            place = dot and (dot[0] * reduced, dot[1] * reduced)
            crops[layer.key, exemplar] = Crop(parts[box, side], max(1, CELL // side), place)
        on_progress(done + 1, len(wanted))
    return crops


def _is_whole(field: ReceptiveField, exemplar: Exemplar) -> bool:
    """Whether the whole input is shown: the unit sees most of it, or has no place."""
    rows, columns = (min(length, side) for length, side in zip(field.size, exemplar.size, strict=True))
    height, width = exemplar.size
    return exemplar.place is None or field.source == "whole" or rows * columns >= _WHOLE * height * width


def _part(field: ReceptiveField, exemplar: Exemplar) -> tuple[Box, tuple[float, float] | None]:
    """The part of the input to show: what the unit sees, or if that is most of the input, all with its centre."""
    height, width = exemplar.size
    if not _is_whole(field, exemplar):
        return exemplar.box, None
    box = (0, 0, width, height)
    if exemplar.place is None or not all(field.stride):
        return box, None
    row, column = exemplar.place
    at = row, column % field.frame if field.frame else column
    y, x = (
        min(max(0.0, field.start[axis] + at[axis] * field.stride[axis] + field.size[axis] / 2), side)
        for axis, side in enumerate(exemplar.size)
    )
    return box, (x, y)


def _cut(picture: Image.Image, box: Box, reduced: float) -> Image.Image:
    left, top, right, bottom = box
    part = picture.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
    return part if reduced == 1 else _reduced(part, reduced)


def _reduced(image: Image.Image, by: float) -> Image.Image:
    return image.resize((max(1, round(image.width * by)), max(1, round(image.height * by))), Image.Resampling.BOX)


def _seen(net: LoadedModel, name: str, sha256: str) -> Image.Image | str:
    """What the network saw of an image, or why that is not known."""
    if not os.path.isfile(name):
        return "cannot be read again" if name == "-" or os.path.exists(name) else "file not found"
    try:
        picture = read_picture(name, frames=net.preprocess.frames)
    except HookscopeError:
        return "cannot be read"
    if sha256 and picture.sha256 != sha256:
        return "the file has changed"
    return net.preprocess.denormalise(net.prepare(picture))


def lost_words(crops: Crops) -> str:
    """Which files have no crop, and why, in one sentence; empty if all have one."""
    lost = dict.fromkeys((exemplar.name, crop.missing) for (_, exemplar), crop in crops.items() if crop.missing)
    words = listed([f"{name} ({why})" for name, why in lost], 3)
    return f"{counted(len(lost), 'exemplar image')} cannot be drawn: {words}" if lost else ""


_ROWS = 32  # of a page
_MOST_PIXELS = 40_000_000  # of a page; 50 exemplars and more leave fewer rows
_GAP, _BETWEEN = 6, 22  # between cells, and between the groups of cells
_LEFT, _HISTOGRAM, _LEAST_WIDTH = 128, 150, 760
_SPIKE = 48  # times as wide is the histogram of a channel with one value
_LINE, _TEXT, _HEAD = 15, 11, 15
_ROW = CELL + 2 * _LINE + 14
_BAR, _EMPTY = (140, 195, 199), (236, 238, 240)
RING_WORDS = "a ring is the centre of what the unit sees"
_GROUPS = {
    "most": "excite it most, the strongest first",
    "least": "excite it least, the weakest first",
    "synthesized": "synthesized",
}
_MEASURES = {"max": "largest", "mean": "mean", "abs": "largest absolute"}


def draw_exemplars(
    layer: LayerExemplars | Sequence[LayerExemplars], net: AnyModel, crops: Crops | None = None
) -> list[Image.Image]:
    """Draw the exemplars of a layer: a row for each channel, on pages of at most 32 rows.

    A row has the channel, its classes and selectivity, and the images that excite it most, the strongest first, with
    values and labels. Images that excite it least and synthesized images follow, and the histogram of its values, whose
    heights are square roots. A crop is what the unit sees of the network's input, magnified by nearest neighbour. If a
    unit sees half of the input or more, the whole input is shown, with a ring at the centre of what the unit sees.

    Each page holds the facts as JSON in ``image.info["hookscope"]``. Where a file is gone or has changed, an empty cell
    says so.

    Args:
        layer: What `find_exemplars` returns, or one layer of it.
        net: The model that they were found with.
        crops: The crops if they are known; by default they are cut from the files.

    Example:
        >>> import hookscope
        >>> net = hookscope.load_model("shapes")
        >>> [layer] = hookscope.find_exemplars(net, ["samples/shapes/star.png"], layers="features.10", channels=[0, 1])
        >>> [page] = draw_exemplars(layer, net)
        >>> page.width > 700
        True
    """
    net, layers, pages = as_loaded(net), all_of(LayerExemplars, layer, "find_exemplars"), Pictures()
    crops = cut_crops(net, layers) if crops is None else crops
    for layer in layers:
        sheet = ExemplarsSheet(layer, Origin.of(net), crops)
        rows = max(1, min(_ROWS, _MOST_PIXELS // (sheet.width * _ROW)))
        parts = [layer.channels[first : first + rows] for first in range(0, len(layer.channels), rows)]
        pages += [sheet.page(part, (at + 1, len(parts))) for at, part in enumerate(parts)]
    return pages


def is_sheet(path: StrPath) -> bool:
    try:
        return {"measure", "field", "page"} <= read_provenance(path).keys()
    except ImageError:
        return False


def field_words(field: ReceptiveField) -> str:
    reason = f": {field.reason}" if field.reason else ""
    if field.source == "whole":
        return f"receptive field: the whole input{reason}"
    height, width = (f"{side:.4g}" for side in field.size)
    down, right = (f"{step:.4g}" for step in field.stride)
    steps = down if down == right else f"{down} down and {right} to the right"
    how = {"computed": "computed from the layers", "measured": "measured by gradients"}[field.source] + reason
    return f"receptive field: {width}×{height} pixels of the input, one unit every {steps}; {how}"


def measure_words(measure: str) -> str:
    return f"value: the {_MEASURES[measure]} activation of the channel on the image"


def times_best(image: SynthesizedImage) -> str:
    if image.best is None:
        return "no exemplar"
    if image.best > 0:
        return f"{image.value / image.best:.2f} × the best"
    return f"best {image.best:.4g}"


def _width(count: int) -> int:
    return count * (CELL + _GAP) - _GAP


class ExemplarsSheet:
    """The pages of a layer; ``groups`` of cells in a row are a field of a channel, words and a number of cells."""

    def __init__(self, layer: LayerExemplars, origin: Origin, crops: Crops) -> None:
        self.layer, self.origin, self.crops = layer, origin, crops
        counts = {name: max((len(getattr(channel, name)) for channel in layer.channels), default=0) for name in _GROUPS}
        self.groups = [(name, _GROUPS[name], count) for name, count in counts.items() if count]
        cells = sum(_width(count) + _BETWEEN for *_, count in self.groups)
        self.width = max(_LEAST_WIDTH, 2 * MARGIN + _LEFT + cells + _HISTOGRAM)

    def page(self, channels: Sequence[ChannelExemplars], number: tuple[int, int]) -> Image.Image:
        lines = self._heading(channels, number)
        top = MARGIN + sum(size + 5 for _, size, _, _ in lines) + 8
        self.image = Image.new("RGB", (self.width, top + _LINE + len(channels) * _ROW + MARGIN), "white")
        self.pen, y = ImageDraw.Draw(self.image), MARGIN
        for text, size, bold, colour in lines:
            self.pen.text((MARGIN, y), text, colour, font(size, bold))
            y += size + 5
        x = MARGIN + _LEFT
        for _, words, count in self.groups:
            _write(self.pen, words, (x, top - 2), _width(count) + _BETWEEN - _GAP, FAINT)
            x += _width(count) + _BETWEEN
        _write(self.pen, f"values of {self.layer.images:,} images", (x, top - 2), _HISTOGRAM, FAINT)
        for at, channel in enumerate(channels):
            self._row(channel, top + _LINE + at * _ROW)
        return with_provenance(self.image, _provenance(self.layer, channels, number, self.origin))

    def _heading(
        self, channels: Sequence[ChannelExemplars], number: tuple[int, int]
    ) -> list[tuple[str, int, bool, tuple[int, int, int]]]:
        """The lines above the rows: text, size, whether bold, colour."""
        layer, origin, (at, count) = self.layer, self.origin, number
        index = "" if layer.call.index is None else f"   index {layer.call.index}"
        span = f"   channels {channels[0].channel} to {channels[-1].channel}, page {at} of {count}" if count > 1 else ""
        words = [origin.model, *origin.words, f"{layer.images:,} images", measure_words(layer.measure)]
        has_rings = any(self.crops[layer.key, exemplar].dot for channel in channels for exemplar in channel.most)
        legend = field_words(layer.field) + (f"   {RING_WORDS}" if has_rings else "")
        texts = [(f"{layer.key or layer.call.type}   {layer.call.type}{index}{span}", _HEAD, True, INK)]
        texts += [("   ".join(filter(None, words)), _TEXT, False, FAINT), (legend, _TEXT, False, FAINT)]
        texts += [(origin.alarm, _TEXT, True, ALARM)] if origin.alarm else []
        return [
            (line, size, bold, colour)
            for text, size, bold, colour in texts
            for line in wrapped(printable(text), self.width - 2 * MARGIN, font(size, bold).getlength)
        ]

    def _row(self, channel: ChannelExemplars, y: int) -> None:
        self.pen.line((MARGIN, y, self.width - MARGIN, y), _EMPTY)
        y += 5
        self.pen.text((MARGIN, y), f"channel {channel.channel}", INK, font(_TEXT + 1, True))
        words = ["one value for all"] if len(channel.counts) == 1 and int(channel.counts[0]) > 1 else []
        words += ["always below 0"] if channel.most and channel.most[0].value < 0 else []
        words += [f"selectivity {channel.selectivity:.2f}"] if channel.selectivity is not None else []
        words += [f"for {channel.best_class}"] if channel.best_class else []
        words += [f"{label} {count}" for label, count in channel.classes]
        words += [f"NaN or Inf on {channel.nonfinite:,}"] if channel.nonfinite else []
        for at, text in enumerate(words[: CELL // _LINE]):
            _write(self.pen, text, (MARGIN, y + (at + 1) * (_LINE + 1)), _LEFT - 10, INK if at < 2 else FAINT)
        x = MARGIN + _LEFT
        for name, _, count in self.groups:
            for at, picture in enumerate(getattr(channel, name)):
                left = x + at * (CELL + _GAP)
                if isinstance(picture, Exemplar):
                    self._cell(self.crops[self.layer.key, picture], (left, y))
                    under = [f"{picture.value:.4g}", picture.label]
                else:
                    self._paste(fitted(picture.image), (left, y))
                    under = [f"{picture.value:.4g}", times_best(picture)]
                for line, text in enumerate(under):
                    place = left, y + CELL + 1 + line * _LINE
                    _write(self.pen, text, place, CELL + _GAP - 2, FAINT if line else INK)
            x += _width(count) + _BETWEEN
        _histogram(self.pen, channel, x, y)

    def _cell(self, crop: Crop, at: tuple[int, int]) -> None:
        drawn, (x, y) = crop.drawn(), at
        if drawn is not None:
            self._paste(drawn, at)
            return
        self.pen.rectangle((x, y, x + CELL - 1, y + CELL - 1), _EMPTY, ALARM)
        lines = wrapped(crop.missing, CELL - 12, font(_TEXT).getlength)
        for line, text in enumerate(lines):
            self.pen.text((x + 6, y + CELL // 2 + (line - len(lines) / 2) * _LINE), text, ALARM, font(_TEXT))

    def _paste(self, drawn: Image.Image, at: tuple[int, int]) -> None:
        """Put a crop in the middle of its cell, with an outline: it may be white as the page."""
        x, y = at[0] + (CELL - drawn.width) // 2, at[1] + (CELL - drawn.height) // 2
        self.pen.rectangle((x - 1, y - 1, x + drawn.width, y + drawn.height), outline=_EMPTY)
        self.image.paste(drawn, (x, y))


def fitted(image: Image.Image) -> Image.Image:
    zoom = CELL // max(image.size)
    if not zoom:
        return _reduced(image, CELL / max(image.size))
    return image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST)


def _histogram(pen: ImageDraw.ImageDraw, channel: ChannelExemplars, x: int, y: int) -> None:
    counts, bottom = channel.counts, y + CELL - 1
    pen.line((x, bottom + 1, x + _HISTOGRAM - 1, bottom + 1), _BAR)
    if not len(counts):
        return
    around = [0] * (_SPIKE // 2) if len(counts) == 1 else []  # equal values are a spike, not a block
    bars = [*around, *counts.tolist(), *around]
    highest = max(1, *bars)
    for at, count in enumerate(bars):
        left, right = x + at * _HISTOGRAM // len(bars), x + (at + 1) * _HISTOGRAM // len(bars) - 1
        if count:
            pen.rectangle((left, bottom - round((CELL - 2) * math.sqrt(count / highest)), right, bottom), _BAR)
    # a bucket ends beyond the values in it
    least = max([float(channel.edges[0]), *(exemplar.value for exemplar in channel.least[:1])])
    most = min([float(channel.edges[-1]), *(exemplar.value for exemplar in channel.most[:1])])
    low, high = f"{least:.4g}", f"{most:.4g}"
    pen.text((x, bottom + 2), low, FAINT, font(_TEXT))
    pen.text((x + _HISTOGRAM - font(_TEXT).getlength(high), bottom + 2), high, FAINT, font(_TEXT))


def _write(
    pen: ImageDraw.ImageDraw, text: str, at: tuple[float, float], width: int, colour: tuple[int, int, int]
) -> None:
    letters, text = font(_TEXT), printable(text)
    if letters.getlength(text) > width:
        while text and letters.getlength(f"{text}…") > width:
            text = text[:-1]
        text += "…"
    pen.text(at, text, colour, letters)


def _provenance(
    layer: LayerExemplars, channels: Sequence[ChannelExemplars], number: tuple[int, int], origin: Origin
) -> dict[str, Any]:
    call, field = layer.call, layer.field
    about = {name: value for name, value in origin.facts().items() if name not in ("image", "sha256")}
    return {
        **about,
        "layer": call.name,
        **_named(call, "call", "index", "order", "type"),
        **_named(layer, "part", "measure", "images"),
        "page": list(number),
        "field": _named(field, "source", "size", "stride", "start", "reason"),
        "channels": [_channel_facts(channel) for channel in channels],
    }


def _channel_facts(channel: ChannelExemplars) -> dict[str, Any]:
    exemplar, names = ("value", "name", "sha256", "label", "place", "box"), ("channel", "selectivity", "best_class")
    return {
        **_named(channel, *names),
        "classes": dict(channel.classes),
        "nonfinite": channel.nonfinite,
        "most": [_named(image, *exemplar) for image in channel.most],
        "least": [_named(image, *exemplar) for image in channel.least],
        "synthesized": [_named(image, "value", "best", "seed") for image in channel.synthesized],
    }


def _named(facts: Any, *names: str) -> dict[str, Any]:
    """Attributes by their names; NaN and Inf are texts, which JSON has none for."""
    values = {name: getattr(facts, name) for name in names}
    bad = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: str(value) if name in bad else value for name, value in values.items()}
