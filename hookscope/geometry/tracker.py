"""Which pixels of the input the values of each tensor depend on, followed through the operations of a pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.geometry.operation import RULES, AxisField, FieldOperation, Followed, Rule, StrideTerm, union
from hookscope.geometry.rules import attention, cat, constant, pointwise, product, reduction
from hookscope.hooks import InputSize, storage_key, tensors_in

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


def _rule_of(function: Any, operation: FieldOperation) -> Rule | None:
    name = operation.name if operation.name.endswith("__") else operation.name.rstrip("_")
    operation.name = name
    if name in RULES:
        return RULES[name]
    packet = function.overloadpacket
    if name in _REDUCTIONS and len(operation.tensors) == 1:  # `max` of two tensors works on each position alone
        return reduction
    if name in _POINTWISE or any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads()):
        return pointwise
    if "attention" in name or "transformer" in name:
        return attention
    if "keepdim" in operation.takes:
        return reduction
    return None


_OF_SEVERAL: tuple[Rule | None, ...] = (pointwise, cat, product, constant, attention)
"""The rules for several tensors that depend on the input; others know what to do with the first alone."""


class FieldTracker(TorchDispatchMode):
    """Follows which pixels of the input the values of each tensor depend on, while operations run inside the block.

    Attributes:
        shown: The size of the input.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._followed = WeakTensorKeyDictionary()
        self._writes: Counter[int | None] = Counter()
        self.shown = InputSize(0, 0)

    def follow(self, inputs: Any) -> None:
        """Follow the images among the inputs of a pass; call it before the pass begins."""
        tensors = [each for each in tensors_in(inputs).values() if each.dim() > 2 and each.is_floating_point()]
        for tensor in tensors:
            dims = tensor.dim()
            terms = (StrideTerm(dim, 1, tensor.shape[dim], 1.0) for dim in (dims - 2, dims - 1))
            rows, columns = (AxisField((term,), 0, 1) for term in terms)
            self._set(tensor, Followed((rows, columns)))
        if tensors:
            self.shown = InputSize.of(tensors[0])

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
        operation = FieldOperation(func, args, kwargs, self.of)
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

    def _results(self, func: Any, operation: FieldOperation) -> list[Followed]:
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

    def put(reach: AxisField) -> AxisField:
        if any(place(part.dim) is None for part in reach.parts if part.count > 1):
            return reach.unknown("a write to a part")
        for part in reach.parts:
            reach = reach.as_single_stride(part.dim, view.shape[part.dim])
        placed = reach.permuted(place, "")
        for part in placed.parts:
            placed = placed.resampled(part.dim, part.count, 1, -at[part.dim], -at[part.dim], base.shape[part.dim])
        return placed

    field = written.each(put)
    if before is None:
        return field
    both = zip(before.field, field.field, strict=True)
    rows, columns = (union(old, new, base.shape, "a write to a part") for old, new in both)
    return Followed((rows, columns))
