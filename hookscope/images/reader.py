"""Photograph to upright RGB: the only reader of image files."""

from __future__ import annotations

import glob
import hashlib
import io
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from hookscope.errors import ImageError, UsageError, check_whole, kind_of, printable
from hookscope.images.find import (
    FORMATS,
    PNG,
    PNG_TEXT,
    ImageWarning,
    find_pictures,
    foreign_kind,
    is_remote,
    picture_format,
    png_chunks,
    read_remote,
    unreadable,
)

_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_SAMPLE_FORMAT = 258, 262, 339


def grayscale_to_rgb(image: Image.Image, name: str, notes: list[str]) -> Image.Image:
    """An RGB image of grey that Pillow would clip at 255; notes say how it was scaled."""
    tags = getattr(image, "tag_v2", {})
    values = np.asarray(image)
    if image.mode == "I" and tags.get(_TIFF_BITS) == (32,) and tags.get(_TIFF_SAMPLE_FORMAT, (1,)) == (1,):
        values = values.view(np.uint32)
    low, high = _float_range(values, name, notes) if image.mode == "F" else _integer_range(values, tags, notes)
    grey = _scaled(values, low, high)
    if tags.get(_TIFF_PHOTOMETRIC) == 0:  # white is zero: Pillow inverts only 8 bits
        grey = 255 - grey
    if isinstance(key := image.info.get("transparency"), int):
        grey[values == key] = 255
        notes.append("transparency composited on white")
    return Image.fromarray(grey).convert("RGB")


def _integer_range(values: NDArray[Any], tags: Any, notes: list[str]) -> tuple[float, float]:
    """The values of black and white: the range of 12 or 16 bits, or the picture's own range beyond it."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        notes.append(f"32-bit grey scaled by its own range, {low}..{high}")
        return low, high
    if tags.get(_TIFF_BITS) == (12,):
        notes.append("12-bit grey scaled from 0..4095")
        return 0, 4095
    notes.append(f"{8 * values.itemsize}-bit grey scaled from 0..65535")
    note_dark(high, notes)
    return 0, 65535


def note_dark(high: int, notes: list[str]) -> None:
    """Add a note if 16-bit samples end far below white."""
    if 0 < high < 4096:
        bits = 12 if high > 255 else 8
        notes.append(f"dark: the values end near {high} of 65535, like {bits}-bit data in a 16-bit file")


def _float_range(values: NDArray[Any], name: str, notes: list[str]) -> tuple[float, float]:
    wrong = values.size - int(np.isfinite(values).sum())
    if wrong:
        limit = f"{wrong:,} of {values.size:,} values are NaN or infinite"
        raise ImageError(f"'{name}' has values that are not numbers", limit, "replace them first")
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 1:
        notes.append("floating-point grey scaled from 0..1")
        return 0, 1
    notes.append(f"floating-point grey scaled by its own range, {low:g}..{high:g}")
    return low, high


def _scaled(values: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    """``low..high`` to 0..255, rounded; black if all values are equal."""
    if low == high:
        return np.zeros(values.shape, np.uint8)
    shifted: NDArray[Any] = values.astype(np.float32 if values.dtype.itemsize == 2 else np.float64)
    shifted -= low
    shifted *= 255 / (high - low)
    shifted += 0.5
    return np.clip(shifted, 0, 255, out=shifted).astype(np.uint8)


MAX_BYTES = 1 << 30
"""The longest file, pipe or stream that is read."""
MAX_PIXELS = 100_000_000
"""The most pixels of all frames taken from one file."""
MAX_SIDE_RATIO = 100
"""The largest ratio of the sides: resizing the shorter one to 256 then stays below 7 megapixels."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class InputImage:
    """A photograph as a person sees it, and its origin.

    Attributes:
        image: The first of ``frames``: upright, mode RGB, 0..255.
        name: The source (``-`` for standard input), unescaped: use ``printable`` to show it.
        sha256: Hexadecimal SHA-256 of the file's bytes.
        notes: What was done to the values, one line each, such as ``frame 1 of 3``.
        frames: The frames asked for, all of one size.
    """

    image: Image.Image
    name: str
    sha256: str
    notes: tuple[str, ...]
    frames: tuple[Image.Image, ...]


