"""Statistics of each parameter of a model, and of the running statistics of BatchNorms. No forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import LayerError, ModelError, UsageError
from hookscope.findings import default
from hookscope.hooks import Layers, Selection, as_float, one_thread, value_numbers
from hookscope.parameters.filters import (
    dead_filters,
    duplicate_filters,
    filter_norms,
    filters_of,
    is_convolution,
    layer_weight,
)


@dataclass(frozen=True, slots=True)
class ParameterThresholds:
    """Thresholds of findings.

    Attributes:
        dead_norm: A filter is dead if its norm is 0 or below this share of the layer's median norm.
        duplicate_cosine: Least cosine of two filters on the same inputs that are duplicates.
        collapsed: A channel has collapsed if its running variance is below this share of the layer's eps: BatchNorm
            then divides by little but eps, and less than a tenth of the channel's spread is left.

    Raises:
        UsageError: for a share outside [0, 1), or a cosine outside (0, 1].
    """

    dead_norm: float = default("dead-filters", "dead_norm")
    duplicate_cosine: float = default("duplicate-filters", "duplicate_cosine")
    collapsed: float = default("collapsed-variance", "collapsed")

    def __post_init__(self) -> None:
        for what, share in (("dead norm", self.dead_norm), ("share of eps", self.collapsed)):
            if not 0 <= share < 1:
                raise UsageError(f"no {what} {share:g}", "it is a share", "give 0 or more, and less than 1")
        if not 0 < self.duplicate_cosine <= 1:
            raise UsageError(f"no cosine {self.duplicate_cosine:g} of duplicates", do="give more than 0, at most 1")


@dataclass(frozen=True, slots=True)
class ParameterStatistics:
    """Statistics of one parameter, or of one buffer of a BatchNorm, computed in float64 from its finite values.

    Attributes:
        name: As in ``named_parameters()``; a parameter shared by layers has the first of its names.
        layer: Dotted path of the layer that has the parameter.
        type: Class name of that layer.
        shape: Of the tensor. Quantised values are decoded; of complex values the magnitude counts.
        buffer: Whether it is a buffer: running statistics, and the weights of frozen BatchNorms.
        mean: Mean. If no value is finite, it is None, like all others up to ``norm``.
        std: Population standard deviation.
        min: Lowest value.
        max: Highest value.
        norm: L2 norm.
        zeros: Share of values that are 0, in 0..1; None without values.
        nan: Count of NaN.
        inf: Count of +Inf and -Inf.
        first_nonfinite: Position of the first NaN or Inf.
        filters: Count of filters in the weight of a convolution, one for each output channel. For other parameters
            it is None, like all others up to ``duplicate_filters``.
        filter_norm_min: Least norm of the filters without NaN and Inf.
        filter_norm_mean: Mean norm of the same filters.
        filter_norm_max: Largest norm of the same filters.
        dead_filters: Numbers of dead filters, see `ParameterThresholds`.
        duplicate_filters: Groups of duplicate filters, see `duplicate_filters`.
        collapsed: Collapsed channels of a running variance.
        eps: The layer's eps, for running statistics.
        updated: Whether running statistics were ever updated: batches were counted, a mean is not 0, or a variance is
            not 1 (old checkpoints have no count of batches).
    """

    name: str
    layer: str
    type: str
    shape: tuple[int, ...]
    buffer: bool
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    norm: float | None
    zeros: float | None
    nan: int
    inf: int
    first_nonfinite: tuple[int, ...] | None = None
    filters: int | None = None
    filter_norm_min: float | None = None
    filter_norm_mean: float | None = None
    filter_norm_max: float | None = None
    dead_filters: tuple[int, ...] | None = None
    duplicate_filters: tuple[tuple[int, ...], ...] | None = None
    collapsed: tuple[int, ...] | None = None
    eps: float | None = None
    updated: bool | None = None

    @property
    def count(self) -> int:
        """Count of all values."""
        return math.prod(self.shape)


def parameter_statistics(
    model: nn.Module, thresholds: ParameterThresholds | None = None, layers: Layers | None = None
) -> list[ParameterStatistics]:
    """Statistics of all parameters of ``model`` and of the buffers of its BatchNorms, in order of registration.

    Args:
        model: Any eager module; it is neither run nor changed.
        thresholds: What counts as dead, duplicate and collapsed.
        layers: Names of layers, globs and ``re:…``; the name of a block selects all layers in it. None for all.

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
    wanted = layers_named(model, layers)
    measured: set[int] = set()
    rows = []
    for layer, module in model.named_modules():
        for name, tensor, buffer in _tensors(module):
            if id(tensor) in measured or (wanted is not None and layer not in wanted):
                continue
            measured.add(id(tensor))
            full = f"{layer}.{name}" if layer else name
            if torch.nn.parameter.is_lazy(tensor) or tensor.is_meta:
                why = "it is on the meta device" if tensor.is_meta else "its shape is set by the first forward pass"
                raise ModelError(f"{full} has no values", why, "run the model once, or load weights")
            with one_thread():
                numbers = value_numbers(as_float(tensor)) | _layer_facts(module, name, tensor, thresholds)
            kind = type(module).__name__
            rows.append(ParameterStatistics(full, layer, kind, tuple(tensor.shape), buffer, **numbers))
    if not rows and layers is not None:
        raise LayerError("the chosen layers have no parameters", do="see which have some: weights without --layer")
    return rows


