"""The graph of a network as SVG, PNG, and text for Graphviz. Needs no torch."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from hookscope.display import engineering, text_width
from hookscope.errors import UsageError, one_of, path_of, printable
from hookscope.hooks import MODEL
from hookscope.structure.graph import GraphNode, NetworkGraph
from hookscope.system import StrPath, check_writable, write_atomically

_SWEEPS = 12
_APART, _BELOW = 26, 38  # between nodes of a rank, and between ranks
_STRAIGHT = 6.0  # weight of a line that passes by a rank, over one that ends there

Point = tuple[float, float]


@dataclass(frozen=True)
class GraphLayout:
    """The middle of each node, the points of the line of each edge from above, and the size of all."""

    nodes: list[Point]
    lines: list[list[Point]]
    width: float
    height: float


def lay_out(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> GraphLayout:
    """Place nodes of these sizes; each edge leads from a node to a later one.

    Lines that pass by ranks share their way as far as they come from the same node.
    """
    ranks = _ranks(len(sizes), edges)
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=0) + 1)]
    widths, at_rank = [width for width, _ in sizes], list(ranks)
    for node, rank in enumerate(ranks):
        rows[rank].append(node)
    above: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by vertex, the weights of its lines
    under: defaultdict[int, dict[int, float]] = defaultdict(dict)
    ways: list[list[int]] = []
    lanes: dict[tuple[int, int], int] = {}
    for source, target in edges:
        way = [source]
        for rank in range(ranks[source] + 1, ranks[target]):
            if (source, rank) not in lanes:
                lanes[source, rank] = len(widths)
                rows[rank].append(len(widths))
                widths.append(0.0)
                at_rank.append(rank)
            way.append(lanes[source, rank])
        way.append(target)
        ways.append(way)
        for a, b in pairwise(way):
            above[b][a] = under[a][b] = _STRAIGHT if a >= len(sizes) and b >= len(sizes) else 1.0
    rows = _ordered(rows, above, under)
    columns = _columns(rows, widths, above, under)
    heights = [max([sizes[v][1] for v in row if v < len(sizes)], default=0.0) for row in rows]
    tops = [sum(heights[:rank]) + _BELOW * rank for rank in range(len(rows))]
    left = min((columns[v] - widths[v] / 2 for v in columns), default=0.0)
    right = max((columns[v] + widths[v] / 2 for v in columns), default=0.0)
    nodes = [(columns[v] - left, tops[ranks[v]] + heights[ranks[v]] / 2) for v in range(len(sizes))]
    lines = []
    for way in ways:
        (x, y), (to_x, to_y) = nodes[way[0]], nodes[way[-1]]
        line = [(x, y + sizes[way[0]][1] / 2)]
        for lane in way[1:-1]:
            rank = at_rank[lane]
            line += [(columns[lane] - left, tops[rank]), (columns[lane] - left, tops[rank] + heights[rank])]
        lines.append([*line, (to_x, to_y - sizes[way[-1]][1] / 2)])
    return GraphLayout(nodes, lines, right - left, tops[-1] + heights[-1] if rows else 0.0)


def _ranks(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    ranks = [0] * count
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        ranks[target] = max(ranks[target], ranks[source] + 1)
    fed = {target for _, target in edges}
    lone = [(source, target) for source, target in edges if source not in fed]
    for source, target in sorted(lone, key=lambda edge: -ranks[edge[1]]):
        ranks[source] = ranks[target] - 1  # what reads nothing stands above its first reader
    return ranks


def _ordered(
    rows: Sequence[list[int]], above: Mapping[int, dict[int, float]], under: Mapping[int, dict[int, float]]
) -> list[list[int]]:
    """The rows with few crossings of lines."""
    best, least = [list(row) for row in rows], _crossings(rows, under)
    current = [list(row) for row in rows]
    for sweep in range(_SWEEPS):
        if not least:
            break
        down = sweep % 2 == 0
        order = range(1, len(rows)) if down else range(len(rows) - 2, -1, -1)
        for rank in order:
            beside = {v: at for at, v in enumerate(current[rank - 1 if down else rank + 1])}
            near, middles = above if down else under, dict[int, float]()
            for at, v in enumerate(current[rank]):
                places = [beside[other] for other in near.get(v, {})] or [at]
                middles[v] = sum(places) / len(places)
            current[rank].sort(key=middles.__getitem__)
        if (crossings := _crossings(current, under)) < least:
            best, least = [list(row) for row in current], crossings
    return best


def _crossings(rows: Sequence[Sequence[int]], under: Mapping[int, dict[int, float]]) -> int:
    total = 0
    for row, after in pairwise(rows):
        place = {v: at for at, v in enumerate(after)}
        ends = [place[to] for v in row for to in sorted(under.get(v, {}), key=place.__getitem__)]
        total += sum(a > b for at, a in enumerate(ends) for b in ends[at + 1 :])
    return total


def _columns(
    rows: Sequence[Sequence[int]],
    widths: Sequence[float],
    above: Mapping[int, dict[int, float]],
    under: Mapping[int, dict[int, float]],
) -> dict[int, float]:
    """The x of the middle of each vertex: near what it is joined with, and apart from its neighbours."""
    columns: dict[int, float] = {}
    for row in rows:
        x = 0.0
        for v in row:
            columns[v] = x + widths[v] / 2
            x += widths[v] + _APART
        for v in row:
            columns[v] -= (x - _APART) / 2
    for sweep in range(4 * _SWEEPS):
        near = [above, under][sweep % 2 :][:1] if sweep < 3 * _SWEEPS else [above, under]
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wanted, weights = [], []
            for v in row:
                joined = [(columns[other], weight) for side in near for other, weight in side.get(v, {}).items()]
                total = sum(weight for _, weight in joined)
                wanted.append(sum(x * weight for x, weight in joined) / total if total else columns[v])
                weights.append(total or 0.1)
            for v, x in zip(row, _spread(wanted, weights, [widths[v] for v in row]), strict=True):
                columns[v] = x
    return columns


def _spread(wanted: Sequence[float], weights: Sequence[float], widths: Sequence[float]) -> list[float]:
    """The places next to the wanted ones, by least squares, that leave the vertices in order and apart."""
    offsets, reach = [], 0.0
    for at, width in enumerate(widths):
        reach += (widths[at - 1] + width) / 2 + _APART if at else 0.0
        offsets.append(reach)
    blocks: list[list[float]] = []  # of vertices that touch: place, weight, number
    for x, weight, offset in zip(wanted, weights, offsets, strict=True):
        blocks.append([x - offset, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            place, own, count = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + place * own) / (last[1] + own)
            last[1] += own
            last[2] += count
    places = [place for place, _, count in blocks for _ in range(int(count))]
    return [place + offset for place, offset in zip(places, offsets, strict=True)]


_NAME, _SMALL = 7.4, 6.3  # width of a character of a name, and of other text
_HIGH, _PAD, _EDGE = 46.0, 14.0, 24.0  # of a box; beside its text; around the picture
_SLANT = 9.0  # how much narrower a box is where the resolution falls
_SIGNS = {"add": "+", "iadd": "+", "mul": "×", "concat": "cat"}
_TYPES = 3  # names of functions in a box

Marks = Mapping[int, tuple[str, str]]
"""For positions of nodes a severity and the words that say why."""


def draw_graph(
    graph: NetworkGraph,
    title: str = "",
    *,
    marks: Marks | None = None,
    links: Mapping[int, str] | None = None,
) -> str:
    """The picture of a graph as SVG, from the input at the top to the output.

    A box is a layer or a block of layers, a circle a function that joins values. The text beside a line is the shape of
    the tensor, without a batch of one. A box that narrows shows where the resolution falls, one that widens where it
    rises.

    Args:
        graph: What `layer_graph` returns.
        title: What the picture shows, for its title.
        marks: For positions of nodes a severity, ``error``, ``warning`` or ``note``, and the reason, in colour.
        links: For positions of nodes the address that a click leads to.

    Example:
        >>> from torch import nn
        >>> from hookscope import layer_graph
        >>> draw_graph(layer_graph(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (9, 9)))[:4]
        '<svg'
    """
    graph, marks, links = one_of(NetworkGraph, graph, "layer_graph"), marks or {}, links or {}
    texts = [_texts(node) for node in graph.nodes]
    sizes = [_size(node, *text) for node, text in zip(graph.nodes, texts, strict=True)]
    layout = lay_out(sizes, [(edge.source, edge.target) for edge in graph.edges])
    right = max([layout.width, *(layout.nodes[at][0] + len(text) * _SMALL for at, text in _shapes(graph).items())])
    width, height = right + 2 * _EDGE, layout.height + 2 * _EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{_escaped(title or 'graph of the network')}</title>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<g transform="translate({_EDGE} {_EDGE})">',
        *_lines(graph, layout),
        *_labels(graph, layout, sizes),
    ]
    for at, (node, text, size) in enumerate(zip(graph.nodes, texts, sizes, strict=True)):
        drawn = _node(node, text, layout.nodes[at], size, marks.get(at))
        parts.append(f'<a href="{_escaped(links[at])}">{drawn}</a>' if at in links else drawn)
    return Svg("\n".join([*parts, "</g>", "</svg>", ""]))


class Svg(str):
    """The text of an SVG picture, which a notebook shows."""

    def _repr_svg_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"SVG of {len(self):,} characters; a notebook shows it, open(FILE, 'w').write(...) keeps it"


def _texts(node: GraphNode) -> tuple[str, str]:
    """What stands in a box: above the name, below it what the layer is."""
    if node.kind in ("input", "output"):
        return node.kind, ""
    if node.kind == "junction":
        return "", ""
    sides = f"  {node.resolution[0]} → {node.resolution[1]}" if node.resolution else ""
    if node.kind == "operation":
        kinds = node.type.split(", ")
        if len(kinds) == 1:
            return _SIGNS.get(node.type.rstrip("_"), node.type), ""
        more = ", …" if len(kinds) > _TYPES else ""
        return ", ".join(kinds[:_TYPES]) + more, f"functions in {node.name or MODEL}{sides}"
    times = f" ×{node.repeats}" if node.repeats > 1 else ""
    return node.name or MODEL, f"{node.type}{times}{sides}"


def _size(node: GraphNode, above: str, below: str) -> tuple[float, float]:
    if node.kind == "junction":
        return 8.0, 8.0
    if node.kind == "operation" and not below:
        return max(30.0, text_width(above) * _NAME + 16), 30.0
    slant = 2 * _SLANT if node.resolution else 0
    return max(text_width(above) * _NAME, text_width(below) * _SMALL) + 2 * _PAD + slant, _HIGH if below else 30.0


def _node(
    node: GraphNode, texts: tuple[str, str], at: Point, size: tuple[float, float], mark: tuple[str, str] | None
) -> str:
    (x, y), (width, height) = at, size
    classes = f"node node-{node.kind}" + (f" node-{mark[0]}" if mark else "")
    if node.kind == "junction":
        return f'<g class="{classes}"><circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#59616a"/></g>'
    fill, line = {
        "error": ("#fbe0de", "#b3261e"),
        "warning": ("#fcebcf", "#8a5200"),
        "note": ("#dcf0f1", "#0a6c74"),
    }.get(mark[0] if mark else "", ("#f6f7f8" if node.kind == "block" else "#ffffff", "#9aa3ab"))
    left, right, top, end = x - width / 2, x + width / 2, y - height / 2, y + height / 2
    paint = f'fill="{fill}" stroke="{line}"'
    if node.resolution:
        falls = node.resolution[0] > node.resolution[1]
        a, b = (0.0, _SLANT) if falls else (_SLANT, 0.0)
        corners = ((left + a, top), (right - a, top), (right - b, end), (left + b, end))
        shape = f'<polygon points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in corners)}" {paint}/>'
    else:
        radius = 15 if not texts[1] else 6
        box = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
        shape = f'<rect {box} rx="{radius}" {paint}/>'
    words = [f"<title>{_escaped(_about(node, mark))}</title>", shape]
    bold = ' font-weight="600"' if texts[1] else ""
    middle = y - 4 if texts[1] else y + 4
    words.append(
        f'<text x="{x:.1f}" y="{middle:.1f}" text-anchor="middle"{bold} fill="#1b1f23">{_escaped(texts[0])}</text>'
    )
    if texts[1]:
        small = f'x="{x:.1f}" y="{y + 13:.1f}" text-anchor="middle" font-size="11" fill="#59616a"'
        words.append(f'<text class="small" {small}>{_escaped(texts[1])}</text>')
    return f'<g class="{classes}">{"".join(words)}</g>'


def _about(node: GraphNode, mark: tuple[str, str] | None) -> str:
    """What a reader sees of a node when the pointer rests on it."""
    facts = [f"{node.name or MODEL}: {node.type}" if node.type else node.kind]
    facts += [f"{node.repeats} in a row"] if node.repeats > 1 else []
    facts += [f"{engineering(node.params)} parameters"] if node.params else []
    facts += [f"{engineering(node.macs)} MACs"] if node.macs else []
    return "\n".join([", ".join(facts), *([mark[1]] if mark else [])])


def _lines(graph: NetworkGraph, layout: GraphLayout) -> list[str]:
    drawn = []
    for edge, line in zip(graph.edges, layout.lines, strict=True):
        to_junction = graph.nodes[edge.target].kind == "junction"
        (x, y), *rest = line
        path = f"M{x:.1f} {y:.1f}"
        for number, (to_x, to_y) in enumerate(rest):
            if number % 2 and to_x == x:  # along its lane
                path += f"V{to_y:.1f}"
            else:
                middle = (y + to_y) / 2
                path += (
                    f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y - (0 if to_junction else 1):.1f}"
                )
            x, y = to_x, to_y
        passes = " skip" if len(line) > 2 else ""
        drawn.append(f'<path class="edge{passes}" d="{path}" fill="none" stroke="#9aa3ab" stroke-width="1.4"/>')
        if not to_junction:
            tip = f"M{x - 4:.1f} {y - 7:.1f}L{x:.1f} {y:.1f}L{x + 4:.1f} {y - 7:.1f}Z"
            drawn.append(f'<path class="tip" d="{tip}" fill="#9aa3ab"/>')
    return drawn


def _shapes(graph: NetworkGraph) -> dict[int, str]:
    """For each node the shapes of what others read of it."""
    by_node: dict[int, dict[tuple[int, ...], None]] = {}
    for edge in graph.edges:
        by_node.setdefault(edge.source, {}).update(dict.fromkeys(edge.shapes))
    kinds = [node.kind for node in graph.nodes]
    return {node: _shape_text(list(shapes)) for node, shapes in by_node.items() if shapes and kinds[node] != "junction"}


def _shape_text(shapes: Sequence[tuple[int, ...]]) -> str:
    shapes = sorted(shapes, key=math.prod, reverse=True)
    sides = shapes[0][1:] if len(shapes[0]) > 1 and shapes[0][0] == 1 else shapes[0]
    text = "×".join(map(str, sides)) or "1 value"
    return f"{text}, and {len(shapes) - 1} more" if len(shapes) > 1 else text


def _labels(graph: NetworkGraph, layout: GraphLayout, sizes: Sequence[tuple[float, float]]) -> list[str]:
    drawn = []
    for node, text in _shapes(graph).items():
        x, y = layout.nodes[node]
        place = f'x="{x + 6:.1f}" y="{y + sizes[node][1] / 2 + 14:.1f}"'
        drawn.append(
            f'<text class="shape" {place} font-size="10" fill="#0a6c74" '
            f'stroke="#ffffff" stroke-width="3" paint-order="stroke">{_escaped(text)}</text>'
        )
    return drawn


def _escaped(text: str) -> str:
    return escape("\n".join(map(printable, text.split("\n"))), quote=True)


_FORMS = {"input": "oval", "output": "oval", "operation": "oval", "junction": "point"}


def dot_text(graph: NetworkGraph) -> str:
    """The graph as text that ``dot`` and other tools of Graphviz read.

    Example:
        >>> from torch import nn
        >>> from hookscope import layer_graph
        >>> print(dot_text(layer_graph(nn.Sequential(nn.ReLU()), (1, 3, 9, 9))))
        digraph network {
          n0 [shape=oval, label="input"]
          n1 [shape=box, label="0\\nReLU"]
          n2 [shape=oval, label="output"]
          n0 -> n1 [label="1x3x9x9"]
          n1 -> n2 [label="1x3x9x9"]
        }
    """
    lines = ["digraph network {"]
    for number, node in enumerate(graph.nodes):
        times = f" ×{node.repeats}" if node.repeats > 1 else ""
        label = f"{node.name or MODEL}\n{node.type}{times}" if node.type else node.kind
        lines.append(f"  n{number} [shape={_FORMS.get(node.kind, 'box')}, label={_quoted(label)}]")
    for edge in graph.edges:
        shapes = "\n".join("x".join(map(str, shape)) for shape in edge.shapes)
        lines.append(f"  n{edge.source} -> n{edge.target} [label={_quoted(shapes)}]")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    return json.dumps("\n".join(map(printable, text.split("\n"))), ensure_ascii=False)


_SUFFIXES = (".svg", ".png", ".dot")


def check_graph_file(path: str) -> None:
    """Refuse a file of another format, or one that cannot be written."""
    if os.path.splitext(path)[1].lower() not in _SUFFIXES:
        exists = "a graph is an SVG, PNG or DOT file"
        raise UsageError(f"cannot write {path}", exists, f"name it {', '.join(_SUFFIXES)}")
    check_writable(path)


def write_graph(graph: NetworkGraph, path: StrPath, title: str = "") -> None:
    """Write the picture of a graph as ``.svg`` or ``.png``, or its text for Graphviz as ``.dot``.

    Args:
        graph: What `layer_graph` returns.
        path: The file; its suffix is the format.
        title: What the picture shows, for its title.

    Raises:
        UsageError: another suffix.
        WriteError: the file cannot be written.

    Example:
        >>> import os, tempfile
        >>> from torch import nn
        >>> from hookscope import layer_graph
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "net.svg")
        ...     write_graph(layer_graph(nn.Sequential(nn.ReLU()), (1, 3, 9, 9)), path)
        ...     os.path.getsize(path) > 1000
        True
    """
    path, graph = path_of(path), one_of(NetworkGraph, graph, "layer_graph")
    check_graph_file(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".png":
        from hookscope.structure.figure import png_bytes  # only this format needs matplotlib

        write_atomically(path, png_bytes(draw_graph(graph, title)))
    else:
        write_atomically(path, (f"{dot_text(graph)}\n" if suffix == ".dot" else draw_graph(graph, title)).encode())
