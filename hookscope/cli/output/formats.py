"""Formats: a report as a table for people, or as tsv, csv, json and ndjson for programs.

To add a format, write a function ``(report, stream)`` and enter it in `FORMATS`.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TextIO

from hookscope.cli.output.table import (
    MOST_WORDS,
    Page,
    Plain,
    caption_lines,
    findings_in_words,
    has_colours,
    lay_out,
    plain,
    plain_json as plain_json,
    text_of,
    whole_line,
    wrapped,
)
from hookscope.columns import Columns, Row
from hookscope.errors import printable
from hookscope.findings import Finding, counted, verdict


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
        lead: Sentences above the first table; a longer one goes on below with ``indent``.
        totals: Lines under the last table.
        flat_note: A note for standard error if tsv or csv leaves something out.
        caption: What holds for every row of a table, such as model and preprocessing; one text under the last table,
            with the columns that are the same in every row.
        in_words: What a table prints instead of sections, from a `hookscope.cli.output.table.Page`.
        judged: What the findings are about, see `verdict`.
    """

    sections: Sequence[Section]
    findings: Sequence[Finding] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    totals: Sequence[str] = ()
    flat_note: str = ""
    caption: Mapping[str, Any] = field(default_factory=dict)
    in_words: Callable[[Any], Iterable[str]] | None = None
    lead: Iterable[str] = ()
    indent: str = ""
    judged: str = ""


_IMAGE_ERRORS = 10  # lines for images that could not be used
_LEAST_COLUMNS = 20  # of a table: a terminal that says less does not know


def default_format(stream: TextIO | None) -> str:
    """``table`` when ``stream`` is a terminal, else ``tsv``."""
    return "table" if stream is not None and stream.isatty() else "tsv"


@dataclass
class Output:
    """What one run of the program may print, and how; `main` makes one for each run and enters it.

    Attributes:
        argv: The words of the command line.
        quiet: Whether standard error is for errors only, as ``--quiet`` says.
        utf8: Whether JSON holds characters beyond ASCII as they are, as ``--utf8`` says; None: on a UTF-8 terminal.
        traceback: Whether an error shows where it was raised.
        begin: Says in a few words what the run does now; `progress.working` shows them.
    """

    argv: Sequence[str] = ()
    quiet: bool = False
    utf8: bool | None = None
    traceback: bool = False
    begin: Callable[[str], None] = lambda words: None
    image_errors: int = field(default=0, init=False)

    now: ClassVar[Output]
    """The output of the run that goes on."""

    def __enter__(self) -> Output:
        self._before, Output.now = Output.now, self
        return self

    def __exit__(self, *error: object) -> None:
        Output.now = self._before

    def note(self, text: str, always: bool = False) -> None:
        """Print ``text`` in one line on standard error, control characters as escapes; an error ``always``.

        A closed or full standard error does not lose a result.
        """
        if always or not self.quiet:
            with contextlib.suppress(OSError, ValueError):
                print(printable(text), file=sys.stderr, flush=True)

    def image_error(self, text: str) -> None:
        """Print why an image could not be used; `sum_up` counts those after the first ten."""
        self.image_errors += 1
        if self.image_errors <= _IMAGE_ERRORS:
            self.note(f"Error: {text}", always=True)

    def sum_up(self) -> None:
        if (rest := self.image_errors - _IMAGE_ERRORS) > 0:
            self.note(f"Error: {counted(rest, 'more image')} could not be used", always=True)


Output.now = Output(sys.argv[1:])


def note(text: str, always: bool = False) -> None:
    """Print a note of the run that goes on; see `Output.note`."""
    Output.now.note(text, always)


def terminal_columns(stream: TextIO, default: int = 100) -> int:
    """COLUMNS if it is set, else the width of the terminal; ``default`` if ``stream`` is not a terminal."""
    with contextlib.suppress(ValueError):
        if (columns := int(os.environ.get("COLUMNS", "0"))) > 0:
            return columns
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or default
    return default


def _emit(stream: TextIO, text: str) -> None:
    Output.now.begin("")  # the reader of a pipe may print on the terminal that shows what goes on
    stream.write(text)
    stream.flush()  # a pipe sees each row when it is made


# tsv and csv: one section, a header and a line for each row


def _tsv_line(values: Sequence[Plain]) -> str:
    return "\t".join(printable(text_of(value).replace("\\", "\\\\")) for value in values) + "\n"


def _csv_line(values: Sequence[Plain]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([text_of(value) for value in values])
    return line.getvalue()


def _write_flat(report: Report, stream: TextIO, line: Callable[[Sequence[Plain]], str]) -> None:
    section = next(section for section in report.sections if section.in_flat)
    header, as_json = line(section.columns.flat), {column.name for column in section.columns if column.as_json}
    try:
        for row in section.rows:
            section.check(row)
            cells = {name: _json(row[name]) if name in as_json else row[name] for name in row}
            # the header is written with the first row, because an error may come instead
            _emit(stream, header + line([plain(cells.get(name)) for name in section.columns.flat]))
            header = ""
        _emit(stream, header)
    except BrokenPipeError:
        _note_of(report)
        raise
    _note_of(report)


def _write_csv(report: Report, stream: TextIO) -> None:
    """Exact, in quotes where they are needed; on a terminal a name with control characters has escapes instead."""
    shows = stream.isatty()
    _write_flat(report, stream, lambda values: f"{printable(_csv_line(values)[:-1])}\n" if shows else _csv_line(values))


def _note_of(report: Report) -> None:
    if report.flat_note:
        note(report.flat_note)


# json and ndjson: every row whole; what is not printable is escaped, so that a name cannot control a terminal


def _json(value: Any, ensure_ascii: bool = True) -> str:
    text = json.dumps(plain_json(value), allow_nan=False, ensure_ascii=ensure_ascii)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _json_for(stream: TextIO) -> Callable[[Any], str]:
    """How ``stream`` takes JSON: with its characters, or in ASCII."""
    is_utf8 = Output.now.utf8
    if is_utf8 and isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors=stream.errors)
    keeps = is_utf8 if is_utf8 is not None else stream.isatty() and _encoding(stream) == "utf-8"
    return functools.partial(_json, ensure_ascii=not keeps)


