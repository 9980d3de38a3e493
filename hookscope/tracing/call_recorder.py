"""Record the calls of one pass: order, shapes, MACs, sources, and the outputs that a later layer overwrites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.geometry import FieldTracker, ReceptiveField, computed_field
from hookscope.hooks import (
    OPERATION,
    HookHandles,
    Operations,
    Shape,
    class_names,
    is_closed,
    is_single,
    named_inputs,
    shape_of,
    storage_key,
    tensors_in,
)
from hookscope.tracing.facts import INPUT, Trace, TracedCall, TracedLayer

Sources = frozenset[int]
"""Numbers of calls, and `hookscope.tracing.facts.INPUT`."""

_NOTHING: Sources = frozenset()


class SourceTracker(TorchDispatchMode):
    """Follows which calls made the values of each tensor, while operations run inside the block.

    ``running`` returns the number of the call that now makes values, and what it read so far; None where what runs only
    hands values on.
    """

    supports_higher_order_operators = True

    def __init__(self, running: Callable[[], tuple[int, set[int]] | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running = running
        self._made = WeakTensorKeyDictionary()  # the sources, and how many writes to the storage these know of
        self._writes: defaultdict[int | None, list[tuple[int, int, Sources]]] = defaultdict(list)

    def of(self, value: Any) -> Sources:
        """The calls that made the values of all tensors in ``value``."""
        return _NOTHING.union(*map(self._of, tensors_in(value).values()))

    def made(self, value: Any, sources: Iterable[int]) -> None:
        """Note that ``sources`` made all tensors in ``value``."""
        for tensor in tensors_in(value).values():
            self._made[tensor] = frozenset(sources), len(self._writes[storage_key(tensor)])

    def _of(self, tensor: Tensor) -> Sources:
        known: tuple[Sources, int] = self._made.get(tensor, (_NOTHING, 0))
        sources, count = known
        writes = self._writes.get(storage_key(tensor), [])
        if len(writes) > count:
            begin, end = _extent(tensor)
            for first, last, writer in writes[count:]:
                if first < end and begin < last:
                    sources = writer if first <= begin and end <= last else sources | writer
        return sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read, running = self.of((args, kwargs)), self._running()
        output = func(*args, **(kwargs or {}))
        if running is not None:
            number, reads = running
            reads |= read - {number}
            read = frozenset((number,))
        for at, name in _written(func):
            for tensor in tensors_in(args[at] if at < len(args) else (kwargs or {}).get(name)).values():
                self._writes[storage_key(tensor)].append((*_extent(tensor), read))
        self.made(output, read)
        return output


@lru_cache(maxsize=4096)
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    """The positions and names of the arguments that ``function`` writes to."""
    arguments = function._schema.arguments if getattr(function, "_schema", None) else ()
    return tuple(
        (at, item.name) for at, item in enumerate(arguments) if item.alias_info is not None and item.alias_info.is_write
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor has, and the one after its last."""
    if not tensor.numel():
        return 0, 0
    begin = int(tensor.storage_offset())
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + int(last) + 1) * tensor.itemsize


@dataclass(slots=True)
class OpenCall:
    """A call that has begun: its layer, how many calls had returned, and what was counted in it itself so far.

    That are MACs, and for a plan of memory the bytes that it moved and those that autograd keeps. ``computes`` says
    that what it calls itself is its own work, unlike a block of other layers; ``reads`` are the calls, by the
    order in which they began, that made what it read.
    """

    layer: int
    input_shape: Shape
    returned: int
    number: int = 0
    computes: bool = False
    reads: set[int] = field(default_factory=set)
    macs: int = 0
    moved: int = 0
    saved: int = 0

    def add(self, other: OpenCall) -> None:
        """Count what ``other`` counted."""
        self.macs, self.moved, self.saved = self.macs + other.macs, self.moved + other.moved, self.saved + other.saved


