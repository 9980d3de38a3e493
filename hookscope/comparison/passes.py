"""The forward passes of both sides: the first finds and pairs the calls; then A keeps copies, and B meets them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookscope.comparison.cka import gram
from hookscope.comparison.facts import INPUT
from hookscope.comparison.inputs import PairedBatch
from hookscope.comparison.pairing import LostCalls, Pair, Pairing, SeenCall, nothing_pairs, pair_calls
from hookscope.comparison.rows import RowSums, shape_for_one
from hookscope.comparison.side import FUNCTIONAL, Side, is_layer_type
from hookscope.hooks import (
    EVERY_OPERATION,
    MODEL,
    OPERATION,
    Call,
    KnownTensors,
    Observer,
    Operation,
    Selection,
    buffers_kept,
    enclosing,
    map_tensors,
    named_inputs,
    output_of,
    random_states,
    random_states_kept,
    tensors_in,
)
from hookscope.models import model_errors_as_input_errors


@dataclass(frozen=True, slots=True)
class Wanted:
    layers: Selection | None
    types: tuple[Any, ...] | None
    ops: bool
    names: Mapping[str, str]
    alone: bool
    matrix: bool
    keep: Selection | None


@dataclass
class ComparedCalls:
    """The calls that are compared.

    Attributes:
        pairing: The pairs that are wanted, and the calls without a partner.
        with_alone: Keys of the calls of A on whose inputs the layer of B runs too.
        with_maps: Keys of the calls of A whose maps are kept.
        matrix_a: Calls of A for the CKA of all against all, by key.
        matrix_b: The same of B.
        bytes: What is kept of A for one image.
        ops: Whether operations may be among the calls.
        draws: The sides whose pass draws random numbers: ``A``, ``B``, ``AB`` or none.
        lost: For the key of a call of A, the calls of A and of B without a partner through which its inputs came.
        uses: For the key of an operation of A, the parameters that it and its partner take.
    """

    pairing: Pairing
    with_alone: set[str]
    with_maps: set[str]
    matrix_a: dict[str, Call]
    matrix_b: dict[str, Call]
    bytes: float
    ops: bool
    draws: str
    lost: dict[str, LostCalls]
    uses: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]

    @cached_property
    def by_a(self) -> dict[str, Pair]:
        return {pair.a.key: pair for pair in self.pairing.pairs}

    @cached_property
    def by_b(self) -> dict[str, Pair]:
        return {pair.b.key: pair for pair in self.pairing.pairs}


def run_side(side: Side, inputs: tuple[Any, ...], observers: Sequence[Observer] = ()) -> Any:
    """The output of a pass; all passes begin with the same random state, and leave it and the buffers as they were."""
    errors = model_errors_as_input_errors(side.net.name, inputs)
    with random_states_kept(), buffers_kept(side.net.model), errors, side.conditions(), ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer)
        run = side.net.model if side.compiled else partial(output_of, side.net.model)  # whose mode stops torch.compile
        return run(*map_tensors(inputs, torch.clone))  # the first layer may work in place


@dataclass(slots=True)
class Kept:
    module: Any
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None
    output: Any


class Copies:
    """Copies of tensors; one that was copied before, and not written to since, is not copied again."""

    def __init__(self) -> None:
        self._known = KnownTensors[Tensor]()
        self.bytes = 0

    def of(self, value: Any) -> Any:
        with torch._C.DisableTorchFunction():  # a copy is not an operation of the model
            return map_tensors(value, self._copy)

    def _copy(self, tensor: Tensor) -> Tensor:
        if (known := self._known.of(tensor)) is not None:
            return known
        twin = tensor.detach().clone()
        self.bytes += twin.numel() * twin.element_size()
        self._known.add(tensor, twin)
        return twin


class Makers:
    """Which call made each tensor of a pass."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], str]] = {}

    def add(self, key: str, output: Any) -> None:
        self._known |= {id(tensor): (ref(tensor), key) for tensor in tensors_in(output).values()}

    def of(self, values: Any) -> tuple[str, ...]:
        """The keys of the calls that made the tensors in ``values``, as far as it was seen."""
        known = [(tensor, self._known.get(id(tensor))) for tensor in tensors_in(values).values()]
        return tuple(dict.fromkeys(made[1] for tensor, made in known if made and made[0]() is tensor))


