"""Keep the outputs of layers: `SaveOutput`, the plain hook, and `capture`, a `with` block of the same idea."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import index as as_index
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from PIL.Image import Image
from torch import Tensor, nn

from hookscope.display import Cells, Shown
from hookscope.errors import LayerError, UsageError, nearest
from hookscope.findings import counted
from hookscope.hooks.calls import Call
from hookscope.hooks.model_state import AnyModel, module_of
from hookscope.hooks.observer import Observer, PassProgress
from hookscope.hooks.registration import hook_tensor
from hookscope.hooks.selection import Layers, Selection
from hookscope.hooks.tensors import (
    as_float,
    in_graph,
    joined_inputs,
    keep_and_hand_on,
    map_tensors,
    shape_of,
    shares_storage,
    storage_keys,
    tensors_in,
    unwrapped,
)


class SaveOutput:
    """A plain forward hook that keeps the output of every call.

    A kept output is the value that the layer returned, although the next layer may work in place: that layer gets a
    copy.

    Attributes:
        outputs: The outputs in order of execution, one for each call; a pass appends, `clear` empties the list.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU(inplace=True))
        >>> save_output = SaveOutput()
        >>> handle = net[0].register_forward_hook(save_output)
        >>> _ = net(torch.ones(1, 3, 2, 2)); handle.remove()
        >>> torch.equal(save_output.outputs[0], net[0](torch.ones(1, 3, 2, 2)))
        True
    """

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def __repr__(self) -> str:
        return f"SaveOutput({counted(len(self.outputs), 'output')})"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Keep ``output``; in an autograd graph return a copy of it to the rest of the network."""
        # a plain hook sees no keywords: the output of a call without positional inputs may be one of its inputs
        kept, replacement = keep_and_hand_on(module, args or output, {}, output)
        self.outputs.append(map_tensors(kept, unwrapped))
        return replacement

    def clear(self) -> None:
        """Drop all outputs."""
        self.outputs.clear()


class CallMapping(Shown, Mapping[str, Any]):
    """Values by call: ``values["name"]``, ``values["name#1"]`` or, by index, ``values[30]``; in order of execution."""

    _missing, _present = "nothing kept", "kept"
    _empty = "nothing was kept: no forward pass reached a wanted layer"

    def __init__(self, progress: PassProgress, names: Mapping[str, str]) -> None:
        self._values: dict[str, Any] = {}
        self._calls: dict[str, Call] = {}
        self._known = self._calls
        self._progress, self._names = progress, names

    @property
    def calls(self) -> tuple[Call, ...]:
        """The kept calls, in order of execution."""
        return tuple(self._calls[key] for key in self)

    def __getitem__(self, key: str | int) -> Any:
        """The value of a call; an index counts calls of the chosen types, also from the end of the pass."""
        return self._values[self._find_name(key) if isinstance(key, str) else self._find_index(as_index(key))]

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

    def _forget(self) -> None:
        for key in list(self._known):
            self._drop(key)

    def _find_name(self, key: str) -> str:
        exact = self._exact(key)
        if exact not in self._values:
            raise LayerError(f"{self._missing} of '{key}'", nearest(key, list(self._known)) or self._outline())
        return exact

    def _exact(self, key: str) -> str:
        """``key`` with the first name of the layer, and without a number for its first call."""
        if key in self._known:
            return key
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
        """``kept: 3 calls (indices 0 to 2): conv1, conv2, fc, ...``."""
        if not self._known:
            return self._empty
        indices = [call.index for call in self._known.values() if call.index is not None]
        span = f" (indices {min(indices)} to {max(indices)})" if indices else ""
        names = ", ".join(list(self._known)[:3])
        return f"{self._present}: {counted(len(self._known), 'call')}{span}: {names}, ..."


