"""The structure of any module by one pass."""

from __future__ import annotations

from collections.abc import Sequence

from hookscope.display import Rows
from hookscope.hooks import AnyModel
from hookscope.structure.graph import NetworkGraph, network_graph
from hookscope.structure.tree import TreeRow, module_tree
from hookscope.tracing import Inputs, trace_at


def layer_tree(
    model: AnyModel,
    input_size: Sequence[int] | None = None,
    depth: int | None = None,
    inputs: Inputs | None = None,
    *,
    ops: bool = False,
) -> Rows[TreeRow]:
    """The modules of ``model`` as they run in each other, in order of execution, with what each costs.

    Neighbours of the same class, shapes and parameters share a row, whose numbers are of all of them.

    Args:
        model: Any eager module.
        input_size: ``(H, W)`` of the picture, ``(D, H, W)`` of a clip or volume, or a whole shape such as
            ``(1, 1, 28, 28)``; None for the size of a model of `load_model`, else ``(224, 224)``.
        depth: How many levels of modules below the model, at least 1; None for as many as 40 rows show.
        inputs: The positional inputs as a tuple, or a mapping of keywords, instead of ``input_size``.
        ops: Whether operations that are not modules, such as `torch.relu` and ``+``, have rows too.

    Returns:
        The row of the model itself, whose depth is 0, then each module before those in it.

    Raises:
        InputError: when the model refuses the input.
        ModelError: for scripted and compiled models, and lazy ones that never ran.

    Example:
        >>> from torch import nn
        >>> block = lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        >>> rows = layer_tree(nn.Sequential(block(), block()), (1, 4, 8, 8), depth=1)
        >>> [(row.name, row.last, row.repeats, row.params) for row in rows]
        [('', '', 1, 40), ('0', '1', 2, 40)]
    """
    return module_tree(trace_at(model, input_size, inputs), depth, ops)


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
    return network_graph(trace_at(model, input_size, inputs, sources=True), depth)
