"""Statistics of each parameter of a model, and of the running statistics of BatchNorms. No forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.display import Rows
from hookscope.errors import LayerError, ModelError, UsageError
from hookscope.hooks import Layers, Selection, as_float, enclosing, one_thread, value_numbers, was_updated
from hookscope.parameters.facts import ParameterStatistics, ParameterThresholds
from hookscope.parameters.filters import (
    computed_tensors,
    dead_filters,
    duplicate_filters,
    filter_norms,
    filters_of,
    is_convolution,
    layer_tensor,
)


def parameter_statistics(
    model: nn.Module, thresholds: ParameterThresholds | None = None, layers: Layers | None = None, *, bins: int = 0
) -> list[ParameterStatistics]:
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
                    numbers["histogram"] = _histogram(as_float(tensor), numbers["min"], numbers["max"], bins)
            kind = type(module).__name__
            rows.append(ParameterStatistics(full, layer, kind, tuple(tensor.shape), buffer, **numbers))
    if not rows and layers is not None:
        raise LayerError(
            "the chosen layers have no parameters", do="weights without --layer lists layers with parameters"
        )
    return rows


def _histogram(values: Tensor, low: float, high: float, bins: int) -> tuple[int, ...]:
    finite = values.detach().double()
    counts = torch.histc(finite[finite.isfinite()], bins if high > low else 1, low, high)
    return tuple(counts.long().tolist())


def layers_named(model: nn.Module, layers: Layers | None) -> frozenset[str] | None:
    """Names of the selected layers and of all layers inside a selected block; None for all.

    Raises:
        LayerError: for a name that the model does not have.
        UsageError: for indices and calls, which only a forward pass can count.
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
    them; and whether it is no parameter."""
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
    """The fields of `ParameterStatistics` for convolutions and BatchNorms."""
    if name == "weight" and is_convolution(module):
        return _filter_facts(module, tensor, thresholds)
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
