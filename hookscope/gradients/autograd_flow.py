"""A forward pass followed by data and by graph, and the places where gradients stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hookscope.errors import ModelError
from hookscope.findings import chains
from hookscope.hooks import (
    WatchedPass,
    call_key,
    differentiable,
    graph_nodes,
    holder_of,
    is_single,
    leaves_of,
    operation_name,
    passed_on,
    place_of_code,
    storage_key,
    tensors_in,
)
from hookscope.scores import LossLike, as_loss

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
        self._bits = count(1)

    def __enter__(self) -> Self:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self.parameters[name] = node_of(parameter)
                self._mark(parameter, 1 << next(self._bits))
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        mask = 0
        for tensor in tensors_in(value).values():
            key = storage_key(tensor)
            if key in self._marks:
                mask |= self._marks[key]
            elif tensor.grad_fn is not None:  # from a custom function, which no hook of torch reports
                mask |= sum({self._bit_of_node.get(node, 0) for node in graph_nodes([node_of(tensor)])})
        return mask

    def _mark(self, tensor: Tensor, mask: int) -> None:
        key = storage_key(tensor)
        self._marks[key] = self._marks.get(key, 0) | mask
        self._held.append(tensor)

    def _cut(self, name: str, nodes: set[Any], results: list[Tensor]) -> int:
        is_float = any(tensor.is_floating_point() for tensor in results)
        running = self._running[-1] if self._running else None
        bit, no_grad = 1 << next(self._bits), not torch.is_grad_enabled()
        cut = Cut(name, place_of_code(), nodes, bit, no_grad, is_float, running)
        self.cuts.append(cut)
        return cut.bit

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        self.began.add(name)
        if not is_single(name, module):
            return
        call = LeafCall(name, call_key(name, self._times[name]), 1 << next(self._bits))
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


def refuse_reentrant_checkpoints(model: nn.Module, value: Tensor) -> None:
    """Raise ModelError if gradients of ``value`` pass a checkpoint that only a real ``backward()`` can enter."""
    roots = [node_of(value)] if value.requires_grad else []
    checkpoints = [node for node in graph_nodes(roots) if node.name() == "CheckpointFunctionBackward"]
    if not checkpoints:
        return
    names = {id(module): name for name, module in model.named_modules()}
    functions = [id(getattr(node, "run_function", None)) for node in checkpoints]  # each a layer, or has no name
    layers = sorted({names[function] for function in functions if function in names})
    where = ", ".join(f"'{name}'" for name in layers) or f"a part of {type(model).__name__}"
    asked = f"{where} runs inside a reentrant checkpoint, which torch.autograd.grad cannot follow"
    raise ModelError(asked, do="checkpoint with use_reentrant=False")


@dataclass(frozen=True, slots=True)
class Stop:
    """A chain of layer calls and parameters that no gradient reaches, and the reason.

    ``reason`` is ``detached``, ``no graph`` or ``unused``; ``layer`` is the last call of the chain, or the layer of the
    parameters. ``why`` is the reason in words: ``detached between 'conv1' and 'conv2' by detach at net.py:17``.
    ``in_output`` says whether an unused call leads to an output of the model that the loss does not take.
    """

    reason: str
    layer: str
    calls: tuple[str, ...]
    parameters: tuple[str, ...]
    why: str
    place: str = ""
    in_output: bool = False


def gradient_stops(model: nn.Module, inputs: Any, loss: LossLike = None) -> tuple[Stop, ...]:
    """Every place where the gradient of ``loss`` stops before layers or parameters that could have one.

    Nothing is differentiated. Frozen parameters do not count: gradients flow through their layers. The arguments and
    errors are as in `layer_gradients`.
    """
    loss = as_loss(loss)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with differentiable(model):
        flow = AutogradTracer(model)
        with flow:
            output = model(*passed_on(leaves_of(inputs)))
            value, _ = loss.of(output, type(model).__name__)
        refuse_reentrant_checkpoints(model, value)
        return _Chains(flow, value, output).stops()


class _Chains:
    """The calls and parameters that the loss's graph does not reach, grouped by the reason."""

    def __init__(self, flow: AutogradTracer, value: Any, output: Any) -> None:
        self._flow = flow
        outputs = [tensor for tensor in tensors_in(output).values() if tensor.requires_grad]
        self._before_output = set(graph_nodes(map(node_of, outputs)))
        self._order = {call.bit: at for at, call in enumerate(flow.calls)}
        sources = flow.mask_of(value)
        reached = set(graph_nodes([node_of(value)] if value.requires_grad else ()))
        self._cuts = [cut for cut in flow.cuts if cut.leaves_torch or cut.bit & sources]
        self._behind = {cut.bit: set(graph_nodes(cut.nodes)) for cut in self._cuts}
        self._unreached = [call for call in flow.calls if call.is_float and not reached.intersection(call.nodes)]
        self._parameters = {name: node for name, node in flow.parameters.items() if node not in reached}

    def stops(self) -> tuple[Stop, ...]:
        """Cut-off calls in order of execution, then unused calls, then single parameters."""
        by_cut: dict[int, list[LeafCall]] = {}
        idle: list[LeafCall] = []
        followers: set[int] = set()
        for call in self._unreached:
            cut = self._cut_of(call)
            if cut is not None:
                by_cut.setdefault(cut.bit, []).append(call)
            elif call.nodes:
                idle.append(call)
            else:  # a call without a graph that cut nothing off follows a call that did
                followers.add(self._order[call.bit])
        of_calls = [*self._cut_off(by_cut, followers), *self._unused(idle)]
        return (*of_calls, *self._lone_parameters())

    def _cut_of(self, call: LeafCall) -> Cut | None:
        """The operation that keeps the gradient from ``call``: the last cut between its graph and the loss."""
        if not call.nodes:
            return next((cut for cut in reversed(self._cuts) if cut.call is call), None)
        ends = [cut for cut in self._cuts if self._behind[cut.bit].intersection(call.nodes)]
        return max(ends, key=lambda cut: (cut.is_float, cut.bit), default=None)

    def _cut_off(self, by_cut: dict[int, list[LeafCall]], followers: set[int]) -> Iterator[Stop]:
        """One stop for each operation, and one for consecutive calls without a graph."""
        cuts = {cut.bit: cut for cut in self._cuts}
        groups: list[tuple[Cut, list[LeafCall]]] = []
        for bit, calls in sorted(by_cut.items(), key=lambda pair: min(call.bit for call in pair[1])):
            cut, first = cuts[bit], min(self._order[call.bit] for call in calls)
            before = groups[-1][1] if groups else []
            between = set(range(max((self._order[call.bit] for call in before), default=-2) + 1, first))
            if groups and groups[-1][0].reason == cut.reason == "no graph" and between <= followers:
                groups[-1] = (cut, before + calls)
            else:
                groups.append((cut, list(calls)))
        for cut, calls in groups:
            words = self._words(cut, calls)
            if cut.no_grad and cut.call is not None:  # frozen layers after it also ran without a graph
                last = max(self._order[call.bit] for call in calls)
                while last + 1 in followers:
                    last += 1
                    calls.append(self._flow.calls[last])
            yield self._stop(cut.reason, calls, words, cut.place)

    def _words(self, cut: Cut, calls: Sequence[LeafCall]) -> str:
        if cut.call is not None:
            where = f"inside '{cut.call.key}'"
        elif cut.after:
            where = f"between '{calls[-1].key}' and '{cut.after}'"
        else:
            where = f"after '{calls[-1].key}'"
        if cut.reason == "detached":
            return f"detached {where} by {cut}"
        return f"no graph {where}: {cut} {'runs under no_grad' if cut.no_grad else 'is not differentiable'}"

    def _unused(self, idle: Sequence[LeafCall]) -> Iterator[Stop]:
        order = self._order
        for run in chains(idle, lambda run, call: order[call.bit] == order[run[-1].bit] + 1):
            stop = self._stop("unused", run, f"the loss does not depend on the output of '{run[-1].key}'")
            yield replace(stop, in_output=bool(self._before_output.intersection(run[-1].nodes)))

    def _stop(self, reason: str, calls: Sequence[LeafCall], why: str, place: str = "") -> Stop:
        names = {call.name for call in calls}
        own = tuple(name for name in self._parameters if holder_of(name) in names)
        for name in own:
            del self._parameters[name]
        return Stop(reason, calls[-1].key, tuple(call.key for call in calls), own, why, place)

    def _lone_parameters(self) -> Iterator[Stop]:
        """Parameters outside unreached calls: their layer did not run or does not use them."""
        parted = [
            name for name in self._parameters if holder_of(name) in self._flow.began or self._cut_of_parameter(name)
        ]
        for name in parted:
            cut, at = self._cut_of_parameter(name), holder_of(name)
            del self._parameters[name]
            if cut is None:
                yield Stop("unused", at, (), (name,), f"the loss does not depend on '{name}'")
            else:
                yield Stop(cut.reason, at, (), (name,), f"'{name}' is cut off by {cut}", cut.place)
        layers = list(dict.fromkeys(holder_of(name) for name in self._flow.parameters))
        idle = {holder_of(name) for name in self._parameters}
        place = {name: at for at, name in enumerate(layers)}
        for run in chains(filter(idle.__contains__, layers), lambda run, name: place[name] == place[run[-1]] + 1):
            own = tuple(name for name in self._parameters if holder_of(name) in run)
            who = f"'{run[0]}'" if len(run) == 1 else f"{len(run)} layers from '{run[0]}' to '{run[-1]}'"
            yield Stop("unused", run[-1], (), own, f"{who} did not run")

    def _cut_of_parameter(self, name: str) -> Cut | None:
        return next((cut for cut in reversed(self._cuts) if self._parameters[name] in self._behind[cut.bit]), None)