def layers_named(model: nn.Module, layers: Layers | None) -> frozenset[str] | None:
    """Names of the selected layers and of all layers inside a selected block; None for all.

    Raises:
        LayerError: for a name that the model does not have.
        UsageError: for indices and calls, which only a forward pass can count.
    """
    if layers is None or layers == "all":
        return None
    selection = Selection.of(layers)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    if selection.counts:
        raise UsageError(
            "weights are selected by name", "indices count calls of a forward pass", "give names, such as conv1"
        )
    selection.check_names(names, type(model).__name__)
    if selection.has_call_numbers:
        raise UsageError("a weight has no calls", do="give the name without #")
    # a layer with two names is listed under the first
    known: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known.setdefault(id(module), []).append(name)
    return frozenset(
        each[0] for each in known.values() if selection.calls_by_name([a for name in each for a in _with_blocks(name)])
    )


def _with_blocks(name: str) -> Iterator[str]:
    """``layer4.0.conv1``, ``layer4.0``, ``layer4``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Name and tensor of the layer's own parameters, and of buffers that belong to them; whether it is a buffer."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, False
    if _has_statistics(module):
        for name in ("weight", "bias", "running_mean", "running_var"):
            if (buffer := module._buffers.get(name)) is not None:
                yield name, buffer, True
    elif "weight" not in module._parameters and "quantized" in type(module).__module__:
        packed = {"weight": layer_weight(module), "bias": getattr(module, "bias", None)}
        for name, value in packed.items():
            value = value() if callable(value) and not isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor):
                yield name, value, False


def _has_statistics(module: nn.Module) -> bool:
    return module._buffers.get("running_mean") is not None and module._buffers.get("running_var") is not None


def _layer_facts(module: Any, name: str, tensor: Tensor, thresholds: ParameterThresholds) -> dict[str, Any]:
    """The fields of `ParameterStatistics` that depend on the type of the layer."""
    if name == "weight" and is_convolution(module):
        return _filter_facts(module, tensor, thresholds)
    if name not in ("running_mean", "running_var") or not _has_statistics(module):
        return {}
    eps = float(getattr(module, "eps", 1e-5))
    facts: dict[str, Any] = {"eps": eps, "updated": _was_updated(module)}
    if name == "running_var":
        facts["collapsed"] = tuple((tensor.double() < thresholds.collapsed * eps).nonzero()[:, 0].tolist())
    return facts


def _was_updated(module: Any) -> bool:
    batches = module._buffers.get("num_batches_tracked")
    counted = batches is not None and int(batches) > 0
    return counted or bool((module.running_mean != 0).any()) or bool((module.running_var != 1).any())


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
