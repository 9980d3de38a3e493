"""Grey of 16 or 32 bits or floating point to 8 bits, scaled by the range of its type or by its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.errors import ImageError

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
