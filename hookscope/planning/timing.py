"""How long each call of a model takes, forward and backward, and how much memory a step takes, by running it."""

from __future__ import annotations

import statistics
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler_legacy import profile

from hookscope.findings import counted
from hookscope.hooks import (
    OPERATION,
    HookHandles,
    Operations,
    call_key,
    check_hookable,
    enclosing,
    graph_nodes,
    is_recomputing,
    tensors_in,
)
from hookscope.planning.facts import Measured, Timing
from hookscope.planning.step import Conditions, checkpoint_blocks
from hookscope.planning.subject import build_optimizer, state_tensors
from hookscope.scores import Loss
from hookscope.tracing import everything_as_before


@dataclass(frozen=True, slots=True)
class CallTimes:
    """What `measure` found: the step as a whole, and the time of each call without the calls in it, by `Call.key`."""

    step: Measured
    forward: dict[str, Timing]
    backward: dict[str, Timing]


def measure(
    model: nn.Module,
    inputs: tuple[Any, ...],
    conditions: Conditions,
    *,
    repeats: int = 10,
    warm_up: int = 3,
    on_progress: Callable[[int, int], None] | None = None,
) -> CallTimes:
    """Run steps of ``model`` on its device, and put back what they change.

    A step is a forward pass in eval mode without gradients. With an optimizer it is a forward pass in train mode, a
    backward pass from the mean square of the outputs, and a step of the optimizer. Steps with hooks, which time the
    calls, and steps without, which time the whole, take turns.
    """
    check_hookable(model)
    total = warm_up + 2 * repeats + 2
    report = on_progress or (lambda done, total: None)
    training = conditions.optimizer is not None
    with (
        everything_as_before(model, training),
        _parameters_kept(model) if training else nullcontext(),
        torch.set_grad_enabled(training),
    ):
        checkpoint_blocks(model, conditions.blocks)
        step = _TimedStep(model, inputs, conditions)
        whole: list[list[tuple[Any, Any]]] = []
        calls: list[_SelfTimes] = []
        for done in range(total - 2):
            report(done, total)
            if done < warm_up:
                step.run()
            elif (done - warm_up) % 2:
                whole.append(step.run())
            else:
                calls.append(step.run_with_hooks())
        saved = step.saved_bytes() if training else 0
        report(total - 1, total)
        peak = step.peak_bytes()
        macs, moved = speed(step.clock.device, conditions.autocast or step.dtype)
        report(total, total)
    step.clock.wait()
    phases = zip(*([step.clock.seconds(*part) for part in parts] for parts in whole), strict=True)
    forward, backward, update, *_ = (*(_timing(seconds) for seconds in phases), None, None)
    device = _device_name(step.clock.device)
    return CallTimes(
        Measured(device, saved, peak, forward, backward, update, repeats, warm_up, macs, moved),
        *(
            {key: _timing([seconds.get(key, 0.0) for seconds in runs]) for key in runs[-1]}
            for runs in ([run.seconds(phase) for run in calls] for phase in ("forward", "backward"))
        ),
    )


def speed(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Multiply-accumulates of a large matrix product and bytes of a large copy, each per second, at the best of 5."""
    clock, n = _Clock(device), 1024 if device.type == "cpu" else 8192
    matrix, block = torch.ones(n, n, device=device, dtype=dtype), torch.ones(1 << 26, device=device, dtype=torch.uint8)
    target = torch.empty_like(block)

    def best(run: Callable[[], Any]) -> float:
        marks = [clock.now()]
        for _ in range(5):
            run()
            marks.append(clock.now())
        clock.wait()
        return min(clock.seconds(start, end) for start, end in pairwise(marks))

    return n**3 / best(lambda: matrix @ matrix), 2 * block.nbytes / best(lambda: target.copy_(block))


def _timing(seconds: Any) -> Timing:
    values = list(seconds)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Timing(median, low, high)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device}, {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else str(device)


@contextmanager
def _parameters_kept(model: nn.Module) -> Iterator[None]:
    """Put back the values and ``.grad`` of parameters; the copies are on the CPU, where they take no GPU memory."""
    kept = [(parameter, parameter.grad, parameter.detach().to("cpu", copy=True)) for parameter in model.parameters()]
    for parameter, _, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient, values in kept:
            with torch.no_grad():
                parameter.copy_(values)
            parameter.grad = gradient


class _Clock:
    """Points in time: seconds on a CPU, events on an accelerator, which works on after Python has gone on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        if self.device.type == "cpu":
            return perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start) if self.device.type == "cpu" else start.elapsed_time(end) / 1000

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@dataclass(slots=True, eq=False)
class _RunningPart:
    """A layer or an operation that runs, ``within`` another; ``key`` is the key of its call, None if it failed."""

    name: str
    within: _RunningPart | None
    key: str | None = None

    @property
    def charged(self) -> str:
        return self.key if self.key is not None else self.within.charged if self.within is not None else ""


