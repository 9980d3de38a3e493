"""Stop a training run at its first NaN or Inf, before it reaches the weights, and name the operation that made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookscope import gradients  # loaded at the first NaN: it imports torchvision, which a script may not want
from hookscope.errors import NonFiniteError
from hookscope.hooks import HookHandles, call_key, graph_nodes, is_leaf
from hookscope.training.loss_tap import is_backward_compiled, outside_modes
from hookscope.training.optimizers import Optimizers, TrackedOptimizer
from hookscope.training.output import RunProgress, WatcherOutput
from hookscope.training.reductions import is_finite, values_of
from hookscope.training.tracker import Layer, Pass, TrackedModel, own_parameters

_LOWER = "lower the learning rate, clip the gradients or look at the data of this step"
_ALL_FINITE = "the loss and all outputs are finite"
_CHANGED = "look at what changes the gradients before the step"


class StopRule:
    """Checks outputs of layers, the loss and the gradients, and raises at the first value that is not finite."""

    def __init__(self, run: RunProgress, output: WatcherOutput, optimizers: Optimizers) -> None:
        self._run, self._output, self._optimizers = run, output, optimizers
        self._nodes = HookHandles()
        self._origins: list[str] = []  # of each backward pass since the last step: what made NaN or Inf in it first

    def close(self) -> None:
        """Take the hooks off the graph of the last backward pass."""
        self._nodes.close()

    def raise_again(self) -> None:
        """Raise the error once more, if a script has caught it and goes on."""
        error = self._run.stopped
        if error is not None:
            if self._run.on_caught is not None:
                self._run.on_caught()
            raise NonFiniteError(error.asked, error.exists, error.do)

    def before_call(self, now: Pass, module: nn.Module, args: Any) -> None:
        if args and module is now.top() and now.is_fed_non_finite is None:
            now.is_fed_non_finite = bool(_not_finite(args))
        if getattr(module, "inplace", False) is True and (bad := _not_finite(args)):
            now.non_finite_inputs[id(module)] = gradients.made_by(bad[0])

    def after_call(
        self, now: Pass, layer: Layer, call: int, module: nn.Module, inputs: Any, output: Any, is_top: bool
    ) -> None:
        """Check the output: a bad value comes from a bad input, else from a bad parameter, else from the layer."""
        operation = now.non_finite_inputs.pop(id(module), None)
        bad_outputs = _not_finite(output) if layer.is_single(module) or is_top else []
        if not bad_outputs:
            return
        name, kind = call_key(layer.name, call) or "the model", type(module).__name__
        place = layer.place_in(now.running)
        name += "" if place == layer.name else f", called as {place},"
        bad_inputs = [] if operation is not None else _not_finite(inputs)
        if bad_inputs:
            operation = gradients.made_by(bad_inputs[0])
        if operation is not None:
            where = f"{_nan_or_inf(bad_inputs or bad_outputs)} in the input of {name} ({kind})"
            self._stop(where, operation, *_cause(operation, now.is_fed_non_finite), layer=layer.name, call=call)
        where = f"{_nan_or_inf(bad_outputs)} in the output of {name} ({kind})"
        for own, parameter in own_parameters(module).items():
            if not is_finite(parameter):
                why = f"{f'{layer.name}.{own}'.lstrip('.')} is not finite"
                self._stop(where, f"{own} of {name}", why, _LOWER, layer=layer.name, call=call)
        if is_leaf(module):
            self._stop(where, kind, "its input and its parameters are finite", _LOWER, layer=layer.name, call=call)
        operation = gradients.made_by(bad_outputs[0])
        self._stop(where, operation, *_cause(operation, now.is_fed_non_finite), layer=layer.name, call=call)

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        self.raise_again()
        bad = _not_finite(tuple(roots))
        if bad:
            operation = gradients.made_by(bad[0])
            self._stop(f"the loss is {_nan_or_inf(bad)}", operation, *_cause(operation))
        self._nodes.close()
        self._origins.append("")
        for node in graph_nodes(() if is_backward_compiled() else (root.grad_fn for root in roots)):
            self._nodes.node(node, partial(self._after_node, node.name()))

    def _after_node(self, name: str, made: Any, given: Any) -> None:
        with torch.no_grad(), outside_modes():
            if not self._origins[-1] and _not_finite(made) and not _not_finite(given):
                self._origins[-1] = gradients.operation_of_node(name)

    def before_step(
        self, tracked: TrackedOptimizer, optimizer: Optimizer, models: Sequence[TrackedModel], order: Mapping[int, int]
    ) -> None:
        """Check the gradients; the layer that ran last (by ``order``) comes first."""
        # with `found_inf`, a GradScaler leaves it to the optimizer to skip steps with gradients that are not finite
        if getattr(optimizer, "found_inf", None) is not None:
            return
        self._nodes.close()
        operation, self._origins = next(filter(None, reversed(self._origins)), ""), []
        for name, layer, parameter in _from_the_loss_on(tracked, models, order):
            if parameter.grad is not None and not is_finite(parameter.grad):
                where, place = f"{_nan_or_inf([parameter.grad])} in the gradient of {name}", name.rpartition(".")[0]
                why = f"{_ALL_FINITE}; made by the backward pass of {operation}" if operation else _ALL_FINITE
                do = f"keep the input of {operation} away from where its slope is infinite" if operation else _CHANGED
                self._stop(where, operation or "backward", why, do, place if layer is None else layer.name)

    def _stop(self, where: str, operation: str, why: str, do: str, layer: str = "", call: int = 0) -> NoReturn:
        """Raise the error; operations are types of layers, functions, ``weight of NAME``, ``input`` or ``backward``."""
        step = self._optimizers.all[0].steps if self._optimizers.all else 0
        error = NonFiniteError(f"step {step}: {where}", why, do)
        self._run.stopped = error
        self._output.note("non-finite", step, str(error), layer=layer, operation=operation, call=call)
        raise NonFiniteError(error.asked, error.exists, error.do)


def _from_the_loss_on(
    tracked: TrackedOptimizer, models: Sequence[TrackedModel], order: Mapping[int, int]
) -> list[tuple[str, Layer | None, Tensor]]:
    layers = [(layer, own) for model in models for layer, _, own in model.with_parameters()]
    named: dict[int, tuple[str, Layer | None, Tensor]] = {
        id(p): (f"{layer.name}.{name}".lstrip("."), layer, p) for layer, own in layers for name, p in own.items()
    }
    parameters = [named.get(id(p), (f"parameter {at}", None, p)) for at, p in enumerate(tracked.parameters())]
    return sorted(parameters, key=lambda pair: order.get(id(pair[1]), -1), reverse=True)


def _cause(operation: str, is_fed: bool | None = None) -> tuple[str, str]:
    """Where a value came from, and what people do about it; ``is_fed`` is of the inputs of the pass, see `Pass`."""
    if operation != "input":
        do = f"keep the input of {operation} in its range, or lower the learning rate"
        do += "; for the log of a softmax give log_softmax or cross_entropy" if operation == "log" else ""
        return f"made by {operation}", do
    if is_fed is False:
        why = "the input of the model is finite, so the model itself makes it"
        return why, "find-nan, in Python hookscope.find_non_finite, names the operation"
    why = "it comes from the data: the input of the model holds it" if is_fed else "it is in the data, or made of them"
    return why, "look at the data of this step" + ("" if is_fed else ", and at operations before the layer")


def _not_finite(value: Any) -> list[Tensor]:
    return [tensor for tensor in values_of(value) if not is_finite(tensor)]


def _nan_or_inf(tensors: Iterable[Tensor]) -> str:
    return "NaN" if any(bool(torch.isnan(t).any()) for t in tensors) else "Inf"
