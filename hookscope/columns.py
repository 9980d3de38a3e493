"""Columns: what the rows of a result say, each column once for tables, tsv, csv, JSON, pages and docs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Row = Mapping[str, Any]

ALWAYS = 99
"""The need of a column that no table drops."""


@dataclass(frozen=True)
class Column:
    """A column of rows: its name, its value, and when a table leaves it out.

    Attributes:
        name: The header in tsv and csv, and the field in JSON.
        of: Computes the value from a fact; None takes the attribute of this name.
        help: What the help of a command and docs/ say about it.
        need: A table that is too wide drops the columns with the lowest need first, columns of one need together.
        hide: A table leaves the column out if every value is 0, false, empty or None (``"zero"``), if every value is
            None (``"unknown"``), the same or the weights of every row are random (``"random"``), or if all such columns
            hold one value (``"same"``).
        where: ``"all"`` formats and pages; ``"wide"``, all but tables in a terminal; ``"rows"``, all but tables and
            pages; ``"nested"``, JSON alone; ``"table"``, tables alone.
        as_json: Whether tsv and csv hold the value as JSON text.
        over: Computes the values of all rows from all facts, such as shares of a sum.

    Example:
        >>> Column("dead", lambda layer: len(layer.dead_channels), "channels with one constant value", need=5).need
        5
    """

    name: str
    of: Callable[[Any], Any] | None = None
    help: str = ""
    need: int = ALWAYS
    hide: Literal["", "zero", "unknown", "random", "same"] = ""
    where: Literal["all", "wide", "rows", "nested", "table"] = "all"
    as_json: bool = False
    over: Callable[[Sequence[Any]], Sequence[Any]] | None = None

    def hides(self, values: Sequence[Any], weights: Sequence[Any] = ()) -> bool:
        """Whether a table with these values leaves the column out; ``weights`` are the labels of the rows' weights."""
        if self.hide == "zero":
            return not any(values)
        if self.hide == "random" and weights and all(str(label).partition(" (")[0] == "random" for label in weights):
            return True
        return self.hide in ("unknown", "random") and all(value is None for value in values)


class Columns(tuple[Column, ...]):
    """The columns of one kind of rows, in order. A text is a column of that name.

    Example:
        >>> pets = Columns("name", Column("legs", lambda pet: 2 * pet.pairs, need=1), Column("weights", where="rows"))
        >>> pets.flat, pets.table
        (('name', 'legs', 'weights'), ('name', 'legs'))
    """

    def __new__(cls, *columns: Column | str) -> Columns:
        return super().__new__(cls, [Column(column) if isinstance(column, str) else column for column in columns])

    @property
    def flat(self) -> tuple[str, ...]:
        """The fields of tsv and csv."""
        return self._names("all", "wide", "rows")

    @property
    def nested(self) -> tuple[str, ...]:
        """The fields of JSON: the fields of tsv and csv, and the lists that are too long for a cell."""
        return (*self.flat, *self._names("nested"))

    @property
    def table(self) -> tuple[str, ...]:
        """The columns of a table in a terminal."""
        return self._names("all", "table")

    @property
    def page(self) -> tuple[str, ...]:
        """The columns of a table on a page, whose rows have the key of their call and stand in its order."""
        return tuple(name for name in self._names("all", "wide") if name not in ("call", "order"))

    def _names(self, *where: str) -> tuple[str, ...]:
        return tuple(column.name for column in self if column.where in where)

    def row(self, *facts: Any, **values: Any) -> Row:
        """A row: each value from ``values``, else computed from the first of ``facts``, else an attribute of a fact."""

        def value(column: Column) -> Any:
            if column.name in values:
                return values[column.name]
            if column.of is not None:
                return column.of(facts[0])
            return next((getattr(fact, column.name) for fact in facts if hasattr(fact, column.name)), None)

        return {column.name: value(column) for column in self if column.where != "table"}

    def rows(self, facts: Iterable[Any], **values: Any) -> list[Row]:
        """A row for each fact; ``values`` hold for all."""
        facts = list(facts)
        over = {column.name: column.over(facts) for column in self if column.over is not None}
        return [
            self.row(fact, **values, **{name: all_values[at] for name, all_values in over.items()})
            for at, fact in enumerate(facts)
        ]

    def shown(self, rows: Sequence[Row]) -> list[Column]:
        """The columns of a table of these rows, whatever its width."""
        shown = [column for column in self if column.where in ("all", "table")]
        alike = [column.name for column in shown if column.hide == "same"]
        if len({row.get(name) for row in rows for name in alike} - {None}) < 2:
            shown = [column for column in shown if column.hide != "same"]
        weights = [row.get("weights") for row in rows]
        shown = [column for column in shown if not column.hides([row.get(column.name) for row in rows], weights)]
        # the index already says where each call stands
        has_index = all(row.get("index") is not None or row.get("order") is None for row in rows)
        return [column for column in shown if column.name != "order" or not has_index]

    def cells(self, facts: Sequence[Any]) -> list[Row]:
        """What a notebook shows of each fact: the columns of a table of all."""
        own = {column.name: column.of for column in self if column.where == "table" and column.of is not None}
        rows = [
            {**row, **{name: of(fact) for name, of in own.items()}}
            for row, fact in zip(self.rows(facts), facts, strict=True)
        ]
        names = [column.name for column in self.shown(rows)]
        return [{name: row.get(name) for name in names} for row in rows]

    def but(self, *names: str, **changes: Mapping[str, Any]) -> Columns:
        """These columns without ``names``, and with changed attributes of others: ``but(type={"need": 1})``."""
        kept = (column for column in self if column.name not in names)
        return Columns(
            *(replace(column, **changes[column.name]) if column.name in changes else column for column in kept)
        )

    def help_lines(self, width: int = 76) -> list[str]:
        """Lines of at most ``width`` that say what each column with a ``help`` holds, as help texts list them."""
        told = [column for column in self if column.help and column.where != "table"]
        names = max((len(column.name) for column in told), default=0) + 2
        lines = (textwrap.wrap(column.help, width - names, break_on_hyphens=False) for column in told)
        return [
            f"{'' if number else column.name:<{names}}{line}"
            for column, wrapped in zip(told, lines, strict=True)
            for number, line in enumerate(wrapped)
        ]
