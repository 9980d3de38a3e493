"""What part of the input every value of a tensor depends on, followed through the operations of a forward pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.hooks import storage_key, tensors_in

Indices = float | NDArray[np.floating[Any]] | NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """How a position moves along an axis of a tensor: index ``i`` adds ``(i // inner % count) * step`` pixels."""

    dim: int
    inner: int
    count: int
    step: float


@dataclass(frozen=True, slots=True)
class Reach:
    """The rows, or the columns, of the input that a value depends on: ``start`` to ``end``, moved on by ``parts``.

    Attributes:
        parts: How the position in the tensor moves the interval; empty where all values see the same.
        start: First pixel.
        end: One after the last pixel.
        joined: The first operation that joined positions.
        ignored: What else reaches the value, the same at all positions, such as the gate of squeeze-and-excitation.
        known: Whether every operation on the way is known here.
    """

    parts: tuple[Part, ...]
    start: float
    end: float
    joined: str = ""
    ignored: str = ""
    known: bool = True

    def without(self, dims: Collection[int], why: str) -> Reach:
        """The interval of all values along ``dims`` together."""
        return self.without_parts({part for part in self.parts if part.dim in dims}, why)

    def without_parts(self, gone: Collection[Part], why: str) -> Reach:
        """The interval of all values that ``gone`` lead to together."""
        if not gone:
            return self
        more = sum(part.step * (part.count - 1) for part in gone)
        why = self.joined or (why if any(part.count > 1 for part in gone) else "")
        kept = tuple(part for part in self.parts if part not in gone)
        return replace(self, parts=kept, end=self.end + more, joined=why)

    def unknown(self, why: str) -> Reach:
        return replace(self, parts=(), start=-math.inf, end=math.inf, joined=self.joined or why, known=False)

    def regular(self, dim: int, length: int) -> Reach:
        """The same with at most one part along ``dim``, a step for each index; the interval grows where it must."""
        here = [part for part in self.parts if part.dim == dim]
        if not here or (len(here) == 1 and here[0].inner == 1 and here[0].count == length):
            return self
        index = np.arange(length)
        at = np.zeros(length)
        for part in here:
            at += index // part.inner % part.count * part.step
        step = sum(part.step * part.count for part in here) / length
        return self._fitted(dim, at, at, step)

    def _fitted(self, dim: int, low: NDArray[Any], high: NDArray[Any], step: float) -> Reach:
        """Intervals that begin ``low`` and end ``high`` pixels later, as one that moves ``step`` for each index."""
        moved = np.arange(len(low)) * step
        others = tuple(part for part in self.parts if part.dim != dim)
        start, end = self.start + float((low - moved).min()), self.end + float((high - moved).max())
        return replace(self, parts=(*others, Part(dim, 1, len(low), step)), start=start, end=end)

    def resampled(self, dim: int, length: int, ratio: float, first: Indices, last: Indices, count: int) -> Reach:
        """Of ``count`` values along ``dim``, each made of the indices ``first`` to ``last`` of ``length``.

        ``first`` and ``last`` are those of each new index, or one number each, to which ``ratio`` times the index is
        added.
        """
        reach = self.regular(dim, length)
        part = next((part for part in reach.parts if part.dim == dim), None)
        if part is None:
            return self
        index = np.arange(count)
        low, high = (each + index * ratio if isinstance(each, int | float) else each for each in (first, last))
        return reach._fitted(dim, low * part.step, high * part.step, part.step * ratio)

    def renumbered(self, dims: Callable[[int], int | None], why: str) -> Reach:
        """The same with other numbers of the axes; those without are gone."""
        moved = [(part, dims(part.dim)) for part in self.parts]
        parts = tuple(replace(part, dim=dim) for part, dim in moved if dim is not None)
        return replace(self.without({part.dim for part, dim in moved if dim is None}, why), parts=parts)

    def viewed(self, before: Sequence[int], after: Sequence[int]) -> Reach:
        """Of a tensor of shape ``before`` that is seen in the shape ``after``."""
        parts: list[Part] = []
        lost: list[Part] = []
        for part in self.parts:
            low = part.inner * math.prod(before[part.dim + 1 :])
            pieces, count = [], 1
            for dim, length in enumerate(after):
                each = math.prod(after[dim + 1 :])
                bottom, top = max(low, each), min(low * part.count, each * length)
                if bottom < top and not (bottom % each or top % bottom or bottom % low):
                    pieces.append(Part(dim, bottom // each, top // bottom, part.step * (bottom // low)))
                    count *= top // bottom
            (lost if count != part.count else parts).extend(pieces if count == part.count else [part])
        reach = self.without({part.dim for part in lost}, "view") if lost else self
        return replace(reach, parts=tuple(sorted(parts)))


Field = tuple[Reach, Reach]
"""The rows and the columns that the values of a tensor depend on."""


def union(a: Reach, b: Reach, shape: Sequence[int], why: str) -> Reach:
    """What values see that depend on one value of ``a`` and one of ``b``, tensors of one ``shape``."""
    if a.parts != b.parts:
        own = [{part.dim for part in set(each.parts) - set(other.parts)} for each, other in ((a, b), (b, a))]
        dims = [dim for dim in own[0] & own[1] if _alone(a, dim) and _alone(b, dim)]
        for dim in dims:
            a, b = a.regular(dim, shape[dim]), b.regular(dim, shape[dim])
        a, b = min(((_stepped(a, of, dims), _stepped(b, of, dims)) for of in (a, b)), key=lambda pair: _length(*pair))
        common, why = set(a.parts) & set(b.parts), a.joined or b.joined or why
        a, b = (each.without_parts(set(each.parts) - common, why) for each in (a, b))
    return Reach(
        a.parts,
        min(a.start, b.start),
        max(a.end, b.end),
        a.joined or b.joined,
        a.ignored or b.ignored,
        a.known and b.known,
    )


def _alone(reach: Reach, dim: int) -> bool:
    """Whether ``reach`` moves along ``dim`` at most in blocks, not again and again over the same pixels."""
    return len([part for part in reach.parts if part.dim == dim]) <= 1


def _stepped(reach: Reach, like: Reach, dims: Collection[int]) -> Reach:
    """``reach`` with the steps of ``like`` along ``dims``; the interval grows by what they differ."""
    steps = {part.dim: part.step for part in like.parts if part.dim in dims}
    parts, start, end = [], reach.start, reach.end
    for part in reach.parts:
        drift = (part.step - steps.get(part.dim, part.step)) * (part.count - 1)
        start, end = start + min(drift, 0), end + max(drift, 0)
        parts.append(replace(part, step=steps.get(part.dim, part.step)))
    return replace(reach, parts=tuple(parts), start=start, end=end)


def _length(a: Reach, b: Reach) -> float:
    return max(a.end, b.end) - min(a.start, b.start)


class Followed(NamedTuple):
    """What is known of a tensor: its field, and the axes along which all its values are the same."""

    field: Field
    flat: frozenset[int] = frozenset()

    def each(self, change: Callable[[Reach], Reach], flat: Iterable[int] = ()) -> Followed:
        return Followed((change(self.field[0]), change(self.field[1])), frozenset(flat))


class Operation:
    """One operation of a pass: its name, its arguments by name, its output, and what is known of its tensors."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], of: Callable[[Tensor], Any]) -> None:
        names = [argument.name for argument in function._schema.arguments]
        self.name = function.overloadpacket.__name__
        self.given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        self.tensors = [tensor for value in self.given.values() for tensor in tensors_in(value).values()]
        self.known = {id(tensor): known for tensor in self.tensors if (known := of(tensor)) is not None}
        self.takes = set(names)
        self.output: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)

    @property
    def input(self) -> Tensor:
        """The first tensor."""
        return self.tensors[0]

    @property
    def followed(self) -> Followed:
        """What is known of the first tensor."""
        known: Followed = self.known[id(self.input)]
        return known

    @property
    def only_input(self) -> bool:
        return set(self.known) == {id(self.input)}

    def per_axis(self, name: str, count: int, default: float | None = None) -> list[Any]:
        """An argument that has a number for each of ``count`` axes, or one for all."""
        value = self[name]
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values or values == [None]:
            values = [default]
        return values if len(values) == count else values[:1] * count


Rule = Callable[[Operation], "Followed | list[Followed] | None"]
RULES: dict[str, Rule] = {}
"""What each operation does to fields, by its internal name without a trailing ``_``; None where it is not followed."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@rule("clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh", "native_dropout", "native_channel_shuffle")
def _same(operation: Operation) -> Followed:
    return operation.followed


@rule("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "fill", "zero")
@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "bernoulli")
def _constant(operation: Operation) -> list[Followed]:
    return []


def pointwise(operation: Operation) -> Followed | list[Followed]:
    """Values at the same position come together; sizes of 1 are repeated."""
    shape = operation.output.shape if isinstance(operation.output, Tensor) else operation.input.shape
    tensors = operation.tensors
    if operation.name.rstrip("_") == "copy":
        shape, tensors = operation.input.shape, tensors[1:2]
    return _together(operation, tensors, shape)


RULES["copy"] = pointwise


def _together(operation: Operation, tensors: Sequence[Tensor], shape: Sequence[int]) -> Followed | list[Followed]:
    members, flat = [], set(range(len(shape)))
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        more = len(shape) - tensor.dim()
        known = operation.known.get(id(tensor))
        same = {dim for dim in range(len(shape)) if dim < more or tensor.shape[dim - more] == 1 < shape[dim]}
        if known is not None:
            same |= {dim + more for dim in known.flat}
            members.append((_raised(known, more, same - {dim + more for dim in known.flat}), same))
        flat &= same
    return _all_met(members, shape, operation.name, flat)


def _all_met(
    members: Sequence[tuple[Field, Collection[int]]], shape: Sequence[int], name: str, flat: Iterable[int] = ()
) -> Followed | list[Followed]:
    """What depends on one value of each member, which is a field and the axes along which it is the same."""
    if not members:
        return []
    rows, columns = (_met([(field[axis], same) for field, same in members], shape, name) for axis in (0, 1))
    return Followed((rows, columns), frozenset(flat))


def _raised(known: Followed, more: int, same: Collection[int]) -> Field:
    """The field of a tensor that gets ``more`` axes in front, and is repeated along ``same``."""
    rows, columns = known.each(lambda reach: reach.renumbered(lambda dim: dim + more, "")).field
    return rows.without(same, "repeat"), columns.without(same, "repeat")


def _met(members: Sequence[tuple[Reach, Collection[int]]], shape: Sequence[int], name: str) -> Reach:
    """The union; but what is the same at all positions is left out, beside something with positions."""
    placed = [reach for reach, _ in members if reach.parts]
    dims = {part.dim for reach in placed for part in reach.parts}
    moving = {dim for dim in dims if shape[dim] > 1}
    rest = [(reach, moving <= set(same)) for reach, same in members if not reach.parts]
    if not placed:
        placed, rest = [reach for reach, _ in rest], []
    met = placed[0]
    for reach in (*placed[1:], *(reach for reach, everywhere in rest if not everywhere)):
        met = union(met, reach, shape, name)
    for reach, everywhere in rest:
        if everywhere and met.parts:
            met = replace(met, ignored=met.ignored or reach.joined or reach.ignored or name)
    return met


@rule("cat", "stack")
def _cat(operation: Operation) -> Followed | list[Followed]:
    tensors, shape = operation["tensors"], operation.output.shape
    dim = (operation["dim"] or 0) % len(shape)
    members, at = [], 0
    for tensor in tensors:
        known = operation.known.get(id(tensor))
        if operation.name == "stack":
            known = known and _inserted(known, dim)
        elif tensor.shape == (0,):
            continue
        if known is not None:
            length = tensor.shape[dim] if operation.name == "cat" else 1
            members.append((_put(known, dim, at, length, shape[dim]), known.flat))
            at += length
        else:
            at += tensor.shape[dim] if operation.name == "cat" else 1
    return _all_met(members, shape, operation.name)


def _put(known: Followed, dim: int, at: int, length: int, total: int) -> Field:
    """The field of a tensor of ``length`` that stands from index ``at`` on in one of ``total``."""
    if length == total:
        return known.field
    return known.each(lambda reach: _shifted(reach, dim, length, -at, total)).field


def _shifted(reach: Reach, dim: int, length: int, by: int, count: int, every: int = 1) -> Reach:
    """Of ``count`` values along ``dim``: the indices from ``by`` on, ``every`` so many."""
    repeats = [part for part in reach.parts if part.dim == dim and part.inner * part.count != length]
    if repeats or not _alone(reach, dim):
        return reach.without({dim}, "slice")
    return reach.resampled(dim, length, every, by, by, count)


@rule("permute", "transpose", "t", "swapaxes", "movedim", "numpy_T", "mT", "adjoint")
def _permute(operation: Operation) -> Followed:
    dims = operation["dims"]
    if dims is None:
        dims = list(range(operation.input.dim()))
        a, b = (operation["dim0"], operation["dim1"]) if operation.name.startswith("transpose") else (0, -1)
        dims[a], dims[b] = dims[b], dims[a]
    dims = [dim % len(dims) for dim in dims]
    known = operation.followed
    return known.each(lambda reach: reach.renumbered(dims.index, ""), (dims.index(dim) for dim in known.flat))


def _inserted(known: Followed, at: int) -> Followed:
    def later(dim: int) -> int:
        return dim + (dim >= at)

    return known.each(lambda reach: reach.renumbered(later, ""), map(later, known.flat))


def _removed(known: Followed, gone: Collection[int], why: str) -> Followed:
    def earlier(dim: int) -> int | None:
        return None if dim in gone else dim - sum(each < dim for each in gone)

    flat = (earlier(dim) for dim in known.flat)
    return known.each(lambda reach: reach.renumbered(earlier, why), (dim for dim in flat if dim is not None))


@rule("unsqueeze")
def _unsqueeze(operation: Operation) -> Followed:
    return _inserted(operation.followed, operation["dim"] % operation.output.dim())


@rule("squeeze")
def _squeeze(operation: Operation) -> Followed:
    shape = operation.input.shape
    chosen = operation["dim"]
    chosen = [chosen] if isinstance(chosen, int) else chosen
    dims = range(len(shape)) if chosen is None else [dim % len(shape) for dim in chosen]
    return _removed(operation.followed, [dim for dim in dims if shape[dim] == 1], "")


@rule("expand")
def _expand(operation: Operation) -> Followed | list[Followed]:
    shape = operation.output.shape
    return _together(operation, [operation.input], shape)


@rule("repeat")
def _repeat(operation: Operation) -> Followed | list[Followed] | None:
    old, new = operation.input.shape, operation.output.shape
    more = len(new) - len(old)
    dims = {part.dim for reach in operation.followed.field for part in reach.parts}
    if any(old[dim] != new[dim + more] and old[dim] > 1 for dim in dims):
        return None
    return _together(operation, [operation.input], new)


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy")
def _view(operation: Operation) -> Followed:
    before, after = operation.input.shape, operation.output.shape
    same = operation.followed.flat if tuple(before) == tuple(after) else ()
    return operation.followed.each(lambda reach: reach.viewed(before, after), same)


@rule("unfold")
def _unfold(operation: Operation) -> Followed:
    dim = operation["dimension"] % operation.input.dim()
    length, count = operation.input.shape[dim], operation.output.shape[dim]

    def unfold(reach: Reach) -> Reach:
        moved = reach.regular(dim, length)
        steps = [part.step for part in moved.parts if part.dim == dim]
        taken = moved.resampled(dim, length, operation["step"], 0, 0, count)
        within = [Part(operation.input.dim(), 1, operation["size"], step) for step in steps]
        return replace(taken, parts=(*taken.parts, *within))

    return operation.followed.each(unfold)


@rule("slice")
def _slice(operation: Operation) -> Followed:
    dim = (operation["dim"] or 0) % operation.input.dim()
    length, count = operation.input.shape[dim], operation.output.shape[dim]
    begin, _, every = slice(operation["start"], operation["end"], operation["step"]).indices(length)
    if count == length or not count:
        return operation.followed
    return operation.followed.each(
        lambda reach: _shifted(reach, dim, length, begin, count, every), operation.followed.flat
    )


@rule("select")
def _select(operation: Operation) -> Followed:
    dim = operation["dim"] % operation.input.dim()
    length, index = operation.input.shape[dim], operation["index"] % operation.input.shape[dim]
    taken = operation.followed.each(lambda reach: _shifted(reach, dim, length, index, 1), operation.followed.flat)
    return _removed(taken, {dim}, "")


@rule("split", "split_with_sizes", "unbind", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
def _split(operation: Operation) -> list[Followed]:
    dim = (operation["dim"] or 0) % operation.input.dim()
    length, at, pieces = operation.input.shape[dim], 0, []
    for output in operation.output:
        count = 1 if operation.name == "unbind" else output.shape[dim]
        reached = _each_shifted(operation.followed, dim, length, at, count)
        pieces.append(_removed(reached, {dim}, "") if operation.name == "unbind" else reached)
        at += count
    return pieces


def _each_shifted(known: Followed, dim: int, length: int, at: int, count: int) -> Followed:
    if count == length and not at:
        return known
    return known.each(lambda reach: _shifted(reach, dim, length, at, count), known.flat)


@rule("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
@rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _pad(operation: Operation) -> Followed:
    """Pads of any values count as pixels outside: a window that covers one and its mirror image sees no more."""
    pad = operation["pad"] or operation["padding"]
    shape, dims = operation.input.shape, operation.input.dim()
    followed = operation.followed
    for at in range(len(pad) // 2):
        dim = dims - 1 - at
        followed = _each_shifted(followed, dim, shape[dim], -pad[2 * at], operation.output.shape[dim])
    return followed


@rule("roll", "flip")
def _moved(operation: Operation) -> Followed:
    dims = operation["dims"] or range(operation.input.dim())
    gone = {dim % operation.input.dim() for dim in dims}
    return operation.followed.each(lambda reach: reach.without(gone, operation.name))


@rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
def _convolution(operation: Operation) -> Followed:
    sizes = operation["weight"].shape[2:]
    count = len(sizes)
    strides, pads = operation.per_axis("stride", count, 1), operation.per_axis("padding", count, 0)
    spread = operation.per_axis("dilation", count, 1)
    first = operation.input.dim() - count

    def convolve(reach: Reach) -> Reach:
        reach = reach.without({first - 1}, "convolution over channels")
        for at, (size, stride, pad, step) in enumerate(zip(sizes, strides, pads, spread, strict=True)):
            dim, length, made = first + at, operation.input.shape[first + at], operation.output.shape[first + at]
            if size == stride == step == 1 and pad == 0:
                continue
            if operation["transposed"]:
                out = np.arange(made)
                low, high = np.ceil((out + pad - step * (size - 1)) / stride), np.floor((out + pad) / stride)
                reach = reach.resampled(dim, length, 1 / stride, low, high, made)
            else:
                reach = reach.resampled(dim, length, stride, -pad, step * (size - 1) - pad, made)
        return reach

    return operation.followed.each(convolve)


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d_with_indices", "mkldnn_max_pool2d")
@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", "mkldnn_max_pool3d", "max_pool1d", "max_pool2d", "max_pool3d")
def _pool(operation: Operation) -> Followed:
    count = _axes(operation.name)
    sizes = operation.per_axis("kernel_size", count)
    strides = operation.per_axis("stride", count) if operation["stride"] else sizes
    pads, spread = operation.per_axis("padding", count, 0), operation.per_axis("dilation", count, 1)
    made = next(iter(tensors_in(operation.output).values())).shape
    first = operation.input.dim() - count

    def pool(reach: Reach) -> Reach:
        for at, (size, stride, pad, step) in enumerate(zip(sizes, strides, pads, spread, strict=True)):
            dim = first + at
            last = step * (size - 1) - pad
            reach = reach.resampled(dim, operation.input.shape[dim], stride, -pad, last, made[dim])
        return reach

    return operation.followed.each(pool)


def _axes(name: str) -> int:
    """2 for ``avg_pool2d``."""
    return int(next(letter for letter in name if letter in "123"))


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d")
def _adaptive_pool(operation: Operation) -> Followed:
    count = _axes(operation.name)
    made = next(iter(tensors_in(operation.output).values())).shape
    first = operation.input.dim() - count

    def pool(reach: Reach) -> Reach:
        for dim in range(first, first + count):
            length, index = operation.input.shape[dim], np.arange(made[dim])
            if made[dim] == 1:
                reach = reach.without({dim}, f"{operation.name} over positions")
                continue
            low = index * length // made[dim]
            high = -(-(index + 1) * length // made[dim]) - 1
            reach = reach.resampled(dim, length, length / made[dim], low, high, made[dim])
        return reach

    return operation.followed.each(pool)


@rule(*(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)))
@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
@rule("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _upsample(operation: Operation) -> Followed:
    count, shape, made = _axes(operation.name), operation.input.shape, operation.output.shape
    first = operation.input.dim() - count
    factors = operation.per_axis("scale_factors", count)
    if not operation["scale_factors"]:
        names = ("scales",) if count == 1 else ("scales_d", "scales_h", "scales_w")[-count:]
        factors = [operation[name] for name in names]
    flat = {dim for dim in range(first, len(shape)) if shape[dim] == 1 < made[dim]} | set(operation.followed.flat)

    def upsample(reach: Reach) -> Reach:
        for dim, factor in zip(range(first, len(shape)), factors, strict=True):
            if dim in flat:
                reach = reach.without({dim}, "")
                continue
            low, high, ratio = _sources(operation, shape[dim], made[dim], factor)
            reach = reach.resampled(dim, shape[dim], ratio, low, high, made[dim])
        return reach

    return operation.followed.each(upsample, flat)


def _sources(operation: Operation, length: int, made: int, factor: float | None) -> tuple[Any, Any, float]:
    """First and last index that each new value of an upsampling is made of, and how far the sources move for each."""
    name, index = operation.name, np.arange(made)
    ratio = 1 / factor if factor else length / made
    if "nearest" in name:
        low = high = np.floor((index + 0.5 * ("exact" in name)) * ratio)
    elif name.endswith("_aa"):
        reach = max(1.0, ratio) * (2 if "cubic" in name else 1)
        centre = (index + 0.5) * ratio
        low, high = np.floor(centre - reach + 0.5), np.floor(centre + reach + 0.5) - 1
    else:
        if operation["align_corners"]:
            ratio = (length - 1) / (made - 1) if made > 1 else 0.0
        at = index * ratio if operation["align_corners"] else (index + 0.5) * ratio - 0.5
        # torch calculates in float32: a source beside a whole number gets a small weight
        low, high = np.floor(at - 1e-4), np.ceil(at + 1e-4)
        low, high = (np.floor(at) - 1, np.floor(at) + 2) if "cubic" in name else (low, high)
    return np.clip(low, 0, length - 1), np.clip(high, 0, length - 1), ratio


@rule("pixel_shuffle")
def _pixel_shuffle(operation: Operation) -> Followed:
    factor, dims = operation["upscale_factor"], operation.input.dim()

    def shuffle(reach: Reach) -> Reach:
        for dim in (dims - 2, dims - 1):
            low, made = np.arange(operation.output.shape[dim]) // factor, operation.output.shape[dim]
            reach = reach.resampled(dim, operation.input.shape[dim], 1 / factor, low, low, made)
        return reach

    return operation.followed.each(shuffle)


@rule("pixel_unshuffle")
def _pixel_unshuffle(operation: Operation) -> Followed:
    factor, dims = operation["downscale_factor"], operation.input.dim()

    def unshuffle(reach: Reach) -> Reach:
        for dim in (dims - 2, dims - 1):
            made = operation.output.shape[dim]
            reach = reach.resampled(dim, operation.input.shape[dim], factor, 0, factor - 1, made)
        return reach

    return operation.followed.each(unshuffle)


@rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")
def _batch_norm(operation: Operation) -> Followed:
    return _normalised(operation, operation["training"] is not False, "the statistics of batch or instance norm")


@rule("_native_batch_norm_legit_no_training", "batch_norm")
def _batch_norm_in_eval(operation: Operation) -> Followed:
    return operation.followed


@rule("native_group_norm", "group_norm")
def _group_norm(operation: Operation) -> Followed:
    return _normalised(operation, True, "the statistics of group norm")


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(operation: Operation) -> Followed:
    axes = len(operation["normalized_shape"])
    dims = set(range(operation.input.dim() - axes, operation.input.dim()))
    over = any(part.dim in dims and part.count > 1 for reach in operation.followed.field for part in reach.parts)
    return _normalised(operation, over, "the statistics of layer norm")


@rule("_softmax", "_log_softmax", "softmax")
def _softmax(operation: Operation) -> Followed:
    dim = operation["dim"] % operation.input.dim()
    over = any(part.dim == dim and part.count > 1 for reach in operation.followed.field for part in reach.parts)
    return _normalised(operation, over, "the sum of softmax")


def _normalised(operation: Operation, over_positions: bool, what: str) -> Followed:
    """Divided by what is the same at all positions."""

    def divided(reach: Reach) -> Reach:
        return replace(reach, ignored=reach.ignored or what) if reach.parts and over_positions else reach

    return operation.followed.each(divided, operation.followed.flat)


@rule("glu")
def _glu(operation: Operation) -> Followed:
    dim = operation["dim"] % operation.input.dim()
    return operation.followed.each(lambda reach: reach.without({dim}, "glu"))


@rule("index_select", "index")
def _index(operation: Operation) -> Followed | None:
    if operation.name == "index_select":
        dims = {operation["dim"] % operation.input.dim()}
    else:
        dims = {dim for dim, index in enumerate(operation["indices"]) if index is not None}
        if len(dims) != 1 or operation["indices"][next(iter(dims))].dim() != 1:
            return None
    if any(part.dim in dims for reach in operation.followed.field for part in reach.parts):
        return None
    return operation.followed


@rule("mm", "bmm", "addmm", "baddbmm", "linear")
def _product(operation: Operation) -> Followed | None:
    adds = operation.name.endswith(("addmm", "addbmm"))  # the first tensor is a bias
    a, b = operation.tensors[1:3] if adds else operation.tensors[:2]
    if operation.known.keys() - {id(a), id(b)} or (operation.name == "linear" and id(b) in operation.known):
        return None
    why, dims = "a matrix product over positions (attention, or a linear layer)", operation.output.dim()
    fields = [
        operation.known[id(tensor)].each(lambda reach, gone=gone: reach.without({gone}, why)).field
        for tensor, gone in ((a, dims - 1), (b, dims - 2))
        if id(tensor) in operation.known
    ]
    rows, columns = (
        reduce(lambda x, y: union(x, y, operation.output.shape, why), axis) for axis in zip(*fields, strict=True)
    )
    return Followed((rows, columns))


_POINTWISE = (  # without torch's tag
    "hardswish",
    "log_sigmoid_forward",
    "rrelu_with_noise",
    "_prelu_kernel",
    "prelu",
    "polar",
    "complex",
    "real",
    "fake_quantize_per_tensor_affine",
)
_REDUCTIONS = ("mean", "sum", "prod", "max", "min", "std", "var", "norm")


def reduction(operation: Operation) -> list[Followed]:
    """One value for all along some axes, such as ``mean``, ``amax`` or ``var``."""
    dims, chosen = operation.input.dim(), operation["dim"]
    chosen = [chosen] if isinstance(chosen, int) else chosen
    gone = {dim % dims for dim in chosen} if chosen else set(range(dims))
    why = f"{operation.name} over positions"
    reduced = operation.followed.each(lambda reach: reach.without(gone, why), operation.followed.flat - gone)
    return [reduced if operation["keepdim"] else _removed(reduced, gone, why)]


def _rule_of(function: Any, operation: Operation) -> Rule | None:
    name = operation.name if operation.name.endswith("__") else operation.name.rstrip("_")
    operation.name = name
    if name in RULES:
        return RULES[name]
    packet = function.overloadpacket
    if name in _POINTWISE or any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads()):
        return pointwise
    if "attention" in name or "transformer" in name:
        return attention
    if "keepdim" in operation.takes or (name in _REDUCTIONS and len(operation.tensors) == 1):
        return reduction
    return None


def attention(operation: Operation) -> Followed:
    dims = set(range(operation.input.dim()))
    known: Followed = next(iter(operation.known.values()))
    return known.each(lambda reach: replace(reach.without(dims, "attention"), start=-math.inf, end=math.inf))


_OF_SEVERAL: tuple[Rule | None, ...] = (pointwise, _cat, _product, _constant, attention)
"""The rules for several tensors that depend on the input; others know what to do with the first alone."""


class FieldTracker(TorchDispatchMode):
    """Follows which pixels of ``inputs`` the values of each tensor depend on, while operations run inside the block."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._followed = WeakTensorKeyDictionary()
        self._writes: Counter[int | None] = Counter()
        for tensor in inputs:
            dims = tensor.dim()
            rows, columns = (Reach((Part(dim, 1, tensor.shape[dim], 1.0),), 0, 1) for dim in (dims - 2, dims - 1))
            self._set(tensor, Followed((rows, columns)))

    def of(self, tensor: Tensor) -> Followed | None:
        """What is known of ``tensor``; None for one that does not depend on the input."""
        known: tuple[Followed, int] | None = self._followed.get(tensor)
        if known is None:
            return None
        followed, writes = known
        if writes != self._writes[storage_key(tensor)]:  # written to through another tensor
            return followed.each(lambda reach: reach.unknown("a write to a part"))
        return followed

    def _set(self, tensor: Tensor, followed: Followed | None) -> None:
        if followed is None:
            self._followed.pop(tensor, None)
        else:
            self._followed[tensor] = followed, self._writes[storage_key(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = Operation(func, args, kwargs, self.of)
        writes = func._schema.is_mutable and operation.tensors
        base = operation.tensors[0]._base if writes and not operation.tensors[0].is_inference() else None
        before = self.of(base) if base is not None else None
        output = operation.output = func(*args, **kwargs)
        if not operation.known and not writes:
            return output
        results = self._results(func, operation) if operation.known else []
        if writes:
            self._writes[storage_key(operation.tensors[0])] += 1
        made = operation.tensors[:1] if writes else tensors_in(output).values()
        made = [tensor for tensor in made if tensor.is_floating_point() or tensor.is_complex()]
        for at, tensor in enumerate(made):
            self._set(tensor, results[min(at, len(results) - 1)] if results else None)
        if base is not None:
            self._set(base, _written(base, operation.tensors[0], before, results[0] if results else None))
        return output

    def _results(self, func: Any, operation: Operation) -> list[Followed]:
        follow = _rule_of(func, operation)
        if not operation.only_input and follow not in _OF_SEVERAL:
            follow = None
        found = follow(operation) if follow is not None else None
        if found is None:
            why = f"{operation.name}, which is not followed"
            found = next(iter(operation.known.values())).each(lambda reach: reach.unknown(why))
        return [found] if isinstance(found, Followed) else found


def _written(base: Tensor, view: Tensor, before: Followed | None, written: Followed | None) -> Followed | None:
    """What is known of ``base`` after a write to ``view``, a part of it."""
    if written is None:
        return before
    offset = int(view.storage_offset() - base.storage_offset())
    at: dict[int, int] = {}
    strides = [int(stride) for stride in base.stride()]
    for dim in sorted(range(base.dim()), key=lambda dim: -strides[dim]):
        at[dim], offset = divmod(offset, strides[dim]) if strides[dim] else (0, offset)

    def place(dim: int) -> int | None:
        long_enough = (to for to in range(base.dim()) if base.shape[to] >= view.shape[dim] > 1)
        fits = [to for to in long_enough if base.stride(to) == view.stride(dim)]
        return fits[0] if len(fits) == 1 else None

    def put(reach: Reach) -> Reach:
        if any(place(part.dim) is None for part in reach.parts if part.count > 1):
            return reach.unknown("a write to a part")
        for part in reach.parts:
            reach = reach.regular(part.dim, view.shape[part.dim])
        placed = reach.renumbered(place, "")
        for part in placed.parts:
            placed = placed.resampled(part.dim, part.count, 1, -at[part.dim], -at[part.dim], base.shape[part.dim])
        return placed

    field = written.each(put)
    if before is None:
        return field
    both = zip(before.field, field.field, strict=True)
    rows, columns = (union(old, new, base.shape, "a write to a part") for old, new in both)
    return Followed((rows, columns))
