"""One pass as it happened: each call's input, output and gradient as they were, and the order of the hooks' events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import ModelError, UsageError
from hookscope.gradients import refuse_reentrant_checkpoints
from hookscope.hooks import (
    Call,
    Facts,
    HookHandles,
    Layers,
    Observer,
    differentiable,
    facts_of,
    keep_and_hand_on,
    leaves_of,
    named_inputs,
    passed_on,
    tensors_in,
)
from hookscope.scores import AnyLoss, Loss, LossLike, Prediction, as_loss

EVENTS = ("pre-hook", "forward", "backward")
"""What can happen to a call: it is about to run, it has returned, the gradient of what it returned is computed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened in a pass.

    Attributes:
        number: Its place in the pass, from 0.
        event: One of `EVENTS`.
        call: Whose.
        depth: In how many other recorded calls the call ran.
        tensors: By part, with ``pre-hook`` the inputs, with ``forward`` the outputs, with ``backward`` the gradient of
            the outputs.
    """

    number: int
    event: str
    call: Call
    depth: int
    tensors: Facts


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a layer.

    Attributes:
        call: Its name, type, number and index.
        depth: In how many other recorded calls it ran.
        input: What went in, by part, as it was before the layer ran; ``""`` names an only tensor, else the position
            or the keyword begins the part's name.
        output: What the layer returned, before the next one worked on it.
        gradient: That of the output; of several parts those that the gradient reached, empty where it reached none.
        began: When its pre-hook ran, by a clock that ticks with each event.
        returned: When its forward hook ran.
        differentiated: When the gradient of all that it returned was computed; None where no gradient came.
    """

    call: Call
    depth: int
    input: Facts
    output: Facts
    gradient: Facts
    began: int
    returned: int
    differentiated: int | None


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A forward pass, and the backward pass if there was one, as facts.

    Attributes:
        calls: The chosen calls in order of execution, which is that in which they returned.
        did_not_run: Chosen layers that the pass did not reach.
        loss: Name of what was differentiated; empty without a backward pass.
        value: Its value.
        targets: The classes it was made from.
        without_backward: Why there was no backward pass although it was asked for.
    """

    calls: tuple[CallRecord, ...]
    did_not_run: tuple[str, ...] = ()
    loss: str = ""
    value: float | None = None
    targets: tuple[Prediction, ...] = ()
    without_backward: str = ""

    @property
    def events(self) -> tuple[Event, ...]:
        """What happened to the chosen calls, in the order in which it happened."""
        moments = []
        for seen in self.calls:
            moments += [(seen.began, "pre-hook", seen, seen.input), (seen.returned, "forward", seen, seen.output)]
            if seen.differentiated is not None:
                moments.append((seen.differentiated, "backward", seen, seen.gradient))
        moments.sort(key=lambda moment: moment[0])
        return tuple(
            Event(number, event, seen.call, seen.depth, tensors)
            for number, (_, event, seen, tensors) in enumerate(moments)
        )

    @property
    def unreached(self) -> tuple[Call, ...]:
        """Calls without a backward event: no gradient came to anything that they returned."""
        return tuple(seen.call for seen in self.calls if seen.differentiated is None)


def trace_events(
    model: nn.Module,
    inputs: Any,
    layers: Layers = "all",
    types: Iterable[Any] = ("all",),
    *,
    backward: bool = False,
    loss: LossLike = None,
    values: int = 0,
) -> PassRecord:
    """Run ``model`` once through real hooks, and tell of each chosen call what it took, returned and got as gradient.

    The model runs in eval mode and is as before afterwards. With ``backward`` the gradient flows as in
    `layer_gradients`: no ``.grad`` is written, and tensor hooks on the outputs see it, which
    in-place layers cannot disturb.

    Args:
        model: Any eager module.
        inputs: The positional inputs as a tuple, or the only one, such as a tensor ``(N, C, H, W)``.
        layers: A selection, see `Selection`.
        types: Class names that indices count; ``all`` for every leaf, ``*`` for every module.
        backward: Whether a backward pass follows.
        loss: What is differentiated, see `as_loss`; None for the score of the most likely class, or
            where there is none (no classes, several pictures) the mean square of all that the model puts out.
        values: Tensors of at most so many values are told whole.

    Raises:
        LayerError: no such layer.
        ModelError: for scripted and compiled models, weights made inside ``inference_mode``, a reentrant checkpoint;
            or when the output has not what a ``loss`` that was given wants.
        TargetError: no such class.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.ReLU(inplace=True))
        >>> _ = torch.nn.init.ones_(net[0].weight)
        >>> found = trace_events(net, torch.tensor([[3.0, 4.0]]), types=("Linear",), backward=True, values=2)
        >>> [(event.event, event.tensors[""].values) for event in found.events]
        [('pre-hook', [[3.0, 4.0]]), ('forward', [[7.0]]), ('backward', [[1.0]])]
    """
    given = None if loss is None else as_loss(loss)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with ExitStack() as stack:
        stack.enter_context(differentiable(model))
        if not backward:
            stack.enter_context(torch.no_grad())
        recorder = _Recorder(model, layers, types, stack.enter_context(HookHandles()) if backward else None, values)
        with recorder.observer:
            output = model(*passed_on(leaves_of(inputs)))
        about = _differentiate(model, output, given, recorder) if backward else {}
        return PassRecord(tuple(recorder.records()), _idle(model, recorder.observer), **about)


def _idle(model: nn.Module, observer: Observer) -> tuple[str, ...]:
    """Chosen layers that did not run; not lists of layers, which have no forward of their own."""
    selection = observer.selection
    last_too = selection.wants_index(observer.total)  # had it run after all others, would it be chosen?
    idle = [name for name in observer.did_not_run if last_too or selection.calls_by_name([name])]
    return tuple(name for name in idle if type(model.get_submodule(name)).forward is not nn.Module.forward)


def _differentiate(model: nn.Module, output: Any, given: AnyLoss | None, recorder: _Recorder) -> dict[str, Any]:
    """Run backward; what was differentiated, or why nothing could be, as `PassRecord` holds it."""
    what = type(model).__name__
    try:
        loss, value, targets = _loss_of(output, given, what)
    except ModelError as error:
        if given is not None:
            raise
        return {"without_backward": error.asked}
    about = {"loss": loss.name, "value": float(value.detach()), "targets": targets}
    if not value.requires_grad:
        return {**about, "without_backward": f"the output of {what} has no gradient"}
    refuse_reentrant_checkpoints(model, value)
    kept = recorder.kept()
    if kept:
        torch.autograd.grad(value, kept, allow_unused=True)
    return about


def _loss_of(output: Any, given: AnyLoss | None, what: str) -> tuple[AnyLoss, Tensor, tuple[Prediction, ...]]:
    if given is not None:
        return given, *given.of(output, what)
    try:
        return Loss("score"), *Loss("score").of(output, what)
    except (ModelError, UsageError):
        return Loss("mse"), *Loss("mse").of(output, what)


@dataclass(slots=True)
class _Seen:
    """A call that has returned, and what the backward pass has brought to it so far."""

    call: Call
    input: Facts
    output: Facts
    began: int
    returned: int
    kept: dict[str, Tensor] = field(default_factory=dict)
    gradient: Facts = field(default_factory=dict)
    differentiated: int | None = None


class _Recorder:
    """The functions that the hooks call, and what they have seen."""

    def __init__(
        self, model: nn.Module, layers: Layers, types: Iterable[Any], door: HookHandles | None, values: int
    ) -> None:
        self._seen: list[_Seen] = []
        self._clock = count()
        self._door, self._values = door, values
        self.observer = Observer(
            model, layers, types, self._on_call, on_input=self._on_input, on_start=lambda *_: self._seen.clear()
        )

    def _on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # the values as they are now: a layer that works in place leaves others
        return next(self._clock), facts_of(named_inputs(args, kwargs), self._values)

    def _on_call(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        began, taken = self.observer.input
        seen = _Seen(call, taken, facts_of(output, self._values), began, next(self._clock))
        self._seen.append(seen)
        if self._door is None:
            return None
        kept, handed_on = keep_and_hand_on(module, args, kwargs, output)
        # a tensor that is there twice is one tensor, with one gradient
        first = {id(tensor): part for part, tensor in reversed(tensors_in(kept).items())}
        seen.kept = {part: t for part, t in tensors_in(kept).items() if t.requires_grad and first[id(t)] == part}
        for part, tensor in seen.kept.items():
            self._wait_for(seen, part, tensor)
        return handed_on

    def _wait_for(self, seen: _Seen, part: str, tensor: Tensor) -> None:
        def on_gradient(gradient: Tensor | None) -> None:
            if gradient is not None:  # of an operation with several results, those that nobody used get None
                seen.gradient[part] = facts_of(gradient, self._values)[""]
                seen.differentiated = next(self._clock)

        assert self._door is not None
        self._door.tensor(tensor, on_gradient)

    def _chosen(self) -> list[_Seen]:
        """The wanted calls, once the pass is over."""
        return [seen for seen in self._seen if self.observer.wanted(seen.call)]

    def kept(self) -> list[Tensor]:
        """What the wanted calls returned into the autograd graph."""
        return [tensor for seen in self._chosen() for tensor in seen.kept.values()]

    def records(self) -> Iterator[CallRecord]:
        """The wanted calls as facts, in order of execution."""
        chosen = self._chosen()
        depths = _depths(chosen)
        for seen in chosen:
            reached = {part: seen.gradient[part] for part in seen.kept if part in seen.gradient}
            yield CallRecord(
                seen.call, depths[seen.began], seen.input, seen.output, reached, seen.began, seen.returned,
                seen.differentiated,
            )  # fmt: skip


def _depths(chosen: Iterable[_Seen]) -> dict[int, int]:
    """In how many of the ``chosen`` each call ran, by the time at which it began."""
    ends: list[int] = []
    depths = {}
    for seen in sorted(chosen, key=lambda seen: seen.began):
        while ends and ends[-1] < seen.began:
            ends.pop()
        depths[seen.began] = len(ends)
        ends.append(seen.returned)
    return depths
