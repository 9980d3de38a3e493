"""The pictures of a run: named files, pictures in folders in a stable order, lists of names, remote file systems."""

from __future__ import annotations

import codecs
import errno
import functools
import glob
import importlib
import importlib.util
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from pathlib import PurePath
from typing import Any

from PIL import Image

from hookscope.errors import HookscopeError, ImageError, UsageError, first_line, nearest, printable
from hookscope.findings import counted


class ImageWarning(UserWarning):
    """A note about a picture that was read."""


def raise_error(position: int, name: str, error: HookscopeError) -> None:
    """The default of ``Listener.skipped``, which ends the run."""
    raise error


def warn_of_image(name: str, text: str) -> None:
    """The default of ``Listener.note``, which issues an `ImageWarning`."""
    warnings.warn(f"{printable(name)}: {text}", ImageWarning, stacklevel=2)


def _ignore(*arguments: Any) -> None:
    pass


@dataclass(frozen=True)
class Listener:
    """Functions that a run over images calls while it goes on.

    Attributes:
        start: Gets the number of images that an earlier run has done.
        progress: Gets the number of images in each batch, skipped ones included.
        skipped: Gets position, name and error of an image that cannot be used; raises the error by default.
        note: Gets a name and a note on it; warns by default.
        interrupt: Gets the number of images that are saved when an exception ends a run with a file.

    Example:
        >>> Listener(skipped=lambda position, name, error: print(f"{position}: {error}")).skipped(3, "a.png", "empty")
        3: empty
    """

    start: Callable[[int], None] = _ignore
    progress: Callable[[int], None] = _ignore
    skipped: Callable[[int, str, HookscopeError], None] = raise_error
    note: Callable[[str, str], None] = warn_of_image
    interrupt: Callable[[int], None] = _ignore


PNG, PNG_TEXT = b"\x89PNG\r\n\x1a\n", (b"tEXt", b"zTXt", b"iTXt")
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
    before_pixels = takewhile(lambda chunk: chunk[0] != b"IDAT", png_chunks(head))
    keyword = PROVENANCE.encode() + b"\0"
    return any(kind in PNG_TEXT and chunk.startswith(keyword, 8) for kind, chunk in before_pixels)


