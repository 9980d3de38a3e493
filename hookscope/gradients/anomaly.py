"""The operation behind the first NaN or Inf: `first_anomaly` watches a pass, `made_by` reads a graph afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.gradients.autograd_flow import node_of, refuse_reentrant_checkpoints
from hookscope.hooks import (
    UNKNOWN,
    Anomaly,
    HookHandles,
    NonFiniteSearch,
    differentiable,
    graph_nodes,
    kinds_of,
    leaf_tensors,
    leaves_of,
    passed_on,
    tensors_in,
)
from hookscope.scores import LossLike, as_loss

# Operations that make no NaN or Inf of finite values: they move values, or add a few of them.
# fmt: off
_MOVES = frozenset((
    "alias", "as_strided", "cat", "clone", "contiguous", "copy_slices", "detach", "diagonal", "expand", "flatten",
    "flip", "gather", "index", "index_select", "masked_fill", "mean", "movedim", "narrow", "neg", "pad", "permute",
    "repeat", "reshape", "roll", "select", "slice", "split", "squeeze", "stack", "sum", "swapaxes", "t", "to_copy",
    "transpose", "unbind", "unfold", "unsafe_view", "unsqueeze", "view", "where",
))
# fmt: on
_NO_NAN = frozenset(("add", "mul", "rsub", "sub"))  # make no NaN of finite values or Inf
# Operations whose autograd nodes save all arguments: run again, they show whether they made NaN or Inf.
_REPEATABLE: dict[str, Callable[..., Tensor]] = {
    "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin, "atanh": torch.atanh, "cosh": torch.cosh,
    "digamma": torch.digamma, "div": torch.div, "lgamma": torch.lgamma, "log": torch.log, "log10": torch.log10,
    "log1_p": torch.log1p, "log2": torch.log2, "mul": torch.mul, "pow": torch.pow, "sinh": torch.sinh,
    "xlogy": torch.xlogy,
}  # fmt: skip
_MOST_NODES = 50
_MOST_BEHIND = 200


def first_anomaly(model: nn.Module, inputs: Any, loss: LossLike = None) -> Anomaly | None:
    """The operation behind the first NaN or Inf of one forward and backward pass; None if all values are finite.

    It is the first operation or node that makes NaN of values without NaN. Inf alone counts only in the loss or in a
    gradient, because masks contain Inf. The arguments and errors are as in `layer_gradients`.
    """
    loss = as_loss(loss)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with differentiable(model):
        leaves = leaves_of(inputs)
        search = _AnomalySearch(model, leaves)
        with search:
            output = model(*passed_on(leaves))
        value = loss.of(output, type(model).__name__)[0]
        forward = search.forward_anomaly(value, output)
        if forward is not None or not value.requires_grad:
            return forward
        refuse_reentrant_checkpoints(model, value)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return search.backward_anomaly(value, trained + leaf_tensors(leaves))


class _AnomalySearch(NonFiniteSearch):
    """Tests the result of every operation inside a ``with`` block, then of every node of the autograd graph."""

    def __init__(self, model: nn.Module, leaves: Any) -> None:
        super().__init__(model, leaves)
        self._origins: dict[Any, Anomaly] = {}  # by node of the autograd graph

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # nodes of custom functions do not belong to this operation
        self._note_nodes(tensors_in((args, kwargs)).values(), self._here(located=False))
        result = super().__torch_function__(func, types, args, kwargs)
        results = [tensor for value in (result, args[:1]) for tensor in tensors_in(value).values()]
        if any(tensor.requires_grad for tensor in results):
            self._note_nodes(results, self._here(func))
        return result

    def forward_anomaly(self, value: Tensor, output: Any) -> Anomaly | None:
        """The anomaly of the forward pass; an Inf only counts if the loss ``value`` of ``output`` is not finite."""
        if value.requires_grad:
            self._note_nodes([value], Anomaly("forward", "NaN", "", "", ""))
        if self.nan is not None:
            return self.nan
        kinds = kinds_of([value])
        kind = next((kind for kind in ("NaN", "Inf") if kinds[kind]), None)
        if kind is None:
            return None
        spoiled = kinds_of(tensors_in(output).values())[kind]
        at_end, source = ("the output", UNKNOWN) if spoiled else ("the loss", "")
        return self._inf(spoiled) or Anomaly("forward", kind, at_end, "", "", source)

    def _inf(self, tensors: Sequence[Tensor] = ()) -> Anomaly | None:
        """The origin of the Inf in ``tensors``, else the first that no mask explains."""
        known = self.origin_of_inf(tensors)
        return known or min(self.infinite, key=lambda origin: origin.deliberate, default=None)

    def backward_anomaly(self, value: Tensor, leaves: Sequence[Tensor]) -> Anomaly | None:
        self.infinite = []
        with HookHandles() as handles:
            for node, origin in list(self._origins.items()):
                here = replace(origin, phase="backward", operation=node.name(), forward=origin.operation)
                handles.node(node, partial(self._test_node, here))
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        if self.nan is not None:
            return self.nan
        # a NaN without an origin is the sum of Inf and -Inf from two paths
        return None if _is_finite([gradient for gradient in gradients if gradient is not None]) else self._inf()

    def _test_node(self, here: Anomaly, input_gradients: Any, output_gradients: Any) -> None:
        self._test(list(tensors_in(input_gradients).values()), list(tensors_in(output_gradients).values()), here)

    def _note_nodes(self, tensors: Iterable[Tensor], origin: Anomaly) -> None:
        waiting = [node_of(tensor) for tensor in tensors if tensor.requires_grad]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self._origins:
                self._origins[node] = origin
                waiting += [before for before, _ in node.next_functions]

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # nodes of custom functions only appear here
        self._note_nodes(tensors_in(output).values(), self._here(located=False))
        super()._after(module, args, kwargs, output)


def _is_finite(value: Any) -> bool:
    return not any(kinds_of(tensors_in(value).values()).values())


def made_by(tensor: Tensor) -> str:
    """The operation that made the NaN or Inf in ``tensor``, or ``input``, as far as its autograd graph shows.

    Values that the graph saved are tested, and operations that save all their arguments run once more.

    Example:
        >>> import torch
        >>> x = torch.zeros(2, requires_grad=True)
        >>> made_by(((x + 1) + x.log() * 0).sum()), made_by(torch.full((2,), float("nan")))
        ('log', 'input')
    """
    node, name, is_nan = tensor.grad_fn, "input", bool(torch.isnan(tensor).any())
    for _ in range(_MOST_NODES):
        if node is None or _is_leaf_node(node):
            return name
        name, last = operation_of_node(node.name()), node
        if name == "mean" and getattr(node, "_saved_self_sym_numel", None) == 0:
            return "mean of no value"
        node = _non_finite_parent(node, name, is_nan)
        if node is None and name in _NO_NAN | _MOVES:  # one of several parents brought it: the nearest that made it
            behind = islice(graph_nodes([last]), 1, _MOST_BEHIND)
            return next((operation_of_node(parent.name()) for parent in behind if _makes_non_finite(parent)), name)
    return name


def _makes_non_finite(node: Any) -> bool:
    """Whether the operation makes NaN or Inf when it runs again on its saved finite arguments."""
    function = _REPEATABLE.get(operation_of_node(node.name()))
    saved = [_saved(node, name) for name in ("_saved_self", "_saved_other", "_saved_exponent")]
    arguments = [argument for argument in saved if argument is not None]
    if function is None or not arguments or not isinstance(arguments[0], torch.Tensor) or not _is_finite(arguments):
        return False
    try:
        with torch.no_grad():
            return not _is_finite(function(*arguments))
    except (RuntimeError, TypeError, ValueError):  # an argument was not saved
        return False


def _non_finite_parent(node: Any, name: str, is_nan: bool) -> Any:
    """The parent whose result was not finite; None if this node made it or the origin is unknown."""
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    only = parents[0] if len(parents) == 1 and not _is_leaf_node(parents[0]) else None
    if name in _MOVES:
        return only
    for (parent, _), argument in zip(node.next_functions, ("_saved_self", "_saved_other"), strict=False):
        if not _is_finite(_saved(node, argument)):
            return None if parent is None or _is_leaf_node(parent) else parent
    return only if is_nan and name in _NO_NAN else None


def _is_leaf_node(node: Any) -> bool:
    return bool(node.name().endswith("AccumulateGrad"))


def _saved(node: Any, name: str) -> Any:
    try:
        return getattr(node, name, None)
    except RuntimeError:  # overwritten since, or freed
        return None


def operation_of_node(node: str) -> str:
    """``native_batch_norm`` of ``NativeBatchNormBackward0``, ``copy_slices`` of ``torch::autograd::CopySlices``."""
    plain = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower() or node
