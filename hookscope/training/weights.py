"""The weights around one step of an optimizer: their norms, the norms of gradients and of the update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hookscope.training.reductions import (
    FetchedScalars,
    count_non_finite,
    differs,
    edges_and_counts,
    histogram_of,
    local,
    norm,
)

_Size = tuple[float, int]  # Euclidean norm, and number of NaN and Inf


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias by its name: ``bias``, ``bias_hh_l0``, ``in_proj_bias``."""
    return "bias" in name.rpartition(".")[2]


class StepWeights:
    """Measures parameters before a step, and keeps copies of all but biases until the step is done.

    Args:
        layers: The own parameters of each layer, by name.
        gradients: Whether the gradients exist already; a step with a closure computes them itself.
        scale: A factor that is still in the gradients; None for 1.
        with_histograms: Whether histograms are counted too.
    """

    def __init__(
        self,
        layers: Iterable[Mapping[str, Tensor]],
        gradients: bool,
        scale: Tensor | None = None,
        with_histograms: bool = False,
    ) -> None:
        self._scale, self.with_histograms = scale, with_histograms
        self._histograms: dict[int, dict[str, Any] | None] = {}
        self._gradient_histograms: dict[int, dict[str, Any] | None] = {}
        self._parameters: dict[int, Tensor] = {}
        self._copies: dict[int, Tensor] = {}
        for name, parameter in (item for own in layers for item in own.items()):
            if parameter.is_meta:
                continue
            self._parameters[id(parameter)] = parameter
            if not is_bias(name) and id(parameter) not in self._copies:
                self._copies[id(parameter)] = local(parameter.detach()).clone()
        if with_histograms:
            self._histograms = {key: edges_and_counts(histogram_of([p])) for key, p in self._parameters.items()}
        self._updates: dict[int, _Size] = {}
        self._weights = _sizes(self._copies)
        self._gradients = self._measure_gradients() if gradients else None

    def have_changed(self) -> bool:
        """Whether any weight differs from that at the start."""
        return any(differs(self._parameters[key], copy) for key, copy in self._copies.items())

    def gradient_norms(self) -> dict[int, float]:
        """The norms of the gradients that were measured, by ``id`` of the parameter."""
        return {key: size for key, (size, _) in (self._gradients or {}).items()}

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
        weight_norm, weight_non_finite = _total(self._weights, weights)
        update_norm, _ = _total(self._updates, weights)
        gradients = self._gradients or {}
        gradient_norm, gradient_non_finite = _total(gradients, [id(p) for p in own.values()])
        return {
            "gradient_norm": gradient_norm,
            "weight_gradient_norm": _total(gradients, weights)[0],
            "gradient_non_finite": gradient_non_finite,
            "weight_norm": weight_norm,
            "weight_non_finite": weight_non_finite,
            "update_to_weight": update_norm / weight_norm if weight_norm and update_norm is not None else None,
            "frozen": not any(p.requires_grad for p in own.values()) if own else None,
        }

    def histograms(self, own: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The histograms of these parameters before the step, by their names, and of their ``NAME_gradient``."""
        found = {name: self._histograms.get(id(p)) for name, p in own.items()}
        found |= {f"{name}_gradient": self._gradient_histograms.get(id(p)) for name, p in own.items()}
        return {name: histogram for name, histogram in found.items() if histogram is not None}

    def _measure_gradients(self) -> dict[int, _Size]:
        gradients = {key: p.grad for key, p in self._parameters.items() if p.grad is not None}
        sizes = _sizes(gradients)
        scale = (1.0 if self._scale is None else float(self._scale)) or 1.0
        if self.with_histograms:
            self._gradient_histograms = {
                key: edges_and_counts(histogram_of([gradient]), scale) for key, gradient in gradients.items()
            }
        return {key: (size / scale, non_finite) for key, (size, non_finite) in sizes.items()}


def _sizes(tensors: Mapping[int, Tensor]) -> dict[int, _Size]:
    norms = {key: norm(tensor) for key, tensor in tensors.items()}
    scalars = FetchedScalars(norms.values())
    return {
        key: (scalars[size], 0 if math.isfinite(scalars[size]) else count_non_finite(tensors[key]))
        for key, size in norms.items()
    }


def _total(sizes: Mapping[int, _Size], keys: Iterable[int]) -> _Size | tuple[None, None]:
    parts = [sizes[key] for key in dict.fromkeys(keys) if key in sizes]
    if not parts:
        return None, None
    return math.hypot(*(size for size, _ in parts)), sum(non_finite for _, non_finite in parts)
