"""Blocks and layers that compute something else than those like them: a lost skip, an activation, an axis, a scale.

And attention whose weights do not add up to 1 for each query.

A network has few kinds of blocks and repeats them: one that leaves out a step of all others is hardly another kind. The
first of a kind begins a stage and may differ: it is judged by what it leaves out alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from hookscope.findings import CATALOGUE, Finding, counted
from hookscope.hooks import OPERATION, Shape, activation_class, enclosing, passes_values_on
from hookscope.inspection.aligned import MOVES, weights_of
from hookscope.tracing import Trace, TracedCall, TracedLayer

_FEWEST, _FEWER = 3, 2  # blocks or layers that do the same, where one does not
_STEPS = 2  # in which it differs at most: more are another kind of block
_LINEAR = {"add", "iadd", "sub", "cat", "contiguous", "mean", "mul", "div", "truediv", "interpolate", "pad", "clone"}
_PRODUCTS = {"matmul", "bmm"}  # an einsum may sum over any axis
_POOLS = ("max_pool", "avg_pool")

Steps = tuple[str, ...]
"""What a block runs, in order: layers by name and class, operations by function and settings."""


def unlike_siblings(trace: Trace, model: nn.Module) -> Iterator[Finding]:
    """The blocks that differ in a step or two from three or more alike, and a convolution without activation."""
    kinds: dict[tuple[object, ...], dict[str, Steps]] = defaultdict(dict)
    adding: set[str] = set()  # stages with a block that adds
    for name, children, kept, steps in _blocks(trace):
        kinds[children, kept].setdefault(name, steps)  # a skip needs equal shapes
        kinds[children,].setdefault(name, steps)
        adding |= {name.rpartition(".")[0]} if "add" in steps else set()
    found: dict[str, Finding] = {}
    for kind, blocks in kinds.items():
        usual, times = Counter(blocks.values()).most_common(1)[0]
        odd = [name for name, steps in blocks.items() if steps != usual]
        if len(odd) != 1:
            continue
        own, most = Counter(blocks[odd[0]]), Counter(usual)
        missing, added = [*(most - own).elements()], [*(own - most).elements()]
        is_first, keeps = odd[0] == next(iter(blocks)), len(kind) == 2 and bool(kind[1])
        activations = not added and all(map(_activates, missing))
        lost = not added and all(_activates(step) or _normalises(step) for step in missing)  # no block leaves these out
        same = keeps and times >= _FEWEST and not added and all(step == "add" or _normalises(step) for step in missing)
        if (
            times < (_FEWER if lost else _FEWEST)
            or (is_first and not activations and not same)
            or (len(kind) == 1 and "add" in (*missing, *added))
            or ("add" in missing and odd[0].rpartition(".")[0] not in adding)
        ):
            continue
        if (
            1 <= max(len(missing), len(added)) <= _STEPS  # the order of steps may be free
            and all(not _layer_of(step) or _activates(step) or _normalises(step) for step in missing)
            and all(_activates(step) or not _layer_of(step) for step in added)
        ):
            words = [f"does not run {', '.join(missing)}"] * bool(missing) + [f"runs {', '.join(added)}"] * bool(added)
            text = f"it {' but '.join(words)}, unlike {counted(times, 'other block')} like it"
            finding = CATALOGUE["unlike-siblings"].finding(odd[0], text, numbers={"alike": times})
            meant = not missing and all(map(_activates, added))  # as in Xception
            found[odd[0]] = replace(finding, severity="note") if meant else finding
    yield from found.values()
    followers: dict[int, list[int]] = defaultdict(list)
    for at, call in enumerate(trace.calls):
        for read in call.reads:
            followers[read].append(at)
    yield from _attends_wrongly(trace, followers)
    for finding in _without_activation(trace, model, followers):
        if not found.keys() & set(enclosing(finding.layer)):
            yield finding


def _layer_of(step: str) -> str:
    """The class of a layer; empty for an operation."""
    return step.partition(" ")[2]


def _activates(step: str) -> bool:
    return bool(activation_class(_layer_of(step) or step))


def _normalises(step: str) -> bool:
    """Whether it is a norm, such as ``norm1 LayerNorm2d``, and not a block with one, such as ConvNormAct."""
    return _layer_of(step).rstrip("123d").endswith("Norm")


def _blocks(trace: Trace) -> Iterator[tuple[str, Steps, bool, Steps]]:
    """Of each call of a layer with layers inside: its name, its children, whether it keeps shapes, and its steps."""
    children: dict[str, list[str]] = defaultdict(list)
    for layer in trace.layers:
        parent, _, own = layer.name.rpartition(".")
        if layer.name and OPERATION not in layer.name:
            children[parent].append(own)
    running: dict[int, list[str]] = defaultdict(list)  # the steps so far of the call at each depth
    for call in trace.calls:
        layer = trace.layers[call.layer]
        steps = running.pop(call.depth + 1, [])
        own = layer.name.rpartition(OPERATION if OPERATION in layer.name else ".")[2]
        if OPERATION in layer.name:
            settings = ", ".join(f"{value:.4g}" for value in call.settings)
            running[call.depth].append(f"{own}({settings})" if settings else own.rstrip("_"))
        elif layer.type != "Identity":
            running[call.depth].append(f"{own} {layer.type}")
        if layer.name in children:
            yield layer.name, tuple(children[layer.name]), call.input_shape == call.output_shape, tuple(steps)


def _attends_wrongly(trace: Trace, followers: dict[int, list[int]]) -> Iterator[Finding]:
    """The first attention whose softmax is not over the keys, which the product with the values sums over."""
    wrong: list[tuple[str, float]] = []
    for at, call in enumerate(trace.calls):
        shape = call.output_shape if isinstance(call.output_shape, tuple) else ()
        if call.settings and "softmax" in trace.layers[call.layer].type and len(shape) > 2 and shape[-1] == shape[-2]:
            summed = any(_weighs(trace, trace.calls[reader], shape) for reader in followers[at])
            wrong += [(trace.layers[call.layer].name, call.settings[0])] * (summed and call.settings[0] != -1)
    if wrong:
        name, axis = wrong[0]
        also = f", as in {counted(len(wrong) - 1, 'later block')}" * (len(wrong) > 1)
        text = f"its softmax is over axis {axis}, and its product with the values sums over axis -1{also}"
        yield CATALOGUE["attention-axis"].finding(name.partition(OPERATION)[0], text, numbers={"axis": axis})


def _weighs(trace: Trace, call: TracedCall, shape: Shape) -> bool:
    """Whether it is a product with the attention ``shape`` as its left factor, whose last axis it sums over."""
    given = call.input_shape if isinstance(call.input_shape, dict) else {}
    return trace.layers[call.layer].type in _PRODUCTS and given.get("0") == shape != given.get("1")


def _without_activation(trace: Trace, model: nn.Module, followers: dict[int, list[int]]) -> Iterator[Finding]:
    """The only convolution whose output reaches the next layer with weights without an activation function."""
    weights = {name: weight for name, module in model.named_modules() if (weight := weights_of(module)) is not None}
    linear: dict[str, bool] = {}
    for at, call in enumerate(trace.calls):
        name = trace.layers[call.layer].name
        if name in weights and weights[name].shape[2] > 1:
            linear[name] = linear.get(name, False) or _reaches(at, trace, followers)
    odd = [name for name, is_linear in linear.items() if is_linear]
    if len(odd) == 1 and len(linear) > _FEWEST and odd[0] != next(iter(linear)):
        outputs, inputs = weights[odd[0]].shape[:2]
        if outputs >= inputs:  # a narrow code is linear
            text = f"no activation function follows it, unlike {counted(len(linear) - 1, 'other convolution')}"
            finding = CATALOGUE["unlike-siblings"].finding(odd[0], text, numbers={"alike": len(linear) - 1})
            is_last = odd[0] == next(reversed(linear))  # which may be meant as the features of a head
            yield replace(finding, severity="note") if is_last else finding


def _reaches(at: int, trace: Trace, followers: dict[int, list[int]]) -> bool:
    """Whether a layer with weights reads, by linear steps, what the call ``at`` returned."""
    left, seen = [at], {at}
    while left:
        for follower in followers[left.pop()]:
            call = trace.calls[follower]
            layer = trace.layers[call.layer]
            if {"_ConvNd", "Linear"} & {*layer.types}:
                return True
            if follower not in seen and _is_linear(layer, call):
                left.append(follower)
                seen.add(follower)
    return False


def _is_linear(layer: TracedLayer, call: TracedCall) -> bool:
    kind = layer.type.rstrip("_")
    by_tensor = kind in ("mul", "div", "truediv") and not call.settings
    moves = kind in _LINEAR | MOVES or any(pool in kind for pool in _POOLS) or "dropout" in kind
    return (moves and not by_tensor) or "Norm" in kind or passes_values_on(kind)
