"""The places where gradients stop, found in a forward pass that follows values by graph and by data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hookscope.findings import chains
from hookscope.gradients.autograd_flow import (
    AutogradTracer,
    Cut,
    LeafCall,
    node_of,
    nodes_behind,
    refuse_reentrant_checkpoints,
)
from hookscope.hooks import differentiable, holder_of, leaves_of, passed_on, tensors_in
from hookscope.scores import LossLike, as_loss


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
        self._before_output = nodes_behind([node_of(tensor) for tensor in outputs])
        self._order = {call.bit: at for at, call in enumerate(flow.calls)}
        sources = flow.mask_of(value)
        reached = nodes_behind([node_of(value)] if value.requires_grad else ())
        self._cuts = [cut for cut in flow.cuts if cut.leaves_torch or cut.bit & sources]
        self._behind = {cut.bit: nodes_behind(cut.nodes) for cut in self._cuts}
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
            yield self._of_parameter(name)
        layers = list(dict.fromkeys(holder_of(name) for name in self._flow.parameters))
        idle = {holder_of(name) for name in self._parameters}
        place = {name: at for at, name in enumerate(layers)}
        for run in chains(filter(idle.__contains__, layers), lambda run, name: place[name] == place[run[-1]] + 1):
            own = tuple(name for name in self._parameters if holder_of(name) in run)
            who = f"'{run[0]}'" if len(run) == 1 else f"{len(run)} layers from '{run[0]}' to '{run[-1]}'"
            yield Stop("unused", run[-1], (), own, f"{who} did not run")

    def _of_parameter(self, name: str) -> Stop:
        cut = self._cut_of_parameter(name)
        del self._parameters[name]
        if cut is None:
            return Stop("unused", holder_of(name), (), (name,), f"the loss does not depend on '{name}'")
        return Stop(cut.reason, holder_of(name), (), (name,), f"'{name}' is cut off by {cut}", cut.place)

    def _cut_of_parameter(self, name: str) -> Cut | None:
        return next((cut for cut in reversed(self._cuts) if self._parameters[name] in self._behind[cut.bit]), None)
