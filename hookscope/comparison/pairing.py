"""Which call of A belongs to which call of B."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from math import log, prod

import numpy as np
from numpy.typing import NDArray

from hookscope.comparison.side import WITH_WEIGHTS, functions_of, hands_on, is_activation, takes
from hookscope.errors import LayerError, UsageError, near_misses
from hookscope.hooks import OPERATION, Call, Shape, call_key, enclosing


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A call of one side, the shape of its output for one image, and the shapes of its layer's own parameters.

    ``sources`` are the keys of the calls that made its inputs, ``uses`` the parameters that an operation takes.
    """

    call: Call
    shape: Shape
    parameters: Mapping[str, tuple[int, ...]]
    sources: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two calls that stand for each other, ``paired_by`` as in `PairedCall`.

    Where a layer of B does the work of a run of calls of A that ends with ``a``, the run begins with ``first``; and
    with ``first_b`` the other way round. Else these are the calls themselves.
    """

    a: Call
    b: Call
    paired_by: str
    first: Call
    first_b: Call


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs in order of execution of A, and the calls of each side without a partner.

    Calls that only hand values on or rearrange them need no partner, such as ``Dropout`` and ``Flatten``, nor do the
    calls of a run before its last. ``free_a`` and ``free_b`` have them too.
    """

    pairs: tuple[Pair, ...]
    only_a: tuple[Call, ...] = ()
    only_b: tuple[Call, ...] = ()
    free_a: tuple[Call, ...] = ()
    free_b: tuple[Call, ...] = ()


LostCalls = tuple[tuple[Call, ...], tuple[Call, ...]]  # of A, of B

_BLOCK = "block"  # a layer with parameters of its own around layers with weights
_MAPPED = 1000.0  # score of a pair that the caller chose
_NEIGHBOURS = 0.5  # of two pairs that follow each other on both sides; less than any pair


class _PairingSide:
    """The calls of one side, and what is known of each, by position."""

    def __init__(self, side: Sequence[SeenCall], names: Sequence[str]) -> None:
        self.calls = [call.call for call in side]
        self.shapes = [_only_part(call.shape) for call in side]
        self.names = names  # keys, without the prefix of this side
        self.functions = [functions_of(call.call.type) for call in side]
        self.hands_on = [hands_on(call.call.type) for call in side]
        # of matrices and kernels; frameworks order the axes differently
        self.weights = [
            tuple(sorted(tuple(sorted(shape)) for shape in call.parameters.values() if len(shape) > 1)) for call in side
        ]
        outer = [_outer_names(call.name) for call in self.calls]
        blocks = {name for names_, weights in zip(outer, self.weights, strict=True) if weights for name in names_}
        self.kinds = [
            _BLOCK if call.call.name in blocks else "bias" if words == ("add",) and call.parameters else words[0]
            for words, call in zip(self.functions, side, strict=True)
        ]
        # calls inside a layer that is not a block, such as the activation in a BatchNormAct2d
        layers = {call.name for call in self.calls}.difference(blocks)
        self.inside = {at: names_ & layers for at, names_ in enumerate(outer) if names_ & layers}
        self.free = set(range(len(side)))

    def free_between(self, start: int, stop: int) -> list[int]:
        """Those that need a partner, outside of other layers."""
        places = range(start, stop)
        return [at for at in places if at in self.free and not self.hands_on[at] and at not in self.inside]

    def computes_one(self, at: int) -> bool:
        return self.kinds[at] != _BLOCK and len(self.functions[at]) == 1

    def left(self) -> tuple[Call, ...]:
        """The calls that need a partner and have none, nor has the layer that they are in."""
        without = {call.name for at, call in enumerate(self.calls) if at in self.free}
        free = (at for at in sorted(self.free) if not self.hands_on[at])
        return tuple(self.calls[at] for at in free if self.inside.get(at, without) & without)

    def run_after(self, at: int, functions: Sequence[str]) -> list[int]:
        """The free calls after ``at`` whose work a layer does that computes ``functions``."""
        run: list[int] = []
        ends_active = any(is_activation(function) for function in functions[1:])
        for following in range(at + 1, len(self.calls)):
            kind = self.kinds[following]
            if self.hands_on[following]:
                continue
            is_folded = not run and kind in ("batchnorm", "bias") and self.kinds[at] in WITH_WEIGHTS
            is_named = kind in functions[1:] or (is_activation(kind) and ends_active)
            if following not in self.free or self.shapes[following] != self.shapes[at] or not (is_folded or is_named):
                break
            run.append(following)
        return run

    def end_of_run(self, run: Sequence[int]) -> int:
        """The last call of a run of several, or what follows and turns the axes of its output."""
        end = run[-1]
        for at in range(end + 1, len(self.calls)) if len(run) > 1 else ():
            if self.kinds[at] not in ("reshape", "transpose"):
                break
            end = at if self.shapes[at] == self.shapes[run[-1]] else end
        return end

    def start_of_run(self, at: int, kind: str) -> int:
        """The call of this kind that begins the run that ends ``at``; ``at`` itself where there is none."""
        for first in range(at, -1, -1):
            if self.shapes[first] != self.shapes[at]:
                break
            if self.kinds[first] == kind:
                return first
        return at


