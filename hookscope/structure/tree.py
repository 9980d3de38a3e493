"""The modules of a network as a tree of rows, equal neighbours folded. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hookscope.display import Cells, Rows, Shown
from hookscope.hooks import MODEL, Shape
from hookscope.structure.blocks import Block, Structure, folded_name
from hookscope.tracing import Trace

_ROWS = 40  # of a tree whose depth nobody chose


@dataclass(frozen=True, slots=True, repr=False)
class TreeRow(Shown):
    """A module with all that runs in it, or equal neighbours of one parent.

    Attributes:
        depth: In how many other modules it runs; 0 for the model itself.
        name: Dotted path in ``named_modules()``, of the first of the repeats; empty for the model itself.
        last: Path of the last of the repeats.
        type: Class name.
        repeats: How many neighbours of the same class, shapes and parameters the row stands for.
        calls: How often each of them was called.
        input_shape: Of one call, such as ``(N, C, H, W)``; ``{part: shape}`` for several tensors.
        output_shape: Likewise.
        params: Number of parameters in all repeats, shared ones once.
        macs: Multiply-accumulates of all calls of all repeats.
        values: Number of values that the layers without layers in them put out, in all calls of all repeats.
    """

    depth: int
    name: str
    last: str
    type: str
    repeats: int
    calls: int
    input_shape: Shape
    output_shape: Shape
    params: int
    macs: int
    values: int

    def _cells(self) -> Cells:
        shown: dict[str, Any] = {
            "layer": f"{'  ' * self.depth}{folded_name(self.name, self.last) or MODEL}",
            "type": self.type,
        }
        shown |= {"repeats": self.repeats if self.repeats > 1 else "", "output": self.output_shape}
        return {**shown, "params": self.params, "macs": self.macs, "values": self.values}


def module_tree(traced: Trace, depth: int | None = None, ops: bool = False) -> Rows[TreeRow]:
    """The tree to this depth, or as deep as 40 rows show, in order of execution; the first row is the model itself."""
    structure = Structure(traced if ops else traced.without_operations())
    rows = list(_rows(structure, [[structure.root]], 0))
    if depth is None:
        deepest = max(row.depth for row in rows)
        depth = next((d for d in range(deepest, 1, -1) if sum(row.depth <= d for row in rows) <= _ROWS), 1)
    return Rows(row for row in rows if row.depth <= depth)


def _rows(structure: Structure, parents: Sequence[Sequence[Block]], depth: int) -> Iterator[TreeRow]:
    """The rows of equal neighbours, and below them those of the layers in the first of them."""
    every = [block for blocks in parents for block in blocks]
    first, calls = parents[0][0], len(parents[0])
    shapes = structure.call(first).input_shape, structure.call(first).output_shape
    layer, last = structure.layer(first), structure.layer(parents[-1][0]).name
    numbers = structure.params(every), structure.macs(every), structure.values(every)
    yield TreeRow(depth, layer.name, last, layer.type, len(parents), calls, *shapes, *numbers)
    repeats = [_of_layers(structure, blocks) for blocks in parents]
    for run in _equal_neighbours(structure, repeats[0]):
        yield from _rows(structure, [siblings[at] for siblings in repeats for at in run], depth + 1)


def _of_layers(structure: Structure, blocks: Sequence[Block]) -> list[list[Block]]:
    """The calls in ``blocks``, those of one layer together."""
    calls: dict[int, list[Block]] = {}
    for block in blocks:
        for inside in block.inside:
            calls.setdefault(structure.call(inside).layer, []).append(inside)
    return list(calls.values())


def _equal_neighbours(structure: Structure, layers: Sequence[Sequence[Block]]) -> list[list[int]]:
    runs: list[list[int]] = []
    previous: object = None
    for at, blocks in enumerate(layers):
        signature = structure.signature(blocks)
        if signature == previous:
            runs[-1].append(at)
        else:
            runs.append([at])
        previous = signature
    return runs
