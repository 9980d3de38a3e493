"""What the layers with weights read: which of its channels go together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import OPERATION, as_float, class_names
from hookscope.tracing import INPUT, Trace

_CHANNELS, _POSITIONS = 96, 256  # of a layer, and of one image: enough to see what goes together, and fast


@dataclass
class InputMoments:
    """Sums over what one layer read: of some ``channels``, at some positions of each image."""

    channels: Tensor
    count: int = 0
    total: Tensor | float = 0.0
    products: Tensor | float = 0.0

    def update(self, values: Tensor) -> None:
        """Add values ``(positions, channels)``."""
        step = max(1, len(values) // _POSITIONS)
        values = as_float(values[::step][:, self.channels.to(values.device)]).double().cpu()
        self.count += len(values)
        self.total = self.total + values.sum(0)
        self.products = self.products + values.T @ values

    def correlations(self) -> tuple[Tensor, Tensor]:
        """The channels that vary, and ``(C, C)`` their correlations."""
        mean = torch.as_tensor(self.total) / self.count
        covariance = torch.as_tensor(self.products) / self.count - mean[:, None] * mean
        spread = covariance.diagonal().clamp(min=0).sqrt()
        kept = (spread > 1e-6 * spread.max()).nonzero()[:, 0]
        spread = spread[kept]
        return self.channels[kept], covariance[kept][:, kept] / (spread[:, None] * spread)


class LayerInputs:
    """What the convolutions and Linear layers of a model read, by the name of the layer.

    A Linear layer that reads flattened maps, as the trace shows, reads their channels: ``weights`` are as `weights_of`
    returns them.
    """

    def __init__(self, model: nn.Module, traced: Trace) -> None:
        self._flattened = dict(_flattened(traced))
        self._names = {module: name for name, module in model.named_modules() if weights_of(module) is not None}
        self.moments: dict[str, InputMoments] = {}
        self.weights: dict[str, Tensor] = {}

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._names

    def update(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Add the input of a call."""
        name, values = self._names[module], args[0] if args else None
        if not isinstance(values, Tensor) or values.dim() < 2 or not values.numel():
            return
        weights, axis = weights_of(module), -1 if isinstance(module, nn.Linear) else 1
        assert weights is not None
        if name in self._flattened:
            sizes = self._flattened[name]
            axis = 1 if sizes[1] == -1 else -1
            values, weights = values.unflatten(-1, sizes), weights[..., 0].unflatten(1, sizes)
            weights = weights if axis == 1 else weights.transpose(1, 2)
        self.weights[name] = weights
        rows = values.detach().movedim(axis, -1).flatten(0, -2)
        if name not in self.moments:
            every = torch.arange(rows.shape[1])
            self.moments[name] = InputMoments(every[:: -(-len(every) // _CHANNELS)])
        self.moments[name].update(rows)


def _flattened(traced: Trace) -> Iterator[tuple[str, tuple[int, int]]]:
    """The Linear layers that read the values of maps in one row: channels times positions, or in the other order.

    One of the two is -1.
    """
    for call in traced.calls:
        layer = traced.layers[call.layer]
        if "Linear" not in layer.types or not isinstance(call.input_shape, tuple) or len(call.input_shape) != 2:
            continue
        shapes: list[tuple[int, ...]] = []
        at = call.reads
        while len(at) == 1 and at[0] != INPUT:  # the last maps that a layer made, and how they were turned
            maker = traced.calls[at[0]]
            shape, at = maker.output_shape, maker.reads
            if isinstance(shape, tuple) and len(shape) == 4 and math.prod(shape[1:]) == call.input_shape[1]:
                shapes.append(shape)
                if OPERATION not in traced.layers[maker.layer].name:
                    break
            elif shapes:
                break
        if shapes and shapes[-1][2] * shapes[-1][3] > 1:
            channels = shapes[-1][1]
            yield layer.name, (channels, -1) if shapes[0][1] == channels else (-1, channels)


def weights_of(module: nn.Module) -> Tensor | None:
    """The weights ``(outputs, inputs, positions)`` of a convolution without groups or of a Linear layer."""
    convolves = "_ConvNd" in class_names(module) and not getattr(module, "transposed", False)
    weight = getattr(module, "weight", None)
    if not (convolves or isinstance(module, nn.Linear)) or getattr(module, "groups", 1) != 1:
        return None
    if not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.is_floating_point() or weight.is_meta:
        return None
    return weight.detach()[..., None].flatten(2)