def observers_of(side: Side, calls: Iterable[Call], ops: bool, on_call: Any, on_input: Any = None) -> list[Observer]:
    """Of the layers of ``calls``, all of whose calls are looked at: a later pass may make fewer than the first."""
    names = list(dict.fromkeys(call.name for call in calls if OPERATION not in call.name))
    if not names:
        return []
    layers = Selection([Selection.of_names(names), *([EVERY_OPERATION] if ops else [])])
    return [Observer(side.net.model, layers, None, on_call, ops=ops, on_input=on_input)]


def keep_outputs(a: Side, batch: PairedBatch, calls: ComparedCalls) -> tuple[dict[str, Kept], Any, dict[str, Tensor]]:
    """A pass of A: copies of the inputs and outputs of paired calls, its output, and grams for the matrix."""
    kept: dict[str, Kept] = {}
    grams: dict[str, Tensor] = {}
    inputs: dict[str, tuple[Any, Any]] = {}
    copies = Copies()
    pairs = calls.pairing.pairs
    lasts = {pair.first.key: pair.a.key for pair in pairs if pair.a.key in calls.with_alone}
    modules = dict(a.net.model.named_modules())
    wanted = {id(modules.get(key.partition("#")[0])) for key in lasts}

    def on_input(module: Any, args: Any, kwargs: Any) -> Any:
        return copies.of((args, kwargs)) if id(module) in wanted else None

    def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if call.key in calls.matrix_a:
            _add_gram(grams, call.key, output, len(batch.names))
        if (last := lasts.get(call.key)) is not None and observers[0].input is not None:
            inputs[last] = observers[0].input
        if call.key in calls.by_a:
            kept[call.key] = Kept(module, inputs.pop(call.key, None), copies.of(output))

    looked_at = [call for pair in pairs for call in (pair.first, pair.a)]
    observers = observers_of(a, [*looked_at, *calls.matrix_a.values()], calls.ops, on_call, on_input)
    return kept, map_tensors(run_side(a, batch.inputs, observers), torch.clone), grams


def meet_outputs(
    b: Side,
    batch: PairedBatch,
    calls: ComparedCalls,
    kept: dict[str, Kept],
    on_pair: Callable[[Pair, Kept, Any, Any], None],
    on_alone: Callable[[Pair, Kept, Callable[..., Any], Any], None],
) -> tuple[Any, dict[str, Tensor]]:
    """A pass of B; what was kept of A is dropped as soon as it was compared.

    ``on_pair`` is called with the module and the output of B; ``on_alone`` with what runs its layer, and its inputs.
    """
    grams: dict[str, Tensor] = {}
    later: list[tuple[Pair, Kept, Any, Any]] = []

    def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if call.key in calls.matrix_b:
            _add_gram(grams, call.key, output, len(batch.names))
        pair = calls.by_b.get(call.key)
        of_a = kept.pop(pair.a.key, None) if pair is not None else None
        if pair is None or of_a is None:
            return
        on_pair(pair, of_a, module, output)
        if pair.a.key in calls.with_alone and of_a.inputs is not None:
            if b.changes:  # whose hooks count the calls of this pass
                later.append((pair, of_a, module, (args, kwargs)))
            else:
                on_alone(pair, of_a, module.forward, (args, kwargs))

    looked_at = [*(pair.b for pair in calls.pairing.pairs), *calls.matrix_b.values()]
    output = run_side(b, batch.b, observers_of(b, looked_at, calls.ops, on_call))
    if later:
        with b.conditions():
            for run in later:
                on_alone(*run)
    return output, grams


def _add_gram(grams: dict[str, Tensor], key: str, output: Any, images: int) -> None:
    tensor = next(iter(tensors_in(output).values()), None)
    if tensor is not None and tensor.dim() and len(tensor) == images:
        grams[key] = gram(tensor)


def measure_noise(
    a: Side, batch: PairedBatch, calls: ComparedCalls, kept: Mapping[str, Kept], output: Any, rows: RowSums
) -> None:
    """Run A again, and with its input changed by rounding.

    Where whole numbers are the input, such as tokens, the first numbers with fractions that come of them change.
    """
    listed = a.net.family == "detection"
    whole = not _has_fractions(batch.inputs)
    for inputs in (batch.inputs, map_tensors(batch.inputs, _rounded)):

        def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any, again: Any = inputs) -> Any:
            if whole and again is not batch.inputs and not _has_fractions((args, kwargs)):
                output = map_tensors(output, _rounded)
            if call.key in kept:
                rows.add_noise(call.key, kept[call.key].output, output, batch)
            return output if whole else None

        looked_at = [pair.a for pair in calls.pairing.pairs]
        again = run_side(a, inputs, observers_of(a, looked_at, calls.ops, on_call))
        rows.add_noise(MODEL, output, again, batch, listed)
        rows.add_noise(INPUT, named_inputs(batch.inputs, {}), named_inputs(inputs, {}), batch, listed)


