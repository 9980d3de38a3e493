"""A forward pass followed by data and by graph: sources of every tensor, and operations that end a graph."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from hookscope.errors import ModelError
from hookscope.hooks import HookHandles, call_key, is_leaf, storage_key, tensors_in

_DETACHING = {"detach", "detach_", "data", "numpy", "__array__", "tolist", "item"}
_LEAVING = {"numpy", "__array__", "tolist", "item"}
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # the folder of the package


@dataclass(slots=True, eq=False)
class LeafCall:
    """One execution of a layer without children.

    Attributes:
        name: Name of the layer.
        key: ``name`` or ``name#call``.
        bit: Its bit in masks.
        nodes: The nodes of the autograd graph of its output.
        floating: Whether its output has floating-point numbers.
    """

    name: str
    key: str
    bit: int
    nodes: set[Any] = field(default_factory=set)
    floating: bool = False


@dataclass(slots=True, eq=False)
class Cut:
    """An operation whose input requires a gradient, but whose result does not.

    Attributes:
        operation: Its name in torch, such as ``detach``.
        place: File and line of the code that called it.
        nodes: The nodes of the autograd graph of its input.
        bit: Its bit in masks.
        no_grad: Whether it ran under ``no_grad``.
        floating: Whether its result could have a gradient.
        leaves: Whether its result left torch (as an array or a number), so that its use is unknown.
        call: The layer without children that was running, if any.
        after: Key of the first such layer that used the result.
    """

    operation: str
    place: str
    nodes: set[Any]
    bit: int
    no_grad: bool
    floating: bool
    leaves: bool
    call: LeafCall | None
    after: str = ""

    @property
    def reason(self) -> str:
        """``detached`` or ``no graph``."""
        return "detached" if self.operation in _DETACHING and not self.no_grad else "no graph"


class WatchedPass(TorchFunctionMode):
    """Observes every operation of torch, and each layer before and after it runs, inside a ``with`` block."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._handles = HookHandles()

    def __enter__(self) -> Self:
        try:
            for module in self._names:
                self._handles.forward_pre(module, self._before)
                self._handles.forward(module, self._after)
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._handles.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._handles.__exit__(kind, error, trace)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        raise NotImplementedError

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        raise NotImplementedError


class Flow(WatchedPass):
    """Follows one forward pass of ``model`` inside a ``with`` block, with bit masks for the sources of values.

    Every memory that torch wrote to has a mask of the calls, cuts and parameters that its values come from, so that
    views and in-place writes count.

    Attributes:
        calls: Calls of layers without children, in the order in which they returned.
        cuts: Cuts in the order in which they happened.
        parameters: The graph node that accumulates the gradient, by name of every parameter that is not frozen.
        began: Names of all layers that ran.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: list[LeafCall] = []
        self.cuts: list[Cut] = []
        self.parameters: dict[str, Any] = {}
        self.began: set[str] = set()
        self._model = model
        self._marks: dict[int | None, int] = {}
        self._held: list[Any] = []  # tensors kept alive, so that no memory is used twice
        self._made: dict[Any, int] = {}
        self._running: list[LeafCall] = []
        self._times: Counter[str] = Counter()
        self._bits = 0

    def __enter__(self) -> Self:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self.parameters[name] = node_of(parameter)
                self._mark(parameter, self._bit())
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and record the sources of its result."""
        kwargs = kwargs or {}
        given = [*tensors_in(args).values(), *tensors_in(kwargs).values()]
        # before the call, because an in-place operation changes the node
        within = {node_of(tensor) for tensor in given if in_graph(tensor)}
        mask = self._mask_of_all(given)
        result = func(*args, **kwargs)
        name = operation_name(func)
        made = list(tensors_in(result).values())
        if within and (name in _LEAVING or (made and not any(in_graph(tensor) for tensor in made))):
            mask |= self._cut(name, within, made)
        if name in _LEAVING:
            for cut in self.cuts:
                cut.leaves |= bool(cut.bit & mask)
        for tensor in made:
            self._mark(tensor, mask)
        if given and (name.endswith("_") or name == "__set__"):  # in-place, whatever it returned
            self._mark(given[0], mask)
        return result

    def mask_of(self, value: Any) -> int:
        """The bits of all sources of the tensors in ``value``."""
        return self._mask_of_all(tensors_in(value).values())

    def _mask_of_all(self, tensors: Iterable[Tensor]) -> int:
        mask = 0
        for tensor in tensors:
            key = storage_key(tensor)
            mask |= self._marks[key] if key in self._marks else self._mask_by_graph(tensor)
        return mask

    def _mask_by_graph(self, tensor: Tensor) -> int:
        """The mask of a custom function's output, which no hook of torch reports."""
        if tensor.grad_fn is None:
            return 0
        return sum({self._made[node] for node in nodes_behind([node_of(tensor)]) if node in self._made})

    def _mark(self, tensor: Tensor, mask: int) -> None:
        key = storage_key(tensor)
        self._marks[key] = self._marks.get(key, 0) | mask
        self._held.append(tensor)

    def _bit(self) -> int:
        self._bits += 1
        return 1 << self._bits

    def _cut(self, name: str, within: set[Any], made: list[Tensor]) -> int:
        cut = Cut(
            name,
            place_of_code(),
            within,
            self._bit(),
            not torch.is_grad_enabled(),
            any(tensor.is_floating_point() for tensor in made),
            False,
            self._running[-1] if self._running else None,
        )
        self.cuts.append(cut)
        return cut.bit

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        self.began.add(name)
        if not is_leaf(module):
            return
        call = LeafCall(name, call_key(name, self._times[name]), self._bit())
        self._times[name] += 1
        taken = self._mask_of_all([*tensors_in(args).values(), *tensors_in(kwargs).values()])
        for cut in self.cuts:
            if not cut.after and cut.bit & taken:
                cut.after = call.key
        self._running.append(call)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = list(tensors_in(output).values())
        given = [*tensors_in(args).values(), *tensors_in(kwargs).values()]
        for tensor in tensors:
            if storage_key(tensor) not in self._marks:  # from a custom function
                self._mark(tensor, self._mask_of_all(given))
        name = self._names[module]
        while self._running and is_leaf(module):  # first remove calls whose exception the model caught
            call = self._running.pop()
            if call.name == name:
                self._note(call, tensors)
                break

    def _note(self, call: LeafCall, tensors: list[Tensor]) -> None:
        call.nodes = {node for tensor in tensors if in_graph(tensor) for node in _nodes_of(tensor)}
        call.floating = any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
        self._made |= dict.fromkeys(call.nodes, call.bit)
        for tensor in tensors:
            self._mark(tensor, call.bit)
        self.calls.append(call)


