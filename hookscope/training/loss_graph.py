"""What the graph of the backward pass shows of a loss: its function, and what the script divides it by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks import as_float, graph_nodes

SCALE = "hookscope.scale"
"""The key of the scale of a ``GradScaler`` in the metadata of the node that multiplies by it."""

_MEAN, _SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
_MOST_NODES = 64
_MOST_FACTORS = 8  # by which a script divides a loss
_SUMS_TO_1 = 1e-2  # rounding of half precision
# Operations that keep the values, and the class of each
_SHAPES = (
    "View", "Reshape", "Unsafe", "Squeeze", "Unsqueeze", "Transpose", "Permute", "TBackward", "Clone", "ToCopy",
    "Select", "Slice", "Alias", "Index", "Gather",
)  # fmt: skip
_MEANS = ("Mean", "Sum", "Mul", "Div")
_SIGNS = ("Neg", "Rsub")  # -loss and 0 - loss
_LOSSES = {
    "NllLoss": "nll_loss",
    "NllLoss2D": "nll_loss",
    "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits",
    "BinaryCrossEntropy": "binary_cross_entropy",
    "MseLoss": "mse_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "LogSoftmax": "cross_entropy",
}


def loss_facts(roots: Sequence[Tensor]) -> dict[str, Any]:
    """The loss function, what feeds it, and its targets; saved tensors that a hook must fetch are left alone."""
    nodes = [root.grad_fn for root in roots]
    facts: dict[str, Any] = {"loss_without_graph": all(node is None for node in nodes)}
    for node in islice(graph_nodes(nodes), _MOST_NODES):
        facts |= _divergence(node) | _soft_targets(node) | _overlap(node)
        if _name(node) == "Log" and _name(before := _before(node)) in ("Softmax", "Sigmoid"):
            facts["log_input"] = _name(before)
        if _name(node) == "Sqrt" and (root := _saved(node, "result")) is not None and (root == 0).any():
            facts["made_by"] = "the slope of sqrt at 0"
        if "loss_shapes" in facts or ("loss_function" in facts and "target_size" not in facts):
            continue
        if pairs := _pairs(node):
            facts["loss_shapes"] = pairs
        elif _name(node) in _LOSSES and "loss_function" not in facts:
            sign = _sign(nodes[0], node) if len(nodes) == 1 else 0
            facts |= _loss(node) | {"loss_negated": sign < 0, "loss_alone": sign != 0}
            facts["loss_is_mean"] = _is_mean(nodes, node)
    return facts


def _is_mean(roots: Sequence[Any], node: Any) -> bool:
    """Whether the loss is what a loss function returned as a mean, apart from the scale of a ``GradScaler``."""
    scaled = [root.next_functions[0][0] if root is not None and SCALE in root.metadata else root for root in roots]
    return scaled == [node] and getattr(node, "_saved_reduction", None) == _MEAN


def _divergence(node: Any) -> dict[str, Any]:
    """What feeds ``F.kl_div``, if this is the difference in it: target * log(target) - target * input."""
    parts = [each for each, _ in node.next_functions]
    product = parts[-1] if _name(node) == "Sub" and parts[0] is None else None
    target = _saved(product, "self") if product is not None and _name(product) == "Mul" else None
    if target is None or target.dim() < 2 or target.shape[-1] < 2 or ((target.sum(-1) - 1).abs() > _SUMS_TO_1).any():
        return {}
    before = _before(product, 1)
    return {"kl_div_input": None if before is None else _name(before)}


def _overlap(node: Any) -> dict[str, Any]:
    """What feeds a Dice loss or the like: a sum over targets of 0 and 1 is divided by a sum over the same input."""
    parts = [part for part, _ in node.next_functions]
    if _name(node) != "Div" or len(parts) != 2 or None in parts:
        return {}
    over, under = ([*islice(graph_nodes([part]), _MOST_NODES)] for part in parts)
    squares = [part for part in under if _name(part) == "Pow" or part.next_functions[:1] == part.next_functions[1:]]
    bounded = [None, *map(_before, squares)]  # with squares the quotient stays between 0 and 2
    totals = (_before(total) for total in over if _name(total) in ("Sum", "Mean"))
    for product in (before for before in totals if _name(before) == "Mul"):
        place = 0 if (target := _saved(product, "other")) is not None else 1
        target, made = target if place == 0 else _saved(product, "self"), _before(product, place)
        if target is not None and made in under and made not in bounded and ((target == 0) | (target == 1)).all():
            return {"overlap_input": _name(made)}
    return {}


def _soft_targets(node: Any) -> dict[str, Any]:
    """The largest sum over the classes, if this is the sum in ``F.cross_entropy`` with probabilities as targets."""
    product = node.next_functions[0][0] if str(node.name()) == "SumBackward0" else None
    softmax = product.next_functions[0][0] if product is not None and _name(product) == "Mul" else None
    target = _saved(product, "other") if _name(softmax) == "LogSoftmax" else None
    dim = -1 if target is None else _dim(softmax)
    return {} if target is None or dim >= target.dim() else {"soft_target_sum": target.sum(dim).amax()}


def _dim(softmax: Any) -> int:
    """The dimension of a softmax, from 0; torch saves a signed number, and returns it as an unsigned one."""
    dim = int(softmax._saved_dim)
    dim -= 2**64 if dim >= 2**63 else 0
    result = _saved(softmax, "result")
    return dim if dim >= 0 or result is None else dim + result.dim()


def _pairs(node: Any) -> list[list[int]]:
    """The shapes of outputs ``(N, 1)`` and targets ``(N,)`` whose difference is ``(N, N)``; empty for other nodes."""
    before = [each for each, _ in node.next_functions if each is not None]
    if _name(node) not in ("Sub", "Rsub", "Expand") or len(before) != 1:  # a difference of outputs is meant
        return []
    (made, *_), (given, *_) = ([list(part.shape) for part in each._input_metadata] or [[]] for each in (node, *before))
    return [given, made[1:]] if len(made) == 2 and made[0] == made[1] > 1 and given == [made[0], 1] else []


def _loss(node: Any) -> dict[str, Any]:
    name, facts = _LOSSES[_name(node)], _targets(node)
    before, is_sum = _before(node), getattr(node, "_saved_reduction", None) == _SUM
    if name == "nll_loss":
        values = _saved(node, "self")
        facts |= {"loss_input_max": values.amax()} if values is not None and values.numel() else {}
        if before is not None and _name(before) == "LogSoftmax":
            direct = node.next_functions[0][0] is before
            node, name, before = before, "cross_entropy", _before(before)
            if direct and (dim := _dim(node)) != 1 and (len(node._input_metadata[0].shape) > 1):
                facts["softmax_dim"] = dim
    if name == "cross_entropy" and not is_sum:  # a sum has no usual size
        result = _saved(node, "result")
        if result is not None and result.dim() > 1:
            facts["classes"] = result.shape[1 if result.dim() != 3 else node._saved_dim]
    return facts | {"loss_function": name, "loss_input": None if before is None else _name(before)}


def _targets(node: Any) -> dict[str, Any]:
    """The extremes of the targets; of classes their number, of other numbers their root mean square."""
    target = _saved(node, "target")
    if target is None or not target.numel():
        return {}
    if target.is_floating_point():
        size = as_float(target).square().mean().sqrt()
        return {"target_size": size, "target_lowest": target.amin(), "target_highest": target.amax()}
    ignored = node._saved_ignore_index  # a signed number, read as an unsigned one
    classes = target[target != (ignored - 2**64 if ignored >= 2**63 else ignored)]
    if not classes.numel():
        return {"targets": 0}
    if target.dim() != 1:  # of pixels the classes of a batch say little
        return {}
    return {"targets": classes.numel(), "target_min": classes.amin(), "target_max": classes.amax()}


def _saved(node: Any, name: str) -> Tensor | None:
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None or getattr(saved, "unpack_hook", None) is not None:
        return None
    value = getattr(node, f"_saved_{name}")
    return value.detach() if isinstance(value, torch.Tensor) else None


def _sign(node: Any, loss: Any) -> int:
    """1 if nothing but signs, means and factors lies between the root and the loss function, -1 if they turn it around.

    Else 0. Log-probabilities are the negative of a loss.
    """
    sign = -1 if _name(loss) == "LogSoftmax" else 1
    for _ in range(_MOST_FACTORS):
        if node is loss or node is None:
            return sign if node is loss else 0
        name, factor = _name(node), _factor(node)
        weights = _saved(node, "other") if name == "Mul" and not factor else None
        if not name.startswith((*_SIGNS, *_MEANS, *_SHAPES)) or (weights is not None and weights.amin() < 0):
            return 0
        sign *= -1 if name in _SIGNS or factor < 0 else 1
        node = node.next_functions[0][0]
    return 0


def _before(node: Any, place: int = 0) -> Any:
    """The operation that made the input at ``place``, beyond those that only change its shape or its type."""
    for step in range(_MOST_NODES):
        node = node.next_functions[0 if step else place][0] if node.next_functions else None
        if node is None or not node.name().startswith(_SHAPES):
            return node
    return None


def _name(node: Any) -> str:
    return "" if node is None else str(node.name()).rpartition("::")[2].partition("Backward")[0]


def divisor_of(roots: Sequence[Tensor]) -> float:
    """The number by which a script divides the only one of ``roots``, apart from the scale of a ``GradScaler``.

    Infinity where it divides a sum over samples, so that the losses of all passes add up to the mean over the step.
    """
    node: Any = roots[0].grad_fn if len(roots) == 1 else None
    divisor = 1.0
    for _ in range(_MOST_FACTORS):
        if node is None or (SCALE not in node.metadata and not (factor := _factor(node))):
            break
        divisor *= 1.0 if SCALE in node.metadata else abs(factor)
        node = node.next_functions[0][0]
    if divisor != 1.0 and getattr(node, "_saved_reduction", None) == _SUM:
        return math.inf
    return round(divisor, 6)


def _factor(node: Any) -> float:
    """The number on the CPU by which a node divides; 0 for a node that does something else."""
    if node.name() not in ("DivBackward0", "MulBackward0") or node.next_functions[0][0] is None:
        return 0.0
    try:
        other = node._saved_other
    except RuntimeError:  # an earlier backward pass has freed it
        return 0.0
    if other is None or other.numel() != 1 or other.device.type != "cpu" or other.is_complex() or not other:
        return 0.0
    return float(other) if node.name() == "DivBackward0" else 1 / float(other)
