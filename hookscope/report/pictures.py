"""Pictures as text for a page: the whole file in the address of the image."""

from __future__ import annotations

import base64
import io

from PIL import Image


def png_address(image: Image.Image) -> str:
    """``data:image/png;base64,...`` of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=6)
    return _address("png", buffer)


def jpeg_address(image: Image.Image, quality: int = 88) -> str:
    """``data:image/jpeg;base64,...`` of an RGB image."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling=0)
    return _address("jpeg", buffer)


def _address(kind: str, buffer: io.BytesIO) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