@dataclass(slots=True)
class _Match:
    """Positions of a pair: a run of calls of each side, mostly of one call, by its first and its last."""

    first_a: int
    a: int
    first_b: int
    b: int
    paired_by: str


def pair_calls(a: Sequence[SeenCall], b: Sequence[SeenCall], names: Mapping[str, str] | None = None) -> Pairing:
    """The pairs of two passes: by ``names`` where they say so, else by name, kind of function, weights and shape.

    The pairs are those that agree most among all that keep the order of both sides; then calls out of order pair by
    name. One layer pairs with a run of calls of the other side where it does their work: where a BatchNorm, a bias or
    an activation follows on one side only, and between two pairs.

    ``names`` are layers or keys of calls, A to B; a ``*`` in both stands for the same text. LayerError for a layer that
    did not run; UsageError for a ``*`` on one side only, and for two partners of a call of B.
    """
    base, other = (_PairingSide(side, keys) for side, keys in zip((a, b), _without_prefixes(a, b), strict=True))
    mapped = _mapped(base.calls, other.calls, names or {})
    matches: list[_Match] = []

    def match(i: int, j: int) -> None:
        if i in base.free and j in other.free:
            how = "map" if i in mapped else "name" if base.names[i] == other.names[j] else "order"
            matches.append(_Match(i, i, j, j, how))
            base.free.remove(i)
            other.free.remove(j)

    for i, j in (*mapped.items(), *_aligned(base, other, mapped)):
        match(i, j)
    positions = {name: j for j, name in enumerate(other.names)}
    for i, name in enumerate(base.names):
        j = positions.get(name, -1)
        if j in other.free and base.functions[i][0] == other.functions[j][0]:
            match(i, j)
    matches.sort(key=lambda pair: pair.a)
    matches = list(_folded(base, other, matches))
    if matches:
        matches += _between(base, other, matches)
    matches.sort(key=lambda pair: pair.a)
    pairs = tuple(
        Pair(base.calls[it.a], other.calls[it.b], it.paired_by, base.calls[it.first_a], other.calls[it.first_b])
        for it in matches
    )
    free_a, free_b = (tuple(side.calls[at] for at in sorted(side.free)) for side in (base, other))
    return Pairing(pairs, base.left(), other.left(), free_a, free_b)


def _only_part(shape: Shape) -> Shape:
    """The shape of the only tensor: attention may return its weights as None."""
    return next(iter(shape.values())) if isinstance(shape, dict) and len(shape) == 1 else shape


