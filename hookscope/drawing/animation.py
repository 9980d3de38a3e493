"""Pictures one after the other, as a GIF or WebP file with provenance."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

from PIL import Image

from hookscope.images import PROVENANCE
from hookscope.system import StrPath, write_atomically

ANIMATIONS = {".gif": "GIF", ".webp": "WEBP"}
"""The format of an animation by the suffix of its file."""

_DESCRIPTION = 0x010E  # the tag of Exif for words about a picture
_DURATION = 200  # milliseconds of a frame


def write_animation(frames: Sequence[Image.Image], path: StrPath) -> None:
    """Write ``frames`` of one size to a file of `ANIMATIONS`, five a second, without end.

    The provenance of the first is the comment of a GIF, and the ImageDescription of a WebP.
    """
    kind, text = ANIMATIONS[os.path.splitext(path)[1].lower()], frames[0].info[PROVENANCE]
    more = {"comment": text, "optimize": False, "disposal": 1}
    if kind == "WEBP":
        exif = Image.Exif()
        exif[_DESCRIPTION] = text
        more = {"lossless": True, "exif": exif.tobytes(), "minimize_size": False}
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], duration=_DURATION, loop=0, **more)
    write_atomically(path, buffer.getvalue())
