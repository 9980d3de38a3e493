"""Tables for people: columns, captions and words in lines that fit the terminal, and the styles of cells."""

from __future__ import annotations

import math
import numbers
import os
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import click

from hookscope import models
from hookscope.columns import ALWAYS, Columns, Row
from hookscope.display import rounded as rounded, text_of as text_of, text_width
from hookscope.errors import printable
from hookscope.findings import CATALOGUE, SEVERITIES, Finding, listed, ranked, verdict

# facts about the whole run: the caption holds them where they are the same in every row
_CAPTION_FIELDS = ("model", "image", "weights", "method")
# what a user looks for in a row: these columns leave last, and these cells are shortened last
_KEYS = ("index", "name", "layer", "file", "holds", "limit")
_PATHS = ("image", "file")  # these lose their folders first
_SHORTEST, _SENTENCE = 12, 28  # columns of a shortened cell, and of one with blanks
MOST_WORDS = 100  # columns of a line of words, which can be read at a glance
_BESIDE = 30  # columns that words need beside what they explain; else they begin below it


Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def plain(value: Any, finite: bool = False) -> Plain:
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
        return {str(key): plain(item, finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, finite) for item in value]
    raise TypeError(f"no format can write a value of type {type(value).__name__}")


def plain_json(value: Any) -> Plain:
    """``value`` as JSON holds it; NaN and Inf, which JSON does not have, become None."""
    return plain(value, finite=True)


STYLES: Mapping[str, Mapping[str, Any]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "note": {"fg": "cyan"},
    "good": {"fg": "green"},
    "faint": {"dim": True},
}
"""What a style looks like; each severity is a style."""


def _worst(findings: list[str]) -> str:
    severities = {CATALOGUE[name].severity for name in findings if name in CATALOGUE}
    return next((severity for severity in SEVERITIES if severity in severities), "")


def _if(style: str) -> Callable[[Any], str]:
    return lambda value: style if value else ""


CELLS: Mapping[str, Callable[[Any], str]] = {
    "severity": str,
    "findings": _worst,
    "finding": lambda name: _worst([name]),
    "weights": lambda text: "error" if models.is_random(str(text)) else "",
    "holds": lambda holds: "good" if holds else "error",
    "dead": _if("warning"),
    "low_probability": _if("warning"),
    "collapsed": _if("warning"),
    **dict.fromkeys(("nan", "inf", "nonfinite", "output_nonfinite"), _if("error")),
}
"""The style of a cell by field and value, in every table and caption. The value is not None."""


def cell_style(field: str, value: Any) -> str:
    """One of `STYLES`, or "" for a cell without colour; NaN and Inf are errors in every column."""
    if isinstance(value, float) and not math.isfinite(value):
        return "error"
    return CELLS[field](value) if field in CELLS and value is not None else ""


def styled(text: str, style: str, colours: bool = True) -> str:
    """``text`` in one of `STYLES`; as it is for an unknown style and without ``colours``."""
    return click.style(text, **STYLES[style]) if colours and style in STYLES and text else text


