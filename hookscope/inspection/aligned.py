"""Layers whose weights do not go with the weights of their neighbours: permuted, foreign, transposed. Needs no image.

Rows of a weight that are alike make channels that are alike, and training gives such channels columns that are alike in
the weight that reads them. The same holds for queries and keys, which are multiplied. In a random order of the channels
this is chance. How far two weights are from chance, in standard deviations, is their `alignment`: 5 to 50 in trained
networks, with or without norms between the two.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from torch import Tensor, nn

from hookscope.findings import CATALOGUE, Finding, default
from hookscope.hooks import OPERATION, Shape, activation_class, as_float, class_names, passes_values_on
from hookscope.tracing import INPUT, Trace, TracedCall

MOVES = {"view", "reshape", "permute", "transpose", "flatten", "getitem", "squeeze", "unsqueeze", "movedim", "to"}
"""Functions that move values."""

_ARITHMETIC = {"add", "sub", "mul", "div", "truediv", "pow", "square", "sqrt", "rsqrt", "mean", "var", "std"}
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a block
_FEWEST, _MOST = 20, 192  # channels, below which chance is wide, and that are compared
_LEAST, _DEEPEST = 8, 4096  # values of a channel: two rows of fewer are alike by chance, and more tell nothing more
_DIRECT = "direct"
_DIRECT_OTHERS, _OTHERS = 2, 3  # pairs of one kind that fit, beside one layer at chance, and beside each of several
_CHANCE, _FITS = default("unsuited-weights", "chance"), default("unsuited-weights", "fits")
_USUAL = default("unsuited-weights", "usual")
_CURED = 1.5  # times the usual alignment, which another weight has at least that fits
_TURNED, _PARTS, _HEADS = "turned", ("query", "key", "value"), range(2, 17)
_FUSED = 3  # queries, keys and values in one weight


@dataclass(frozen=True, slots=True)
class Pair:
    """Two layers that share channels, by the names of their weights: the rows ``(channels, *)`` of the first, and the
    columns of the second, which reads them, or its rows, which are multiplied with them."""

    one: str
    other: str
    reads: bool

    def alignment(self, weights: Mapping[str, Tensor]) -> float:
        """How far the likeness of channels in both weights goes together; NaN if it cannot be told."""
        rows, partners = weights[self.one], weights[self.other]
        partners = partners.transpose(0, 1) if self.reads else partners
        if len(rows) != len(partners):
            return math.nan
        some = slice(None, None, -(-len(rows) // _MOST))
        rows, partners = (as_float(each[some]).cpu().flatten(1) for each in (rows, partners))
        rows, partners = (each[:, :: -(-each.shape[1] // _DEEPEST)].double() for each in (rows, partners))
        alive = rows.any(1) & partners.any(1)
        if int(alive.sum()) < _FEWEST or min(rows.shape[1], partners.shape[1]) < _LEAST:
            return math.nan
        return from_chance(_likeness(rows[alive]), _likeness(partners[alive]))


def from_chance(one: Tensor, other: Tensor) -> float:
    """How far two likenesses ``(n, n)`` go together, in standard deviations from a random order of one of them.

    Both are symmetric, and their diagonals do not count. Mean and variance are over all orders (Mantel, 1967): a pair
    of rows meets itself, a pair with one row in common, or a pair with none.
    """
    n = len(one)
    one, other = (each.double() - each.double().diag().diag() for each in (one, other))
    meetings = zip(_products(one), _products(other), (2, 4 * (n - 2), (n - 2) * (n - 3)), strict=True)
    mean = one.sum() * other.sum() / (n * (n - 1))
    variance = sum(a * b / ways for a, b, ways in meetings) / (n * (n - 1)) - mean**2
    return float(((one * other).sum() - mean) / variance.sqrt().clamp(min=1e-30))


def _products(pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of the products of each pair with itself, with the pairs with one row in common, and with the others."""
    itself, rows = 2 * pairs.square().sum(), 4 * pairs.sum(1).square().sum()
    return itself, rows - 2 * itself, pairs.sum() ** 2 + itself - rows


def _likeness(rows: Tensor) -> Tensor:
    """How alike each two of some rows are, less the mean of all; 0 for a row and itself."""
    rows = rows / rows.norm(dim=1, keepdim=True)
    alike = (rows @ rows.T).fill_diagonal_(0)
    return (alike - alike.sum() / (alike.numel() - len(alike))).fill_diagonal_(0)


