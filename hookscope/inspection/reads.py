"""What the layers with weights read: which of its channels go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import as_float, class_names

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
    """What the convolutions and Linear layers of a model read, by the name of the layer."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules() if weights_of(module) is not None}
        self.moments: dict[str, InputMoments] = {}

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._names

    def update(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Add the input of a call."""
        name, values = self._names[module], args[0] if args else None
        if not isinstance(values, Tensor) or values.dim() < 2 or not values.numel():
            return
        axis = -1 if isinstance(module, nn.Linear) else 1
        rows = values.detach().movedim(axis, -1).flatten(0, -2)
        if name not in self.moments:
            channels = torch.arange(rows.shape[1])
            self.moments[name] = InputMoments(channels[:: -(-len(channels) // _CHANNELS)])
        self.moments[name].update(rows)


def weights_of(module: nn.Module) -> Tensor | None:
    """The weights ``(outputs, inputs, positions)`` of a convolution without groups or of a Linear layer."""
    convolves = "_ConvNd" in class_names(module) and not getattr(module, "transposed", False)
    weight = getattr(module, "weight", None)
    if not (convolves or isinstance(module, nn.Linear)) or getattr(module, "groups", 1) != 1:
        return None
    if not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.is_floating_point() or weight.is_meta:
        return None
    return weight.detach()[..., None].flatten(2)
