"""Keep the outputs of layers: `SaveOutput`, the plain hook, and `capture`, a `with` block of the same idea."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from functools import cache, partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks.calls import Call
from hookscope.hooks.captured import CallMapping, Gradients
from hookscope.hooks.model_state import AnyModel, module_of
from hookscope.hooks.observer import Observer, PassProgress
from hookscope.hooks.selection import Layers, Selection
from hookscope.hooks.tensors import joined_inputs, map_tensors, shares_storage, storage_keys, tensors_in


def keep_and_hand_on(module: nn.Module, args: Any, kwargs: Any, output: Any, leaves: bool = False) -> tuple[Any, Any]:
    """The output to keep, which nothing writes to later, and its replacement for the network (None: the output itself).

    Without a graph a copy is kept, and the network gets its own tensor. In an autograd graph the layer's tensor is kept
    and the network gets a copy of it, so that gradients reach the kept tensor. An output that shares memory with an
    input or a parameter (of an in-place layer, a view, an identity) is then copied twice, because a later write to that
    memory would change it. A tensor that the model itself stores and overwrites later is not protected: capture such
    a model under ``no_grad``. With ``leaves`` a graph begins here at each tensor that has none.
    """
    in_graph = _in_graph(output)
    if not in_graph and not (leaves and torch.is_grad_enabled()):
        return _copied(output), None
    held = storage_keys(args, kwargs, list(module._parameters.values()), list(module._buffers.values()))
    kept = map_tensors(output, cache(lambda tensor: tensor.clone() if shares_storage(tensor, held) else tensor))
    if leaves:
        kept = map_tensors(kept, cache(_leaf))
    return kept, _copied(kept)


def _in_graph(output: Any) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in tensors_in(output).values())


def _leaf(tensor: Tensor) -> Tensor:
    if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.detach().requires_grad_()


def _copied(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.clone()
    # the same tensor in two places is one tensor in the copy too
    return map_tensors(output, cache(lambda tensor: tensor.clone()))


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

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Keep ``output``; in an autograd graph return a copy of it to the rest of the network."""
        # a plain hook sees no keywords: the output of a call without positional inputs may be one of its inputs
        kept, replacement = keep_and_hand_on(module, args or output, {}, output)
        self.outputs.append(kept)
        return replacement

    def clear(self) -> None:
        """Drop all outputs."""
        self.outputs.clear()


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

    def __init__(self, progress: PassProgress) -> None:
        super().__init__(progress)
        self.inputs = CallMapping(progress)
        self.grad = Gradients(progress)

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
        self._activations = Activations(PassProgress())
        self._undecided: deque[Call] = deque()

    def __enter__(self) -> Activations:
        _keep_freed_memory()
        # until the end of the block: it refers to this object, and such a cycle would keep the model in memory
        self._observer = self._observe(
            self._keep,
            on_input=self._keep_input if self._inputs else None,
            on_start=self._restart,
            on_end=self._drop_unwanted,
        )
        if self._stop:
            self._observer.stop_early()
        self._from_the_end = self._observer.selection.from_the_end
        self._observer.__enter__()
        self._activations = Activations(self._observer.progress)
        names = self._observer.first_names
        self._activations._names = self._activations.inputs._names = self._activations.grad._names = names
        return self._activations

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._drop_unwanted()
        # only the caller holds the kept tensors from here on
        observer, self._activations = self._observer, Activations(PassProgress())
        del self._observer
        return observer.__exit__(kind, error, trace)

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
        if (self._transform is not None or self._gradients) and _in_graph(output):
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
