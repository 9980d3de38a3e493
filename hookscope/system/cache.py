"""Facts that take seconds to compute, kept as small JSON files in the user's cache folder.

A cache only saves time: if anything is wrong with a file, the answer is ``None`` and the work is done again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from typing import Any

from hookscope.system.atomic_files import replacement

FORMAT = 3
"""Number of the file layout; a file with another number is not read."""


def folder() -> str | None:
    """The cache folder of this user, which need not exist; None if the user has no home.

    The place follows torch's rule: ``$XDG_CACHE_HOME``, else ``~/.cache``. Importing platformdirs would take 14 ms.
    """
    path = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # Without a home the path stays "~/…", which would create a folder "~" in the current one.
    return os.path.join(path, "hookscope") if os.path.isabs(path) else None


def load(kind: str, key: Mapping[str, Any]) -> Any | None:
    """The value stored under ``kind`` and ``key``, tuples as lists; None if it is missing or damaged.

    ``key`` holds all that the value depends on, as JSON values in any order.
    """
    header, path = _header(kind, key), _path(kind, key)
    try:
        if path is None or not os.path.isfile(path):  # opening a named pipe would wait for ever
            return None
        with open(path, "rb") as file:
            entry = json.load(file)
        return entry["value"] if entry["header"] == header else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        return None


def store(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Keep ``value``, any JSON value, for a later `load`; do nothing if it cannot be written."""
    path = _path(kind, key)
    content = json.dumps({"header": _header(kind, key), "value": value}, separators=(",", ":"))
    if path is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a path that no file can have
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with replacement(path) as file:
                file.write(content.encode())


def _header(kind: str, key: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps({"format": FORMAT, "kind": kind, "key": dict(key)}, sort_keys=True, allow_nan=False)
    header: dict[str, Any] = json.loads(text)
    return header


def _path(kind: str, key: Mapping[str, Any]) -> str | None:
    place = folder()
    if place is None:
        return None
    texts = [kind, *(f"{name}-{value}" for name, value in sorted(key.items()) if isinstance(value, str | int))]
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(texts)).strip("-.")[:100]
    # CRC-32, not SHA-256, whose module takes 10 ms to import. The file holds the whole key: two keys with one file name
    # only replace each other.
    number = zlib.crc32(json.dumps(_header(kind, key), sort_keys=True).encode())
    return os.path.join(place, f"{readable}-{number:08x}.json")
