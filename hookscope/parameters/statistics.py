"""Statistics of each parameter of a model and of the running statistics of BatchNorms. No pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hookscope.display import Rows
from hookscope.errors import LayerError, ModelError, UsageError
from hookscope.hooks import (
    AnyModel,
    Layers,
    Selection,
    as_float,
    class_names,
    enclosing,
    module_of,
    one_thread,
    value_numbers,
    was_updated,
)
from hookscope.parameters.findings import ParameterStatistics, ParameterThresholds

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
    squares = some.square().sum(1, keepdim=True)
    ones = torch.ones_like(squares)
    lefts, rights = torch.cat([some, squares, ones], 1), torch.cat([-2 * some, ones, squares], 1)
    labels = torch.arange(len(rows), device=rows.device)
    for start in range(0, len(rows), _BLOCK):
        block = slice(start, start + _BLOCK)
        end = min(start + _BLOCK, len(rows))
        near = lefts[block] @ rights[:end].T <= alike  # the squared distances, in one product
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


def parameter_statistics(
    model: AnyModel, thresholds: ParameterThresholds | None = None, layers: Layers | None = None, *, bins: int = 0
) -> Rows[ParameterStatistics]:
    """Statistics of all parameters of ``model`` and of the buffers of its BatchNorms, in order of registration.

    Weights that pruning and parametrizations compute stand before the parameters that they come from.

    Args:
        model: Any eager module; it is neither run nor changed.
        thresholds: What counts as dead, duplicate and collapsed.
        layers: Names of layers, globs and ``re:…``; the name of a block selects all layers in it. None for all.
        bins: Number of intervals of the histogram of each parameter; 0 for none.

    Raises:
        ModelError: for a lazy parameter, or one on the meta device: it has no values.
        LayerError: for a name that the model does not have, or layers without parameters.
        SelectionError, UsageError: for a selection that cannot be parsed, or that counts calls.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
        >>> with torch.no_grad():
        ...     _ = net[0].weight.fill_(0.5)[1].zero_()
        >>> weight, *others = parameter_statistics(net)
        >>> weight.mean, weight.zeros, weight.filter_norm_max, weight.dead_filters
        (0.25, 0.5, 1.5, (1,))
        >>> [row.name for row in others]
        ['0.bias', '1.weight', '1.bias', '1.running_mean', '1.running_var']
    """
    model = module_of(model)
    thresholds = thresholds or ParameterThresholds()
    selected = layers_named(model, layers)
    measured: set[int] = set()
    rows = Rows[ParameterStatistics]()
    for layer, module in model.named_modules():
        for name, tensor, buffer in _tensors(module):
            if id(tensor) in measured or (selected is not None and layer not in selected):
                continue
            if name in module._parameters or name in module._buffers:  # others live only here
                measured.add(id(tensor))
            full = f"{layer}.{name}" if layer else name
            if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
                why = "it is on the meta device" if tensor.is_meta else "its shape is set by the first forward pass"
                raise ModelError(f"{full} has no values", why, "run the model once, or load weights")
            with one_thread():
                numbers = value_numbers(as_float(tensor)) | _layer_facts(module, name, tensor, thresholds)
                if bins and numbers["min"] is not None:
                    values, low, high = as_float(tensor).detach().double(), numbers["min"], numbers["max"]
                    counts = torch.histc(values[values.isfinite()], bins if high > low else 1, low, high).long()
                    around = ((0,) * (bins // 2), (0,) * ((bins - 1) // 2)) if high == low else ((), ())
                    numbers["histogram"] = (*around[0], *counts.tolist(), *around[1])
            kind = type(module).__name__
            rows.append(ParameterStatistics(full, layer, kind, tuple(tensor.shape), buffer, **numbers))
    if not rows and layers is not None:
        raise LayerError(
            "the chosen layers have no parameters",
            do="‹parameter_statistics without layers|weights without --layer› lists layers with parameters",
        )
    return rows


def layers_named(model: nn.Module, layers: Layers | None) -> frozenset[str] | None:
    """Names of the selected layers and of all layers inside a selected block; None for all.

    Indices and calls, which only a forward pass can count, are refused.
    """
    if layers is None or Selection.of(layers).has_all:
        return None
    selection = Selection.of(layers)
    if selection.counts:
        raise UsageError(
            "weights are selected by name", "indices count calls of a forward pass", "give names, such as conv1"
        )
    names: dict[int, list[str]] = {}  # a layer with two names is listed under the first
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    selection.check_names([name for group in names.values() for name in group], type(model).__name__)
    if selection.has_call_numbers:
        raise UsageError("a weight has no calls", do="give the name without #")
    return frozenset(
        group[0]
        for group in names.values()
        if selection.calls_by_name([block for name in group for block in enclosing(name) if block])
    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Name and tensor of what the layer computes from parameters, of its own parameters, and of buffers that belong to
    them; and whether it is not a parameter."""
    for name, tensor in computed_tensors(module).items():
        yield name, tensor, True
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, False
    if _has_statistics(module):
        for name in ("weight", "bias", "running_mean", "running_var"):
            if (buffer := module._buffers.get(name)) is not None:
                yield name, buffer, True
    elif "weight" not in module._parameters and "quantized" in type(module).__module__:
        for name in ("weight", "bias"):
            if (packed := layer_tensor(module, name)) is not None:
                yield name, packed, False


def _has_statistics(module: nn.Module) -> bool:
    return module._buffers.get("running_mean") is not None and module._buffers.get("running_var") is not None


def _layer_facts(module: Any, name: str, tensor: Tensor, thresholds: ParameterThresholds) -> dict[str, Any]:
    if name == "weight" and is_convolution(module):
        return _filter_facts(module, tensor, thresholds)
    is_norm = "Norm" in type(module).__name__ and tensor.dim() == 1
    if name == "weight" and (is_norm or (isinstance(module, nn.Linear) and tensor.dim() == 2)):
        dead = (tensor.reshape(len(tensor), -1) == 0).all(1).nonzero()[:, 0].tolist()
        return {"dead_filters": tuple(dead)} if dead else {}
    if name not in ("running_mean", "running_var") or not _has_statistics(module):
        return {}
    eps = float(getattr(module, "eps", 1e-5))
    facts: dict[str, Any] = {"eps": eps, "updated": was_updated(module)}
    if name == "running_var":
        facts["collapsed"] = tuple((tensor.double() < thresholds.collapsed * eps).nonzero()[:, 0].tolist())
    return facts


def _filter_facts(module: Any, weight: Tensor, thresholds: ParameterThresholds) -> dict[str, Any]:
    filters = filters_of(module, weight)
    if filters is None:
        return {}
    norms, whole = filter_norms(filters)
    dead = dead_filters(norms, whole, thresholds.dead_norm)
    usable = whole.clone()
    usable[list(dead)] = False
    known = norms[whole]
    return {
        "filters": len(norms),
        "filter_norm_min": float(known.min()) if len(known) else None,
        "filter_norm_mean": float(known.mean()) if len(known) else None,
        "filter_norm_max": float(known.max()) if len(known) else None,
        "dead_filters": dead,
        "duplicate_filters": duplicate_filters(filters, norms, usable, thresholds.duplicate_cosine),
    }