def _outer_names(name: str) -> set[str]:
    """The modules that a call is inside of, without the model itself."""
    module, operation, _ = name.partition(OPERATION)
    return {*enclosing(module if operation else module.rpartition(".")[0])} - {""}


_UNNAMED = re.compile(r"_orig_mod\.")  # what torch.compile puts into names


def _without_prefixes(a: Sequence[SeenCall], b: Sequence[SeenCall]) -> tuple[list[str], list[str]]:
    """The keys of both sides without the prefixes that keep most of them from being equal, such as ``module.``."""
    keys_a, keys_b = ([_UNNAMED.sub("", record.call.key) for record in side] for side in (a, b))
    prefixes = product(_prefixes(keys_a), _prefixes(keys_b))
    choices = [(_without(keys_a, of_a), _without(keys_b, of_b)) for of_a, of_b in prefixes]
    return max(choices, key=lambda choice: len(set(choice[0]).intersection(choice[1])))


def _prefixes(keys: Sequence[str]) -> list[str]:
    """None, and the names of modules that more than half of the calls are in, the outermost first."""
    counts = Counter(key[: at.start()] for key in keys for at in re.finditer(r"\.|(?<!^)::", key))
    return ["", *(name for name, count in counts.items() if 2 * count > len(keys))]


def _without(keys: Sequence[str], module: str) -> list[str]:
    prefix = re.compile(rf"^{re.escape(module)}(\.|(?=::))")
    return [prefix.sub("", key) for key in keys] if module else list(keys)


def _mapped(a: Sequence[Call], b: Sequence[Call], names: Mapping[str, str]) -> dict[int, int]:
    """The positions in B of the calls of A that ``names`` gives a partner."""
    positions = {call.key: j for j, call in enumerate(b)}
    pairs: dict[int, int] = {}
    for name_a, name_b in sorted(names.items(), key=lambda item: "*" in item[0]):  # exact names win
        if name_a.count("*") != name_b.count("*") or "*" in name_a.replace("*", "", 1):
            raise UsageError(f"'{name_a}' does not map to '{name_b}'", do="write one * in both names, or in neither")
        start, star, end = name_a.partition("*")
        pattern = re.compile(re.escape(start) + ("(.*)" if star else "()") + re.escape(end), re.DOTALL)
        partners: dict[int, int | None] = {}
        for i, call in enumerate(a):
            if name := pattern.fullmatch(call.name):
                partners[i] = positions.get(call_key(name_b.replace("*", name[1]), call.call))
            elif key := pattern.fullmatch(call.key):
                partners[i] = positions.get(name_b.replace("*", key[1]))
        if not partners:
            raise _did_not_run(name_a, "A", a)
        if all(j is None for j in partners.values()):
            raise _did_not_run(name_b, "B", b)
        pairs |= {i: j for i, j in partners.items() if j is not None and i not in pairs}
    twice = [j for j, count in Counter(pairs.values()).items() if count > 1]
    if twice:
        both = " and ".join(f"'{a[i].key}'" for i, j in pairs.items() if j == twice[0])
        raise UsageError(f"{both} map to the same '{b[twice[0]].key}'", do="give each call of B one partner")
    return pairs


def _did_not_run(name: str, side: str, calls: Sequence[Call]) -> LayerError:
    near = near_misses(name, [call.key for call in calls])
    exists = f"nearest: {', '.join(near)}" if near else f"{len(calls)} calls ran"
    do = "see ‹list_layers(model, types='all')|list-layers --type all›"
    return LayerError(f"no layer '{name}' ran in {side}", exists, do, kind="layer", name=name)


