"""What a file holds, from its first bytes: one of the picture formats that are read, or something else."""

from __future__ import annotations

import codecs
import re

from PIL import Image

PNG = b"\x89PNG\r\n\x1a\n"
PROVENANCE = "hookscope"
"""The keyword of the text chunk that every PNG of hookscope has."""

# Not EPS (starts Ghostscript), PSD (frames are layers), formats without a signature (TGA, DIB), text (XPM, XBM).
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "TIFF", "BMP", "PPM", "JPEG2000", "ICO", "DDS", "PCX", "SGI", "QOI")
_FOREIGN = (
    (rb"%PDF", "a PDF document"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "PostScript (EPS)"),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "JPEG XL"),
    (rb".{4}ftyp(hei|hev|mif1|msf1)", "HEIC (HEIF)"),
    (rb".{4}ftypavi[fs]", "AVIF, damaged or more than this Pillow can read"),
    (rb".{4}ftypcrx |FUJIFILMCCD-RAW|IIRO|IIU\0", "raw data of a camera"),
    (rb".{4}ftyp|.{8}AVI LIST|\x1a\x45\xdf\xa3", "a video"),
    (rb"8BPS", "a Photoshop document"),
    (rb"\x76\x2f\x31\x01", "OpenEXR"),
    (rb".{128}DICM", "DICOM"),
    (rb"PK\x03\x04.{,4000}/data\.pkl", "a PyTorch checkpoint"),
    (rb"\x80[\x02-\x05]", "a Python pickle, perhaps an old PyTorch checkpoint"),
    (rb"PK\x03\x04|7z\xbc\xaf|.{257}ustar", "an archive (zip, 7z or tar)"),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd", "compressed data (gzip, bzip2, xz or zstd)"),
    (rb"\x93NUMPY", "a NumPy array"),
    (rb"\x89HDF", "HDF5"),
    (rb".{8}\{\"", "a safetensors checkpoint"),
    (rb"\x7fELF", "a program (ELF)"),
    (rb"version https://git-lfs", "a Git LFS pointer, which `git lfs pull` replaces by the file"),
    (rb"(?i)(\xef\xbb\xbf)?\s*<(svg|[?!][^\0]*<svg)", "SVG"),
    (rb"(?i)(\xef\xbb\xbf)?\s*<(html|!doctype html)", "a web page (HTML)"),
    (rb"\0+\Z", "zeros only"),
)


def picture_format(head: bytes) -> str:
    """The first of `FORMATS` that Pillow expects after these bytes; empty if no format matches."""
    Image.init()
    accepts = ((name, Image.OPEN.get(name, (None, None))[1]) for name in FORMATS)
    return next((name for name, accept in accepts if accept is not None and accept(head[:16]) is True), "")


def is_drawn_by_hookscope(head: bytes) -> bool:
    """Whether these first bytes are those of a PNG with provenance; it stands before the pixels."""
    if not head.startswith(PNG):
        return False
    at = len(PNG)
    while (kind := head[at + 4 : at + 8]) and kind != b"IDAT":
        if kind in (b"tEXt", b"zTXt", b"iTXt") and head.startswith(PROVENANCE.encode() + b"\0", at + 8):
            return True
        at += 12 + int.from_bytes(head[at : at + 4])  # length, type and checksum take 12 bytes
    return False


def is_picture_suffix(suffix: str) -> bool:
    """Whether Pillow uses the suffix for one of `FORMATS`; case does not matter."""
    return Image.registered_extensions().get(suffix.lower()) in (*FORMATS, "MPO")


def foreign_kind(head: bytes) -> str:
    """What a file with these first bytes holds, in words; empty if it may be a picture."""
    for pattern, words in _FOREIGN:
        if re.match(pattern, head, re.DOTALL):
            return words
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "text (UTF-16)"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the cut may lie within a character
    except UnicodeDecodeError:
        return ""
    return "" if any(character < " " and not character.isspace() for character in text) else "text"
