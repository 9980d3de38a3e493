"""Rows of facts to a stream, as a table for people or as tsv, csv, json and ndjson for programs."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import numbers
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from hookscope.errors import printable

FORMATS = ("table", "tsv", "csv", "json", "ndjson")

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def default_format(stream: TextIO | None) -> str:
    """``table`` when ``stream`` is a terminal, else ``tsv``.

    Example:
        >>> default_format(io.StringIO())
        'tsv'
    """
    return "table" if stream is not None and stream.isatty() else "tsv"


def note(text: str) -> None:
    """Say ``text`` in one line on standard error, control characters as escapes.

    A standard error that is closed or full is no reason to lose a result: it is passed over.
    """
    with contextlib.suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def write_rows(
    rows: Iterable[Mapping[str, Any]],
    fields: Sequence[str],
    format: str,
    stream: TextIO,
    totals: Sequence[str] = (),
) -> None:
    """Write ``rows`` to ``stream`` in one of `FORMATS`; tsv, csv and ndjson row by row as they come.

    Args:
        rows: Each a mapping from field to None, a truth value, a number, a text, a path, a sequence of these (integers
            make a shape, ``1x64x112x112``) or a mapping of these. A row may lack a field, which counts as None.
        fields: The names of the columns, in order.
        format: One of `FORMATS`.
        stream: Where to, as text.
        totals: Lines that follow a table after a blank line; read after the last row, in a table alone.

    Raises:
        ValueError: an unknown format, or a row with a field that is not in ``fields``.
        TypeError: a value that no format knows.

    Example:
        >>> rows = [{"index": 0, "shape": (1, 64, 56, 56)}, {"index": 1, "shape": None}]
        >>> write_rows(rows, ["index", "shape"], "table", sys.stdout, ["2 layers"])
        index  shape
            0  1x64x56x56
            1  -
        <BLANKLINE>
        2 layers
        >>> write_rows(rows, ["index", "shape"], "ndjson", sys.stdout)
        {"index": 0, "shape": [1, 64, 56, 56]}
        {"index": 1, "shape": null}
    """
    writer = RowWriter(fields, format, stream)
    try:
        for row in rows:
            writer.write(row)
    except Exception:
        if writer.begun:  # what was done before it went wrong is not lost
            writer.finish()
        raise
    writer.finish(totals)


class RowWriter:
    """The writer behind `write_rows`, for results that come one by one; the arguments are the same.

    Example:
        >>> writer = RowWriter(["name", "mean"], "csv", sys.stdout)
        >>> writer.write({"name": "conv1", "mean": 0.1})
        name,mean
        conv1,0.1
        >>> writer.finish()
    """

    def __init__(self, fields: Sequence[str], format: str, stream: TextIO) -> None:
        if format not in FORMATS:
            raise ValueError(f"no format {format!r}; there are {', '.join(FORMATS)}")
        self._fields = tuple(fields)
        self._format = format
        self._stream = stream
        self._kept: list[list[Plain]] = []  # for table and json alone, which need every row before the first line
        self._line = _LINES.get(format)
        self.begun = False

    def _begin(self) -> None:
        """Write the header, with the first row and not before: an error may come instead of it."""
        if not self.begun and self._format in _HEADED:
            self._emit(_HEADED[self._format](self._fields))
        self.begun = True

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row, or keep it for `finish` where the format needs all of them."""
        unknown = [name for name in row if name not in self._fields]
        if unknown:
            raise ValueError(f"a row has the unknown fields {unknown}; there are {', '.join(self._fields)}")
        values = [_plain(row.get(name)) for name in self._fields]
        self._begin()
        if self._line is None:
            self._kept.append(values)
        else:
            self._emit(self._line(self._fields, values))

    def finish(self, totals: Sequence[str] = ()) -> None:
        """Write what was kept; ``totals`` follow a table and are left out of the other formats."""
        self._begin()
        if self._format == "table":
            self._emit(_table(self._fields, self._kept, totals))
        elif self._format == "json":
            self._emit(_json_array(self._fields, self._kept))
        self._stream.flush()

    def _emit(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()  # a pipe shall see each row when it is made


def _plain(value: Any) -> Plain:
    """``value`` in the types of JSON; the numbers of numpy are numbers here too."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"no format knows a value of type {type(value).__name__}")


def _finite(value: Plain) -> Plain:
    """``value`` with None for NaN and Inf, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


def plain_json(value: Any) -> Plain:
    """``value`` as JSON holds it: numbers as numbers, NaN and Inf, which it does not have, as None.

    Example:
        >>> plain_json({"mean": math.nan, "shape": (1, 64)})
        {'mean': None, 'shape': [1, 64]}
    """
    return _finite(_plain(value))


def _text(value: Plain, number: Callable[[int | float], str] = repr) -> str:
    """``value`` as one text, raw; ``number`` writes a number that stands alone (repr: the shortest exact one)."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, dict):
        return " ".join(f"{key}:{_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return _joined(value)
    return value


def _joined(items: list[Plain]) -> str:
    if all(item is None or (isinstance(item, int) and not isinstance(item, bool)) for item in items):
        return "x".join("?" if item is None else _text(item) for item in items)
    between = " " if any(isinstance(item, list | dict) for item in items) else ","
    return between.join(map(_text, items))


def _tsv_line(fields: Sequence[str], values: Sequence[Plain]) -> str:
    return "\t".join(printable(_text(value).replace("\\", "\\\\")) for value in values) + "\n"


def _csv_line(fields: Sequence[str], values: Sequence[Plain]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([_text(value) for value in values])
    return line.getvalue()


def _json_line(fields: Sequence[str], values: Sequence[Plain]) -> str:
    record = {name: _finite(value) for name, value in zip(fields, values, strict=True)}
    return json.dumps(record, allow_nan=False) + "\n"  # in ASCII, so that no terminal obeys what a name holds


def _json_array(fields: Sequence[str], rows: Sequence[Sequence[Plain]]) -> str:
    lines = [_json_line(fields, values).rstrip("\n") for values in rows]
    return "[\n  " + ",\n  ".join(lines) + "\n]\n" if lines else "[]\n"


_LINES = {"tsv": _tsv_line, "csv": _csv_line, "ndjson": _json_line}
_HEADED: dict[str, Callable[[Sequence[str]], str]] = {
    "tsv": lambda fields: _tsv_line(fields, list(fields)),
    "csv": lambda fields: _csv_line(fields, list(fields)),
}


def _table(fields: Sequence[str], rows: Sequence[Sequence[Plain]], totals: Sequence[str]) -> str:
    columns = [_column(name, [values[place] for values in rows]) for place, name in enumerate(fields)]
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    if totals:
        lines += ["", *(printable(line) for line in totals)]
    return "".join(f"{line}\n" for line in lines)


def _column(name: str, values: Sequence[Plain]) -> list[str]:
    """The header and the cells of one column, all of one width: numbers to the right, text to the left."""
    cells = [printable(name), *(_cell(value) for value in values)]
    width = max(map(_width, cells))
    known = [value for value in values if value is not None]
    numeric = bool(known) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
    blanks = [" " * (width - _width(cell)) for cell in cells]
    return [blank + cell if numeric else cell + blank for cell, blank in zip(cells, blanks, strict=True)]


def _cell(value: Plain) -> str:
    return "-" if value is None else printable(_text(value, _rounded))


def _rounded(value: int | float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if abs(value) >= 10_000 else str(value)  # up to 9999 a number is read whole: 2048 channels


def _width(text: str) -> int:
    """The columns ``text`` takes on a terminal: two for an East Asian wide character, none for a combining one."""
    return sum(_character_width(character) for character in text)


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
