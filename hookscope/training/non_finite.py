"""Find the first NaN or Inf of a training step, and the operation that made it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import call_key
from hookscope.training.modules import Layer, is_leaf, own_parameters
from hookscope.training.reductions import is_finite, values_of

# Nodes of the autograd graph that bring no NaN or Inf into finite values: they move them, or add a few up.
# fmt: off
_MOVES = frozenset((
    "alias", "as_strided", "cat", "clone", "contiguous", "copy_slices", "detach", "diagonal", "expand", "flatten",
    "flip", "gather", "index", "index_select", "masked_fill", "mean", "movedim", "narrow", "neg", "pad", "permute",
    "repeat", "reshape", "roll", "select", "slice", "split", "squeeze", "stack", "sum", "swapaxes", "t", "to_copy",
    "transpose", "unbind", "unfold", "unsafe_view", "unsqueeze", "view", "where",
))
# fmt: on
# With a number or an input, these make no NaN of values that are finite or Inf.
_NO_NAN = frozenset(("add", "mul", "rsub", "sub"))
_MOST_NODES = 50
_MOST_BEHIND = 200


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first value that is no finite number.

    Attributes:
        what: Where it was seen, such as ``the output of fc (Linear)``.
        why: What it was made from.
        do: What people do about it.
        operation: What made it: the type of a layer, the name of a function, ``weight of NAME``, ``input``,
            ``backward``.
        layer: The name of the layer, empty for the loss.
        call: Which call of it.
    """

    what: str
    why: str
    do: str
    operation: str
    layer: str = ""
    call: int = 0


_LOWER = "lower the learning rate, clip the gradients or look at the data of this step"


def in_call(
    layer: Layer, call: int, module: nn.Module, inputs: Any, output: Any, before: str | None
) -> NonFinite | None:
    """What is not finite in the output of a call, None when all of it is.

    It was made before the layer when its input is not finite already, else by its parameters, else by the layer.

    Args:
        layer: The layer.
        call: Which call of it.
        module: The module that has run.
        inputs: Its positional and named arguments.
        output: What it returned.
        before: For a layer that writes over its input, what made an input that was not finite; else None.
    """
    if all(map(is_finite, values_of(output))):
        return None
    name, kind = call_key(layer.name, call) or "the model", type(module).__name__
    bad = [] if before is not None else [t for t in values_of(inputs) if not is_finite(t)]
    if before is not None or bad:
        made = made_by(bad[0]) if before is None else before
        what = f"{_spelt(bad or values_of(output))} in the input of {name} ({kind})"
        return NonFinite(what, *_before(made), made, layer.name, call)
    what = f"{_spelt(values_of(output))} in the output of {name} ({kind})"
    for own, parameter in own_parameters(module).items():
        if not is_finite(parameter):
            path = f"{layer.name}.{own}".lstrip(".")
            return NonFinite(what, f"{path} is not finite", _LOWER, f"{own} of {name}", layer.name, call)
    if not is_leaf(module):
        made = made_by(next(t for t in values_of(output) if not is_finite(t)))
        return NonFinite(what, *_before(made), made, layer.name, call)
    return NonFinite(what, "its input and its parameters are finite", _LOWER, kind, layer.name, call)


def in_loss(roots: Iterable[Tensor]) -> NonFinite | None:
    """What is not finite in what ``backward`` is called on, None when all of it is."""
    bad = [t for t in values_of(tuple(roots)) if not is_finite(t)]
    if not bad:
        return None
    made = made_by(bad[0])
    return NonFinite(f"the loss is {_spelt(bad)}", *_before(made), made)


def in_gradients(parameters: Mapping[str, tuple[Layer | None, Tensor]]) -> NonFinite | None:
    """The first of ``parameters`` (the nearest to the loss first) whose gradient is not finite, None without one."""
    for name, (layer, parameter) in parameters.items():
        if parameter.grad is not None and not is_finite(parameter.grad):
            what = f"{_spelt([parameter.grad])} in the gradient of {name}"
            why = "the loss and what the layers put out are finite"
            path = name.rpartition(".")[0] if layer is None else layer.name
            return NonFinite(what, why, "torch.autograd.set_detect_anomaly(True) tells the operation", "backward", path)
    return None


def made_by(tensor: Tensor) -> str:
    """The operation that made the values of ``tensor`` that are not finite, as far as the autograd graph tells.

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
        if node is None or node.name().endswith("AccumulateGrad"):
            return name
        name, last = _function(node.name()), node
        node = _cause(node, name, is_nan)
        if node is None and name in _NO_NAN | _MOVES:  # of several things that came together here, one brought it
            return _guilty_behind(last) or name
    return name


def _guilty_behind(node: Any) -> str | None:
    """The nearest operation behind ``node`` that makes NaN or Inf of what it was given, None where there is none."""
    waiting, seen = [node], {node}
    while waiting and len(seen) <= _MOST_BEHIND:
        for parent, _ in waiting.pop(0).next_functions:
            if parent is None or parent in seen:
                continue
            if _makes_non_finite(parent):
                return _function(parent.name())
            seen.add(parent)
            waiting.append(parent)
    return None


def _makes_non_finite(node: Any) -> bool:
    """Whether the function that made the node, called again on what it was given, makes NaN or Inf of finite values."""
    function = getattr(torch, _function(node.name()), None)
    given = []
    for saved in ("_saved_self", "_saved_other", "_saved_exponent"):
        if not _is_saved_finite(node, saved):
            return False
        with contextlib.suppress(RuntimeError, AttributeError):
            given.append(getattr(node, saved))
    if function is None or not given or not isinstance(given[0], torch.Tensor):
        return False
    try:
        with torch.no_grad():
            return not all(map(is_finite, values_of(function(*given))))
    except (RuntimeError, TypeError, ValueError):  # it takes something that was not saved
        return False


def _cause(node: Any, name: str, is_nan: bool) -> Any:
    """The node whose result was not finite already, None where this one made it or nobody knows."""
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    only = parents[0] if len(parents) == 1 and not _is_leaf_node(parents[0]) else None
    if name in _MOVES:
        return only
    for at, saved in enumerate(("_saved_self", "_saved_other")):
        if at < len(node.next_functions) and not _is_saved_finite(node, saved):
            parent = node.next_functions[at][0]
            return None if parent is None or _is_leaf_node(parent) else parent
    return only if is_nan and name in _NO_NAN else None


def _is_leaf_node(node: Any) -> bool:
    return bool(node.name().endswith("AccumulateGrad"))


def _is_saved_finite(node: Any, name: str) -> bool:
    try:
        saved = getattr(node, name, None)
    except RuntimeError:  # written over since, or freed
        return True
    return all(map(is_finite, values_of(saved)))


def _function(name: str) -> str:
    """``LogBackward0`` as ``log``, ``torch::autograd::CopySlices`` as ``copy_slices``.

    Example:
        >>> _function("NativeBatchNormBackward0")
        'native_batch_norm'
    """
    plain = re.sub(r"Backward\d*$", "", name.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower() or name


def _before(made: str) -> tuple[str, str]:
    if made == "input":
        return "it was not computed: it came so", "look at the data of this step"
    return f"made by {made}", f"keep what {made} is given in its range, or lower the learning rate"


def _spelt(tensors: Iterable[Tensor]) -> str:
    """``NaN`` or ``Inf``, whichever there is."""
    return "NaN" if any(bool(torch.isnan(t).any()) for t in tensors) else "Inf"
