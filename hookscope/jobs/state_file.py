"""Files of progress: JSON with packed arrays and a checksum, of a known kind, whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hookscope._version import __version__
from hookscope.errors import InputError, path_of, printable
from hookscope.system import StrPath, write_atomically

BEGINNING = b'{"hookscope": '
"""The first bytes of every file."""

_MOST_BYTES = 1 << 33  # of the statistics of resnet50 with --rank it has 400 million
_MOST_PARTS = 2_000_000  # of the JSON; a layer has 150
_MOST_SWELLING = 64  # bytes of arrays for one of the file; a network has about two
_ALWAYS_ALLOWED = 1 << 26  # bytes of arrays, whatever the file has
_ARRAYS = ("int64", "float64")

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class StateKind:
    """A kind of file."""

    words: str  # what such a file holds, such as ``saved statistics``
    give: str  # the advice where another file is given
    format: int = 1  # number of the layout; a file of another number is refused
    name: str = ""  # the name in the file; empty for statistics, whose files are older than other kinds


def is_state_file(path: StrPath) -> bool:
    """Whether there is a file, and it begins as the files of `write_state`."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as stream:
        return stream.read(len(BEGINNING)) == BEGINNING


def write_state(path: StrPath, kind: StateKind, content: dict[str, Any]) -> None:
    """Write ``content``: numbers, strings, arrays of int64 and float64, lists and dictionaries of these."""
    content = encoded(content)
    named = {"kind": kind.name} if kind.name else {}
    about = {"hookscope": __version__, "format": kind.format, **named, "sha256": _digest(content)}
    write_atomically(path, json.dumps(about | {"content": content}, allow_nan=False).encode("ascii") + b"\n")


def read_state(path: StrPath, kind: StateKind, restore: Callable[[dict[str, Any]], Content]) -> Content:
    """What ``restore`` makes of the content of a file of `write_state`."""
    name = printable(path_of(path))
    try:
        data = _content(path, kind)
        whole = json.loads(data)
    except OSError as error:
        raise InputError(f"no {kind.words} '{name}': {error.strerror or error}", do=kind.give) from error
    except (ValueError, RecursionError, MemoryError):
        raise InputError(f"'{name}' holds no {kind.words}, or is damaged", do=kind.give) from None
    if not isinstance(whole, dict) or "hookscope" not in whole or "content" not in whole:
        raise InputError(f"'{name}' holds no {kind.words}", do=kind.give)
    if whole.get("kind", "") != kind.name:
        raise InputError(f"'{name}' holds no {kind.words}", f"it holds {whole.get('kind', 'statistics')}", kind.give)
    if whole.get("format") != kind.format:
        formats = f"it has format {whole.get('format')}, this version reads {kind.format}"
        raise InputError(f"'{name}' was saved by hookscope {whole['hookscope']}", formats, "measure again")
    try:
        if whole.get("sha256") != _digest(whole["content"]):
            raise InputError(f"'{name}' is damaged: its content is not what was saved", do="measure again")
        return restore(_Decoder(_ALWAYS_ALLOWED + _MOST_SWELLING * len(data)).decoded(whole["content"]))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, zlib.error) as error:
        raise InputError(f"'{name}' is damaged: {error}", do="measure again") from error


def _content(path: StrPath, kind: StateKind) -> bytearray:
    """The bytes of a file of `write_state`; of another, which may never end, the beginning."""
    data, parts = bytearray(), 0
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 24 if data else len(BEGINNING)):
            data += chunk
            parts += sum(map(chunk.count, (b",", b"[", b"{")))
            if len(data) > _MOST_BYTES or parts > _MOST_PARTS:
                asked = f"'{printable(os.fspath(path))}' is too large for {kind.words}"
                raise InputError(asked, f"{len(data):,} bytes were read", kind.give)
            if not data.startswith(BEGINNING) or b"\0" in chunk:
                break
    return data


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def encoded(value: Any) -> Any:
    """``value`` for JSON: arrays packed, NaN and Inf by name."""
    if isinstance(value, np.ndarray):
        packed = zlib.compress(np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<")).tobytes(), 1)
        return {"array": value.dtype.name, "shape": list(value.shape), "data": base64.b64encode(packed).decode("ascii")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        return {str(key): encoded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(part) for part in value]
    return value


@dataclass
class _Decoder:
    """Unpacks what `encoded` packed, arrays of at most ``left`` bytes in all."""

    left: int

    def decoded(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decoded(part) for part in value]
        if not isinstance(value, dict):
            return value
        if "float" in value:
            return float(value["float"])
        if "array" in value:
            return self._array(value)
        return {key: self.decoded(part) for key, part in value.items()}

    def _array(self, value: dict[str, Any]) -> np.ndarray[Any, Any]:
        if value["array"] not in _ARRAYS:
            raise ValueError(f"an array of {value['array']}")
        size = math.prod(value["shape"]) * 8
        self.left -= size
        if self.left < 0:
            raise ValueError("its arrays are far larger than the file")
        data = zlib.decompressobj().decompress(base64.b64decode(value["data"]), size + 1)
        kind = np.dtype(value["array"]).newbyteorder("<")
        return np.frombuffer(data, kind).astype(value["array"]).reshape(value["shape"])
