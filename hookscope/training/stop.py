"""Stop a training run at its first NaN or Inf, before it reaches the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookscope import gradients
from hookscope.errors import NonFiniteError
from hookscope.training.non_finite import NonFinite, in_call, in_gradients, in_loss
from hookscope.training.optimizers import Optimizers, TrackedOptimizer
from hookscope.training.output import RunProgress, WatcherOutput
from hookscope.training.reductions import is_finite, values_of
from hookscope.training.tracker import Layer, Pass, TrackedModel


class StopRule:
    """Checks outputs of layers, the loss and the gradients, and raises at the first value that is not finite.

    Args:
        run: Its ``stopped`` becomes the error that was raised.
        output: It gets a note.
        optimizers: They know the number of the step.
    """

    def __init__(self, run: RunProgress, output: WatcherOutput, optimizers: Optimizers) -> None:
        self._run, self._output, self._optimizers = run, output, optimizers

    def raise_again(self) -> None:
        """Raise the error once more, if a script has caught it and goes on."""
        error = self._run.stopped
        if error is not None:
            raise NonFiniteError(error.asked, error.exists, error.do)

    def before_call(self, now: Pass, module: nn.Module, args: Any) -> None:
        """Check the input of a layer that will overwrite it."""
        if getattr(module, "inplace", False) is True:
            bad = next((tensor for tensor in values_of(args) if not is_finite(tensor)), None)
            if bad is not None:
                now.non_finite_inputs[id(module)] = gradients.made_by(bad)

    def after_call(
        self, now: Pass, layer: Layer, call: int, module: nn.Module, inputs: Any, output: Any, is_top: bool
    ) -> None:
        """Check the output of a single layer, and that of the model for operations after its last layer."""
        operation = now.non_finite_inputs.pop(id(module), None)
        if layer.is_single(module) or is_top:
            self._stop(in_call(layer, call, module, inputs, output, operation))

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        self.raise_again()
        self._stop(in_loss(roots))

    def before_step(
        self,
        tracked: TrackedOptimizer,
        optimizer: Optimizer,
        models: Sequence[TrackedModel],
        order: Mapping[int, int],
    ) -> None:
        """Check the gradients, those of the layer that ran last (by ``order``) first."""
        # with `found_inf`, a GradScaler leaves it to the optimizer to skip steps with gradients that are not finite
        if getattr(optimizer, "found_inf", None) is None:
            self._stop(in_gradients(_from_the_loss_on(tracked, models, order)))

    def _stop(self, found: NonFinite | None) -> None:
        if found is None:
            return
        step = self._optimizers.all[0].steps if self._optimizers.all else 0
        self._run.stopped = error = NonFiniteError(f"step {step}: {found.what}", found.why, found.do)
        fields = {"layer": found.layer, "operation": found.operation, "call": found.call}
        self._output.note("non-finite", step, str(error), **fields)
        self.raise_again()


def _from_the_loss_on(
    tracked: TrackedOptimizer, models: Sequence[TrackedModel], order: Mapping[int, int]
) -> dict[str, tuple[Layer | None, Tensor]]:
    named: dict[int, tuple[str, Layer | None, Tensor]] = {}
    for model in models:
        for layer, _, own in model.with_parameters():
            named.update({id(p): (f"{layer.name}.{name}".lstrip("."), layer, p) for name, p in own.items()})
    parameters = [named.get(id(p), (f"parameter {at}", None, p)) for at, p in enumerate(tracked.parameters())]
    parameters.sort(key=lambda each: order.get(id(each[1]), -1), reverse=True)
    return {name: (layer, p) for name, layer, p in parameters}