def has_colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal with colours; NO_COLOR and, after it, FORCE_COLOR decide for any stream."""
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True)
class Page:
    """Where a table is written: the columns of a line, whether it has colours, and the sign for what is left out."""

    columns: int
    colours: bool = False
    ellipsis: str = "…"


def lay_out(
    rows: Sequence[Row], declared: Columns, caption: Mapping[str, Any], page: Page
) -> tuple[list[str], dict[str, Any], list[str]]:
    """The lines of a table that fits ``page``, what its ``caption`` holds of it too, and the columns left out.

    A table that is too wide loses the columns that are the same in every row, then the least needed, and then cells are
    shortened in the middle. A table of one row loses nothing, because the caption takes its columns.
    """
    shown = declared.shown(rows)
    values = {column.name: [row.get(column.name) for row in rows] for column in shown}
    same = {name: column[0] for name, column in values.items() if column and column.count(column[0]) == len(column)}
    constant = {name: same[name] for name in _CAPTION_FIELDS if same.get(name) is not None}
    constant = {name: value for name, value in constant.items() if caption.get(name, value) == value}
    columns = {name: _Column.of(name, column) for name, column in values.items() if name not in constant}
    needs = sorted({column.need for column in shown if column.need < ALWAYS})
    groups = [{"order"}, *({column.name for column in shown if column.need == need} for need in needs)]
    alike = {name for name in same if len(rows) > 1 and name not in _KEYS}
    every = [*groups, set(columns).difference(*groups)]  # what is alike in all rows leaves first, in the same order
    kept = _kept(columns, [*(group & alike for group in every), *(group - alike for group in groups)], page.columns)
    constant |= {name: same[name] for name in columns if name in same and name not in kept}
    widths = _shared({name: columns[name] for name in kept}, page.columns)
    cells = [columns[name].cells(width, page) for name, width in widths.items()]
    lines = ["  ".join(line).rstrip() for line in zip(*cells, strict=True)]
    left_out = [name for name in columns if name not in kept and name not in constant]
    return lines, {name: value for name, value in constant.items() if value is not None}, left_out


@dataclass(frozen=True)
class _Column:
    """The header and the cells of a column as text, and the columns of the terminal that they take or need at least."""

    texts: list[str]
    styles: list[str]
    is_number: bool
    width: int
    least: int
    are_paths: bool

    @classmethod
    def of(cls, name: str, values: Sequence[Any]) -> _Column:
        cells = list(map(plain, values))
        known = [cell for cell in cells if cell is not None]
        is_number = bool(known) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in known)
        texts = [printable(name), *map(_cell, cells)]
        width = max(map(text_width, texts))
        are_paths = name in _PATHS
        short = _SENTENCE if any(" " in text for text in texts) else _SHORTEST
        file_name = max(text_width(text.rpartition("/")[2]) + 2 for text in texts) if are_paths else 0
        short = max(short, file_name) if file_name <= _SENTENCE else short
        least = max(short, text_width(texts[0]))
        least = min(width, least if any(map(_is_words, known)) else width)
        return cls(texts, ["", *(cell_style(name, value) for value in values)], is_number, width, least, are_paths)

    def cells(self, width: int, page: Page) -> list[str]:
        """The cells, all of one width: numbers to the right, text to the left."""
        cells, texts = [], shortened(self.texts, width, page.ellipsis, self.are_paths)
        for text, style in zip(texts, self.styles, strict=True):
            blank, coloured = " " * (width - text_width(text)), styled(text, style, page.colours)
            cells.append(blank + coloured if self.is_number else coloured + blank)
        return cells


def _kept(columns: Mapping[str, _Column], least_needed: Sequence[Collection[str]], most: int) -> list[str]:
    """The columns of a line of ``most``: those that are in no group, then group by group the most needed that fit."""
    in_groups = {name for group in least_needed for name in group}
    kept = {name for name in columns if name not in in_groups}
    for group in reversed(least_needed):
        more = kept | columns.keys() & group
        if _line_width(columns[name].width for name in more) <= most:
            kept = more
    order = [name for name in columns if name in kept]
    while len(order) > 1 and _line_width(columns[name].least for name in order) > most:
        order.pop()
    return order


def _is_words(cell: Plain) -> bool:
    """Whether a cell is text that can be shortened; a shape is a number."""
    return isinstance(cell, str | dict) or (isinstance(cell, list) and any(isinstance(part, str) for part in cell))


def _cell(value: Plain) -> str:
    return "-" if value is None else printable(text_of(value, rounded))


def _line_width(widths: Iterable[int]) -> int:
    return sum(width + 2 for width in widths) - 2


def _shared(columns: Mapping[str, _Column], most: int) -> dict[str, int]:
    """The width of each column in a line of ``most``: the widest gives most, and keys give last."""
    widths = {name: column.width for name, column in columns.items()}
    while (too_many := _line_width(widths.values()) - most) > 0:
        can_give = [name for name, column in columns.items() if widths[name] > column.least]
        if not can_give:
            return {name: max(1, width - too_many) for name, width in widths.items()}  # one column is left
        widths[max(can_give, key=lambda name: (name not in _KEYS, widths[name]))] -= 1
    return widths


def shortened(texts: Sequence[str], width: int, ellipsis: str = "…", are_paths: bool = False) -> list[str]:
    """The texts in at most ``width`` columns. Long ones lose their middle, at the place where most stay distinct.

    Paths lose their first folders instead, unless more stay distinct without their middle.

    Example:
        >>> shortened(["features.3.expand1x1", "features.4.expand3x3"], 12)
        ['featu…and1x1', 'featu…and3x3']
        >>> shortened(["/data/shapes/circle-2.png"], 14, are_paths=True)
        ['…/circle-2.png']
    """
    long = list(dict.fromkeys(text for text in texts if text_width(text) > width))
    room = max(0, width - len(ellipsis))
    best: tuple[tuple[int, int], dict[str, str]] = ((-1, 0), {})
    for begin in range(room + 1) if long else ():
        short = {text: _ends(text, begin, room - begin, ellipsis[:width]) for text in long}
        best = max(best, ((len({*short.values()}), -abs(room - 2 * begin)), short), key=lambda choice: choice[0])
    if are_paths:
        short = {text: _end_of_path(text, width, ellipsis) or best[1][text] for text in long}
        best = max(((len({*short.values()}), 1), short), best, key=lambda choice: choice[0])
    return [best[1].get(text, text) for text in texts]


def _end_of_path(path: str, width: int, ellipsis: str) -> str:
    """The file name and as many folders before it as fit; empty if not even the name fits."""
    parts = path.split("/")
    ends = (f"{ellipsis}/{'/'.join(parts[at:])}" for at in range(1, len(parts)))
    return next((end for end in ends if text_width(end) <= width), "")


def _ends(text: str, begin: int, end: int, ellipsis: str) -> str:
    """The first and the last columns of ``text``."""
    if text.isascii():
        return text[:begin] + ellipsis + text[len(text) - end :]
    from wcwidth import clip

    width = text_width(text)
    return f"{clip(text, 0, begin, fillchar='')}{ellipsis}{clip(text, width - end, width, fillchar='')}"


def wrapped(text: str, columns: int, begin: str = "", later: str | None = None) -> list[str]:
    """``text`` in lines of at most ``columns``; only a word longer than a line is split, and ``5 %`` never."""
    text, later = printable(text), begin if later is None else later
    wrap: Callable[..., list[str]] = textwrap.wrap
    if not f"{begin}{text}".isascii():
        from wcwidth import wrap
    text = text.replace(" %", "\xa0%")
    lines = wrap(text, columns, initial_indent=begin, subsequent_indent=later, break_on_hyphens=False)
    return [line.replace("\xa0%", " %") for line in lines]


def whole_line(text: str, columns: int) -> list[str]:
    """A line with its blanks and its indent; a line that is too long is wrapped."""
    text = printable(text)
    indent = " " * (len(text) - len(text.lstrip()))
    return [text] if text_width(text) <= columns else wrapped(text.strip(), columns, indent, indent + "  ")


def caption_lines(facts: Mapping[str, Any], left_out: Sequence[str], page: Page) -> Iterator[str]:
    """``model: resnet18; weights: ...``, and which columns did not fit."""
    columns = min(MOST_WORDS, page.columns)
    texts = {name: f"{name}: {_cell(plain(value)) or '-'}" for name, value in facts.items()}
    for line in wrapped("; ".join(texts.values()), columns):
        for name, value in facts.items():
            line = line.replace(texts[name], styled(texts[name], cell_style(name, value), page.colours))
        yield line
    if left_out:
        lines = [f"left out: {listed(left_out, most)}; --format tsv has all" for most in range(len(left_out), 0, -1)]
        yield from wrapped(next((line for line in lines if len(line) <= columns), lines[-1]), columns)


def findings_in_words(findings: Sequence[Finding], page: Page, judged: str) -> Iterator[str]:
    """The findings, each with its severity, and the verdict; each meaning is printed once."""
    yield ""
    columns = min(MOST_WORDS, page.columns)
    severity_width = max((len(finding.severity) for finding in findings), default=0)
    width = max((len(finding.finding) for finding in findings), default=0)
    meanings: set[str] = set()
    for finding in findings:
        begin = f"{finding.severity:<{severity_width}}  {finding.finding:<{width}}  "
        where = f"{finding.layer}: " if finding.layer else ""
        words = [f"{where}{finding.evidence}", *({finding.meaning} - meanings)]
        meanings.add(finding.meaning)
        longest = max(map(text_width, printable(where).split()), default=0)
        yield from beside(begin, words, longest, finding.severity, Page(columns, page.colours))
    most_severe = ranked(findings)[0].severity if findings else "note"
    if findings:
        yield ""
    for line in wrapped(verdict(findings, judged), columns):
        yield styled(line, "good" if most_severe == "note" else most_severe, page.colours)


def beside(
    begin: str, words: Sequence[str], longest: int, style: str, page: Page, indent: str | None = None
) -> Iterator[str]:
    """The ``words`` to the right of ``begin``, or below it where the ``longest`` word does not fit there.

    Later lines have ``indent``, by default the indent of the words in the first line.
    """
    indent = " " * len(begin) if indent is None else indent
    if page.columns - len(begin) < max(_BESIDE, longest):
        yield styled(begin.rstrip(), style, page.colours)
        begin = indent = "    "
    for text in words:
        for line in wrapped(text, page.columns, begin, indent):
            yield (styled(begin, style, page.colours) if begin.strip() else begin) + line[len(begin) :]
            begin = indent
