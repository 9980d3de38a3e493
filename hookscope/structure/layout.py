"""Places for the nodes of a graph without circles, rank below rank, and the lines between them. Needs no torch.

The method is that of Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures"
(1981): ranks by the longest path, order by barycentres, columns by least squares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 12
_STRAIGHT = 6.0  # weight of a line that passes by a rank, over one that ends there

Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """The middle of each node, the points of the line of each edge from above, and the size of all."""

    nodes: list[Point]
    lines: list[list[Point]]
    width: float
    height: float


def lay_out(
    sizes: Sequence[tuple[float, float]],
    edges: Sequence[tuple[int, int]],
    apart: float = 26,
    below: float = 38,
) -> Layout:
    """Place nodes of these sizes; each edge leads from a node to a later one.

    Lines that pass by ranks share their way as far as they come from the same node.
    """
    ranks = _ranks(len(sizes), edges)
    rows: list[list[int]] = [[] for _ in range(max(ranks, default=0) + 1)]
    widths, at_rank = [width for width, _ in sizes], list(ranks)
    for node, rank in enumerate(ranks):
        rows[rank].append(node)
    steps: dict[tuple[int, int], float] = {}  # from vertex to vertex of the next rank, with weights
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
            steps[a, b] = _STRAIGHT if a >= len(sizes) and b >= len(sizes) else 1.0
    above: defaultdict[int, dict[int, float]] = defaultdict(dict)
    under: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for (a, b), weight in steps.items():
        above[b][a], under[a][b] = weight, weight
    rows = _ordered(rows, above, under)
    columns = _columns(rows, widths, above, under, apart)
    heights = [max([sizes[v][1] for v in row if v < len(sizes)], default=0.0) for row in rows]
    tops = [sum(heights[:rank]) + below * rank for rank in range(len(rows))]
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
    return Layout(nodes, lines, right - left, tops[-1] + heights[-1] if rows else 0.0)


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
            beside = {v: float(at) for at, v in enumerate(current[rank - 1 if down else rank + 1])}
            near = above if down else under
            own = {v: float(at) for at, v in enumerate(current[rank])}

            def middle(v: int, near: Mapping[int, dict[int, float]] = near, beside: Mapping[int, float] = beside,
                       own: Mapping[int, float] = own) -> float:  # fmt: skip
                places = [beside[other] for other in near.get(v, {})]
                return sum(places) / len(places) if places else own[v]

            current[rank].sort(key=middle)
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
    apart: float,
) -> dict[int, float]:
    """The x of the middle of each vertex: near what it is joined with, and apart from its neighbours."""
    columns: dict[int, float] = {}
    for row in rows:
        x = 0.0
        for v in row:
            columns[v] = x + widths[v] / 2
            x += widths[v] + apart
        for v in row:
            columns[v] -= (x - apart) / 2
    for sweep in range(4 * _SWEEPS):
        near = [above, under][sweep % 2 :][:1] if sweep < 3 * _SWEEPS else [above, under]
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            wanted, weights = [], []
            for v in row:
                joined = [(columns[other], weight) for side in near for other, weight in side.get(v, {}).items()]
                total = sum(weight for _, weight in joined)
                wanted.append(sum(x * weight for x, weight in joined) / total if total else columns[v])
                weights.append(total or 0.1)
            for v, x in zip(row, _spread(wanted, weights, [widths[v] for v in row], apart), strict=True):
                columns[v] = x
    return columns


def _spread(wanted: Sequence[float], weights: Sequence[float], widths: Sequence[float], apart: float) -> list[float]:
    """The places next to the wanted ones, by least squares, that leave the vertices in order and apart."""
    offsets, reach = [], 0.0
    for at, width in enumerate(widths):
        reach += (widths[at - 1] + width) / 2 + apart if at else 0.0
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