def misaligned(
    trace: Trace, model: nn.Module, known: Collection[str] = (), drifted: Collection[str] = ()
) -> Iterator[Finding]:
    """The layers whose weights are at chance beside their neighbours, where other pairs of the kind are far from it.

    Weights that are ``known`` to be wrong are left out. Of two layers that do not fit each other alone, it is the one
    in ``drifted``, if there is one.
    """
    flattened = dict(_flattened(trace))
    weights = _weights(model, flattened)
    kinds: dict[str, list[Pair]] = defaultdict(list)
    for kind, pair in _pairs(trace, weights):
        if not {pair.one.partition("[")[0], pair.other.partition("[")[0]} & {*known}:
            kinds[kind].append(pair)
    told: set[str] = set()
    for kind, pairs in kinds.items():
        found = {pair: value for pair in pairs if math.isfinite(value := pair.alignment(weights))}
        broken = {pair: value for pair, value in found.items() if abs(value) <= _CHANCE}
        sound = [value for pair, value in found.items() if pair not in broken]
        apart: list[Pair] = []  # one layer may break two pairs
        for pair in broken:
            if not any({pair.one, pair.other} & {other.one, other.other} for other in apart):
                apart.append(pair)
        fewest = _DIRECT_OTHERS if kind == _DIRECT and len(apart) == 1 else _OTHERS * len(apart)
        if not broken or len(sound) < fewest:
            continue
        usual = float(np.median(sound))
        if min(sound) < _FITS or usual < _USUAL:
            continue
        while broken:
            name, cure = _suspect(broken, found, weights, drifted)
            own = {pair: value for pair, value in broken.items() if name in (pair.one, pair.other)}
            broken = {pair: value for pair, value in broken.items() if pair not in own}
            (pair, value), *_ = own.items()
            if name not in told:
                neighbour = pair.other if pair.one == name else pair.one
                text = f"its weights fit the weights of {_layer(neighbour)} no better than in a random order:"
                text += f" {value:.2g} standard deviations from chance, {usual:.2g} in other layers"
                numbers = {"fit": value, "usual": usual, "times": usual / _USUAL}
                text = f"{cure[1]}; {text}" if cure else text
                yield CATALOGUE["unsuited-weights"].finding(name.partition("[")[0], text, numbers=numbers)
            told |= {name, *cure[:1]}


def _suspect(
    broken: Mapping[Pair, float], found: Mapping[Pair, float], weights: Mapping[str, Tensor], drifted: Collection[str]
) -> tuple[str, tuple[str, ...]]:
    """The weight in most pairs at chance and fewest others, and what would fit in its place: its name, and how."""
    names = dict.fromkeys(name for pair in broken for name in (pair.other, pair.one))  # rather the one that reads
    score = {
        name: sum(1 if pair in broken else -1 for pair in found if name in (pair.one, pair.other)) for name in names
    }
    cures = {name: _cure(name, [pair for pair in broken if name in (pair.one, pair.other)], weights) for name in names}
    best = max(names, key=lambda name: (bool(cures[name]), score[name], _layer(name) in drifted))
    return best, cures[best]


def _cure(name: str, own: Collection[Pair], weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What would fit in the place of a weight: a name and how, or nothing."""
    whole, _, part = name.partition("[")
    others = [] if part else [(name, {name: weights[name].transpose(0, 1)}, "it would fit if it were transposed")]
    for other, values in weights.items():
        if other == f"{name}[{_TURNED}]":
            others.append((name, {name: values}, "it would fit if the maps before it were flattened in another order"))
        elif part and other.startswith(f"{whole}["):
            exchanged = {name: values, other: weights[name]}
            others.append((other, exchanged, "queries, keys and values seem to be in another order"))
        elif not part and "[" not in other:
            text = f"the weights of {_layer(other)} would fit here: they may be exchanged"
            others.append((other, {name: values, other: weights[name]}, text))
    for heads in (heads for heads in _HEADS if part and len(weights[name]) % heads == 0):
        rows = weights[whole].unflatten(0, (heads, _FUSED, -1)).transpose(0, 1).flatten(1, 2)
        parts = {f"{whole}[{part}]": values for part, values in zip(_PARTS, rows, strict=True)}
        others.append((name, parts, f"its rows seem to be ordered by head first, of {heads} heads"))
    best, cure = _CURED * _USUAL, tuple[str, ...]()
    for other, changed, words in others:
        if all(values.shape == weights[key].shape and values is not weights[key] for key, values in changed.items()):
            least = min(pair.alignment({**weights, **changed}) for pair in own)
            if least > best:
                best, cure = least, (other, words)
    return cure


def _layer(name: str) -> str:
    return name.partition("[")[0].removesuffix(".weight")


def _weights(model: nn.Module, flattened: Mapping[str, tuple[int, bool]]) -> dict[str, Tensor]:
    """The weights ``(outputs, channels, positions)`` by their names; queries, keys and values of one weight apart."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        fused, own = getattr(module, "in_proj_weight", None), weights_of(module)
        if isinstance(fused, Tensor):
            own, name = fused.detach()[..., None], f"{name}.in_proj_weight"
        elif own is not None:
            if name in flattened:
                channels, by_channel = flattened[name]
                one, other = (own.flatten(1).unflatten(1, sizes) for sizes in ((channels, -1), (-1, channels)))
                own, turned = (one, other.transpose(1, 2))[:: 1 if by_channel else -1]
                found[f"{name}.weight[{_TURNED}]"] = turned
            found[name := f"{name}.weight"] = own
        if own is not None and own.shape[0] == _FUSED * own.shape[1]:
            found[name] = own
            found |= dict(zip((f"{name}[{part}]" for part in _PARTS), own.chunk(_FUSED), strict=True))
    return found


def _pairs(trace: Trace, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Pair]]:
    """The pairs of the network with their kind: `_DIRECT` where one reads the other, else the names without numbers."""
    made = _makers(trace, weights)
    first, last = [*weights][:1], [*weights][-1:]  # the channels of the first are simple
    seen: set[tuple[str, str]] = set()
    mapped = [at for at, call in enumerate(trace.calls) if _positions(call.input_shape) > 1]
    for number, call in enumerate(trace.calls):
        name = _weight_of(trace, call)
        for maker, (places, bends) in (each for read in call.reads if read != INPUT for each in made[read].items()):
            if name not in weights or not bends or maker in (*first, name) or (maker, name) in seen:
                continue  # a pair without an activation may be at chance in a sound network
            pooled = 1 == _positions(call.input_shape) < places
            pooled = pooled and weights[name].shape[2] == 1  # a gate, or the last layer
            pooled |= 1 == places == _positions(call.input_shape) and number < max(mapped)  # inside a gate
            if len(weights[maker]) == weights[name].shape[1] >= _FEWEST and (name in last or not pooled):
                seen.add((maker, name))
                yield _DIRECT, Pair(maker, name, True)
    blocks: dict[str, list[str]] = defaultdict(list)
    for name, weight in weights.items():
        if weight.shape[2] == 1 and f"{name}[{_PARTS[0]}]" not in weights:
            blocks[_block(name)].append(name)
    for block, names in blocks.items():
        for one, other in combinations(names, 2):
            if len(weights[one]) == len(weights[other]) >= _FEWEST:
                kind = f"{one.removeprefix(block)} {other.removeprefix(block)}"
                yield _NUMBER.sub("", kind), Pair(one, other, False)


