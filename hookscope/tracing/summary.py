"""One pass without arithmetic: every call in order, with shapes, parameters, MACs and the layer that overwrites it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.errors import InputError, ModelError, is_out_of_memory
from hookscope.geometry import FieldTracker, ReceptiveField, computed_field
from hookscope.hooks import (
    OPERATION,
    HookHandles,
    LayerCall,
    Operations,
    Selection,
    Shape,
    buffers_kept,
    check_hookable,
    class_names,
    is_closed,
    is_single,
    named_inputs,
    other_hooks_set_aside,
    random_states_kept,
    shape_of,
    tensors_in,
    types_of,
)
from hookscope.models import example_inputs, first_channels, forward_error, meta_forward
from hookscope.tracing.facts import INPUT, LayerTotals, Trace, TracedCall, TracedLayer, rows_of_type, totals_of_type
from hookscope.tracing.macs import MacCounter
from hookscope.tracing.sources import SourceTracker

Inputs = tuple[Any, ...] | Mapping[str, Any]


@contextmanager
def everything_as_before(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Run the block in one mode and without other hooks, then put back modes, attributes, buffers and random states.

    A detector keeps the anchors it computed as an attribute, and those of a pass on the meta device would spoil every
    later pass. Containers among the attributes are put back too, but not what lies deeper in them.
    """
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    plain = (dict, OrderedDict, list, set)
    values = [value for _, own in attributes for value in own.values() if type(value) in plain]
    contents = [(container, copy.copy(container)) for container in values]
    with (
        torch.inference_mode(False),  # inside it tensors do not count writes
        torch.no_grad(),
        random_states_kept(),
        other_hooks_set_aside(model),
        buffers_kept(model),
    ):
        try:
            model.train(training)
            yield
        finally:
            for module, own in attributes:
                vars(module).clear()
                vars(module).update(own)
            for container, content in contents:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def trace(
    model: nn.Module,
    inputs: Inputs,
    *,
    dry: bool = True,
    name: str = "",
    ops: bool = True,
    fields: bool = False,
    sources: bool = False,
) -> Trace:
    """Run ``model`` without arithmetic, or with it where the model needs values, and record every call.

    ``inputs`` are a tuple of positional inputs or a mapping of keywords. Modes, hooks, buffers and random states of the
    model are as before afterwards. Only hooks that are part of the model fire meanwhile, see `other_hooks_set_aside`; a
    model that needs another one to take the input is refused. ``dry=False`` goes straight to the real pass. Without
    ``ops`` no operations are recorded, which saves a quarter of the time. With ``fields`` each call knows what its
    units see of the input, as far as the operations before it are known. With ``sources``, and operations, each call
    knows which calls made what it read. Errors call the model ``name``, by default that of its class.

    Raises:
        InputError: when the model refuses the input, or needs values and is on the meta device.
        ModelError: for scripted and compiled models, and lazy ones that never ran.
    """
    check_traceable(model)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    refusal: Exception | None = None
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    for real in [False] * dry + [True] * (not on_meta or not dry):
        tracker = FieldTracker() if fields else None
        recorder = CallRecorder(model, tracker=tracker, sources=sources)
        try:
            with (
                everything_as_before(model),
                recorder.watching(ops),
                MacCounter(recorder.count),
                tracker or nullcontext(),
                recorder.sources or nullcontext(),
            ):
                _ = model(*args, **kwargs) if real else meta_forward(model, args, kwargs)
            return recorder.trace(real)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            refusal = error
    assert refusal is not None
    raise forward_error(name or type(model).__name__, inputs, refusal) from refusal


def check_traceable(model: nn.Module) -> None:
    """Raise a ModelError for scripted and compiled models, and lazy ones that never ran."""
    check_hookable(model)
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:  # the first pass makes lazy layers other layers, and cannot be undone
        raise ModelError(f"'{lazy}' has no shape yet: the model is lazy", do="run it once on a real input first")


