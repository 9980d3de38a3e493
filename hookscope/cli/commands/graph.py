"""Print the modules as a tree, draw the data flow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hookscope import structure
from hookscope.cli.command import RowCommand
from hookscope.cli.commands.list_layers import traced
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.written import open_option, wrote
from hookscope.columns import Column, Columns, Row
from hookscope.display import engineering
from hookscope.findings import listed
from hookscope.hooks import MODEL, Shape

TREE = Columns(
    Column("layer", where="table"),
    Column("depth", where="rows"),
    Column("name", where="rows"),
    Column("type", need=1),
    *(Column(name, where="rows") for name in ("repeats", "last", "calls", "input_shape", "output_shape")),
    Column("output", where="table", need=2),
    *("params", "macs", "values"),
)
_TEXTS, _NUMBERS = ("layer", "type", "output"), ("params", "macs", "values")  # columns of a table
_BAR = 5  # characters of a bar of 100 %
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class Graph(RowCommand):
    """Print the modules of MODEL as a tree, and draw its data flow.

    \b
    Examples:
      hookscope graph resnet50
      hookscope graph resnet50 --depth 2 -o resnet50.svg
      hookscope graph vit_b_16 --format json

    MODEL is resnet34 by default. The tree shows which module runs inside which. Neighbours with equal class, shapes and
    parameters share a row: ×2 is their number. A row counts all of them, with the modules inside. values counts the
    output values of modules without modules inside. The bars are shares of the whole model.

    With -o, the graph shows which call reads the output of another: blocks, functions that join values, and the shapes
    between them. A box becomes narrower where the resolution falls. Equal layers in sequence share a box. Calls that
    only pass values on are left out.

    Shapes come from a pass without arithmetic if the model allows it, else from a real pass.
    """

    model: str = shared.model_argument(default="resnet34")
    output: str | None = shared.out_file(
        "Draw the data flow: an SVG, PNG or DOT file.",
        "-o",
        writes=lambda path: structure.check_graph_file(path),
        also=[open_option()],
    )
    depth: int | None = option(
        "Levels of modules of the tree and the graph.  [default: as deep as 40 rows or boxes show]"
    )
    ops: bool | None = shared.ops_option()
    input_size: tuple[int, ...] | None = shared.size_option()

    def run(self) -> None:
        size, trace = traced(self.model, self.input_size, self.output is not None)
        whole = f"{self.model} at {'x'.join(map(str, size))}"
        if self.output is not None:
            structure.write_graph(structure.network_graph(trace, self.depth), self.output, whole)
            wrote(self.output)
        tree = structure.module_tree(trace, self.depth, bool(self.ops))
        idle, model = structure.Structure(trace).not_called(), tree[0]
        lines = [f"did not run: {listed(list(idle), 3)}, {sum(idle.values()):,} parameters"] if idle else []
        numbers = f"{model.params:,} parameters, {model.macs:,} MACs, {model.values:,} output values"
        totals = [*lines, f"{whole}: {numbers}{' (by a real pass)' if trace.real else ''}"]
        rows = TREE.rows(tree)
        below = rows[1:] or rows  # the totals tell of a model with layers
        cells = {id(row): shown for row, shown in zip(below, _in_table(tree), strict=True)}
        section = Section(rows, TREE, shown=below, for_table=lambda row: cells[id(row)])
        self.print(Report([section], totals=totals))


def _in_table(tree: Sequence[structure.TreeRow]) -> Iterator[Row]:
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


def _label(row: structure.TreeRow, outer: structure.TreeRow) -> str:
    """Its name without the name of the module around it, and its repeats."""
    inside = f"{outer.name}." if outer.name else ""
    begin = inside if row.name.startswith(inside) else ""
    last = row.last if row.repeats > outer.repeats else row.name
    times = f" ×{row.repeats // outer.repeats}" if row.repeats > outer.repeats else ""
    calls = f" ({row.calls} calls)" if row.calls > 1 else ""
    return f"{'  ' * (row.depth - 1)}{structure.folded_name(row.name, last).removeprefix(begin) or MODEL}{times}{calls}"


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
