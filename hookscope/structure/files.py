"""The file of a graph, in the format that its name ends with. Needs no torch."""

from __future__ import annotations

import os

from hookscope.errors import UsageError
from hookscope.structure.dot import dot_text
from hookscope.structure.graph import NetworkGraph
from hookscope.structure.picture import draw_graph
from hookscope.system import check_writable, write_atomically

_SUFFIXES = (".svg", ".png", ".pdf", ".dot")


def check_graph_file(path: str) -> None:
    """Refuse a file of another format, or one that cannot be written."""
    if os.path.splitext(path)[1].lower() not in _SUFFIXES:
        raise UsageError(
            f"cannot write {path}", "a graph is an SVG, PNG, PDF or DOT file", f"name it {', '.join(_SUFFIXES)}"
        )
    check_writable(path)


def write_graph(graph: NetworkGraph, path: str, title: str = "") -> None:
    """Write the picture of a graph as ``.svg``, ``.png`` or ``.pdf``, or its text for Graphviz as ``.dot``.

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
    if suffix in (".png", ".pdf"):
        from hookscope.structure.figure import picture_bytes  # only these formats need matplotlib

        write_atomically(path, picture_bytes(draw_graph(graph, title), suffix))
    else:
        write_atomically(path, (f"{dot_text(graph)}\n" if suffix == ".dot" else draw_graph(graph, title)).encode())
