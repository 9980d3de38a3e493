"""The data flow of a network as a graph of blocks, layers and functions. Needs no torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count, pairwise
from typing import TYPE_CHECKING

from hookscope import tracing
from hookscope.display import Cells, RowTuple, Shown
from hookscope.errors import check_whole
from hookscope.hooks import MODEL, OPERATION, Shape, activation_class, call_key
from hookscope.structure.tree import CallBlock, Structure, folded_name, size_of
from hookscope.tracing import INPUT, Trace

if TYPE_CHECKING:  # these need torch
    from hookscope.hooks import AnyModel
    from hookscope.tracing import Inputs

_NODES = 40  # of a graph whose depth nobody chose
_LAYERS = re.compile(
    "conv|linear|norm|pool|interpolate|upsample|softmax|attention|shuffle|grid_sample|fold$|matmul|bmm|einsum|fft|mean"
    "|embedding|lstm|gru|roi_|nms"
)  # functions that do what layers do
_FALLS = 1.5  # the least ratio of two resolutions that a picture shows


@dataclass(frozen=True, slots=True, repr=False)
class GraphNode(Shown):
    """A call, or several equal calls in a row.

    Attributes:
        kind: ``input``, ``output``, ``layer``, ``block`` (a layer with layers in it), ``operation`` (a function of
            torch), or ``junction``, where lines that run together to several readers meet.
        key: Key of the first call, such as ``conv#1``; of an operation the key of the module in which it runs.
        name: Path of the first layer, and the numbers of the others: ``layer1.1–2``.
        type: Class name, or the names of the functions.
        repeats: How many equal layers follow each other.
        layers: Names of the layers.
        input_shape: Of the first call, such as ``(N, C, H, W)``; ``{part: shape}`` for several tensors.
        output_shape: Of the last call.
        params: Number of parameters, shared ones once.
        macs: Multiply-accumulates.
    """

    kind: str
    key: str = ""
    name: str = ""
    type: str = ""
    repeats: int = 1
    layers: tuple[str, ...] = ()
    input_shape: Shape = None
    output_shape: Shape = None
    params: int = 0
    macs: int = 0

    def _cells(self) -> Cells:
        shown = {"kind": self.kind, "name": self.name, "type": self.type, "repeats": self.repeats}
        return {**shown, "output": self.output_shape, "params": self.params, "macs": self.macs}

    @property
    def resolution(self) -> tuple[int, int] | None:
        """The height before and after, where both sides become smaller or larger by half at least."""
        return _sides(self.input_shape, self.output_shape)


def _sides(before: Shape, after: Shape) -> tuple[int, int] | None:
    if not isinstance(before, tuple) or not isinstance(after, tuple) or not 4 <= len(before) == len(after):
        return None
    for rows in (len(before) - 2, len(before) - 3):  # channels come before the sides, or after them
        high, wide, new_high, new_wide = (shape[at] for shape in (before, after) for at in (rows, rows + 1))
        ratios = [max(old, new) / max(1, min(old, new)) for old, new in ((high, new_high), (wide, new_wide))]
        if (high > new_high) == (wide > new_wide) and min(ratios) >= _FALLS:
            return high, new_high
    return None


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """Values go from the node at position ``source`` to that at ``target``, in tensors of these ``shapes``."""

    source: int
    target: int
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, repr=False)
class NetworkGraph(Shown, rows="nodes"):
    """A network as a graph without circles; its nodes are in order of execution.

    Attributes:
        nodes: The input, all calls to this depth, and the output.
        edges: Which node reads the output of another, each pair once.
        depth: How many levels of modules are open.
    """

    nodes: RowTuple[GraphNode]
    edges: RowTuple[GraphEdge]
    depth: int

    def _cells(self) -> Cells:
        return {"depth": self.depth, "edges": len(self.edges)}


Shapes = dict[tuple[int, ...], None]  # in order, each once
_FIRST, _LAST, _JUNCTION = -1, 10**9, 10**8  # keys of the input, the output, and the first junction


@dataclass(slots=True)
class _Draft:
    """What becomes a node: blocks that follow each other, or functions that are joined."""

    blocks: list[CallBlock]
    is_operation: bool
    types: list[str] = field(default_factory=list)


class _Sketch:
    """Nodes by their position in order of execution, and for each what it reads from which others."""

    def __init__(self, structure: Structure, depth: int) -> None:
        self.structure = structure
        self.nodes: dict[int, _Draft] = {}
        self.reads: dict[int, dict[int, Shapes]] = {_FIRST: {}}
        self.junctions: list[int] = []
        self._readers: defaultdict[int, set[int]] | None = None  # until the next change
        owners = {INPUT: _FIRST}
        for block in _visible(structure, structure.root, depth):
            is_operation = structure.is_operation(block)
            self.nodes[block.position] = _Draft([block], is_operation, [structure.layer(block).type])
            owners |= dict.fromkeys(block.innermost(), block.position)
        for node, draft in self.nodes.items():
            reads = {read for at in draft.blocks[0].innermost() for read in structure.traced.calls[at].reads}
            self.reads[node] = self._from(sorted(reads), owners, node)
        self.reads[_LAST] = self._from(structure.traced.answer, owners, _LAST)

    def _from(self, reads: Sequence[int], owners: Mapping[int, int], node: int) -> dict[int, Shapes]:
        shapes: defaultdict[int, Shapes] = defaultdict(dict)
        for read in reads:
            if owners.get(read, node) != node:
                shapes[owners[read]] |= self._shapes(read)
        return dict(shapes)

    def _shapes(self, call: int) -> Shapes:
        calls, root = self.structure.traced.calls, self.structure.call(self.structure.root)
        shape = root.input_shape if call == INPUT else calls[call].output_shape
        return dict.fromkeys(shape.values() if isinstance(shape, dict) else [shape] if shape is not None else [])

    def readers(self) -> Mapping[int, set[int]]:
        if self._readers is None:
            self._readers = defaultdict(set)
            for node, reads in self.reads.items():
                for source in reads:
                    self._readers[source].add(node)
        return self._readers

    def remove(self, node: int, keep_way: bool) -> None:
        """Take a node away; its readers read what it read, in the shapes of its output, or nothing."""
        self._readers = None
        way = self.reads.pop(node)
        draft = self.nodes.pop(node)
        shapes = self._shapes(draft.blocks[-1].position)
        for reads in self.reads.values():
            if reads.pop(node, None) is not None and keep_way:
                for source in way:
                    reads[source] = reads.get(source, {}) | shapes

    def tidy(self) -> None:
        """Take away what makes no values, what nobody reads but functions do, and functions that only hand on."""
        for node, draft in list(self.nodes.items()):
            sources = self.reads[node]
            call = self.structure.call(draft.blocks[0])
            is_layer = any(activation_class(kind) or _LAYERS.search(kind) for kind in draft.types)
            if size_of(call.input_shape) != size_of(call.output_shape):  # not a view of other sides
                is_layer = is_layer or _sides(call.input_shape, call.output_shape) is not None
            if draft.is_operation and (not sources or (len(sources) == 1 and not is_layer)):
                self.remove(node, keep_way=True)
        for node, draft in reversed(list(self.nodes.items())):
            if node not in self.readers() and (draft.is_operation or not self.reads[node]):
                self.remove(node, keep_way=False)

    def join_functions(self) -> None:
        """Draw functions of one module that work one after the other as one node.

        Those on maps and tokens are joined where nothing else reads between; those on boxes and scores wherever nothing
        runs between.
        """
        for node in [node for node, draft in self.nodes.items() if draft.is_operation]:
            for into in self._near(node):
                if node < into in self.nodes and self.nodes[into].is_operation and self._are_one(node, into):
                    self._join(node, into)
                    break

    def _near(self, node: int) -> list[int]:
        """What reads ``node``, what is read together with it, and what reads the same, in order of execution."""
        readers = self.readers()
        beside = {other for reader in readers[node] for other in self.reads[reader]}
        return sorted(readers[node].union(beside, *(readers[source] for source in self.reads[node])))

    def _are_one(self, node: int, into: int) -> bool:
        drafts = self.nodes[node], self.nodes[into]
        if len({self.structure.layer(draft.blocks[0]).name.rpartition(OPERATION)[0] for draft in drafts}) > 1:
            return False
        readers = self.readers()
        if readers[node] == {into}:
            return True
        shapes = [shape for draft in drafts for shape in self._shapes(draft.blocks[-1].position)]
        if any(len(shape) > 2 for shape in shapes):
            return False
        return not any(self._leads(reader, into, readers) for reader in readers[node] - {into})

    def _leads(self, node: int, to: int, readers: Mapping[int, set[int]]) -> bool:
        known, nodes = set[int](), [node]
        while nodes:
            if (at := nodes.pop()) == to:
                return True
            nodes += readers.get(at, set()) - known
            known |= readers.get(at, set())
        return False

    def _join(self, node: int, into: int) -> None:
        self._readers = None
        own, other = self.nodes.pop(node), self.nodes[into]
        self.nodes[into] = _Draft(own.blocks + other.blocks, True, list(dict.fromkeys(own.types + other.types)))
        for reads in self.reads.values():
            if node in reads and reads is not self.reads[into]:
                reads[into] = reads.get(into, {}) | reads.pop(node)
        self.reads[into].pop(node, None)
        for source, shapes in self.reads.pop(node).items():
            self.reads[into][source] = self.reads[into].get(source, {}) | shapes

    def order(self) -> list[int]:
        self._readers = None
        readers, left = self.readers(), {node: len(reads) for node, reads in self.reads.items()}
        ready, order = [node for node, count in left.items() if not count], list[int]()
        heapify(ready)
        while ready:
            order.append(heappop(ready))
            for reader in readers[order[-1]]:
                left[reader] -= 1
                if not left[reader]:
                    heappush(ready, reader)
        return order

    def fold(self) -> None:
        """Draw equal layers that follow each other, and that nothing else reads, as one node."""
        folded: dict[int, int] = {}  # the node that a node is now part of
        for before, after in list(pairwise(self.nodes)):
            before = folded.get(before, before)
            a, b = self.nodes[before], self.nodes[after]
            follows = self.readers()[before] == {after} and self.reads[after].keys() == {before}
            follows = follows and not (a.is_operation or b.is_operation)
            signature = partial(self.structure.signature, ops=False)
            if follows and signature(a.blocks[-1:]) == signature(b.blocks[:1]):
                self._readers, folded[after] = None, before
                a.blocks += b.blocks
                del self.nodes[after], self.reads[after]
                for reads in self.reads.values():
                    if after in reads:
                        reads[before] = reads.pop(after)

    def meet(self) -> None:
        """Let lines that run to several readers meet at a junction, as in a dense block."""
        order = self.order()
        for at, node in enumerate(order):
            for junction in reversed(self.junctions):
                if (whole := self._beyond(junction)) <= self.reads[node].keys():
                    read = [self.reads[node].pop(source) for source in whole]
                    self.reads[node][junction] = {shape: None for shapes in read for shape in shapes}
                    break
            sources, whole = self.reads[node], self._beyond(node)
            if len(sources) > 1 and any(whole <= self.reads[later].keys() for later in order[at + 1 :]):
                junction = _JUNCTION + len(self.junctions)
                self.reads[junction], self.reads[node] = sources, {junction: {}}
                self.reads[node][junction] = {shape: None for shapes in sources.values() for shape in shapes}
                self.junctions.append(junction)

    def _beyond(self, node: int) -> set[int]:
        """What a node reads, through junctions."""
        sources: set[int] = set()
        for source in self.reads[node]:
            sources |= self._beyond(source) if source in self.junctions else {source}
        return sources


def layer_graph(
    model: AnyModel,
    input_size: Sequence[int] | None = None,
    depth: int | None = None,
    inputs: Inputs | None = None,
) -> NetworkGraph:
    """The data flow of ``model``: which call reads the output of which other call.

    Equal layers that follow each other are one node. Functions of torch that join values, or that do what layers do,
    are nodes too. Layers and functions that only hand values on are left out, such as ``view`` and dropout in eval
    mode. There is no line for values that leave torch between layers, such as values that NumPy computes.

    Arguments and errors are as in `layer_tree`; ``depth`` is None for as many levels of modules as 40 nodes show.

    Example:
        >>> from torch import nn
        >>> graph = layer_graph(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (9, 9))
        >>> [node.type or node.kind for node in graph.nodes], [edge.shapes for edge in graph.edges]
        (['input', 'Conv2d', 'ReLU', 'output'], [((1, 3, 9, 9),), ((1, 4, 7, 7),), ((1, 4, 7, 7),)])
    """
    return network_graph(tracing.trace_at(model, input_size, inputs, sources=True), depth)


def network_graph(traced: Trace, depth: int | None = None) -> NetworkGraph:
    """The graph with so many levels of modules open, or with as many as 40 nodes show; ``traced`` knows its sources."""
    structure = Structure(traced)
    check_whole("depth", depth, 0, optional=True)
    if depth is not None:
        return _graph(structure, depth)
    graph = _graph(structure, 1)
    while len((deeper := _graph(structure, graph.depth + 1)).nodes) <= _NODES and deeper.nodes != graph.nodes:
        graph = deeper
    return graph


def _graph(structure: Structure, depth: int) -> NetworkGraph:
    sketch = _Sketch(structure, depth)
    sketch.tidy()
    sketch.join_functions()
    sketch.fold()
    sketch.meet()
    order = sketch.order()
    positions = {node: position for position, node in enumerate(order)}
    counters: defaultdict[int, count[int]] = defaultdict(count)
    numbers = [next(counters[call.layer]) for call in structure.traced.calls]  # which call of its layer each call is
    nodes = [_node(structure, node, sketch, numbers) for node in order]
    edges = [
        GraphEdge(positions[source], positions[node], tuple(shapes))
        for node in order
        for source, shapes in sorted(sketch.reads[node].items())
    ]
    return NetworkGraph(RowTuple(nodes), RowTuple(edges), depth)


def _visible(structure: Structure, block: CallBlock, depth: int) -> Iterator[CallBlock]:
    """The calls that are drawn where ``depth`` levels below this block are open."""
    has_layers = any(not structure.is_operation(inside) for inside in block.inside)
    if (depth > 0 and has_layers) or block is structure.root:
        for inside in block.inside:
            yield from _visible(structure, inside, depth - 1)
    else:
        yield block


def _node(structure: Structure, node: int, sketch: _Sketch, numbers: Sequence[int]) -> GraphNode:
    whole = structure.call(structure.root)
    if node == _FIRST:
        return GraphNode("input", output_shape=whole.input_shape)
    if node == _LAST:
        return GraphNode("output", output_shape=whole.output_shape)
    if node in sketch.junctions:
        return GraphNode("junction")
    draft = sketch.nodes[node]
    first, last = draft.blocks[0], draft.blocks[-1]
    layer, shapes = structure.layer(first), (structure.call(first).input_shape, structure.call(last).output_shape)
    sums = structure.params(draft.blocks), structure.macs(draft.blocks)
    if draft.is_operation:
        place = layer.name.rpartition(OPERATION)[0]
        return GraphNode("operation", place or MODEL, place, ", ".join(draft.types), 1, (place,), *shapes, *sums)
    names = tuple(structure.layer(block).name for block in draft.blocks)
    key, name = call_key(names[0], numbers[first.position]), folded_name(names[0], names[-1])
    kind = "block" if any(not structure.is_operation(inside) for inside in first.inside) else "layer"
    return GraphNode(kind, key, name, layer.type, len(names), names, *shapes, *sums)
