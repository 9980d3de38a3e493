"""From what is seen of a training run to the lines of its log, one for each layer call of a sampled step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookscope.training.modules import Layer, Root, own_parameters
from hookscope.training.optimizers import TrackedOptimizer
from hookscope.training.passes import Pass
from hookscope.training.reductions import DeferredScalars
from hookscope.training.step_record import MOST_PASSES, CallMetrics, StepMetrics
from hookscope.training.weights import StepWeights

_NOT_SEEN = {
    "activation_mean": None,
    "activation_std": None,
    "zero_share": None,
    "channels": None,
    "channel_values": None,
    "dead_channels": None,
    "non_finite": None,
    "running_mean_shift": None,
    "running_var_ratio": None,
}


@dataclass(slots=True)
class OptimizerStep:
    """A step of an optimizer that has begun.

    Attributes:
        stepper: The optimizer.
        has_closure: Whether the passes of the step are made inside it.
        weights: The parameters as they were before it; None for a step that is not sampled.
        roots: The models it has parameters of.
        elsewhere: The parameters, by ``id``, that other optimizers change; None before that is known.
        depth: How often it was begun again inside itself.
    """

    stepper: TrackedOptimizer
    has_closure: bool
    weights: StepWeights | None = None
    roots: tuple[Root, ...] = ()
    elsewhere: frozenset[int] | None = None
    depth: int = 0


class MetricsRecorder:
    """Records what models put out, and makes lines of it when an optimizer has stepped.

    The run is cut into segments by the steps of all optimizers. A line tells of the latest segment in which the model
    ran since the last step of its optimizer: of a generator and a discriminator that step in turn, each is seen in its
    own part of the loop, and two optimizers of one model that step together see the same passes. So with the loss.
    """

    def __init__(self) -> None:
        self.segment = 0
        self._records: dict[int, StepMetrics] = {}
        self._losses: list[Tensor] = []
        self._losses_of = -1
        self._loss_output: tuple[int, Tensor] | None = None

    def begin(self, now: Pass) -> None:
        """A pass has begun."""
        record = self._record(now.root)
        record.passes += 1
        now.measured = record.passes <= MOST_PASSES

    def add(self, now: Pass, layer: Layer, call: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """A layer has run, for the ``call``-th time in its pass."""
        expected = now.expected.pop(id(module), None)
        self._record(layer.root).add(now, layer, call, module, inputs, output, expected)

    def add_loss(self, value: Tensor) -> None:
        """``backward`` was called on ``value``."""
        if self._losses_of != self.segment:
            self._losses, self._losses_of = [], self.segment
        if len(self._losses) < MOST_PASSES:
            self._losses.append(value)

    def add_loss_output(self, value: Tensor) -> None:
        """A loss module has returned ``value``."""
        self._loss_output = (self.segment, value)

    def order_of_layers(self) -> dict[int, int]:
        """The place of each layer (by ``id``) among all that were recorded, of the last call of it."""
        return {id(call.layer): call.order for record in self._records.values() for call in record.calls.values()}

    def lines(self, step: OptimizerStep) -> Iterator[dict[str, Any]]:
        """The lines of a sampled step that is done, without its number and time."""
        assert step.weights is not None
        stepper = step.stepper
        parameters = {id(p) for p in stepper.parameters()}
        calls = [call for root in step.roots for call in self._calls(root, stepper)]
        calls = [call for call in calls if _is_of(call, step.elsewhere, parameters)]
        calls.sort(key=lambda call: call.order)
        losses = self._losses_since(step)
        numbers = DeferredScalars()
        for call in calls:
            call.want(numbers)
        for value in losses:
            numbers.want(value)
        numbers.bring()
        loss = sum(numbers[value] for value in losses) if losses else None
        first_rate, rates = stepper.learning_rates()
        unseen = [each for root in step.roots for each in self._unseen(root, stepper, calls, parameters)]
        for index, call in enumerate([*calls, *unseen]):
            module = call.layer.module
            own = {} if module is None else own_parameters(module)
            seen = index < len(calls)
            yield {
                "loss": loss,
                "learning_rate": next((rates[id(p)] for p in own.values() if id(p) in rates), first_rate),
                "optimizer": stepper.number,
                "layer": call.layer.name,
                "call": call.call,
                "index": index if seen else None,
                "type": call.type,
                "model": call.layer.root.number,
                **(call.figures(numbers) if seen else _NOT_SEEN),
                **step.weights.figures(own),
            }

    def _record(self, root: Root) -> StepMetrics:
        record = self._records.get(root.number)
        if record is None or record.segment != self.segment:
            record = self._records[root.number] = StepMetrics(self.segment)
        return record

    def _fresh(self, root: Root, stepper: TrackedOptimizer) -> StepMetrics | None:
        record = self._records.get(root.number)
        return record if record is not None and record.segment >= stepper.since else None

    def _calls(self, root: Root, stepper: TrackedOptimizer) -> Iterator[CallMetrics]:
        record = self._fresh(root, stepper)
        if record is not None:
            yield from record.wanted()

    def _unseen(
        self, root: Root, stepper: TrackedOptimizer, calls: Iterable[CallMetrics], parameters: set[int]
    ) -> Iterator[CallMetrics]:
        """Layers that no hook tells of: of compiled models, and of models that ran before they were watched."""
        record = self._fresh(root, stepper)
        if record is not None and record.calls and not root.silent:
            return
        seen = {id(call.layer) for call in calls}
        for layer, module, own in root.with_parameters():
            if id(layer) not in seen and layer.may_want(module) and not parameters.isdisjoint(map(id, own.values())):
                yield CallMetrics(layer, type(module).__name__, 0, None)

    def _losses_since(self, step: OptimizerStep) -> list[Tensor]:
        if self._losses_of >= step.stepper.since and self._losses:
            # a closure is called again and again for one step: the first time at the weights the step began with
            return self._losses[:1] if step.has_closure else self._losses
        if self._loss_output is not None and self._loss_output[0] >= step.stepper.since:
            return [self._loss_output[1]]
        return []


def _is_of(call: CallMetrics, elsewhere: Container[int] | None, own_ones: Container[int]) -> bool:
    """Whether a line of the step tells of this call: no other optimizer changes the layer.

    It may be that none does, by mistake. At an optimizer's first step that is not known: others may come after it.
    """
    module = call.layer.module
    own: Mapping[str, Tensor] = {} if module is None else own_parameters(module)
    if not any(p.requires_grad for p in own.values()) or any(id(p) in own_ones for p in own.values()):
        return True
    return elsewhere is not None and not any(id(p) in elsewhere for p in own.values())
