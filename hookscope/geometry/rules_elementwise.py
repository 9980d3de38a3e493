"""Rules of operations that bring several tensors together, or leave each value where it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from hookscope.geometry.operation import RULES, AxisField, Field, Followed, Operation, rule, union
from hookscope.geometry.rules_shape import inserted, shifted


@rule("clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh", "native_dropout", "native_channel_shuffle")
def _same(operation: Operation) -> Followed:
    return operation.followed


@rule("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "fill", "zero")
@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "bernoulli")
def constant(operation: Operation) -> list[Followed]:
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
    return all_met(members, shape, operation.name, flat)


def all_met(
    members: Sequence[tuple[Field, Collection[int]]], shape: Sequence[int], name: str, flat: Iterable[int] = ()
) -> Followed | list[Followed]:
    """What depends on one value of each member, which is a field and the axes along which it is the same."""
    if not members:
        return []
    rows, columns = (_met([(field[axis], same) for field, same in members], shape, name) for axis in (0, 1))
    return Followed((rows, columns), frozenset(flat))


def _raised(known: Followed, more: int, same: Collection[int]) -> Field:
    """The field of a tensor that gets ``more`` axes in front, and is repeated along ``same``."""
    return known.each(lambda reach: reach.permuted(lambda dim: dim + more, "").without(same, "repeat")).field


def _met(members: Sequence[tuple[AxisField, Collection[int]]], shape: Sequence[int], name: str) -> AxisField:
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
            beside = met.global_dependency or reach.merged_by or reach.global_dependency or name
            met = replace(met, global_dependency=beside)
    return met


@rule("cat", "stack")
def cat(operation: Operation) -> Followed | list[Followed]:
    shape, is_new = operation.output.shape, operation.name == "stack"
    dim = (operation["dim"] or 0) % len(shape)
    members, at = [], 0
    for tensor in operation["tensors"]:
        if tensor.shape == (0,) and not is_new:
            continue
        length = 1 if is_new else tensor.shape[dim]
        if (known := operation.known.get(id(tensor))) is not None:
            known = inserted(known, dim) if is_new else known
            members.append((shifted(known, dim, length, -at, shape[dim]).field, known.flat))
        at += length
    return all_met(members, shape, operation.name)


@rule("expand")
def _expand(operation: Operation) -> Followed | list[Followed]:
    return _together(operation, [operation.input], operation.output.shape)
