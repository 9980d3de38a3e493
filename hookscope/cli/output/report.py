"""A report to a stream: rows of facts, and after them the findings."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from hookscope.cli.output.rows import RowWriter, plain_json
from hookscope.errors import printable
from hookscope.findings import Finding

_MOST_COLUMNS, _LEAST_COLUMNS = 100, 60
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def write_report(
    rows: Iterable[Mapping[str, Any]],
    fields: Sequence[str],
    findings: Sequence[Finding],
    format: str,
    stream: TextIO,
    totals: Sequence[str] = (),
    kind: str = "layer",
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write rows and findings in one of `FORMATS`.

    A table is followed by ``totals`` and the findings in words; ``json`` is one object ``{"layers": [...],
    "findings": [...]}``; in ``ndjson`` each line says by ``"row"`` which it is; ``tsv`` and ``csv`` hold the rows
    alone, so that every line has the same columns.

    Args:
        rows: As in `write_rows`; fields that are
            no columns (too long for one) are in ``json`` and ``ndjson`` alone.
        fields: The columns.
        findings: What was found.
        format: One of the formats.
        stream: Where to, as text.
        totals: Lines under a table.
        kind: What a row is about; its plural is the name of the rows in ``json``.
        about: What the rows were made from, beside rows and findings in ``json``.

    Example:
        >>> import sys
        >>> found = [Finding("dead-channels", "conv1", "1 of 8 channels never leaves 0", "It is wasted.")]
        >>> write_report([{"name": "conv1", "dead": 1}], ["name", "dead"], found, "table", sys.stdout)
        name   dead
        conv1     1
        <BLANKLINE>
        1 finding
          dead-channels  conv1: 1 of 8 channels never leaves 0
                         It is wasted.
    """
    whole = [dict(row) for row in rows]
    if format == "json":
        as_json = {f"{kind}s": whole, "findings": [found.as_row() for found in findings]}
        stream.write(json_object({**(about or {}), **as_json}))
        stream.flush()
        return
    if format == "ndjson":
        for row in whole:
            stream.write(json.dumps({"row": kind, **_record(row)}, allow_nan=False) + "\n")
        for found in findings:
            stream.write(json.dumps({"row": "finding", **_record(found.as_row())}, allow_nan=False) + "\n")
        stream.flush()
        return
    writer = RowWriter(fields, format, stream)
    for row in whole:
        writer.write({name: value for name, value in row.items() if name in fields})
    writer.finish(totals)
    if format == "table":
        stream.write("".join(f"{line}\n" for line in _in_words(findings, _columns(stream))))
        stream.flush()


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain_json(value) for name, value in row.items()}


def json_object(value: Mapping[str, Any]) -> str:
    """A JSON object with one row a line, in ASCII, so that no terminal obeys what a name holds."""
    parts = []
    for name, part in value.items():
        if isinstance(part, list):
            lines = ",\n    ".join(json.dumps(plain_json(row), allow_nan=False) for row in part)
            text = f"[\n    {lines}\n  ]" if part else "[]"
        else:
            text = json.dumps(plain_json(part), allow_nan=False)
        parts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _columns(stream: TextIO) -> int:
    """How long a line of words may be: what can be read at a glance, and no longer than the terminal is wide."""
    with contextlib.suppress(OSError, ValueError):
        return max(_LEAST_COLUMNS, min(_MOST_COLUMNS, os.get_terminal_size(stream.fileno()).columns or _MOST_COLUMNS))
    return _MOST_COLUMNS


def _in_words(findings: Sequence[Finding], columns: int) -> list[str]:
    lines = ["", f"{len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}"]
    width = max((len(found.finding) for found in findings), default=0)
    told: set[str] = set()
    for found in findings:
        where = f"{found.layer}: " if found.layer else ""
        lines += _wrapped(f"  {found.finding:<{width}}  ", f"{where}{found.evidence}", columns)
        if found.meaning not in told:  # of many findings of one name, the first says what it means
            lines += _wrapped(" " * (width + 4), found.meaning, columns)
            told.add(found.meaning)
    return lines


def _wrapped(begin: str, text: str, columns: int) -> list[str]:
    """``text`` beside ``begin`` in lines of at most so many columns; a name is never parted."""
    below = " " * len(begin)
    return textwrap.wrap(printable(text), columns, initial_indent=begin, subsequent_indent=below, **_WHOLE_WORDS)