def _aligned(base: _PairingSide, other: _PairingSide, mapped: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The pairs with the highest sum of scores that keep the order of both sides (Needleman and Wunsch 1970)."""
    start = 0 if mapped else _same_start(base, other)
    yield from ((at, at) for at in range(start))
    rows, columns = (side.free_between(start, len(side.calls)) for side in (base, other))
    scores = _scores(base, other, rows, columns, mapped)
    # the best sums of the first i and j calls: with a pair of the last two, and without
    paired = np.full((len(rows) + 1, len(columns) + 1), -np.inf, np.float32)
    apart = np.zeros_like(paired)
    for i, score in enumerate(scores, 1):
        before = np.maximum(paired[i - 1, :-1] + _NEIGHBOURS, apart[i - 1, :-1])
        paired[i, 1:] = np.where(score > 0, score + before, -np.inf)
        above = np.maximum(paired[i - 1], apart[i - 1])
        left = np.maximum.accumulate(np.maximum(paired[i], above))
        apart[i, 0], apart[i, 1:] = above[0], np.maximum(above[1:], left[:-1])
    i, j = len(rows), len(columns)
    as_pair = paired[i, j] > apart[i, j]
    while i and j:
        if as_pair:
            i, j = i - 1, j - 1
            yield rows[i], columns[j]
            as_pair = paired[i, j] + _NEIGHBOURS > apart[i, j]
        else:
            i, j = (i - 1, j) if max(paired[i - 1, j], apart[i - 1, j]) == apart[i, j] else (i, j - 1)
            as_pair = paired[i, j] > apart[i, j]


def _same_start(base: _PairingSide, other: _PairingSide) -> int:
    """Number of first calls that are the same in everything that scores: mostly all calls, and no table is needed."""
    calls = (zip(side.names, side.functions, side.shapes, side.weights, strict=True) for side in (base, other))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*calls, strict=False)))


def _scores(
    base: _PairingSide, other: _PairingSide, rows: Sequence[int], columns: Sequence[int], mapped: Mapping[int, int]
) -> Iterator[NDArray[np.float64]]:
    """For each row how well the calls of the columns agree with it; 0 for calls without a partner."""

    def codes(of_a: Sequence[object], of_b: Sequence[object]) -> tuple[list[int], NDArray[np.int_]]:
        table: dict[str, int] = {}
        numbers = [table.setdefault(str(value), len(table)) for value in (*of_a, *of_b)]
        return [numbers[i] for i in rows], np.array([numbers[len(of_a) + j] for j in columns], int)

    kind, kinds = codes(base.kinds, other.kinds)
    name, names = codes(base.names, other.names)
    shape, shapes = codes(base.shapes, other.shapes)
    weight, weights = codes(base.weights, other.weights)
    has_weights = np.array([bool(other.weights[j]) for j in columns], bool)
    activations = np.array([is_activation(other.kinds[j]) for j in columns], bool)
    is_mapped = np.isin(columns, list(mapped.values()))
    for row, i in enumerate(rows):
        if i in mapped:
            yield np.where(np.array(columns) == mapped[i], _MAPPED, 0.0)
            continue
        same_kind, same_name, same_shape = kinds == kind[row], names == name[row], shapes == shape[row]
        comparable = has_weights & bool(base.weights[i])
        same_weights = comparable & (weights == weight[row])
        score = 4 * same_name + 2 * same_shape + 3 * same_weights
        score = np.where(comparable & ~same_weights, score - 1, score)
        other_activation = activations & is_activation(base.kinds[i])
        score = np.where(other_activation & ~same_kind, np.minimum(score, 1.5), score)
        score = np.where(same_kind | other_activation, score, same_name & same_shape)
        yield np.where(is_mapped, 0.0, score)


def _folded(base: _PairingSide, other: _PairingSide, matches: Sequence[_Match]) -> Iterator[_Match]:
    """The pairs, extended to calls that follow on one side and whose work the layer of the other side does.

    Without those whose layer computes an activation too that no call of the other side shows.
    """
    for pair in matches:
        if pair.paired_by == "map":  # what the caller wrote; the run that ends there
            pair.first_a = base.start_of_run(pair.a, other.kinds[pair.b])
            pair.first_b = other.start_of_run(pair.b, base.kinds[pair.a])
            base.free.difference_update(range(pair.first_a, pair.a))
            other.free.difference_update(range(pair.first_b, pair.b))
        else:
            run_a = base.run_after(pair.a, other.functions[pair.b])
            run_b = other.run_after(pair.b, base.functions[pair.a])
            active_a, active_b = (
                any(map(is_activation, (*side.functions[at][1:], *(side.kinds[number] for number in run))))
                for side, at, run in ((base, pair.a, run_a), (other, pair.b, run_b))
            )
            if active_a != active_b and "act" not in (*base.functions[pair.a], *other.functions[pair.b]):
                base.free.add(pair.a)
                other.free.add(pair.b)
                continue
            if bool(run_a) != bool(run_b):  # else another layer follows on both sides
                base.free.difference_update(run_a)
                other.free.difference_update(run_b)
                pair.a, pair.b, pair.paired_by = (run_a or [pair.a])[-1], (run_b or [pair.b])[-1], "folded"
        yield pair


def _between(base: _PairingSide, other: _PairingSide, matches: Sequence[_Match]) -> Iterator[_Match]:
    """Pairs of what is left between two pairs: one call of a side, and a run of the other that ends in its shape.

    Else the calls that are the only ones of their kind there.
    """
    ends = [(-1, -1), *((pair.a, pair.b) for pair in matches)]
    starts = [*((pair.first_a, pair.first_b) for pair in matches), (len(base.calls), len(other.calls))]
    for (end_a, end_b), (start_a, start_b) in zip(ends, starts, strict=True):
        a, b = (
            [at for at in side.free_between(end + 1, start) if side.computes_one(at)]
            for side, end, start in ((base, end_a, start_a), (other, end_b, start_b))
        )
        for side, run in ((base, a), (other, b)):
            while len(run) > 1 and side.kinds[run[-1]] == "add":  # past a residual connection, that the other may hide
                run.pop()
        is_pair = a and b and 1 in (len(a), len(b)) and base.shapes[a[-1]] == other.shapes[b[-1]]
        if is_pair and takes(base.calls[a[-1]].type) == takes(other.calls[b[-1]].type):
            base.free.difference_update(a)
            other.free.difference_update(b)
            how = "order" if len(a) == len(b) else "folded"
            last_a, last_b = (side.end_of_run(run) for side, run in ((base, a), (other, b)))
            yield _Match(a[0], last_a, b[0], last_b, how)
            continue
        kinds_a, kinds_b = ([side.kinds[at] for at in rest] for side, rest in ((base, a), (other, b)))
        for kind in {*kinds_a} & {*kinds_b}:
            if kinds_a.count(kind) == kinds_b.count(kind) == 1:
                i, j = a[kinds_a.index(kind)], b[kinds_b.index(kind)]
                base.free.remove(i)
                other.free.remove(j)
                yield _Match(i, i, j, j, "order")


def nothing_pairs(a: Sequence[SeenCall], b: Sequence[SeenCall]) -> LayerError:
    base, other = (_PairingSide(side, [record.call.key for record in side]) for side in (a, b))
    sizes = [
        (abs(log(prod(x) + 1) - log(prod(y) + 1)), i, j)
        for i, x in enumerate(base.shapes)
        for j, y in enumerate(other.shapes)
        if base.kinds[i] == other.kinds[j] and isinstance(x, tuple) and isinstance(y, tuple)
    ]
    if sizes:
        _, i, j = min(sizes)
        near = f"nearest: {_described(a[i])} and {_described(b[j])}"
    else:
        near = "; ".join(
            f"{name} has {', '.join(dict.fromkeys(record.call.type for record in side)) or 'no calls'}"
            for name, side in (("A", a), ("B", b))
        )
    return LayerError("no layer of A pairs with one of B", near, "name the pairs with ‹names|--map FILE›")


def _described(record: SeenCall) -> str:
    return f"{record.call.key} ({record.call.type}, {'x'.join(map(str, _only_part(record.shape) or ()))})"
