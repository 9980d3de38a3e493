"""One pass in the order of its hooks: for each call the values of its input, output and gradient at that moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.display import Cells, RowTuple, Shown
from hookscope.errors import ModelError, UsageError
from hookscope.gradients import refuse_reentrant_checkpoints
from hookscope.hooks import (
    AnyModel,
    Call,
    HookHandles,
    Layers,
    Observer,
    Operation,
    OperationCounter,
    as_plain,
    differentiable,
    finite_values,
    keep_and_hand_on,
    leaves_of,
    module_of,
    named_inputs,
    names_of,
    passed_on,
    tensors_in,
)
from hookscope.models import takes_inputs
from hookscope.scores import AnyLoss, Loss, LossLike, Prediction, as_loss


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor at one moment.

    Attributes:
        shape: As it is.
        dtype: Such as ``float32``; of a quantized tensor the type it is stored in, ``quint8``.
        min: Lowest finite value, decoded from a quantized tensor, 0 or 1 for a truth value. None for complex and empty
            tensors, for those on the meta device, and where no value is finite.
        max: Highest finite value, or None as for ``min``.
        nonfinite: How many values are NaN or Inf.
        values: All values as nested lists, complex ones as ``[real, imaginary]``; None where they were not asked for
            or are too many.
    """

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    nonfinite: int
    values: Any = None

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "one value"
        ends = "" if self.min is None else f", {self.min:.4g} to {self.max:.4g}"
        return f"{shape} {self.dtype}{ends}" + (f", {self.nonfinite:,} NaN or Inf" if self.nonfinite else "")


Facts = dict[str, TensorSummary]


def facts_of(value: Any, most: int = 0) -> Facts:
    """The summary of every tensor in ``value`` by part; tensors of at most ``most`` values hold their values."""
    return {part: _summary(tensor, most) for part, tensor in tensors_in(value).items()}


def _summary(tensor: Tensor, most: int) -> TensorSummary:
    shape, dtype = tuple(int(length) for length in tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        return TensorSummary(shape, dtype, None, None, 0)
    plain = as_plain(tensor)
    if plain.is_floating_point() and plain.element_size() < 4:  # not every small type has a lowest value
        plain = plain.float()
    elif plain.dtype in (torch.uint16, torch.uint32, torch.uint64):
        plain = plain.long()
    is_small = most > 0 and plain.numel() <= most
    if plain.is_complex():
        values = torch.view_as_real(plain.resolve_conj()).tolist() if is_small else None
        return TensorSummary(shape, dtype, None, None, int((~torch.isfinite(plain)).sum()), values)
    finite = finite_values(plain.to(torch.uint8) if plain.dtype is torch.bool else plain)
    values = plain.tolist() if is_small else None
    return TensorSummary(shape, dtype, finite.min, finite.max, finite.nonfinite, values)


EVENTS = ("pre-hook", "forward", "backward")
"""The events of a call: it is about to run, it has returned, the gradient of its output is computed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One of `EVENTS`, which happened to a call while it ran in ``depth`` other recorded calls.

    ``tensors`` are the inputs at ``pre-hook``, the outputs at ``forward``, the gradient of the outputs at ``backward``.
    """

    number: int
    event: str
    call: Call
    depth: int
    tensors: Facts


@dataclass(frozen=True, slots=True, repr=False)
class CallRecord(Shown):
    """One call of a layer, which ran in ``depth`` other recorded calls.

    Attributes:
        input: The inputs by part, before the layer ran; ``""`` names an only tensor, else the name of a part begins
            with its position or keyword.
        output: The outputs by part, before the next layer worked on them.
        gradient: The gradient of the parts of the output that it reached; empty where it reached none.
        began: Time of its pre-hook, on a clock that ticks with each event.
        returned: Time of its forward hook.
        differentiated: Time when the gradient of its whole output was computed; None where no gradient came.
    """

    call: Call
    depth: int
    input: Facts
    output: Facts
    gradient: Facts
    began: int
    returned: int
    differentiated: int | None

    def _cells(self) -> Cells:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.output.items()}
        output = shapes.get("", shapes)
        cells = {"index": self.call.index, "name": self.call.key, "type": self.call.type, "output": output}
        return cells | {"gradient": self.differentiated is not None}


