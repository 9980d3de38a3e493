"""Pictures as files: where they come from, PNG with provenance, the values of their pixels, and animations."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from hookscope.drawing import colours
from hookscope.drawing.scale import TOP, Scale
from hookscope.drawing.text import Pixels, font, stamp, text_pixels, wrapped
from hookscope.errors import ImageError, UsageError, path_of, printable
from hookscope.images import PROVENANCE
from hookscope.system import StrPath, write_atomically

if TYPE_CHECKING:  # which needs torch
    from hookscope.drawing.grid import Grid

MARGIN = 14
LEAST_WIDTH = 660
TEXT_SIZE = 12
ANIMATIONS = {".gif": "GIF", ".webp": "WEBP"}
"""The format of an animation by the suffix of its file."""

_DESCRIPTION = 0x010E  # the tag of Exif for words about a picture
_DURATION = 200  # milliseconds of a frame


@dataclass
class SheetPage:
    """Blocks of palette indices, one below the other, and lines of text of at most ``text_width`` pixels."""

    text_width: int = LEAST_WIDTH
    blocks: list[tuple[int, Pixels]] = field(default_factory=list)
    height: int = 0

    def add(self, pixels: Pixels, space: int = 0) -> int:
        """Add ``pixels`` at the bottom, after ``space`` rows; returns their y."""
        top = self.height + space
        self.blocks.append((top, pixels))
        self.height = top + pixels.shape[0]
        return top

    def add_text(
        self, text: str, space: int = 0, size: int = TEXT_SIZE, bold: bool = False, alarm: bool = False
    ) -> None:
        """Add ``text``, if any, at the bottom, in lines; red with ``alarm``."""
        for line in wrapped(printable(text), self.text_width, font(size, bold).getlength) if text else ():
            pixels = text_pixels(line, size, bold)
            if alarm:
                pixels = np.where(pixels == colours.BACKGROUND, pixels, pixels + np.uint8(colours.ALARM - colours.TEXT))
            self.add(pixels, space)
            space = 0

    @property
    def width(self) -> int:
        return max(int(block.shape[1]) for _, block in self.blocks)

    def pixels(self, margin: int) -> Pixels:
        page = np.full((self.height + 2 * margin, self.width + 2 * margin), colours.BACKGROUND, np.uint8)
        for top, block in self.blocks:
            page[margin + top : margin + top + block.shape[0], margin : margin + block.shape[1]] = block
        return page


def colour_bar(name: str, lowest: float | str, highest: float | str, after: str = "") -> Pixels:
    """``name``, the lowest value, all levels as a ramp, the highest value, and words ``after`` it."""
    ends = [text if isinstance(text, str) else f"{text:.4g}" for text in (lowest, highest)]
    words, low, high, rest = (text_pixels(text, TEXT_SIZE) for text in (name, *ends, after))
    bar = np.repeat(np.arange(colours.LEVELS, dtype=np.uint8)[None], low.shape[0] - 3, axis=0)
    return beside([words, low, bar, high, rest] if after else [words, low, bar, high], 8)


def beside(pieces: Sequence[Pixels], gap: int) -> Pixels:
    """Blocks from left to right, ``gap`` pixels apart."""
    width = sum(piece.shape[1] for piece in pieces) + gap * (len(pieces) - 1)
    line = np.full((max(piece.shape[0] for piece in pieces), width), colours.BACKGROUND, np.uint8)
    x = 0
    for piece in pieces:
        stamp(line, piece, x, 0)
        x += piece.shape[1] + gap
    return line


_THUMBNAIL = 224  # pixels of the longer side, at most


def with_provenance(image: Image.Image, provenance: Mapping[str, Any]) -> Image.Image:
    """``image`` with ``provenance`` as JSON in ``image.info["hookscope"]``, where Pillow puts it when it reads a file.

    Its ``save`` keeps it in PNG files. ``provenance`` must be JSON: ValueError for NaN and Inf, TypeError for a tensor.
    """
    image.info[PROVENANCE] = _as_json(provenance)
    image.__class__ = _DrawnImage
    return image


class _DrawnImage(Image.Image):
    """A picture of hookscope, which says in its PNG file what it shows."""

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        text = {"pnginfo": _text_chunk(self.info[PROVENANCE])} if PROVENANCE in self.info else {}
        super().save(fp, format, **{**text, **params})


def _as_json(provenance: Mapping[str, Any]) -> str:
    return json.dumps(dict(provenance), allow_nan=False, separators=(",", ":"))


def _text_chunk(text: str) -> PngInfo:
    info = PngInfo()
    # uncompressed: `strings` and `exiftool` show it, and Pillow refuses compressed text above 1 MiB
    info.add_text(PROVENANCE, text)
    return info


def encode_png(image: Image.Image, provenance: Mapping[str, Any] | None = None) -> bytes:
    """The PNG file of ``image``, with ``provenance`` as JSON in its text chunk ``hookscope``.

    None takes the one of `with_provenance`. Compression level 1 makes a sheet a quarter larger than level 6, in a third
    of the time.
    """
    text = image.info[PROVENANCE] if provenance is None else _as_json(provenance)
    return image_bytes(image, pnginfo=_text_chunk(text), compress_level=1)


def image_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of ``image``; ``options`` go to Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_png(image: Image.Image, path: StrPath, provenance: Mapping[str, Any] | None = None) -> None:
    """Write `encode_png` to ``path``, completely or not at all; WriteError if the file cannot be written."""
    write_atomically(path, encode_png(image, provenance))


def map_png(values: NDArray[np.float32]) -> bytes:
    """A small PNG of one map ``(h, w)`` without words: 0 is black, the highest value the brightest."""
    highest = float(np.nanmax(values, initial=0.0, where=np.isfinite(values)))
    shares = np.nan_to_num(values / (highest or 1.0), posinf=1.0).clip(0, 1)
    levels = np.rint(shares * TOP).astype(np.uint8)
    levels[np.isnan(values)] = colours.NAN
    longest = max(levels.shape)
    step, zoom = math.ceil(longest / _THUMBNAIL), max(1, _THUMBNAIL // longest)
    image = Image.fromarray(levels[step // 2 :: step, step // 2 :: step].repeat(zoom, 0).repeat(zoom, 1))
    image.putpalette(colours.palette("inferno").ravel().tolist())
    return image_bytes(image, optimize=True)


def read_provenance(source: StrPath | bytes) -> dict[str, Any]:
    """The provenance that `write_png` left in a PNG file, given by its path or its bytes."""
    return _read(source)[1]


def _read(source: StrPath | bytes) -> tuple[Image.Image, dict[str, Any]]:
    name = "the picture" if isinstance(source, bytes) else path_of(source)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()  # another tool may move the text behind the pixels
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = getattr(error, "strerror", None) or "it is damaged, too large or not an image"
        raise ImageError(f"cannot read {name}: {why}") from error
    if PROVENANCE not in image.info:
        raise ImageError(f"{name} has no provenance of hookscope", do="only PNG files written by hookscope have it")
    try:
        provenance = json.loads(image.info[PROVENANCE])
    except (ValueError, RecursionError) as error:
        raise ImageError(f"the provenance in {name} is not JSON") from error
    if not isinstance(provenance, dict):
        raise ImageError(f"the provenance in {name} is not a JSON object")
    return image, provenance


def placed(name: str, axes: str, grid: Grid, x: int, y: int) -> dict[str, Any]:
    """Positions and scales of the maps of ``grid`` drawn at ``x``, ``y``, for `read_sheet`."""
    layout, tiles = grid.layout, grid.tiles
    count = len(tiles.channels) - grid.left_out
    return {
        "part": name,
        "axes": axes,
        "frames": layout.frames,
        "scale": tiles.scale,
        "x": x,
        "y": y + layout.label,
        **{size: getattr(layout, size) for size in ("columns", "step_x", "step_y", "frame_step", "zoom")},
        "height": tiles.levels.shape[1],
        "width": tiles.levels.shape[2],
        "channels": tiles.channels[:count],
        "low": finite_or_none(tiles.low[:count]),
        "high": finite_or_none(tiles.high[:count]),
    }


def page_facts(image: Image.Image, scale: str, cmap: str, overlay: bool = False) -> dict[str, Any]:
    """What `read_sheet` asks of a page beside its parts."""
    return {"scale": scale, "cmap": cmap, "levels": colours.LEVELS, "overlay": overlay, "size": list(image.size)}


def finite_or_none(values: Iterable[float]) -> list[float | None]:
    """Numbers for JSON: None for NaN and Inf."""
    values = values.tolist() if isinstance(values, np.ndarray) else values  # ten times as fast as its own numbers
    return [float(value) if math.isfinite(value) else None for value in values]


def read_sheet(path: str | os.PathLike[str]) -> dict[str, tuple[list[int], NDArray[np.float64]]]:
    """Turn the pixels of a sheet back into numbers: for each part its channels and their values ``(C, H, W)``.

    On a linear scale a value is right to half a level, ``(high - low) / (levels - 1) / 2`` of its channel. NaN and Inf
    are returned as such, and a clipped value as the end of the scale. The values of bars are exact.

    Raises:
        ImageError: for a PNG without provenance of hookscope, an overlay, a modified sheet, or an unknown scale.

    Example:
        >>> read_sheet("no.png")
        Traceback (most recent call last):
        hookscope.errors.ImageError: cannot read no.png: No such file or directory
    """
    (image, provenance), name = _read(path), os.fspath(path)
    if not provenance.get("parts") or not {"overlay", "size", "cmap", "levels"} <= provenance.keys():
        raise ImageError(f"{name} is not a sheet of feature maps", do="visualize draws sheets")
    if provenance["overlay"]:
        do = "draw it ‹with draw_sheet|without --overlay›"
        raise ImageError(f"{name} is an overlay", "its colours mix values and photograph", do)
    pixels, palette = np.asarray(image), (image.getpalette() or [])[: 3 * colours.PHOTOGRAPH]
    try:
        drawn = [provenance["size"], colours.palette(provenance["cmap"])[: colours.PHOTOGRAPH].ravel().tolist()]
    except UsageError as error:
        raise ImageError(f"{name} was drawn with the colour map '{provenance['cmap']}'", error.exists) from error
    if [list(pixels.shape[::-1]), palette] != drawn or provenance["levels"] != colours.LEVELS:
        raise ImageError(f"{name} was modified after it was drawn", do="draw it again")
    try:
        return {part["part"]: (part["channels"], _values(pixels, part)) for part in provenance["parts"]}
    except UsageError as error:
        raise ImageError(f"{name} was drawn on an unknown scale: {error.asked}", error.exists) from error


def _values(pixels: Pixels, part: Mapping[str, Any]) -> NDArray[np.float64]:
    if "values" in part:  # bars
        return np.array(part["values"], float)[:, None, None]
    scale = Scale.parse(part["scale"])
    z, height, width, frames = part["zoom"], part["height"], part["width"], part["frames"]
    values = np.empty((len(part["channels"]), height, width))
    columns = np.arange(frames)[:, None] * part["frame_step"] + np.arange(width // frames) * z
    for at, (low, high) in enumerate(zip(part["low"], part["high"], strict=True)):
        row, column = divmod(at, part["columns"])
        y, x = part["y"] + row * part["step_y"], part["x"] + column * part["step_x"]
        values[at] = values_of_levels(pixels[y : y + height * z : z, x + columns.ravel()], low, high, scale)
    return values


def values_of_levels(
    levels: NDArray[np.uint8], low: float | None, high: float | None, scale: Scale
) -> NDArray[np.float64]:
    """The values of the palette indices of a map; ``low`` and ``high`` are None without a finite value."""
    low, high = (math.nan if limit is None else limit for limit in (low, high))
    values = scale.from_levels(np.minimum(levels, TOP), low, high)
    for index, value in (
        (colours.CONSTANT, low),
        (colours.NAN, math.nan),
        (colours.PLUS_INF, math.inf),
        (colours.MINUS_INF, -math.inf),
    ):
        values[levels == index] = value
    return values


def write_animation(frames: Sequence[Image.Image], path: StrPath) -> None:
    """Write ``frames`` of one size to a file of `ANIMATIONS`, five a second, without end.

    The provenance of the first is the comment of a GIF, and the ImageDescription of a WebP.
    """
    kind, text = ANIMATIONS[os.path.splitext(path)[1].lower()], frames[0].info[PROVENANCE]
    more: dict[str, Any] = {"comment": text, "optimize": False, "disposal": 1}
    if kind == "WEBP":
        exif = Image.Exif()
        exif[_DESCRIPTION] = text
        more = {"lossless": True, "exif": exif.tobytes(), "minimize_size": False}
    more |= {"save_all": True, "append_images": frames[1:], "duration": _DURATION, "loop": 0}
    write_atomically(path, image_bytes(frames[0], kind, **more))
