"""How results show themselves: a small table in a notebook, and a few lines of text at a prompt."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Number
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, TypeVar, overload

from hookscope.columns import ALWAYS, Columns
from hookscope.errors import printable

NOTHING_MEASURED = "nothing was measured"
_MOST_ROWS, _MOST_LINES, _LONGEST_LINE = 12, 6, 120  # rows, rows of text, columns
_LONGEST, _LONGEST_TEXT = 60, 250  # characters of a cell, and where there is room


@dataclass(frozen=True)
class Picture:
    """A PNG file in a cell, drawn when a notebook asks for it, and ``text`` for those who do not see it."""

    draw: Callable[[], bytes]
    text: str

    @property
    def base64(self) -> str:
        return base64.b64encode(self.draw()).decode()


Cells = Mapping[str, Any]
"""What a result says of itself, by name: texts, numbers, shapes, `Picture`; None and empty ones say nothing."""


def engineering(number: int) -> str:
    """A number to three or four digits with the prefix of its size: ``3.7 G``; small ones as they are."""
    if abs(number) < 10_000:
        return f"{number:,}"
    shares = ((number / 1000**power, prefix) for power, prefix in enumerate("kMGTPE", 1))
    share, prefix = next(((share, prefix) for share, prefix in shares if abs(share) < 999.95), (number / 1e18, "E"))
    return f"{share:.1f} {prefix}"


class Shown:
    """A result that shows its cells and the rows in its field ``rows``: tables in a notebook, text at a prompt."""

    __slots__ = ()
    _row_field = ""

    def __init_subclass__(cls, rows: str = "") -> None:
        cls._row_field = rows or cls._row_field

    def _columns(self) -> Columns | None:
        """The columns of rows of this class, if a command prints them too."""
        return None

    def _cells(self) -> Cells:
        columns = self._columns()
        assert columns is not None
        return columns.cells([self])[0]

    def _rows(self) -> Sequence[Any]:
        rows = getattr(self, self._row_field.removesuffix("()")) if self._row_field else ()
        return rows() if callable(rows) else rows

    def __repr__(self) -> str:
        cells = {name: words(value) for name, value in self._cells().items() if not isinstance(value, Picture)}
        parts = [printable(f"{name}={_cut(text, _LONGEST_TEXT)}") for name, text in cells.items() if text]
        line, table = ", ".join(parts), self._table()
        line = line if len(line) < 2 * _LONGEST_LINE else ",".join(f"\n  {part}" for part in parts)
        return "\n".join([f"{type(self).__name__}({line})", *([repr(table)] if table else [])])

    def _repr_html_(self) -> str:
        cells = {name: value for name, value in self._cells().items() if isinstance(value, Picture) or words(value)}
        table = self._table()
        return html_table([cells], type(self).__name__, as_columns=False) + (table._repr_html_() if table else "")

    def _table(self) -> Rows[Any]:
        table = Rows(self._rows())
        table.place = f".{self._row_field}" if self._row_field else None
        return table

    if not TYPE_CHECKING:  # type checkers know what a class has itself

        def __getattr__(self, name: str) -> Any:
            """What a table shows of this result, by the name of its column."""
            own = type(self)
            if name[0] != "_" and not hasattr(own, name) and name not in getattr(own, "__dataclass_fields__", ()):
                columns = self._columns()
                if columns is None and name in (cells := self._cells()):
                    return cells[name]
                if of := next((column.of for column in columns or () if column.name == name), None):
                    return of(self)
            known = ", ".join(field for field in getattr(own, "__dataclass_fields__", ()) if field[0] != "_")
            has = f"; it has {known}" if known and name[0] != "_" else ""
            raise AttributeError(f"'{own.__name__}' object has no attribute '{name}'{has}", name=name, obj=self)

    def __post_init__(self) -> None:
        """Let rows in a tuple of a dataclass show themselves as a table."""
        for name, value in [(field.name, getattr(self, field.name)) for field in fields(self)]:  # type: ignore[arg-type]
            if type(value) is tuple and value and is_dataclass(value[0]):
                object.__setattr__(self, name, RowTuple(value))


Row = TypeVar("Row")


class Pictures(list[Any]):
    """A list of images of Pillow that a notebook shows one below the other."""

    def __repr__(self) -> str:
        sizes = ", ".join(dict.fromkeys(f"{image.width}x{image.height}" for image in self))
        return f"{len(self)} images of {sizes} pixels; [0] is the first"

    def _repr_html_(self) -> str:
        one = '<img src="data:image/png;base64,{}" style="max-width: 100%">'
        return "\n".join(one.format(base64.b64encode(image._repr_png_()).decode()) for image in self)


class Table:
    """A list or tuple of rows that shows itself as a table, of the first ones if they are many."""

    __slots__ = ()
    nothing = "[]"
    place: str | None = ""  # of the table in the result that shows it; None if it has no name

    def records(self) -> list[dict[str, Any]]:
        """A dictionary for each row, with the fields of CSV: ``pandas.DataFrame(rows.records())``."""
        rows: Any = self
        if (columns := _columns_of(rows)) is not None:
            return [{name: row[name] for name in columns.flat} for row in columns.rows(rows)]
        return [{n: value for n, value in row.items() if not isinstance(value, Picture)} for row in cells_of(rows)]

    def __repr__(self) -> str:
        every: Any = self
        rows, more = _first(cells_of(every), _MOST_LINES, self.place)
        needs = {column.name: column.need for column in _columns_of(every) or ()}
        return "\n".join([*text_lines(rows, needs), *([more] if more else [])]) if rows else self.nothing

    def _repr_html_(self) -> str:
        every: Any = self
        rows, more = _first(cells_of(every), _MOST_ROWS, self.place)
        return html_table(rows, more=more) if rows else f"<p>{self.nothing}</p>"


class RowTuple(Table, tuple[Row, ...], Generic[Row]):
    """A tuple of rows that shows itself as a table."""

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Row: ...
    @overload
    def __getitem__(self, index: slice, /) -> RowTuple[Row]: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> Row | RowTuple[Row]:
        found = super().__getitem__(index)
        return RowTuple(found) if isinstance(index, slice) else found  # type: ignore[arg-type, return-value]


class Rows(Table, list[Row], Generic[Row]):
    """A list of rows that shows itself as a table."""

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Row: ...
    @overload
    def __getitem__(self, index: slice, /) -> Rows[Row]: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> Row | Rows[Row]:
        if isinstance(index, slice):
            return Rows(super().__getitem__(index))
        return super().__getitem__(index)


def cells_of(rows: Sequence[Any]) -> list[Cells]:
    """The cells of rows of one class: its columns, what each row says of itself, or the fields of a dataclass."""
    if (columns := _columns_of(rows)) is not None:
        return list(columns.cells(rows))
    return [
        row._cells()
        if isinstance(row, Shown)
        else {each.name: getattr(row, each.name) for each in fields(row) if each.repr}
        for row in rows
    ]


def _columns_of(rows: Sequence[Any]) -> Columns | None:
    return rows[0]._columns() if rows and isinstance(rows[0], Shown) else None


def html_table(rows: Sequence[Cells], title: str = "", more: str = "", *, as_columns: bool = True) -> str:
    """A table of HTML, one line for each row, or for each cell of one row; every text is escaped."""
    from markupsafe import Markup, escape  # which commands do without

    def plain(text: str) -> Markup:
        return escape(printable(text))

    def cell(value: Any) -> Markup:
        if not isinstance(value, Picture):
            return plain(words(value))
        image = Markup('<img src="data:image/png;base64,{}" alt="{}"\n style="max-height: {}px">')
        return image.format(value.base64, plain(value.text), 112 if as_columns else 224)

    rows, start = _same_columns(rows), 'style="text-align: start"'
    head = f"<caption {start}>{plain(title)}</caption>" if title else ""
    if as_columns:
        names = "".join(f'<th scope="col">{plain(name)}</th>' for name in rows[0])
        head += f"\n<thead><tr>{names}</tr></thead>"
        sides = [["end" if isinstance(value, Number) else "start" for value in row.values()] for row in rows]
        cells = [zip(own, map(cell, row.values()), strict=True) for own, row in zip(sides, rows, strict=True)]
        lines = ["".join(f'\n<td style="text-align: {side}">{value}</td>' for side, value in row) for row in cells]
    else:
        parts = [(plain(name), cell(value)) for name, value in rows[0].items()]
        lines = [f'<th scope="row" {start}>{name}</th>\n<td {start}>{value}</td>' for name, value in parts]
    body = "".join(f"\n<tr>{line}</tr>" for line in lines)
    return f"<table>{head}\n<tbody>{body}\n</tbody>\n</table>" + (f"<p>{plain(more)}</p>" if more else "")


def text_lines(rows: Sequence[Cells], needs: Mapping[str, int] | None = None) -> Iterator[str]:
    """A table of text: a header, and a line for each row; pictures are left out.

    Columns that do not fit are left out too: those with the lowest of ``needs`` first, then the last. The first long
    cells take the width that is left.
    """
    shown = _same_columns([{n: v for n, v in row.items() if not isinstance(v, Picture)} for row in rows])
    names = list(shown[0])
    lines = [
        list(map(printable, names)),
        *([_cut(printable(words(row[name]) or "-"), _LONGEST_TEXT) for name in names] for row in shown),
    ]
    numbers = [all(isinstance(row[name], int | float | None) for row in shown) for name in names]
    whole = [max(map(text_width, column)) for column in zip(*lines, strict=True)]
    widths = [min(width, _LONGEST) for width in whole]
    kept = sorted(range(len(names)), key=lambda at: (-(needs or {}).get(names[at], ALWAYS), at))
    most = max(_LONGEST_LINE, get_terminal_size((0, 0)).columns)
    while (left := most + 2 - sum(widths[at] + 2 for at in kept)) < 0 and len(kept) > 1:
        kept.pop()
    for at in sorted(kept):
        more = max(0, min(whole[at] - widths[at], left))
        widths[at], left = widths[at] + more, left - more
    lines = [[_cut(line[at], widths[at]) for at in sorted(kept)] for line in lines]
    widths = [max(map(text_width, column)) for column in zip(*lines, strict=True)]  # Chinese takes twice as much
    for line in lines:
        cells = zip(line, widths, (numbers[at] for at in sorted(kept)), strict=True)
        padded = [(" " * (width - text_width(text)), text, number) for text, width, number in cells]
        yield "  ".join(blank + text if number else text + blank for blank, text, number in padded).rstrip()


def words(value: Any) -> str:
    """A value for people: four digits of a float, ``1x64x56x56`` for a shape, nothing for None."""
    return text_of(value, rounded)


def text_of(value: Any, number: Callable[[int | float], str] = repr) -> str:
    """``value`` as one text; ``number`` writes a number that stands alone (repr: the shortest exact one)."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{text_of(item)}".removeprefix(":") for key, item in value.items())
    if isinstance(value, list | tuple):
        if all(item is None or (isinstance(item, int) and not isinstance(item, bool)) for item in value):
            return "x".join("?" if item is None else text_of(item) for item in value)
        return (" " if any(isinstance(item, list | tuple | Mapping) for item in value) else ",").join(
            map(text_of, value)
        )
    return str(value)