class _SelfTimes:
    """The time of each call without the time of the calls in it, from hooks on modules and on nodes of autograd.

    What the hooks themselves do is not in it. What it costs to call them is: ``overhead`` seconds of each stretch of a
    phase, which are taken off.
    """

    def __init__(self, model: nn.Module, clock: _Clock, overhead: Mapping[str, float] | None = None) -> None:
        self._clock, self._model, self._overhead = clock, model, overhead or {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._calls: Counter[str] = Counter()
        self._now = self._top = _RunningPart("", None)
        self._phase = "forward"
        self._since: Any = None
        self._spans: list[tuple[str, _RunningPart, Any, Any]] = []
        # what ran when autograd gave its nodes their numbers: the first number of each stretch
        self._numbers: list[int] = [-1]
        self._makers = [self._top]

    def seconds(self, phase: str) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for span, running, start, end in self._spans:
            if span == phase:
                total[running.charged] += self._clock.seconds(start, end) - self._overhead.get(phase, 0.0)
        return {key: max(0.0, seconds) for key, seconds in total.items()}

    def stretches(self, phase: str) -> int:
        return sum(span == phase for span, *_ in self._spans)

    def watch_forward(self, handles: HookHandles) -> None:
        operations = Operations(self._model, self._around)
        operations.modules.watch(handles)
        for module in self._model.modules():
            handles.forward_pre(module, lambda module, *_: self._begin(self._names[id(module)]))
            handles.forward(
                module, lambda module, *given: self._end(self._names[id(module)], given[-1] is not None), always=True
            )

    def watch_backward(self, loss: Tensor, handles: HookHandles) -> None:
        """Put a hook on every node behind ``loss``: the time of a node ends where the next one begins."""
        self._phase, self._now = "backward", self._top
        holders = {id(p): name for name, module in self._model.named_modules() for p in module._parameters.values()}
        for node in graph_nodes([loss.grad_fn]):
            handles.node_before(node, partial(self._begin_node, self._maker(node, holders)))

    def _maker(self, node: Any, holders: Mapping[int, str]) -> _RunningPart:
        variable = getattr(node, "variable", None)  # of the node that adds to the gradient of a parameter
        if variable is None:
            return self._makers[bisect(self._numbers, node._sequence_nr()) - 1]
        names = enclosing(holders.get(id(variable), ""))  # a layer may hold a parameter and never be called
        return _RunningPart("", None, next((name for name in names if name in self._calls), ""))

    def _begin_node(self, maker: _RunningPart, gradients: Any) -> None:
        self.stop()
        self._now = _RunningPart("", None, maker.charged)
        self.start()

    def _around(self, place: str, kind: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = f"{place}{OPERATION}{kind}"
        self._begin(name)
        output = None
        try:
            output = function(*args, **kwargs)
        finally:
            self._end(name, bool(tensors_in(args[0] if kind == "setitem" else output)))
        return output

    def _begin(self, name: str) -> None:
        self.stop()
        # what checkpointing computes again belongs to one of several calls, and which one is not known
        self._now = _RunningPart(name, self._now, name if is_recomputing() else None)
        self._note_maker()
        self.start()

    def _end(self, name: str, complete: bool) -> None:
        self.stop()
        ended = self._now
        while ended.name != name and ended.within is not None:  # a call that failed, and whose failure was caught
            ended = ended.within
        if complete and ended.key is None:
            ended.key = call_key(name, self._calls[name])
            self._calls[name] += 1
        self._now = ended.within or self._top
        self._note_maker()
        self.start()

    def _note_maker(self) -> None:
        if self._phase == "forward":
            self._numbers.append(torch._C._autograd._get_sequence_nr())
            self._makers.append(self._now)

    def start(self) -> None:
        self._since = self._clock.now()

    def stop(self) -> None:
        self._spans.append((self._phase, self._now, self._since, self._clock.now()))


def _run_timed(times: _SelfTimes, forward: Callable[[], Any], trains: bool) -> None:
    with HookHandles() as handles:
        times.watch_forward(handles)
        times.start()
        outputs = forward()
        times.stop()
        if trains:
            loss = Loss("mse").of(outputs)[0]
            del outputs
            times.watch_backward(loss, handles)
            times.start()
            loss.backward()
            times.stop()


def _overhead_of_hooks(clock: _Clock) -> dict[str, float]:
    """Seconds by which hooks lengthen each stretch of a phase, from layers that do almost nothing; at the best of 5."""
    model, x = nn.Sequential(*(nn.ReLU() for _ in range(64))), torch.zeros(1, requires_grad=True)
    phases: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    with torch.enable_grad():
        for _ in range(5):
            marks = [clock.now()]
            loss = Loss("mse").of(model(x))[0]
            marks.append(clock.now())
            loss.backward()
            marks.append(clock.now())
            times = _SelfTimes(model, clock)
            _run_timed(times, partial(model, x), True)
            for phase, (start, end) in zip(phases, pairwise(marks), strict=True):
                phases[phase].append((sum(times.seconds(phase).values()), clock.seconds(start, end)))
    least = {phase: tuple(map(min, zip(*runs, strict=True))) for phase, runs in phases.items()}
    return {phase: max(0.0, (hooked - plain) / times.stretches(phase)) for phase, (hooked, plain) in least.items()}


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


class _TimedStep:
    """One step of a model, run in ways that measure something else each time."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], conditions: Conditions) -> None:
        self._model, self._inputs, self._autocast = model, inputs, conditions.autocast
        self._tensors = [*model.parameters(), *model.buffers(), *tensors_in(inputs).values()]
        self.clock, self.dtype = _Clock(self._tensors[0].device), self._tensors[0].dtype
        self._optimizer = None
        self._overhead = _overhead_of_hooks(self.clock) if self.clock.device.type == "cpu" else {}
        if conditions.optimizer is not None:
            trained: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._optimizer = build_optimizer(conditions.optimizer, trained, self.clock.device.type)

    def run(self) -> list[tuple[Any, Any]]:
        self._clear()
        self.clock.wait()
        outputs, forward = self._timed(self._forward)
        if self._optimizer is None:
            return [forward]
        loss = Loss("mse").of(outputs)[0]
        del outputs
        _, backward = self._timed(loss.backward)
        del loss
        return [forward, backward, self._timed(self._optimizer.step)[1]]

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, tuple[Any, Any]]:
        start = self.clock.now()
        return run(), (start, self.clock.now())

    def run_with_hooks(self) -> _SelfTimes:
        self._clear()
        times = _SelfTimes(self._model, self.clock, self._overhead)
        self.clock.wait()
        _run_timed(times, self._forward, self._optimizer is not None)
        if self._optimizer is not None:
            self._optimizer.step()
        return times

    def saved_bytes(self) -> int:
        """Bytes of the tensors that autograd saves, without those that exist anyway; memory that several use, once."""
        self._clear()
        present = _storages(self._tensors)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            return tensor.detach()  # a graph that keeps its own outputs would never be freed

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self._forward()  # holds the graph, so that no memory is used twice
        del outputs
        return sum(size for storage, size in saved.items() if storage not in present)

    def peak_bytes(self) -> int | None:
        """The largest number of bytes of tensors at any time of a step, those that exist before it included."""
        self._clear()
        state = [] if self._optimizer is None else state_tensors(self._optimizer)
        held = _storages([*self._tensors, *state])
        if self.clock.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.clock.device)
            torch.cuda.reset_peak_memory_stats(self.clock.device)
            self.run()
            return sum(held.values()) + int(torch.cuda.max_memory_allocated(self.clock.device)) - before
        if self.clock.device.type != "cpu":
            return None
        # quiet, unlike torch.profiler, which writes lines of its own to standard error
        _enable_profiler_legacy(profile(profile_memory=True).config())
        try:
            self.run()
        finally:
            records = _disable_profiler_legacy()
        events: list[Any] = [event for thread in records for event in thread]
        changes = (event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc")
        return sum(held.values()) + max(accumulate(map(int, changes), initial=0))

    def _clear(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def _forward(self) -> Any:
        with torch.autocast(self.clock.device.type, self._autocast, enabled=self._autocast is not None):
            return self._model(*self._inputs)