def in_graph(tensor: Tensor) -> bool:
    """Whether ``tensor`` is part of an autograd graph; tensors of inference_mode may claim so wrongly."""
    return tensor.requires_grad and not tensor.is_inference()


def node_of(tensor: Tensor) -> Any:
    """The node of the autograd graph that receives the gradient of ``tensor``."""
    with torch.inference_mode(False):  # in inference mode parameters have no node
        return get_gradient_edge(tensor).node


def _nodes_of(tensor: Tensor) -> list[Any]:
    """The nodes of ``tensor``: an in-place write gives a view a new node, so its base counts too."""
    base = tensor._base
    whole = base is not None and base.requires_grad and base.numel() == tensor.numel()
    return [node_of(tensor), *([node_of(base)] if base is not None and whole else [])]


def nodes_behind(nodes: Iterable[Any]) -> set[Any]:
    """``nodes`` and every node of the autograd graph that their gradients reach."""
    found = set(nodes)
    waiting = list(found)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return found


def refuse_reentrant_checkpoints(model: nn.Module, value: Tensor) -> None:
    """Refuse reentrant checkpoints in the graph of ``value``: gradients pass them only in a real ``backward()``.

    Raises:
        ModelError: The graph has a ``torch.utils.checkpoint`` with ``use_reentrant=True``.
    """
    nodes = nodes_behind([node_of(value)]) if value.requires_grad else ()
    within = [node for node in nodes if node.name() == "CheckpointFunctionBackward"]
    if not within:
        return
    names = {id(module): name for name, module in model.named_modules()}
    runs = [getattr(node, "run_function", None) for node in within]  # a layer, or a function without a name
    known = [names[id(run)] for run in runs if id(run) in names]
    where = ", ".join(f"'{name}'" for name in sorted(set(known))) or f"a part of {type(model).__name__}"
    asked = f"{where} runs inside a reentrant checkpoint, which torch.autograd.grad cannot follow"
    raise ModelError(asked, do="checkpoint with use_reentrant=False")


def place_of_code() -> str:
    """File and line of the code that called the running ``__torch_function__``, such as ``net.py:17``.

    Empty if hookscope itself called it.
    """
    library = os.path.dirname(torch.__file__) + os.sep
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    frame = frame and frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(_OWN):
        if not frame.f_code.co_filename.startswith(library):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def operation_name(func: Any) -> str:
    """The name of a function of torch; the name of the attribute for a property such as ``data``."""
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):
        owner = getattr(func, "__self__", None)
        attribute = str(getattr(owner, "__name__", name))
        return attribute if name == "__get__" else "__set__"
    return name
