"""The weights of a model around one step of its optimizer: their norms, their gradients, and how far they went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hookscope.training.reductions import DeferredScalars, count_non_finite, local, norm


@dataclass(slots=True)
class _Size:
    """The norm of a tensor, and how many of its values are not finite."""

    norm: float = 0.0
    non_finite: int = 0


def is_bias(name: str) -> bool:
    """Whether a parameter of that name shifts: ``bias``, ``bias_hh_l0``, ``in_proj_bias``.

    Example:
        >>> is_bias("in_proj_bias"), is_bias("weight")
        (True, False)
    """
    return "bias" in name.rpartition(".")[2]


class StepWeights:
    """Measures parameters just before a step and keeps copies of those that are no biases until it is over.

    Args:
        layers: The own parameters of each layer, by name.
        gradients: Whether the gradients are there already; a step with a closure makes them itself.
        scale: What the gradients are multiplied by still; None for 1.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad():
        ...     own = dict(layer.named_parameters()); _ = layer.weight.fill_(2.0)
        ...     weights = StepWeights([own], gradients=True)
        ...     _ = layer.weight.sub_(0.5); weights.step_is_done()
        >>> weights.figures(own)["weight_norm"], weights.figures(own)["update_to_weight"]
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
        self._gradients: dict[int, _Size] | None = None
        self._weights = _sizes(self._copies)
        if gradients:
            self._take_gradients()

    def step_is_done(self) -> None:
        """Measure how far the weights have gone, and let their copies go."""
        if self._gradients is None:
            self._take_gradients()
        for key, copy in self._copies.items():
            now = local(self._parameters[key].detach())
            if now.shape == copy.shape and now.device == copy.device:
                copy.sub_(now)
        self._updates = _sizes(self._copies)
        self._copies = {}

    def figures(self, own: Mapping[str, Tensor]) -> dict[str, Any]:
        """The figures of a layer with these parameters by their names in the log."""
        weights = [id(p) for name, p in own.items() if not is_bias(name)]
        weight = _together(self._weights, weights)
        update = _together(self._updates, weights)
        gradient = _together(self._gradients or {}, [id(p) for p in own.values()])
        ratio = update.norm / weight.norm if weight and update and weight.norm else None
        return {
            "gradient_norm": gradient and gradient.norm,
            "gradient_non_finite": gradient and gradient.non_finite,
            "weight_norm": weight and weight.norm,
            "weight_non_finite": weight and weight.non_finite,
            "update_to_weight": ratio,
            "frozen": not any(p.requires_grad for p in own.values()) if own else None,
        }

    def _take_gradients(self) -> None:
        gradients = {key: p.grad for key, p in self._parameters.items()}
        self._gradients = _sizes({key: gradient for key, gradient in gradients.items() if gradient is not None})
        scale = 1.0 if self._scale is None else float(self._scale)
        for size in self._gradients.values():
            size.norm /= scale or 1.0


def _sizes(tensors: Mapping[int, Tensor]) -> dict[int, _Size]:
    numbers, norms = DeferredScalars(), {key: norm(tensor) for key, tensor in tensors.items()}
    for each in norms.values():
        numbers.want(each)
    numbers.bring()
    return {key: _size(numbers[each], tensors[key]) for key, each in norms.items()}


def _size(value: float, tensor: Tensor) -> _Size:
    return _Size(value, 0 if math.isfinite(value) else count_non_finite(tensor))


def _together(sizes: Mapping[int, _Size], keys: Iterable[int]) -> _Size | None:
    found = [sizes[key] for key in dict.fromkeys(keys) if key in sizes]
    if not found:
        return None
    return _Size(math.hypot(*(each.norm for each in found)), sum(each.non_finite for each in found))
