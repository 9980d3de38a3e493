"""The first NaN of a forward and a backward pass, and the operation of the forward pass that stands behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from hookscope.differentiable import differentiable, leaf_tensors, leaves_of, passed_on
from hookscope.flow import node_of, operation_name, place_of_code
from hookscope.hooks import Door
from hookscope.layers import call_key
from hookscope.losses import Loss
from hookscope.tensors import tensors_in

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor, nn

__all__ = ["Anomaly", "first_anomaly"]


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Where values stop being finite.

    Attributes:
        phase: ``forward`` or ``backward``.
        kind: ``NaN``, or ``Inf`` where there is no NaN at all.
        operation: In the forward pass its name in torch, ``sqrt``; in the backward pass the node, ``SqrtBackward0``.
        layer: Key of the innermost layer that was running, empty for the model itself.
        place: File and line of the code that called the operation, ``net.py:17``; empty where it is not known.
        source: The parameter or buffer that held it already, or ``the input``; empty where the operation made it.
        infinite: The operation, layer and place that made Inf first, before the NaN; None where there was none.
    """

    phase: str
    kind: str
    operation: str
    layer: str
    place: str
    source: str = ""
    infinite: Anomaly | None = None

    def __str__(self) -> str:
        where = f" in layer '{self.layer}'" if self.layer else ""
        at = f" at {self.place}" if self.place else ""
        return f"{self.operation}{where}{at}"


def first_anomaly(model: nn.Module, inputs: Any, loss: Loss | None = None) -> Anomaly | None:
    """Run ``model`` forward and backward once and find the operation behind the first NaN, None where there is none.

    In the forward pass that is the first operation with NaN in its result and none in what it was given, unless a
    parameter or the input held it. In the backward pass it is the first node of the autograd graph that takes finite
    gradients and gives NaN. Inf alone counts where it is in the loss or in a gradient: a mask may well be made of it.
    The arguments are those of `hookscope.gradients.layer_gradients`; nothing of the model changes.

    Example:
        >>> import torch
        >>> class Root(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.sub(1).sqrt()
        >>> found = first_anomaly(torch.nn.Sequential(torch.nn.Flatten(), Root()), torch.ones(1, 2), Loss("score"))
        >>> found.phase, found.operation, found.layer, found.kind
        ('backward', 'SqrtBackward0', '1', 'NaN')
    """
    loss = loss or Loss()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    with differentiable(model):
        leaves = leaves_of(inputs)
        watch = _Watch(model, leaves)
        with watch:
            output = model(*passed_on(leaves))
        value = loss.of(output, type(model).__name__)[0]
        forward = watch.found(value)
        if forward is not None or not value.requires_grad:
            return forward
        wanted = [p for p in model.parameters() if p.requires_grad] + leaf_tensors(leaves)
        return _backward(value, wanted, watch.origins)


