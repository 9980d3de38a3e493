"""The graph of a network in the language of Graphviz. Needs no torch."""

from __future__ import annotations

import json

from hookscope.errors import printable
from hookscope.hooks import MODEL
from hookscope.structure.graph import NetworkGraph

_SHAPES = {"input": "oval", "output": "oval", "operation": "oval", "junction": "point"}


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
        lines.append(f"  n{number} [shape={_SHAPES.get(node.kind, 'box')}, label={_quoted(label)}]")
    for edge in graph.edges:
        shapes = "\n".join("x".join(map(str, shape)) for shape in edge.shapes)
        lines.append(f"  n{edge.source} -> n{edge.target} [label={_quoted(shapes)}]")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    return json.dumps("\n".join(map(printable, text.split("\n"))), ensure_ascii=False)
