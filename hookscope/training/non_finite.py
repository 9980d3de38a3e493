"""Find the first NaN or Inf of a training step, and the operation that made it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import call_key
from hookscope.training.reductions import is_finite, values_of
from hookscope.training.tracker import Layer, is_leaf, own_parameters

# Operations that make no NaN or Inf of finite values: they move values, or add a few of them up.
# fmt: off
_MOVES = frozenset((
    "alias", "as_strided", "cat", "clone", "contiguous", "copy_slices", "detach", "diagonal", "expand", "flatten",
    "flip", "gather", "index", "index_select", "masked_fill", "mean", "movedim", "narrow", "neg", "pad", "permute",
    "repeat", "reshape", "roll", "select", "slice", "split", "squeeze", "stack", "sum", "swapaxes", "t", "to_copy",
    "transpose", "unbind", "unfold", "unsafe_view", "unsqueeze", "view", "where",
))
# fmt: on
_NO_NAN = frozenset(("add", "mul", "rsub", "sub"))  # with a number or an input: no NaN of finite values or Inf
# Operations whose autograd nodes save all arguments: run again, they show whether they made NaN or Inf.
_REPEATABLE: dict[str, Callable[..., Tensor]] = {
    "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin, "atanh": torch.atanh, "cosh": torch.cosh,
    "digamma": torch.digamma, "div": torch.div, "lgamma": torch.lgamma, "log": torch.log, "log10": torch.log10,
    "log1_p": torch.log1p, "log2": torch.log2, "mul": torch.mul, "pow": torch.pow, "sinh": torch.sinh,
    "xlogy": torch.xlogy,
}  # fmt: skip
_MOST_NODES = 50
_MOST_BEHIND = 200
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
        operation = made_by(bad_inputs[0]) if before is None else before
        what = f"{_nan_or_inf(bad_inputs or bad_outputs)} in the input of {name} ({kind})"
        return NonFinite(what, *_cause(operation), operation, layer.name, call)
    what = f"{_nan_or_inf(bad_outputs)} in the output of {name} ({kind})"
    for own, parameter in own_parameters(module).items():
        if not is_finite(parameter):
            path = f"{layer.name}.{own}".lstrip(".")
            return NonFinite(what, f"{path} is not finite", _LOWER, f"{own} of {name}", layer.name, call)
    if not is_leaf(module):
        operation = made_by(bad_outputs[0])
        return NonFinite(what, *_cause(operation), operation, layer.name, call)
    return NonFinite(what, "its input and its parameters are finite", _LOWER, kind, layer.name, call)


def in_loss(roots: Iterable[Tensor]) -> NonFinite | None:
    """A NaN or Inf in the tensors that ``backward`` starts at, None if all are finite."""
    bad = [t for t in values_of(tuple(roots)) if not is_finite(t)]
    if not bad:
        return None
    operation = made_by(bad[0])
    return NonFinite(f"the loss is {_nan_or_inf(bad)}", *_cause(operation), operation)


def in_gradients(parameters: Mapping[str, tuple[Layer | None, Tensor]]) -> NonFinite | None:
    """The first of ``parameters`` whose gradient is not finite, None if all are finite."""
    for name, (layer, parameter) in parameters.items():
        if parameter.grad is not None and not is_finite(parameter.grad):
            what = f"{_nan_or_inf([parameter.grad])} in the gradient of {name}"
            why, do = (
                "the loss and all outputs are finite",
                "torch.autograd.set_detect_anomaly(True) names the operation",
            )
            return NonFinite(what, why, do, "backward", name.rpartition(".")[0] if layer is None else layer.name)
    return None


def made_by(tensor: Tensor) -> str:
    """The operation that made the NaN or Inf in ``tensor``, as far as its autograd graph shows.

    Example:
        >>> import torch
        >>> made_by(torch.zeros(2, requires_grad=True).log().reshape(2, 1).sum())
        'log'
        >>> x = torch.zeros(2, requires_grad=True)
        >>> made_by(((x + 1) + x.log() * 0).sum())
        'log'
        >>> made_by(torch.full((2,), float("nan")))
        'input'
    """
    node, name, is_nan = tensor.grad_fn, "input", bool(torch.isnan(tensor).any())
    for _ in range(_MOST_NODES):
        if node is None or _is_leaf_node(node):
            return name
        name, last = operation_name(node.name()), node
        node = _non_finite_parent(node, name, is_nan)
        if node is None and name in _NO_NAN | _MOVES:  # one of several parents brought it
            return _search_behind(last) or name
    return name


def _search_behind(node: Any) -> str | None:
    """The nearest operation behind ``node`` that makes NaN or Inf of finite arguments, breadth first."""
    waiting, visited = [node], {node}
    while waiting and len(visited) <= _MOST_BEHIND:
        for parent, _ in waiting.pop(0).next_functions:
            if parent is None or parent in visited:
                continue
            if _makes_non_finite(parent):
                return operation_name(parent.name())
            visited.add(parent)
            waiting.append(parent)
    return None


def _makes_non_finite(node: Any) -> bool:
    """Whether the operation, run again on its saved arguments, makes NaN or Inf of finite values."""
    function = _REPEATABLE.get(operation_name(node.name()))
    if function is None:
        return False
    arguments = []
    for name in ("_saved_self", "_saved_other", "_saved_exponent"):
        if not _is_saved_finite(node, name):
            return False
        with contextlib.suppress(RuntimeError, AttributeError):
            arguments.append(getattr(node, name))
    if not arguments or not isinstance(arguments[0], torch.Tensor):
        return False
    try:
        with torch.no_grad():
            return not all(map(is_finite, values_of(function(*arguments))))
    except (RuntimeError, TypeError, ValueError):  # an argument was not saved
        return False


def _non_finite_parent(node: Any, name: str, is_nan: bool) -> Any:
    """The node whose result was not finite already; None if this node made it, or nothing shows where it came from."""
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    only = parents[0] if len(parents) == 1 and not _is_leaf_node(parents[0]) else None
    if name in _MOVES:
        return only
    for (parent, _), saved in zip(node.next_functions, ("_saved_self", "_saved_other"), strict=False):
        if not _is_saved_finite(node, saved):
            return None if parent is None or _is_leaf_node(parent) else parent
    return only if is_nan and name in _NO_NAN else None


def _is_leaf_node(node: Any) -> bool:
    return bool(node.name().endswith("AccumulateGrad"))


def _is_saved_finite(node: Any, name: str) -> bool:
    try:
        saved = getattr(node, name, None)
    except RuntimeError:  # overwritten since, or freed
        return True
    return all(map(is_finite, values_of(saved)))


def operation_name(node: str) -> str:
    """The operation of an autograd node by its name: ``torch::autograd::CopySlices`` is ``copy_slices``.

    Example:
        >>> operation_name("NativeBatchNormBackward0")
        'native_batch_norm'
    """
    plain = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower() or node


def _cause(operation: str) -> tuple[str, str]:
    if operation == "input":
        return "it comes from the data", "look at the data of this step"
    return f"made by {operation}", f"keep the input of {operation} in its range, or lower the learning rate"


def _nan_or_inf(tensors: Iterable[Tensor]) -> str:
    return "NaN" if any(bool(torch.isnan(t).any()) for t in tensors) else "Inf"
