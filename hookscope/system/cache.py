"""Facts that take seconds to find, kept as small JSON files in the user's cache folder.

A cache may only save time: whatever is wrong with it, the answer is ``None`` and the work is done again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from typing import Any

FORMAT = 2
"""Number of the file layout; a file of another number is not read."""

_LARGEST = 64 << 20  # bytes; what is larger was not written here


def folder() -> str | None:
    """The cache folder of this user, which need not exist, or ``None`` where there is no place for one.

    Example:
        >>> folder() is None or os.path.isabs(folder())
        True
    """
    import platformdirs  # not at the top: 20 ms that a run without a cache need not pay

    try:
        path = platformdirs.user_cache_dir("hookscope", appauthor=False)
    except (OSError, RuntimeError, KeyError):
        return None
    # Without a home the path stays "~/…", which would put a folder named "~" wherever the user stands.
    return path if os.path.isabs(path) else None


def load(kind: str, key: Mapping[str, Any]) -> Any | None:
    """The value stored under ``kind`` and ``key``, or ``None`` when there is none that can be trusted.

    A file that is missing, damaged, cut short, unreadable, too large, of another format or of another key counts
    as none. JSON has no tuples and only text as keys of an object: what was stored as a tuple comes back as a list.

    Args:
        kind: What sort of fact it is, such as ``"catalogue"``.
        key: Everything the value depends on, as JSON values; the order of its entries does not matter.

    Raises:
        TypeError: ``key`` holds something JSON cannot say.

    Example:
        >>> load("no such kind", {"version": "1.0"}) is None
        True
    """
    canonical = _canonical(key)
    path = _path(kind, key, canonical)
    if path is None:
        return None
    try:
        entry = json.loads(_read(path))
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    return entry["value"] if _is_entry(entry, kind, canonical) else None


def store(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Keep ``value`` under ``kind`` and ``key`` for a later :func:`load`; where it cannot be kept, do nothing.

    The file is written under another name and renamed, so that a reader sees the whole value or none.

    Args:
        kind: What sort of fact it is, such as ``"catalogue"``.
        key: Everything the value depends on, as JSON values.
        value: Any JSON value.

    Raises:
        TypeError: ``key`` or ``value`` holds something JSON cannot say.

    Example:
        >>> import tempfile, unittest.mock
        >>> with (
        ...     tempfile.TemporaryDirectory() as place,
        ...     unittest.mock.patch("hookscope.system.cache.folder", lambda: place),  # not the reader's own cache
        ... ):
        ...     store("example", {"version": "1.0"}, [1, 2, 3])
        ...     load("example", {"version": "1.0"})
        [1, 2, 3]
    """
    canonical = _canonical(key)
    content = json.dumps(value, separators=(",", ":"))
    check = zlib.crc32(content.encode())
    head = json.dumps({"format": FORMAT, "kind": kind, "key": json.loads(canonical), "check": check})
    text = f'{head[:-1]},"value":{content}}}'
    path = _path(kind, key, canonical)
    if path is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a path that no file can have
            _write(path, text.encode())


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(dict(key), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _is_entry(entry: Any, kind: str, canonical: str) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("format") == FORMAT
        and entry.get("kind") == kind
        and isinstance(entry.get("key"), dict)
        and json.dumps(entry["key"], sort_keys=True, separators=(",", ":")) == canonical
        and "value" in entry
        # a digit changed by a failing disk, or a curious hand, must not come back as a fact
        and entry.get("check") == zlib.crc32(json.dumps(entry["value"], separators=(",", ":")).encode())
    )


def _path(kind: str, key: Mapping[str, Any], canonical: str) -> str | None:
    place = folder()
    if place is None:
        return None
    texts = [kind, *(f"{name}-{value}" for name, value in sorted(key.items()) if isinstance(value, str | int))]
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(texts)).strip("-.")[:100]
    # crc32 and not SHA-256, whose module takes 10 ms to import: the file holds the whole key, so that two keys
    # that share a name only push each other out.
    return os.path.join(place, f"{readable}-{zlib.crc32(f'{kind}{canonical}'.encode()):08x}.json")


def _read(path: str) -> bytes:
    # O_NONBLOCK, because opening a named pipe that lies there would wait for ever.
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise OSError(f"no cache file: {path}")
        return file.read()


def _write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    temporary = f"{path}.{os.urandom(6).hex()}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:  # an interrupt too must not leave the half behind
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
