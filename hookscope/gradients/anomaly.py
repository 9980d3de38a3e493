"""The operation behind the first NaN or Inf: `first_anomaly` watches a pass, `made_by` reads a graph afterwards."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.gradients.autograd_flow import node_of, refuse_reentrant_checkpoints
from hookscope.hooks import (
    HookHandles,
    WatchedPass,
    call_key,
    differentiable,
    leaf_tensors,
    leaves_of,
    operation_name,
    passed_on,
    place_of_code,
    storage_key,
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
_KINDS = ("NaN", "Inf")
_UNKNOWN = "a tensor of unknown origin"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """The operation after which values are not finite.

    ``phase`` is ``forward`` or ``backward``; ``operation`` is ``sqrt``, or in the backward pass the node
    ``SqrtBackward0`` with ``forward`` ``sqrt``. ``layer`` is the key of the innermost running layer, empty for the
    model. ``place`` is the line of code, ``net.py:17``. ``source`` names the parameter or tensor that already held the
    NaN, empty if the operation made it. ``infinite`` is the origin of the Inf that became NaN.
    """

    phase: str
    kind: str
    operation: str
    layer: str
    place: str
    source: str = ""
    infinite: Anomaly | None = None
    forward: str = ""

    def __str__(self) -> str:
        where = f" in '{self.layer}'" if self.layer else ""
        return f"{self.operation_and_place}{where}"

    @property
    def operation_and_place(self) -> str:
        """``SqrtBackward0 of sqrt at net.py:17``."""
        name = self.operation or "an unnamed operation"
        name += f" of {self.forward}" if self.forward else ""
        return f"{name} at {self.place}" if self.place else name

    @property
    def origin(self) -> Anomaly:
        return self.infinite or self


def first_anomaly(model: nn.Module, inputs: Any, loss: LossLike = None) -> Anomaly | None:
    """The operation behind the first NaN or Inf of one forward and backward pass; None if all values are finite.

    It is the first operation or node that makes NaN of values without NaN. Inf alone counts only in the loss or in a
    gradient, because masks contain Inf. The arguments and errors are those of `layer_gradients`.
    """
    loss = as_loss(loss)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with differentiable(model):
        leaves = leaves_of(inputs)
        search = _Search(model, leaves)
        with search:
            output = model(*passed_on(leaves))
        value = loss.of(output, type(model).__name__)[0]
        forward = search.forward_anomaly(value, output)
        if forward is not None or not value.requires_grad:
            return forward
        refuse_reentrant_checkpoints(model, value)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return search.backward_anomaly(value, trained + leaf_tensors(leaves))


class _Search(WatchedPass):
    """Tests the result of every operation inside a ``with`` block, then of every node of the autograd graph."""

    def __init__(self, model: nn.Module, leaves: Any) -> None:
        super().__init__(model)
        self._origins: dict[Any, Anomaly] = {}  # by node of the autograd graph
        self._first: dict[str, Anomaly] = {}  # by kind
        self._brought: Anomaly | None = None  # Inf that no watched operation made
        self._owners = {
            id(value): f"attribute '{name}.{attribute}'" if name else f"attribute '{attribute}'"
            for module, name in self._names.items()
            for attribute, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        self._owners |= {id(tensor): f"parameter '{name}'" for name, tensor in model.named_parameters()}
        self._owners |= {id(tensor): f"buffer '{name}'" for name, tensor in model.named_buffers()}
        self._owners |= {id(tensor): "the input" for tensor in tensors_in(leaves).values()}
        self._blank: dict[int | None, Tensor] = {}  # uninitialised memory
        self._constants: dict[int | None, tuple[Tensor, Anomaly]] = {}
        self._running: list[tuple[nn.Module, str]] = []
        self._times: dict[nn.Module, int] = {}

    def forward_anomaly(self, value: Tensor, output: Any) -> Anomaly | None:
        """The anomaly of the forward pass; an Inf only counts if the loss ``value`` of ``output`` is not finite."""
        if value.requires_grad:
            self._note_nodes([value], Anomaly("forward", "NaN", "", "", ""))
        if "NaN" in self._first:
            return self._first["NaN"]
        kind = next((kind for kind in _KINDS if _holds([value], kind)), None)
        if kind is None:
            return None
        at_end = "the output" if _holds(tensors_in(output).values(), kind) else "the loss"
        source = _UNKNOWN if at_end == "the output" else ""
        return self._first.get("Inf") or self._brought or Anomaly("forward", kind, at_end, "", "", source)

    def backward_anomaly(self, value: Tensor, leaves: Sequence[Tensor]) -> Anomaly | None:
        """The anomaly of the gradients of ``leaves``."""
        self._first, self._brought = {}, None
        with HookHandles() as handles:
            for node, origin in list(self._origins.items()):
                here = replace(origin, phase="backward", operation=node.name(), forward=origin.operation)
                handles.node(node, partial(self._test_node, here))
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        if "NaN" in self._first:
            return self._first["NaN"]
        # a NaN without an origin is the sum of Inf and -Inf from two paths
        return (
            None if _is_finite([gradient for gradient in gradients if gradient is not None]) else self._first.get("Inf")
        )

    def _test_node(self, here: Anomaly, input_gradients: Any, output_gradients: Any) -> None:
        self._test(list(tensors_in(input_gradients).values()), list(tensors_in(output_gradients).values()), here)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and test its result."""
        kwargs = kwargs or {}
        name = operation_name(func)
        arguments = list(tensors_in((args, kwargs)).values())
        targets = arguments[:1] if _writes(name) else list(tensors_in(kwargs.get("out")).values())
        carriers = _carriers(arguments) if targets else None
        # nodes of custom functions do not belong to this operation
        self._note_nodes(arguments, self._here("", located=False))
        result = func(*args, **kwargs)
        results = [*tensors_in(result).values(), *targets]
        if "empty" in name:
            self._note_blank(results)
        elif not arguments:
            self._note_constants(results, name)
        elif results and ("NaN" not in self._first or any(tensor.requires_grad for tensor in results)):
            here = self._here(name)
            self._note_nodes(results, here)
            self._test(results, arguments, here, targets, carriers)
        return result

    def _here(self, name: str, located: bool = True) -> Anomaly:
        layer = self._running[-1][1] if self._running else ""
        return Anomaly("forward", "NaN", name, layer, place_of_code() if located else "")

    def _note_blank(self, tensors: Iterable[Tensor]) -> None:
        self._blank |= {storage_key(tensor): tensor for tensor in tensors}

    def _note_constants(self, constants: Iterable[Tensor], name: str) -> None:
        """Constants with NaN count once an operation uses them: they may be overwritten first."""
        spoiled = [tensor for tensor in constants if any(_holds([tensor], kind) for kind in _KINDS)]
        self._constants |= {storage_key(tensor): (tensor, self._here(name)) for tensor in spoiled}

    def _test(
        self,
        results: Sequence[Tensor],
        arguments: Sequence[Tensor],
        here: Anomaly,
        targets: Sequence[Tensor] = (),
        carriers: dict[str, list[Tensor]] | None = None,
    ) -> None:
        """Record ``here`` if ``results`` hold the first NaN or Inf.

        ``carriers`` are the ``arguments`` that already held it, by kind, before an operation wrote to ``targets``.
        """
        for kind in ("Inf", "NaN"):
            if kind in self._first or "NaN" in self._first or not _holds(results, kind):
                continue
            carriers = carriers or _carriers(arguments)
            if not carriers[kind]:
                infinite = (self._first.get("Inf") or self._brought) if kind == "NaN" and carriers["Inf"] else None
                self._first[kind] = replace(here, kind=kind, infinite=infinite)
            elif here.phase == "forward":
                self._test_carriers(kind, carriers[kind], results, here, targets)

    def _test_carriers(
        self, kind: str, carriers: Sequence[Tensor], results: Sequence[Tensor], here: Anomaly, targets: Sequence[Tensor]
    ) -> None:
        """Record who brought NaN or Inf into the pass: no operation with tensors made it."""
        if any(_is_among(tensor, self._blank) for tensor in carriers):
            self._note_blank(results)
            return
        if any(tensor is target for tensor in carriers for target in targets):
            return  # the other elements may be overwritten too
        if _is_among(carriers[0], self._constants):
            origin = self._constants[storage_key(carriers[0])][1]
        else:
            origin = replace(here, source=self._owners.get(id(carriers[0]), _UNKNOWN))
        origin = replace(origin, kind=kind, infinite=None)
        if kind == "NaN" or (origin.operation == here.operation and origin.source != _UNKNOWN):
            self._first[kind] = origin
        else:  # most likely a mask: it counts if nothing else explains the loss
            self._brought = self._brought or origin

    def _note_nodes(self, tensors: Iterable[Tensor], origin: Anomaly) -> None:
        """Assign the unknown nodes behind ``tensors`` to this operation."""
        waiting = [node_of(tensor) for tensor in tensors if tensor.requires_grad]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self._origins:
                self._origins[node] = origin
                waiting += [before for before, _ in node.next_functions]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        times = self._times.get(module, 0)
        self._times[module] = times + 1
        self._running.append((module, call_key(self._names[module], times)))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # nodes of custom functions only appear here
        self._note_nodes(tensors_in(output).values(), self._here("", located=False))
        while self._running and self._running.pop()[0] is not module:
            pass


