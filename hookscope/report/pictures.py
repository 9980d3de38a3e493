"""Pictures as text for a page: the whole file in the address of the image."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import Heat, draw_heat, palette
from hookscope.inspection import Inspection, Place

MAPS, HEAT = "viridis", "inferno"
"""Colour maps of feature maps, and of Grad-CAM over an image."""

_LEAST, _MOST, _SMALL = 224, 640, 56  # widths of images and of thumbnails, in pixels


def png_address(image: Image.Image, **options: Any) -> str:
    """``data:image/png;base64,...`` of an image; ``options`` go to Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **{"compress_level": 6, **options})
    return _address("png", buffer)


def jpeg_address(image: Image.Image, quality: int = 88) -> str:
    """``data:image/jpeg;base64,...`` of an RGB image."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling=0)
    return _address("jpeg", buffer)


def _address(kind: str, buffer: io.BytesIO) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def seen_image(seen: Image.Image) -> Image.Image:
    """What the network saw, in a size for the page: small ones magnified by a whole number, large ones reduced."""
    if seen.width > _MOST:
        return seen.resize((_MOST, max(1, round(seen.height * _MOST / seen.width))), Image.Resampling.LANCZOS)
    factor = -(-_LEAST // seen.width)
    return seen.resize((seen.width * factor, seen.height * factor), Image.Resampling.NEAREST)


def over_image(seen: Image.Image, cam: NDArray[np.float32], width: int) -> Image.Image:
    """A class activation map ``(h, w)`` over what the network saw."""
    height = max(1, round(seen.height * width / seen.width))
    ground = seen if width > seen.width else seen.resize((width, height), Image.Resampling.BILINEAR)
    heat = Heat(cam, (0, 0, ground.width, ground.height), max(0.0, float(cam.max())))
    return draw_heat(ground, heat, width, HEAT)


def layer_cam(inspection: Inspection, layer: int, image: int = 0, width: int = _SMALL) -> Image.Image | None:
    """The Grad-CAM of a layer over what the network saw; None if it has none."""
    maps = inspection.layers[layer].images[image]
    if maps is None or maps.cam is None:
        return None
    return over_image(inspection.images[image].seen, maps.cam, width)


def small_cam(inspection: Inspection, layer: int) -> str:
    """The address of a thumbnail of `layer_cam` for the first image that has one; empty if none has."""
    cam = next(filter(None, (layer_cam(inspection, layer, at) for at in range(len(inspection.images)))), None)
    return "" if cam is None else jpeg_address(cam, 80)


def map_or_cam(
    inspection: Inspection, layer: int, place: Place, image: int, width: int = _SMALL
) -> tuple[Image.Image | None, int | None]:
    """The map of the first channel of a place in its own size, and its number; else the Grad-CAM of the layer."""
    maps, channel = inspection.layers[layer].images[image], place.channels[0] if place.channels else None
    if maps is None or channel not in maps.tiles.channels or maps.tiles.values:
        return layer_cam(inspection, layer, image, width), None
    drawn = Image.fromarray(maps.tiles.levels[maps.tiles.channels.index(channel)], "P")
    drawn.putpalette(palette(MAPS).tobytes())
    return drawn, channel
