"""The filters of a convolution, whatever axis they lie on: their norms, which are dead, which are the same twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import as_float, class_names

# In fewer dimensions two directions meet by chance: of 64 random filters of two weights, nine pairs have a cosine
# above 0.9999. So few weights are duplicates only where they are equal.
LEAST_FOR_DIRECTION = 9
_EQUAL = 1e-6  # of the norm: what is left of equal weights after half precision and back
_BLOCK = 256
_COLUMNS = 64


def is_convolution(module: nn.Module) -> bool:
    """Whether the layer is a convolution or a transposed one, quantised ones included."""
    return "_ConvNd" in class_names(module)


def layer_weight(module: nn.Module) -> Tensor | None:
    """The weight of a layer, None where it has none; a quantised layer holds it packed and unpacks it for a call."""
    weight: Any = getattr(module, "weight", None)
    if callable(weight) and not isinstance(weight, torch.Tensor) and "quantized" in type(module).__module__:
        weight = weight()
    return weight if isinstance(weight, torch.Tensor) else None


def filters_of(module: Any, weight: Tensor) -> Tensor | None:
    """The filters ``(groups, filters of a group, inputs of a group, *kernel)``; None where the shape is another.

    Filter ``f`` of group ``g`` makes output channel ``g * filters + f``. A convolution keeps its filters on axis 0, a
    transposed one on axis 1, those of all groups below one another on axis 0.

    Args:
        module: The convolution.
        weight: Its weight.

    Example:
        >>> import torch
        >>> layer = torch.nn.ConvTranspose2d(4, 6, 3, groups=2)
        >>> tuple(layer.weight.shape), tuple(filters_of(layer, layer.weight).shape)
        ((4, 3, 3, 3), (2, 3, 2, 3, 3))
    """
    groups = int(module.groups)
    if weight.dim() < 3 or not weight.numel() or weight.shape[0] % groups:
        return None
    values = as_float(weight)
    grouped = values.reshape(groups, values.shape[0] // groups, *values.shape[1:])
    return grouped.transpose(1, 2) if module.transposed else grouped


def filter_norms(filters: Tensor) -> tuple[Tensor, Tensor]:
    """The L2 norm of each filter, in float64, and whether all its weights are finite: two tensors ``(filters,)``.

    Weights that are NaN or Inf count as 0.
    """
    norms, whole = [], []
    for block in filters.flatten(2).flatten(0, 1).split(_BLOCK):
        finite = torch.isfinite(block)
        values = block.double().masked_fill(~finite, 0.0)
        largest = values.abs().amax(1, keepdim=True)  # so that no square leaves the range
        unit = torch.where(largest > 0, largest, 1.0)
        norms.append((values / unit).norm(dim=1) * largest[:, 0])
        whole.append(finite.all(1))
    return torch.cat(norms), torch.cat(whole)


def dead_filters(norms: Tensor, whole: Tensor, share: float) -> tuple[int, ...]:
    """Filters whose norm is 0, or below ``share`` of the median norm of the layer's filters that are not 0."""
    alive = norms[whole & (norms > 0)]
    least = share * float(alive.median()) if alive.numel() else 0.0
    dead = whole & ((norms == 0) | (norms < least))
    return tuple(dead.nonzero()[:, 0].tolist())


def duplicate_filters(filters: Tensor, norms: Tensor, usable: Tensor, cosine: float) -> tuple[tuple[int, ...], ...]:
    """Groups of filters that see the same: same inputs, and the same weights up to a positive factor.

    Two filters of different groups of a grouped convolution have different inputs and are no duplicates, however
    equal their weights are: no two filters of a depthwise convolution with one filter for each input are. Filters of
    fewer than `LEAST_FOR_DIRECTION` weights must be equal. Biases are not looked at. A group is whatever pairs join.

    Args:
        filters: As `filters_of` has them.
        norms: As `filter_norms` has them.
        usable: Which filters to compare: the dead have no direction.
        cosine: From which cosine on two filters are the same.
    """
    groups, each = filters.shape[:2]
    if each < 2:
        return ()
    pairs = []
    for group in range(groups):
        here = slice(group * each, (group + 1) * each)
        at = usable[here].nonzero()[:, 0]
        rows = filters[group].flatten(1)[at].double()
        found = _pairs(rows, norms[here][at], cosine) if len(at) > 1 else []
        pairs += [(group * each + int(at[a]), group * each + int(at[b])) for a, b in found]
    return _joined(pairs)


def _pairs(rows: Tensor, norms: Tensor, cosine: float) -> list[tuple[int, int]]:
    """Pairs ``(a, b)``, ``a < b``, of ``rows`` that are the same."""
    units = rows / norms[:, None]
    alike = 2 * (1 - cosine) + 1e-9  # squared distance of two unit vectors with that cosine, and rounding
    # What lies close together lies close in some of the coordinates too: a few tell nearly all pairs apart, and only
    # rows that they cannot tell apart are multiplied in full.
    some = units[:, units.var(0).topk(min(_COLUMNS, units.shape[1])).indices]
    squares = some.square().sum(1)
    found: list[tuple[int, int]] = []
    for start in range(0, len(rows), _BLOCK):
        block = slice(start, start + _BLOCK)
        near = squares[block, None] + squares[None] - 2 * some[block] @ some.T <= alike
        near.tril_(start)  # each pair once, none with itself
        lower, upper = near.any(1).nonzero()[:, 0] + start, near.any(0).nonzero()[:, 0]
        if not len(lower):
            continue
        same = units[lower] @ units[upper].T >= cosine - 1e-12
        if rows.shape[1] < LEAST_FOR_DIRECTION:
            distance = torch.cdist(rows[lower], rows[upper], compute_mode="donot_use_mm_for_euclid_dist")
            same &= distance <= _EQUAL * norms[lower, None]
        same &= upper[None] < lower[:, None]
        found += [(int(upper[b]), int(lower[a])) for a, b in same.nonzero().tolist()]
    return found


def _joined(pairs: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """The groups that ``pairs`` join, each in order, by their first members."""
    leader: dict[int, int] = {}

    def first(of: int) -> int:
        while leader.setdefault(of, of) != of:
            leader[of] = leader[leader[of]]
            of = leader[of]
        return of

    for a, b in pairs:
        low, high = sorted((first(a), first(b)))
        leader[high] = low
    groups: dict[int, list[int]] = {}
    for member in sorted(leader):
        groups.setdefault(first(member), []).append(member)
    return tuple(tuple(group) for group in groups.values())
