"""Rows of a tree of modules, with bars in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hookscope.cli.output.report import Report, Section
from hookscope.columns import Column, Columns, Row
from hookscope.display import engineering
from hookscope.hooks import MODEL, Shape
from hookscope.structure import TreeRow, folded_name

TREE = Columns(
    Column("layer", where="table"),
    Column("depth", where="rows"),
    Column("name", where="rows"),
    Column("type", need=1),
    Column("repeats", where="rows"),
    Column("last", where="rows"),
    Column("calls", where="rows"),
    Column("input_shape", where="rows"),
    Column("output_shape", where="rows"),
    Column("output", where="table", need=2),
    Column("params"),
    Column("macs"),
    Column("values"),
)
_TEXTS, _NUMBERS = ("layer", "type", "output"), ("params", "macs", "values")  # columns of a table
_BAR = 5  # characters of a bar of 100 %
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def tree_report(tree: Sequence[TreeRow], totals: Sequence[str]) -> Report:
    """The rows of a tree; a table leaves a model with layers to the ``totals``, and adds bars of shares in it."""
    rows = TREE.rows(tree)
    below = rows[1:] or rows
    cells = {id(row): shown for row, shown in zip(below, _in_table(tree), strict=True)}
    section = Section(rows, TREE, shown=below, for_table=lambda row: cells[id(row)])
    return Report([section], totals=totals)


def _in_table(tree: Sequence[TreeRow]) -> Iterator[Row]:
    """What a table shows of the rows below the model itself, or of the model without layers."""
    whole, rows = tree[0], tree[1:] or tree
    parents = [whole]
    widths = {name: max((len(_short(getattr(row, name))) for row in rows), default=0) for name in _NUMBERS}
    for row in rows:
        parents[row.depth :] = [row]
        cells = [_label(row, parents[row.depth - 1]), row.type, _shape(row.output_shape)]
        for name in _NUMBERS:
            number, most = getattr(row, name), getattr(whole, name)
            cells.append(f"{_short(number):>{widths[name]}} {_bar(number / most if most else 0)}")
        yield dict(zip((*_TEXTS, *_NUMBERS), cells, strict=True))


def _label(row: TreeRow, outer: TreeRow) -> str:
    """Its name without that of the module around it, and its repeats."""
    inside = f"{outer.name}." if outer.name else ""
    begin = inside if row.name.startswith(inside) else ""
    last = row.last if row.repeats > outer.repeats else row.name
    times = f" ×{row.repeats // outer.repeats}" if row.repeats > outer.repeats else ""
    calls = f" ({row.calls} calls)" if row.calls > 1 else ""
    return f"{'  ' * (row.depth - 1)}{folded_name(row.name, last).removeprefix(begin) or MODEL}{times}{calls}"


def _short(number: int) -> str:
    return engineering(number).replace(" ", "")


def _shape(shape: Shape) -> object:
    if isinstance(shape, dict):
        return next(iter(shape.values())) if len(shape) == 1 else f"{len(shape)} tensors"
    return shape


def _bar(share: float) -> str:
    """A bar of the share; what is not 0 is seen."""
    eighths = max(round(share * _BAR * 8), share > 0)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + _EIGHTHS[rest].strip()).ljust(_BAR)
