"""Stop a training run at its first NaN or Inf, before it reaches the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookscope.errors import NonFiniteError
from hookscope.training.modules import Layer, Root
from hookscope.training.non_finite import NonFinite, in_call, in_gradients, in_loss, made_by
from hookscope.training.optimizers import Optimizers, TrackedOptimizer
from hookscope.training.output import WatcherOutput
from hookscope.training.passes import Pass
from hookscope.training.reductions import is_finite, values_of


class StopRule:
    """Judges what layers put out, the loss and the gradients, and raises at the first value that is not finite.

    Args:
        output: Where it is noted.
        optimizers: They tell which step it is.

    Attributes:
        raised: What was raised, None before that.
    """

    def __init__(self, output: WatcherOutput, optimizers: Optimizers) -> None:
        self._output, self._optimizers = output, optimizers
        self.raised: NonFiniteError | None = None

    def again(self) -> None:
        """Raise once more, where a script has swallowed it and goes on."""
        if self.raised is not None:
            raise NonFiniteError(self.raised.asked, self.raised.exists, self.raised.do)

    def before_call(self, now: Pass, module: nn.Module, args: Any) -> None:
        """Look at the input of a layer that will write over it."""
        if getattr(module, "inplace", False) is not True:
            return
        bad = next((tensor for tensor in values_of(args) if not is_finite(tensor)), None)
        if bad is not None:
            now.spoilt[id(module)] = made_by(bad)

    def after_call(
        self, now: Pass, layer: Layer, call: int, module: nn.Module, inputs: Any, output: Any, is_top: bool
    ) -> None:
        """Judge what a layer has put out; of blocks only the outermost, for what is done after its last layer."""
        spoilt = now.spoilt.pop(id(module), None)
        if layer.is_single(module) or is_top:
            self._stop(in_call(layer, call, module, inputs, output, spoilt))

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Judge the loss."""
        self.again()
        self._stop(in_loss(roots))

    def before_step(
        self, stepper: TrackedOptimizer, optimizer: Optimizer, roots: Sequence[Root], ran: Mapping[int, int]
    ) -> None:
        """Judge the gradients; ``ran`` tells by ``id`` of a layer when it ran last."""
        # a GradScaler may leave it to the optimizer to make no step of gradients that are not finite
        if getattr(optimizer, "found_inf", None) is None:
            self._stop(in_gradients(_nearest_the_loss(stepper, roots, ran)))

    def _stop(self, found: NonFinite | None) -> None:
        if found is None:
            return
        step = self._optimizers.all[0].steps if self._optimizers.all else 0
        self.raised = NonFiniteError(f"step {step}: {found.what}", found.why, found.do)
        about = {"layer": found.layer, "operation": found.operation, "call": found.call}
        self._output.note("non-finite", step, str(self.raised), **about)
        self.again()


def _nearest_the_loss(
    stepper: TrackedOptimizer, roots: Sequence[Root], ran: Mapping[int, int]
) -> dict[str, tuple[Layer | None, Tensor]]:
    """The parameters of an optimizer by name, those of the layer that ran last first."""
    named: dict[int, tuple[str, Layer | None, Tensor]] = {}
    for root in roots:
        for layer, _, own in root.with_parameters():
            named.update({id(p): (f"{layer.name}.{name}".lstrip("."), layer, p) for name, p in own.items()})
    found = [named.get(id(p), (f"parameter {at}", None, p)) for at, p in enumerate(stepper.parameters())]
    found.sort(key=lambda each: ran.get(id(each[1]), -1), reverse=True)
    return {name: (layer, p) for name, layer, p in found}
