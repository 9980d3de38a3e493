"""The first pass of each side: it shows which calls there are, and these are paired."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.comparison.inputs import PairedBatch
from hookscope.comparison.pairing import Pair, Pairing, SeenCall, nothing_pairs, pair_calls
from hookscope.comparison.passes import ComparedCalls, Copies, Wanted, run_side
from hookscope.comparison.rows import shape_for_one
from hookscope.comparison.side import FUNCTIONAL, Side, is_layer_type
from hookscope.hooks import (
    EVERY_OPERATION,
    OPERATION,
    Call,
    Observer,
    Operation,
    Selection,
    enclosing,
    map_tensors,
    random_states_kept,
    tensors_in,
)


def may_run_alone(pair: Pair, module: nn.Module | None, holders: Container[str]) -> bool:
    """Whether B's layer, ``module``, runs by itself: no operation, and no block of other layers that are compared."""
    if module is None or pair.first_b is not None or pair.b.type in FUNCTIONAL:  # the hooked Identity adds nothing
        return False
    inner = (parameter for child in module.children() for parameter in child.parameters())
    return pair.a.name not in holders or next(inner, None) is None


def run_alone(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Any:
    """What ``forward`` of a layer gives on the inputs of another layer.

    ``given`` are the inputs that the layer had in its own pass: inputs of the other layer get their data type, device
    and scale of quantisation.
    """
    like = next(iter(tensors_in(given).values()), None)
    # the same tensor in two places is one tensor in the copy too: attention depends on it
    args, kwargs = map_tensors((args, kwargs), cache(lambda tensor: _as(tensor, like)))
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
    """The calls of a pass of each side, paired.

    Raises:
        LayerError: A has no such layer, or no layers pair.
    """
    images = len(batch.names)
    named_a, named_b = (
        {name.partition("#")[0] for name in side if "*" not in name and OPERATION not in name}
        for side in (wanted.names, wanted.names.values())
    )
    named = [Selection.of_names(named_a)] if named_a else []
    usual = Selection(["all", *([EVERY_OPERATION] if wanted.ops else []), *named])
    chosen = Selection([wanted.layers or usual, *([] if wanted.keep is None else [wanted.keep])])
    look_a = _look(a, batch.a, images, wanted, chosen)
    look_b = _look(b, batch.b, images, wanted)
    singles = {seen.call.key for look in (look_a, look_b) for seen in look.seen if seen.call.order is not None}
    keys = singles | look_a.chosen
    of_a = [seen for seen in look_a.seen if seen.call.key in keys or seen.call.name in named_a]
    of_b = [seen for seen in look_b.seen if seen.call.key in keys or seen.call.name in named_b]
    chosen_a = [seen for seen in of_a if seen.call.key in look_a.chosen]
    found = pair_calls(of_a, of_b, wanted.names)
    pairs = tuple(pair for pair in found.pairs if pair.a.key in look_a.chosen)
    if not (pairs or wanted.matrix) and (of_a or of_b):  # models of one layer have an input and an output
        raise nothing_pairs(chosen_a, of_b)
    every = wanted.ops or a.is_onnx == b.is_onnx  # else one side shows no operations, and the other no blocks
    only_a, only_b = (
        tuple(call for call in calls if every or is_layer_type(call.type))
        for calls in (found.only_a, found.only_b if wanted.layers is None else ())
    )
    holders = {name for pair in pairs for name in itertools.islice(enclosing(pair.a.name), 1, None)}
    modules_b = dict(b.net.model.named_modules())
    return ComparedCalls(
        Pairing(pairs, tuple(call for call in only_a if call.key in look_a.chosen), only_b),
        {pair.a.key for pair in pairs if wanted.alone and may_run_alone(pair, modules_b.get(pair.b.name), holders)},
        look_a.with_maps,
        {seen.call.key: seen.call for seen in chosen_a if wanted.matrix},
        {seen.call.key: seen.call for seen in of_b if wanted.matrix},
        look_a.bytes / images,
        wanted.ops,
    )


@dataclass(slots=True)
class _Look:
    """The calls of a pass; of A also the chosen ones, those whose maps are kept, and the bytes of their outputs."""

    seen: list[SeenCall] = field(default_factory=list)
    chosen: set[str] = field(default_factory=set)
    with_maps: set[str] = field(default_factory=set)
    bytes: int = 0


def _look(side: Side, inputs: tuple[Any, ...], images: int, wanted: Wanted, chosen: Selection | None = None) -> _Look:
    look, copies = _Look(), Copies()
    of_chosen: list[Call] = []
    of_maps: list[Call] = []

    def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if call.name and tensors_in(output):
            parts = {part: shape_for_one(tensor, images) for part, tensor in tensors_in(output).items()}
            own = {} if isinstance(module, Operation) else dict(module.named_parameters(recurse=False))
            shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
            look.seen.append(SeenCall(side.named(call), parts.get("", parts), shapes))

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
    run_side(side, inputs, observers)
    # only at the end of a pass is it known which calls negative indices mean
    look.chosen = {call.key for call in of_chosen if call.name and observers[1].wanted(call)}
    look.with_maps = {call.key for call in of_maps if observers[-1].wanted(call)}
    look.bytes = copies.bytes
    return look
