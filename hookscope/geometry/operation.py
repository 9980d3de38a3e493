"""One operation of a pass, and the register of rules that say what it does to fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.hooks import tensors_in

Indices = float | NDArray[np.floating[Any]] | NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, order=True)
class StrideTerm:
    """How a position moves along an axis of a tensor: index ``i`` adds ``(i // inner % count) * step`` pixels."""

    dim: int
    inner: int
    count: int
    step: float


@dataclass(frozen=True, slots=True)
class AxisField:
    """The rows, or the columns, of the input that a value depends on: ``start`` to ``end``, moved on by ``parts``.

    Behind a 3x3 convolution at stride 2 the rows of a map ``(1, 8, 20, 27)`` have the parts ``(StrideTerm(2, 1, 20,
    2.0),)``, start 0 and end 3: row 5 sees the rows 10 to 12. `reshaped` to ``(1, 8, 540)``, the part is
    ``StrideTerm(2, 27, 20, 2.0)``: value 140 of a channel is row 5 and column 5.

    Attributes:
        parts: How the position in the tensor moves the interval; empty where all values see the same.
        start: First pixel.
        end: One after the last pixel.
        merged_by: The first operation that merged positions.
        global_dependency: What else reaches the value, the same at all positions, such as the gate of
            squeeze-and-excitation.
        known: Whether every operation on the way is known here.
    """

    parts: tuple[StrideTerm, ...]
    start: float
    end: float
    merged_by: str = ""
    global_dependency: str = ""
    known: bool = True

    def without(self, dims: Collection[int], why: str) -> AxisField:
        """The interval of all values along ``dims`` together."""
        return self.without_parts({part for part in self.parts if part.dim in dims}, why)

    def without_parts(self, gone: Collection[StrideTerm], why: str) -> AxisField:
        """The interval of all values that ``gone`` lead to together."""
        if not gone:
            return self
        more = sum(part.step * (part.count - 1) for part in gone)
        why = self.merged_by or (why if any(part.count > 1 for part in gone) else "")
        kept = tuple(part for part in self.parts if part not in gone)
        return replace(self, parts=kept, end=self.end + more, merged_by=why)

    def unknown(self, why: str) -> AxisField:
        return replace(self, parts=(), start=-math.inf, end=math.inf, merged_by=self.merged_by or why, known=False)

    def as_single_stride(self, dim: int, length: int) -> AxisField:
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

    def _fitted(self, dim: int, low: NDArray[Any], high: NDArray[Any], step: float) -> AxisField:
        """Intervals that begin ``low`` and end ``high`` pixels later, as one that moves ``step`` for each index."""
        moved = np.arange(len(low)) * step
        others = tuple(part for part in self.parts if part.dim != dim)
        start, end = self.start + float((low - moved).min()), self.end + float((high - moved).max())
        return replace(self, parts=(*others, StrideTerm(dim, 1, len(low), step)), start=start, end=end)

    def resampled(self, dim: int, length: int, ratio: float, first: Indices, last: Indices, count: int) -> AxisField:
        """Of ``count`` values along ``dim``, each made of the indices ``first`` to ``last`` of ``length``.

        ``first`` and ``last`` are given for each new index, or one number each, to which ``ratio`` times the index is
        added.
        """
        reach = self.as_single_stride(dim, length)
        part = next((part for part in reach.parts if part.dim == dim), None)
        if part is None:
            return self
        index = np.arange(count)
        low, high = (end + index * ratio if isinstance(end, int | float) else end for end in (first, last))
        return reach._fitted(dim, low * part.step, high * part.step, part.step * ratio)

    def permuted(self, dims: Callable[[int], int | None], why: str) -> AxisField:
        """Renumber the axes; axes that map to None are dropped."""
        moved = [(part, dims(part.dim)) for part in self.parts]
        parts = tuple(replace(part, dim=dim) for part, dim in moved if dim is not None)
        return replace(self.without({part.dim for part, dim in moved if dim is None}, why), parts=parts)

    def reshaped(self, before: Sequence[int], after: Sequence[int]) -> AxisField:
        """Of a tensor of shape ``before`` that is seen in the shape ``after``."""
        parts: list[StrideTerm] = []
        lost: list[StrideTerm] = []
        for part in self.parts:
            low = part.inner * math.prod(before[part.dim + 1 :])
            pieces, count = [], 1
            for dim, length in enumerate(after):
                inner = math.prod(after[dim + 1 :])
                bottom, top = max(low, inner), min(low * part.count, inner * length)
                if bottom < top and not (bottom % inner or top % bottom or bottom % low):
                    pieces.append(StrideTerm(dim, bottom // inner, top // bottom, part.step * (bottom // low)))
                    count *= top // bottom
            (lost if count != part.count else parts).extend(pieces if count == part.count else [part])
        reach = self.without({part.dim for part in lost}, "view") if lost else self
        return replace(reach, parts=tuple(sorted(parts)))


Field = tuple[AxisField, AxisField]
"""The rows and the columns that the values of a tensor depend on."""


def union(a: AxisField, b: AxisField, shape: Sequence[int], why: str) -> AxisField:
    """What values see that depend on one value of ``a`` and one of ``b``, tensors of one ``shape``."""
    common, why = set(a.parts) & set(b.parts), a.merged_by or b.merged_by or why
    own = [set(field.parts) - common for field in (a, b)]
    if {part.dim for part in own[0]} & {part.dim for part in own[1]}:
        return a.unknown(why)
    a, b = a.without_parts(own[0], why), b.without_parts(own[1], why)
    words = a.merged_by or b.merged_by, a.global_dependency or b.global_dependency
    return AxisField(a.parts, min(a.start, b.start), max(a.end, b.end), *words, a.known and b.known)


class Followed(NamedTuple):
    """What is known of a tensor: its field, and the axes along which all its values are the same."""

    field: Field
    flat: frozenset[int] = frozenset()

    def each(self, change: Callable[[AxisField], AxisField], flat: Iterable[int] = ()) -> Followed:
        return Followed((change(self.field[0]), change(self.field[1])), frozenset(flat))


class FieldOperation:
    """One operation of a pass: its name, its arguments by name, its output, and what is known of its tensors."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], of: Callable[[Tensor], Any]) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        names = [argument.name for argument in function._schema.arguments]
        self.name = function.overloadpacket.__name__
        self.given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        self.tensors = [tensor for value in self.given.values() for tensor in tensors_in(value).values()]
        self.known = {id(tensor): known for tensor in self.tensors if (known := of(tensor)) is not None}
        self.takes = set(names)
        self.output: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)

    def on(self, tensor: Tensor) -> Any:
        """What the function makes of ``tensor`` in the place of its first; no other mode sees it."""
        with torch._C._DisableTorchDispatch():
            return self._function(tensor, *self._args[1:], **self._kwargs)

    @property
    def input(self) -> Tensor:
        """The first tensor."""
        return self.tensors[0]

    @property
    def followed(self) -> Followed:
        """What is known of the first tensor."""
        known: Followed = self.known[id(self.input)]
        return known

    def per_axis(self, name: str, count: int, default: float | None = None) -> list[Any]:
        """An argument that has a number for each of ``count`` axes, or one for all."""
        value = self[name]
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values or values == [None]:
            values = [default]
        return values if len(values) == count else values[:1] * count


Rule = Callable[[FieldOperation], "Followed | list[Followed] | None"]
RULES: dict[str, Rule] = {}
"""What each operation does to fields, by its internal name without a trailing ``_``; None where it is not followed."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register
