"""The zoo: small nets with weights set by hand, so that every expected number can be derived on paper."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def conv(weight: float, bias: float = 0.0) -> nn.Conv2d:
    """A convolution of one number: ``weight * x + bias``."""
    layer = nn.Conv2d(1, 1, 1)
    nn.init.constant_(layer.weight, weight)
    nn.init.constant_(layer.bias, bias)
    return layer


def chain(last: float = 5, inplace: bool = True) -> nn.Sequential:
    """On (1, -2): (2, -4), ReLU (2, 0), (-5, 1), ReLU (0, 1), (3, 3 + ``last``)."""
    return nn.Sequential(conv(2), nn.ReLU(inplace), conv(-3, 1), nn.ReLU(inplace), conv(last, 3))


def named(**layers: nn.Module) -> nn.Sequential:
    """Layers in a row, called by the keywords."""
    return nn.Sequential(OrderedDict(layers))


class Twice(nn.Module):
    """``3 * (3 * x)`` by one layer, called twice, that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv(3)
        self.twin = self.layer

    def forward(self, x: Tensor) -> Tensor:
        return self.twin(self.layer(x))


class Function(nn.Module):
    """``function(*inputs)``; with layers, which the keywords name, ``function(net, *inputs)``."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs) if self._modules else self.function(*args, **kwargs)


class Fails(nn.Module):
    """Passes its input on, but raises from the pass with this number on."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.passes = at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes >= self.at:
            raise RuntimeError("as planned")
        return x


def row(*values: float) -> Tensor:
    """An image of one row and one channel."""
    return torch.tensor(values, dtype=torch.float32).reshape(1, 1, 1, -1)


X = row(1, -2)
"""What `chain` is explained with."""


class PaddedConv(nn.Conv2d):
    """A convolution that pads in a layer of its own, as those of TensorFlow's models do."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.pad = nn.ZeroPad2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.pad(x))


class WithIdle(nn.Module):
    """Only ``idle`` does not run: ``list`` is no call, ``attention`` uses a layer that it holds by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.list = nn.Sequential(nn.ReLU(), nn.ReLU())
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.idle = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = x.flatten(2) + self.token
        for layer in self.list:
            tokens = layer(tokens)
        return self.attention(tokens, tokens, tokens)[0]
