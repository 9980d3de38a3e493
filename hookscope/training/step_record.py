"""What the layers of a model put out in one training step: every pass of the step, added up by layer call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.hooks import call_key, class_names
from hookscope.statistics import BATCH_NORMS
from hookscope.training.modules import Layer
from hookscope.training.passes import Pass
from hookscope.training.reductions import BatchMoments, DeferredScalars, OutputSums, output_sums, values_of

MOST_PASSES = 256
"""So many passes of a model are measured in a step: a script that never steps must not pay for ever."""


@dataclass(slots=True)
class CallMetrics:
    """One call of a layer in a step, over all passes of it.

    Attributes:
        layer: The layer.
        type: Its class name.
        call: Which call of the pass.
        index: Its place among the counted calls of its pass, None for one that is not counted.
        sums: Of every tensor that it put out.
        alive: ``(C,)`` whether a channel was anything but 0 anywhere in the step; None without an axis of channels.
        batch: Of a BatchNorm in train mode, what it was given.
        order: Its place among all calls that were ever recorded.
    """

    layer: Layer
    type: str
    call: int
    index: int | None
    sums: list[OutputSums] = field(default_factory=list)
    alive: Tensor | None = None
    batch: BatchMoments | None = None
    order: int = field(default_factory=itertools.count().__next__)
    _dead: Tensor | None = None
    _distance: tuple[Tensor, Tensor] | None = None

    @property
    def key(self) -> str:
        """``name`` or ``name#call``."""
        return call_key(self.layer.name, self.call)

    def add(self, sums: list[OutputSums]) -> None:
        """Add what a call of another pass put out."""
        if sums:
            channels = sums[0].alive
            if not self.sums:
                self.alive = channels
            elif channels is not None and self.alive is not None and channels.shape == self.alive.shape:
                self.alive = self.alive | channels
            else:  # another number of channels: none of them is dead for sure
                self.alive = None
        self.sums += sums

    def want(self, numbers: DeferredScalars) -> None:
        """Say what has to be brought from the device."""
        for sums in self.sums:
            for single in sums.singles:
                numbers.want(single)
        if self.alive is not None:
            self._dead = self.alive.numel() - self.alive.sum()
            numbers.want(self._dead)
        if self.batch is not None and self.batch.count:
            self._distance = self.batch.distance()
            for each in self._distance:
                numbers.want(each)

    def figures(self, numbers: DeferredScalars) -> dict[str, Any]:
        """The figures by their names in the log, from what was brought."""
        count = sum(sums.count for sums in self.sums)
        mean, std = self._moments(numbers, count)
        dead = None if self._dead is None else int(numbers[self._dead])
        channels = 0 if self.alive is None else self.alive.numel()
        shift, ratio = (None, None) if self._distance is None else (numbers[each] for each in self._distance)
        return {
            "activation_mean": mean,
            "activation_std": std,
            "zero_share": 1 - sum(numbers[sums.nonzero] for sums in self.sums) / count if count else None,
            "channels": channels or None,
            "channel_values": count // channels if channels else None,
            "dead_channels": dead,
            "non_finite": int(sum(numbers[sums.non_finite] for sums in self.sums)),
            "running_mean_shift": shift,
            "running_var_ratio": ratio,
        }

    def _moments(self, numbers: DeferredScalars, count: int) -> tuple[float | None, float | None]:
        """Mean and standard deviation of all values of all passes."""
        if not count:
            return None, None
        means = [(sums.count, numbers[sums.mean], numbers[sums.spread]) for sums in self.sums]
        mean = sum(n * each for n, each, _ in means) / count
        squares = sum(spread**2 + n * (each - mean) ** 2 for n, each, spread in means)
        return mean, math.sqrt(squares / count)


class StepMetrics:
    """The calls of one model between two steps of an optimizer.

    Args:
        segment: Between which steps.
    """

    def __init__(self, segment: int = -1) -> None:
        self.segment = segment
        self.passes = 0
        self.total = 0
        self.calls: dict[tuple[int, int], CallMetrics] = {}

    def add(
        self, now: Pass, layer: Layer, call: int, module: nn.Module, inputs: Any, output: Any, expected: Any
    ) -> None:
        """Add a call of ``layer`` that has just returned; ``expected`` is what `expected_statistics` gave before it."""
        index = None
        if layer.is_counted(module):
            index, now.counted = now.counted, now.counted + 1
            self.total = max(self.total, now.counted)
        if not now.measured or not layer.may_want(module):
            return
        selection = layer.chosen.selection
        if not (selection.from_the_end or any(selection.wants(name, call, index) for name in layer.names)):
            return
        record = self.calls.get((id(layer), call))
        if record is None:
            record = CallMetrics(layer, type(module).__name__, call, index)
            self.calls[id(layer), call] = record
        record.add(output_sums(output, module))
        if expected is not None:
            _add_batch(record, inputs, expected)

    def wanted(self) -> Iterator[CallMetrics]:
        """The calls that are wanted, in order of execution, now that their number is known."""
        for record in self.calls.values():
            if record.layer.wants(record.call, record.index, self.total):
                yield record


def expected_statistics(module: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    """Copies of the running statistics of a BatchNorm that is about to update them, and its eps; else None."""
    if not module.training or "running_mean" not in module._buffers or BATCH_NORMS[0] not in class_names(module):
        return None
    mean, variance = module._buffers["running_mean"], module._buffers["running_var"]
    if mean is None or variance is None or is_lazy(mean) or not mean.numel():
        return None
    return mean.detach().clone(), variance.detach().clone(), float(getattr(module, "eps", 0.0))


def _add_batch(record: CallMetrics, inputs: Any, expected: tuple[Tensor, Tensor, float]) -> None:
    values = next(iter(values_of(inputs)), None)
    if values is None or values.dim() < 2 or values.shape[1] != expected[0].numel():
        return
    if record.batch is None:
        record.batch = BatchMoments(*expected)
    record.batch.add(values)
