"""How long each call of a model takes, forward and backward, and how much memory a step takes, by running it."""

from __future__ import annotations

import statistics
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler_legacy import profile

from hookscope.hooks import (
    HookHandles,
    buffers_kept,
    call_key,
    check_hookable,
    is_recomputing,
    other_hooks_set_aside,
    random_states_kept,
    tensors_in,
)
from hookscope.planning.facts import Measured, Timing
from hookscope.scores import Loss

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """What `measure` found: the step as a whole, and the time of each call without the calls in it, by `Call.key`."""

    step: Measured
    forward: dict[str, Timing]
    backward: dict[str, Timing]


def measure(
    model: nn.Module,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    optimizer: MakeOptimizer | None = None,
    repeats: int = 10,
    warm_up: int = 3,
    conditions: Callable[[], AbstractContextManager[Any]] = nullcontext,
    on_progress: Callable[[int, int], None] | None = None,
) -> CallTimes:
    """Run steps of ``model`` as it is, in its mode and on its device, and put back what they change.

    A step is a forward pass without gradients. With ``optimizer``, which makes one for the trained parameters, it is a
    forward pass, a backward pass from the mean square of the outputs, and a step of the optimizer. ``conditions``
    surround each forward pass, such as autocast. Steps with hooks, which time the calls, and steps without, which time
    the whole, take turns.
    """
    check_hookable(model)
    total = warm_up + 2 * repeats + 2
    with (
        torch.inference_mode(False),
        random_states_kept(),
        other_hooks_set_aside(model),
        buffers_kept(model),
        _parameters_kept(model) if optimizer else nullcontext(),
    ):
        step = _Step(model, inputs, optimizer, conditions)
        whole: list[list[tuple[Any, Any]]] = []
        calls: list[_SelfTimes] = []
        for done in range(total - 2):
            if on_progress is not None:
                on_progress(done, total)
            if done < warm_up:
                step.run()
            elif (done - warm_up) % 2:
                whole.append(step.run())
            else:
                calls.append(step.run_with_hooks())
        saved = step.saved_bytes() if optimizer else 0
        peak = step.peak_bytes()
        if on_progress is not None:
            on_progress(total, total)
    step.clock.wait()
    phases = zip(*([step.clock.seconds(*part) for part in parts] for parts in whole), strict=True)
    forward, backward, update, *_ = (*(_timing(seconds) for seconds in phases), None, None)
    device = _device_name(step.clock.device)
    return CallTimes(
        Measured(device, saved, peak, forward, backward, update, repeats, warm_up),
        *(_medians([run.seconds(phase) for run in calls]) for phase in ("forward", "backward")),
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


def _medians(runs: list[Counter[str]]) -> dict[str, Timing]:
    return {key: _timing([run[key] for run in runs]) for key in runs[-1]}


def _timing(seconds: Any) -> Timing:
    values = list(seconds)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Timing(median, low, high)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


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


class _SelfTimes:
    """The time of each call without that of the calls in it, from hooks on modules and on nodes of autograd.

    What the hooks themselves do is not in it.
    """

    def __init__(self, model: nn.Module, clock: _Clock) -> None:
        self._clock = clock
        self._names = {id(module): name for name, module in model.named_modules()}
        self._holders = {id(p): name for name, module in model.named_modules() for p in module._parameters.values()}
        self._calls: Counter[str] = Counter()
        self._open = [("", "")]  # the name of each module that runs, and the key of its call
        self._phase = "forward"
        self._since: Any = None
        self._spans: list[tuple[str, str, Any, Any]] = []
        # which call ran when autograd gave its nodes their numbers: the first number, and the call, of each stretch
        self._numbers: list[int] = [-1]
        self._makers: list[str] = [""]

    def seconds(self, phase: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for span, key, start, end in self._spans:
            if span == phase:
                total[key] += self._clock.seconds(start, end)  # type: ignore[assignment]  # a Counter of floats
        return total

    def watch_forward(self, model: nn.Module, handles: HookHandles) -> None:
        for module in model.modules():
            handles.forward_pre(module, self._before)
            handles.forward(module, self._after, always=True)

    def watch_backward(self, loss: Tensor, handles: HookHandles) -> None:
        """Put a hook on every node behind ``loss``: the time of a node ends where that of the next one begins."""
        self._phase, self._open = "backward", [("", "")]
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                handles.node_before(node, self._node_hook(self._maker(node)))
                waiting += [before for before, _ in node.next_functions]

    def _maker(self, node: Any) -> str:
        variable = getattr(node, "variable", None)  # of the node that adds to the gradient of a parameter
        if variable is not None:
            return self._holders.get(id(variable), "")
        return self._makers[bisect(self._numbers, node._sequence_nr()) - 1]

    def _node_hook(self, key: str) -> Callable[[Any], None]:
        def begin(gradients: Any) -> None:
            self.stop()
            self._open[:] = [("", key)]
            self.start()

        return begin

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stop()
        name = self._names[id(module)]
        again = is_recomputing()  # by checkpointing, and which of several calls is not known
        self._open.append((name, call_key(name, 0 if again else self._calls[name])))
        self._calls[name] += not again
        self._note_maker()
        self.start()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.stop()
        name = self._names[id(module)]
        while len(self._open) > 1 and self._open.pop()[0] != name:
            pass  # a call that failed, and whose failure the model caught
        self._note_maker()
        self.start()

    def _note_maker(self) -> None:
        if self._phase == "forward":
            self._numbers.append(torch._C._autograd._get_sequence_nr())
            self._makers.append(self._open[-1][1])

    def start(self) -> None:
        self._since = self._clock.now()

    def stop(self) -> None:
        self._spans.append((self._phase, self._open[-1][1], self._since, self._clock.now()))


class _Step:
    """One step of a model, run in ways that measure something else each time."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        optimizer: MakeOptimizer | None,
        conditions: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model, self._conditions = model, conditions
        self._args: tuple[Any, ...] = () if isinstance(inputs, Mapping) else inputs
        self._kwargs: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
        self._tensors = [*model.parameters(), *model.buffers(), *tensors_in(inputs).values()]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._trains = optimizer is not None
        self._optimizer = optimizer(trained) if optimizer is not None and trained else None
        self.clock = _Clock(self._tensors[0].device)

    def run(self) -> list[tuple[Any, Any]]:
        """Run it; when each of its parts began and ended."""
        self._clear()
        self.clock.wait()
        outputs, forward = self._timed(self._forward)
        if not self._trains:
            return [forward]
        loss = Loss("mse").of(outputs)[0]
        del outputs
        _, backward = self._timed(loss.backward)
        del loss
        return [forward, backward, self._timed(self._update)[1]]

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, tuple[Any, Any]]:
        start = self.clock.now()
        return run(), (start, self.clock.now())

    def run_with_hooks(self) -> _SelfTimes:
        self._clear()
        times = _SelfTimes(self._model, self.clock)
        self.clock.wait()
        with HookHandles() as handles:
            times.watch_forward(self._model, handles)
            times.start()
            outputs = self._forward()
            times.stop()
            if self._trains:
                loss = Loss("mse").of(outputs)[0]
                del outputs
                times.watch_backward(loss, handles)
                times.start()
                loss.backward()
                times.stop()
        self._update()
        return times

    def saved_bytes(self) -> int:
        """Bytes of the tensors that autograd saves, without those that exist anyway; memory that several use, once."""
        self._clear()
        present = {tensor.untyped_storage()._cdata for tensor in self._tensors}
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self._forward()  # holds the graph, so that no memory is used twice
        del outputs
        return sum(size for storage, size in saved.items() if storage not in present)

    def peak_bytes(self) -> int | None:
        """The largest number of bytes of tensors at any time of a step, those that exist before it included."""
        self._clear()
        state = [] if self._optimizer is None else list(tensors_in(list(self._optimizer.state.values())).values())
        held = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in (*self._tensors, *state)
        }
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
        with torch.set_grad_enabled(self._trains), self._conditions():
            return self._model(*self._args, **self._kwargs)

    def _update(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
