"""The calls of a pass as they run in each other, and what holds for all calls of a layer. Needs no torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hookscope.hooks import OPERATION, Shape, enclosing
from hookscope.tracing import Trace, TracedCall, TracedLayer


@dataclass(slots=True)
class Block:
    """A call, by its position in the trace, and the calls in it in order of execution."""

    position: int
    inside: list[Block] = field(default_factory=list)

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
        open_blocks: defaultdict[int, list[Block]] = defaultdict(list)  # by their depth
        for position, call in enumerate(traced.calls):  # a call returns after the calls in it
            open_blocks[call.depth].append(Block(position, open_blocks.pop(call.depth + 1, [])))
        self.root = open_blocks[0][-1]
        self._within: defaultdict[str, list[int]] = defaultdict(list)
        for place, layer in enumerate(traced.layers):
            for name in enclosing(layer.name) if OPERATION not in layer.name else ():
                self._within[name].append(place)

    def call(self, block: Block) -> TracedCall:
        return self.traced.calls[block.position]

    def layer(self, block: Block) -> TracedLayer:
        return self.traced.layers[self.call(block).layer]

    def is_operation(self, block: Block) -> bool:
        return OPERATION in self.layer(block).name

    def params(self, blocks: Iterable[Block]) -> int:
        """Parameters of the layers of these calls and of all layers in them, each once."""
        names = {self.layer(block).name for block in blocks}
        return self.traced.params_of({place for name in names for place in self._within.get(name, ())})

    def macs(self, blocks: Iterable[Block]) -> int:
        return sum(self.call(block).macs + self.macs(block.inside) for block in blocks)

    def values(self, blocks: Iterable[Block]) -> int:
        """Values that the calls without calls in them put out."""
        calls = self.traced.calls
        return sum(size_of(calls[position].output_shape) for block in blocks for position in block.innermost())

    def signature(self, blocks: Sequence[Block], ops: bool = True) -> object:
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
