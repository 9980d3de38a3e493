"""Files that grow row after row during a run."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shutil
from collections.abc import Iterable
from typing import Any


def append_to(name: str, data: Any) -> None:
    with open(name, "ab") as stream:  # not kept open: there may be more columns than a process may have files
        stream.write(data)


def sync(name: str) -> None:
    with open(name, "rb") as stream:
        os.fsync(stream.fileno())


def tsv(rows: Iterable[Iterable[Any]]) -> bytes:
    text, rows = io.StringIO(), [[str(value) for value in row] for row in rows]
    # csv does not quote \r where lines end with \n.
    has_returns = any("\r" in value for row in rows for value in row)
    lines = csv.writer(
        text, csv.excel_tab, lineterminator="\n", quoting=csv.QUOTE_ALL if has_returns else csv.QUOTE_MINIMAL
    )
    lines.writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def remove(path: str) -> None:
    """Remove a file or a folder that may be missing."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
