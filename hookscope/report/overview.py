"""A small picture of an inspection, such as for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageOps

from hookscope.inspection import Inspection, Place
from hookscope.report.page import drawn_layer
from hookscope.report.pictures import map_or_cam, over_image

_SIDE, _GAP, _GROUND = 256, 8, (128, 128, 128)  # visible on light and dark terminals
_IMAGES, _PLACES = 3, 4


def draw_overview(inspection: Inspection) -> Image.Image:
    """A row for each of the first images: as the network saw it, with its Grad-CAM, and the first places with maps."""
    rows = [_row(inspection, number) for number in range(min(_IMAGES, len(inspection.images)))]
    width, step = max(row.width for row in rows), _SIDE + _GAP
    overview = Image.new("RGB", (width, len(rows) * step - _GAP), _GROUND)
    for number, row in enumerate(rows):
        overview.paste(row, (0, number * step))
    return overview


def _row(inspection: Inspection, number: int) -> Image.Image:
    image = inspection.images[number]
    pictures = [image.seen.convert("RGB")]
    if image.cam is not None:
        pictures.append(over_image(pictures[0], image.cam.still, max(_SIDE, image.seen.width)))
    thumbnails = _thumbnails(inspection, number)
    step = _SIDE + _GAP
    row = Image.new("RGB", ((len(pictures) + bool(thumbnails)) * step - _GAP, _SIDE), _GROUND)
    for at, picture in enumerate(pictures):
        row.paste(_in_square(picture, _SIDE), (at * step, 0))
    small = (_SIDE - _GAP) // 2
    for at, thumbnail in enumerate(thumbnails):
        where = len(pictures) * step + at % 2 * (small + _GAP), at // 2 * (small + _GAP)
        row.paste(_in_square(thumbnail, small), where)
    return row


def _thumbnails(inspection: Inspection, number: int) -> Sequence[Image.Image]:
    """The maps of the first places that have one for this image."""
    drawn = (_thumbnail(inspection, place, number) for place in inspection.places if place.image in (None, number))
    return [image for image in drawn if image is not None][:_PLACES]


def _thumbnail(inspection: Inspection, place: Place, number: int) -> Image.Image | None:
    """The map of the first channel of the place, else the Grad-CAM of its layer."""
    layer = drawn_layer(inspection, place.layer)
    return None if layer is None else map_or_cam(inspection, layer, place, number, _SIDE)[0]


def _in_square(image: Image.Image, side: int) -> Image.Image:
    """The whole image in a square; maps smaller than it keep their pixels visible."""
    smaller = max(image.size) < side
    way = Image.Resampling.NEAREST if smaller else Image.Resampling.BOX
    return ImageOps.pad(image.convert("RGB"), (side, side), way, _GROUND)