def _writes(name: str) -> bool:
    return name.startswith("__i") or name in ("__set__", "__setitem__") or (name[-1:] == "_" and name[-2:] != "__")


def _carriers(arguments: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    return {kind: [tensor for tensor in arguments if _holds([tensor], kind)] for kind in _KINDS}


def _is_among(tensor: Tensor, marked: Container[int | None]) -> bool:
    key = storage_key(tensor)
    return key is not None and key in marked


def _holds(tensors: Iterable[Tensor], kind: str) -> bool:
    test = torch.isnan if kind == "NaN" else torch.isinf
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return any(bool(test(tensor).any()) for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())


def _is_finite(value: Any) -> bool:
    """Whether no tensor in ``value`` holds NaN or Inf; of a distributed tensor only the local part counts."""
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors_in(value).values()]
    return not any(_holds(tensors, kind) for kind in _KINDS)


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
        name, last = _operation_of_node(node.name()), node
        node = _non_finite_parent(node, name, is_nan)
        if node is None and name in _NO_NAN | _MOVES:  # one of several parents brought it
            return _search_behind(last) or name
    return name


def _search_behind(node: Any) -> str | None:
    """The nearest operation behind ``node`` that makes NaN or Inf of finite arguments, searched breadth first."""
    waiting, visited = [node], {node}
    while waiting and len(visited) <= _MOST_BEHIND:
        for parent, _ in waiting.pop(0).next_functions:
            if parent is None or parent in visited:
                continue
            if _makes_non_finite(parent):
                return _operation_of_node(parent.name())
            visited.add(parent)
            waiting.append(parent)
    return None


def _makes_non_finite(node: Any) -> bool:
    """Whether the operation makes NaN or Inf when it runs again on its saved finite arguments."""
    function = _REPEATABLE.get(_operation_of_node(node.name()))
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
            return not _is_finite(function(*arguments))
    except (RuntimeError, TypeError, ValueError):  # an argument was not saved
        return False


def _non_finite_parent(node: Any, name: str, is_nan: bool) -> Any:
    """The parent whose result was not finite; None if this node made it or the origin is unknown."""
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
    return _is_finite(saved)


def _operation_of_node(node: str) -> str:
    """``native_batch_norm`` of ``NativeBatchNormBackward0``, ``copy_slices`` of ``torch::autograd::CopySlices``."""
    plain = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower() or node
