"""The network as graphs, one for each depth: blocks lead to the views of layers, and findings colour them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hookscope.findings import ranked
from hookscope.inspection import Inspection
from hookscope.report.network import Row
from hookscope.structure import GraphNode, Marks, NetworkGraph, draw_graph, network_graph

_MOST_NODES = 250  # of a graph that is not the first
_MOST_REASONS = 3


@dataclass(frozen=True)
class GraphView:
    """A graph as the page shows it: its depth, how many blocks it has, and whether it is shown first."""

    depth: int
    blocks: int
    picture: Markup
    is_first: bool


def graph_views(inspection: Inspection, rows: Sequence[Row]) -> list[GraphView]:
    """The graphs of each depth that are not too large; none where the calls were not followed."""
    if inspection.trace is None:
        return []
    first, graphs = network_graph(inspection.trace), list[NetworkGraph]()
    while len((graph := network_graph(inspection.trace, len(graphs) + 1)).nodes) <= _MOST_NODES or not graphs:
        if graphs and graph.nodes == graphs[-1].nodes:
            break
        graphs.append(graph)
    links = _Links(inspection, rows)
    return [
        GraphView(
            graph.depth,
            sum(node.kind in ("layer", "block") for node in graph.nodes),
            Markup(
                draw_graph(graph, f"graph of {inspection.model}", marks=_marks(inspection, graph), links=links(graph))
            ),
            graph.nodes == first.nodes,
        )
        for graph in graphs
    ]


class _Links:
    """The view of the layer of a node, or of the last drawn layer in it; else its row in the list."""

    def __init__(self, inspection: Inspection, rows: Sequence[Row]) -> None:
        self._views = {layer.call.name: number for number, layer in reversed(list(enumerate(inspection.layers)))}
        self._keys = {layer.call.key: number for number, layer in reversed(list(enumerate(inspection.layers)))}
        self._rows = {row.name: row.number for row in reversed(rows)}

    def __call__(self, graph: NetworkGraph) -> Mapping[int, str]:
        found = (
            (at, self._of(node)) for at, node in enumerate(graph.nodes) if node.layers and node.kind != "operation"
        )
        return {at: link for at, link in found if link}

    def _of(self, node: GraphNode) -> str:
        if node.key in self._keys:
            return f"#layer={self._keys[node.key]}"
        inside = [number for name, number in self._views.items() if _is_in(name, node)]
        if inside:
            return f"#layer={max(inside)}"
        return f"#call={self._rows[node.key]}" if node.key in self._rows else ""


def _is_in(name: str, node: GraphNode) -> bool:
    return any(f"{name}.".startswith(f"{layer}.") for layer in node.layers)


def _marks(inspection: Inspection, graph: NetworkGraph) -> Marks:
    """The gravest finding of each node, and the first reasons."""
    reasons = [(finding.layer, finding.severity, finding.evidence) for finding in ranked(inspection.findings)]
    marks: dict[int, tuple[str, str]] = {}
    for at, node in enumerate(graph.nodes):
        if node.kind not in ("layer", "block"):
            continue
        own = [(layer, severity, words) for layer, severity, words in reasons if _is_in(layer.partition("#")[0], node)]
        if own:
            lines = [f"{layer}: {words}" for layer, _, words in own[:_MOST_REASONS]]
            lines += [f"and {len(own) - _MOST_REASONS} more"] if len(own) > _MOST_REASONS else []
            marks[at] = own[0][1], "\n".join(lines)
    return marks