def rounded(value: int | float) -> str:
    """A number for people; up to 9999 an integer is read whole: 2048 channels."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if abs(value) >= 10_000 else str(value)


def text_width(text: str) -> int:
    """The columns that ``text`` takes on a terminal: two for a Chinese character, none for a combining one."""
    if text.isascii():
        return len(text)
    import wcwidth  # takes 15 ms, which most tables do without

    return wcwidth.width(text)


def _first(rows: list[Cells], most: int, place: str | None) -> tuple[list[Cells], str]:
    """The first rows, how many more there are, and what has them all."""
    left = len(rows) - most
    more = f"and {left:,} more rows" + ("" if place is None else f"; {place}.records() has all")
    return (rows, "") if left <= 1 else (rows[:most], more)


def _same_columns(rows: Sequence[Cells]) -> list[dict[str, Any]]:
    """The rows with the columns of all; a column in which no row says anything is left out."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value not in (None, "", ()))
    order = [name for name in dict.fromkeys(name for row in rows for name in row) if name in names]
    return [{name: row.get(name) for name in order} for row in rows]


def _cut(text: str, longest: int) -> str:
    """A long ``text`` without its middle; of a sentence the first words are left."""
    if len(text) <= longest:
        return text
    if " " in text[longest // 2 : longest - 1]:
        return f"{text[: longest - 1].rpartition(' ')[0]} …"
    return f"{text[: longest // 2]}…{text[len(text) - longest // 2 + 1 :]}"
