"""The file of a graph, in the format that its name ends with. Needs no torch."""

from __future__ import annotations

import os

from hookscope.errors import UsageError
from hookscope.structure.dot import dot_text
from hookscope.structure.graph import NetworkGraph
from hookscope.structure.picture import draw_graph
from hookscope.system import check_writable, write_atomically

_SUFFIXES = (".svg", ".dot")


def check_graph_file(path: str) -> None:
    """Refuse a file of another format, or one that cannot be written."""
    if os.path.splitext(path)[1].lower() not in _SUFFIXES:
        raise UsageError(f"cannot write {path}", "a graph is an SVG or DOT file", f"name it {' or '.join(_SUFFIXES)}")
    check_writable(path)


def write_graph(graph: NetworkGraph, path: str, title: str = "") -> None:
    """Write the picture of a graph to a ``.svg`` file, or its text for Graphviz to a ``.dot`` file.

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
    is_svg = path.lower().endswith(".svg")
    write_atomically(path, (draw_graph(graph, title) if is_svg else f"{dot_text(graph)}\n").encode())
