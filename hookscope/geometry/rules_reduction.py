"""Rules of operations that join positions: normalisation, products, reductions, attention."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce

from hookscope.geometry.operation import AxisField, Followed, Operation, rule, union
from hookscope.geometry.rules_shape import removed


@rule("_native_batch_norm_legit_no_training", "batch_norm")
def _batch_norm_in_eval(operation: Operation) -> Followed:
    return operation.followed


@rule("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", "group_norm")
@rule("native_group_norm", "native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
@rule("_softmax", "_log_softmax", "_safe_softmax", "softmax")
def _normalised(operation: Operation) -> Followed:
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
def product(operation: Operation) -> Followed | None:
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


def reduction(operation: Operation) -> list[Followed]:
    """One value for all along some axes, such as ``mean``, ``amax`` or ``var``."""
    dims, chosen = operation.input.dim(), operation["dim"]
    chosen = [chosen] if isinstance(chosen, int) else chosen
    gone = {dim % dims for dim in chosen} if chosen else set(range(dims))
    why = f"{operation.name} over positions"
    reduced = operation.followed.each(lambda reach: reach.without(gone, why), operation.followed.flat - gone)
    return [reduced if operation["keepdim"] else removed(reduced, gone, why)]


def attention(operation: Operation) -> Followed:
    dims = set(range(operation.input.dim()))
    known: Followed = next(iter(operation.known.values()))
    return known.each(lambda reach: replace(reach.without(dims, "attention"), start=-math.inf, end=math.inf))
