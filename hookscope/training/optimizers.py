"""The optimizers of a training run: which has stepped how often, whose step is next to be sampled, what each holds."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_PATIENCE = 100


class TrackedOptimizer:
    """An optimizer and how far it is.

    Attributes:
        number: In order of its first step.
        steps: How many steps it has made.
        since: The segment of the run that began after its last step, see `RunRecorder`.
        idle: How many steps others have made since its last.
        was_searched: Whether its model was looked for in memory already.
    """

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self._ref = weakref.ref(optimizer)
        self.number = number
        self.steps = self.since = self.idle = 0
        self.was_searched = False

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer itself, None once nobody has it any more."""
        return self._ref()

    def parameters(self) -> Iterator[Tensor]:
        """What it changes."""
        optimizer = self.optimizer
        for group in optimizer.param_groups if optimizer is not None else ():
            yield from group["params"]

    def learning_rates(self) -> tuple[float | None, dict[int, float | None]]:
        """That of the first group, and that of each parameter, by ``id``."""
        optimizer = self.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        rates = [_number(group.get("lr")) for group in groups]
        each = {id(p): rate for group, rate in zip(groups, rates, strict=True) for p in group["params"]}
        return (rates[0] if rates else None), each

    def is_due(self, every: int) -> bool:
        """Whether its next step is to be sampled, and is to be expected still."""
        return self.steps % every == 0 and self.idle <= every + _PATIENCE and self.optimizer is not None


class Optimizers:
    """The optimizers that are followed.

    Args:
        only: The only one, None for every one.
        every: Each so many steps one is sampled.
    """

    def __init__(self, only: Optimizer | None, every: int) -> None:
        self.every, self._only = every, only
        self.all: list[TrackedOptimizer] = [] if only is None else [TrackedOptimizer(only, 0)]
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def of(self, optimizer: Optimizer) -> TrackedOptimizer | None:
        """What is known of it, None where it is not followed."""
        for stepper in self.all:
            if stepper.optimizer is optimizer:
                return stepper
        if self._only is not None:
            self._others.add(optimizer)
            return None
        self.all.append(TrackedOptimizer(optimizer, len(self.all)))
        return self.all[-1]

    def held(self) -> set[int]:
        """All parameters, by ``id``, of the optimizers that have stepped, followed or not."""
        others = (p for optimizer in self._others for group in optimizer.param_groups for p in group["params"])
        return {id(p) for stepper in self.all for p in stepper.parameters()} | {id(p) for p in others}

    def is_any_due(self) -> bool:
        """Whether a step that is to be sampled comes next, of any optimizer; the first of a run is."""
        return not self.all or any(stepper.is_due(self.every) for stepper in self.all)

    def has_stepped(self, stepper: TrackedOptimizer, segment: int) -> None:
        """Count a step; the segment after it is ``segment``."""
        for other in self.all:
            other.idle += 1
        stepper.steps, stepper.since, stepper.idle = stepper.steps + 1, segment, 0


def closure_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The closure that a step was given: it makes the gradients itself, so none are there before it."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def gradient_scale(optimizer: Optimizer) -> Tensor | None:
    """What the gradients are multiplied by still, where a ``GradScaler`` leaves it to a fused optimizer to divide."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def makes_no_step(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer will leave its step out, as a ``GradScaler`` found Inf or NaN in the gradients."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.any())


def is_stepping(optimizer: Optimizer | None, beginning: Optimizer) -> bool:
    """Whether a step of ``optimizer`` goes on while one of ``beginning`` begins: no hook tells of one that raised.

    An optimizer may step another, or its own base class, in its step.
    """
    code = Optimizer.profile_hook_step(_nothing).__code__
    frame: FrameType | None = sys._getframe(1)
    found = -1 if beginning is optimizer else 0  # the step that begins is one of the frames
    while frame is not None and found < 1:
        found += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found > 0


def _nothing(self: Any) -> None:
    """What `is_stepping` wraps to see what a wrapped step looks like."""


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
