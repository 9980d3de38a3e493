"""Which columns of a table fit a terminal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from io import StringIO
from typing import Any, TextIO

from hookscope.cli.output.rows import write_rows


def terminal_columns(stream: TextIO) -> int:
    """How many characters a line of the terminal has, 100 where ``stream`` is none."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 100
    return 100


def fitting(
    rows: Sequence[Mapping[str, Any]], fields: Sequence[str], least_needed: Sequence[Collection[str]], columns: int
) -> list[str]:
    """``fields`` without so many of the least needed that a line has at most ``columns`` characters.

    Args:
        rows: All of the table.
        fields: The columns wanted.
        least_needed: Columns that go together, the first to go first.
        columns: How many characters a line may have.

    Example:
        >>> fitting([{"name": "conv1", "note": "a long note"}], ["name", "note"], [["note"]], columns=12)
        ['name']
    """
    kept = list(fields)
    for names in least_needed:
        if _width(rows, kept) > columns:
            kept = [name for name in kept if name not in names]
    return kept


def _width(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> int:
    text = StringIO()
    write_rows([{name: row[name] for name in fields} for row in rows], fields, "table", text)
    return max(map(len, text.getvalue().splitlines()))
