"""Keep the outputs of layers: `SaveOutput`, the plain hook, and `capture`, a `with` block of the same idea."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from functools import cache, partial
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.findings import counted
from hookscope.hooks.calls import Call
from hookscope.hooks.kept import Activations
from hookscope.hooks.model_state import AnyModel, module_of
from hookscope.hooks.observer import Observer
from hookscope.hooks.selection import Layers, Selection
from hookscope.hooks.tensors import (
    in_graph,
    joined_inputs,
    keep_and_hand_on,
    map_tensors,
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
        if error is None:
            self._observer.warn_of_compiled_code()
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
