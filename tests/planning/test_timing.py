"""Times of calls on a clock that only the layers move, and memory against arithmetic on paper."""

import gc
import time
import timeit
from functools import partial
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookscope.hooks import ModelSnapshot
from hookscope.planning import Timing, timing
from hookscope.planning.step import Conditions
from hookscope.planning.timing import CallTimes, measure, speed
from tests.nets import Fails, Function, named

SGD = partial(torch.optim.SGD, lr=0.1)
INFERENCE, TRAINING = Conditions("cpu"), Conditions("cpu", optimizer=SGD)


class HandClock:
    """Stands for ``time.perf_counter``; only `Slow` layers move it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: HandClock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.backward_seconds = clock, backward
        clock.seconds += forward
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.clock.seconds += ctx.backward_seconds
        return gradient, None, None, None


class Slow(nn.Module):
    """Multiplies by a weight, and takes so many seconds forward and backward."""

    def __init__(self, clock: HandClock, forward: float, backward: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.take = lambda x: _Slow.apply(x, clock, forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        return self.take(x * self.weight)


@pytest.fixture(autouse=True)
def _given_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "speed", lambda *where: (3e9, 1e9))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


def _medians(times: dict[str, Timing]) -> dict[str, float]:
    return {key: timing.median for key, timing in times.items() if timing.median}


def test_each_call_has_its_own_time_forward_and_backward(clock: HandClock) -> None:
    twice = Slow(clock, 2, 5)
    net = Function(lambda net, x: net.b(net.a(net.b(x))), a=Slow(clock, 1, 3), b=twice)
    times = measure(net, (torch.ones(2),), TRAINING, repeats=2, warm_up=0)
    assert _medians(times.forward) == {"b": 2, "a": 1, "b#1": 2}
    assert _medians(times.backward) == {"b": 5, "a": 3, "b#1": 5}
    assert (times.step.forward.median, times.step.backward, times.step.optimizer) == (
        5,
        Timing(13, 13, 13),
        Timing(0, 0, 0),
    )


def test_a_block_that_computes_beside_its_layers_has_only_its_own_time(clock: HandClock) -> None:
    beside = Slow(clock, 7, 11)  # no child: its work is that of the block
    block = Function(lambda net, x: net.layer(x) + beside(x), layer=Slow(clock, 1, 3))
    times = measure(named(block=block), (torch.ones(2),), TRAINING, repeats=1, warm_up=0)
    assert _medians(times.forward) == {"block": 7, "block.layer": 1}
    assert _medians(times.backward) == {"block": 11, "block.layer": 3}


def test_what_checkpointing_computes_again_is_time_of_the_backward_pass(clock: HandClock) -> None:
    block = named(slow=Slow(clock, 2, 5), last=nn.Tanh())  # saves its output, so all of the block runs again
    net = Function(lambda net, x: checkpoint(net.block, x, use_reentrant=False), block=block)
    times = measure(net, (torch.ones(2),), TRAINING, repeats=1, warm_up=0)
    assert (_medians(times.forward), _medians(times.backward)) == ({"block.slow": 2}, {"block.slow": 7})


def test_a_call_that_fails_and_is_caught_keeps_the_others_apart(clock: HandClock) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        try:
            net.fails(x)
        except RuntimeError:
            return net.slow(x)
        raise AssertionError

    net = Function(forward, fails=named(inner=Fails()), slow=Slow(clock, 2))
    assert _medians(measure(net, (torch.ones(2),), INFERENCE, repeats=1, warm_up=0).forward) == {"slow": 2}


def test_median_and_quartiles_of_repeats_without_warm_up(clock: HandClock) -> None:
    seconds = iter([100, *(value for value in (1, 2, 3, 4, 9) for _ in "hw"), 0])  # with hooks, and the whole

    def wait(x: Tensor) -> Tensor:
        clock.seconds += next(seconds)
        return x

    step = measure(Function(wait), (torch.ones(2),), INFERENCE, repeats=5, warm_up=1).step
    assert (step.forward, step.backward, step.optimizer) == (Timing(3, 2, 4), None, None)
    assert (step.repeats, step.warm_up) == (5, 1)


def test_model_is_as_before() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    net[0].weight.grad = torch.ones(4, 4)
    net[1].weight.requires_grad_(False)
    before, values = ModelSnapshot(net), [parameter.detach().clone() for parameter in net.parameters()]
    measure(net, (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),), TRAINING, repeats=1)
    # writes that put values back count as writes
    assert {change.what for change in before.changes()} <= {f"parameter '{name}'" for name in ("weight", "bias")}
    assert all(map(torch.equal, net.parameters(), values))


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_progress_and_phases(optimizer: str | None) -> None:
    done: list[tuple[int, int]] = []
    net = Function(lambda net, x: {"out": net.layer(x) + 1}, layer=nn.Linear(2, 2))
    step = Conditions("cpu", optimizer=optimizer)
    times = measure(net, (torch.ones(1, 2),), step, repeats=2, warm_up=1, on_progress=lambda *at: done.append(at))
    assert {"", "layer", "::add"} <= times.forward.keys() and bool(times.backward) == bool(optimizer)
    assert done[0] == (0, 7) and done[-1] == (7, 7)
    assert times.step.macs_per_second / times.step.bytes_per_second == 3


def test_the_graph_of_a_measured_step_is_freed() -> None:
    """A Sigmoid keeps its own output."""
    net = nn.Sequential(nn.Linear(37, 37), nn.Sigmoid())

    def living() -> int:
        gc.collect()
        return sum(issubclass(type(kept), Tensor) and kept.shape == (53, 37) for kept in gc.get_objects())

    measure(net, (torch.ones(53, 37),), TRAINING, repeats=1, warm_up=1)
    assert living() == 0


def _mlp(n: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n, n, bias=False), nn.ReLU(), nn.Linear(n, n, bias=False))


def test_peak_and_saved_bytes_are_those_on_paper() -> None:
    n, batch = 64, 32
    weights, activation = 4 * 2 * n * n, 4 * batch * n
    net, x = _mlp(n), torch.ones(batch, n)
    step = measure(net, (x,), INFERENCE, repeats=1, warm_up=0).step
    # the input, and two activations at a time
    assert (step.saved, step.peak) == (0, weights + 3 * activation)
    momentum = Conditions("cpu", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    step = measure(net, (x,), momentum, repeats=1, warm_up=0).step
    # ReLU and the second layer save the same tensor; the input exists anyway
    assert step.saved == activation
    # weights, momentum and gradients at the end of the backward pass, and then no activation but the input and output
    assert step.peak is not None and 3 * weights + 2 * activation <= step.peak <= 3 * weights + 6 * activation


def test_autocast_runs_the_step_in_its_type_and_checkpointing_saves_less() -> None:
    seen: list[torch.dtype] = []
    net = Function(lambda net, x: seen.append((y := net.layer(x)).dtype) or y, layer=nn.Linear(2, 2))
    measure(net, (torch.ones(1, 2),), Conditions("cpu", autocast=torch.bfloat16, optimizer=SGD), repeats=1, warm_up=0)
    assert set(seen) == {torch.bfloat16}
    blocks = [_mlp(16) for _ in range(4)]
    net = nn.Sequential(*blocks)
    conditions = Conditions("cpu", optimizer=SGD, blocks=("0", "1", "2", "3"))
    times = measure(net, (torch.ones(8, 16),), conditions, repeats=1, warm_up=0)
    assert times.step.saved == 3 * 4 * 8 * 16  # the input of each block, the first of which exists anyway


class FakeEvent:
    """Stands for ``torch.Event`` of an accelerator: the time of its record, in milliseconds from another."""

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        assert device.type == "cuda" and enable_timing

    def record(self) -> None:
        self.at = timing.perf_counter()

    def elapsed_time(self, end: Self) -> float:
        return 1000 * (end.at - self.at)


def test_on_an_accelerator_events_are_recorded_and_read_after_it_has_finished(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "Event", FakeEvent)
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    gpu = timing._Clock(torch.device("cuda"))
    start = gpu.now()
    clock.seconds += 2
    end = gpu.now()
    gpu.wait()
    assert gpu.seconds(start, end) == 2 and waited == [torch.device("cuda")]


@pytest.mark.slow
def test_speed_is_that_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "perf_counter", time.process_time)
    macs, moved = speed(torch.device("cpu"))
    matrix, block = np.ones((1024, 1024), np.float32), np.ones(1 << 26, np.uint8)
    target = np.empty_like(block)
    for seconds, run in (
        (1024**3 / macs, lambda: matrix @ matrix),
        ((2 << 26) / moved, lambda: np.copyto(target, block)),
    ):
        judge = min(timeit.repeat(run, timer=time.process_time, number=1, repeat=5))
        assert judge / 3 < seconds < judge * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "efficientnet_b0"])
def test_times_of_the_calls_add_up_to_the_whole_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import models

    monkeypatch.setattr(timing, "perf_counter", time.process_time)  # other programs do not count
    net, x = models.get_model(name, weights=None).train(), torch.randn(4, 3, 224, 224)
    times: CallTimes = measure(net, (x,), TRAINING, repeats=9, warm_up=2)
    for phase, whole in ((times.forward, times.step.forward), (times.backward, times.step.backward)):
        assert whole is not None
        assert sum(call.median for call in phase.values()) == pytest.approx(whole.median, rel=0.1)