def read_picture(
    source: str | os.PathLike[str] | bytes | BinaryIO, *, frames: int = 1, name: str | None = None
) -> InputImage:
    """Read a photograph as a person sees it: upright, on white, scaled to 8 bits.

    ``source`` is a path, ``-`` for standard input, the file's bytes, or a binary stream; a path with a scheme, such as
    ``s3://``, is read through fsspec or pyarrow. ``name`` is what errors call it.
    ``frames`` are evenly spaced from the first to the last; a still is repeated.
    """
    check_whole("frames", frames)
    name = _name(source) if name is None else name
    content = _content(source, name)
    # Pillow's warnings become notes; they must not reach users as Python warnings.
    with warnings.catch_warnings(record=True) as from_pillow:
        warnings.simplefilter("always")
        decoded, notes = _decode(content, name, partial(_take_frames, count=frames))
    notes += [printable(f"Pillow: {warning.message}") for warning in from_pillow if warning.category is UserWarning]
    return InputImage(decoded[0], name, hashlib.sha256(content).hexdigest(), tuple(dict.fromkeys(notes)), decoded)


AnyImage = str | os.PathLike[str] | InputImage | Image.Image
"""What a function takes as an image: a path, an image of Pillow, or an image with its origin."""


def as_picture(image: Any, frames: int = 1) -> InputImage:
    """An image, an array of bytes as in `is_picture`, or what `read_picture` reads; anything else is an ImageError."""
    if isinstance(image, InputImage):
        return image
    image = Image.fromarray(image) if isinstance(image, np.ndarray) and is_picture(image) else image
    if isinstance(image, Image.Image):
        still = image.convert("RGB")
        return InputImage(still, "", "", (), (still,))
    return read_picture(image, frames=frames)


def is_picture(value: Any) -> bool:
    """Whether it is a path, an image, or an array ``(H, W)`` or ``(H, W, 3)`` of bytes in RGB."""
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4)))
    return isinstance(value, str | os.PathLike | InputImage | Image.Image)


def list_pictures(images: Any) -> list[Any]:
    """One image or several as a list, with the pictures in folders and of globs; anything else is a UsageError."""
    listed: list[Any] = []
    for image in images if isinstance(images, Iterable) and not is_picture(images) else [images]:
        if not is_picture(image):
            do = "give paths, folders or images of Pillow, one or a list"
            takers = "predict, class_activation_maps, layer_gradients and StatisticsCollector"
            if type(image).__module__ == "numpy":
                do = f"an image (H, W, 3) has the type uint8; torch.from_numpy(x) makes a tensor, which {takers} take"
            elif hasattr(image, "shape"):
                do += f"; {takers} take tensors"
            raise UsageError(f"expected images, got {kind_of(image)}", do=do)
        path = os.fspath(image) if isinstance(image, str | os.PathLike) else ""
        walked = path and (os.path.isdir(path) or (glob.has_magic(path) and not os.path.exists(path)))
        listed += find_pictures([path]) if walked else [path or image]
    return listed


def open_image(source: str | os.PathLike[str] | bytes | BinaryIO) -> Image.Image:
    """The photograph in ``source`` as an upright RGB image on white; each note about it is an ``ImageWarning``.

    Args:
        source: A path, ``-`` for standard input, the file's bytes, or a binary stream.

    Raises:
        ImageError: the file is missing, unreadable, not a picture, damaged, too large or of an extreme shape.

    Example:
        >>> open_image(b"P6 2 1 255 abcdef").getpixel((0, 0))
        (97, 98, 99)
    """
    picture = read_picture(source)
    for note in picture.notes:
        warnings.warn(note, ImageWarning, stacklevel=2)
    return picture.image


