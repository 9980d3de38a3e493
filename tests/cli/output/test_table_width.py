"""Which columns of a table fit a terminal."""

from __future__ import annotations

import io
import os

import pytest

from hookscope.cli.output.rows import write_rows
from hookscope.cli.output.table_width import fitting, terminal_columns

ROWS = [{"name": "layer1.0.conv1", "shape": (1, 64, 56, 56), "mean": 0.25, "note": "call 1 of 2"}]
FIELDS = ["name", "shape", "mean", "note"]


@pytest.mark.parametrize(
    ("columns", "kept"),
    [(80, FIELDS), (40, ["name", "shape", "mean"]), (25, ["name"]), (3, ["name"])],
)
def test_the_least_needed_go_first_and_only_where_they_must(columns: int, kept: list[str]) -> None:
    found = fitting(ROWS, FIELDS, [["note"], ["shape", "mean"]], columns)
    assert found == kept
    text = io.StringIO()
    write_rows([{name: row[name] for name in found} for row in ROWS], found, "table", text)
    assert max(map(len, text.getvalue().splitlines())) <= columns or kept == ["name"]


def test_a_stream_that_is_no_terminal_has_a_hundred() -> None:
    assert terminal_columns(io.StringIO()) == 100
    with open(os.devnull) as stream:
        assert terminal_columns(stream) == 100
