"""A report: what a command prints, before any format lays it out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookscope.findings import Finding
from hookscope.report import Row as Row, call_row as call_row, row_of as row_of


@dataclass(frozen=True)
class Columns:
    """The columns of a table, which is short and fits the terminal.

    Attributes:
        fields: The columns, in order.
        only_with_values: Columns that are left out when every value is 0, false, empty or None.
        only_if_known: Columns that are left out when every value is None.
        only_if_varied: Columns that are left out together when all their values are the same.
        least_needed: Groups of columns; the first group goes first when the table is too wide.
    """

    fields: Sequence[str]
    only_with_values: Collection[str] = ()
    only_if_known: Collection[str] = ()
    only_if_varied: Collection[str] = ()
    least_needed: Sequence[Collection[str]] = ()

    def chosen(self, rows: Sequence[Row]) -> list[str]:
        """The columns that are worth showing for these rows, whatever their width."""
        varied = {row.get(name) for row in rows for name in self.only_if_varied} - {None}
        hidden = {name for name in self.only_with_values if not any(row.get(name) for row in rows)}
        hidden |= {name for name in self.only_if_known if all(row.get(name) is None for row in rows)}
        hidden |= set(self.only_if_varied) if len(varied) < 2 else set()
        if all(row.get("index") is not None or row.get("order") is None for row in rows):
            hidden.add("order")  # the index already says where each call stands
        return [name for name in self.fields if name not in hidden]


@dataclass(frozen=True)
class Section:
    """Rows of one kind.

    Attributes:
        rows: Mappings from field to None, a truth value, a number, a text, a path, a sequence of these (integers make
            a shape, ``1x64x112x112``) or a mapping of these. A missing field counts as None.
        fields: The fields of every format, in order.
        kind: ``"row": "layer"`` in ndjson, the list ``"layers"`` in json. Without a kind the rows stand alone.
        more_fields: Fields that only nested formats hold.
        columns: The columns of a table; the default is all ``fields``.
        totals: Lines under the table; read after the last row.
        shown: The rows of a table, if it does not show all of ``rows``.
        for_table: Turns a row into what a table shows.
        as_json: Fields that tsv and csv hold as JSON text.
        in_table: Whether a table shows the section.
        in_flat: Whether tsv and csv may show the section; they hold the first such section.
        needs_rows: Whether a table leaves the section out when it has no rows.
    """

    rows: Iterable[Row]
    fields: Sequence[str]
    kind: str = ""
    more_fields: Sequence[str] = ()
    columns: Columns | None = None
    totals: Iterable[str] = ()
    shown: Iterable[Row] | None = None
    for_table: Callable[[Row], Row] | None = None
    as_json: Collection[str] = ()
    in_table: bool = True
    in_flat: bool = True
    needs_rows: bool = False

    def check(self, row: Row) -> Row:
        """Return ``row``; refuse a field that the section does not have."""
        unknown = [name for name in row if name not in self.fields and name not in self.more_fields]
        if unknown:
            raise ValueError(f"a row has the unknown fields {unknown}; there are {', '.join(self.fields)}")
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

    @classmethod
    def of_rows(cls, rows: Iterable[Row], fields: Sequence[str], totals: Sequence[str] = (), **more: Any) -> Report:
        """A report of rows alone, which json writes as one array."""
        return cls([Section(rows, fields, **more)], totals=totals)
