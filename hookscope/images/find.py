"""Which pictures a run is about: named files, the pictures of folders in a stable order, lists of names."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from hookscope.errors import ImageError, UsageError
from hookscope.images.file_types import foreign_kind
from hookscope.images.reader import read_picture

# What Pillow calls its own for the formats that images.py reads; a test compares them.
_SUFFIX = re.compile(
    r"\.(jpe?g|jpe|jfif|mpo|a?png|gif|webp|avifs?|tiff?|bmp|p[bgnp]m|pfm|jp2|j2k|jpc|jpf|jpx|j2c|ico|dds|pcx|bw|rgba?"
    r"|sgi|qoi)",
    re.IGNORECASE,
)
# Longer than Pillow's own marks where two bytes would take a text for a picture ("BMW", "P1 is ...").
_BEGINNINGS = re.compile(
    rb"\xff\xd8\xff"
    rb"|\x89PNG\r\n\x1a\n"
    rb"|GIF8[79]a"
    rb"|RIFF.{4}WEBP"
    rb"|.{4}ftyp(avi[fs]|(mif1|msf1).{4,48}?avi[fs])"
    rb"|II[*+]\0|MM\0[*+]|MM\*\0|II\0\*"
    rb"|BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0"
    rb"|P[1-6]\s+[#\d]|P[fF]\s+\d|P0CMYK\s|Py(P|RGBA|CMYK)\s"
    rb"|\xffO\xffQ|\0\0\0\x0cjP  \r\n\x87\n"
    rb"|\0\0\x01\0[^\0]"
    rb"|DDS "
    rb"|\n[\0\x02\x03\x05]\x01[\x01\x02\x04\x08]"
    rb"|\x01\xda[\0\x01][\x01\x02]"
    rb"|qoif",
    re.DOTALL,
)
_HEAD = 64
_READ = "JPEG, PNG or the like"


def find_pictures(paths: Sequence[str], limit: int | None = None) -> list[str]:
    """The pictures that ``paths`` name, in order: files as they are, folders walked.

    A folder is walked by name, the folders inside it in their place. A file in it counts when its ending or its first
    bytes are those of a format that is read. Hidden names, linked folders, pipes, sockets and devices are passed over.

    Args:
        paths: Files, folders, ``-`` for standard input; what is named stays, whatever it is.
        limit: How many to return at most; no folder is walked beyond them.

    Raises:
        UsageError: ``paths`` is empty.
        ImageError: None of the named files exists, or a folder holds no picture or cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("b.png", "a.jpg", "README.txt"):
        ...         _ = pathlib.Path(folder, name).write_text("no picture")
        ...     [os.path.basename(path) for path in find_pictures([folder])]
        ['a.jpg', 'b.png']
    """
    if not paths:
        raise UsageError("no picture was given", do="name files or folders, or - for standard input")
    if not any(path == "-" or os.path.exists(path) for path in paths):
        _refuse_missing(paths)
    found = chain.from_iterable(_walk(path) if os.path.isdir(path) else (path,) for path in paths)
    return list(islice(found, limit))


def read_names(data: bytes, source: str) -> list[str]:
    """The file names in ``data``, each ended by a NUL as ``find -print0`` writes them; the last NUL may be missing.

    Names that cannot be decoded come back to the same bytes through ``os.fsencode``.

    Args:
        data: What the list holds.
        source: What to call the list in errors.

    Raises:
        ImageError: The list is empty, is one of lines, or has an empty name in it.

    Example:
        >>> read_names(b"a.jpg\\0new\\nline.png\\0", "names")
        ['a.jpg', 'new\\nline.png']
    """
    if not data:
        raise ImageError(f"no names in '{source}': it is empty", do="check what writes it")
    if b"\0" not in data and b"\n" in data:
        raise ImageError(f"'{source}' holds lines", "names end in NUL", "write it with `find -print0`")
    names = data.removesuffix(b"\0").split(b"\0")
    if b"" in names:
        position = f"name {names.index(b'') + 1} of {len(names)} in '{source}' is empty"
        raise ImageError(position, "names end in one NUL each", "write it with `find -print0`")
    return [os.fsdecode(name) for name in names]


def _refuse_missing(paths: Sequence[str]) -> None:
    """Raise what is wrong with the only name, or with the first of several that are all missing."""
    try:
        read_picture(paths[0])
    except ImageError as error:
        if len(paths) == 1:
            raise
        asked = f"none of the {len(paths)} pictures can be found; the first: {error.asked}"
        raise ImageError(asked, error.exists, error.do) from error


def _walk(folder: str) -> Iterator[str]:
    """The pictures in ``folder`` and below; an error instead of the end when there were none."""
    others: Counter[str] = Counter()
    first = ""
    opened = [_entries(folder)]  # not recursion: folders may be nested deeper than Python's stack
    found = 0
    while opened:
        entry = next(opened[-1], None)
        if entry is None:
            opened.pop()
            continue
        kind = _kind(entry)
        if kind == "folder":
            opened.append(_entries(entry.path))
        elif kind == "picture":
            found += 1
            yield entry.path
        else:
            others[kind] += 1
            first = first or (entry.path if kind == "file" else "")
    if not found:
        raise _without_pictures(folder, others, first)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return iter(sorted(entries, key=lambda entry: entry.name))
    except OSError as error:
        asked = f"folder '{folder}' cannot be read: {error.strerror or error}"
        raise ImageError(asked, do="change its permissions or name its neighbours one by one") from error


def _kind(entry: os.DirEntry[str]) -> str:
    """``folder`` to be walked, ``picture``, or in words what else a name in a folder is."""
    if entry.name.startswith("."):
        return "hidden name"
    mode = _mode(entry)
    if stat.S_ISDIR(mode):
        return "linked folder" if entry.is_symlink() else "folder"
    named = _SUFFIX.fullmatch(os.path.splitext(entry.name)[1])
    if not mode:  # a broken link: one that says it is a picture is told as lost, not dropped in silence
        return "picture" if named else "broken link"
    if not stat.S_ISREG(mode):
        return "pipe, socket or device"
    return "picture" if named or _BEGINNINGS.match(_head(entry.path)) else "file"


def _mode(entry: os.DirEntry[str]) -> int:
    """The type of file behind ``entry``, links followed; 0 where there is none. No system call for plain files."""
    try:
        if entry.is_file(follow_symlinks=False):
            return stat.S_IFREG
        if entry.is_dir(follow_symlinks=False):
            return stat.S_IFDIR
        return entry.stat().st_mode
    except OSError:  # a link to nothing or to itself, or gone meanwhile
        return 0


def _head(path: str) -> bytes:
    """The first bytes of a file, none where it cannot be read; never waits, should it have become a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            return os.read(descriptor, _HEAD)
        finally:
            os.close(descriptor)
    except OSError:
        return b""


def _without_pictures(folder: str, others: Counter[str], first: str) -> ImageError:
    if not others:
        return ImageError(f"no pictures in '{folder}': it is empty", do="name a folder with pictures in it")
    counted = ", ".join(f"{count} {kind if count == 1 else _plural(kind)}" for kind, count in others.items())
    kind = foreign_kind(_head(first)) if first else ""
    example = f", such as {kind} in '{os.path.basename(first)}'" if kind else ""
    return ImageError(f"no pictures in '{folder}'", f"it has {counted}{example}", f"name a folder with {_READ}")


def _plural(kind: str) -> str:
    return "pipes, sockets or devices" if kind.startswith("pipe") else f"{kind}s"
