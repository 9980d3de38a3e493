"""What a capture keeps: values by call, gradients as the backward pass brings them, and the outputs of layers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index as as_index
from typing import Any
from weakref import ref
from zipfile import ZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor, nn

from hookscope.display import Cells, RowTuple, Shown
from hookscope.errors import LayerError, UsageError, nearest
from hookscope.findings import counted, listed
from hookscope.hooks.calls import MODEL, Call, key_of
from hookscope.hooks.observer import PassProgress
from hookscope.hooks.registration import hook_tensor
from hookscope.hooks.tensors import as_array, as_float, map_tensors, shape_of, tensors_in, unwrapped
from hookscope.system import StrPath, replacement, write_errors


class CallMapping(Shown, Mapping[str, Any]):
    """Values in order of execution, by name, ``name#1``, index or, of one tensor of several, ``name:1.0``."""

    _missing, _present = "nothing kept", "kept"
    _empty = "nothing was kept: no forward pass reached a wanted layer"

    def __init__(self, progress: PassProgress, names: Mapping[str, str]) -> None:
        self._values: dict[str, Any] = {}
        self._calls: dict[str, Call] = {}
        self._known = self._calls
        self._progress, self._names = progress, names

    @property
    def calls(self) -> RowTuple[Call]:
        """The kept calls, in order of execution."""
        return RowTuple(self._calls[key] for key in self)

    def __getitem__(self, key: str | int | Call) -> Any:
        """The value of a call; an index counts calls of the chosen types, also from the end of the pass."""
        name, part = self._find(key)
        return tensors_in(self._values[name])[part] if part else self._values[name]

    def array(self, key: str | int | Call) -> NDArray[Any]:
        """A copy of the tensor of a call on the CPU as an array; bfloat16 becomes float32."""
        tensors = tensors_in(self[key])
        if len(tensors) != 1:
            asked, do = f"'{key}' holds {counted(len(tensors), 'tensor')}", f"give one as '{key}:PART'"
            raise LayerError(asked, listed(list(tensors), 6), do if tensors else "")
        return as_array(*tensors.values())

    def save(self, path: StrPath) -> None:
        """Write the tensors of all calls to a ``.npz`` file, each under the name that `array` takes."""
        if not (name := os.fspath(path)).endswith(".npz"):
            raise UsageError(f"cannot write activations to '{name}'", do="name a file that ends in .npz")
        with write_errors(name), replacement(name) as stream, ZipFile(stream, "w") as archive:
            for call in self.calls:
                for part, tensor in tensors_in(self[call.key]).items():
                    with archive.open(f"{key_of(call, part)}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, as_array(tensor), allow_pickle=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except (LayerError, TypeError):
            return False
        return True

    def get(self, key: str | int, default: Any = None) -> Any:
        """The value of a call, or ``default``."""
        return self[key] if key in self else default

    def _cells(self) -> Cells:
        return {"calls": len(self)}

    def _rows(self) -> list[_Kept]:
        return [_Kept(call, self._values[call.key]) for call in self.calls]

    def _add(self, call: Call, value: Any) -> None:
        key = call.key
        if torch._C._functorch.peek_interpreter_stack() is not None:
            value = map_tensors(value, unwrapped)
        self._values[key] = value
        self._calls[key] = call

    def _drop(self, key: str) -> None:
        self._values.pop(key, None)
        self._calls.pop(key, None)

    def _find(self, key: str | int | Call) -> tuple[str, str]:
        """The key of a call, and the name of the part that ``key`` asks for, if any."""
        key = key.key if isinstance(key, Call) else key
        if not isinstance(key, str):
            return self._find_index(as_index(key)), ""
        name, *part = re.split("[ :]", key, maxsplit=1)  # "name part" is how rows name it, "name:part" how shapes do
        if not part or self._exact(key) in self._known or self._exact(name) not in self._known:
            return self._find_name(key), ""
        exact = self._find_name(name)
        if part[0] not in (parts := tensors_in(self._values[exact])):
            raise LayerError(f"{self._missing} of '{key}'", f"the parts of {name} are {listed(list(parts), 6)}")
        return exact, part[0]

    def _find_name(self, key: str) -> str:
        exact = self._exact(key)
        if exact not in self._values:
            raise LayerError(f"{self._missing} of '{key}'", nearest(key, list(self._known)) or self._outline())
        return exact

    def _exact(self, key: str) -> str:
        """``key`` with the first name of the layer, and without a number for its first call."""
        if key in self._known:
            return key
        key = key.removeprefix("name:").removeprefix(MODEL)
        name, _, call = key.partition("#")
        name = self._names.get(name, name)
        return f"{name}#{call}" if call not in ("", "0") else name

    def _find_index(self, index: int) -> str:
        position = index + self._progress.total if index < 0 else index
        for key, call in self._known.items():
            if call.index == position:
                return self._find_name(key)
        raise LayerError(f"{self._missing} at index {index}", self._outline())

    def _outline(self) -> str:
        """``kept: 3 calls (indices 0 to 2): conv1, conv2, fc``."""
        if not self._known:
            return self._empty
        indices = [call.index for call in self._known.values() if call.index is not None]
        span = f" (indices {min(indices)} to {max(indices)})" if indices else ""
        names = listed(list(map(str, self._known.values())), 3)
        return f"{self._present}: {counted(len(self._known), 'call')}{span}: {names}"


@dataclass(frozen=True, repr=False)
class _Kept(Shown):
    call: Call
    value: Any

    def _cells(self) -> Cells:
        cells: dict[str, Any] = {"index": self.call.index, "name": str(self.call), "type": self.call.type}
        cells["shape"] = shape_of(self.value)
        if isinstance(self.value, Tensor) and self.value.numel() and not self.value.is_meta:
            values = as_float(self.value.detach())
            cells |= {"min": values.min().item(), "mean": values.mean().item(), "max": values.max().item()}
        return cells


class Gradients(CallMapping):
    """Gradients by call, once a backward pass has brought them; in order of execution of the forward pass."""

    _missing, _present = "no gradient", "expected"
    _empty = "no gradient is expected: capture with gradients=True, and run a forward pass that reaches a layer"

    def __init__(self, progress: PassProgress, names: Mapping[str, str]) -> None:
        super().__init__(progress, names)
        self._known: dict[str, Call] = {}
        self._without_graph: set[str] = set()

    def _wait_for(self, call: Call, output: Any, device: torch.device | str | None = None) -> None:
        """Keep the gradient of each tensor of ``output`` on ``device`` when it comes."""
        key = call.key
        self._known[key] = call
        # the same tensor may be in two places
        tensors = list({id(tensor): tensor for tensor in tensors_in(output).values() if tensor.requires_grad}.values())
        if not tensors:
            self._without_graph.add(key)
            return
        container = _GradientContainer(output, tensors)
        # weak: else the tensors of a pass, their hooks and this object hold each other until the collector runs
        mapping = ref(self)

        def on_gradient(number: int, gradient: Tensor) -> None:
            gradients = mapping()
            if gradients is not None and gradients._known.get(key) is call:
                # a copy: autograd may make a parameter's .grad of it, which optimizers write to
                container.add(number, gradient.detach().to(device, copy=True))
                gradients._add(call, container.filled())

        for number, tensor in enumerate(tensors):
            hook_tensor(tensor, partial(on_gradient, number))

    def __iter__(self) -> Iterator[str]:
        # values come in the order of the backward pass
        return (key for key in self._known if key in self._values)

    def _drop(self, key: str) -> None:
        super()._drop(key)
        self._known.pop(key, None)
        self._without_graph.discard(key)

    def _find_name(self, key: str) -> str:
        exact = self._exact(key)
        if exact in self._values or exact not in self._known:
            return super()._find_name(key)
        why = "no backward pass has run yet, or the loss does not depend on this layer"
        if exact in self._without_graph:
            why = "its output is in no autograd graph: under no_grad, or nothing before it requires a gradient"
        raise LayerError(f"no gradient of '{key}'", why)


class _GradientContainer:
    """An output in which the gradients that one backward pass brings take the place of ``tensors``.

    Until a gradient comes, a mark stands for it, with as many values as its number.
    """

    def __init__(self, output: Any, tensors: Sequence[Tensor]) -> None:
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        none = len(tensors)
        self._marks = map_tensors(output, lambda t: torch.empty(numbers.get(id(t), none), device="meta"))
        self._gradients: dict[int, Tensor] = {}
        self._backward = -1

    def add(self, number: int, gradient: Tensor) -> None:
        """Keep a gradient; drop the gradients of an earlier backward pass."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._gradients, self._backward = {}, backward
        self._gradients[number] = gradient

    def filled(self) -> Any:
        """The container with the gradients that have come, and None in the other places."""
        return map_tensors(self._marks, lambda mark: self._gradients.get(mark.numel()))


class Activations(CallMapping):
    """A read-only mapping from layer calls to outputs, in order of execution.

    ``activations[30]`` takes the index among the calls of the chosen types, ``activations["layer4.0.conv2"]`` the
    layer's first call, ``activations["head.conv#1"]`` its second. Each forward pass of the model empties it first.

    Attributes:
        inputs: A mapping from calls to inputs, filled with ``inputs=True``: the tensor of a call with one positional
            input, the tuple of several, the dictionary where there are keywords only, else ``(args, kwargs)``.
        grad: A mapping from calls to gradients, filled with ``gradients=True`` by the latest backward pass, in the
            containers of the output; None for a tensor without a gradient.
        calls: The kept calls, each with name, type, call and index.
        did_not_run: Registered layers that the latest pass did not reach.
        complete: Whether the latest pass came to its end: False after an exception and after an early stop.
    """

    def __init__(self, progress: PassProgress, names: Mapping[str, str]) -> None:
        super().__init__(progress, names)
        self.inputs, self.grad = CallMapping(progress, names), Gradients(progress, names)
        self._modules: dict[str, ref[nn.Module]] = {}

    def sheet(self, key: str | int, image: Any = None, net: Any = None, **options: Any) -> Image:
        """The feature maps of a call as a picture with its name, as `hookscope.draw_sheet` draws them."""
        import hookscope  # the public face: drawing stands above this package

        name, part = self._find(key)
        module = self._modules[name]() if name in self._modules else None
        title = key_of(self._calls[name], part)
        return hookscope.draw_sheet(self[key], image, net, **{"title": title, "layer": module, **options})

    @property
    def did_not_run(self) -> tuple[str, ...]:
        """Names of registered layers that the latest pass did not reach."""
        return self._progress.did_not_run

    @property
    def complete(self) -> bool:
        """Whether the latest pass came to its end."""
        return self._progress.complete

    def clear(self) -> None:
        """Drop all outputs, inputs and gradients."""
        for by_call in (self, self.inputs, self.grad):
            for key in list(by_call._known):
                by_call._drop(key)