class _Watch(TorchFunctionMode):
    """Looks at the result of every operation inside a ``with`` block, and notes which nodes it made.

    Attributes:
        origins: The operation, layer and place behind each node of the autograd graph.
    """

    def __init__(self, model: nn.Module, leaves: Any) -> None:
        super().__init__()
        self.origins: dict[Any, Anomaly] = {}
        self._nan: Anomaly | None = None
        self._inf: Anomaly | None = None
        self._names = {module: name for name, module in model.named_modules()}
        self._own = {id(tensor): f"parameter '{name}'" for name, tensor in model.named_parameters()}
        self._own |= {id(tensor): f"buffer '{name}'" for name, tensor in model.named_buffers()}
        self._leaves = tensors_in(leaves).values()
        self._running: list[tuple[nn.Module, str]] = []
        self._times: dict[nn.Module, int] = {}
        self._door = Door()

    def __enter__(self) -> _Watch:
        try:
            for module in self._names:
                self._door.forward_pre(module, self._before)
                self._door.forward(module, self._after)
        except BaseException:
            self._door.__exit__(None, None, None)
            raise
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._door.__exit__(kind, error, trace)

    def found(self, value: Tensor) -> Anomaly | None:
        """What the forward pass showed; an Inf counts where it has spoiled the loss."""
        if value.requires_grad:
            self._note_nodes([value], Anomaly("forward", "NaN", "", "", ""))
        if self._nan is not None:
            return self._nan
        return self._inf if _holds([value], "Inf") or _holds([value], "NaN") else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and look at its result."""
        kwargs = kwargs or {}
        name = operation_name(func)
        given = list(tensors_in((args, kwargs)).values())
        writes = name.endswith("_") or name == "__set__"
        before = {kind: self._bearers(given, kind) for kind in ("NaN", "Inf")} if writes else None
        result = func(*args, **kwargs)
        made = [*tensors_in(result).values(), *(given[:1] if writes else [])]
        if not made or not given or "empty" in name:
            return result
        within = [tensor for tensor in made if tensor.requires_grad]
        if within or self._nan is None:
            origin = self._here("forward", name)
            self._note_nodes(within, origin)
            self._look(made, given, before, origin)
        return result

    def _here(self, phase: str, name: str) -> Anomaly:
        return Anomaly(phase, "NaN", name, self._running[-1][1] if self._running else "", place_of_code())

    def _look(self, made: list[Tensor], given: list[Tensor], before: Any, origin: Anomaly) -> None:
        for kind, known in (("Inf", self._inf or self._nan), ("NaN", self._nan)):
            if known is not None or not _holds(made, kind):
                continue
            bearers = self._bearers(given, kind) if before is None else before[kind]
            if "" in bearers:  # it has come from an operation that nobody saw, or one that was not the first
                continue
            found = Anomaly(
                "forward", kind, origin.operation, origin.layer, origin.place, bearers[0] if bearers else "",
                self._inf if kind == "NaN" else None,
            )  # fmt: skip
            if kind == "NaN":
                self._nan = found
            else:
                self._inf = found

    def _bearers(self, given: Iterable[Tensor], kind: str) -> list[str]:
        """Which of ``given`` hold it already: the words for a parameter or the input, nothing for what was made."""
        inputs = {id(leaf): "the input" for leaf in self._leaves}
        return [(self._own | inputs).get(id(tensor), "") for tensor in given if _holds([tensor], kind)]

    def _note_nodes(self, within: list[Tensor], origin: Anomaly) -> None:
        """All nodes between ``within`` and what is known already are of this operation."""
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
        # what a custom function made shows only here
        self._note_nodes(within, Anomaly("forward", "NaN", "", self._running[-1][1] if self._running else "", ""))
        while self._running and self._running.pop()[0] is not module:
            pass


def _backward(value: Tensor, wanted: Sequence[Tensor], origins: dict[Any, Anomaly]) -> Anomaly | None:
    import torch

    first: dict[str, Anomaly] = {}
    with Door() as door:
        for node in list(origins):
            door.node(node, _node_hook(node.name(), origins[node], first))
        gradients = torch.autograd.grad(value, wanted, allow_unused=True)
    if "NaN" in first:
        return first["NaN"]
    infinite = _holds([gradient for gradient in gradients if gradient is not None], "Inf")
    return first.get("Inf") if infinite else None


def _node_hook(name: str, origin: Anomaly, first: dict[str, Anomaly]) -> Any:
    def hook(given: Any, taken: Any) -> None:
        """``given`` goes on to what came before in the forward pass, ``taken`` has come from what came after."""
        for kind in ("Inf", "NaN"):
            if kind in first or "NaN" in first:
                continue
            if _holds(tensors_in(given).values(), kind) and not _holds(tensors_in(taken).values(), kind):
                infinite = first.get("Inf") if kind == "NaN" else None
                first[kind] = Anomaly("backward", kind, name, origin.layer, origin.place, "", infinite)

    return hook


def _holds(tensors: Iterable[Tensor], kind: str) -> bool:
    import torch

    look = torch.isnan if kind == "NaN" else torch.isinf
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return any(bool(look(tensor).any()) for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