@dataclass(frozen=True, slots=True, repr=False)
class PassRecord(Shown, rows="calls"):
    """A forward pass, and its backward pass if there was one, as facts.

    Attributes:
        calls: The chosen calls in order of execution, that is, in which they returned.
        did_not_run: Chosen layers that the pass did not reach.
        loss: Name of the differentiated loss; empty without a backward pass.
        value: Value of the loss.
        targets: The classes of the loss.
        without_backward: Why the requested backward pass was not possible.
        operations: How often each function ran that is not a module, by torch's internal names; empty with ``ops``.
    """

    calls: RowTuple[CallRecord]
    did_not_run: tuple[str, ...] = ()
    loss: str = ""
    value: float | None = None
    targets: tuple[Prediction, ...] = ()
    without_backward: str = ""
    operations: Counter[str] = field(default_factory=Counter)

    def _cells(self) -> Cells:
        backward = {"loss": self.loss, "value": self.value, "without backward": self.without_backward}
        return {"calls": len(self.calls), "did not run": len(self.did_not_run), **backward}

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of the chosen calls, in the order in which they happened."""
        moments = []
        for record in self.calls:
            moments += [(record.began, "pre-hook", record, record.input)]
            moments += [(record.returned, "forward", record, record.output)]
            if record.differentiated is not None:
                moments.append((record.differentiated, "backward", record, record.gradient))
        moments.sort(key=lambda moment: moment[0])
        return RowTuple(
            Event(number, event, record.call, record.depth, tensors)
            for number, (_, event, record, tensors) in enumerate(moments)
        )

    @property
    def unreached(self) -> tuple[Call, ...]:
        """Calls without a backward event: no gradient came to any of their outputs."""
        return tuple(record.call for record in self.calls if record.differentiated is None)


@takes_inputs
def trace_events(
    model: AnyModel,
    inputs: Any,
    layers: Layers = "all",
    types: Iterable[Any] | None = None,
    *,
    backward: bool = False,
    loss: LossLike = None,
    values: int = 0,
    ops: bool = False,
) -> PassRecord:
    """Run ``model`` once with hooks, and record the input, output and gradient of each chosen call.

    The model runs in eval mode and is as before afterwards. With ``backward`` the gradient flows as in
    `layer_gradients`: no ``.grad`` is written, and tensor hooks on the outputs see the gradient, which in-place layers
    cannot disturb.

    Args:
        model: Any eager module.
        inputs: The positional inputs as a tuple, or the only one, such as a tensor ``(N, C, H, W)``.
        layers: A selection, see `Selection`.
        types: Class names that indices count; ``all`` for every layer without children or with own parameters. None for
            Conv2d (Conv3d in models of clips).
        backward: Whether a backward pass follows.
        loss: The loss, see `as_loss`; None for the score of the most likely class, or the mean square of the whole
            output where there is no such score (no classes, several pictures).
        values: Tensors of at most so many values are recorded whole.
        ops: Whether operations that are not modules, such as `torch.relu` and ``+``, are calls too. The output of one
            that works in place is what it returned.

    Raises:
        LayerError: no such layer.
        ModelError: for scripted and compiled models, weights made inside ``inference_mode``, a reentrant checkpoint;
            or when the output does not fit ``loss``.
        TargetError: no such class.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.ReLU(inplace=True))
        >>> _ = torch.nn.init.ones_(net[0].weight)
        >>> record = trace_events(net, torch.tensor([[3.0, 4.0]]), types=("Linear",), backward=True, values=2)
        >>> [(event.event, event.tensors[""].values) for event in record.events]
        [('pre-hook', [[3.0, 4.0]]), ('forward', [[7.0]]), ('backward', [[1.0]])]
    """
    chosen, model = None if loss is None else as_loss(loss, names_of(model)), module_of(model)
    with ExitStack() as stack:
        stack.enter_context(differentiable(model))
        if not backward:
            stack.enter_context(torch.no_grad())
        handles = stack.enter_context(HookHandles()) if backward else None
        recorder = _EventRecorder(model, layers, types, handles, values, ops)
        with HookHandles() as counting, recorder.observer:
            if not ops:
                recorder.counter.modules.watch(counting)
            output = model(*passed_on(leaves_of(inputs)))
        about = _differentiate(model, output, chosen, recorder) if backward else {}
        idle, operations = _idle(model, recorder.observer), recorder.counter.counts
        return PassRecord(RowTuple(recorder.records()), idle, **about, operations=operations)


def _idle(model: nn.Module, observer: Observer) -> tuple[str, ...]:
    """Chosen layers that did not run, without lists of layers, which have no forward of their own."""
    wants_one_more = observer.selection.wants_index(observer.progress.total)
    layers = [layer for layer in observer.progress.layers if not layer.calls]
    idle = [layer.names[0] for layer in layers if layer.by_name or (layer.counted and wants_one_more)]
    return tuple(name for name in idle if type(model.get_submodule(name)).forward is not nn.Module.forward)


def _differentiate(model: nn.Module, output: Any, chosen: AnyLoss | None, recorder: _EventRecorder) -> dict[str, Any]:
    """Run backward; returns the loss, or why no backward pass is possible, as fields of `PassRecord`."""
    what = type(model).__name__
    try:
        loss, value, targets = _loss_of(output, chosen, what)
    except ModelError as error:
        if chosen is not None:
            raise
        return {"without_backward": error.asked}
    about = {"loss": loss.name, "value": float(value.detach()), "targets": targets}
    if not value.requires_grad:
        return {**about, "without_backward": f"the output of {what} has no gradient"}
    refuse_reentrant_checkpoints(model, value)
    outputs = recorder.outputs_in_graph()
    if outputs:
        torch.autograd.grad(value, outputs, allow_unused=True)
    return about


def _loss_of(output: Any, chosen: AnyLoss | None, what: str) -> tuple[AnyLoss, Tensor, tuple[Prediction, ...]]:
    if chosen is not None:
        return chosen, *chosen.of(output, what)
    try:
        return Loss("score"), *Loss("score").of(output, what)
    except (ModelError, UsageError):
        return Loss("mse"), *Loss("mse").of(output, what)


@dataclass(slots=True)
class _ReturnedCall:
    """A call that has returned, with the gradients that have come so far; its record lacks depth and gradients."""

    record: CallRecord
    tensors: dict[str, Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    gradient: Facts = field(default_factory=dict)
    differentiated: int | None = None


class _EventRecorder:
    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        types: Iterable[Any] | None,
        handles: HookHandles | None,
        values: int,
        ops: bool,
    ) -> None:
        self._returned: list[_ReturnedCall] = []
        self._clock = count()
        self._handles, self._values = handles, values
        self.counter = OperationCounter(model)
        # an observer of operations hides the work of its functions itself
        hide = partial if ops else partial(partial, self.counter.paused)
        self.observer = Observer(
            model, layers, types, hide(self._on_call), on_input=hide(self._on_input), ops=ops, ordered=True
        )

    def _on_input(self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # now, because a layer that works in place changes the values
        return next(self._clock), facts_of(named_inputs(args, kwargs), self._values)

    def _on_call(self, call: Call, module: nn.Module | Operation, args: Any, kwargs: Any, output: Any) -> Any:
        began, inputs = self.observer.input
        outputs = facts_of(output, self._values)
        returned = _ReturnedCall(CallRecord(call, 0, inputs, outputs, {}, began, next(self._clock), None))
        self._returned.append(returned)
        if self._handles is None:
            return None
        kept, handed_on = output, None
        if isinstance(module, nn.Module):  # what an operation writes to must stay the tensor that it is
            kept, handed_on = keep_and_hand_on(module, args, kwargs, output)
        # the same tensor may be in two places, and has one gradient
        first = {id(tensor): part for part, tensor in reversed(tensors_in(kept).items())}
        returned.tensors = {part: t for part, t in tensors_in(kept).items() if t.requires_grad and first[id(t)] == part}
        returned.versions = [tensor._version for tensor in returned.tensors.values()]
        for part, tensor in returned.tensors.items():
            self._wait_for(returned, part, tensor)
        return handed_on

    def _wait_for(self, returned: _ReturnedCall, part: str, tensor: Tensor) -> None:
        def on_gradient(gradient: Tensor | None) -> None:
            if gradient is not None:  # unused results of an operation with several results get None
                returned.gradient[part] = facts_of(gradient, self._values)[""]
                returned.differentiated = next(self._clock)

        assert self._handles is not None
        self._handles.tensor(tensor, on_gradient)

    def _chosen(self) -> list[_ReturnedCall]:
        return [returned for returned in self._returned if self.observer.wanted(returned.record.call)]

    def outputs_in_graph(self) -> list[Tensor]:
        pairs = (zip(returned.tensors.values(), returned.versions, strict=True) for returned in self._chosen())
        # others are overwritten
        return [tensor for tensor, version in chain.from_iterable(pairs) if tensor._version == version]

    def records(self) -> Iterator[CallRecord]:
        chosen = self._chosen()
        depths = _depths([returned.record for returned in chosen])
        for returned in chosen:
            record, time = returned.record, returned.differentiated
            reached = {part: returned.gradient[part] for part in returned.tensors if part in returned.gradient}
            yield replace(record, depth=depths[record.began], gradient=reached, differentiated=time)


def _depths(chosen: Iterable[CallRecord]) -> dict[int, int]:
    """The number of ``chosen`` calls in which each call ran, by the time at which it began."""
    ends: list[int] = []
    depths = {}
    for record in sorted(chosen, key=lambda record: record.began):
        while ends and ends[-1] < record.began:
            ends.pop()
        depths[record.began] = len(ends)
        ends.append(record.returned)
    return depths
