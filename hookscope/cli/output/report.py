"""A report: what a command prints, before any format lays it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookscope.columns import Columns, Row
from hookscope.findings import Finding


@dataclass(frozen=True)
class Section:
    """Rows of one kind.

    Attributes:
        rows: Mappings from field to None, a truth value, a number, a text, a path, a sequence of these (integers make
            a shape, ``1x64x112x112``) or a mapping of these. A missing field counts as None.
        columns: What each row says, in order.
        kind: ``"row": "layer"`` in ndjson, the list ``"layers"`` in json. Without a kind the rows stand alone.
        totals: Lines under the table; read after the last row.
        shown: The rows of a table, if it does not show all of ``rows``.
        for_table: Turns a row into what a table shows.
        in_table: Whether a table shows the section.
        in_flat: Whether tsv and csv may show the section; they hold the first such section.
        needs_rows: Whether a table leaves the section out when it has no rows.
    """

    rows: Iterable[Row]
    columns: Columns
    kind: str = ""
    totals: Iterable[str] = ()
    shown: Iterable[Row] | None = None
    for_table: Callable[[Row], Row] | None = None
    in_table: bool = True
    in_flat: bool = True
    needs_rows: bool = False

    def check(self, row: Row) -> Row:
        known = self.columns.nested
        if unknown := [name for name in row if name not in known]:
            raise ValueError(f"a row has the unknown fields {unknown}; there are {', '.join(known)}")
        return row


@dataclass(frozen=True)
class Report:
    """What a command prints.

    Attributes:
        sections: The rows.
        findings: The findings: sentences under a table, rows in json and ndjson. None if a command has none.
        about: What json holds beside the rows.
        lead: Lines above the first table, from a `hookscope.cli.output.table.Page`.
        totals: Lines under the last table.
        flat_note: A note for standard error if tsv or csv leaves something out.
        caption: What holds for every row of a table, such as model and preprocessing; one text under the last table,
            with the columns that are the same in every row.
        in_words: What a table prints instead of sections, from a `hookscope.cli.output.table.Page`.
    """

    sections: Sequence[Section]
    findings: Sequence[Finding] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    totals: Sequence[str] = ()
    flat_note: str = ""
    caption: Mapping[str, Any] = field(default_factory=dict)
    in_words: Callable[[Any], Iterable[str]] | None = None
    lead: Callable[[Any], Iterable[str]] | None = None
