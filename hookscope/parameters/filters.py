"""The filters of a convolution, on whichever axis they lie: norms, dead filters, duplicates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hookscope.hooks import as_float, class_names

# With fewer weights, directions coincide by chance: among 64 random filters of two weights, nine pairs have a cosine
# above 0.9999. Such filters are duplicates only if their weights are equal.
LEAST_FOR_DIRECTION = 9
MOST_FOR_DUPLICATES = 16_384
"""Filters of one group that are compared with each other: time grows with the square of their number."""
_EQUAL = 1e-6  # largest distance of equal weights, relative to the norm, after a round trip through half precision
_BLOCK = 256
_COLUMNS = 64
_SAMPLE = 512  # coordinates from which these are chosen


def is_convolution(module: nn.Module) -> bool:
    """Whether the layer is a convolution: plain, transposed or quantised."""
    return "_ConvNd" in class_names(module)


def layer_tensor(module: nn.Module, name: str = "weight") -> Tensor | None:
    """The weight or bias of a layer in eval mode, or None; a quantised layer has a method that unpacks it."""
    computed = computed_tensors(module)
    tensor: Any = computed[name] if name in computed else getattr(module, name, None)
    if callable(tensor) and not isinstance(tensor, Tensor) and "quantized" in type(module).__module__:
        tensor = tensor()
    return tensor if isinstance(tensor, Tensor) else None


def computed_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What pruning, ``weight_norm``, ``spectral_norm`` and other parametrizations compute from parameters, by name."""
    inner: Any = module._modules.get("parametrizations") or {}
    modes = [(part, part.training) for parametrization in inner.values() for part in parametrization.modules()]
    computed = {}
    with torch.no_grad():
        try:
            for part, _ in modes:
                part.training = False  # in train mode spectral_norm changes its buffers
            for name in inner:
                computed[name] = inner[name]()
        finally:
            for part, training in modes:
                part.training = training
        for hook in module._forward_pre_hooks.values():  # the older functions of torch.nn.utils
            if isinstance(hook, BasePruningMethod):
                computed[hook._tensor_name] = hook.apply_mask(module)
            elif isinstance(hook, WeightNorm):
                computed[hook.name] = hook.compute_weight(module)
            elif isinstance(hook, SpectralNorm):
                computed[hook.name] = hook.compute_weight(module, do_power_iteration=False)
    return computed


