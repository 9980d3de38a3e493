"""Find the first NaN or Inf of a training step, and the operation that made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope import gradients  # loaded at the first NaN: it imports torchvision, which a script may not want
from hookscope.hooks import call_key
from hookscope.training.reductions import is_finite, values_of
from hookscope.training.tracker import Layer, is_leaf, own_parameters

_LOWER = "lower the learning rate, clip the gradients or look at the data of this step"


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first NaN or Inf.

    Attributes:
        what: Where it was seen, such as ``NaN in the output of fc (Linear)``.
        why: Where it came from.
        do: What people do about it.
        operation: The type of a layer, the name of a function, ``weight of NAME``, ``input`` or ``backward``.
        layer: The name of the layer, empty for the loss.
        call: The number of its call.
    """

    what: str
    why: str
    do: str
    operation: str
    layer: str = ""
    call: int = 0


def in_call(
    layer: Layer, call: int, module: nn.Module, inputs: Any, output: Any, before: str | None
) -> NonFinite | None:
    """The first NaN or Inf in the output of a call, None if the output is finite.

    It comes from before the layer if an input is not finite, else from its parameters, else from the layer.

    Args:
        layer: The layer.
        call: The number of its call.
        module: The module that has run.
        inputs: Its positional and named arguments.
        output: What it returned.
        before: For a layer that overwrites its input, the operation that made a non-finite input; else None.
    """
    bad_outputs = [t for t in values_of(output) if not is_finite(t)]
    if not bad_outputs:
        return None
    name, kind = call_key(layer.name, call) or "the model", type(module).__name__
    bad_inputs = [] if before is not None else [t for t in values_of(inputs) if not is_finite(t)]
    if before is not None or bad_inputs:
        operation = gradients.made_by(bad_inputs[0]) if before is None else before
        what = f"{_nan_or_inf(bad_inputs or bad_outputs)} in the input of {name} ({kind})"
        return NonFinite(what, *_cause(operation), operation, layer.name, call)
    what = f"{_nan_or_inf(bad_outputs)} in the output of {name} ({kind})"
    for own, parameter in own_parameters(module).items():
        if not is_finite(parameter):
            path = f"{layer.name}.{own}".lstrip(".")
            return NonFinite(what, f"{path} is not finite", _LOWER, f"{own} of {name}", layer.name, call)
    if not is_leaf(module):
        operation = gradients.made_by(bad_outputs[0])
        return NonFinite(what, *_cause(operation), operation, layer.name, call)
    return NonFinite(what, "its input and its parameters are finite", _LOWER, kind, layer.name, call)


def in_loss(roots: Iterable[Tensor]) -> NonFinite | None:
    """A NaN or Inf in the tensors that ``backward`` starts at, None if all are finite."""
    bad = [t for t in values_of(tuple(roots)) if not is_finite(t)]
    if not bad:
        return None
    operation = gradients.made_by(bad[0])
    return NonFinite(f"the loss is {_nan_or_inf(bad)}", *_cause(operation), operation)


def in_gradients(parameters: Mapping[str, tuple[Layer | None, Tensor]]) -> NonFinite | None:
    """The first of ``parameters`` whose gradient is not finite, None if all are finite."""
    for name, (layer, parameter) in parameters.items():
        if parameter.grad is not None and not is_finite(parameter.grad):
            what = f"{_nan_or_inf([parameter.grad])} in the gradient of {name}"
            why, do = "the loss and all outputs are finite", "torch.autograd.set_detect_anomaly(True) names it"
            return NonFinite(what, why, do, "backward", name.rpartition(".")[0] if layer is None else layer.name)
    return None


def _cause(operation: str) -> tuple[str, str]:
    if operation == "input":
        return "it comes from the data", "look at the data of this step"
    return f"made by {operation}", f"keep the input of {operation} in its range, or lower the learning rate"


def _nan_or_inf(tensors: Iterable[Tensor]) -> str:
    return "NaN" if any(bool(torch.isnan(t).any()) for t in tensors) else "Inf"
