"""The independent judge of captures: a model run node by node, as torchvision's feature extractor does."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torchvision.models import feature_extraction

from hookscope.errors import ModelError, is_out_of_memory
from hookscope.hooks import call_key, is_leaf, tensors_in


@dataclass(frozen=True, slots=True)
class Edge:
    """The output of call ``source`` is the positional or keyword input ``argument`` of call ``target``."""

    source: str
    target: str
    argument: int | str


@dataclass(frozen=True, slots=True)
class Edges:
    """Which call feeds which, and how many more edges carry a value that is overwritten on the way."""

    edges: tuple[Edge, ...]
    overwritten: int = 0


def run_fx_graph(model: nn.Module, inputs: tuple[Any, ...], on_output: Callable[[str, Any], None]) -> Edges:
    """Trace a copy of ``model`` as `torchvision.models.feature_extraction` does, and run the graph on ``inputs``.

    One pass shows the value of every node. `create_feature_extractor` could return one node at a time only: several
    would be in memory that later in-place layers have overwritten. Every layer without children is a node, also those
    inside torchvision's own blocks (``Conv2dNormActivation``).

    Args:
        model: Any eager module, in eval mode. The graph is that of a deep copy; the model itself does not run.
        inputs: Its positional inputs; in-place layers may write to them.
        on_output: Called with the key of a layer's call and its output, before the next node may overwrite it.

    Raises:
        ModelError: when the model cannot be copied, its forward cannot be traced, or the graph does not run.
    """
    # a copy: tracing may leave proxies in attributes, and the graph calls the layers it was traced from
    twin = _step("it cannot be copied", lambda: copy.deepcopy(model))
    interpreter = _NodeByNode(_step("fx cannot trace it", lambda: _traced(twin)), on_output)
    _step("its graph does not run", lambda: interpreter.run(*inputs))
    return Edges(tuple(interpreter.edges), interpreter.overwritten)


def _step(refusal: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        text = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
        raise ModelError(f"{refusal}: {text[:120]}") from error


def _traced(model: nn.Module) -> fx.GraphModule:
    class Tracer(feature_extraction.NodePathTracer):  # type: ignore[misc]
        """torchvision's tracer, with every layer without children as a node, and no layer of torchvision with any."""

        def is_leaf_module(self, m: nn.Module, module_qualname: str) -> bool:
            if is_leaf(m) or isinstance(m, tuple(self.leaf_modules)):
                return is_leaf(m)
            return bool(super().is_leaf_module(m, module_qualname))

    tracer = Tracer(**feature_extraction._set_default_tracer_kwargs(None))
    return fx.GraphModule(model, tracer.trace(model))


class _NodeByNode(fx.Interpreter):
    """Runs a graph and shows the output of each call of a module at once."""

    def __init__(self, module: fx.GraphModule, on_output: Callable[[str, Any], None]) -> None:
        super().__init__(module)
        self.edges: list[Edge] = []
        self.overwritten = 0
        self._on_output = on_output
        self._calls: Counter[str] = Counter()
        self._outputs: dict[fx.Node, tuple[str, list[int]]] = {}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of a node, with mutable lists as in the code: a function may change its own."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(map(_mutable, args)), {name: _mutable(value) for name, value in kwargs.items()}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_module":
            return super().run_node(n)
        name = str(n.target)
        key = call_key(name, self._calls[name])
        self._calls[name] += 1
        self._note_edges(n, key)
        output = super().run_node(n)
        self._outputs[n] = key, _versions(output)
        self._on_output(key, output)
        return output

    def _note_edges(self, node: fx.Node, key: str) -> None:
        arguments: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
        for argument, source in arguments:
            if not isinstance(source, fx.Node) or source not in self._outputs:
                continue
            fed_by, versions = self._outputs[source]
            if _versions(self.env[source]) == versions:
                self.edges.append(Edge(fed_by, key, argument))
            else:
                self.overwritten += 1


def _mutable(value: Any) -> Any:
    if isinstance(value, fx.immutable_collections.immutable_list):
        return [_mutable(part) for part in value]
    if isinstance(value, fx.immutable_collections.immutable_dict):
        return {name: _mutable(part) for name, part in value.items()}
    return value


def _versions(value: Any) -> list[int]:
    """How often each tensor inside was written to."""
    return [tensor._version for tensor in tensors_in(value).values()]
