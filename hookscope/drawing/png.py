"""PNG files with provenance: write them, read the provenance, and turn the pixels of a sheet back into values."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from hookscope.drawing import colours
from hookscope.drawing.scale import TOP, Scale
from hookscope.drawing.text import Pixels
from hookscope.errors import ImageError, UsageError
from hookscope.system import StrPath, write_atomically

_KEYWORD = "hookscope"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_LARGEST_TEXT = 64 << 20  # a sheet of 7000 channels has 300 kB; a far larger text is an attack or damaged
_PIECE = 1 << 20


def encode_png(image: Image.Image, provenance: Mapping[str, Any], compress_level: int = 1) -> bytes:
    """The PNG file of ``image`` with ``provenance`` as JSON in its text chunk ``hookscope``, as bytes.

    Args:
        image: An image of a mode that PNG has (``L``, ``RGB``, ``P``, ``RGBA``, ``I;16``...).
        provenance: Where the image comes from: values of JSON types, numbers finite.
        compress_level: 0 to 9. Level 1 makes a sheet a quarter larger than level 6, in a third of the time.

    Raises:
        ValueError: ``provenance`` contains NaN or Inf.
        TypeError: ``provenance`` contains a type that JSON does not have, such as a tensor.

    Example:
        >>> from PIL import Image
        >>> read_provenance(encode_png(Image.new("L", (2, 2)), {"model": "resnet18"}))
        {'model': 'resnet18'}
    """
    # uncompressed text: `strings` and `exiftool` show it, and Pillow refuses compressed text above 1 MiB
    info = PngInfo()
    info.add_text(_KEYWORD, json.dumps(dict(provenance), allow_nan=False, separators=(",", ":")))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info, compress_level=compress_level)
    return buffer.getvalue()


def write_png(image: Image.Image, path: StrPath, provenance: Mapping[str, Any]) -> None:
    """Write ``image`` with its ``provenance`` as a PNG to ``path``, completely or not at all.

    Raises:
        WriteError: the file cannot be written; an existing file is unchanged.
        ValueError, TypeError: ``provenance`` is no JSON, see `encode_png`.

    Example:
        >>> from PIL import Image
        >>> write_png(Image.new("RGB", (2, 2)), "/dev/null", {"model": "resnet18"})
    """
    write_atomically(path, encode_png(image, provenance))


def read_provenance(source: StrPath | bytes | BinaryIO) -> dict[str, Any]:
    """The provenance that `write_png` left in a PNG.

    Args:
        source: A path, the bytes of a PNG, or a binary stream, which need not be seekable.

    Raises:
        ImageError: the source cannot be read, is no PNG, is damaged, or has no provenance of hookscope.

    Example:
        >>> read_provenance(b"GIF89a")
        Traceback (most recent call last):
        hookscope.errors.ImageError: the picture is no PNG; hookscope writes provenance into PNG files
    """
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else "the picture"
    try:
        with _opened(source) as stream:
            text = _find_text(stream, name)
    except OSError as error:
        raise ImageError(f"cannot read {name}: {error.strerror or error}") from error
    if text is None:
        raise ImageError(f"{name} has no provenance of hookscope", do="only PNG files written by hookscope have it")
    try:
        provenance = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"the provenance in {name} is no JSON") from error
    if not isinstance(provenance, dict):
        raise ImageError(f"the provenance in {name} is no JSON object")
    return provenance


def _opened(source: StrPath | bytes | BinaryIO) -> contextlib.AbstractContextManager[BinaryIO]:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if isinstance(source, str | os.PathLike):
        return open(source, "rb")
    return contextlib.nullcontext(source)  # a stream is its owner's to close


def _find_text(stream: BinaryIO, name: str) -> bytes | None:
    """The text of the chunk ``hookscope``. Pillow reads neither large texts nor streams that are not seekable."""
    if stream.read(len(_SIGNATURE)) != _SIGNATURE:
        raise ImageError(f"{name} is no PNG", do="hookscope writes provenance into PNG files")
    while True:
        head = _read(stream, 8, name)
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind == b"IEND":
            return None
        if kind not in _TEXTS or length > _LARGEST_TEXT:
            _skip(stream, length + 4, name)
            continue
        body, check = _read(stream, length, name), _read(stream, 4, name)
        keyword, _, rest = body.partition(b"\0")
        if keyword != _KEYWORD.encode():
            continue
        if zlib.crc32(kind + body) != int.from_bytes(check, "big"):
            raise ImageError(f"the provenance in {name} is damaged", do="write the picture again")
        return _TEXTS[kind](rest, name)


def _read(stream: BinaryIO, count: int, name: str) -> bytes:
    data = b"".join(_pieces(stream, count))
    if len(data) < count:
        raise ImageError(f"{name} is cut off", do="write or copy the file again")
    return data


def _skip(stream: BinaryIO, count: int, name: str) -> None:
    if sum(map(len, _pieces(stream, count))) < count:
        raise ImageError(f"{name} is cut off", do="write or copy the file again")


def _pieces(stream: BinaryIO, count: int) -> Iterator[bytes]:
    """``count`` bytes, or less at the end, in pieces: a damaged length must not allocate gigabytes."""
    while count and (piece := stream.read(min(count, _PIECE))):
        count -= len(piece)
        yield piece


def _plain_text(rest: bytes, name: str) -> bytes:
    return rest


def _compressed_text(rest: bytes, name: str) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(rest[1:], _LARGEST_TEXT)
    except zlib.error as error:
        raise ImageError(f"the provenance in {name} is damaged", do="write the picture again") from error
    if unpacker.unconsumed_tail:
        raise ImageError(f"the provenance in {name} is larger than {_LARGEST_TEXT >> 20} MiB")
    return text


# hookscope writes tEXt; tools that rewrite a PNG may change a long text to zTXt
_TEXTS = {b"tEXt": _plain_text, b"zTXt": _compressed_text}


def read_sheet(path: str | os.PathLike[str]) -> dict[str, tuple[list[int], NDArray[np.float64]]]:
    """Turn the pixels of a sheet back into numbers: for each part its channels and their values ``(C, H, W)``.

    On a linear scale a value is right to half a level, ``(high - low) / (levels - 1) / 2`` of its channel. NaN and Inf
    are returned as such, and a clipped value as the end of the scale.

    Raises:
        ImageError: for a PNG without provenance of hookscope, an overlay, a modified sheet, or an unknown scale.

    Example:
        >>> read_sheet("no.png")
        Traceback (most recent call last):
        hookscope.errors.ImageError: cannot read no.png: No such file or directory
    """
    provenance, name = read_provenance(path), os.fspath(path)
    if not provenance.get("parts") or not {"overlay", "size", "cmap", "levels"} <= provenance.keys():
        raise ImageError(f"{name} is no sheet of feature maps", do="visualize draws sheets")
    if provenance["overlay"]:
        raise ImageError(f"{name} is an overlay", "its colours mix values and photograph", "draw it without --overlay")
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
        raise ImageError(f"{name} was modified after it was drawn", do="draw it again")
    try:
        return {part["part"]: (part["channels"], _values(pixels, part)) for part in provenance["parts"]}
    except UsageError as error:
        raise ImageError(f"{name} was drawn on an unknown scale: {error.asked}", error.exists) from error


def _values(pixels: Pixels, part: Mapping[str, Any]) -> NDArray[np.float64]:
    scale = Scale.parse(part["scale"])
    z, height, width, frames = part["zoom"], part["height"], part["width"], part["frames"]
    values = np.empty((len(part["channels"]), height, width))
    columns = np.arange(frames)[:, None] * part["frame_step"] + np.arange(width // frames) * z
    for at, (low, high) in enumerate(zip(part["low"], part["high"], strict=True)):
        row, column = divmod(at, part["columns"])
        y, x = part["y"] + row * part["step_y"], part["x"] + column * part["step_x"]
        levels = pixels[y : y + height * z : z, x + columns.ravel()]
        low, high = (math.nan if limit is None else limit for limit in (low, high))
        values[at] = scale.from_levels(np.minimum(levels, TOP), low, high)
        for index, value in (
            (colours.CONSTANT, low),
            (colours.NAN, math.nan),
            (colours.PLUS_INF, math.inf),
            (colours.MINUS_INF, -math.inf),
        ):
            values[at][levels == index] = value
    return values