def _traced_layers(model: nn.Module, positions: dict[int, int]) -> Iterator[TracedLayer]:
    """The layers, each with its other names and with the layers that share a parameter with it (tied weights).

    ``positions`` are those of the model's parameters, by their ``id``.
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


def list_layers(
    model: nn.Module,
    input_size: Sequence[int] = (224, 224),
    types: Iterable[Any] | None = None,
    inputs: Inputs | None = None,
    *,
    ops: bool = False,
) -> list[LayerCall]:
    """Every call of the chosen types in one forward pass of ``model``, in order of execution.

    Args:
        model: Any eager module; torchvision's detectors, clips and flow models get the input their family needs.
        input_size: ``(H, W)`` of the picture, ``(D, H, W)`` of a clip or volume, or a whole shape such as
            ``(1, 1, 28, 28)``.
        types: Class names (or classes), ``("all",)`` for every layer without children or with own parameters. None for
            Conv2d (Conv3d in models of clips); with ``ops`` all calls are listed then.
        inputs: The positional inputs as a tuple, or a mapping of keywords, instead of ``input_size``.
        ops: Whether operations that are not modules, such as `torch.relu` and ``+``, are calls too. Their type is the
            name of the function, and their name begins with that of the module in which they run: ``block1::relu``.

    Multiply-accumulates are half of the FLOPs that torch's formulas count for what each call computes itself, and
    one for each value that a convolution adds its bias to. A row counts the layers inside it that have no row. With
    ``all`` the numbers of all rows add up to those of the model, and calls of blocks that compute beside the layers in
    them have rows without an index.

    Returns:
        Rows with index, name, type, call, order, shapes, params, MACs and a note; layers that did not run come last.

    Raises:
        LayerError: when the model has no layer of the types.
        InputError: when the model refuses the input.

    Example:
        >>> import torch
        >>> rows = list_layers(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), (9, 9))
        >>> rows[0].name, rows[0].output_shape, rows[0].macs
        ('0', (1, 8, 7, 7), 10976)
    """
    return rows_of_type(trace_at(model, input_size, inputs, fields=True), types, ops)


def layer_totals(
    model: nn.Module,
    input_size: Sequence[int] = (224, 224),
    types: Iterable[Any] | None = None,
    inputs: Inputs | None = None,
) -> LayerTotals:
    """The parameters and multiply-accumulates of ``model``, and of its calls of the chosen types.

    Arguments and errors are those of `list_layers`, and so are the rules by which it counts.

    Example:
        >>> import torch
        >>> totals = layer_totals(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)), (9, 9))
        >>> totals.params, totals.type_params, totals.macs
        (240, 224, 10976)
    """
    return totals_of_type(trace_at(model, input_size, inputs, fields=True), types)


def named(model: nn.Module, layers: Selection, input_size: Sequence[int]) -> Selection:
    """``layers`` with the names of the layers that `list_layers` shows at its indices."""
    if not layers.counts:
        return layers
    calls = [(row.index, row.name) for row in list_layers(model, input_size) if row.index is not None]
    types, _ = types_of(model, None)
    layers.check_ran([], len(calls), types, [name for name, _ in model.named_modules()])
    names = [name for index, name in calls if layers.wants_index(index, len(calls))]
    return Selection([*(term for term in layers.terms if not term.counts), Selection.of_names(names)])


def trace_at(model: nn.Module, input_size: Sequence[int], inputs: Inputs | None = None, **options: Any) -> Trace:
    """The trace of one pass; ``input_size`` and ``inputs`` are those of `list_layers`, the options those of `trace`."""
    if inputs is not None:
        return trace(model, inputs, **options)
    counts = dict.fromkeys([None, first_channels(model)]) if len(input_size) == 2 else [None]
    return first_accepted(model, (example_inputs(model, input_size, channels) for channels in counts), **options)


def first_accepted(model: nn.Module, candidates: Iterable[Inputs], name: str = "", **options: Any) -> Trace:
    """The trace with the first inputs that the model takes; the error is that of the first of all."""
    refusals = []
    for inputs in candidates:
        try:
            return trace(model, inputs, name=name, **options)
        except InputError as error:
            refusals.append(error)
    raise refusals[0]


@dataclass(slots=True)
class OpenCall:
    """A call that has begun: its layer, how many calls had returned, and what was counted in it itself so far.

    That are MACs, and for a plan of memory the bytes that it moved and those that autograd keeps. ``computes`` says
    that what it calls itself is its own work, unlike that of a block of other layers; ``reads`` are the calls, by the
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


@dataclass(slots=True)
class _WatchedOutput:
    """An output of a call: an alias with the same version counter, and the version when it was returned."""

    call: int
    alias: Tensor
    version: int


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
        self._watched: list[_WatchedOutput] = []
        self.calls: list[TracedCall] = []
        self.counted: list[OpenCall] = []  # what was counted in each of `calls`
        self.operations: dict[str, int] = {}
        self._answer: Iterable[int] = ()

    @contextmanager
    def watching(self, ops: bool = True) -> Iterator[None]:
        """Record the calls of layers, and with ``ops`` those of operations, that run in the block."""
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
        parameters = {key: size for each in self._model.modules() for key, size in _numbers_held(each).items()}
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
            self._watched.append(_WatchedOutput(len(self.calls), alias, alias._version))
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
        for output in self._watched:
            if output.alias._version == output.version:
                unchanged.append(output)
            else:
                self.calls[output.call] = replace(self.calls[output.call], overwritten_by=running or "the model")
        self._watched = unchanged
