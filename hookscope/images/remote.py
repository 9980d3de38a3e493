"""Pictures in a remote file system, named by a scheme: ``s3://``, ``gs://``, ``hdfs://``, ``file://`` and others."""

from __future__ import annotations

import codecs
import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

from hookscope.errors import ImageError, printable

PNG = b"\x89PNG\r\n\x1a\n"
PROVENANCE = "hookscope"
"""The keyword of the text chunk that every PNG of hookscope has."""

# Not EPS (starts Ghostscript), PSD (frames are layers), formats without a signature (TGA, DIB), text (XPM, XBM).
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "TIFF", "BMP", "PPM", "JPEG2000", "ICO", "DDS", "PCX", "SGI", "QOI")
_FOREIGN = (
    (rb"%PDF", "a PDF document"),
    (rb".{4}ftyp(hei|hev|mif1|msf1)", "HEIC (HEIF)"),
    (rb".{4}ftypcrx |FUJIFILMCCD-RAW|IIRO|IIU\0", "raw data of a camera"),
    (rb".{4}ftyp(?!avi[fs])|.{8}AVI LIST|\x1a\x45\xdf\xa3", "a video"),
    (rb"PK\x03\x04|7z\xbc\xaf|.{257}ustar|\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd", "an archive (zip, tar, gzip)"),
    (rb"(?i)(\xef\xbb\xbf)?\s*<(svg|[?!][^\0]*<svg)", "SVG"),
)


def picture_format(head: bytes) -> str:
    """The first of `FORMATS` that Pillow expects after these bytes; empty if no format matches."""
    Image.init()
    accepts = ((name, Image.OPEN.get(name, (None, None))[1]) for name in FORMATS)
    return next((name for name, accept in accepts if accept is not None and accept(head[:16]) is True), "")


def is_drawn_by_hookscope(head: bytes) -> bool:
    """Whether these first bytes begin a PNG with provenance; it stands before the pixels."""
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


_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_WEB = ("http", "https", "ftp")  # addresses of single files


def is_remote(path: str) -> bool:
    """Whether ``path`` has the scheme of a file system."""
    scheme = _SCHEME.match(path)
    return scheme is not None and scheme[1].lower() not in _WEB


def read_remote(path: str, most: int) -> bytes:
    """At most ``most`` bytes of a file; an ImageError if it cannot be read."""
    with _errors(path):
        system, inner = _located(path)
        with system.open(inner, "rb") as stream:
            data: bytes = stream.read(most)
            return data


def remote_pictures(path: str) -> Iterator[str]:
    """``path`` itself, or the files with the suffix of a picture in that folder and below; else an ImageError."""
    if not path.endswith("/") and is_picture_suffix(os.path.splitext(path)[1]):
        yield path  # no question to the server: there may be a million names
        return
    with _errors(path):
        system, inner = _located(path)
        is_folder = system.isdir(inner)
    if not is_folder:
        yield path
        return
    inner, bare = inner.rstrip("/"), path.rstrip("/")
    start = bare.removesuffix(inner) if bare.endswith(inner) else path[: path.index("://") + 3]
    found = False
    for name in _walk(path, system, inner):
        found = True
        yield start + name
    if not found:
        raise ImageError(f"no pictures in '{path}'", do="name a folder with JPEG, PNG or similar files")


def _walk(path: str, system: Any, folder: str) -> Iterator[str]:
    with _errors(path):
        entries = sorted((each["name"].rstrip("/"), each["type"]) for each in system.ls(folder, detail=True))
    for name, kind in entries:
        last = name.rpartition("/")[2]
        if name == folder or last.startswith("."):
            continue
        if kind == "directory":
            yield from _walk(path, system, name)
        elif is_picture_suffix(os.path.splitext(last)[1]):
            yield name


def _located(path: str) -> tuple[Any, str]:
    """The file system of ``path`` with the interface of fsspec, and the name in it."""
    try:
        located: tuple[Any, str] = importlib.import_module("fsspec.core").url_to_fs(path)
        return located
    except ImportError:  # fsspec lacks a package for the scheme
        if importlib.util.find_spec("pyarrow") is None:
            raise
    scheme, _, rest = path.partition("://")
    root, slash, inner = rest.partition("/")
    system, base = _arrow_system(f"{scheme}://{root or '/'}", os.getpid())
    return system, base.rstrip("/") + slash + inner


@functools.lru_cache(maxsize=16)
def _arrow_system(root: str, process: int) -> tuple[Any, str]:
    """The file system of pyarrow, which asks the server for the region of a bucket, and the name of ``root`` in it."""
    limit = "?retry_limit_seconds=10" if root.startswith(("gs:", "gcs:")) else ""  # it is 15 minutes otherwise
    system, base = importlib.import_module("pyarrow.fs").FileSystem.from_uri(root + limit)
    return importlib.import_module("fsspec.implementations.arrow").ArrowFSWrapper(system), base


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """Turn what a file system raises into an ImageError of one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise ImageError(f"no picture '{path}'", do="check the path") from error
    except ImportError as error:
        do = "pip install pyarrow, or the package that fsspec names"
        raise ImageError(f"'{path}' cannot be read: {printable(str(error))}", do=do) from error
    except Exception as error:  # each file system has errors of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ImageError(f"'{path}' cannot be read: {reason}", do="check the address and the permissions") from error