@dataclass(frozen=True, repr=False)
class _Kept(Shown):
    call: Call
    value: Any

    def _cells(self) -> Cells:
        cells: dict[str, Any] = {"index": self.call.index, "name": self.call.key, "type": self.call.type}
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

        value, name = self[key], self._find_name(key) if isinstance(key, str) else self._find_index(as_index(key))
        module = self._modules[name]() if name in self._modules else None
        return hookscope.draw_sheet(value, image, net, **{"title": name, "layer": module, **options})

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
            by_call._forget()


@cache
def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory: captures of the next pass then cause no page faults.

    glibc returns freed memory to the kernel above a limit that is twice the largest block freed so far, up to 32 MiB.
    This block is just below 32 MiB, and none of it is written, which costs microseconds. Capturing all convolutions of
    resnet34 then costs 1.08 to 1.09 times a plain pass, not 1.15 to 1.21.
    """
    bytes((32 << 20) - (64 << 10))


class capture:  # lower case: it reads like a function in a `with` statement
    """Keep the activations of the wanted calls of ``model`` while the ``with`` block runs.

    A kept activation is the value that the layer returned: no later layer writes to it. Under autograd it stays in the
    graph, so ``torch.autograd.grad`` reaches it. A result of ``device``, ``dtype`` or ``transform`` depends on the
    parameters, but the model's output does not depend on it. Works under ``no_grad`` and ``inference_mode``, with
    reused layers, keyword inputs and containers of tensors. Hooks are removed when the block is left.

    Args:
        model: Any eager ``nn.Module``.
        layers: A selection such as ``30``, ``"0:10"``, ``"layer4.*"``, ``["conv1", "fc"]``, ``"all"``, see `Selection`.
            The default is every call with an index.
        types: Class names (or classes) that indices count; ``("all",)`` for every layer without children or with own
            parameters. None for Conv2d (Conv3d in models of clips).
        inputs: Also keep copies of the inputs, from before the layer ran, in ``activations.inputs``.
        gradients: Also keep gradients, in ``activations.grad``, when a backward pass runs, inside the block or after
            it, without ``retain_grad``. They are the gradients of the layers' outputs, not of results of ``transform``
            and ``dtype``, and are kept on ``device``.
        stop: End the pass, and the ``with`` block, after the last wanted call. A name then means the first call of its
            layer (a pass cannot know of a second); write ``name#1`` for the second. In train mode the pass updates
            BatchNorm statistics up to the stop, as any pass does.
        device: Where to keep the tensors; None leaves them where they are.
        dtype: Data type of kept floating-point tensors; None leaves it.
        transform: Function of the output, called inside the hook; only its result is kept. It must not write to the
            output, which without a graph is the network's own tensor.
        ordered: Also count the position of each call among all calls, `Call.order`, which takes a hook on every layer.
        leaves: Begin the autograd graph at kept tensors that have none, so that gradients reach them.

    Returns:
        On entry the `Activations`, filled by each forward pass.

    Raises:
        LayerError: for names, types and indices that the model does not have.
        SelectionError: for a selection that cannot be read.
        ModelError: for scripted and compiled models, where hooks do not fire.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(inplace=True))
        >>> with capture(net, layers="all") as activations:
        ...     _ = net(torch.zeros(1, 3, 8, 8))
        >>> [(call.name, call.type, call.index) for call in activations.calls], tuple(activations[0].shape)
        ([('0', 'Conv2d', 0), ('1', 'ReLU', None)], (1, 4, 6, 6))
    """

    def __init__(
        self,
        model: AnyModel,
        layers: Layers = "0:",
        types: Iterable[Any] | None = None,
        *,
        inputs: bool = False,
        gradients: bool = False,
        stop: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        transform: Callable[[Any], Any] | None = None,
        ordered: bool = False,
        leaves: bool = False,
    ) -> None:
        model = module_of(model)
        self._observe = partial(Observer, model, Selection.of(layers), types, ordered=ordered)
        self._device, self._dtype, self._transform, self._inputs = device, dtype, transform, inputs
        self._gradients, self._stop, self._leaves = gradients, stop, leaves
        self._plain = transform is None and device is None and dtype is None
        self._undecided: deque[Call] = deque()
        self._is_open = False

    def __enter__(self) -> Activations:
        if self._is_open:
            raise UsageError("this capture is open already", do="make one for each block: capture(model)")
        _keep_freed_memory()
        self._observer = self._observe(
            self._keep,
            on_input=self._keep_input if self._inputs else None,
            on_start=self._restart,
            on_end=self._drop_unwanted,
        )
        if self._stop:
            self._observer.stop_early()
        self._from_the_end = self._observer.selection.from_the_end
        # before the hooks: another thread may be in the middle of a pass
        first_names = dict[str, str]()
        self._activations = Activations(self._observer.progress, first_names)
        self._observer.__enter__()
        first_names.update(self._observer.first_names)
        self._is_open = True
        return self._activations

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:  # bool alone tells type checkers that code after the block may not run
        self._drop_unwanted()
        progress = self._observer.progress
        # only the caller holds the kept tensors from here on
        self._activations, self._is_open = Activations(progress, {}), False
        stopped = self._observer.__exit__(kind, error, trace)
        compiled = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {}).get("frames")
        ran = progress.complete or any(layer.calls for layer in progress.layers)
        if error is None and compiled and not ran:
            told = f"nothing was kept: no pass of {type(self._observer.model).__name__} has called a hook, and code of"
            warnings.warn(f"{told} torch.compile calls none; run the model that was given to capture", stacklevel=2)
        return stopped

    def _restart(self, *inputs: Any) -> None:
        self._activations.clear()
        self._undecided.clear()

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # a copy, which the network never gets: code may rely on a layer changing the tensor that it was given
        return self._own(map_tensors(joined_inputs(args, kwargs), self._place), storage_keys(args, kwargs))

    def _keep(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._plain:
            own, handed_on = keep_and_hand_on(module, args, kwargs, output, self._leaves)
            kept = own
        else:
            own, kept, handed_on = self._reduced(module, args, kwargs, output)
        self._activations._add(call, kept)
        self._activations._modules[call.key] = ref(module)
        if self._inputs:
            self._activations.inputs._add(call, self._observer.input)
        if self._gradients:
            self._activations.grad._wait_for(call, own, self._device)
        if not self._from_the_end:
            return handed_on
        if not self._observer.wants(call):
            self._undecided.append(call)
        # the oldest calls are the first known to be too far from the end
        while self._undecided and not self._observer.may_want(self._undecided[0]):
            self._drop(self._undecided.popleft())
        return handed_on

    def _reduced(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> tuple[Any, Any, Any]:
        """The layer's own output, the reduced value to keep, and the replacement for the network."""
        own, handed_on = output, None
        if (self._transform is not None or self._gradients) and in_graph(output):
            # the next layer must not overwrite what the transform saves for its backward pass, and gradients are those
            # of the layer's output, not of the reduced value
            own, handed_on = keep_and_hand_on(module, args, kwargs, output)
        reduced = own if self._transform is None else self._transform(own)
        live = storage_keys(own, args, kwargs)
        spare = () if handed_on is None else tensors_in(own).values()
        kept = self._own(map_tensors(reduced, self._place), live, {id(tensor) for tensor in spare})
        return own, kept, handed_on

    def _own(self, value: Any, live: set[int | None], spare: Container[int] = ()) -> Any:
        """``value`` with copies of the tensors in ``live`` memory, except the ``spare`` ones."""
        return map_tensors(value, lambda t: t.clone() if shares_storage(t, live) and id(t) not in spare else t)

    def _place(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor if self._device is None and dtype is None else tensor.to(self._device, dtype)

    def _drop_unwanted(self) -> None:
        """Drop calls that were kept only because the number of calls was not known yet."""
        if self._observer.progress.complete:
            for call in self._undecided:
                if not self._observer.wanted(call):
                    self._drop(call)
            self._undecided.clear()

    def _drop(self, call: Call) -> None:
        for by_call in (self._activations, self._activations.inputs, self._activations.grad):
            by_call._drop(call.key)