def filters_of(module: Any, weight: Tensor) -> Tensor | None:
    """The filters ``(groups, filters of a group, inputs of a group, *kernel)``, or None for a weight of another shape.

    Filter ``f`` of group ``g`` computes output channel ``g * filters + f``. A convolution has its filters on axis 0;
    a transposed convolution has them on axis 1, and its groups one after another on axis 0.
    """
    groups = int(module.groups)
    if weight.dim() < 3 or not weight.numel() or weight.shape[0] % groups:
        return None
    values = as_float(weight)
    grouped = values.reshape(groups, values.shape[0] // groups, *values.shape[1:])
    return grouped.transpose(1, 2) if module.transposed else grouped


def filter_norms(filters: Tensor) -> tuple[Tensor, Tensor]:
    """``(filters,)`` L2 norms in float64, NaN and Inf as 0, and ``(filters,)`` whether all weights are finite."""
    norms, whole = [], []
    for block in filters.flatten(2).flatten(0, 1).split(_BLOCK):
        if block.dtype == torch.float32:  # no square of one overflows float64
            norm = torch.linalg.vector_norm(block.double(), dim=1)  # four times as fast as with dtype=
            if bool(norm.isfinite().all()):
                norms.append(norm)
                whole.append(norm.isfinite())
                continue
        finite = torch.isfinite(block)
        values = block.double().masked_fill(~finite, 0.0)
        largest = values.abs().amax(1, keepdim=True)  # squares of these shares cannot overflow
        unit = torch.where(largest > 0, largest, 1.0)
        norms.append((values / unit).norm(dim=1) * largest[:, 0])
        whole.append(finite.all(1))
    return torch.cat(norms), torch.cat(whole)


def dead_filters(norms: Tensor, whole: Tensor, share: float) -> tuple[int, ...]:
    """Filters whose norm is 0, or below ``share`` of the median of the layer's norms above 0."""
    alive = norms[whole & (norms > 0)]
    least = share * float(alive.median()) if alive.numel() else 0.0
    dead = whole & ((norms == 0) | (norms < least))
    return tuple(dead.nonzero()[:, 0].tolist())


def duplicate_filters(
    filters: Tensor, norms: Tensor, usable: Tensor, cosine: float
) -> tuple[tuple[int, ...], ...] | None:
    """Groups of ``usable`` filters with the same inputs, and the same weights up to a positive factor.

    Filters of different groups of a convolution have different inputs, so they are never duplicates. Filters of fewer
    than `LEAST_FOR_DIRECTION` weights must be equal. Biases do not count. Pairs with a common filter form one group.
    ``cosine`` is the least of two duplicates. None for more than `MOST_FOR_DUPLICATES` filters.
    """
    groups, size = filters.shape[:2]
    if size > MOST_FOR_DUPLICATES:
        return None
    duplicates: list[tuple[int, ...]] = []
    for group in range(groups):
        members = slice(group * size, (group + 1) * size)
        chosen = usable[members].nonzero()[:, 0]
        if len(chosen) > 1:
            rows = filters[group].flatten(1)
            rows = rows if len(chosen) == size else rows[chosen]
            labels, numbers = _duplicate_labels(rows, norms[members][chosen], cosine), chosen + group * size
            several = labels.bincount().gt(1).nonzero()[:, 0].tolist()
            duplicates += [tuple(numbers[labels == label].tolist()) for label in several]
    return tuple(duplicates)


def _duplicate_labels(rows: Tensor, norms: Tensor, cosine: float) -> Tensor:
    """``(rows,)`` the first row of the group of each row: a row and its duplicates are of one group."""
    alike = 2 * (1 - cosine) + 1e-9  # squared distance of two unit vectors with that cosine, and rounding
    # Rows that are close are close in each coordinate. A few coordinates rule out nearly all pairs; only the rows of
    # the other pairs are multiplied in full.
    sample = rows[:, :: -(-rows.shape[1] // _SAMPLE)].double() / norms[:, None]
    spread = sample.square().mean(0) - sample.mean(0).square()
    some = sample[:, spread.topk(min(_COLUMNS, sample.shape[1])).indices]
    squares = some.square().sum(1)
    labels = torch.arange(len(rows), device=rows.device)
    for start in range(0, len(rows), _BLOCK):
        block = slice(start, start + _BLOCK)
        near = squares[block, None] + squares[None] - 2 * some[block] @ some.T <= alike
        near.tril_(start - 1)  # each pair once, and no row with itself
        lower, upper = near.any(1).nonzero()[:, 0] + start, near.any(0).nonzero()[:, 0]
        if not len(lower):
            continue
        above, below = rows[lower].double(), rows[upper].double()
        same = (above / norms[lower, None]) @ (below / norms[upper, None]).T >= cosine - 1e-12
        if rows.shape[1] < LEAST_FOR_DIRECTION:
            distance = torch.cdist(above, below, compute_mode="donot_use_mm_for_euclid_dist")
            same &= distance <= _EQUAL * norms[lower, None]
        same &= upper[None] < lower[:, None]
        for number, alike_rows in zip(lower.tolist(), same, strict=True):
            first = labels[upper[alike_rows]]  # not pairs: of a hundred thousand equal rows there are billions
            if first.numel() and first.min() == first.max():
                labels[number] = first[0]
            elif first.numel():
                before = labels[: number + 1]
                before[torch.isin(before, first.unique())] = labels[number] = first.min()
    return labels
