"""Facts that take seconds to compute, kept as small JSON files in the user's cache folder.

A cache only saves time: if anything is wrong with a file, the answer is ``None`` and the work is done again. A folder
or file of another user is neither read nor replaced, and no link is followed: somebody else may have placed it.
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

from hookscope.system.atomic_files import replacement

FORMAT = 3
"""Number of the file layout; a file with another number is not read."""

_USER = os.geteuid() if hasattr(os, "geteuid") else 0  # Windows gives every file the number 0


def folder() -> str | None:
    """The cache folder of this user, which need not exist; None if the user has no home."""
    base = user_folder()
    return None if base is None else os.path.join(base, "hookscope")


def user_folder(variable: str = "XDG_CACHE_HOME", below_home: str = ".cache") -> str | None:
    """The folder for all caches of this user, or what ``variable`` is for; None if the user has no home.

    The place follows torch's rule: ``$XDG_CACHE_HOME``, else ``~/.cache``; one that is not absolute or not UTF-8 is
    left out, and the home of the user data base is the last choice. Importing platformdirs would take 14 ms.
    """
    homes = [os.environ.get("HOME", ""), os.environ.get("USERPROFILE", "")]
    with contextlib.suppress(ImportError, KeyError, AttributeError):  # no such module, no such user
        import pwd

        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    places = [os.environ.get(variable, ""), *(os.path.join(home, below_home) for home in homes if home)]
    return next(filter(_is_usable, places), None)


def other_homes() -> bool:
    """Whether a library that looks for the user's folders by itself would write in odd places."""
    names = {"HOME", *(name for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME") if os.environ.get(name))}
    return not all(_is_usable(os.environ.get(name, "/")) for name in names)


def _is_usable(path: str) -> bool:
    """Whether the path is absolute, so that it does not depend on the current folder, and text."""
    with contextlib.suppress(UnicodeError):
        return os.path.isabs(path) and bool(path.encode())
    return False


def load(kind: str, key: Mapping[str, Any]) -> Any | None:
    """The value stored under ``kind`` and ``key``, on which it depends, tuples as lists; None if missing or damaged."""
    header, path = _header(kind, key), _path(kind, key)
    try:
        if path is None or not _is_ours(os.path.dirname(path)):
            return None
        with open(path, "rb", opener=_without_link) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != _USER:
                return None
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
            if _is_ours(os.path.dirname(path)) and (not os.path.lexists(path) or _is_ours(path)):
                with replacement(path, follow=False) as file:
                    file.write(content.encode())


def _is_ours(path: str) -> bool:
    """Whether this user owns the file or folder, and the link to it if it is one."""
    return {os.lstat(path).st_uid, os.stat(path).st_uid if os.path.isdir(path) else _USER} == {_USER}


def _without_link(path: str, flags: int) -> int:
    """Open ``path`` itself, and do not wait for the other end of a named pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


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
