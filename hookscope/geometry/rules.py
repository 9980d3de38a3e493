"""Rules of operations: what each does to the fields of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookscope.geometry.operation import RULES, AxisField, Field, FieldOperation, Followed, Indices, rule, union
from hookscope.hooks import tensors_in


def shifted(known: Followed, dim: int, length: int, by: int, count: int, every: int = 1) -> Followed:
    """Of ``count`` values along ``dim``: the indices from ``by`` on, ``every`` so many."""
    if (count, by, every) == (length, 0, 1):
        return known
    return known.each(lambda reach: reach.resampled(dim, length, every, by, by, count), known.flat)


@rule("permute", "transpose", "t", "swapaxes", "movedim", "numpy_T", "mT", "adjoint", "squeeze", "slice", "select")
@rule("split", "split_with_sizes", "unbind", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
def _moved_or_cut(operation: FieldOperation) -> list[Followed]:
    """Axes change places, end or are cut: each is found again by its stride in a tensor where no two are alike."""
    shape, every = operation.input.shape, operation["step"] or 1
    strides = [math.prod(max(length, every) + 1 for length in shape[dim + 1 :]) for dim in range(len(shape))]
    views = tensors_in(operation.on(torch.empty_strided(shape, strides, device="meta"))).values()
    return [_cut(operation.followed, shape, strides, view) if view.numel() else operation.followed for view in views]


def _cut(known: Followed, shape: Sequence[int], strides: Sequence[int], view: Tensor) -> Followed:
    begin, places, steps = int(view.storage_offset()), dict[int, int](), dict[int, int]()
    for to, step in enumerate(view.stride()):
        dim = next(dim for dim, stride in enumerate(strides) if stride <= step)
        places[dim], steps[dim] = to, step // strides[dim]
    for dim, length in enumerate(shape):
        count = view.shape[places[dim]] if dim in places else 1
        first, begin = divmod(begin, strides[dim])
        known = shifted(known, dim, length, first, count, steps.get(dim, 1))
    return known.each(lambda reach: reach.permuted(places.get, ""), {places[dim] for dim in known.flat & places.keys()})


def inserted(known: Followed, at: int) -> Followed:
    def later(dim: int) -> int:
        return dim + (dim >= at)

    return known.each(lambda reach: reach.permuted(later, ""), map(later, known.flat))


def removed(known: Followed, gone: Collection[int], why: str) -> Followed:
    def earlier(dim: int) -> int | None:
        return None if dim in gone else dim - sum(axis < dim for axis in gone)

    flat = (earlier(dim) for dim in known.flat)
    return known.each(lambda reach: reach.permuted(earlier, why), (dim for dim in flat if dim is not None))


@rule("unsqueeze")
def _unsqueeze(operation: FieldOperation) -> Followed:
    return inserted(operation.followed, operation["dim"] % operation.output.dim())


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy")
def _view(operation: FieldOperation) -> Followed:
    before, after = operation.input.shape, operation.output.shape
    same = operation.followed.flat if tuple(before) == tuple(after) else ()
    return operation.followed.each(lambda reach: reach.reshaped(before, after), same)


@rule("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
@rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _pad(operation: FieldOperation) -> Followed:
    """Pads of any values count as pixels outside: a window that covers one and its mirror image sees no more."""
    pad = operation["pad"] or operation["padding"]
    shape, dims = operation.input.shape, operation.input.dim()
    followed = operation.followed
    for at in range(len(pad) // 2):
        dim = dims - 1 - at
        followed = shifted(followed, dim, shape[dim], -pad[2 * at], operation.output.shape[dim])
    return followed


@rule("roll", "flip")
def _moved(operation: FieldOperation) -> Followed:
    dims = operation["dims"] or range(operation.input.dim())
    gone = {dim % operation.input.dim() for dim in dims}
    return operation.followed.each(lambda reach: reach.without(gone, operation.name))


@rule("clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh", "native_dropout", "native_channel_shuffle")
@rule("_native_batch_norm_legit_no_training", "batch_norm")
def _same(operation: FieldOperation) -> Followed:
    return operation.followed


@rule("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "fill", "zero")
@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "bernoulli")
def constant(operation: FieldOperation) -> list[Followed]:
    return []


def pointwise(operation: FieldOperation) -> Followed | list[Followed]:
    """Values at the same position come together; sizes of 1 are repeated."""
    shape = operation.output.shape if isinstance(operation.output, Tensor) else operation.input.shape
    tensors = operation.tensors[1:2] if operation.name == "copy" else operation.tensors
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


RULES["copy"] = RULES["expand"] = pointwise


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
def cat(operation: FieldOperation) -> Followed | list[Followed]:
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


@rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", "group_norm")
@rule("native_group_norm", "native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
@rule("_softmax", "_log_softmax", "_safe_softmax", "softmax")
def _normalised(operation: FieldOperation) -> Followed:
    """Divided by what is the same at all positions along some axes."""
    dims, name = operation.input.dim(), operation.name
    over, what = range(dims), "the statistics of group norm"
    if "softmax" in name:
        over, what = range(operation["dim"] % dims, operation["dim"] % dims + 1), "the sum of softmax"
    elif "batch" in name:
        over, what = range(dims * (operation["training"] is not False)), "the statistics of batch or instance norm"
    elif "group" not in name:
        over, what = range(dims - len(operation["normalized_shape"]), dims), "the statistics of layer norm"
    is_over = any(part.dim in over for reach in operation.followed.field for part in reach.parts)

    def divided(reach: AxisField) -> AxisField:
        beside = reach.global_dependency or (what if reach.parts and is_over else "")
        return replace(reach, global_dependency=beside)

    return operation.followed.each(divided, operation.followed.flat)


@rule("mm", "bmm", "addmm", "baddbmm", "linear")
def product(operation: FieldOperation) -> Followed | None:
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


def reduction(operation: FieldOperation) -> list[Followed]:
    """One value for all along some axes, such as ``mean``, ``amax`` or ``var``."""
    dims, chosen = operation.input.dim(), operation["dim"]
    chosen = [chosen] if isinstance(chosen, int) else chosen
    gone = {dim % dims for dim in chosen} if chosen else set(range(dims))
    why = f"{operation.name} over positions"
    reduced = operation.followed.each(lambda reach: reach.without(gone, why), operation.followed.flat - gone)
    return [reduced if operation["keepdim"] else removed(reduced, gone, why)]


def attention(operation: FieldOperation) -> Followed:
    dims = set(range(operation.input.dim()))
    known: Followed = next(iter(operation.known.values()))
    return known.each(lambda reach: replace(reach.without(dims, "attention"), start=-math.inf, end=math.inf))


Window = tuple[Indices, Indices, float] | None
"""First and last index that each value is made of, and how far they move from one value to the next; None for all."""


def _behind_window(
    operation: FieldOperation, axes: int, window: Callable[[int, int, int], Window], flat: Iterable[int] = ()
) -> Followed:
    """What values see behind a window along each of the last ``axes``.

    ``window`` gets the number of an axis and its length before and after. A pooling of 3 at stride 2 without padding
    has the window ``(0, 2, 2)``: value 5 is made of the indices 10 to 12.
    """
    before, after = operation.input.shape, next(iter(tensors_in(operation.output).values())).shape
    first = len(before) - axes
    windows = {dim: window(dim - first, before[dim], after[dim]) for dim in range(first, len(before))}

    def move(reach: AxisField) -> AxisField:
        for dim, bounds in windows.items():
            if bounds is None:
                reach = reach.without({dim}, f"{operation.name} over positions")
            elif isinstance(bounds[0], np.ndarray) or bounds != (0, 0, 1):
                low, high, ratio = bounds
                reach = reach.resampled(dim, before[dim], ratio, low, high, after[dim])
        return reach

    return operation.followed.each(move, flat)


@rule("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
def _convolution(operation: FieldOperation) -> Followed:
    sizes = operation["weight"].shape[2:]
    strides, pads, spread = _per_axis(operation, len(sizes), stride=1, padding=0, dilation=1)
    channels = operation.input.dim() - len(sizes) - 1
    operation.known[id(operation.input)] = operation.followed.each(
        lambda reach: reach.without({channels}, "convolution over channels")
    )

    def window(at: int, length: int, made: int) -> Window:
        last = spread[at] * (sizes[at] - 1) - pads[at]
        if not operation["transposed"]:
            return -pads[at], last, strides[at]
        out = np.arange(made)
        return np.ceil((out - last) / strides[at]), np.floor((out + pads[at]) / strides[at]), 1 / strides[at]

    return _behind_window(operation, len(sizes), window)


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d_with_indices", "mkldnn_max_pool2d")
@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", "mkldnn_max_pool3d", "max_pool1d", "max_pool2d", "max_pool3d")
def _pool(operation: FieldOperation) -> Followed:
    sizes, pads, spread = _per_axis(operation, _axes(operation), kernel_size=1, padding=0, dilation=1)
    strides = operation.per_axis("stride", len(sizes)) if operation["stride"] else sizes
    last = [step * (size - 1) - pad for step, size, pad in zip(spread, sizes, pads, strict=True)]
    return _behind_window(operation, len(sizes), lambda at, *lengths: (-pads[at], last[at], strides[at]))


def _per_axis(operation: FieldOperation, count: int, **defaults: int) -> list[list[Any]]:
    return [operation.per_axis(name, count, default) for name, default in defaults.items()]


def _axes(operation: FieldOperation) -> int:
    """2 for ``avg_pool2d``."""
    return int(next(letter for letter in operation.name if letter in "123"))


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d")
def _adaptive_pool(operation: FieldOperation) -> Followed:
    def window(at: int, length: int, made: int) -> Window:
        index = np.arange(made)
        last = -(-(index + 1) * length // made) - 1
        return None if made == 1 else (index * length // made, last, length / made)

    return _behind_window(operation, _axes(operation), window)


@rule(*(f"{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)))
@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
@rule("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def _upsample(operation: FieldOperation) -> Followed:
    count, shape, made = _axes(operation), operation.input.shape, operation.output.shape
    first = len(shape) - count
    factors = operation.per_axis("scale_factors", count)
    if not operation["scale_factors"]:
        names = ("scales",) if count == 1 else ("scales_d", "scales_h", "scales_w")[-count:]
        factors = [operation[name] for name in names]
    flat = {dim for dim in range(first, len(shape)) if shape[dim] == 1 < made[dim]} | operation.followed.flat

    def window(at: int, length: int, made: int) -> Window:
        return None if first + at in flat else _sources(operation, length, made, factors[at])

    return _behind_window(operation, count, window, flat)


def _sources(operation: FieldOperation, length: int, made: int, factor: float | None) -> tuple[Any, Any, float]:
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
def _pixel_shuffle(operation: FieldOperation) -> Followed:
    factor = operation["upscale_factor"]

    def window(at: int, length: int, made: int) -> Window:
        return np.arange(made) // factor, np.arange(made) // factor, 1 / factor

    return _behind_window(operation, 2, window)


@rule("pixel_unshuffle")
def _pixel_unshuffle(operation: FieldOperation) -> Followed:
    factor = operation["downscale_factor"]
    return _behind_window(operation, 2, lambda at, *lengths: (0, factor - 1, factor))