class CallRecorder:
    """Hooks of modules and operations, `before`, `after` and `around`; calls in the order in which they returned.

    With ``writes`` outputs that a later layer overwrites are noted; they are kept alive for that. With a ``tracker``,
    which runs around the pass, each call knows what its units see of the input. With ``sources``, which run around the
    pass too, it knows which calls made what it read.
    """

    def __init__(
        self, model: nn.Module, writes: bool = True, tracker: FieldTracker | None = None, sources: bool = False
    ) -> None:
        self._model, self._writes, self._tracker = model, writes, tracker
        named = list(model.named_modules())
        self._positions = {id(module): position for position, (_, module) in enumerate(named)}
        self._names, self._modules = [name for name, _ in named], len(named)
        self._left = {  # of a pruned weight: what its mask leaves, and all
            position: (int(mask.sum()), mask.numel())
            for position, (_, module) in enumerate(named)
            if (mask := module._buffers.get("weight_mask")) is not None and not mask.is_meta
        }
        self._closed = {position for position, (_, module) in enumerate(named) if is_closed(module)}
        self._begun = 0
        self.sources = SourceTracker(self._reading) if sources else None
        self._open: list[OpenCall] = []
        # outputs: the call, an alias with the same version counter, and the version when it was returned
        self._watched: list[tuple[int, Tensor, int]] = []
        self.calls: list[TracedCall] = []
        self.counted: list[OpenCall] = []  # what was counted in each of `calls`
        self.operations: dict[str, int] = {}
        self._answer: Iterable[int] = ()

    @contextmanager
    def watching(self, ops: bool = True) -> Iterator[None]:
        """Record the calls of layers, and with ``ops`` of operations, that run in the block."""
        with HookHandles() as handles:
            operations = Operations(self._model, self.around)
            if ops:
                operations.modules.watch(handles)
            for module in self._model.modules():
                handles.forward_pre(module, partial(operations.paused, self.before))
                handles.forward(module, partial(operations.paused, self.after))
            yield

    def trace(self, real: bool) -> Trace:
        """What was recorded of one pass."""
        parameters = {key: size for module in self._model.modules() for key, size in _numbers_held(module).items()}
        layers = [*_traced_layers(self._model, {key: position for position, key in enumerate(parameters)})]
        layers += [TracedLayer(name, (name.rpartition(OPERATION)[2],), True, (), "") for name in self.operations]
        positions = {opened.number: position for position, opened in enumerate(self.counted)} | {INPUT: INPUT}

        def known(sources: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted(positions[number] for number in sources if number in positions))

        both = zip(self.calls, self.counted, strict=True)
        calls = tuple(replace(call, reads=known(opened.reads)) if opened.reads else call for call, opened in both)
        return Trace(tuple(layers), calls, tuple(parameters.values()), real, answer=known(self._answer))

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin(self._positions[id(module)], args, kwargs)

    def _begin(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._tracker is not None and not self._open and not self.calls:
            self._tracker.follow([args, kwargs])
        if self.sources is not None and not self._open and not self.calls:
            self.sources.made([args, kwargs], [INPUT])
        self._look_for_writes()
        computes = layer in self._closed or layer >= self._modules
        shape = shape_of(named_inputs(args, kwargs))
        self._open.append(OpenCall(layer, shape, len(self.calls), self._begun, computes))
        self._begun += 1

    def _reading(self) -> tuple[int, set[int]] | None:
        """The number of the call that computes now, and what it read so far."""
        opened = self.innermost
        return (opened.number, opened.reads) if opened is not None and opened.computes else None

    @property
    def innermost(self) -> OpenCall | None:
        """The innermost call that runs now."""
        return self._open[-1] if self._open else None

    def count(self, macs: int, added: int) -> None:
        """Add what `MacCounter` counts to the innermost call that runs now."""
        if self._open:
            left, weights = self._left.get(self._open[-1].layer, (1, 1))
            self._open[-1].macs += macs * left // weights + added

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.sources is not None and not any(module.children()):
            self._note_unknown(self.sources, module, (args, kwargs), output)
        self._end(self._positions[id(module)], output, module)

    def _note_unknown(self, sources: SourceTracker, module: nn.Module, given: Any, output: Any) -> None:
        """Note that a layer made of what it was given what torch did not see it compute, as in another runtime."""
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        outputs = [tensor for tensor in tensors_in(output).values() if id(tensor) not in own]
        if unknown := [tensor for tensor in outputs if not sources.of(tensor)]:
            opened = self._open[-1]
            maker = self.counted[-1] if len(self.calls) > opened.returned else opened
            maker.reads |= {number for number in sources.of(given) if number < opened.number}
            sources.made(unknown, [maker.number])

    def around(self, place: str, kind: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, and record it if its result is a tensor."""
        name = f"{place}{OPERATION}{kind}"
        layer = self.operations.get(name, len(self._names))
        self._begin(layer, args, kwargs)
        output = function(*args, **kwargs)
        result = args[0] if kind == "setitem" else output
        if tensors_in(result):
            if name not in self.operations:
                self.operations[name] = layer
                self._names.append(name)
            self._end(layer, result)
            self.calls[-1] = replace(self.calls[-1], settings=_settings(kind, args, kwargs))
        else:
            self._open.pop()
        return output

    def _end(self, layer: int, output: Any, module: nn.Module | None = None) -> None:
        self._look_for_writes()
        opened = self._open.pop()
        while opened.layer != layer:  # a call that failed, and whose failure the model caught
            failed, opened = opened, self._open.pop()
            opened.add(failed)
            self.calls[failed.returned :] = [replace(c, depth=c.depth - 1) for c in self.calls[failed.returned :]]
        for tensor in tensors_in(output).values() if self._writes else ():
            if tensor.is_inference():  # it has no version
                continue
            alias = tensor.detach()
            self._watched.append((len(self.calls), alias, alias._version))
        shapes = opened.input_shape, shape_of(output)
        self.calls.append(
            TracedCall(opened.layer, len(self._open), *shapes, opened.macs, None, self._field(output, module))
        )
        self.counted.append(opened)
        if self.sources is not None and not self._open:
            self._answer = self.sources.of(output)

    def _field(self, output: Any, module: nn.Module | None) -> ReceptiveField | None:
        """What the units of an output see, if it is one tensor and every operation before it is known."""
        if self._tracker is None or not isinstance(output, Tensor) or self._tracker.of(output) is None:
            return None  # such as what another runtime computed
        field, is_known = computed_field(self._tracker, output, module)
        return field if is_known else None

    def _look_for_writes(self) -> None:
        """Record the layer that runs now as the writer of every output that changed since the last call."""
        running = self._names[self._open[-1].layer] if self._open else ""
        unchanged = []
        with torch._C.DisableTorchFunction():  # a mode would see each look at a version
            for watched in self._watched:
                call, alias, version = watched
                if alias._version == version:
                    unchanged.append(watched)
                else:
                    self.calls[call] = replace(self.calls[call], overwritten_by=running or "the model")
        self._watched = unchanged


def _settings(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, ...]:
    """The number by which an operation multiplies or divides, or the axis, from the end, of a softmax."""
    if kind in ("softmax", "log_softmax"):
        axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
        axes = args[0].dim() if args and isinstance(args[0], Tensor) else 0
        return (axis - axes if axis >= 0 else axis,) if isinstance(axis, int) else ()
    if kind == "scaled_dot_product_attention":
        return (1.0,) if kwargs.get("is_causal", len(args) > 5 and args[5]) else ()
    numbers = [value for value in args if isinstance(value, int | float) and not isinstance(value, bool)]
    return tuple(numbers) if kind.strip("_") in ("mul", "div", "truediv", "imul") else ()


def _traced_layers(model: nn.Module, positions: dict[int, int]) -> Iterator[TracedLayer]:
    """The layers, each with its other names and with the layers that share a parameter with it (tied weights).

    ``positions`` are of the model's parameters, by their ``id``.
    """
    aliases: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(id(module), []).append(name)
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for key in _numbers_held(module):
            owners.setdefault(key, []).append(name)
    for name, module in model.named_modules():
        others = aliases[id(module)][1:]
        own = _numbers_held(module)
        others += [other for key in own for other in owners[key] if other != name]
        shared = ", ".join(dict.fromkeys(others))
        held = tuple(positions[key] for key in own)
        yield TracedLayer(name, tuple(class_names(module)), is_single(name, module), held, shared)


def _numbers_held(module: nn.Module) -> dict[int, int]:
    """How many values each parameter of a layer has, by its ``id``; a quantized layer has packed them into one."""
    held = {id(parameter): parameter.numel() for parameter in module._parameters.values() if parameter is not None}
    weight_and_bias: Any = getattr(module, "_weight_bias", None)
    if "_packed_params" in vars(module) and weight_and_bias is not None:
        packed = [tensor.numel() for tensor in weight_and_bias() if tensor is not None]
        held[id(vars(module)["_packed_params"])] = sum(packed)
    return held
