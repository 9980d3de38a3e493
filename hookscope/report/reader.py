"""Read the values back that a page shows. No script of the page runs."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import os
from html.parser import HTMLParser
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.drawing import Scale, values_of_levels
from hookscope.errors import PageError
from hookscope.report.layers import GAP, digest

_HEAD = 4096  # characters that say what wrote a page

_LayerValues = list[tuple[list[int], NDArray[np.float64]] | None]


def read_page(path: str | os.PathLike[str]) -> dict[str, list[tuple[list[int], NDArray[np.float64]] | None]]:
    """Turn the pictures of a page of `inspect` back into numbers: for each layer, and each image, its feature maps.

    A key is a name or ``name#call``, with the name of the tensor if a layer returns several. Each image has the numbers
    of the channels that are on the page and their values ``(C, H, W)``, or None if the layer has no maps for it. Frames
    of a clip stand side by side in ``W``.

    A value is right to half a level, ``(high - low) / 192 / 2`` of its channel; NaN and Inf are returned as such. The
    values of maps of one position are exact.

    Raises:
        PageError: for a file that is no page of `inspect`, or one that is cut off or was modified.

    Example:
        >>> read_page("no.html")
        Traceback (most recent call last):
        hookscope.errors.PageError: cannot read no.html: No such file or directory
    """
    name = os.fspath(path)
    page = _Page()
    try:
        with open(path, encoding="utf-8") as file:
            page.feed(file.read(_HEAD))
            if page.generator == "hookscope":  # else it may be a file of any size
                page.feed(file.read())
    except UnicodeDecodeError as error:
        raise PageError(f"{name} is no page of inspect", "it is not text in UTF-8") from error
    except (OSError, ValueError) as error:
        raise PageError(f"cannot read {name}: {getattr(error, 'strerror', error)}") from error
    except AssertionError as error:  # of the parser
        raise PageError(f"{name} is damaged: {error}", do="copy it again, or make it again") from error
    if page.generator == "hookscope" and not page.is_whole:
        raise PageError(f"{name} is cut off", do="copy it again, or make it again")
    if page.generator != "hookscope" or not page.seal:
        raise PageError(f"{name} is no page of inspect", do="only such a page can be read back")
    addresses = [address for layer in page.layers for address in layer.pictures.values()]
    if page.seal != json.dumps(digest((layer.data for layer in page.layers), addresses)):
        raise PageError(f"the numbers in {name} were modified", do="make the page again")
    try:
        return dict(layer.values() for layer in page.layers)
    except Exception as error:  # somebody may write any numbers, and renew the seal
        raise PageError(f"the numbers in {name} cannot be read", f"{type(error).__name__}: {error}") from error


class _Layer:
    """What a page says about one layer: its numbers as JSON, and the addresses of its pictures by image."""

    def __init__(self) -> None:
        self.data = ""
        self.pictures: dict[int, str] = {}

    def values(self) -> tuple[str, _LayerValues]:
        facts = json.loads(self.data)
        images = enumerate(facts["images"])
        return facts["key"], [
            None if numbers is None else (facts["channels"], _values(numbers, self.pictures.get(image, "")))
            for image, numbers in images
        ]


class _Page(HTMLParser):
    """What wrote a page, its layers, the seal over their numbers, and whether the page has an end."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.generator = ""
        self.layers: list[_Layer] = []
        self.seal = ""
        self.is_whole = False
        self._reading = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = {name: value or "" for name, value in attrs}
        if tag == "meta" and about.get("name") == "generator":
            self.generator = about.get("content", "")
        elif tag == "section" and "data-layer" in about:
            self.layers.append(_Layer())
        elif tag == "img" and about.get("class") == "maps" and self.layers and about.get("data-image", "").isdecimal():
            self.layers[-1].pictures[int(about["data-image"])] = about.get("src", "")
        elif tag == "script":
            self._reading = about.get("class") or about.get("id") or "script"

    def handle_data(self, data: str) -> None:
        if self._reading == "numbers" and self.layers:
            self.layers[-1].data += data
        elif self._reading == "maps-digest":
            self.seal += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._reading = ""
        self.is_whole = tag == "html"


def _values(numbers: dict[str, Any], address: str) -> NDArray[np.float64]:
    if "values" in numbers:
        return np.array(numbers["values"], float)[:, None, None]
    count, height, width, columns = len(numbers["low"]), numbers["height"], numbers["width"], numbers["columns"]
    rows = math.ceil(count / columns)
    pixels = _pixels(address, (columns * (width + GAP), rows * (height + GAP)))
    cells = pixels.reshape(rows, height + GAP, columns, width + GAP).swapaxes(1, 2)
    maps = cells.reshape(rows * columns, height + GAP, width + GAP)[:count, :height, :width]
    scale = Scale.parse("channel")
    limits = zip(maps, numbers["low"], numbers["high"], strict=True)
    return np.stack([values_of_levels(levels, low, high, scale) for levels, low, high in limits])


def _pixels(address: str, size: tuple[int, int]) -> NDArray[np.uint8]:
    """The palette indices of a picture, which is decoded only if it has this width and height."""
    try:
        file = base64.b64decode(address.removeprefix("data:image/png;base64,"), validate=True)
    except binascii.Error as error:
        raise ValueError("a picture is damaged") from error
    with Image.open(io.BytesIO(file), formats=["PNG"]) as image:
        if image.size != size:
            raise ValueError(f"a picture of {image.width}×{image.height} pixels")
        return np.asarray(image)
