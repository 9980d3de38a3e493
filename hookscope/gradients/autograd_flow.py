"""A forward pass followed by data and by graph: sources of every tensor, and operations that end a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookscope.errors import ModelError
from hookscope.hooks import WatchedPass, call_key, is_single, operation_name, place_of_code, storage_key, tensors_in

_DETACHING = {"detach", "detach_", "data", "numpy", "__array__", "tolist", "item"}
_LEAVING = {"numpy", "__array__", "tolist", "item"}


@dataclass(slots=True, eq=False)
class LeafCall:
    """One execution of a layer without children: its bit in masks, and the graph nodes of its output."""

    name: str
    key: str
    bit: int
    nodes: set[Any] = field(default_factory=set)
    is_float: bool = False


@dataclass(slots=True, eq=False)
class Cut:
    """An operation whose input requires a gradient, but whose result does not.

    ``nodes`` are the graph nodes of its input, ``bit`` is its bit in masks. ``is_float``: its result could have a
    gradient. ``leaves_torch``: its result is now an array or a number, so its use is unknown. ``call`` is the layer
    without children that was running, ``after`` the key of the first such layer that used the result.
    """

    operation: str
    place: str
    nodes: set[Any]
    bit: int
    no_grad: bool
    is_float: bool
    call: LeafCall | None
    leaves_torch: bool = False
    after: str = ""

    def __str__(self) -> str:
        return f"{self.operation} at {self.place}" if self.place else self.operation

    @property
    def reason(self) -> str:
        """``detached`` or ``no graph``."""
        return "detached" if self.operation in _DETACHING and not self.no_grad else "no graph"


class AutogradTracer(WatchedPass):
    """Follows one forward pass inside a ``with`` block, with bit masks for the sources of values.

    Every memory that torch wrote to has a mask of the calls, cuts and parameters that its values come from, so that
    views and in-place writes count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: list[LeafCall] = []  # in the order in which they returned
        self.cuts: list[Cut] = []
        self.parameters: dict[str, Any] = {}  # the node that accumulates the gradient, for each trained parameter
        self.began: set[str] = set()  # names of all layers that ran
        self._model = model
        self._marks: dict[int | None, int] = {}
        self._held: list[Any] = []  # tensors kept alive, so that no memory is used twice
        self._bit_of_node: dict[Any, int] = {}
        self._running: list[LeafCall] = []
        self._times: Counter[str] = Counter()
        self._bits = 0

    def __enter__(self) -> Self:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self.parameters[name] = node_of(parameter)
                self._mark(parameter, self._bit())
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and record the sources of its result."""
        kwargs = kwargs or {}
        arguments = list(tensors_in((args, kwargs)).values())
        # before the call, because an in-place operation changes the node
        nodes = {node_of(tensor) for tensor in arguments if in_graph(tensor)}
        mask = self.mask_of(arguments)
        result = func(*args, **kwargs)
        name = operation_name(func)
        results = list(tensors_in(result).values())
        if nodes and (name in _LEAVING or (results and not any(in_graph(tensor) for tensor in results))):
            mask |= self._cut(name, nodes, results)
        if name in _LEAVING:
            for cut in self.cuts:
                cut.leaves_torch |= bool(cut.bit & mask)
        for tensor in results:
            self._mark(tensor, mask)
        if arguments and (name.endswith("_") or name == "__set__"):  # in-place, whatever it returned
            self._mark(arguments[0], mask)
        return result

    def mask_of(self, value: Any) -> int:
        """The bits of all sources of the tensors in ``value``."""
        mask = 0
        for tensor in tensors_in(value).values():
            key = storage_key(tensor)
            if key in self._marks:
                mask |= self._marks[key]
            elif tensor.grad_fn is not None:  # from a custom function, which no hook of torch reports
                mask |= sum({self._bit_of_node.get(node, 0) for node in nodes_behind([node_of(tensor)])})
        return mask

    def _mark(self, tensor: Tensor, mask: int) -> None:
        key = storage_key(tensor)
        self._marks[key] = self._marks.get(key, 0) | mask
        self._held.append(tensor)

    def _bit(self) -> int:
        self._bits += 1
        return 1 << self._bits

    def _cut(self, name: str, nodes: set[Any], results: list[Tensor]) -> int:
        cut = Cut(
            operation=name,
            place=place_of_code(),
            nodes=nodes,
            bit=self._bit(),
            no_grad=not torch.is_grad_enabled(),
            is_float=any(tensor.is_floating_point() for tensor in results),
            call=self._running[-1] if self._running else None,
        )
        self.cuts.append(cut)
        return cut.bit

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        self.began.add(name)
        if not is_single(name, module):
            return
        call = LeafCall(name, call_key(name, self._times[name]), self._bit())
        self._times[name] += 1
        sources = self.mask_of((args, kwargs))
        for cut in self.cuts:
            if not cut.after and cut.bit & sources:
                cut.after = call.key
        self._running.append(call)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = list(tensors_in(output).values())
        for tensor in tensors:
            if storage_key(tensor) not in self._marks:  # from a custom function
                self._mark(tensor, self.mask_of((args, kwargs)))
        name = self._names[module]
        while self._running and is_single(name, module):  # first remove calls whose exception the model caught
            call = self._running.pop()
            if call.name == name:
                self._note(call, tensors)
                break

    def _note(self, call: LeafCall, tensors: list[Tensor]) -> None:
        call.nodes = {node for tensor in tensors if in_graph(tensor) for node in _nodes_of(tensor)}
        call.is_float = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
        self._bit_of_node |= dict.fromkeys(call.nodes, call.bit)
        for tensor in tensors:
            self._mark(tensor, call.bit)
        self.calls.append(call)


def in_graph(tensor: Tensor) -> bool:
    """Whether ``tensor`` is part of an autograd graph; tensors of inference_mode may claim so wrongly."""
    return tensor.requires_grad and not tensor.is_inference()


def node_of(tensor: Tensor) -> Any:
    """The node of the autograd graph that receives the gradient of ``tensor``."""
    with torch.inference_mode(False):  # in inference mode parameters have no node
        return get_gradient_edge(tensor).node


def _nodes_of(tensor: Tensor) -> list[Any]:
    """The nodes of ``tensor``: an in-place write gives a view a new node, so its base counts too."""
    base = tensor._base
    whole = base is not None and base.requires_grad and base.numel() == tensor.numel()
    return [node_of(tensor), *([node_of(base)] if base is not None and whole else [])]


def nodes_behind(nodes: Iterable[Any]) -> set[Any]:
    """``nodes`` and every node of the autograd graph that their gradients reach."""
    reached = set(nodes)
    waiting = list(reached)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in reached:
                reached.add(node)
                waiting.append(node)
    return reached


def refuse_reentrant_checkpoints(model: nn.Module, value: Tensor) -> None:
    """Raise ModelError if gradients of ``value`` pass a checkpoint that only a real ``backward()`` can enter."""
    nodes = nodes_behind([node_of(value)]) if value.requires_grad else ()
    checkpoints = [node for node in nodes if node.name() == "CheckpointFunctionBackward"]
    if not checkpoints:
        return
    names = {id(module): name for name, module in model.named_modules()}
    functions = [id(getattr(node, "run_function", None)) for node in checkpoints]  # each a layer, or has no name
    layers = sorted({names[function] for function in functions if function in names})
    where = ", ".join(f"'{name}'" for name in layers) or f"a part of {type(model).__name__}"
    asked = f"{where} runs inside a reentrant checkpoint, which torch.autograd.grad cannot follow"
    raise ModelError(asked, do="checkpoint with use_reentrant=False")
