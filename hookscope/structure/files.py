"""The file of a graph, in the format that its name ends with. Needs no torch."""

from __future__ import annotations

import json
import os

from hookscope.errors import UsageError, printable
from hookscope.hooks import MODEL
from hookscope.structure.graph import NetworkGraph
from hookscope.structure.picture import draw_graph
from hookscope.system import check_writable, write_atomically

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


_SUFFIXES = (".svg", ".png", ".dot")


def check_graph_file(path: str) -> None:
    """Refuse a file of another format, or one that cannot be written."""
    if os.path.splitext(path)[1].lower() not in _SUFFIXES:
        raise UsageError(
            f"cannot write {path}", "a graph is an SVG, PNG or DOT file", f"name it {', '.join(_SUFFIXES)}"
        )
    check_writable(path)


def write_graph(graph: NetworkGraph, path: str, title: str = "") -> None:
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
    check_graph_file(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".png":
        from hookscope.structure.figure import png_bytes  # only this format needs matplotlib

        write_atomically(path, png_bytes(draw_graph(graph, title)))
    else:
        write_atomically(path, (f"{dot_text(graph)}\n" if suffix == ".dot" else draw_graph(graph, title)).encode())
