"""The gradients of captured activations, noted by tensor hooks when a backward pass brings them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from hookscope.errors import LayerError, nearest
from hookscope.hooks.captured import CallMapping
from hookscope.hooks.observer import PassProgress
from hookscope.hooks.registration import hook_tensor
from hookscope.hooks.selection import Call
from hookscope.hooks.tensors import map_tensors, tensors_in


class Gradients(CallMapping):
    """Gradients by call, there once a backward pass has brought them; in order of execution of the forward pass."""

    def __init__(self, progress: PassProgress) -> None:
        super().__init__(progress)
        self._seen: dict[str, Call] = {}
        self._without_graph: set[str] = set()

    def _wait_for(self, call: Call, output: Any, device: torch.device | str | None = None) -> None:
        """Note the gradient of each tensor of ``output`` when it comes, on ``device``."""
        key = call.key
        self._seen[key] = call
        slots = {id(tensor): part for part, tensor in tensors_in(output).items() if tensor.requires_grad}
        if not slots:
            self._without_graph.add(key)
            return
        container = _Container(output, slots)
        arrived = _Arrived()
        # weak, or the tensors of a pass, their hooks and this would hold each other for ever
        home = ref(self)

        def on_gradient(part: str) -> Callable[[Tensor], None]:
            def hook(gradient: Tensor) -> None:
                own = home()
                if own is not None and own._seen.get(key) is call:
                    # a copy: autograd may make a parameter's .grad of it, which optimizers write to
                    arrived.add(part, gradient.detach().to(device, copy=True))
                    own._add(call, container.filled(arrived.parts))

            return hook

        for tensor in tensors_in(output).values():
            part = slots.pop(id(tensor), None)  # a tensor that is there twice is one tensor
            if part is not None:
                hook_tensor(tensor, on_gradient(part))

    def __iter__(self) -> Iterator[str]:
        # they come in the order of the backward pass
        return (key for key in self._seen if key in self._values)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls whose gradients have come, in order of execution."""
        return tuple(self._calls[key] for key in self)

    def _drop(self, key: str) -> None:
        super()._drop(key)
        self._seen.pop(key, None)
        self._without_graph.discard(key)

    def _forget(self) -> None:
        for key in list(self._seen):
            self._drop(key)

    def _find_name(self, key: str) -> str:
        exact = key if key in self._seen else self._exact(key)
        if exact in self._values:
            return exact
        if exact in self._seen:
            raise LayerError(f"no gradient of '{key}'", self._why_not(exact))
        raise LayerError(f"no gradient of '{key}'", nearest(key, list(self._seen)) or self._what_is())

    def _find_index(self, index: int) -> str:
        wanted = index + self._progress.total if index < 0 else index
        for key, call in self._seen.items():
            if call.index == wanted:
                return self._find_name(key)
        raise LayerError(f"no gradient at index {index}", self._what_is())

    def _why_not(self, key: str) -> str:
        if key in self._without_graph:
            return "it is not part of an autograd graph: under no_grad, or nothing before it requires a gradient"
        return "call backward() first; if it was, the loss does not depend on this layer"

    def _what_is(self) -> str:
        if not self._seen:
            return "no layer was waited for: capture(..., gradients=True) does, and a forward pass must reach it"
        indices = [call.index for call in self._seen.values() if call.index is not None]
        span = f" (indices {min(indices)} to {max(indices)})" if indices else ""
        return f"waited for are {len(self._seen)} calls{span}: {', '.join(list(self._seen)[:3])}, ..."


class _Container:
    """What a layer returned without its tensors, each place with the name of the part that belongs there."""

    def __init__(self, output: Any, parts: Mapping[int, str]) -> None:
        self._parts: dict[int, str | None] = {}

        def marked(tensor: Tensor) -> Tensor:
            mark = torch.empty(0, device="cpu")
            self._parts[id(mark)] = parts.get(id(tensor))
            return mark

        self._marks = map_tensors(output, marked)

    def filled(self, arrived: Mapping[str, Tensor]) -> Any:
        """The container with the gradients that have arrived; None where none has, or can."""

        def gradient(mark: Tensor) -> Tensor | None:
            part = self._parts[id(mark)]
            return None if part is None else arrived.get(part)

        return map_tensors(self._marks, gradient)


class _Arrived:
    """What one backward pass has brought to the parts of an output."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}
        self._backward = -1

    def add(self, part: str, gradient: Tensor) -> None:
        """Keep a gradient; those of an earlier backward pass go."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self.parts, self._backward = {}, backward
        self.parts[part] = gradient