def read_mask(source: str | os.PathLike[str] | bytes | BinaryIO) -> Image.Image:
    """The mask in ``source``, upright, in mode ``L``: 255 where it is neither black (0) nor transparent, else 0."""
    name = _name(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow: a mask has no colours that matter
        return _decode(_content(source, name), name, _take_mask)[0]


def _take_mask(image: ImageFile.ImageFile, name: str) -> tuple[Image.Image, list[str]]:
    if image.format in ("JPEG", "MPO"):
        raise ImageError(f"'{name}' is a JPEG, which does not keep zeros", do="save the mask as PNG")
    _check_shape(image.size, name)
    image.load()
    grey = image.mode in ("1", "L", "F") or image.mode.startswith("I")
    values = np.asarray(image if grey and not image.has_transparency_data else image.convert("RGBA"))
    inside = values != 0 if values.ndim == 2 else (values[..., :3] != 0).any(-1) & (values[..., 3] != 0)
    return _upright(Image.fromarray(inside.astype(np.uint8) * 255), image, []), []


def _name(source: Any) -> str:
    if isinstance(source, bytes | bytearray | memoryview):
        return "<bytes>"
    if hasattr(source, "read"):
        name = getattr(source, "name", None)
        return name if isinstance(name, str) else "<stream>"
    if not isinstance(source, str | os.PathLike):
        do = "give a path, or an image of Pillow where images are taken"
        do += "; torchvision.transforms.functional.to_pil_image makes one" if hasattr(source, "dtype") else ""
        raise ImageError(f"expected an image, got {kind_of(source)}", do=do)
    return os.fsdecode(source)


def _content(source: Any, name: str) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    try:
        if hasattr(source, "read"):
            return _read_all(source, name)
        if os.fspath(source) == "-":
            if sys.stdin is None or sys.stdin.isatty():
                why = "it is closed" if sys.stdin is None else "it is the terminal"
                raise ImageError(f"no image on standard input: {why}", do="give a file, or pipe one in")
            return _read_all(sys.stdin.buffer, name)
        if is_remote(os.fsdecode(source)):
            return _read_all(io.BytesIO(read_remote(os.fsdecode(source), MAX_BYTES + 1)), name)
        with open(os.fspath(source), "rb") as stream:
            status = os.fstat(stream.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size > MAX_BYTES:
                raise _too_long(name)
            return _read_all(stream, name)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, a closed stream
        raise unreadable(source, name, error) from error
    except MemoryError as error:
        raise ImageError(f"'{name}' does not fit into memory", do="give a smaller file") from error


def read_pipe(path: str) -> bytes | None:
    """The bytes of standard input, a pipe or a descriptor, which only this process can read, and only once.

    None for other files, for a terminal, and if reading fails: `read_picture` gives the error.
    """
    try:
        if path == "-":
            return None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(MAX_BYTES + 1)
        own = path.startswith(("/dev/std", "/dev/fd/", "/proc/"))  # a different file in each process
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and not own):
            return None
        with open(path, "rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except (OSError, ValueError):
        return None


def _read_all(stream: BinaryIO, name: str) -> bytes:
    content = io.BytesIO()
    while chunk := stream.read(1 << 20):
        content.write(chunk)
        if content.tell() > MAX_BYTES:
            raise _too_long(name)
    return content.getvalue()


def _too_long(name: str) -> ImageError:
    return ImageError(f"'{name}' is too long for an image", f"the limit is {MAX_BYTES:,} bytes", "give a smaller file")


def _decode(
    content: bytes, name: str, take: Callable[[ImageFile.ImageFile, str], tuple[_T, list[str]]]
) -> tuple[_T, list[str]]:
    """What ``take`` makes of the opened file, and its notes."""
    if not content:
        raise ImageError(f"'{name}' is empty", do="save or download the image again")
    try:
        with _open(content, name) as image:
            return take(image, name)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        match = re.search(r"(\d+) pixels", str(error))  # all that Pillow gives, above 179 megapixels
        size = f"it has {int(match[1]):,} pixels" if match else str(error)
        limit = f"{size}; the limit is {MAX_PIXELS:,}"
        raise ImageError(f"'{name}' is too large", limit, "make it smaller first") from error
    except MemoryError as error:
        raise ImageError(f"'{name}' does not fit into memory", do="make it smaller first") from error
    except Exception as error:  # Pillow's decoders raise any kind of exception
        if len(plain := _without_text(content)) < len(content):
            decoded, notes = _decode(plain, name, take)
            return decoded, [*notes, "its text or colour profile is damaged or too large, and was left out"]
        asked = f"'{name}' cannot be decoded: {str(error) or type(error).__name__}"
        exists = f"its {len(content):,} bytes are damaged, cut short or of a rare kind"
        raise ImageError(asked, exists, "get it again or convert it to PNG") from error


def _without_text(content: bytes) -> bytes:
    """A PNG file without text and colour profile, which Pillow unpacks with the pixels; other files as they are."""
    kept = [chunk for kind, chunk in png_chunks(content) if kind not in (*PNG_TEXT, b"iCCP")]
    return PNG + b"".join(kept) if kept else content


def _open(content: bytes, name: str) -> ImageFile.ImageFile:
    Image.init()
    try:
        return Image.open(io.BytesIO(content), formats=[name for name in FORMATS if name in Image.OPEN])
    except (Image.DecompressionBombError, MemoryError):
        raise
    except Exception as error:
        kind, form = foreign_kind(content[:4096]), picture_format(content)
        if kind:
            holds = f"it holds {kind}"
        elif not isinstance(error, UnidentifiedImageError):
            raise
        elif form:
            holds = f"it begins like {form}, but is damaged, cut short or of a rare kind"
        else:
            holds = f"it begins with the bytes {content[:8].hex(' ')}"
        asked = f"'{name}' is not an image that can be read"
        raise ImageError(asked, holds, "give a JPEG, PNG or similar file") from error


def _take_frames(image: ImageFile.ImageFile, name: str, count: int) -> tuple[tuple[Image.Image, ...], list[str]]:
    total = getattr(image, "n_frames", 1)
    positions = _spread(total, count)
    frames: dict[int, Image.Image] = {}
    notes = _frame_notes(total, positions)
    for position in sorted(set(positions)):
        image.seek(position)
        _check_shape(image.size, name, len(set(positions)))  # each page of a TIFF has its own size
        raw_mode = str(image.tile[0][3]) if image.tile else ""  # how the file stores samples; gone after load()
        image.load()
        rgb = _to_rgb(image, raw_mode, name, notes)
        rgb.info.clear()
        frames[position] = _upright(rgb, image, notes)
    sizes = dict.fromkeys(f"{frame.width}x{frame.height}" for frame in frames.values())
    if len(sizes) > 1:
        raise ImageError(f"'{name}' has frames of different sizes", ", ".join(sizes), "ask for one frame")
    return tuple(frames[position] for position in positions), notes


def _spread(total: int, count: int) -> list[int]:
    """``count`` positions evenly spaced from 0 to ``total - 1``, halves rounded up."""
    return [(2 * i * (total - 1) + count - 1) // (2 * (count - 1)) for i in range(count)] if count > 1 else [0]


def _frame_notes(total: int, positions: list[int]) -> list[str]:
    if total == 1:
        return [f"a still image, repeated {len(positions)} times"] if len(positions) > 1 else []
    listed = ", ".join(str(position + 1) for position in positions)
    return [f"{'frame' if len(positions) == 1 else 'frames'} {listed} of {total}"]


def _check_shape(size: tuple[int, int], name: str, count: int = 1) -> None:
    width, height = size
    shape = f"it is {width}x{height}"
    if width * height * count > MAX_PIXELS:
        shape += f", {count} frames are" if count > 1 else ","
        limit = f"{shape} {width * height * count:,} pixels; the limit is {MAX_PIXELS:,}"
        raise ImageError(f"'{name}' is too large", limit, "make it smaller or ask for fewer frames")
    if max(size) > MAX_SIDE_RATIO * min(size):
        limit = f"{shape}; one side may be {MAX_SIDE_RATIO} times the other"
        raise ImageError(f"'{name}' is too narrow: its shorter side cannot be resized", limit, "crop it")


def _upright(picture: Image.Image, file: ImageFile.ImageFile, notes: list[str]) -> Image.Image:
    """``picture``, turned as the ``file`` that it was made from says."""
    if file.format == "TIFF":  # load() has turned it
        return picture
    try:
        orientation = int(file.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow's parser raises any kind of exception
        notes.append("EXIF data cannot be read: the image is not rotated")
        return picture
    # The orientation alone: `exif_transpose` writes all EXIF data anew, which fails on damaged data.
    picture.getexif()[ExifTags.Base.Orientation] = orientation
    ImageOps.exif_transpose(picture, in_place=True)
    return picture


def _to_rgb(image: Image.Image, raw_mode: str, name: str, notes: list[str]) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return grayscale_to_rgb(image, name, notes)
    if image.mode == "CMYK":
        inverted = "; a JPEG without an Adobe marker may be inverted"
        unsure = image.format in ("JPEG", "MPO") and "adobe" not in image.info
        notes.append("CMYK converted to RGB without its colour profile" + (inverted if unsure else ""))
    rgb = _on_white(image, raw_mode, notes) if image.has_transparency_data else image.convert("RGB")
    if ";16" in raw_mode:  # Pillow keeps the upper byte
        note_dark(max(high for _, high in rgb.getextrema()) * 257, notes)  # type: ignore[misc]
    return rgb


def _on_white(image: Image.Image, raw_mode: str, notes: list[str]) -> Image.Image:
    image = _with_scaled_key(image, raw_mode)
    rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    alpha = rgba.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return rgba.convert("RGB")
    notes.append("transparency composited on white")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba, mask=alpha)
    return white


def _with_scaled_key(image: Image.Image, raw_mode: str) -> Image.Image:
    """``image`` with its transparent colour scaled to 8 bits: Pillow scales only the samples."""
    key = image.info.get("transparency")
    steps = {"1": 1, "L;2": 3, "L;4": 15}.get(raw_mode, 0)
    if raw_mode == "RGB;16B" and isinstance(key, tuple):
        key = tuple(part >> 8 for part in key)
    elif isinstance(key, int) and key <= steps:  # Pillow has scaled a larger one
        key = key * 255 // max(steps, 1)
    else:
        return image
    image = image.copy()  # the next frame reads the same info
    image.info["transparency"] = key
    return image