def png_chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The type and the bytes of each chunk of a PNG file; none of another file."""
    at = len(PNG) if content.startswith(PNG) else len(content)
    while at < len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4])  # length, type and checksum take 12 bytes
        yield content[at + 4 : at + 8], content[at:end]
        at = end


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


_PLAIN_PNM = re.compile(rb"P[1-3]\s+[#\d]")
_HEAD_BYTES = 64
_PROVENANCE_BYTES = 1 << 16  # it stands before the pixels; a colour profile may stand before it
_OWN = "hookscope picture"
_NAME_A_FOLDER = "name a folder with JPEG, PNG or similar files"


def find_pictures(paths: Sequence[str], limit: int | None = None) -> list[str]:
    """The pictures that ``paths`` name, in order: files as they are, folders walked, globs expanded.

    A folder is walked in order of names, folders in it at their place. A file in it counts if its suffix or its first
    bytes belong to a format that is read. Hidden files, linked folders, pipes, sockets and devices are skipped, and
    pictures that hookscope drew itself, with an ``ImageWarning``. Named files and ``-`` are kept, whatever they are. In
    a folder of a remote file system, such as ``s3://bucket/photos/``, the suffix alone decides. Of more than ``limit``
    paths as many are taken at equal distances: the first ones may all be of one class.
    """
    if not paths:
        raise UsageError("no image was given", do="name files or folders, or - for standard input")
    named = list(chain.from_iterable(map(_expanded, paths)))
    if not any(path == "-" or is_remote(path) or os.path.exists(path) for path in named):
        _refuse_missing(named)
    own = list[str]()
    pictures = chain.from_iterable(
        remote_pictures(path) if is_remote(path) else _walk(path, own) if os.path.isdir(path) else (path,)
        for path in named
    )
    files = spread(list(pictures), limit)
    if own:
        such = f"{own[0]} is" if len(own) == 1 else f"{len(own):,} pictures are"
        warnings.warn(f"{such} skipped: drawn by hookscope; name a file to use it", ImageWarning, stacklevel=2)
    return files


def spread(paths: list[str], limit: int | None) -> list[str]:
    """Of more than ``limit`` paths as many, at equal distances in the list."""
    return paths if limit is None or limit >= len(paths) else [paths[at * len(paths) // limit] for at in range(limit)]


def _expanded(path: str) -> Sequence[str]:
    """What a glob matches, in order of names; the name itself if it exists or nothing matches.

    Pipes and devices are left out, and what is in a folder that matches too, because that folder is walked.
    """
    if not glob.has_magic(path) or is_remote(path) or os.path.lexists(path):
        return [path]
    matches = sorted(glob.glob(path, recursive=True))
    folders = {PurePath(match) for match in matches if os.path.isdir(match)}
    files = [match for match in matches if PurePath(match) in folders or os.path.isfile(match) or os.path.islink(match)]
    return [match for match in files if folders.isdisjoint(PurePath(match).parents)] or [path]


def label_of(path: str, folders: Iterable[str]) -> str:
    """The name of the folder of an image, if it is inside one of ``folders``, as ``cat`` of ``photos/cat/1.png``."""
    below = {os.path.abspath(folder) for folder in folders}
    folder, *above = map(str, PurePath(os.path.abspath(path)).parents)
    return os.path.basename(folder) if path != "-" and folder not in below and not below.isdisjoint(above) else ""


def read_names(data: bytes, source: str) -> list[str]:
    """The file names in the list ``data``, called ``source``: NUL ends each, as ``find -print0`` writes them.

    The last NUL is optional. ``os.fsencode`` turns names that are not UTF-8 back into the same bytes.
    """
    if not data:
        raise ImageError(f"no names in '{source}': the list is empty", do="check what writes it")
    if b"\0" not in data and b"\n" in data:
        raise ImageError(f"'{source}' holds lines", "names must end in NUL", "write it with `find -print0`")
    names = data.removesuffix(b"\0").split(b"\0")
    if b"" in names:
        position = f"name {names.index(b'') + 1} of {len(names)} in '{source}' is empty"
        raise ImageError(position, "names end in one NUL each", "write it with `find -print0`")
    return [os.fsdecode(name) for name in names]


def _refuse_missing(paths: Sequence[str]) -> None:
    """Raise the error of the only path, or of the first of several that are all missing."""
    try:
        with open(paths[0], "rb"):
            return
    except (OSError, ValueError) as error:
        missing = unreadable(paths[0], paths[0], error)
        if len(paths) > 1:
            asked = f"none of the {len(paths)} images can be found; the first: {missing.asked}"
            missing = ImageError(asked, missing.exists, missing.do)
        raise missing from error


def unreadable(source: Any, name: str, error: OSError | ValueError) -> ImageError:
    if isinstance(error, FileNotFoundError):
        return _missing(os.fsdecode(source), name)
    # Windows refuses to open a folder with PermissionError.
    if isinstance(error, IsADirectoryError) or (isinstance(error, PermissionError) and os.path.isdir(source)):
        return ImageError(f"'{name}' is a folder, not an image", do="name an image in it")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    known = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM)
    return ImageError(f"'{name}' cannot be read: {reason}", do="change its permissions" if known else "")


def _missing(path: str, name: str) -> ImageError:
    asked, folder = f"no image '{name}'", os.path.dirname(path) or "."
    if re.search(r"[*?]|\[.+\]", path):
        return ImageError(f"no file fits the pattern '{name}'", do="check the path")
    if os.path.islink(path):
        return ImageError(asked, f"it is a symbolic link to '{os.readlink(path)}', which is missing", "repair the link")
    if re.match(r"[a-z]+://", path, re.IGNORECASE):
        return ImageError(asked, "only files are read", "fetch it first: `curl -L ADDRESS | hookscope ... -`")
    try:
        with os.scandir(folder) as entries:  # not all names: a data set may have a million
            near = nearest(os.path.basename(path), [entry.name for entry in islice(entries, 2000)])
    except OSError:
        near = f"there is no folder '{folder}'"
    return ImageError(asked, near, "check the path")


def _walk(folder: str, own: list[str]) -> Iterator[str]:
    """The pictures in ``folder`` and below, but for ``own`` ones; raises an ImageError if there are none."""
    others: Counter[str] = Counter()
    first_file, has_pictures = "", False
    opened = [_entries(folder)]  # not recursion: folders may be nested deeper than Python's stack
    while opened:
        entry = next(opened[-1], None)
        if entry is None:
            opened.pop()
            continue
        kind = _kind(entry)
        if kind == "folder":
            opened.append(_entries(entry.path))
        elif kind == "picture":
            has_pictures = True
            yield entry.path
        else:
            others[kind] += 1
            own += [entry.path] if kind == _OWN else []
            first_file = first_file or (entry.path if kind == "file" else "")
    if not has_pictures:
        raise _without_pictures(folder, others, first_file)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return iter(sorted(entries, key=lambda entry: entry.name))
    except OSError as error:
        asked = f"folder '{folder}' cannot be read: {error.strerror or error}"
        raise ImageError(asked, do="change its permissions, or name its files one by one") from error


def _kind(entry: os.DirEntry[str]) -> str:
    """``folder``, ``picture``, or the words for anything else."""
    if entry.name.startswith("."):
        return "hidden name"
    mode = _mode(entry)
    if stat.S_ISDIR(mode):
        return "linked folder" if entry.is_symlink() else "folder"
    suffix = os.path.splitext(entry.name)[1].lower()
    named = is_picture_suffix(suffix)
    if not mode:  # a broken link with the suffix of a picture is kept: the run then reports it as lost
        return "picture" if named else "broken link"
    if not stat.S_ISREG(mode):
        return "special file"
    if named and suffix != ".png":
        return "picture"
    head = _head(entry.path)
    if is_drawn_by_hookscope(head):
        return _OWN
    return "picture" if named or _begins_like_picture(head[:_HEAD_BYTES]) else "file"


def _begins_like_picture(head: bytes) -> bool:
    """Pillow expects BMP and PNM after two bytes, AVIF after a brand that HEIC shares: text and HEIC are excluded."""
    if not picture_format(head):
        return False
    kind = foreign_kind(head)
    return b"avi" in head if kind.startswith("HEIC") else kind != "text" or bool(_PLAIN_PNM.match(head))


def _mode(entry: os.DirEntry[str]) -> int:
    """The file type of ``entry``, links followed; 0 if it does not exist. No system call for plain files."""
    try:
        if entry.is_file(follow_symlinks=False):
            return stat.S_IFREG
        if entry.is_dir(follow_symlinks=False):
            return stat.S_IFDIR
        return entry.stat().st_mode
    except OSError:  # a link to nothing or to itself, or gone meanwhile
        return 0


def _head(path: str) -> bytes:
    """The first bytes of a file, none if it cannot be read; O_NONBLOCK in case it has become a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            head = os.read(descriptor, _HEAD_BYTES)
            is_png = head.startswith(PNG)
            return head + os.read(descriptor, _PROVENANCE_BYTES) if is_png else head
        finally:
            os.close(descriptor)
    except OSError:
        return b""


