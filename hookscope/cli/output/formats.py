"""Formats: a report as a table for people, or as tsv, csv, json and ndjson for programs.

To add a format, write a function ``(report, stream)`` and enter it in `FORMATS`.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import math
import numbers
import os
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TextIO

from hookscope.cli.output.report import Columns, Report, Row, Section
from hookscope.cli.output.styles import cell_style, has_colours, styled
from hookscope.errors import printable
from hookscope.findings import Finding, ranked, verdict

_MOST_COLUMNS, _LEAST_COLUMNS = 100, 60  # of a line of words, which can be read at a glance

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def default_format(stream: TextIO | None) -> str:
    """``table`` when ``stream`` is a terminal, else ``tsv``."""
    return "table" if stream is not None and stream.isatty() else "tsv"


is_quiet = False
"""Whether standard error is for errors only, as `--quiet` says; `main` sets it for each run."""


def note(text: str, always: bool = False) -> None:
    """Print ``text`` in one line on standard error, control characters as escapes; an error is printed ``always``.

    A closed or full standard error is no reason to lose a result.
    """
    if always or not is_quiet:
        with contextlib.suppress(OSError, ValueError):
            print(printable(text), file=sys.stderr, flush=True)


def terminal_columns(stream: TextIO, default: int = 100) -> int:
    """The characters in a line of the terminal; ``default`` if ``stream`` is no terminal."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or default
    return default


