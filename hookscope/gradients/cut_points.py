"""Where gradients stop, and why: a forward pass that follows every value by its graph and by its data.

Nothing is differentiated. A call is reached when the graph of the loss leads to what it put out; one that is not,
although its values take part in the loss, was cut off, and the operation that cut it was seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hookscope.findings import chains
from hookscope.gradients.autograd_flow import Cut, Flow, LeafCall, node_of, nodes_behind, refuse_reentrant_checkpoints
from hookscope.hooks import differentiable, leaves_of, passed_on
from hookscope.scores import LossLike, as_loss


@dataclass(frozen=True, slots=True)
class Stop:
    """A chain of layer calls and parameters that no gradient reaches, and why.

    Attributes:
        reason: ``detached``, ``no graph`` or ``unused``.
        layer: Where the gradient stops on its way back: the last call of the chain, or the layer of the parameters.
        calls: Keys of the chain's calls, in order of execution.
        parameters: Names of its parameters that would have one.
        why: In words, such as ``detached between 'conv1' and 'conv2' by detach at net.py:17``.
        place: File and line of the operation, empty where there is none.
    """

    reason: str
    layer: str
    calls: tuple[str, ...]
    parameters: tuple[str, ...]
    why: str
    place: str = ""


def gradient_stops(model: nn.Module, inputs: Any, loss: LossLike = None) -> tuple[Stop, ...]:
    """Every place where the gradient of ``loss`` stops although something before it could take one.

    Frozen parameters are none of them: gradients flow through their layers. The arguments are those of
    `layer_gradients`; nothing of the model changes.

    Raises:
        ModelError: a reentrant checkpoint, inside which there is no graph until a real backward pass runs.

    Example:
        >>> import torch
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.one, self.two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         return self.two(self.one(x).detach())
        >>> [stop] = gradient_stops(Net(), torch.ones(1, 2))
        >>> stop.reason, stop.layer, stop.parameters
        ('detached', 'one', ('one.weight', 'one.bias'))
    """
    loss = as_loss(loss)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with differentiable(model):
        flow = Flow(model)
        with flow:
            output = model(*passed_on(leaves_of(inputs)))
            value, _ = loss.of(output, type(model).__name__)
        refuse_reentrant_checkpoints(model, value)
        return _Chains(flow, value).stops()


class _Chains:
    """What was not reached, sorted by what keeps the gradient from it."""

    def __init__(self, flow: Flow, value: Any) -> None:
        self._flow = flow
        self._used = flow.mask_of(value)
        reached = nodes_behind([node_of(value)] if value.requires_grad else ())
        self._cuts = [cut for cut in flow.cuts if cut.leaves or cut.bit & self._used]
        self._behind = {cut.bit: nodes_behind(cut.nodes) for cut in self._cuts}
        self._lost = [call for call in flow.calls if call.floating and not reached.intersection(call.nodes)]
        self._left = {name: node for name, node in flow.parameters.items() if node not in reached}

    def stops(self) -> tuple[Stop, ...]:
        """Those cut off first, in order of execution, then those nothing depends on, then lone parameters."""
        by_cut: dict[int, list[LeafCall]] = {}
        idle: list[LeafCall] = []
        followers: list[LeafCall] = []
        for call in self._lost:
            cut = self._cut_of(call)
            if cut is not None:
                by_cut.setdefault(cut.bit, []).append(call)
            else:  # what has no graph, and cut nothing off itself, follows on something that did
                (idle if call.nodes else followers).append(call)
        found = [*self._cut_off(by_cut, followers), *self._unused(idle)]
        return (*found, *self._lone_parameters())

    def _cut_of(self, call: LeafCall) -> Cut | None:
        """The operation that keeps the gradient from ``call``: the last that ends its graph and goes on to the loss."""
        own = [cut for cut in self._cuts if cut.call is call]
        if not call.nodes:
            return own[-1] if own else None
        ends = [cut for cut in self._cuts if self._behind[cut.bit].intersection(call.nodes)]
        return max(ends, key=lambda cut: (cut.floating, cut.bit), default=None)

    def _cut_off(self, by_cut: dict[int, list[LeafCall]], followers: Sequence[LeafCall]) -> Iterator[Stop]:
        """One stop for each operation, and one for a run of calls without a graph."""
        cuts = {cut.bit: cut for cut in self._cuts}
        order = {call.bit: at for at, call in enumerate(self._flow.calls)}
        loose = {order[call.bit] for call in followers}
        groups: list[tuple[Cut, list[LeafCall]]] = []
        for bit, calls in sorted(by_cut.items(), key=lambda pair: min(call.bit for call in pair[1])):
            cut, first = cuts[bit], min(order[call.bit] for call in calls)
            last = max((order[call.bit] for call in groups[-1][1]), default=-2) if groups else -2
            between = set(range(last + 1, first))
            if groups and groups[-1][0].reason == cut.reason == "no graph" and between <= loose:
                groups[-1][1].extend(calls)
                groups[-1] = (cut, groups[-1][1])
            else:
                groups.append((cut, list(calls)))
        for cut, calls in groups:
            words = self._words(cut, calls)
            if (
                cut.no_grad and cut.call is not None
            ):  # frozen layers after it ran without a graph as well, and cut nothing
                last = max(order[call.bit] for call in calls)
                while last + 1 in loose:
                    last += 1
                    calls.append(self._flow.calls[last])
            yield self._stop(cut.reason, calls, words, cut.place)

    def _words(self, cut: Cut, calls: Sequence[LeafCall]) -> str:
        by = f"{cut.operation} at {cut.place}" if cut.place else cut.operation
        if cut.call is not None:
            where = f"inside '{cut.call.key}'"
        elif cut.after:
            where = f"between '{calls[-1].key}' and '{cut.after}'"
        else:
            where = f"after '{calls[-1].key}'"
        if cut.reason == "detached":
            return f"detached {where} by {by}"
        return f"no graph {where}: {by} {'runs under no_grad' if cut.no_grad else 'is not differentiable'}"

    def _unused(self, idle: Sequence[LeafCall]) -> Iterator[Stop]:
        order = {call.bit: at for at, call in enumerate(self._flow.calls)}
        for run in chains(idle, lambda run, call: order[call.bit] == order[run[-1].bit] + 1):
            yield self._stop("unused", run, f"nothing that the loss depends on takes what '{run[-1].key}' puts out")

    def _stop(self, reason: str, calls: Sequence[LeafCall], why: str, place: str = "") -> Stop:
        names = {call.name for call in calls}
        own = tuple(name for name in self._left if _layer(name) in names)
        for name in own:
            del self._left[name]
        return Stop(reason, calls[-1].key, tuple(call.key for call in calls), own, why, place)

    def _lone_parameters(self) -> Iterator[Stop]:
        """Parameters that are no part of an unreached call: their layer did not run, or does not use them."""
        parted = [name for name in self._left if _layer(name) in self._flow.began or self._cut_of_parameter(name)]
        for name in parted:
            yield self._of_parameter(name)
        layers = list(dict.fromkeys(_layer(name) for name in self._flow.parameters))
        idle = {_layer(name) for name in self._left}
        place = {name: at for at, name in enumerate(layers)}
        for run in chains(filter(idle.__contains__, layers), lambda run, name: place[name] == place[run[-1]] + 1):
            own = tuple(name for name in self._left if _layer(name) in run)
            who = f"'{run[0]}'" if len(run) == 1 else f"{len(run)} layers from '{run[0]}' to '{run[-1]}'"
            yield Stop("unused", run[-1], (), own, f"{who} did not run")

    def _of_parameter(self, name: str) -> Stop:
        cut = self._cut_of_parameter(name)
        del self._left[name]
        if cut is None:
            return Stop("unused", _layer(name), (), (name,), f"nothing that the loss depends on takes '{name}'")
        by = f"{cut.operation} at {cut.place}" if cut.place else cut.operation
        return Stop(cut.reason, _layer(name), (), (name,), f"'{name}' is cut off by {by}", cut.place)

    def _cut_of_parameter(self, name: str) -> Cut | None:
        return next((cut for cut in reversed(self._cuts) if self._left[name] in self._behind[cut.bit]), None)


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]
