"""One step of training or inference on the meta device: its calls, and every storage from allocation to end."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from hookscope.errors import ModelError
from hookscope.geometry import FieldTracker
from hookscope.hooks import OPERATION, Call, matches_type, tensors_in, usual_types
from hookscope.planning.facts import MemoryPlan
from hookscope.planning.memory import DeviceKernels, StorageFollower
from hookscope.planning.subject import OptimizerLike, Subject, build_optimizer, create_state, state_tensors, step
from hookscope.scores import Loss
from hookscope.tracing import CallRecorder, Trace, everything_as_before


@dataclass(frozen=True)
class Conditions:
    """How a step runs: ``optimizer`` is None for inference, ``blocks`` are the layers to checkpoint."""

    device: str
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    optimizer: OptimizerLike | None = None
    blocks: tuple[str, ...] = ()
    real: bool = False


@dataclass(frozen=True)
class CountedCall:
    """What was counted in a call of `Trace.calls`, without the calls inside it."""

    bytes_moved: int
    saved: int


@dataclass(frozen=True)
class StepRecord:
    """The calls of a step, what was counted in each, and its memory."""

    trace: Trace
    calls: tuple[Call, ...]
    counted: tuple[CountedCall, ...]
    memory: MemoryPlan


class _Step(nn.Module):
    """Runs a function while the parameters and buffers of ``model`` are others, until its backward pass is over."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


@dataclass
class _Run:
    """The step that runs now: its phase, and which call made the nodes of autograd up to each sequence number."""

    recorder: CallRecorder
    phase: str = "forward"
    sequence: list[int] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)

    def moved(self, size: int) -> None:
        if self.phase == "forward":
            self.sequence.append(torch._C._autograd._get_sequence_nr())
            self.owners.append(self.recorder.innermost)
            if self.recorder.innermost is not None:
                self.recorder.innermost.moved += size

    def saved(self, size: int) -> None:
        if self.phase == "forward" and self.recorder.innermost is not None:
            self.recorder.innermost.saved += size

    def place(self) -> tuple[str, Any]:
        """The phase, and the innermost call that runs, or in the backward pass the number of the node."""
        if self.phase == "forward":
            return self.phase, self.recorder.innermost
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        return self.phase, None if node is None else node._sequence_nr()

    def call_at(self, place: tuple[str, Any]) -> int | None:
        """The position of the call at a `place` among the calls that were recorded."""
        phase, owner = place
        if phase == "backward" and owner is not None:
            position = bisect_right(self.sequence, owner)
            owner = self.owners[position] if position < len(self.owners) else None
        return next((n for n, counted in enumerate(self.recorder.counted) if counted is owner), None)


def run_step(subject: Subject, batch: int, conditions: Conditions, *, fields: bool = False) -> StepRecord:
    """Run one step of the model and record it, with ``fields`` also what the units of each call see of the input.

    The model itself stays as it was: the step works on tensors without values in the place of its parameters and
    buffers, or on copies if it is ``real``. Under autocast these pretend to be on the CPU: the meta device has none.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        if conditions.autocast is not None and not conditions.real:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return _run_step(subject, batch, conditions, FieldTracker() if fields else None)


def _run_step(subject: Subject, batch: int, conditions: Conditions, tracker: FieldTracker | None) -> StepRecord:
    model, dtype = subject.model, conditions.dtype
    device = "cpu" if conditions.real or conditions.autocast is not None else "meta"
    training = conditions.optimizer is not None
    recorder = CallRecorder(model, writes=False, tracker=tracker)
    run = _Run(recorder)
    follower = StorageFollower(recorder.count, run.moved, run.saved)
    follower.place = run.place

    def new(value: Tensor) -> Tensor:
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        if conditions.real:
            return value.detach().to(kind, copy=True)
        return torch.empty_strided(value.size(), value.stride(), dtype=kind, device=device)

    parameters = {
        name: nn.Parameter(new(value), requires_grad=value.requires_grad) for name, value in model.named_parameters()
    }
    buffers = {name: new(value) for name, value in model.named_buffers()}
    given = subject.inputs(batch, device, dtype, training)
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    if training and not trained:
        raise ModelError(f"{subject.name} has no parameter that is trained", do="plan its inference")
    autocast = nullcontext() if conditions.autocast is None else torch.autocast("cpu", conditions.autocast)

    def whole() -> dict[str, int]:
        optimizer = None
        if conditions.optimizer is not None:
            optimizer = build_optimizer(conditions.optimizer, trained, conditions.device)
            create_state(optimizer)
        with follower, follower.saving() if training else torch.no_grad():
            parts = {"parameters": follower.mark(parameters.values(), "parameters")}
            parts["buffers"] = follower.mark(buffers.values(), "buffers")
            parts["optimizer"] = 0 if optimizer is None else follower.mark(state_tensors(optimizer), "optimizer")
            parts["input"] = follower.mark(tensors_in(given).values(), "input")
            with autocast, recorder.watching(), tracker or nullcontext():
                output = model(*given)
            parts["saved"], parts["gradients"] = follower.total("saved"), 0
            if optimizer is not None:
                loss, _ = Loss("mse").of(output)
                run.phase = "backward"
                loss.backward()
                run.phase = "optimizer"
                grads = [parameter.grad for parameter in trained if parameter.grad is not None]
                parts["gradients"] = follower.mark(grads, "gradients")
                step(optimizer)
        return parts

    with everything_as_before(model, training), torch.set_grad_enabled(training), DeviceKernels(conditions.device):
        checkpoint_blocks(model, conditions.blocks)
        replaced = {f"model.{name}": value for name, value in (parameters | buffers).items()}
        parts: dict[str, int] = functional_call(_Step(model), replaced, (whole,))
    trace = recorder.trace(conditions.real)
    calls = calls_of(trace)
    peak, at_peak, place = follower.peak()
    at = run.call_at(place)
    memory = MemoryPlan(
        **parts,
        temporary=at_peak.get("temporary", 0),
        peak=peak,
        at_peak=at_peak,
        peak_in=place[0],
        peak_call="" if at is None else calls[at].key,
    )
    counted = tuple(CountedCall(call.moved, call.saved) for call in recorder.counted)
    return StepRecord(trace, calls, counted, memory)


def checkpoint_blocks(model: nn.Module, names: Sequence[str]) -> None:
    """Make these layers compute again in the backward pass; call it inside `everything_as_before`."""
    for name in names:
        block = model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def calls_of(trace: Trace) -> tuple[Call, ...]:
    """Each call of ``trace``, with its index among the calls of the usual types."""
    types = usual_types(layer.types for layer in trace.layers)
    times, indices, orders = Counter[int](), count(), count()
    calls = []
    for call in trace.calls:
        layer, number = trace.layers[call.layer], times[call.layer]
        times[call.layer] += 1
        is_layer = layer.leaf and OPERATION not in layer.name
        index = next(indices) if is_layer and matches_type(layer.types, types, layer.leaf) else None
        calls.append(Call(layer.name, layer.type, number, index, next(orders) if is_layer else None))
    return tuple(calls)
