"""From the calls of layers to the lines of the log, one for each layer call of a sampled step."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.hooks import class_names, merge_moments
from hookscope.statistics import BATCH_NORMS, ValueHistogram
from hookscope.training.optimizers import TrackedOptimizer
from hookscope.training.output import RunProgress
from hookscope.training.reductions import (
    BatchMoments,
    FetchedScalars,
    OutputSums,
    StepWeights,
    edges_and_counts,
    histogram_of,
    output_sums,
    values_of,
)
from hookscope.training.tracker import Layer, Pass, TrackedModel, own_parameters

_MOST_PASSES = 256  # recorded of a model in one step: a script that never steps must not fill the memory
_MOST_LOSSES = 4096


@dataclass(slots=True)
class OptimizerStep:
    """A step of an optimizer that has begun."""

    optimizer: TrackedOptimizer
    has_closure: bool  # whether the step runs its forward passes itself
    losses_before: int = 0  # how many losses were recorded for the step before it began
    weights: StepWeights | None = None  # the parameters before the step; None for a step that is not sampled
    models: tuple[TrackedModel, ...] = ()
    others: frozenset[int] | None = None  # the parameters of other optimizers, by ``id``; None while they are unknown
    depth: int = 0  # how many steps of the same optimizer run inside it
    gradients: dict[str, Any] | None = None  # their facts; None while they are unknown


@dataclass(slots=True)
class CallMetrics:
    """One call of a layer in a step, over all passes of the step."""

    layer: Layer
    type: str
    call: int
    index: int | None  # its position among the counted calls of its pass, None for a call that is not counted
    order: int | None  # its position among all calls of its pass, None for a block of other layers
    called_as: str  # the name of the layer inside the layer that called it
    outputs: list[OutputSums] = field(default_factory=list)  # one for each tensor of each output
    alive: Tensor | None = None  # ``(C,)`` whether a channel was non-zero anywhere; None without a channel axis
    batch: BatchMoments | None = None  # the inputs of a BatchNorm in train mode
    recorded: int = field(default_factory=itertools.count().__next__)  # position among all calls ever
    histogram: ValueHistogram | None = None
    _dead: Tensor | None = None
    _drift: tuple[Tensor, Tensor] | None = None

    def add(self, outputs: list[OutputSums]) -> None:
        if outputs:
            alive = outputs[0].alive
            if self.outputs and alive is not None:  # where the number of channels differs, none is known to be dead
                before = self.alive
                alive = before | alive if before is not None and alive.shape == before.shape else None
            self.alive = alive
        self.outputs += outputs

    def scalars(self) -> Iterator[Tensor | float]:
        for sums in self.outputs:
            yield from (sums.mean, sums.spread, sums.nonzero, sums.non_finite)
            yield from () if sums.largest is None else (sums.largest,)
        if self.alive is not None:
            self._dead = self.alive.numel() - self.alive.sum()
            yield self._dead
        if self.batch is not None:
            self._drift = self.batch.drift()
            yield from self._drift

    def metrics(self, scalars: FetchedScalars) -> dict[str, Any]:
        moments = [(sums.count, scalars[sums.mean], scalars[sums.spread] ** 2) for sums in self.outputs]
        count, mean, squares = functools.reduce(merge_moments, moments) if moments else (0, None, 0.0)
        channels = 0 if self.alive is None else self.alive.numel()
        shift, ratio = (None, None) if self._drift is None else (scalars[value] for value in self._drift)
        non_finite = int(sum(scalars[sums.non_finite] for sums in self.outputs))
        return {
            "activation_mean": mean,
            "activation_std": math.sqrt(squares / count) if count > 1 else None,
            "activation_max": max((scalars[s.largest] for s in self.outputs if s.largest is not None), default=None),
            "zero_share": 1 - sum(scalars[sums.nonzero] for sums in self.outputs) / count if count else None,
            "channels": channels or None,
            "channel_values": count // channels if channels else None,
            "dead_channels": None if self._dead is None else int(scalars[self._dead]),
            "non_finite": non_finite,
            "infinite": not any(math.isnan(scalars[sums.mean]) for sums in self.outputs) if non_finite else None,
            "running_mean_shift": shift,
            "running_var_ratio": ratio,
        }


@dataclass(slots=True)
class SegmentRecord:
    """The calls of one model in one segment of the run, by ``id`` of the layer and number of the call."""

    segment: int
    passes: int = 0
    total: int = 0  # largest number of counted calls in a pass; the first pass of a part of the model goes on from it
    ordered: int = 0  # largest number of all calls
    ran: set[int] = field(default_factory=set)  # every layer that ran
    calls: dict[tuple[int, int], CallMetrics] = field(default_factory=dict)


class MetricsRecorder:
    """Records outputs of layers and writes them as lines after a step.

    The steps of all optimizers cut the run into segments. A line describes the latest segment in which the model ran
    since the last step of its optimizer. So a generator and a discriminator that step in turn each have their own part
    of the loop, and two optimizers of one model that step together share its passes. Losses alike.
    """

    def __init__(self, run: RunProgress) -> None:
        self._run = run
        self._records: dict[int, SegmentRecord] = {}
        self._losses: list[tuple[Tensor, float]] = []  # each with its divisor
        self._losses_of, self._most_losses = -1, 0
        self._loss_output: tuple[int, Tensor] | None = None

    def begin(self, now: Pass) -> None:
        record = self._record(now.model)
        record.passes += 1
        top, root = now.top(), now.model.module()
        layer = now.model.layers.get(id(top))
        if top is not root and (layer is None or id(layer) not in record.ran):
            now.counted, now.ordered = record.total, record.ordered
        now.recorded = record.passes <= _MOST_PASSES

    def add(
        self, now: Pass, layer: Layer, call: int, module: nn.Module, inputs: Any, output: Any, histogram: bool = False
    ) -> None:
        """A layer has returned from the call with number ``call`` of its pass; ``histogram`` counts its values."""
        record = self._record(layer.model)
        record.ran.add(id(layer))
        index = order = None
        expected = now.running_statistics.pop(id(module), None)
        if layer.is_single(module):
            order, now.ordered = now.ordered, now.ordered + 1
            record.ordered = max(record.ordered, now.ordered)
        if layer.is_counted(module):
            index, now.counted = now.counted, now.counted + 1
            record.total = max(record.total, now.counted)
        if not now.recorded or not layer.may_want(module):
            return
        if not (layer.choice.selection.from_the_end or layer.wants(call, index)):
            return
        metrics = record.calls.get((id(layer), call))
        if metrics is None:
            metrics = record.calls[id(layer), call] = CallMetrics(
                layer, type(module).__name__, call, index, order, layer.place_in(now.running)
            )
        metrics.add(output_sums(output, module))
        if histogram:
            metrics.histogram = histogram_of(values_of(output), metrics.histogram)
        values = None if expected is None else next(iter(values_of(inputs)), None)
        if values is not None and values.dim() >= 2 and values.shape[1] == expected[0].numel():
            metrics.batch = metrics.batch or BatchMoments(*expected)
            metrics.batch.add(values)

    def add_loss(self, value: Tensor, divisor: float = 1.0) -> None:
        """``backward`` starts at ``value``, which the script has divided by ``divisor``."""
        if self._losses_of != self._run.steps:
            self._losses, self._losses_of = [], self._run.steps
        if len(self._losses) < _MOST_LOSSES:
            self._losses.append((value, divisor))

    def losses_since(self, optimizer: TrackedOptimizer) -> int:
        return len(self._losses) if self._losses_of >= optimizer.since else 0

    def add_loss_output(self, value: Tensor) -> None:
        """A loss module has returned ``value``; it is the loss where ``backward`` is not called."""
        self._loss_output = (self._run.steps, value)

    def order_of_layers(self) -> dict[int, int]:
        calls = [call for record in self._records.values() for call in record.calls.values()]
        return {id(call.layer): call.recorded for call in calls}

    def lines(self, step: OptimizerStep) -> Iterator[dict[str, Any]]:
        """The lines of a sampled step that is done, without its number and time."""
        assert step.weights is not None
        optimizer = step.optimizer
        parameters = {id(p) for p in optimizer.parameters()}
        records = [self._since(model, optimizer) for model in step.models]
        totals = [(call, record.total) for record in records for call in record.calls.values()]
        calls = [call for call, total in totals if call.layer.wants(call.call, call.index, total)]  # known only now
        calls = [call for call in calls if _belongs(call, step.others, parameters)]
        calls.sort(key=lambda call: call.recorded)
        losses, factor = self._losses_of_step(step)
        scalars = FetchedScalars([*losses, *(scalar for call in calls for scalar in call.scalars())])
        loss = _mean(losses, factor, scalars)
        first_rate, rates = optimizer.learning_rates()
        not_run = [call for model in step.models for call in self._not_run(model, optimizer, calls, parameters)]
        absent = {id(call.layer) for call in not_run}
        shown: set[int] = set()
        for call in _in_order(calls, not_run):
            module = call.layer.module()
            own = {} if module is None else own_parameters(module)
            has_run = id(call.layer) not in absent
            histograms = {}
            if step.weights.with_histograms:
                activation = None if call.histogram is None else edges_and_counts(call.histogram)
                own_histograms = step.weights.histograms({} if id(call.layer) in shown else own)
                histograms["histograms"] = ({} if activation is None else {"activation": activation}) | own_histograms
                shown.add(id(call.layer))
            yield {
                "loss": loss,
                "passes": len(losses) or None,
                "learning_rate": next((rates[id(p)] for p in own.values() if id(p) in rates), first_rate),
                "optimizer": optimizer.number,
                "layer": call.layer.name,
                "call": call.call,
                "called_as": call.called_as if call.called_as != call.layer.name else None,
                "index": call.index,
                "order": call.order,
                "type": call.type,
                "model": call.layer.model.number,
                **call.metrics(scalars),
                **({} if has_run else {"non_finite": None}),
                **step.weights.metrics(own),
                **histograms,
            }

    def loss_of(self, step: OptimizerStep) -> float | None:
        losses, factor = self._losses_of_step(step)
        return _mean(losses, factor, FetchedScalars(losses))

    def _record(self, model: TrackedModel) -> SegmentRecord:
        record = self._records.get(model.number)
        if record is None or record.segment != self._run.steps:
            record = self._records[model.number] = SegmentRecord(self._run.steps)
        return record

    def _since(self, model: TrackedModel, optimizer: TrackedOptimizer) -> SegmentRecord:
        """The latest segment in which the model ran; an empty one if the optimizer has stepped after it."""
        record = self._records.get(model.number)
        return record if record is not None and record.segment >= optimizer.since else SegmentRecord(self._run.steps)

    def _not_run(
        self, model: TrackedModel, optimizer: TrackedOptimizer, calls: Iterable[CallMetrics], parameters: set[int]
    ) -> Iterator[CallMetrics]:
        """Layers whose hooks did not fire: unused, under no_grad, compiled, or called before they were watched."""
        record = self._since(model, optimizer)
        ran = {id(call.layer) for call in calls} | record.ran
        # without any call, the index of a layer is unknown
        is_known = bool(record.ran) and not model.is_opaque
        for layer, module, own in model.with_parameters():
            selection = layer.choice.selection
            is_chosen = layer.may_want(module)
            if is_known and not selection.wants_every_index:
                is_chosen = is_chosen and layer.wants(0, None, record.total)
            if id(layer) not in ran and is_chosen and not parameters.isdisjoint(map(id, own.values())):
                yield CallMetrics(layer, type(module).__name__, 0, None, None, layer.name)

    def _losses_of_step(self, step: OptimizerStep) -> tuple[list[Tensor], float]:
        """The losses that a step is the sum of, and the factor by which each is too small."""
        count = self.losses_since(step.optimizer)
        if count:
            # a step calls its closure several times; the first loss is of the weights before the step
            losses = self._losses[: step.losses_before + 1 if step.has_closure else count]
            self._most_losses = max(self._most_losses, len(losses))
            [divisor, *others] = {divisor for _, divisor in losses}
            factor = 1.0
            if not others and divisor in (self._most_losses, math.inf):
                factor = len(losses) if divisor == math.inf else divisor
            return [value for value, _ in losses], factor
        if self._loss_output is not None and self._loss_output[0] >= step.optimizer.since:
            return [self._loss_output[1]], 1.0
        return [], 1.0


def _mean(losses: Sequence[Tensor], factor: float, scalars: FetchedScalars) -> float | None:
    return sum(scalars[value] for value in losses) / len(losses) * factor if losses else None


def _in_order(calls: Sequence[CallMetrics], not_run: Sequence[CallMetrics]) -> list[CallMetrics]:
    """The calls in order of execution, each layer that did not run before those that are registered after it."""
    places = {id(layer): at for call in not_run for at, layer in enumerate(call.layer.model.layers.values())}
    ordered = list(calls)
    for call in not_run:
        place, model = places[id(call.layer)], call.layer.model
        of_model = (at for at, other in enumerate(ordered) if other.layer.model is model)
        behind = (at for at in of_model if places.get(id(ordered[at].layer), -1) > place)
        ordered.insert(next(behind, len(ordered)), call)
    return ordered


def running_statistics(module: nn.Module) -> tuple[Tensor, Tensor, float] | None:
    """Copies of the running mean and variance of a BatchNorm that is about to update them, and its eps; else None."""
    if not module.training or "running_mean" not in module._buffers or BATCH_NORMS[0] not in class_names(module):
        return None
    mean, variance = module._buffers["running_mean"], module._buffers["running_var"]
    if mean is None or variance is None or is_lazy(mean) or not mean.numel():
        return None
    return mean.detach().clone(), variance.detach().clone(), float(getattr(module, "eps", 0.0))


def _belongs(call: CallMetrics, others: Container[int] | None, of_step: Container[int]) -> bool:
    """Whether the lines of a step include this call: not if another optimizer changes the layer.

    A layer that no optimizer changes, by mistake, is included from an optimizer's second step on. At its first step
    other optimizers may still follow.
    """
    module = call.layer.module()
    own = [] if module is None else list(own_parameters(module).values())
    if not any(p.requires_grad for p in own) or any(id(p) in of_step for p in own):
        return True
    return others is not None and not any(id(p) in others for p in own)