def _has_fractions(value: Any) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors_in(value).values())


def _rounded(tensor: Tensor) -> Tensor:
    """``tensor`` with each value changed by about one unit in the last place, up or down."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(2, tensor.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    step = torch.finfo(tensor.dtype).eps * signs.to(tensor.device)
    return (tensor.double() * (1 + step.double())).to(tensor.dtype) if tensor.device.type != "mps" else tensor


def may_run_alone(pair: Pair, module: nn.Module | None, holders: Container[str]) -> bool:
    """Whether B's layer, ``module``, runs by itself: no operation, and no block of other layers that are compared."""
    if module is None or pair.first_b != pair.b or pair.b.type in FUNCTIONAL:  # the hooked Identity adds nothing
        return False
    inner = (parameter for child in module.children() for parameter in child.parameters())
    return pair.a.name not in holders or next(inner, None) is None


def run_alone(forward: Callable[..., Any], inputs: Any, given: Any) -> Any:
    """What ``forward`` of a layer gives on the inputs ``(args, kwargs)`` of another layer.

    ``given`` are the inputs that the layer had in its own pass: inputs of the other layer get their data type, device
    and scale of quantisation.
    """
    like = next(iter(tensors_in(given).values()), None)
    # the same tensor in two places is one tensor in the copy too: attention depends on it
    args, kwargs = map_tensors(inputs, cache(lambda tensor: _as(tensor, like)))
    with random_states_kept():
        return forward(*args, **kwargs)


def _as(tensor: Tensor, like: Tensor | None) -> Tensor:
    """A copy of ``tensor`` in the form of ``like``; a layer may work in place."""
    if like is None:
        return tensor.clone()
    if tensor.is_quantized and not like.is_quantized:
        tensor = tensor.dequantize()
    if like.is_quantized and tensor.is_floating_point():
        tensor = tensor.to(like.device, torch.float32)
        return torch.quantize_per_tensor(tensor, like.q_scale(), like.q_zero_point(), like.dtype)
    dtype = like.dtype if tensor.is_floating_point() and like.is_floating_point() else tensor.dtype
    return tensor.to(like.device, dtype, copy=True)


def find_calls(a: Side, b: Side, batch: PairedBatch, wanted: Wanted) -> ComparedCalls:
    """The calls of a pass of each side, paired; LayerError if A has no such layer, or no layers pair."""
    images = len(batch.names)
    named_a, named_b = (
        {name.partition("#")[0] for name in side if "*" not in name and OPERATION not in name}
        for side in (wanted.names, wanted.names.values())
    )
    named = [Selection.of_names(named_a)] if named_a else []
    usual = Selection(["all", *([EVERY_OPERATION] if wanted.ops else []), *named])
    chosen = Selection([wanted.layers or usual, *([] if wanted.keep is None else [wanted.keep])])
    look_a = _look(a, batch.inputs, images, wanted, chosen)
    look_b = _look(b, batch.b, images, wanted)
    singles = {record.call.key for look in (look_a, look_b) for record in look.seen if record.call.order is not None}
    keys = singles | look_a.chosen
    of_a = [record for record in look_a.seen if record.call.key in keys or record.call.name in named_a]
    of_b = [record for record in look_b.seen if record.call.key in keys or record.call.name in named_b]
    chosen_a = [record for record in of_a if record.call.key in look_a.chosen]
    pairing = pair_calls(of_a, of_b, wanted.names)
    pairs = tuple(pair for pair in pairing.pairs if pair.a.key in look_a.chosen)
    if not (pairs or wanted.matrix) and (of_a or of_b):  # models of one layer have an input and an output
        raise nothing_pairs(chosen_a, of_b)
    free_a, free_b = ({call.key for call in calls} for calls in (pairing.free_a, pairing.free_b))
    ends = {pair.a.key: (pair.first.key, pair.first_b.key) for pair in pairs}
    ends[MODEL] = MODEL, MODEL
    lost = {key: (look_a.lost(a, free_a), look_b.lost(b, free_b)) for key, (a, b) in ends.items()}
    uses = {key: (look_a.uses(a), look_b.uses(b)) for key, (a, b) in ends.items()}
    every = wanted.ops or a.is_onnx == b.is_onnx  # else one side shows no operations, and the other no blocks
    only_a, only_b = (
        tuple(call for call in calls if every or is_layer_type(call.type))
        for calls in (pairing.only_a, pairing.only_b if wanted.layers is None else ())
    )
    holders = {name for pair in pairs for name in itertools.islice(enclosing(pair.a.name), 1, None)}
    modules_b = dict(b.net.model.named_modules())
    paired = Pairing(pairs, tuple(call for call in only_a if call.key in look_a.chosen), only_b)
    able = (pair.a.key for pair in pairs if may_run_alone(pair, modules_b.get(pair.b.name), holders))
    matrices = [{record.call.key: record.call for record in side if wanted.matrix} for side in (chosen_a, of_b)]
    alone, size = set(able) if wanted.alone else set[str](), look_a.bytes / images
    draws, maps = "A" * look_a.draws + "B" * look_b.draws, look_a.with_maps
    return ComparedCalls(paired, alone, maps, matrices[0], matrices[1], size, wanted.ops, draws, lost, uses)


