"""What the network saw of each exemplar: the part of the image that the unit sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from PIL import Image, ImageDraw

from hookscope.errors import HookscopeError
from hookscope.exemplars.facts import Exemplar, LayerExemplars
from hookscope.findings import counted, listed
from hookscope.geometry import Box, ReceptiveField
from hookscope.images import read_picture
from hookscope.models import LoadedModel

CELL = 96
"""The longer side of a whole input and of the largest crop of a layer: at most so many pixels, more than half of it."""

_WHOLE = 0.5  # share of the input that a unit sees, from which on the whole input is shown
_RING = 5  # radius of the mark on a whole input


@dataclass(frozen=True, slots=True, eq=False)
class Crop:
    """What a unit sees of an exemplar.

    Attributes:
        image: The crop in pixels of the network's input, or made smaller to `CELL`; None if ``missing``.
        zoom: How many times to magnify it; the same for all crops of a layer that are not the whole input.
        dot: Centre of what the unit sees, in pixels of ``image``, where that is the whole input; else None.
        missing: Why there is no image.
    """

    image: Image.Image | None
    zoom: int = 1
    dot: tuple[float, float] | None = None
    missing: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in a cell."""
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

    Args:
        net: The model, whose preprocessing makes the network's input.
        layers: The result of `find_exemplars` or `read_exemplars`.
        on_progress: Gets the numbers of images done and in all.

    Returns:
        A crop for each exemplar, by the key of its layer and the exemplar; if the file is gone or has changed, a crop
        without image that says so in ``missing``. Of a clip the first frame is shown.

    Example:
        >>> import hookscope
        >>> net = hookscope.load_model("shapes")
        >>> layers = hookscope.find_exemplars(net, ["samples/shapes/star.png"], layers="features.3", channels=[0])
        >>> [crop.image.size for crop in cut_crops(net, layers).values()]
        [(15, 15)]
    """
    wanted: dict[tuple[str, str], list[tuple[LayerExemplars, Exemplar]]] = {}
    longest: dict[str, int] = {}
    for layer in layers:
        exemplars = dict.fromkeys(each for channel in layer.channels for each in (*channel.most, *channel.least))
        for exemplar in exemplars:
            wanted.setdefault((exemplar.name, exemplar.sha256), []).append((layer, exemplar))
        boxes = [each.box for each in exemplars if not _is_whole(layer.field, each)]
        sides = [side for left, top, right, bottom in boxes for side in (right - left, bottom - top)]
        longest[layer.key] = max([1, *sides])
    crops: Crops = {}
    for done, ((name, sha256), users) in enumerate(wanted.items()):
        seen = _seen(net, name, sha256)
        parts: dict[tuple[Box, int], Image.Image] = {}  # the whole input may be a crop of many channels
        for layer, exemplar in users:
            if isinstance(seen, str):
                crops[layer.key, exemplar] = Crop(None, missing=seen)
                continue
            box, dot = _part(layer.field, exemplar)
            side = max(exemplar.size) if _is_whole(layer.field, exemplar) else longest[layer.key]
            reduced = min(1.0, CELL / side)
            if (box, side) not in parts:
                parts[box, side] = _cut(seen, box, reduced)
            place = dot and (dot[0] * reduced, dot[1] * reduced)
            crops[layer.key, exemplar] = Crop(parts[box, side], max(1, CELL // side), place)
        on_progress(done + 1, len(wanted))
    return crops


def _is_whole(field: ReceptiveField, exemplar: Exemplar) -> bool:
    """Whether the whole input is shown: the unit sees most of it, or has no place."""
    rows, columns = (min(seen, side) for seen, side in zip(field.size, exemplar.size, strict=True))
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


def _cut(seen: Image.Image, box: Box, reduced: float) -> Image.Image:
    left, top, right, bottom = box
    part = seen.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
    if reduced == 1:
        return part
    return part.resize(
        (max(1, round(part.width * reduced)), max(1, round(part.height * reduced))), Image.Resampling.BOX
    )


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
