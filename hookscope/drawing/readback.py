"""A sheet's pixels back to numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import colours
from hookscope.drawing.png import read_provenance
from hookscope.errors import ImageError, UsageError

Pixels = NDArray[np.uint8]


def read_sheet(path: str | os.PathLike[str]) -> dict[str, tuple[list[int], NDArray[np.float64]]]:
    """The numbers in a sheet's pixels: for each part its channels and their values ``(C, H, W)``.

    A value is right within half a level, ``(high - low) / (levels - 1) / 2`` of its channel; NaN and Inf come back
    as such, a clipped value as the end of the scale.

    Raises:
        ImageError: for a PNG without hookscope's provenance, an overlay, or a picture changed since.

    Example:
        >>> read_sheet("no.png")
        Traceback (most recent call last):
        hookscope.errors.ImageError: cannot read no.png: No such file or directory
    """
    provenance, name = read_provenance(path), os.fspath(path)
    if not provenance.get("parts") or not {"overlay", "size", "cmap", "levels"} <= provenance.keys():
        raise ImageError(f"{name} is no sheet of feature maps", do="visualize makes them")
    if provenance["overlay"]:
        raise ImageError(f"{name} holds no values any more", "an overlay mixes them with the photograph")
    try:
        with Image.open(path) as image:
            pixels, palette = np.asarray(image), image.getpalette()
    except (OSError, SyntaxError) as error:
        raise ImageError(f"cannot read {name}: {error}") from error
    try:
        drawn = [provenance["size"], colours.palette(provenance["cmap"]).ravel().tolist()]
    except UsageError as error:
        raise ImageError(f"{name} was drawn with the colour map '{provenance['cmap']}'", error.exists) from error
    if [list(pixels.shape[::-1]), palette] != drawn or provenance["levels"] != colours.LEVELS:
        raise ImageError(f"{name} was changed since it was drawn", do="draw it again")
    return {part["part"]: (part["channels"], _values(pixels, part)) for part in provenance["parts"]}


def _values(pixels: Pixels, part: Mapping[str, Any]) -> NDArray[np.float64]:
    z, height, width, frames = part["zoom"], part["height"], part["width"], part["frames"]
    found = np.empty((len(part["channels"]), height, width))
    columns = np.arange(frames)[:, None] * part["frame_step"] + np.arange(width // frames) * z
    for at, (low, high) in enumerate(zip(part["low"], part["high"], strict=True)):
        row, column = divmod(at, part["columns"])
        y, x = part["y"] + row * part["step_y"], part["x"] + column * part["step_x"]
        levels = pixels[y : y + height * z : z, x + columns.ravel()]
        found[at] = _from_levels(levels, math.nan if low is None else low, math.nan if high is None else high)
    return found


def _from_levels(levels: Pixels, low: float, high: float) -> NDArray[np.float64]:
    share = np.minimum(levels, colours.LEVELS - 1) / (colours.LEVELS - 1)
    values: NDArray[np.float64] = low * (1 - share) + high * share  # high - low may be more than a double holds
    for level, value in (
        (colours.CONSTANT, low),
        (colours.NAN, math.nan),
        (colours.PLUS_INF, math.inf),
        (colours.MINUS_INF, -math.inf),
    ):
        values[levels == level] = value
    return values
