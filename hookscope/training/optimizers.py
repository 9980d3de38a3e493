"""The optimizers of a training run: how many steps each has made, whose next step is sampled, what each changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookscope.training.tracker import in_memory, is_on_stack

_PATIENCE = 100
_LOW_RATE = 2e-3  # of the highest
_STEP_CODE = Optimizer.profile_hook_step(lambda self: None).__code__  # of the wrapper around each step


def is_sampled(step: int, every: int) -> bool:
    """Whether a step is one of 0, 1, 2, 4, 8... below ``every``, or of ``every``, ``2 * every``..."""
    return not step % every or (step < every and not step & (step - 1))


class TrackedOptimizer:
    """An optimizer, which is None once the script has dropped it, and its progress."""

    number = steps = 0
    since = 0  # the segment of the run that began after its last step, see `MetricsRecorder`
    idle = 0  # steps of other optimizers since its last step
    was_searched = False  # whether its model was already searched for in memory
    steps_eagerly = False  # whether a step of it was seen outside of compiled functions
    rate_swings = 0  # how often the rate fell to almost 0 and rose again over several steps; a restart is one jump
    _course = ""  # of the rate: low, medium, high

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.optimizer, self.number = weakref.ref(optimizer), number

    def parameters(self) -> Iterator[Tensor]:
        optimizer = self.optimizer()
        return iter(()) if optimizer is None else parameters_of(optimizer)

    def learning_rates(self) -> tuple[float | None, dict[int, float | None]]:
        """The rate of the first group, and the rate of each parameter by ``id``."""
        optimizer = self.optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        values = (group.get("lr") for group in groups)
        rates = [float(value) if isinstance(value, (Real, Tensor)) else None for value in values]
        by_parameter = {id(p): rate for group, rate in zip(groups, rates, strict=True) for p in group["params"]}
        return (rates[0] if rates else None), by_parameter

    def note_rate(self) -> None:
        """Follow the rate, also in steps that are not sampled; a rate on a device is not read."""
        group: dict[str, Any] = next(iter(getattr(self.optimizer(), "param_groups", ())), {})
        rate, begin = group.get("lr"), group.get("initial_lr")  # which a scheduler notes
        if isinstance(rate, float) and isinstance(begin, float):
            level = "lmh"[(rate > _LOW_RATE * begin) + (rate > begin / 2)]
            if level != self._course[-1:]:
                self._course = self._course[-3:] + level
                self.rate_swings += self._course[1:] == "lmh"  # after a fall; a warm-up begins low

    def is_due(self, every: int) -> bool:
        """Whether its next step is to be sampled, unless it seems to make no more steps."""
        return is_sampled(self.steps, every) and self.idle <= every + _PATIENCE and self.optimizer() is not None

    def versions(self) -> int:
        """A number that grows whenever a parameter is written to."""
        return sum(parameter._version for parameter in self.parameters())

    def is_stepping(self, starting: Optimizer) -> bool:
        """Whether its step still runs while a step of ``starting`` begins, which may be of its own base class."""
        optimizer = self.optimizer()
        return is_on_stack(optimizer, _STEP_CODE, beyond=int(starting is optimizer))


class BackwardSteps(TrackedOptimizer):
    """The backward passes of a run whose weights change without an optimizer of torch, as steps of one optimizer."""

    was_searched = steps_eagerly = True

    def __init__(self, models: Callable[[], Iterable[nn.Module | None]]) -> None:
        self._models = models

    def optimizer(self) -> None:  # type: ignore[override]
        return None

    def parameters(self) -> Iterator[Tensor]:
        roots = (root for root in self._models() if root is not None)
        yield from {id(p): p for root in roots for p in root.parameters() if p.requires_grad}.values()

    def is_due(self, every: int) -> bool:
        return is_sampled(self.steps, every)


class Optimizers:
    """The followed optimizers; see `is_sampled` for the steps; each ``histograms * every``-th has histograms."""

    def __init__(self, only: Optimizer | None, every: int, histograms: int = 0) -> None:
        self.every, self._only, self._histograms = every, only, every * histograms
        self.are_all = only is None
        self.all: list[TrackedOptimizer] = [] if only is None else [TrackedOptimizer(only, 0)]
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._in_functions: dict[int, tuple[weakref.ref[Any], weakref.WeakSet[Optimizer]]] = {}

    def of(self, optimizer: Optimizer) -> TrackedOptimizer | None:
        for tracked in self.all:
            if tracked.optimizer() is optimizer:
                return tracked
        if self._only is not None:
            self._others.add(optimizer)
            return None
        self.all.append(TrackedOptimizer(optimizer, len(self.all)))
        return self.all[-1]

    def in_function(self, function: Callable[..., Any]) -> Iterator[TrackedOptimizer]:
        """The optimizers at the first call of a compiled function, which may step them; new ones are not in ``all``."""
        reference, optimizers = self._in_functions.get(id(function), (None, None))
        if optimizers is None or reference is None or reference() is not function:
            optimizers = weakref.WeakSet(in_memory(Optimizer))
            self._in_functions[id(function)] = weakref.ref(function), optimizers
        for optimizer in optimizers if self._only is None else [self._only]:
            known = next((tracked for tracked in self.all if tracked.optimizer() is optimizer), None)
            if known is None or not known.steps_eagerly:
                yield known or TrackedOptimizer(optimizer, len(self.all))

    def all_parameters(self) -> set[int]:
        """The parameters, by ``id``, of all optimizers that have stepped, followed or not."""
        others = (p for optimizer in self._others for p in parameters_of(optimizer))
        return {id(p) for tracked in self.all for p in tracked.parameters()} | {id(p) for p in others}

    def is_any_due(self) -> bool:
        """Whether the next step may be one to sample; the first step of a run is."""
        return not self.all or any(tracked.is_due(self.every) for tracked in self.all)

    def is_histogram_due(self, tracked: TrackedOptimizer) -> bool:
        """Whether the next step of ``tracked``, if it is sampled, gets histograms."""
        return bool(self._histograms) and tracked.steps % self._histograms == 0

    def is_any_histogram_due(self) -> bool:
        """Whether the next step may be one with histograms."""
        return bool(self._histograms) and (not self.all or any(map(self.is_histogram_due, self.all)))

    def count_step(self, stepped: TrackedOptimizer, segment: int) -> None:
        if stepped not in self.all:
            stepped.number = len(self.all)
            self.all.append(stepped)
        for tracked in self.all:
            tracked.idle += 1
        stepped.note_rate()
        stepped.steps, stepped.since, stepped.idle = stepped.steps + 1, segment, 0


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def gradient_scale(optimizer: Optimizer | None) -> Tensor | None:
    """The factor in the gradients, where a ``GradScaler`` leaves it to a fused optimizer to divide by it."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def skips_step(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer will skip its step, because a ``GradScaler`` found Inf or NaN in the gradients."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.any())
