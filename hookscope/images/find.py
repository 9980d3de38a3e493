"""The pictures of a run: named files, pictures in folders in a stable order, lists of names."""

from __future__ import annotations

import glob
import os
import re
import stat
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import PurePath
from typing import Any

from hookscope.errors import HookscopeError, ImageError, UsageError, printable
from hookscope.findings import counted
from hookscope.images.reader import ImageWarning, read_picture
from hookscope.images.remote import (
    PNG,
    foreign_kind,
    is_drawn_by_hookscope,
    is_picture_suffix,
    is_remote,
    picture_format,
    remote_pictures,
)


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


_PLAIN_PNM = re.compile(rb"P[1-3]\s+[#\d]")
_HEAD_BYTES = 64
_PROVENANCE_BYTES = 1 << 16  # it stands before the pixels; a colour profile may stand before it
_OWN = "hookscope picture"


def find_pictures(paths: Sequence[str], limit: int | None = None) -> list[str]:
    """The pictures that ``paths`` name, in order: files as they are, folders walked, globs expanded.

    A folder is walked in order of names, folders in it at their place. A file in it counts if its suffix or its first
    bytes belong to a format that is read. Hidden files, linked folders, pipes, sockets and devices are skipped, and
    pictures that hookscope drew itself, with an ``ImageWarning``. Named files and ``-`` are kept, whatever they are. In
    a folder of a remote file system, such as ``s3://bucket/photos/``, the suffix alone decides. No folder is walked
    beyond ``limit`` paths.
    """
    if not paths:
        raise UsageError("no picture was given", do="name files or folders, or - for standard input")
    named = list(chain.from_iterable(map(_expanded, paths)))
    if not any(path == "-" or is_remote(path) or os.path.exists(path) for path in named):
        _refuse_missing(named)
    own = list[str]()
    pictures = chain.from_iterable(_pictures(path, own) for path in named)
    found = list(islice(pictures, limit if limit is None else min(limit, sys.maxsize)))
    if own:
        such = f"{own[0]} is" if len(own) == 1 else f"{len(own):,} pictures are"
        warnings.warn(f"{such} skipped: drawn by hookscope; name a file to use it", ImageWarning, stacklevel=2)
    return found


def _pictures(path: str, own: list[str]) -> Iterable[str]:
    if is_remote(path):
        return remote_pictures(path)
    return _walk(path, own) if os.path.isdir(path) else (path,)


def _expanded(path: str) -> Sequence[str]:
    """What a glob matches, in order of names; the name itself if it exists or nothing matches.

    Pipes and devices are left out, and what is in a folder that matches too, because that folder is walked.
    """
    if not glob.has_magic(path) or is_remote(path) or os.path.lexists(path):
        return [path]
    found = sorted(glob.glob(path, recursive=True))
    folders = {PurePath(each) for each in found if os.path.isdir(each)}
    files = [each for each in found if PurePath(each) in folders or os.path.isfile(each) or os.path.islink(each)]
    return [each for each in files if folders.isdisjoint(PurePath(each).parents)] or [path]


def label_of(path: str, folders: Iterable[str]) -> str:
    """The name of the folder of an image, if it is inside one of ``folders``, as ``cat`` of ``photos/cat/1.png``."""
    below = {os.path.abspath(folder) for folder in folders}
    folder = os.path.dirname(os.path.abspath(path))
    above = os.path.dirname(folder)
    while below and above not in below and above != os.path.dirname(above):
        above = os.path.dirname(above)
    return os.path.basename(folder) if path != "-" and above in below and folder not in below else ""


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
        read_picture(paths[0])
    except ImageError as error:
        if len(paths) == 1:
            raise
        asked = f"none of the {len(paths)} pictures can be found; the first: {error.asked}"
        raise ImageError(asked, error.exists, error.do) from error


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
        return ImageError(f"no pictures in '{folder}': the folder is empty", do="name a folder with pictures")
    counts = ", ".join(counted(count, kind) for kind, count in others.items())
    kind = foreign_kind(_head(first_file)[:_HEAD_BYTES]) if first_file else ""
    example = f", such as {kind} in '{os.path.basename(first_file)}'" if kind else ""
    return ImageError(
        f"no pictures in '{folder}'", f"it holds {counts}{example}", "name a folder with JPEG, PNG or similar files"
    )
