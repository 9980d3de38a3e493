"""The weights around one step of an optimizer: their norms, the norms of gradients and of the update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookscope.training.reductions import DeferredScalars, count_non_finite, local, norm


@dataclass(slots=True)
class _Size:
    """Euclidean norm, and number of NaN and Inf."""

    norm: float = 0.0
    non_finite: int = 0


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias by its name: ``bias``, ``bias_hh_l0``, ``in_proj_bias``.

    Example:
        >>> is_bias("in_proj_bias"), is_bias("weight")
        (True, False)
    """
    return "bias" in name.rpartition(".")[2]


class StepWeights:
    """Measures parameters before a step, and keeps copies of all but biases until the step is done.

    Args:
        layers: The own parameters of each layer, by name.
        gradients: Whether the gradients exist already; a step with a closure computes them itself.
        scale: A factor that is still in the gradients; None for 1.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad():
        ...     own = dict(layer.named_parameters()); _ = layer.weight.fill_(2.0)
        ...     weights = StepWeights([own], gradients=True)
        ...     _ = layer.weight.sub_(0.5); weights.step_is_done()
        >>> weights.metrics(own)["weight_norm"], weights.metrics(own)["update_to_weight"]
        (2.0, 0.25)
    """

    def __init__(self, layers: Iterable[Mapping[str, Tensor]], gradients: bool, scale: Tensor | None = None) -> None:
        self._scale = scale
        self._parameters: dict[int, Tensor] = {}
        self._copies: dict[int, Tensor] = {}
        for name, parameter in (item for own in layers for item in own.items()):
            if parameter.is_meta:
                continue
            self._parameters[id(parameter)] = parameter
            if not is_bias(name) and id(parameter) not in self._copies:
                self._copies[id(parameter)] = local(parameter.detach()).clone()
        self._updates: dict[int, _Size] = {}
        self._weights = _sizes(self._copies)
        self._gradients = self._measure_gradients() if gradients else None

    def step_is_done(self) -> None:
        """Measure the update, and drop the copies."""
        if self._gradients is None:
            self._gradients = self._measure_gradients()
        for key, copy in self._copies.items():
            now = local(self._parameters[key].detach())
            if now.shape == copy.shape and now.device == copy.device:
                copy.sub_(now)
        self._updates = _sizes(self._copies)
        self._copies = {}

    def metrics(self, own: Mapping[str, Tensor]) -> dict[str, Any]:
        """The metrics of a layer with these parameters, by their names in the log."""
        weights = [id(p) for name, p in own.items() if not is_bias(name)]
        weight, update = _total(self._weights, weights), _total(self._updates, weights)
        gradient = _total(self._gradients or {}, [id(p) for p in own.values()])
        return {
            "gradient_norm": gradient and gradient.norm,
            "gradient_non_finite": gradient and gradient.non_finite,
            "weight_norm": weight and weight.norm,
            "weight_non_finite": weight and weight.non_finite,
            "update_to_weight": update.norm / weight.norm if weight and update and weight.norm else None,
            "frozen": not any(p.requires_grad for p in own.values()) if own else None,
        }

    def _measure_gradients(self) -> dict[int, _Size]:
        sizes = _sizes({key: p.grad for key, p in self._parameters.items() if p.grad is not None})
        scale = 1.0 if self._scale is None else float(self._scale)
        for size in sizes.values():
            size.norm /= scale or 1.0
        return sizes


def _sizes(tensors: Mapping[int, Tensor]) -> dict[int, _Size]:
    norms = {key: norm(tensor) for key, tensor in tensors.items()}
    scalars = DeferredScalars()
    scalars.add(*norms.values())
    scalars.fetch()
    values = {key: scalars[value] for key, value in norms.items()}
    return {
        key: _Size(value, 0 if math.isfinite(value) else count_non_finite(tensors[key]))
        for key, value in values.items()
    }


def _total(sizes: Mapping[int, _Size], keys: Iterable[int]) -> _Size | None:
    parts = [sizes[key] for key in dict.fromkeys(keys) if key in sizes]
    if not parts:
        return None
    return _Size(math.hypot(*(size.norm for size in parts)), sum(size.non_finite for size in parts))
