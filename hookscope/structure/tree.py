"""The modules of a network as a tree of rows, equal neighbours folded. Needs no torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hookscope import tracing
from hookscope.display import Cells, Rows, Shown
from hookscope.errors import check_whole
from hookscope.hooks import MODEL, OPERATION, Shape, enclosing
from hookscope.tracing import Trace, TracedCall, TracedLayer

if TYPE_CHECKING:  # these need torch
    from hookscope.hooks import AnyModel
    from hookscope.tracing import Inputs


@dataclass(slots=True)
class CallBlock:
    """A call, by its position in the trace, and the calls in it in order of execution."""

    position: int
    inside: list[CallBlock] = field(default_factory=list)

    def innermost(self) -> Iterator[int]:
        """The positions of the calls without calls in them."""
        for block in self.inside:
            yield from block.innermost()
        if not self.inside:
            yield self.position


class Structure:
    """A trace as blocks in blocks; ``root`` is the call of the model itself."""

    def __init__(self, traced: Trace) -> None:
        self.traced = traced
        open_blocks: defaultdict[int, list[CallBlock]] = defaultdict(list)  # by their depth
        for position, call in enumerate(traced.calls):  # a call returns after the calls in it
            open_blocks[call.depth].append(CallBlock(position, open_blocks.pop(call.depth + 1, [])))
        self.root = open_blocks[0][-1]
        self._within: defaultdict[str, list[int]] = defaultdict(list)
        for place, layer in enumerate(traced.layers):
            for name in enclosing(layer.name) if OPERATION not in layer.name else ():
                self._within[name].append(place)

    def call(self, block: CallBlock) -> TracedCall:
        return self.traced.calls[block.position]

    def layer(self, block: CallBlock) -> TracedLayer:
        return self.traced.layers[self.call(block).layer]

    def is_operation(self, block: CallBlock) -> bool:
        return OPERATION in self.layer(block).name

    def params(self, blocks: Iterable[CallBlock]) -> int:
        """Parameters of the layers of these calls and of all layers in them, each once."""
        names = {self.layer(block).name for block in blocks}
        return self.traced.params_of({place for name in names for place in self._within.get(name, ())})

    def macs(self, blocks: Iterable[CallBlock]) -> int:
        return sum(self.call(block).macs + self.macs(block.inside) for block in blocks)

    def values(self, blocks: Iterable[CallBlock]) -> int:
        """Values that the calls without calls in them return."""
        calls = self.traced.calls
        return sum(size_of(calls[position].output_shape) for block in blocks for position in block.innermost())

    def signature(self, blocks: Sequence[CallBlock], ops: bool = True) -> object:
        """What is the same for layers that do the same: class, shapes, parameters, arithmetic, and what is in them.

        Without ``ops`` the functions in them may differ, as do shifted windows and others.
        """
        calls = [self.call(block) for block in blocks]
        shapes = tuple((repr(call.input_shape), repr(call.output_shape), call.macs) for call in calls)
        parts = [part for block in blocks for part in block.inside if ops or not self.is_operation(part)]
        inside = tuple(self.signature([part], ops) for part in parts)
        return self.layer(blocks[0]).types, shapes, self.params(blocks), inside

    def not_called(self) -> dict[str, int]:
        """The outermost layers in which nothing ran, with their parameters."""
        called = {name for call in self.traced.calls for name in enclosing(self.traced.layers[call.layer].name)}
        calling = {name.rpartition(".")[0] for name in called if name and OPERATION not in name}
        # these use what they hold by functions, as attention does
        single = {layer.name for layer in self.traced.layers if layer.leaf} - calling
        names = [layer.name for layer in self.traced.layers if layer.name not in called]
        names = [name for name in names if (outer := name.rpartition(".")[0]) in called and outer not in single]
        return {name: self.traced.params_of(self._within[name]) for name in names}


def size_of(shape: Shape) -> int:
    """How many values tensors of this shape have."""
    if isinstance(shape, dict):
        return sum(map(math.prod, shape.values()))
    return 0 if shape is None else math.prod(shape)


def folded_name(first: str, last: str) -> str:
    """``layer1.1–2`` for neighbours of which the first is ``layer1.1`` and the last ``layer1.2``."""
    if first == last:
        return first
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(last))
    return f"{first}–{last[len(re.sub(r'[0-9]+$', '', first[:same])) :]}"


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
        output_shape: Shape of the first output tensor, in the same form.
        params: Number of parameters in all repeats, shared ones once.
        macs: Multiply-accumulates of all calls of all repeats.
        values: Number of values that the layers without layers in them return, in all calls of all repeats.
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


def layer_tree(
    model: AnyModel,
    input_size: Sequence[int] | None = None,
    depth: int | None = None,
    inputs: Inputs | None = None,
    *,
    ops: bool = False,
) -> Rows[TreeRow]:
    """The modules of ``model`` as they run in each other, in order of execution, with what each costs.

    Neighbours of the same class, shapes and parameters share a row, whose numbers are of all of them.

    Args:
        model: Any eager module.
        input_size: ``(H, W)`` of the picture, ``(D, H, W)`` of a clip or volume, or a whole shape such as
            ``(1, 1, 28, 28)``; None for the size of a model of `load_model`, else ``(224, 224)``.
        depth: How many levels of modules below the model, at least 1; None for as many as 40 rows show.
        inputs: The positional inputs as a tuple, or a mapping of keywords, instead of ``input_size``.
        ops: Whether operations that are not modules, such as `torch.relu` and ``+``, have rows too.

    Returns:
        The row of the model itself, whose depth is 0, then each module before those in it.

    Raises:
        InputError: when the model refuses the input.
        ModelError: for scripted and compiled models, and lazy ones that never ran.

    Example:
        >>> from torch import nn
        >>> block = lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        >>> rows = layer_tree(nn.Sequential(block(), block()), (1, 4, 8, 8), depth=1)
        >>> [(row.name, row.last, row.repeats, row.params) for row in rows]
        [('', '', 1, 40), ('0', '1', 2, 40)]
    """
    return module_tree(tracing.trace_at(model, input_size, inputs), depth, ops)


def module_tree(traced: Trace, depth: int | None = None, ops: bool = False) -> Rows[TreeRow]:
    """The tree to this depth, or as deep as 40 rows show, in order of execution; the first row is the model itself."""
    check_whole("depth", depth, 0, optional=True)
    structure = Structure(traced if ops else traced.without_operations())
    rows = list(_rows(structure, [[structure.root]], 0))
    if depth is None:
        deepest = max(row.depth for row in rows)
        depth = next((d for d in range(deepest, 1, -1) if sum(row.depth <= d for row in rows) <= _ROWS), 1)
    return Rows(row for row in rows if row.depth <= depth)


def _rows(structure: Structure, parents: Sequence[Sequence[CallBlock]], depth: int) -> Iterator[TreeRow]:
    """The rows of equal neighbours, and below them the rows of the layers in the first of them."""
    every = [block for blocks in parents for block in blocks]
    first, calls = parents[0][0], len(parents[0])
    shapes = structure.call(first).input_shape, structure.call(first).output_shape
    layer, last = structure.layer(first), structure.layer(parents[-1][0]).name
    numbers = structure.params(every), structure.macs(every), structure.values(every)
    yield TreeRow(depth, layer.name, last, layer.type, len(parents), calls, *shapes, *numbers)
    repeats = [_of_layers(structure, blocks) for blocks in parents]
    for _, run in groupby(range(len(repeats[0])), lambda at: structure.signature(repeats[0][at])):
        neighbours = list(run)
        yield from _rows(structure, [siblings[at] for siblings in repeats for at in neighbours], depth + 1)


def _of_layers(structure: Structure, blocks: Sequence[CallBlock]) -> list[list[CallBlock]]:
    """The calls in ``blocks``, calls of one layer together."""
    calls: dict[int, list[CallBlock]] = {}
    for block in blocks:
        for inside in block.inside:
            calls.setdefault(structure.call(inside).layer, []).append(inside)
    return list(calls.values())
