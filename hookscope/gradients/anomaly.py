"""The operation behind the first NaN or Inf, by watching a pass or by reading the autograd graph afterwards.

`first_anomaly` runs a model and looks at the result of every operation and every node: it names the operation, the
layer and the line of code. `made_by` looks at a tensor of a pass that nobody watched, such as a training step.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.gradients.autograd_flow import (
    WatchedPass,
    node_of,
    operation_name,
    place_of_code,
    refuse_reentrant_checkpoints,
)
from hookscope.hooks import (
    HookHandles,
    call_key,
    differentiable,
    leaf_tensors,
    leaves_of,
    passed_on,
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
_UNSEEN = "a tensor of unknown origin"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """The operation after which values are not finite.

    Attributes:
        phase: ``forward`` or ``backward``.
        kind: ``NaN``, or ``Inf`` if there is no NaN.
        operation: Its name in torch (``sqrt``) in the forward pass, the node (``SqrtBackward0``) in the backward pass.
        layer: Key of the innermost layer that was running, empty for the model itself.
        place: File and line of the code that called the operation, ``net.py:17``; empty if unknown.
        source: The parameter, buffer, attribute or tensor that already held it, or ``the input``; empty if the
            operation made it.
        infinite: The origin of the Inf that the operation turned into NaN, if it did.
        forward: In the backward pass, the operation of the forward pass (``sqrt``), if known.
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
        """``sqrt at net.py:17``, ``SqrtBackward0 of sqrt at net.py:17``."""
        name = self.operation or "an unnamed operation"
        name += f" of {self.forward}" if self.forward else ""
        return f"{name} at {self.place}" if self.place else name

    @property
    def origin(self) -> Anomaly:
        """The anomaly to look at: the origin of the Inf that became NaN, else this one."""
        return self.infinite or self


def first_anomaly(model: nn.Module, inputs: Any, loss: LossLike = None) -> Anomaly | None:
    """Run ``model`` forward and backward once and find the operation behind the first NaN or Inf.

    In the forward pass it is the first operation with NaN in its result but not in its arguments, unless a parameter
    or the input holds NaN. In the backward pass it is the first node of the autograd graph that turns finite gradients
    into NaN. Inf alone counts only in the loss or in a gradient, because masks contain Inf. The arguments are those of
    `layer_gradients`. The model does not change.

    Returns:
        The anomaly, None if the loss and all gradients are finite.

    Raises:
        ModelError: There is a reentrant checkpoint, through which no gradient can be computed.

    Example:
        >>> import torch
        >>> class Root(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.sub(1).sqrt()
        >>> anomaly = first_anomaly(torch.nn.Sequential(torch.nn.Flatten(), Root()), torch.ones(1, 2))
        >>> anomaly.phase, anomaly.operation, anomaly.layer, anomaly.kind
        ('backward', 'SqrtBackward0', '1', 'NaN')
    """
    loss = as_loss(loss)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with differentiable(model):
        leaves = leaves_of(inputs)
        watch = _Watch(model, leaves)
        with watch:
            output = model(*passed_on(leaves))
        value = loss.of(output, type(model).__name__)[0]
        forward = watch.found(value, output)
        if forward is not None or not value.requires_grad:
            return forward
        refuse_reentrant_checkpoints(model, value)
        wanted = [p for p in model.parameters() if p.requires_grad] + leaf_tensors(leaves)
        return _backward(value, wanted, watch.origins)