def _without_pictures(folder: str, others: Counter[str], first_file: str) -> ImageError:
    if not others:
        return ImageError(f"no images in '{folder}': the folder is empty", do="name a folder with images")
    counts = ", ".join(counted(count, kind) for kind, count in others.items())
    kind = foreign_kind(_head(first_file)[:_HEAD_BYTES]) if first_file else ""
    example = f", such as {kind} in '{os.path.basename(first_file)}'" if kind else ""
    return ImageError(f"no images in '{folder}'", f"it holds {counts}{example}", _NAME_A_FOLDER)


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
    has_any = False
    for name in _walk_remote(path, system, inner):
        has_any = True
        yield start + name
    if not has_any:
        raise ImageError(f"no images in '{path}'", do=_NAME_A_FOLDER)


def _walk_remote(path: str, system: Any, folder: str) -> Iterator[str]:
    with _errors(path):
        entries = sorted((entry["name"].rstrip("/"), entry["type"]) for entry in system.ls(folder, detail=True))
    for name, kind in entries:
        last = name.rpartition("/")[2]
        if name == folder or last.startswith("."):
            continue
        if kind == "directory":
            yield from _walk_remote(path, system, name)
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
        raise ImageError(f"no image '{path}'", do="check the path") from error
    except ImportError as error:
        do = "pip install pyarrow, or the package that fsspec names"
        raise ImageError(f"'{path}' cannot be read: {printable(str(error))}", do=do) from error
    except Exception as error:  # each file system has errors of its own
        reason = first_line(error, 300)
        raise ImageError(f"'{path}' cannot be read: {reason}", do="check the address and the permissions") from error