def _block(name: str) -> str:
    """The name of the layer around the layer with this weight, or around its parts."""
    whole, _, part = name.partition("[")
    return whole.rpartition(".")[0] if part else _layer(name).rpartition(".")[0]


def _makers(trace: Trace, weights: Mapping[str, Tensor]) -> list[dict[str, tuple[int, bool]]]:
    """For each call the weights whose channels it returns in their order, by name.

    And how many positions these had, and whether they went through an activation function.
    """
    made: list[dict[str, tuple[int, bool]]] = []
    for call in trace.calls:
        layer, name = trace.layers[call.layer], _weight_of(trace, call)
        kind, reads = layer.type.strip("_"), [read for read in call.reads if read != INPUT]
        activates = bool(activation_class(kind))
        own = {maker: (at, bends or activates) for read in reads for maker, (at, bends) in made[read].items()}
        whole = [read for read in reads if trace.calls[read].output_shape == call.output_shape]
        moves = kind in MOVES or passes_values_on(kind) or "pool" in kind or "dropout" in kind
        # with a number, a parameter, or a mean of the same channels, but not with a gate or another stream
        computes = kind in _ARITHMETIC and (len(reads) == 1 or (len(whole) == 1 and own == made[whole[0]]))
        if name in weights:
            made.append({name: (_positions(call.output_shape), False)})
        else:
            made.append(own if moves or computes or activates or "norm" in kind.lower() else {})
    return made


def _weight_of(trace: Trace, call: TracedCall) -> str:
    return f"{trace.layers[call.layer].name.partition(OPERATION)[0]}.weight"


def _positions(shape: Shape) -> int:
    """The number of places of a map or of tokens, where each has channels."""
    return math.prod(shape[2:] if len(shape) > 3 else shape[1:-1]) if isinstance(shape, tuple) else 0


def _flattened(traced: Trace) -> Iterator[tuple[str, tuple[int, bool]]]:
    """The Linear layers that read maps in one row: the number of channels, and whether one channel follows another."""
    for call in traced.calls:
        layer = traced.layers[call.layer]
        if "Linear" not in layer.types or not isinstance(call.input_shape, tuple) or len(call.input_shape) != 2:
            continue
        shapes: list[tuple[int, ...]] = []
        at = call.reads
        while len(at) == 1 and at[0] != INPUT:  # the last maps that a layer made, and how they were turned
            maker = traced.calls[at[0]]
            shape, at = maker.output_shape, maker.reads
            if isinstance(shape, tuple) and len(shape) == 4 and math.prod(shape[1:]) == call.input_shape[1]:
                shapes.append(shape)
                if OPERATION not in traced.layers[maker.layer].name:
                    break
            elif shapes:
                break
        if shapes and shapes[-1][2] * shapes[-1][3] > 1:
            channels = shapes[-1][1]
            yield layer.name, (channels, shapes[0][1] == channels)


def weights_of(module: nn.Module) -> Tensor | None:
    """The weights ``(outputs, inputs, positions)`` of a convolution without groups or of a Linear layer."""
    convolves, weight = "_ConvNd" in class_names(module), getattr(module, "weight", None)
    if not (convolves or isinstance(module, nn.Linear)) or getattr(module, "groups", 1) != 1:
        return None
    if not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.is_floating_point() or weight.is_meta:
        return None
    weight = weight.detach()[..., None].flatten(2)
    return weight.transpose(0, 1) if getattr(module, "transposed", False) else weight