@dataclass(slots=True)
class _Look:
    """The calls of a pass; of A also the chosen ones, those whose maps are kept, and the bytes of their outputs."""

    seen: list[SeenCall] = field(default_factory=list)
    chosen: set[str] = field(default_factory=set)
    with_maps: set[str] = field(default_factory=set)
    bytes: int = 0
    draws: bool = False  # random numbers
    by_key: dict[str, SeenCall] = field(default_factory=dict)

    def lost(self, key: str, free: Container[str]) -> tuple[Call, ...]:
        """The calls in ``free`` from which the inputs of a call came, back to calls that are not in ``free``."""
        found: dict[str, Call] = {}
        left = [key]
        while left:
            seen = self.by_key.get(left.pop())
            for source in seen.sources if seen else ():
                if source in free and source not in found:
                    found[source] = self.by_key[source].call
                    left.append(source)
        return tuple(sorted(found.values(), key=lambda call: call.order or 0))

    def uses(self, key: str) -> tuple[str, ...]:
        return self.by_key[key].uses if key in self.by_key else ()


def _look(side: Side, inputs: tuple[Any, ...], images: int, wanted: Wanted, chosen: Selection | None = None) -> _Look:
    look, copies, makers = _Look(), Copies(), Makers()
    parameters = {id(parameter): name for name, parameter in side.net.model.named_parameters()}
    of_chosen: list[Call] = []
    of_maps: list[Call] = []

    def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if call.name and tensors_in(output):
            parts = {part: shape_for_one(tensor, images) for part, tensor in tensors_in(output).items()}
            own = {} if isinstance(module, Operation) else dict(module.named_parameters(recurse=False))
            shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
            given = tensors_in((args, kwargs)).values() if isinstance(module, Operation) else ()
            uses = tuple(parameters[id(tensor)] for tensor in given if id(tensor) in parameters)
            # what a block returns was made inside of it
            sources = makers.of((args, kwargs, output))
            look.seen.append(SeenCall(side.named(call), parts.get("", parts), shapes, sources, uses))
            look.by_key[call.key] = look.seen[-1]
            if call.order is not None:
                makers.add(call.key, output)
        elif not call.name:
            look.draws = random_states() != before
            look.by_key[MODEL] = SeenCall(call, None, {}, makers.of(output))

    def on_chosen(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        copies.of(([args, kwargs] if wanted.alone else [], output))
        of_chosen.append(call)

    def observer(layers: Selection, on_call: Any, ordered: bool = True) -> Observer:
        return Observer(side.net.model, layers, wanted.types, on_call, ops=wanted.ops, ordered=ordered)

    observers = [observer(Selection(["*", EVERY_OPERATION] if wanted.ops else "*"), on_call)]
    if chosen is not None:
        observers.append(observer(chosen, on_chosen))
        if wanted.keep is not None:
            observers.append(observer(wanted.keep, lambda call, *_: of_maps.append(call), False))
    before = random_states()
    run_side(side, inputs, observers)
    # only at the end of a pass is it known which calls negative indices mean
    look.chosen = {call.key for call in of_chosen if call.name and observers[1].wanted(call)}
    look.with_maps = {call.key for call in of_maps if observers[-1].wanted(call)}
    look.bytes = copies.bytes
    return look