def _emit(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()  # a pipe sees each row when it is made


def _plain(value: Any, finite: bool = False) -> Plain:
    """``value`` in the types of JSON, numbers of numpy too; with ``finite``, NaN and Inf become None."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) or not finite else None
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, finite) for item in value]
    raise TypeError(f"no format can write a value of type {type(value).__name__}")


def plain_json(value: Any) -> Plain:
    """``value`` as JSON holds it; NaN and Inf, which JSON does not have, become None."""
    return _plain(value, finite=True)


def _text(value: Plain, number: Callable[[int | float], str] = repr) -> str:
    """``value`` as one text; ``number`` writes a number that stands alone (repr: the shortest exact one)."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, dict):
        return " ".join(f"{key}:{_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        if all(item is None or (isinstance(item, int) and not isinstance(item, bool)) for item in value):
            return "x".join("?" if item is None else _text(item) for item in value)
        return (" " if any(isinstance(item, list | dict) for item in value) else ",").join(map(_text, value))
    return value


# tsv and csv: one section, a header and a line for each row


def _tsv_line(values: Sequence[Plain]) -> str:
    return "\t".join(printable(_text(value).replace("\\", "\\\\")) for value in values) + "\n"


def _csv_line(values: Sequence[Plain]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([_text(value) for value in values])
    return line.getvalue()


def _write_flat(report: Report, stream: TextIO, line: Callable[[Sequence[Plain]], str]) -> None:
    section = next(section for section in report.sections if section.in_flat)
    header = line(list(section.fields))
    try:
        for row in section.rows:
            section.check(row)
            cells = {name: _json(row[name]) if name in section.as_json else row[name] for name in row}
            # the header is written with the first row, because an error may come instead
            _emit(stream, header + line([_plain(cells.get(name)) for name in section.fields]))
            header = ""
        _emit(stream, header)
    except BrokenPipeError:
        _note_of(report)
        raise
    _note_of(report)


def _note_of(report: Report) -> None:
    if report.flat_note:
        note(report.flat_note)


# json and ndjson: every row whole, in ASCII, so that a name cannot send control characters to a terminal


def _json(value: Any) -> str:
    return json.dumps(plain_json(value), allow_nan=False)


def _whole(section: Section, row: Row) -> dict[str, Any]:
    section.check(row)
    return {name: row.get(name) for name in (*section.fields, *section.more_fields)}


def _write_ndjson(report: Report, stream: TextIO) -> None:
    for section in report.sections:
        kind = {"row": section.kind} if section.kind else {}
        for row in section.rows:
            _emit(stream, _json({**kind, **_whole(section, row)}) + "\n")
    for finding in report.findings or ():
        if any(section.kind for section in report.sections):
            _emit(stream, _json({"row": "finding", **finding.as_row()}) + "\n")
    stream.flush()


def _write_json(report: Report, stream: TextIO) -> None:
    """One object with a list for each kind of rows; one array for rows without a kind and nothing else."""
    members: dict[str, Any] = dict(report.about)
    for section in report.sections:
        rows, error = _until_error(_whole(section, row) for row in section.rows)
        if not section.kind and not members:
            lines = ",\n  ".join(map(_json, rows))
            _emit(stream, f"[\n  {lines}\n]\n" if rows else "[]\n")
        elif section.kind:
            members[f"{section.kind}{'es' if section.kind.endswith('s') else 's'}"] = rows
        if error is not None:
            raise error
    if report.findings is not None:
        members.setdefault("findings", [finding.as_row() for finding in report.findings])
        members.setdefault("verdict", verdict(report.findings))
    if members:
        _emit(stream, "{\n" + ",\n".join(f"  {json.dumps(name)}: {_member(part)}" for name, part in members.items()))
        _emit(stream, "\n}\n")


def _member(part: Any) -> str:
    """A member of a JSON object; a list has each element on its own line."""
    if not isinstance(part, list) or not part:
        return _json(part)
    return "[\n    " + ",\n    ".join(map(_json, part)) + "\n  ]"


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


# facts about the whole run: the caption holds them where they are the same in every row
_CAPTION_FIELDS = ("model", "image", "weights", "method")


def _write_table(report: Report, stream: TextIO) -> None:
    columns, colours, lines = terminal_columns(stream), has_colours(stream), list[str]()
    width = max(_LEAST_COLUMNS, min(_MOST_COLUMNS, columns))
    sections, caption = [section for section in report.sections if section.in_table], dict(report.caption)
    for section in sections:
        rows, error = _until_error(map(section.check, section.rows))
        shown = bool(rows) or not section.needs_rows
        if shown:
            people = section.for_table or dict
            rows = [people(row) for row in rows]
            constant = _constant(rows, caption)
            caption |= constant
            lines += [*([""] if lines else []), *_table(rows, section, constant, columns, colours)]
        if error is not None:
            _emit(stream, "".join(f"{line}\n" for line in lines))
            raise error
        totals = [*(section.totals if shown else ()), *(report.totals if section is sections[-1] else ())]
        about = _caption(caption, width, colours) if section is sections[-1] else []
        if totals or about:
            lines += [*([""] if lines else []), *about, *map(printable, totals)]
    if report.findings is not None:
        lines += _findings_in_words(report.findings, width, colours)
    _emit(stream, "".join(f"{line}\n" for line in lines))


def _constant(rows: Sequence[Row], caption: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about the run that are the same in every row and do not contradict ``caption``."""
    first = rows[0] if rows else {}
    values = {name: first[name] for name in _CAPTION_FIELDS if first.get(name) is not None}
    return {
        name: value
        for name, value in values.items()
        if caption.get(name, value) == value and all(row.get(name) == value for row in rows)
    }


def _caption(facts: Mapping[str, Any], columns: int, colours: bool) -> list[str]:
    """``model: resnet18; weights: ...`` in lines of at most ``columns``."""
    texts = {name: f"{name}: {printable(_text(_plain(value), _rounded))}" for name, value in facts.items()}
    lines = textwrap.wrap("; ".join(texts.values()), columns, break_long_words=False, break_on_hyphens=False)
    for name, value in facts.items():
        lines = [line.replace(texts[name], styled(texts[name], cell_style(name, value), colours)) for line in lines]
    return lines


def _table(rows: Sequence[Row], section: Section, hidden: Container[str], columns: int, colours: bool) -> list[str]:
    shown = section.columns or Columns(section.fields)
    values = {name: [row.get(name) for row in rows] for name in shown.chosen(rows) if name not in hidden}
    cells = {name: _column(name, list(map(_plain, column))) for name, column in values.items()}
    for group in shown.least_needed:
        if sum(_width(column[0]) + 2 for column in cells.values()) - 2 > columns:
            cells = {name: column for name, column in cells.items() if name not in group}
    styles = [[cell_style(name, value) for value in values[name]] for name in cells] if colours else []
    for column, names in zip(cells.values(), styles, strict=False):
        column[1:] = map(styled, column[1:], names)
    return ["  ".join(line).rstrip() for line in zip(*cells.values(), strict=True)]


def _column(name: str, values: Sequence[Plain]) -> list[str]:
    """The header and the cells of one column, all of one width: numbers to the right, text to the left."""
    cells = [printable(name), *("-" if value is None else printable(_text(value, _rounded)) for value in values)]
    width = max(map(_width, cells))
    known = [value for value in values if value is not None]
    numeric = bool(known) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
    blanks = [" " * (width - _width(cell)) for cell in cells]
    return [blank + cell if numeric else cell + blank for cell, blank in zip(cells, blanks, strict=True)]


def _rounded(value: int | float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if abs(value) >= 10_000 else str(value)  # up to 9999 a number is read whole: 2048 channels


def _width(text: str) -> int:
    """The columns of ``text`` on a terminal: two for an East Asian wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )


def _findings_in_words(findings: Sequence[Finding], columns: int, colours: bool) -> list[str]:
    """The findings, each with its severity, and the verdict; each meaning is printed once."""
    lines = [""]
    severity_width = max((len(finding.severity) for finding in findings), default=0)
    width = max((len(finding.finding) for finding in findings), default=0)
    meanings: set[str] = set()
    for finding in findings:
        begin = f"{finding.severity:<{severity_width}}  {finding.finding:<{width}}  "
        where = f"{finding.layer}: " if finding.layer else ""
        first, *more = _wrapped(begin, f"{where}{finding.evidence}", columns)
        lines += [styled(begin, finding.severity, colours) + first[len(begin) :], *more]
        if finding.meaning not in meanings:
            lines += _wrapped(" " * len(begin), finding.meaning, columns)
            meanings.add(finding.meaning)
    gravest = ranked(findings)[0].severity if findings else "note"
    style = "good" if gravest == "note" else gravest
    return [*lines, *([""] if findings else []), styled(verdict(findings), style, colours)]


def _wrapped(begin: str, text: str, columns: int) -> list[str]:
    """``text`` beside ``begin`` in lines of at most ``columns``; a name is never split."""
    return textwrap.wrap(
        printable(text),
        columns,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )


FORMATS: dict[str, Callable[[Report, TextIO], None]] = {
    "table": _write_table,
    "tsv": functools.partial(_write_flat, line=_tsv_line),
    "csv": functools.partial(_write_flat, line=_csv_line),
    "json": _write_json,
    "ndjson": _write_ndjson,
}


def write_report(report: Report, format: str, stream: TextIO | None = None) -> None:
    """Write ``report`` in one of `FORMATS` to ``stream``, by default standard output."""
    if format not in FORMATS:
        raise ValueError(f"no format {format!r}; there are {', '.join(FORMATS)}")
    FORMATS[format](report, stream or sys.stdout)