class _Watch(WatchedPass):
    """Tests the result of every operation inside a ``with`` block, and records the origin of graph nodes.

    Attributes:
        origins: Operation, layer and place of each node of the autograd graph.
    """

    def __init__(self, model: nn.Module, leaves: Any) -> None:
        super().__init__(model)
        self.origins: dict[Any, Anomaly] = {}
        self._nan: Anomaly | None = None
        self._inf: Anomaly | None = None
        self._brought: Anomaly | None = None
        self._own = {
            id(value): f"attribute '{name}.{attribute}'" if name else f"attribute '{attribute}'"
            for module, name in self._names.items()
            for attribute, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        self._own |= {id(tensor): f"parameter '{name}'" for name, tensor in model.named_parameters()}
        self._own |= {id(tensor): f"buffer '{name}'" for name, tensor in model.named_buffers()}
        self._leaves = tensors_in(leaves).values()
        self._blank: dict[int | None, Tensor] = {}  # uninitialised memory
        self._constants: dict[int | None, tuple[Tensor, Anomaly]] = {}
        self._running: list[tuple[nn.Module, str]] = []
        self._times: dict[nn.Module, int] = {}

    def found(self, value: Tensor, output: Any) -> Anomaly | None:
        """The anomaly of the forward pass; an Inf only counts if the loss ``value`` of ``output`` is not finite."""
        if value.requires_grad:
            self._note_nodes([value], Anomaly("forward", "NaN", "", "", ""))
        if self._nan is not None:
            return self._nan
        kind = next((kind for kind in _KINDS if _holds([value], kind)), None)
        if kind is None:
            return None
        at_end = "the output" if _holds(tensors_in(output).values(), kind) else "the loss"
        source = _UNSEEN if at_end == "the output" else ""
        return self._inf or self._brought or Anomaly("forward", kind, at_end, "", "", source)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and test its result."""
        kwargs = kwargs or {}
        name = operation_name(func)
        given = list(tensors_in((args, kwargs)).values())
        written = given[:1] if _writes(name) else list(tensors_in(kwargs.get("out")).values())
        before = {kind: _bearers(given, kind) for kind in _KINDS} if written else None
        # nodes of custom functions do not belong to this operation
        self._note_nodes([tensor for tensor in given if tensor.requires_grad], self._here("", located=False))
        result = func(*args, **kwargs)
        made = [*tensors_in(result).values(), *written]
        if "empty" in name:
            self._blank |= {storage_key(tensor): tensor for tensor in made}
        elif not given:
            self._note_constants(made, name)
        elif made:
            within = [tensor for tensor in made if tensor.requires_grad]
            if within or self._nan is None:
                origin = self._here(name)
                self._note_nodes(within, origin)
                self._look(made, before or {kind: _bearers(given, kind) for kind in _KINDS}, written, origin)
        return result

    def _here(self, name: str, located: bool = True) -> Anomaly:
        layer = self._running[-1][1] if self._running else ""
        return Anomaly("forward", "NaN", name, layer, place_of_code() if located else "")

    def _note_constants(self, made: Iterable[Tensor], name: str) -> None:
        """Constants with NaN count once an operation uses them: they may be overwritten first."""
        spoiled = [tensor for tensor in made if any(_holds([tensor], kind) for kind in _KINDS)]
        self._constants |= {storage_key(tensor): (tensor, self._here(name)) for tensor in spoiled}

    def _look(self, made: list[Tensor], bearers: dict[str, list[Tensor]], written: list[Tensor], here: Anomaly) -> None:
        for kind, known in (("Inf", self._inf or self._nan), ("NaN", self._nan)):
            if known is not None or not _holds(made, kind):
                continue
            if any(_is_among(tensor, self._blank) for tensor in bearers[kind]):
                self._blank |= {storage_key(tensor): tensor for tensor in made}
                continue
            if any(tensor is target for tensor in bearers[kind] for target in written):
                continue  # the other elements may be overwritten too
            # its holder existed before the pass or was made out of sight
            found = self._brought_by(bearers[kind][0], here) if bearers[kind] else here
            taken = (self._inf or self._brought) if kind == "NaN" and not bearers[kind] and bearers["Inf"] else None
            found = replace(found, kind=kind, infinite=taken)
            if kind == "NaN":
                self._nan = found
            elif found.operation == here.operation and found.source != _UNSEEN:
                self._inf = found
            else:  # most likely a mask: it counts if nothing else explains the loss
                self._brought = self._brought or found

    def _brought_by(self, tensor: Tensor, here: Anomaly) -> Anomaly:
        inputs = {id(leaf): "the input" for leaf in self._leaves}
        if _is_among(tensor, self._constants):
            return self._constants[storage_key(tensor)][1]
        return replace(here, source=(self._own | inputs).get(id(tensor), _UNSEEN))

    def _note_nodes(self, within: list[Tensor], origin: Anomaly) -> None:
        """Assign the unknown nodes behind ``within`` to this operation."""
        waiting = [node_of(tensor) for tensor in within]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self.origins:
                self.origins[node] = origin
                waiting += [before for before, _ in node.next_functions]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        times = self._times.get(module, 0)
        self._times[module] = times + 1
        self._running.append((module, call_key(self._names[module], times)))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = list(tensors_in(output).values())
        within = [tensor for tensor in tensors if tensor.requires_grad]
        # nodes of custom functions only appear here
        self._note_nodes(within, Anomaly("forward", "NaN", "", self._running[-1][1] if self._running else "", ""))
        while self._running and self._running.pop()[0] is not module:
            pass


def _writes(name: str) -> bool:
    return name.startswith("__i") or name in ("__set__", "__setitem__") or (name[-1:] == "_" and name[-2:] != "__")


def _bearers(given: Iterable[Tensor], kind: str) -> list[Tensor]:
    return [tensor for tensor in given if _holds([tensor], kind)]


def _is_among(tensor: Tensor, marked: Container[int | None]) -> bool:
    key = storage_key(tensor)
    return key is not None and key in marked


def _backward(value: Tensor, wanted: Sequence[Tensor], origins: dict[Any, Anomaly]) -> Anomaly | None:
    first: dict[str, Anomaly] = {}
    with HookHandles() as handles:
        for node in list(origins):
            handles.node(node, _node_hook(node.name(), origins[node], first))
        gradients = torch.autograd.grad(value, wanted, allow_unused=True)
    if "NaN" in first:
        return first["NaN"]
    arrived = [gradient for gradient in gradients if gradient is not None]
    # a NaN without an origin is the sum of Inf and -Inf from two paths
    return first.get("Inf") if _holds(arrived, "Inf") or _holds(arrived, "NaN") else None


def _node_hook(name: str, origin: Anomaly, first: dict[str, Anomaly]) -> Any:
    def hook(given: Any, taken: Any) -> None:
        """``given`` are the gradients of the node's inputs, ``taken`` those of its outputs."""
        for kind in ("Inf", "NaN"):
            if kind in first or "NaN" in first:
                continue
            if _holds(tensors_in(given).values(), kind) and not _holds(tensors_in(taken).values(), kind):
                infinite = first.get("Inf") if kind == "NaN" and _holds(tensors_in(taken).values(), "Inf") else None
                first[kind] = Anomaly(
                    "backward", kind, name, origin.layer, origin.place, "", infinite, origin.operation
                )

    return hook


def _holds(tensors: Iterable[Tensor], kind: str) -> bool:
    look = torch.isnan if kind == "NaN" else torch.isinf
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return any(bool(look(tensor).any()) for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())


def _is_finite(value: Any) -> bool:
    """Whether no tensor in ``value`` holds NaN or Inf; of a distributed tensor only the local part counts."""
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors_in(value).values()]
    return not any(_holds(tensors, kind) for kind in _KINDS)


def made_by(tensor: Tensor) -> str:
    """The operation that made the NaN or Inf in ``tensor``, as far as its autograd graph shows afterwards.

    Nothing needs to be watched before: values that the graph saved are tested, and operations that save all arguments
    run once more. `first_anomaly` finds more (place, layer, gradients) at the cost of a watched pass.

    Args:
        tensor: A tensor with NaN or Inf.

    Returns:
        The name of the operation in torch, or ``input`` if no operation made it.

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
        name, last = operation_of_node(node.name()), node
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
                return operation_of_node(parent.name())
            visited.add(parent)
            waiting.append(parent)
    return None


def _makes_non_finite(node: Any) -> bool:
    """Whether the operation, run again on its saved arguments, makes NaN or Inf of finite values."""
    function = _REPEATABLE.get(operation_of_node(node.name()))
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


def operation_of_node(node: str) -> str:
    """The operation of an autograd node by its name: ``torch::autograd::CopySlices`` is ``copy_slices``.

    Example:
        >>> operation_of_node("NativeBatchNormBackward0")
        'native_batch_norm'
    """
    plain = re.sub(r"Backward\d*$", "", node.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower() or node