def _encoding(stream: TextIO) -> str:
    return codecs.lookup(getattr(stream, "encoding", None) or "utf-8").name


def _whole(section: Section, row: Row) -> dict[str, Any]:
    section.check(row)
    return {name: row.get(name) for name in section.columns.nested}


def _write_ndjson(report: Report, stream: TextIO) -> None:
    as_json = _json_for(stream)
    for section in report.sections:
        kind = {"row": section.kind} if section.kind else {}
        for row in section.rows:
            _emit(stream, as_json({**kind, **_whole(section, row)}) + "\n")
    for finding in report.findings or ():
        if any(section.kind for section in report.sections):
            _emit(stream, as_json({"row": "finding", **finding.as_row()}) + "\n")
    stream.flush()


def _write_json(report: Report, stream: TextIO) -> None:
    """One object with a list for each kind of rows; one array for rows without a kind and nothing else."""
    members, as_json = dict[str, Any](report.about), _json_for(stream)
    for section in report.sections:
        rows, error = _until_error(_whole(section, row) for row in section.rows)
        if not section.kind and not members:
            lines = ",\n  ".join(map(as_json, rows))
            _emit(stream, f"[\n  {lines}\n]\n" if rows else "[]\n")
        elif section.kind:
            members[f"{section.kind}{'es' if section.kind.endswith('s') else 's'}"] = rows
        if error is not None:
            raise error
    if report.findings is not None:
        members.setdefault("findings", [finding.as_row() for finding in report.findings])
        members.setdefault("verdict", verdict(report.findings, report.judged))
    if members:
        lines = ",\n".join(f"  {as_json(name)}: {_member(part, as_json)}" for name, part in members.items())
        _emit(stream, f"{{\n{lines}\n}}\n")


def _member(part: Any, as_json: Callable[[Any], str]) -> str:
    """A member of a JSON object; a list has each element on its own line."""
    if not isinstance(part, list) or not part:
        return as_json(part)
    return "[\n    " + ",\n    ".join(map(as_json, part)) + "\n  ]"


def _until_error(rows: Iterable[Any]) -> tuple[list[Any], Exception | None]:
    """All rows, or the rows before an error and the error; raise an error that comes before any row."""
    collected: list[Any] = []
    try:
        collected.extend(rows)
    except Exception as error:
        if not collected:
            raise
        return collected, error
    return collected, None


# the table: for people, in lines that fit a terminal


def _write_table(report: Report, stream: TextIO) -> None:
    ellipsis = "…" if _encoding(stream).startswith("utf") else "..."
    page, lines = Page(max(_LEAST_COLUMNS, terminal_columns(stream)), has_colours(stream), ellipsis), list[str]()
    if report.in_words is not None:
        _emit(stream, "".join(f"{line}\n" for line in report.in_words(page)))
        return
    sections, caption, left_out = [s for s in report.sections if s.in_table], dict(report.caption), list[str]()
    for line in report.lead:
        lines += wrapped(line, min(MOST_WORDS, page.columns), later=report.indent)
    for section in sections:
        rows, error = _until_error(map(section.check, section.rows if section.shown is None else section.shown))
        shown = bool(rows) or not section.needs_rows
        if shown:
            table, constant, left = lay_out([*map(section.for_table or dict, rows)], section.columns, caption, page)
            caption |= constant
            left_out += left
            lines += [*([""] if lines else []), *table]
        if error is not None:
            _emit(stream, "".join(f"{line}\n" for line in lines))
            raise error
        about = list(section.totals if shown else ())
        if section is sections[-1]:
            about += report.totals
        about = [part for line in about for part in whole_line(line, page.columns)]
        if section is sections[-1]:
            about = [*caption_lines(caption, left_out, page), *about]
        if about:
            lines += [*([""] if lines else []), *about]
    if report.findings is not None:
        lines += findings_in_words(report.findings, page, report.judged)
    _emit(stream, "".join(f"{line}\n" for line in lines))


FORMATS: dict[str, Callable[[Report, TextIO], None]] = {
    "table": _write_table,
    "tsv": functools.partial(_write_flat, line=_tsv_line),
    "csv": _write_csv,
    "json": _write_json,
    "ndjson": _write_ndjson,
}


def write_report(report: Report, format: str, stream: TextIO | None = None) -> None:
    """Write ``report`` in one of `FORMATS` to ``stream``, by default standard output."""
    if format not in FORMATS:
        raise ValueError(f"no format {format!r}; there are {', '.join(FORMATS)}")
    FORMATS[format](report, stream or sys.stdout)
