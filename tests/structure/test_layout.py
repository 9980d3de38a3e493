"""Places of nodes and lines: no two nodes touch, every line leads down, and none crosses where none must."""

from __future__ import annotations

import itertools
import random

import pytest

from hookscope.structure.layout import lay_out

Edges = list[tuple[int, int]]


def random_edges(seed: int, count: int = 30) -> Edges:
    numbers = random.Random(seed)
    back = [(numbers.randrange(max(0, node - 6), node), node) for node in range(1, count) for _ in range(2)]
    return list(dict.fromkeys(back))


@pytest.mark.parametrize("edges", [[], [(0, 1)], [(0, 2), (1, 2)], *map(random_edges, range(8))])
def test_no_two_nodes_touch_and_lines_lead_down(edges: Edges) -> None:
    count = max([1, *(target + 1 for _, target in edges)])
    sizes = [(40.0 + 9 * (node % 5), 20.0 + node % 3) for node in range(count)]
    layout = lay_out(sizes, edges)
    for (a, (x, y)), (b, (u, v)) in itertools.combinations(enumerate(layout.nodes), 2):
        beside = abs(x - u) >= (sizes[a][0] + sizes[b][0]) / 2
        assert beside or abs(y - v) >= (sizes[a][1] + sizes[b][1]) / 2, (a, b)
    for (source, target), line in zip(edges, layout.lines, strict=True):
        ends = (line[0][0], line[-1][0])
        assert ends == (layout.nodes[source][0], layout.nodes[target][0])
        assert all(y <= v for (_, y), (_, v) in itertools.pairwise(line))
    for (x, y), (width, height) in zip(layout.nodes, sizes, strict=True):
        assert -1e-6 <= x - width / 2 and x + width / 2 <= layout.width + 1e-6
        assert 0 <= y - height / 2 and y + height / 2 <= layout.height + 1e-6


def test_a_line_that_passes_by_is_straight_and_touches_no_node() -> None:
    layout = lay_out([(60.0, 20.0)] * 6, [(at, at + 1) for at in range(5)] + [(0, 5)])
    lane = layout.lines[-1][1:-1]
    assert len({round(x, 3) for x, _ in lane}) == 1
    assert all(abs(lane[0][0] - x) > 30 for x, _ in layout.nodes[1:5])


def test_a_chain_is_a_straight_column() -> None:
    layout = lay_out([(60.0, 20.0), (90.0, 20.0), (30.0, 20.0)], [(0, 1), (1, 2)])
    assert len({round(x, 3) for x, _ in layout.nodes}) == 1


def test_branches_do_not_cross() -> None:
    layout = lay_out([(30.0, 20.0)] * 6, [(0, 1), (0, 2), (1, 4), (2, 3), (3, 5), (4, 5)])
    assert (layout.nodes[1][0] < layout.nodes[2][0]) == (layout.nodes[4][0] < layout.nodes[3][0])
