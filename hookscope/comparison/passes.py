"""The forward passes of both sides: A keeps copies of what its calls return, and B meets them call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from hookscope.comparison.cka import gram
from hookscope.comparison.facts import INPUT
from hookscope.comparison.inputs import PairedBatch, copied
from hookscope.comparison.pairing import Pair, Pairing
from hookscope.comparison.rows import RowSums
from hookscope.comparison.side import Side
from hookscope.hooks import (
    EVERY_OPERATION,
    MODEL,
    OPERATION,
    Call,
    Observer,
    Selection,
    buffers_kept,
    map_tensors,
    named_inputs,
    random_states_kept,
    tensors_in,
)
from hookscope.models import model_errors_as_input_errors


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller of `compare` wants to know, in its words."""

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
    """

    pairing: Pairing
    with_alone: set[str]
    with_maps: set[str]
    matrix_a: dict[str, Call]
    matrix_b: dict[str, Call]
    bytes: float
    ops: bool

    @cached_property
    def by_a(self) -> dict[str, Pair]:
        return {pair.a.key: pair for pair in self.pairing.pairs}

    @cached_property
    def by_b(self) -> dict[str, Pair]:
        return {pair.b.key: pair for pair in self.pairing.pairs}


def run_side(side: Side, inputs: tuple[Any, ...], observers: Sequence[Observer] = ()) -> Any:
    """The output of a pass; all passes begin with the same random state, and leave it and the buffers as they were."""
    with ExitStack() as stack:
        stack.enter_context(random_states_kept())
        stack.enter_context(buffers_kept(side.net.model))
        stack.enter_context(model_errors_as_input_errors(side.net.name, inputs))
        stack.enter_context(side.conditions())
        for observer in observers:
            stack.enter_context(observer)
        return side.net.model(*copied(inputs))


@dataclass(slots=True)
class Kept:
    """What a call of A leaves for B: copies of its inputs and of its output."""

    module: Any
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    output: Any


class Copies:
    """Copies of tensors; one that was copied before, and not written to since, is not copied again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], int, Tensor]] = {}
        self.bytes = 0

    def of(self, value: Any) -> Any:
        with torch._C.DisableTorchFunction():  # a copy is not an operation of the model
            return map_tensors(value, self._copy)

    def _copy(self, tensor: Tensor) -> Tensor:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        twin = tensor.detach().clone()
        self.bytes += twin.numel() * twin.element_size()
        if not tensor.is_inference():  # torch counts no writes to those
            self._known[id(tensor)] = (ref(tensor), tensor._version, twin)
        return twin


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
    lasts = {(pair.first or pair.a).key: pair.a.key for pair in pairs if pair.a.key in calls.with_alone}
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
            args, kwargs = inputs.pop(call.key, (None, {}))
            kept[call.key] = Kept(module, args, kwargs, copies.of(output))

    looked_at = [call for pair in pairs for call in (pair.first, pair.a) if call is not None]
    observers = observers_of(a, [*looked_at, *calls.matrix_a.values()], calls.ops, on_call, on_input)
    return kept, copied(run_side(a, batch.a, observers)), grams


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
        if pair.a.key in calls.with_alone and of_a.args is not None:
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
    whole = not _has_fractions(batch.a)
    for inputs in (batch.a, map_tensors(batch.a, _rounded)):

        def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any, again: Any = inputs) -> Any:
            if whole and again is not batch.a and not _has_fractions((args, kwargs)):
                output = map_tensors(output, _rounded)
            if call.key in kept:
                rows.add_noise(call.key, kept[call.key].output, output, batch)
            return output if whole else None

        looked_at = [pair.a for pair in calls.pairing.pairs]
        again = run_side(a, inputs, observers_of(a, looked_at, calls.ops, on_call))
        rows.add_noise(MODEL, output, again, batch, listed)
        rows.add_noise(INPUT, named_inputs(batch.a, {}), named_inputs(inputs, {}), batch, listed)


def _has_fractions(value: Any) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors_in(value).values())


def _rounded(tensor: Tensor) -> Tensor:
    """``tensor`` with each value changed by about one unit in the last place, up or down."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(2, tensor.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    step = torch.finfo(tensor.dtype).eps * signs.to(tensor.device)
    return (tensor.double() * (1 + step.double())).to(tensor.dtype) if tensor.device.type != "mps" else tensor
